#!/usr/bin/env bash
# llama-3-70b on dgx-h100: the same command on each of 4 nodes, and on spares.
# Arguments go to the worker: --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
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
# One node's address and a port, the same on all; and a name, so that two runs do not meet.
: "${RDZV_ENDPOINT:?host:port of one node, the same on all}"
RDZV_ID="${RDZV_ID:-$(basename "$PWD")}" MASTER_ADDR="${RDZV_ENDPOINT%:*}"
# The run goes on with so few nodes; these keep the global batch, are legal and fit.
MIN_NODES="${MIN_NODES:-4}" LEGAL_NODES="4"
if [[ ! "$MIN_NODES" =~ ^[0-9]+$ || " $LEGAL_NODES " != *" $MIN_NODES "* ]]; then
  echo "error: MIN_NODES=$MIN_NODES: the plan keeps its global batch on $LEGAL_NODES nodes" >&2
  exit 2
fi
if [ "$MIN_NODES" -lt 4 ]; then set -- --min-nodes "$MIN_NODES" "$@"; fi
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
exec "$PYTHON" -m kit.training.interruptible -m torch.distributed.run --nproc-per-node 8 --nnodes "$MIN_NODES:4" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" --max-restarts "${MAX_RESTARTS:-3}" -m kit.training . --resume auto "$@"
