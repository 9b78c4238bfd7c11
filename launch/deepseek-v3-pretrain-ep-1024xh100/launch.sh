#!/usr/bin/env bash
# deepseek-v3 on dgx-h100: megatron, 1024 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
# Kernels start in the order they were issued, so that collectives overlap with the matmul before them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# 128 nodes: set these on each, or let slurm.sbatch do it.
: "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"
MASTER_PORT="${MASTER_PORT:-29500}"
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 8 --nnodes 128 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m kit.training . "$@"
