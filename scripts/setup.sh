#!/usr/bin/env bash
# Build .venv. Safe to repeat, also after an interruption: the stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $PYTHON is $("$PYTHON" --version 2>&1); kit needs Python 3.11 or newer: make setup PYTHON=python3.11" >&2
    exit 2
}
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "setup: creating .venv with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear .venv || {
        echo "error: $PYTHON cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
        exit 2
    }
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The distribution was called kit once, as another project on PyPI is; uninstalled later, it would take the command along.
.venv/bin/python -m pip uninstall --quiet --quiet --yes kit
# What an earlier install left here would hide the commands of add-ons that came later.
rm -rf kit.egg-info deepspeed_megatron_kit.egg-info
# torch comes first and alone: with its version settled, nothing that depends on it picks another build.
torch="$(grep '^torch==' constraints.txt)"
echo "setup: installing $torch"
.venv/bin/python -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
echo "setup: installing kit and the engines"
.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[all,test]'
touch .venv/.complete
echo "setup: done"
