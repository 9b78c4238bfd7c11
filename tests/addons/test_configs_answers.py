"""What ``kit plan`` says of another trainer's file: verdict, findings, the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.addons.configs.answer import answer
from kit.addons.configs.text import _rows, text_of
from kit.errors import SpecError
from kit.report.view import by_component
from tests.addons.config_files import AXOLOTL, MEGATRON_SWIFT, REGISTRY, TIGHT
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal


def test_rows_that_are_not_packed_are_a_worst_case(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL.replace("sample_packing: true", "sample_packing: false"))
    packed = answer(file("packed.yaml", AXOLOTL), "1xH100", row_tokens=256)
    assert (packed.worst_case, packed.plan.job.seq_length) == (False, 4096)
    worst, usual = answer(path, "1xH100"), answer(path, "1xH100", row_tokens=256)
    assert (worst.worst_case, worst.bound, worst.plan.job.seq_length) == (True, "most", 4096)
    assert (usual.worst_case, usual.bound, usual.plan.job.seq_length) == (False, None, 256)
    assert usual.now.peak_gib < worst.now.peak_gib
    assert answer(path, "1xH100", row_tokens=9000).plan.job.seq_length == 4096


PAGED = "base_model: Qwen/Qwen3-8B\noptimizer: paged_adamw_8bit\ngradient_checkpointing: true\nsample_packing: true\n"
IN_HOST = (
    "base_model: {}\nbf16: true\ngradient_accumulation_steps: 3\ngradient_checkpointing: true\nsample_packing: true\n"
    "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json\n"
)
LARGER = AXOLOTL.replace("size: 2", "size: 4")
VERDICTS = {
    (LARGER, "1xRTX-4090"): ("does not fit", 1, None),
    (LARGER + "chunked_cross_entropy: true\n", "1xRTX-4090"): ("may fit", 1, "most"),
    (LARGER + "lora_modules_to_save: [lm_head]\n", "1xRTX-4090"): ("does not fit", 1, "least"),
    (LARGER, "1xH200"): ("fits", 0, None),
    (LARGER + "chunked_cross_entropy: true\n", "1xH200"): ("fits", 0, "most"),
    (LARGER + "lora_modules_to_save: [lm_head]\n", "1xH200"): ("may not fit", 1, "least"),
    (PAGED, "1xRTX-4090"): ("may fit", 1, None),  # pages leave the GPU where they must
    (PAGED, "1xH200"): ("fits", 0, None),
    # 18 bytes a parameter, and half more of pinned blocks, in nine tenths of 953 GiB
    (IN_HOST.format("Qwen/Qwen3-32B"), "8xA100-40"): ("fits", 0, None),
    (IN_HOST.format("Qwen/Qwen2.5-72B"), "8xA100-40"): ("does not fit", 1, None),
    # Shorter rows would leave the host as full.
    (IN_HOST.format("Qwen/Qwen2.5-72B").replace("sample_packing: true\n", ""), "8xA100-40"): (
        "does not fit",
        1,
        "most",
    ),
}
"""Text and GPUs → verdict, exit code, bound."""


@pytest.mark.parametrize("case", VERDICTS, ids=str)
def test_a_bound_is_never_called_a_fit(file: Callable[[str, str], Path], case: tuple[str, str]) -> None:
    found = answer(file("axolotl.yaml", case[0]), case[1])
    assert (found.verdict, found.exit_code, found.bound) == VERDICTS[case]
    said = dict(_rows(found))
    assert ("fits with" in said) == (not found.now.fits)
    host = "it needs 1,828 GiB of every node's own memory, of which 858 are usable"
    assert (host in said["verdict"]) == ("72B" in case[0])


def test_the_fullest_stage_is_told_and_no_word_is_cut(file: Callable[[str, str], Path]) -> None:
    stages = MEGATRON_SWIFT.replace("_parallel_size 2", "_parallel_size 2 --pipeline_model_parallel_size 2")
    found = answer(file("train.sh", stages), "8xH100")
    fullest = max(found.plan.predicted.memory, key=lambda stage: stage.peak_gib)
    parts = " · ".join(f"{name} {gib:.1f}" for name, (gib,) in by_component([fullest]).items())
    assert dict(_rows(found))["GiB"] == parts
    assert "expert_model_parallel_size" in text_of(found, (), 30, str)


MISSPELT = {
    "axolotl.yaml": (
        AXOLOTL + "sequense_len: 8192\nwandb_project: mine\n", 19, "sequense_len", "did you mean sequence_len?",
    ),
    "registry.py::llama_8b": (
        REGISTRY.replace("steps=1000", "max_steps=1000"), 22, "training.max_steps", "did you mean training.steps?",
    ),
}  # fmt: skip
"""File → its text; of the word that its program has not the line, the key and what to do."""


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_key_is_found(file: Callable[[str, str], Path], name: str) -> None:
    text, *said = MISSPELT[name]
    file(name.partition("::")[0], text)
    (finding,) = answer(Path(name), "8xH100").findings
    assert [finding.rule, finding.line, finding.key, finding.fix] == ["unknown-key", *said]


def test_the_command(file: Callable[[str, str], Path]) -> None:
    path = str(file("axolotl.yaml", AXOLOTL))
    said = kit_main("plan", path, "--gpus", "2xH200")
    words = ("axolotl.yaml: axolotl's, as it is", "verdict   fits", "GiB       weights", "micro-batch 2 × 3")
    assert [text for text in words if text not in said.out] == [], said
    data = json.loads(kit_main("plan", path, "--gpus", "2xH200", "--json").out)
    assert (data["verdict"], data["bound"], data["gaps"], data["findings"]) == ("fits", None, [], [])
    assert data["plan"]["layout"]["dp"] == 2
    big = str(file("big.yaml", TIGHT["axolotl.yaml"][0]))
    # A bar is not longer than the GPU.
    assert max(map(len, f"{said.out}{kit_main('plan', big, '--gpus', '2xRTX-4090').out}".splitlines())) <= 110
    patch = kit_main("plan", big, "--gpus", "2xRTX-4090", "--patch")
    assert patch.code == 0
    assert patch.out.startswith("--- a/big.yaml\n+++ b/big.yaml\n")
    assert re.search(r"^-micro_batch_size: 16$", patch.out, re.M)


def test_the_command_that_is_printed_patches_a_file_in_another_folder(
    file: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = str(file("a b.yaml", TIGHT["axolotl.yaml"][0]).resolve())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = kit_main("plan", big, "--gpus", "2xRTX-4090").out
    typed = re.sub(r"\s+", " ", said[said.index("next ") + 4 :].replace("kit plan", f"{sys.executable} -m kit plan", 1))
    subprocess.run(typed, shell=True, check=True)
    assert kit_main("plan", big, "--gpus", "2xRTX-4090").code == 0


def test_what_the_command_refuses(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL)
    assert "--gpus 8xH100" in refusal(SpecError, answer, path, None)
    for words, why in (
        ((str(path),), "--gpus is missing"),
        (("qwen3-8b", "--gpus", "8xH100", "--patch"), "are of another trainer's file"),
        (("qwen3-8b", "--gpus", "8xH100", "--row-tokens", "8"), "are of another trainer's file"),
    ):
        assert why in kit_refusal(["plan", *words])
