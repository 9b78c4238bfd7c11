#!/usr/bin/env bash
# Three minutes on one CUDA GPU, offline: does a 1B plan keep its promises on each engine?
#   benchmarks/gpu/smoke.sh                  on the GPU; writes one JSON to benchmarks/results/
#   benchmarks/gpu/smoke.sh --device cpu     the same road with tiny shapes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
# Nothing is downloaded, and nothing should try.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec "$PYTHON" -m benchmarks.gpu.smoke "$@"
