#!/usr/bin/env bash
# One CUDA GPU, offline, eight minutes: does every promise of a plan hold on this card?
#   benchmarks/gpu/run.sh                    writes one JSON and one Markdown file to benchmarks/results/
#   benchmarks/gpu/run.sh --minutes 30       more rows: what does not fit into the time is named as skipped
#   benchmarks/gpu/run.sh --device cpu       the same road with tiny shapes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-.venv/bin/python}"
# Nothing is downloaded, and nothing should try.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec "$PYTHON" -m benchmarks.gpu.run "$@"
