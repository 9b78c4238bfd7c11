#!/usr/bin/env bash
# All 4 nodes of the hostfile from this one, by LAUNCHER=pdsh (default), openmpi, slurm, or no-ssh (then on each node with NODE_RANK).
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}" HOSTFILE="${HOSTFILE:-hostfile}"
hosts="$(awk '!/^#/ && NF {printf "%s%s", comma, $1; comma = ","}' "$HOSTFILE")"
export MASTER_ADDR="${MASTER_ADDR:-${hosts%%,*}}" MASTER_PORT="${MASTER_PORT:-29500}"
# Ranks that torchrun starts again must not meet at the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# The last 2,000 collectives of each rank are kept, so that a time-out names the rank that did not come.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
# And written when a collective times out.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
mkdir -p flight
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$PWD/flight/rank_}"
# Between nodes: InfiniBand.
# Stop where the InfiniBand libraries are missing and do not fall back to TCP.
export NCCL_NET="${NCCL_NET:-IB}"
# gloo takes the address that the host's own name stands for, on Debian 127.0.1.1: name the interface.
kit_interface() {
  local address; address="$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')"
  # On node 0 itself the name may stand for 127.0.1.1, and its own address is reached over lo.
  case "$address" in 127.*|"") address="$(hostname -I | awk '{print $1}')" ;; esac
  ip -o -4 addr show | awk -v a="$address/" 'index($4, a) == 1 {print $2; found = 1} END {exit !found}' ||
    ip -o route get "$address" | sed -nE 's/.* dev ([^ ]+) .*/\1/p'
}
if [ -z "${GLOO_SOCKET_IFNAME:-}" ] && command -v ip >/dev/null; then
  GLOO_SOCKET_IFNAME="$(kit_interface "$MASTER_ADDR")"; export GLOO_SOCKET_IFNAME
fi
# The launcher hands on NCCL*, PYTHON*, UCX*, MV2* and MLFLOW*; this file the rest, blank lines not allowed.
DS_ENV_FILE="$(mktemp)"; export DS_ENV_FILE
trap 'rm -f "$DS_ENV_FILE"' EXIT
for name in MASTER_ADDR MASTER_PORT TORCH_DISABLE_SHARE_RDZV_TCP_STORE PYTORCH_CUDA_ALLOC_CONF TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT NCCL_NET TORCH_NCCL_DEBUG_INFO_TEMP_FILE GLOO_SOCKET_IFNAME HF_HOME HF_HUB_OFFLINE LD_LIBRARY_PATH PATH TORCH_EXTENSIONS_DIR; do
  if [ -n "${!name:-}" ]; then printf '%s=%s\n' "$name" "${!name}"; fi
done > "$DS_ENV_FILE"
words=(--hostfile "$HOSTFILE" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
case "${LAUNCHER:-pdsh}" in
  pdsh) ;;
  # Without the interface DeepSpeed tells OpenMPI to use eth0, and cores are left to torch.
  openmpi)
    words+=(--launcher openmpi)
    words+=(--launcher_args "--mca btl_tcp_if_include ${GLOO_SOCKET_IFNAME:-eth0} --bind-to none") ;;
  slurm) words+=(--launcher slurm) ;;
  no-ssh) words+=(--no_ssh --node_rank "${NODE_RANK:?rank of this node, from 0}") ;;
  *) echo "error: LAUNCHER=$LAUNCHER: use pdsh, openmpi, slurm or no-ssh" >&2; exit 2 ;;
esac
"$PYTHON" -m deepspeed.launcher.runner "${words[@]}" rank.py . "$@"
