#!/usr/bin/env bash
# The parity suite of the Megatron engine on Python 3.12 and megatron-core 0.19, in an environment of its own (.venv312).
#   PYTHON=…        interpreter, 3.12 or newer          TORCH_INDEX=…   index to take torch from, as in scripts/setup.sh
# Words after the script's name go to pytest instead of tests/megatron.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3.12}"
VENV=.venv312

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "error: $PYTHON is not Python 3.12 or newer, which megatron-core 0.19 needs; name one: PYTHON=/path/to/python3.12" >&2
    exit 2
}
if [ ! -e "$VENV/.complete" ]; then
    "$PYTHON" -m venv --clear "$VENV"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    "$VENV/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
    # The same versions as everywhere, megatron-core excepted.
    grep -v '^megatron-core==' constraints.txt >"$VENV/constraints.txt"
    "$VENV/bin/python" -m pip install --quiet --constraint "$VENV/constraints.txt" \
        --editable '.[torch,deepspeed,data,demo,lora,test]' 'megatron-core>=0.19,<0.20' 'emerging-optimizers>=0.3,<0.4'
    touch "$VENV/.complete"
fi
"$VENV/bin/python" -c 'import sys, megatron.core as m; print(f"Python {sys.version.split()[0]}, megatron-core {m.__version__}")'
words=("$@")
[ "${#words[@]}" -gt 0 ] || words=(tests/megatron)
"$VENV/bin/python" -m pytest "${words[@]}"
