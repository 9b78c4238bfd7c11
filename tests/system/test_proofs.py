"""Every proof of ``tests/system`` that this machine can run ends with exit code 0; the others say what they lack."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.support.proofs import PROOFS, lacking, run

SYSTEM = {
    name: proof
    for name, proof in PROOFS.items()
    if "tests.system" in "".join(proof.commands) and "tests.support.proofs" not in "".join(proof.commands)
}
"""Those that run others are left out: the others are here."""
WRITES = r" --write( docs/\S+)?"
"""A test changes no page; ``make prove`` does."""

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("proofs")]


@pytest.mark.parametrize("name", SYSTEM)
def test_a_proof_holds(name: str) -> None:
    proof = SYSTEM[name]
    if lack := lacking(proof):
        pytest.skip(f"{name}: {lack}")
    commands = tuple(re.sub(WRITES, "", line) for line in proof.commands)
    assert run(dataclasses.replace(proof, commands=commands)) == 0, f"make prove NAME={name}"
