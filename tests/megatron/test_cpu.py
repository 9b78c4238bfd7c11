"""The CPU patches: one table, installed on demand, and nothing else in the engine asks for the device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kit.engines.megatron

PACKAGE = Path(kit.engines.megatron.__file__).parent

IMPORT_ONLY = """
import pkgutil
import torch
before = {**vars(torch.cuda)}, {**vars(torch.Tensor)}
import megatron.core.tensor_parallel.random as tracker
states = tracker._get_cuda_rng_state, tracker._set_cuda_rng_state
import kit.engines.megatron.cpu, kit.engines.megatron.engine
changed = [name for name, value in before[0].items() if vars(torch.cuda).get(name) is not value]
changed += [name for name, value in before[1].items() if vars(torch.Tensor).get(name) is not value]
assert not changed, changed
assert states == (tracker._get_cuda_rng_state, tracker._set_cuda_rng_state)
assert torch.ones(1).type() == "torch.FloatTensor"
kit.engines.megatron.cpu.install()
kit.engines.megatron.cpu.install()  # twice is once
for patch in kit.engines.megatron.cpu.PATCHES:
    owner, _, name = patch.symbol.rpartition(".")
    assert getattr(pkgutil.resolve_name(owner), name) is patch.replacement
assert torch.ones(1, device="cuda").device.type == "cpu"
assert torch.ones(1).to("cuda:0").type() == "torch.cuda.FloatTensor"
assert torch.ones(1).type(torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
"""


@pytest.mark.nightly
def test_importing_leaves_torch_alone_and_installing_replaces_every_row():
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORT_ONLY], check=True, timeout=120)


def test_every_patch_is_of_a_symbol_that_the_installed_version_calls():
    """It fails once megatron-core no longer needs a patch for this symbol in the file that the row names."""
    from importlib.metadata import version

    import megatron.core

    from kit.engines.megatron.cpu import PATCHES
    from kit.preflight.versions import LEGS

    assert version("megatron-core") in {leg["packages"]["megatron-core"] for leg in LEGS.values()}
    for patch in PATCHES:
        owner, _, name = patch.symbol.rpartition(".")
        calls = {"torch.cuda": re.escape(patch.symbol) + r"\(", "torch.Tensor": rf"\.{name}\(\)"}
        call = calls.get(owner, rf"(?<!def ){name}\(")
        for file in patch.needed_by.split(", "):
            code = re.sub("#.*", "", Path(megatron.core.__file__).parent.joinpath(file).read_text())
            assert re.search(call, code), (patch.symbol, file)


def test_no_other_module_asks_what_it_runs_on():
    asking = re.compile(r"is_cuda|device.*==|\"cpu\"|'cpu'|backend")
    lines = {path.name: path.read_text().splitlines() for path in PACKAGE.rglob("*.py") if path.name != "cpu.py"}
    assert [(name, line) for name in lines for line in lines[name] if asking.search(line)] == []
