"""torchtitan's TOML files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.answer import answer
from kit.addons.configs.reading import source_of
from kit.cli.options import reader_of
from kit.cost.memory.peak import peak_memory
from kit.errors import SpecError
from kit.specs.layout import DEFAULTS
from tests.addons.config_files import TITAN, changed, decided, read
from tests.support.refusals import refusal

PLAIN = {"engine": "torch", "implementation": "huggingface", "dp": 8, "zero_stage": 3, "recompute": "selective"}
SPREAD = "data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1"


def test_the_file_as_it_is(file: Callable[[str, str], Path]) -> None:
    path = file("llama3_8b.toml", TITAN.replace("size = 1", "size = 2"))
    assert reader_of(str(path)) is not None
    found = read(path)
    assert changed(found) == PLAIN | {"micro_batch_size": 2}
    assert decided(found) == ("llama-3.1-8b", 8192, 16, "pretrain", "bf16", "adamw", True, ())
    # fp32 weights and moments on 8 GPUs; logits in 16 bits and in fp32, and as much for their gradients. For each token
    # and layer in 16 bits: its input, query, value, gate, down and attention's result; attention's log-sum-exp in fp32
    parts, tokens, gib = peak_memory(found.workload)[0].components_gib, 2 * 8192, 2**30
    assert parts["weights"] + parts["optimizer"] == pytest.approx(12 * 8.03e9 / 8 / gib, rel=0.002)
    assert parts["logits"] == pytest.approx(12 * tokens * 128256 / gib, rel=0.002)
    layer = 2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32
    assert parts["activations"] == pytest.approx(32 * layer * tokens / gib, rel=0.03)


@pytest.mark.parametrize(("gpus", "stated"), [("8xH100", 82.4), ("16x8xH100", 67.0)])
def test_beside_what_torchtitan_states(file: Callable[[str, str], Path], gpus: str, stated: float) -> None:
    """benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: what the allocator reserved, on 96 GB."""
    found = read(file("llama3_8b.toml", TITAN.replace("size = 1", "size = 2")), gpus)
    assert 0.83 * stated < found.peak_gib < stated


FULL = TITAN.replace('"selective"', '"full"')
DECIDES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str, int]]]] = {
    "replicas": (
        TITAN.replace(SPREAD, SPREAD.replace("= -1", "= 1").replace("= 1\n", "= 8\n", 1)), {"zero_stage": 0}, [],
    ),
    "kept": (TITAN.replace("tensor_par", 'fsdp_reshard_after_forward = "never"\ntensor_par'), {"zero_stage": 2}, []),
    "full": (FULL, {"recompute": "full"}, []),
    "every layer": (TITAN.replace('"op"', '"1"'), {"recompute": "full"}, []),
    "accumulated": (
        TITAN.replace("seq_len", "global_batch_size = 32\nseq_len"), {"gradient_accumulation_steps": 4}, [],
    ),
    "rows by default": (TITAN.replace("local_batch_size = 1\n", ""), {"micro_batch_size": 8}, []),
    "16 bits": (TITAN.replace("seq_len", 'dtype = "bfloat16"\nseq_len'), {"optimizer_state_dtype": "bf16"}, []),
    "host": (
        TITAN.replace("seq_len", "enable_cpu_offload = true\nseq_len"),
        {"offload_param": "cpu", "offload_optimizer": "cpu"}, [],
    ),
    "until 0.1": (TITAN.replace("local_batch_size = 1", "batch_size = 3"), {"micro_batch_size": 3}, []),
    "hybrid": (
        TITAN.replace(SPREAD, SPREAD.replace("= 1", "= 2")),
        {}, [("least", "parallelism.data_parallel_shard_degree", 19)],
    ),
    "tensors": (
        FULL.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 4"),
        {"recompute": "full", "tp": 4, "dp": 2}, [("most", "parallelism.tensor_parallel_degree", 20)],
    ),
    "context": (
        FULL.replace("tensor_par", "context_parallel_degree = 2\ntensor_par"),
        {"recompute": "full", "cp": 2, "dp": 4, "cp_comm_type": "p2p"},
        [("least", "parallelism.context_parallel_rotate_method", 0)],
    ),
    "every second layer": (
        TITAN.replace('"op"', "2"),
        {"recompute": "none"}, [("most", "activation_checkpoint.selective_ac_option", 28)],
    ),
    "compiled until 0.1": (
        TITAN.replace('"selective"', '"none"').replace("seq_len", "compile = true\nseq_len"),
        {"recompute": "none", "compile_layers": True}, [("most", "training.compile", 13)],
    ),
    "loss": (
        TITAN.replace('enable=false\ncomponents = ["model", ', "enable=true\ncomponents = ["),
        {}, [("most", "compile.components", 24)],
    ),
}  # fmt: skip
"""Text → fields that differ from ``PLAIN``; bound, key and line of what is left out."""


@pytest.mark.parametrize("case", DECIDES)
def test_what_a_key_decides(file: Callable[[str, str], Path], case: str) -> None:
    text, fields, gaps = DECIDES[case]
    found = read(file("titan.toml", text))
    assert changed(found) == {name: value for name, value in (PLAIN | fields).items() if value != DEFAULTS[name]}
    assert [(gap.bound, gap.key, gap.line) for gap in found.gaps] == gaps


REFUSED = {
    "pipeline": (
        "tensor_par",
        "pipeline_parallel_degree = 4\ntensor_par",
        "20: parallelism.pipeline_parallel_degree=4: ",
    ),
    "flux": ('"llama3"\nflavor = "8B"', '"flux"\nflavor = "dev"', "3: model.flavor=flux dev: a diffusion model"),
    "tests' own": ('"8B"', '"debugmodel"', "model.flavor=llama3 debugmodel: a model for tests"),
    "no such": ('"8B"', '"9B"', "model.flavor=llama3 9B: kit knows llama3 8B"),
    "mx": ('# converters = ["float8"]', 'converters = ["quantize.linear.mx"]', "linear.mx']: MXFP8"),
    "rows": ("size = 1", "size = 1.5", "training.local_batch_size=1.5: a whole number"),
    "no model": ('flavor = "8B"\n', "", "the file names no model"),
    "no TOML": ("size = 1", "size = one", "titan.toml: Invalid value (at line 12"),
    "twice": ("seq_len", "local_batch_size = 2\nseq_len", "titan.toml: Cannot overwrite a value (at line 13"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_answer(file: Callable[[str, str], Path], case: str) -> None:
    before, after, said = REFUSED[case]
    assert said in refusal(SpecError, read, file("titan.toml", TITAN.replace(before, after)))


def test_fp8_by_its_converter(file: Callable[[str, str], Path]) -> None:
    text = TITAN.replace("# conv", "conv").replace("enable=false", "enable=true").replace('"selective"', '"none"')
    found = read(file("titan.toml", text))
    assert (found.workload.job.precision, found.workload.layout.compile_layers) == ("fp8", True)


def test_a_typo_has_its_line(file: Callable[[str, str], Path]) -> None:
    text = TITAN.replace("seq_len", "seq_length").replace("[compile]", "[compiler]")
    found = [each for each in answer(file("titan.toml", text), "8xH100").findings if each.rule == "unknown-key"]
    assert [(each.line, each.key) for each in found] == [
        (13, "training.seq_length"), (23, "compiler.enable"), (24, "compiler.components"),
    ]  # fmt: skip
    assert found[0].fix == "did you mean training.seq_len?"
    assert answer(file("good.toml", TITAN), "8xH100").findings == ()


def test_values_have_the_places_of_their_own_text() -> None:
    text = 'a.b = 1\n[training] # t\nx = "a # b" # c\ny=-1\nz = """\nw = 3"""\n[parallelism]\nq = {r = 2}\ns = [\n 1]\n'
    source, _ = source_of(text, "a.toml")
    places = {key: (entry.value, entry.line, text[entry.start : entry.end]) for key, entry in source.entries.items()}
    assert places == {
        "a.b": (1, 1, "1"), "training.x": ("a # b", 3, '"a # b"'), "training.y": (-1, 4, "-1"),
        "training.z": ("w = 3", 5, ""), "parallelism.q.r": (2, 0, ""), "parallelism.s": ([1], 9, ""),
    }  # fmt: skip


def test_fewer_rows_at_a_time_keep_the_rows_of_a_step(file: Callable[[str, str], Path]) -> None:
    """Without ``global_batch_size`` a smaller micro batch would be a smaller step."""
    found = answer(file("titan.toml", TITAN.replace("size = 1", "size = 2")), "8xA100-40")
    assert found.fastest is not None
    assert found.fastest.values == {
        "activation_checkpoint.mode": "full", "training.local_batch_size": 1, "training.global_batch_size": 16,
    }  # fmt: skip
    assert found.fastest.described.workload.layout.gradient_accumulation_steps == 2


SCRIPTS = {
    "run_train.sh": 'NGPU=4 CONFIG_FILE="./titan.toml" ./run_train.sh --training.local_batch_size 2 {}\n',
    "torchrun": "torchrun --nproc_per_node=4 -m torchtitan.train --job.config_file titan.toml "
    "--training.local_batch_size=2 {}\n",
}


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_command_overrules_the_file_that_it_names(file: Callable[[str, str], Path], case: str) -> None:
    file("titan.toml", TITAN)
    path = file("train.sh", SCRIPTS[case].format("--training.enable_cpu_offload"))
    found = read(path, "4xH100")
    own = {"dp": 4, "micro_batch_size": 2, "offload_param": "cpu", "offload_optimizer": "cpu"}
    assert changed(found) == PLAIN | own
    assert (found.workload.job.seq_length, found.notes) == (8192, ())
    assert read(path).notes == ("the file starts 4 processes, and --gpus 8xH100 has 8 GPUs: judged on 4",)


def test_a_change_of_a_command_is_its_flags(file: Callable[[str, str], Path]) -> None:
    file("titan.toml", TITAN)
    patch = answer(file("train.sh", SCRIPTS["torchrun"].format("")), "4xA100-40").patch
    assert [line.strip() for line in patch.splitlines() if line.startswith("+ ")] == [
        "+    --activation_checkpoint.mode full \\", "+    --training.enable_cpu_offload",
    ]  # fmt: skip
