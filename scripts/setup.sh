#!/usr/bin/env bash
# Build the environment of a leg of kit/preflight/versions.json: .venv of main, .venv-LEG of another.
# Safe to repeat, also after an interruption: the stamp is written last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
LEG="${LEG:-main}"
VENV=.venv
[ "$LEG" = main ] || VENV=".venv-$LEG"

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $PYTHON is $("$PYTHON" --version 2>&1); kit needs Python 3.11 or newer: make setup PYTHON=python3.11" >&2
    exit 2
}
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    echo "setup: creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV" || {
        echo "error: $PYTHON cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
        exit 2
    }
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
# The distribution was called kit once, as another project on PyPI is; uninstalled later, it would take the command along.
"$VENV/bin/python" -m pip uninstall --quiet --quiet --yes kit
# What an earlier install left here would hide the commands of add-ons that came later.
rm -rf kit.egg-info deepspeed_megatron_kit.egg-info
"$VENV/bin/python" scripts/leg.py "$LEG" >"$VENV/constraints.txt"
# torch comes first and alone: with its version settled, nothing that depends on it picks another build.
torch="$(grep '^torch==' "$VENV/constraints.txt")"
echo "setup: installing $torch"
"$VENV/bin/python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
echo "setup: installing kit and the engines"
"$VENV/bin/python" -m pip install --quiet --constraint "$VENV/constraints.txt" --editable '.[all,test]'
touch "$VENV/.complete"
echo "setup: done"
