#!/usr/bin/env bash
# All 8 nodes of the hostfile from this one, by pdsh.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}" HOSTFILE="${HOSTFILE:-hostfile}"
hosts="$(awk '!/^#/ && NF {printf "%s%s", comma, $1; comma = ","}' "$HOSTFILE")"
export MASTER_ADDR="${MASTER_ADDR:-${hosts%%,*}}" MASTER_PORT="${MASTER_PORT:-29500}"
# Nothing of this shell's environment is sent by itself; what is set here is sent too.
command="cd $(printf %q "$PWD") && exec env NODE_RANK=%n"
for name in PYTHON PYTHONPATH MASTER_ADDR MASTER_PORT TORCH_DISABLE_SHARE_RDZV_TCP_STORE CUDA_DEVICE_MAX_CONNECTIONS PYTORCH_CUDA_ALLOC_CONF TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT NCCL_NET TORCH_NCCL_DEBUG_INFO_TEMP_FILE GLOO_SOCKET_IFNAME HF_HOME HF_HUB_OFFLINE LD_LIBRARY_PATH PATH TORCH_EXTENSIONS_DIR; do
  if [ -n "${!name:-}" ]; then command+=" $name=$(printf %q "${!name}")"; fi
done
command+=" ./launch.sh"
for word in "$@"; do command+=" $(printf %q "$word")"; done
exec pdsh -S -R ssh -w "$hosts" "$command"
