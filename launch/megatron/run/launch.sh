#!/usr/bin/env bash
# llama-3-70b on dgx-h100: megatron, 64 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N, --profile 5-8.
# Nsight Systems: nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop -o nsight ./launch.sh --profile 5-8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
# Ranks that torchrun starts again must not meet at the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
# Kernels start in the order they were issued, so that collectives overlap with the matmul before them.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
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
# 8 nodes: set these on each, or let slurm.sbatch do it.
: "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"
MASTER_PORT="${MASTER_PORT:-29500}"
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
exec "$PYTHON" -m kit.training.interruptible -m torch.distributed.run --nproc-per-node 8 --nnodes 8 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m kit.training . "$@"
