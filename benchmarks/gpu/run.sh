#!/usr/bin/env bash
# One CUDA GPU, offline, eight minutes: does every promise of a plan hold on this card?
#   benchmarks/gpu/run.sh                    writes one JSON and one Markdown file to benchmarks/results/
#   benchmarks/gpu/run.sh --minutes 30       more rows: what does not fit into the time is named as skipped
#   benchmarks/gpu/run.sh --device cpu       the same road with tiny shapes
#   WHEELS=folder benchmarks/gpu/run.sh      packages that this machine lacks, from benchmarks/gpu/wheels.sh
set -euo pipefail
PYTHON="${PYTHON:-.venv/bin/python}"
if [ -n "${WHEELS:-}" ]; then
    # Before what is installed, which stays as it is; kept in the folder for the next run.
    site="$(realpath "$WHEELS")/installed"
    [ -d "$site" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    export PATH="$PATH:$site/bin" # ninja, where the machine has none
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# Nothing is downloaded, and nothing should try.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
exec "$PYTHON" -m benchmarks.gpu.run "$@"
