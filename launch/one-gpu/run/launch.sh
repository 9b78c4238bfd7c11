#!/usr/bin/env bash
# llama-3.1-8b on workstation-rtx-4090: torch, 1 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N, --profile 5-8.
# Nsight Systems: nsys profile --trace=cuda,nvtx,osrt --capture-range=cudaProfilerApi --capture-range-end=stop -o nsight ./launch.sh --profile 5-8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
exec "$PYTHON" -m kit.training . "$@"
