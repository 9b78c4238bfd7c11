"""The road to a machine without a network: packages from a folder, before those that are installed there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

STUB = """#!/bin/sh
[ "$2" = pip ] && exec {python} "$@"
exec {python} -c "import carried, sys; print(carried.__file__, sys.argv[1:])" "$@"
"""
"""In place of Python: pip is real, and instead of the benchmark a program that needs what was carried."""


def run(folder, program, *words):
    environment = os.environ | {"WHEELS": str(folder), "PYTHON": str(program), "PYTHONPATH": ""}
    command = ["bash", str(ROOT / "benchmarks/gpu/run.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_packages_are_taken_from_a_folder(tmp_path):
    about = "carried-1.0.dist-info"
    files = {
        "carried.py": "",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    program = tmp_path / "python"
    program.write_text(STUB.format(python=shlex.quote(sys.executable)))
    program.chmod(0o700)
    for _ in range(2):  # the second time it lies there
        done = run(tmp_path, program, "--minutes", "3")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path}/installed/carried.py")
        assert "'benchmarks.gpu.run', '--minutes', '3'" in done.stdout


def carried():
    listed = re.search(r"names=\(([^)]*)\)", (ROOT / "benchmarks/gpu/wheels.sh").read_text())
    assert listed is not None
    return {canonicalize_name(name) for name in [*listed.group(1).split(), "deepspeed"]}


def needed(names):
    """These packages and all that they require, on the other machine."""
    found = set()
    while names:
        found |= names
        lines = [line for name in names for line in metadata.requires(name) or []]
        environment = {"extra": "", "python_version": "3.12", "platform_machine": "x86_64"}
        wanted = (each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(environment))
        names = {canonicalize_name(each.name) for each in wanted} - found
    return found


def test_every_wheel_has_a_tested_version():
    """wheels.sh stops where a name is not in constraints.txt; here without a network."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if "==" in line}
    assert carried() <= pinned
    assert "megatron-core" in carried()


def test_nothing_that_a_wheel_needs_is_missing():
    """pip installs the folder without asking what its packages need. A machine that has torch has what torch needs, and
    numpy; of another program's packages it may have other versions."""
    assert needed(carried()) - needed({"torch", "numpy"}) <= carried()
