#!/usr/bin/env bash
# llama-3.2-1b on dgx-h100: torch, 8 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 8 --standalone -m kit.training . "$@"
