"""Python registries, torchtitan's: their functions are followed in their text, and never run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kit.addons.configs.answer import Answer, answer, reads_back
from kit.addons.configs.entries import Unresolved
from kit.addons.configs.python_entries import read_python
from kit.addons.configs.reading import source_of
from kit.cli.options import reader_of
from kit.cost.memory.activations_huggingface import loss_bytes
from kit.errors import SpecError
from kit.specs.layout import DEFAULTS
from tests.addons.config_files import REGISTRY, changed, decided, read
from tests.support import ROOT
from tests.support.refusals import refusal

PLAIN = {"engine": "torch", "implementation": "huggingface", "dp": 8, "zero_stage": 3}
EIGHT = "registry.py::llama_8b"
SILENT = """\
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

def qwen():
    return Trainer.Config(model_spec=model_registry("0.6B"))
"""


def values(text: str, name: str = "a.py") -> dict[str, Any]:
    return {key: entry.value for key, entry in read_python(text, name).entries.items()}


def test_the_function_as_it_is(file: Callable[[str, str], Path]) -> None:
    file("registry.py", REGISTRY)
    assert reader_of(EIGHT) is not None
    found = read(Path(EIGHT))
    # 2 · 8192 tokens in rows of 8192; a step of 32 rows on 8 GPUs is 2 micro batches
    own = {"recompute": "selective", "chunked_loss": True, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    assert changed(found) == PLAIN | own
    assert decided(found) == ("llama-3.1-8b", 8192, 32, "pretrain", "bf16", "adamw", True, ())


def test_what_a_function_does_not_say(file: Callable[[str, str], Path]) -> None:
    """torchtitan b5bcd76c, config/configs.py: 16384 tokens (line 37) of 2048 a row (51), one micro batch a step (43),
    mixed precision in bfloat16 (94), all ranks shard (133); trainer.py: SelectiveAC (activation_checkpoint)."""
    found = read(file("registry.py", SILENT))
    assert changed(found) == PLAIN | {"recompute": "selective", "micro_batch_size": 8}
    assert decided(found) == ("qwen3-0.6b", 2048, 64, "pretrain", "bf16", "adamw", True, ())


def test_logits_of_a_loss_in_chunks(file: Callable[[str, str], Path]) -> None:
    """components/loss.py, ChunkedLossWrapper: of a chunk log-probabilities and two gradients in fp32. 16384 tokens in 8
    chunks have 3 GiB of them, in 16 half."""
    file("registry.py", REGISTRY)
    file("finer.py", REGISTRY.replace("ChunkedLossWrapper.Config(", "ChunkedLossWrapper.Config(num_chunks=16, "))
    eight, sixteen = (read(Path(name)).workload for name in (EIGHT, "finer.py::llama_8b"))
    assert loss_bytes(eight) - loss_bytes(sixteen) == 12 * 1024 * 128256
    weight, of_input = 6 * 4096 * 128256, 2 * 4096 * 16384  # the head's gradient in 32 and 16 bits; its input's
    assert loss_bytes(eight) == 12 * 2048 * 128256 + weight + of_input


def test_a_loss_in_chunks_beside_tensors_in_parts(file: Callable[[str, str], Path]) -> None:
    text = REGISTRY.replace("spec,\n", "spec,\n        parallelism=ParallelismConfig(tensor_parallel_degree=2),\n")
    file("registry.py", text.replace("=SelectiveAC", "=FullAC"))
    found = read(Path(EIGHT))
    assert [(gap.bound, gap.key) for gap in found.gaps] == [
        ("most", "parallelism.tensor_parallel_degree"), ("most", "chunked_loss"),
    ]  # fmt: skip
    assert (found.workload.layout.tp, found.workload.chunk_tokens) == (2, 16384)


def test_a_function_that_changes_another(file: Callable[[str, str], Path]) -> None:
    file("registry.py", REGISTRY)
    found = read(Path("registry.py::llama_8b_replicated"))
    own = {"zero_stage": 0, "recompute": "full", "chunked_loss": True, "micro_batch_size": 1}
    assert changed(found) == {name: each for name, each in (PLAIN | own).items() if each != DEFAULTS[name]}
    assert found.workload.job.global_batch_size == 8


EXPRESSIONS: dict[str, tuple[str, Any]] = {
    "sum": ("2 * SIZE - 1 + len_", 2 * 4096 - 1 + 3),
    "floor": ("SIZE // 3", Unresolved("SIZE // 3")),
    "negative": ("-1", -1),
    "nothing": ("None", "none"),
    "list": ("['a', SIZE]", ["a", 4096]),
    "list of unknown": ("[SIZE, other.x]", Unresolved("[4096, 'other.x']")),
    "class": ("parts.Full.Config()", Unresolved("Full.Config")),
    "renamed": ("F.Config(3)", Unresolved("Full.Config")),
    "of the file": ("twice(SIZE)", 8192),
    "by name": ("twice(size=5)", 10),
    "without an argument": ("twice()", Unresolved("2 * size")),
    "a method": ("made.get('id').model(1)", Unresolved("made.get")),
    "unpacked": ("dict(**SIZES)", Unresolved("dict(**SIZES)")),
    "condition": ("4 if SIZE else 8", Unresolved("4 if SIZE else 8")),
    "environment": ("int(os.environ['N'])", Unresolved("int")),
    "huge": ("SIZE * 9999999999999999999999", Unresolved("SIZE * 9999999999999999999999")),
    "text": ("'a' * SIZE", Unresolved("'a' * SIZE")),
    "local": ("local", 7),
    "late": ("late", Unresolved("late += 1")),
}
BODY = """\
import os
from parts import Full as F, Full
SIZE: int = 4096
len_ = 3
size = 1
SIZES = {{"a": 1}}
def twice(size):
    return 2 * size
