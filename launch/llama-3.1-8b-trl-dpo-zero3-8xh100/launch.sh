#!/usr/bin/env bash
# llama-3.1-8b on dgx-h100: deepspeed, 8 processes.
# Arguments go to the worker: --resume auto|PATH, --stop-at-step N.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python}"
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
exec "$PYTHON" -m accelerate.commands.launch --config_file accelerate.yaml --module kit.training . "$@"
