#!/usr/bin/env bash
# llama-3.1-8b on dgx-h100: torch, 8 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N, --profile 5-8.
# Nsight Systems: nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop -o nsight ./launch.sh --profile 5-8
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
exec "$PYTHON" -m kit.training.interruptible -m torch.distributed.run --nproc-per-node 8 --standalone -m kit.training . "$@"