def whole():
    local = 7
    assert local
    config = C(a=B(x={}))
    return config
late = 1
late += 1
"""


@pytest.mark.parametrize("case", EXPRESSIONS)
def test_an_expression(case: str) -> None:
    written, expected = EXPRESSIONS[case]
    found = values(BODY.format(written), "a.py::whole")["a.x"]
    assert (found, type(found)) == (expected, type(expected))


LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "set": ("c.a.x = 5", {"a.x": 5}),
    "section": ("c.a = B(y=1)", {"a.x": None, "a.y": 1}),
    "of nothing": ("c.z.x = 5", {"z.x": 5}),
    "two names": ("d = c.a\n    d.x = 5", {"a.x": 5}),
    "read before": ("d = c.z\n    d.x = 5", {"z.x": 5}),
    "a default": ("c.a.y = c.a.z", {"a.y": Unresolved("c.a.z")}),
    "in a condition": ("if c.a.x:\n        c.a.y = 3", {"a.x": 1, "a.y": Unresolved("if c.a.x:")}),
    "in a loop": ("for x in y:\n        c.a.x *= 2", {"a.x": Unresolved("for x in y:")}),
    "added to": ("c.a.x += 1", {"a.x": Unresolved("c.a.x += 1")}),
    "by a method": ("c.a.y.append(3)", {"a.x": 1, "a.y": Unresolved("c.a.y.append(3)")}),
    "by a function elsewhere": ("tune(c.a)", {"a": Unresolved("tune(c.a)"), "a.x": None}),
    "by a function of the file": ("own(c)", {"a.x": 9}),
    "by one with a loop": ("own_loop(c)", {"a.x": Unresolved("for n in (1, 2):")}),
    "by an index": ("c.a.l[0] = 1", {"a.l": Unresolved("c.a.l[0] = 1")}),
    "deleted": ("del c.a.x", {"a.x": Unresolved("del c.a.x")}),
    "asserted": ("assert right(c.a)", {"a.x": 1}),
    "typed": ("d: B = B(x=4)\n    c.a = d", {"a.x": 4}),
    "unpacked": ("x, c.a.x = 1, 2", {"a.x": Unresolved("x, c.a.x = (1, 2)")}),
}
WHOLE = """\
def own(config):
    config.a.x = 9
def own_loop(config):
    for n in (1, 2):
        config.a.x = n
def other(x):
    return C(a=B(x=x))
def whole():
    c = other(1)
    {}
    return c
