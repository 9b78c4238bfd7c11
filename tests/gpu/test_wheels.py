"""The road to a machine without a network: packages from a folder, before those that are installed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile

from benchmarks.gpu.run import ROOT

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
    wheel = tmp_path / "carried-1.0-py3-none-any.whl"
    about = "carried-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carried.py", "")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    program = tmp_path / "python"
    program.write_text(STUB.format(python=sys.executable))
    program.chmod(0o700)
    for _ in range(2):  # the second time it lies there
        done = run(tmp_path, program, "--minutes", "3")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{tmp_path}/installed/carried.py")
        assert "'benchmarks.gpu.run', '--minutes', '3'" in done.stdout


def test_every_wheel_has_a_tested_version():
    """wheels.sh stops where a name is not in constraints.txt; here without a network."""
    text = (ROOT / "benchmarks/gpu/wheels.sh").read_text()
    listed = re.search(r"names=\(([^)]*)\)", text)
    assert listed is not None
    names = [*listed.group(1).split(), "deepspeed"]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    assert "megatron-core" in names
    assert not [name for name in names if name.lower() not in pinned]