"""


@pytest.mark.parametrize("case", LINES)
def test_a_line(case: str) -> None:
    """What is not followed makes unknown what it may change, and nothing else."""
    line, expected = LINES[case]
    found = values(WHOLE.format(line))
    assert {key: found.get(key) for key in expected} == expected
    assert all(type(found.get(key)) is type(each) for key, each in expected.items())


def test_a_result_in_a_condition_is_unknown() -> None:
    text = WHOLE.format("if big:\n        return D()").replace("C(", "Trainer.Config(")
    assert refusal(SpecError, source_of, text, "a.py").startswith("a.py: what it returns is if big:; kit plan reads")


def test_values_have_their_lines() -> None:
    entries = read_python(REGISTRY, "a/registry.py::llama_8b_replicated").entries
    lines = REGISTRY.splitlines()
    keys = ("activation_checkpoint", "training.steps")
    assert [key for key in keys if key.split(".")[-1] not in lines[entries[key].line - 1]] == []


REFUSED: dict[str, tuple[str, str, str]] = {
    "expression": (
        "2 * ROW",
        "2 * rows()",
        "19: training.num_tokens_per_microbatch_per_dp_rank is 2 * rows(), which kit",
    ),
    "a call": ("=2 * ROW", "=rows()", "num_tokens_per_microbatch_per_dp_rank is rows, which kit does not run"),
    "environment": ("steps=1000", 'dtype=os.environ["D"]', "training.dtype is os.environ['D'], which kit does not run"),
    "section": ("training=TrainingConfig(", "training=tuned(", "18: training is tuned, which kit does not run"),
    "unpacked": ("steps=1000", "**SHORT", "18: training is TrainingConfig("),
    "flavor": ('"8B"', '"9B"', "13: model_spec.0=llama3.model_registry 9B: kit knows llama3.model_registry 1B"),
    "a tower": ("models.llama3", "models.qwen3_5", "model_spec.0=qwen3_5.model_registry 8B: a trained vision tower"),
    "another model": ("models.llama3", "mine", "13: model_spec.0=mine.model_registry 8B: kit knows"),
    "converter": ('"flex"', '"flex", converters=[MXFP8LinearConverter.Config()]', "model_spec.converters=['MXFP8"),
    "own converter": ('"flex"', '"flex", converters=[mine()]', "model_spec.converters is ['mine'], which kit"),
    "loss": ("ChunkedLossWrapper.Config(loss_fn", "MTPLoss.Config(loss_fn", "16: loss is MTPLoss.Config, which kit"),
    "optimizer": ("default_adamw(lr=3e-4)", "muon(lr=3e-4)", "17: optimizer is muon, which kit does not run"),
    "pipeline": ("spec,\n", "spec, parallelism=ParallelismConfig(pipeline_parallel_degree=2),\n", "=2: pipeline par"),
    "override": (
        "    return config", '    config.override.imports.append("x")\n    return config',
        "35: override.imports is config.override.imports.append('x'), which",
    ),
    "image": (
        '-> Trainer.Config:\n    "', '-> X:\n    return FluxTrainer.Config()\n    "',
        "FluxTrainer.Config: a diffusion",
    ),
    "rows": ("32 * ROW", "31 * ROW", "a global batch of 31 is no multiple of micro batch 2 · 8 ranks"),
    "a token more": ("32 * ROW", "32 * ROW + 1", "a global batch of 33 is no multiple of micro batch 2 · 8 ranks"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_answer(file: Callable[[str, str], Path], case: str) -> None:
    """With line, key and reason."""
    before, after, said = REFUSED[case]
    assert REGISTRY.count(before) >= 1
    file("registry.py", REGISTRY.replace(before, after))
    name = "llama_8b_replicated" if case == "override" else "llama_8b"
    assert said in refusal(SpecError, read, Path(f"registry.py::{name}"))


def test_a_function_has_to_be_named_where_there_are_several(file: Callable[[str, str], Path]) -> None:
    file("registry.py", REGISTRY)
    for name in ("registry.py", "registry.py::ROW", "registry.py::llama"):
        said = refusal(SpecError, read, Path(name))
        assert said.endswith("registry.py::llama_8b does: llama_8b, llama_8b_replicated")


def test_nothing_of_the_file_runs(file: Callable[[str, str], Path]) -> None:
    """Neither the module nor a function of it, nor what it imports."""
    mark = "import pathlib, sys\npathlib.Path('ran').touch()\nsys.modules['ran'] = sys\n"
    text = mark + REGISTRY.replace("    spec =", "    " + mark.replace("\n", "\n    ") + "spec =")
    file("registry.py", text)
    file("torchtitan.py", mark)
    before = set(sys.modules)
    assert read(Path(EIGHT)).workload.model.name == "llama-3.1-8b"
    imported = {each for each in set(sys.modules) - before if each == "ran" or "titan" in each}
    assert (Path("ran").exists(), imported) == (False, set())


HOSTILE = {
    "no Python": "def f(:",
    "itself": "def f():\n    return f()\n",
    "a circle": "def f():\n    x = C()\n    x.y = x\n    return x\n",
    "twice as many each": "def f0():\n    return C()\n"
    + "".join(f"def f{n}(_=0):\n    return C(f{n - 1}(), f{n - 1}())\n" for n in range(1, 40))
    + "def f():\n    return f39()\n",
    "one in another": "def f():\n    x0 = C()\n" + "".join(f"    x{n} = C(x{n - 1}, x{n - 1})\n" for n in range(1, 40))
    + "    return x39\n",
    "many values": f"def f():\n    return C({', '.join(f'a{n}={n}' for n in range(6000))})\n",
    "deep": f"def f():\n    return {'(' * 150}C(){')' * 150}\n",
    "deeper": f"x = {'-' * 100_000}1\n",
    "nothing": "def f():\n    return\n",
    "empty": "",
    "zero": "x = '\0'",
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused(case: str) -> None:
    said = refusal(SpecError, source_of, HOSTILE[case], "a.py::f")
    assert said.startswith("a.py")
    assert len(said.splitlines()[0]) < 400


FULL = REGISTRY.replace("=SelectiveAC", "=FullAC").replace("rank=2 * ROW", "rank=8 * ROW").replace("32 *", "64 *")
TIGHT = {
    "class": (REGISTRY, "activation-checkpoint:full"),
    "batch": (FULL, "--training.num-tokens-per-microbatch-per-dp-rank 16384"),
}
"""What does not fit eight A100 of 40 GB, and the flags of the nearest change that does."""


def tight(file: Callable[[str, str], Path], text: str) -> Answer:
    file("registry.py", text)
    return answer(Path(EIGHT), "8xA100-40")


@pytest.mark.parametrize("case", TIGHT)
def test_a_change_is_the_flags_of_the_command(file: Callable[[str, str], Path], case: str) -> None:
    """Which the command that starts the function reads as the promised layout."""
    text, flags = TIGHT[case]
    found = tight(file, text)
    assert (found.now.fits, found.patch) == (False, f"{flags}\n")
    assert found.nearest is not None
    file("torchtitan/models/llama3/config_registry.py", text)
    command = f"torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama_8b {flags}\n"
    assert read(file("train.sh", command), "8xA100-40").workload == found.nearest.described.workload


def test_a_class_follows_a_switch(file: Callable[[str, str], Path]) -> None:
    file("torchtitan/models/llama3/config_registry.py", REGISTRY)
    flags = "--training.num-tokens-per-train-step=-1 --training.enable-cpu-offload activation-checkpoint:none"
    found = read(file("train.sh", f"./run_train.sh --module=llama3 --config=llama_8b {flags}\n"))
    own = {"chunked_loss": True, "micro_batch_size": 2, "offload_param": "cpu", "offload_optimizer": "cpu"}
    assert changed(found) == PLAIN | own


def test_a_command_of_another_trainer(file: Callable[[str, str], Path]) -> None:
    file("torchtitan/models/flux/config_registry.py", REGISTRY.replace("Trainer.Config(", "FluxTrainer.Config("))
    said = refusal(SpecError, read, file("train.sh", "./run_train.sh --module flux --config llama_8b\n"))
    assert said == "train.sh: command=FluxTrainer.Config: a diffusion model"


def test_flags_that_would_not_read_back_are_not_printed(file: Callable[[str, str], Path]) -> None:
    found = tight(file, REGISTRY)
    assert found.nearest is not None
    more = replace(found.nearest, values={**found.nearest.values, "training.enable_cpu_offload": True})
    assert [reads_back(found.asked, each) for each in (found.nearest, more)] == [True, False]


def test_the_example_of_the_page(file: Callable[[str, str], Path]) -> None:
    page = (ROOT / "docs/how-to/your-config.md").read_text(encoding="utf-8")
    file("registry.py", re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[0])
    found = answer(Path("registry.py::two_rows"), "8xA100-40")
    assert (found.verdict, found.patch) == ("does not fit", "activation-checkpoint:full\n")
    assert f"`{found.patch.strip()}`" in page


MODELS = {
    # embedding and head; a layer's four projections of 256 and 256, and three of 256 and 768
    'from torchtitan.models.llama3 import|"debugmodel"': 2 * 2048 * 256 + 6 * (4 * 256**2 + 3 * 256 * 768),
    # a tied embedding; 16 heads of 128 for queries and their output, 8 for keys and for values, 3 of 3072
    'from torchtitan.models.qwen3 import|"debugmodel"': 2048 * 256 + 8 * 256 * (2 * 2048 + 2 * 1024 + 3 * 3072),
    'from torchtitan.models.qwen3 import|"debugmodel_moe"': 2 * 2048 * 256
    + 8 * 256 * (2 * 2048 + 2 * 1024 + 64 * 3 * 768 + 64),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_by_their_sizes(file: Callable[[str, str], Path], case: str) -> None:
    """models/llama3/__init__.py and models/qwen3/__init__.py; of norms there are some thousand parameters."""
    origin, flavor = case.split("|")
    text = SILENT.replace("from torchtitan.models.qwen3 import", origin).replace('"0.6B"', flavor)
    work = read(file("registry.py", text)).workload
    assert sum(each.total for each in work.parameters) == pytest.approx(MODELS[case], rel=0.002)


def test_the_module_of_a_relative_import_is_the_folder(file: Callable[[str, str], Path]) -> None:
    file("qwen3/config_registry.py", SILENT.replace("torchtitan.models.qwen3", ".").replace("0.6B", "1.7B"))
    assert read(Path("qwen3/config_registry.py")).workload.model.name == "qwen3-1.7b"
