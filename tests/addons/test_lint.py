"""Every rule speaks where it must, is silent beside it, and says no more than what the readers themselves do."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.addons.lint import Finding, fixed, lint, read_values, write_fixed
from kit.addons.lint.config import Config
from kit.addons.lint.described import described
from kit.addons.lint.json_text import parse_json
from kit.addons.lint.named_file_rules import model_parallel
from kit.addons.lint.rule import CHECKS, RULES, markdown
from kit.emit.run_directory import write as write_run
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.run import DataSpec, RunSpec
from kit.specs.strict_yaml import Document
from tests.addons.lint_cases import BASE, DEEPSPEED_CASES, LintCase
from tests.addons.lint_cases_accelerate import ACCELERATE_CASES
from tests.addons.lint_cases_launch import COMMAND_CASES
from tests.support import ROOT
from tests.support.files import file_with, files_in, replace_in
from tests.support.in_process import kit_main, kit_refusal
from tests.support.refusals import refusal

TUTORIALS = Path(__file__).parent / "tutorials"
DS_OF_TWO = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
OF_EIGHT, ON_ACCELERATE = (
    {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}},
    {"compute_environment": "LOCAL_MACHINE", "num_processes": 8, "num_machines": 1},
)
BESIDE = {
    "ds.json": DS_OF_TWO,
    **{
        f"{device}.json": OF_EIGHT | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
        for device in ("cpu", "none")
    },
    "nvme.json": OF_EIGHT | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    "zero.yaml": ON_ACCELERATE
    | {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "cpu.json"}},
    "fsdp.yaml": ON_ACCELERATE
    | {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
}
"""Files that lines name."""


CASES = [
    *((".json", case) for case in DEEPSPEED_CASES),
    *((".yaml", case) for case in ACCELERATE_CASES),
    *((".sh", case) for case in COMMAND_CASES),
]
EXPECTED = strict_yaml.read(TUTORIALS / "expected.yaml").data


def write(directory: Path, content: dict[str, Any] | str, suffix: str) -> Path:
    path = file_with(
        directory / f"config{suffix}",
        content
        if isinstance(content, str)
        else (json.dumps(content, indent=1) if suffix == ".json" else strict_yaml.dump(content)),
    )
    files_in(directory, {name: json.dumps(values) for name, values in BESIDE.items()})
    return path


def findings(path: Path, context: dict[str, str]) -> tuple[Finding, ...]:
    return lint(
        path,
        reader=context.get("reader"),  # type: ignore[arg-type]
        model=load_model(context["model"]) if "model" in context else None,
        cluster=parse_cluster(context["gpus"]) if "gpus" in context else None,
    )


def found(path: Path, context: dict[str, str]) -> dict[str, str]:
    """Rule → severity."""
    return {finding.rule: finding.severity for finding in findings(path, context)}


def line_of(text: str, data: Any, key: str) -> int | None:
    """Where a key stands, or the innermost section of it that is there."""
    at = -1
    for part in key.split("."):
        if isinstance(data, dict) and part in data:
            at, data = re.compile(rf'^ *"?{re.escape(part)}"?:', re.MULTILINE).search(text, at + 1).start(), data[part]
    return None if at < 0 else text.count("\n", 0, at) + 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].rule)
def test_a_rule_speaks_of_one_and_not_of_its_neighbour(case: tuple[str, LintCase], tmp_path: Path) -> None:
    """Once, at the line of its key, with its numbers; and what it changes in a corrected copy is right for it."""
    suffix, pair = case
    path = write(tmp_path, pair.bad, suffix)
    said = [finding for finding in findings(path, pair.context) if finding.rule == pair.rule]
    assert [finding.severity for finding in said] == [pair.severity]
    assert [words for words in pair.says if words not in str(said[0])] == [], str(said[0])
    here = isinstance(pair.bad, dict) and said[0].file == path.name
    assert not (here and said[0].key) or said[0].line == line_of(path.read_text(), pair.bad, said[0].key)
    if said[0].changes and here:
        write_fixed(read_values(path), said, tmp_path / f"fixed{suffix}")
        assert pair.rule not in found(tmp_path / f"fixed{suffix}", pair.context)
    good = write(tmp_path, pair.good, suffix)
    assert pair.rule not in found(good, pair.context if pair.good_context is None else pair.good_context)


@pytest.mark.parametrize(
    ("line", "threads"),
    [
        ("torchrun --nproc_per_node 2 t.py", "1"),
        ("torchrun --nproc_per_node 1 t.py", "None"),
        ("accelerate launch --config_file zero.yaml --num_processes 2 --num_cpu_threads_per_process 7 t.py", "1"),
        ("accelerate launch --config_file zero.yaml --num_processes 1 t.py", "None"),
        ("accelerate launch --config_file fsdp.yaml --num_processes 2 t.py", "1"),
        ("accelerate launch --config_file fsdp.yaml --num_processes 2 --num_cpu_threads_per_process 7 t.py", "7"),
        ("deepspeed --num_gpus 2 t.py", "None"),
    ],
)
@pytest.mark.nightly
def test_launchers_give_a_process_as_many_threads_as_the_rule_says(line: str, threads: str, tmp_path: Path) -> None:
    started = write(tmp_path, line, ".sh")
    started.with_name("t.py").write_text("import os; print('threads', os.environ.get('OMP_NUM_THREADS'))")
    words = [str(Path(sys.executable).with_name(line.split()[0])), *line.split()[1:]]
    without = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path, env=without).stdout
    assert set(re.findall(r"threads (None|\d+)", said)) == {threads}


def test_every_rule_has_a_case_and_a_line_in_the_docs() -> None:
    """The ids are those that the sources give to findings, and those of tables with a case; three are raised by whole
    checks of their own."""
    sources = "".join(file.read_text() for file in sorted((ROOT / "kit/addons/lint").glob("*.py")))
    before = r"(?:finding\(|Finding\(|_of_lines\(|yield)"
    given = before + r'\s*"([a-z0-9]+(?:-[a-z0-9]+)+|prediction|recipe|edited|hostfile)"'
    rows = [each for checks in CHECKS.values() for each in checks if isinstance(each, partial)]
    ids = set(re.findall(given, sources)) | {row.args[0] for row in rows if row.args[1]}
    assert ids == set(RULES)
    assert ids - {case.rule for _, case in CASES} == {"recipe", "run-directory", "edited"}
    assert markdown() in (ROOT / "docs/lint-rules.md").read_text(), "kit lint --rules"


RECIPE = "model: llama-3.1-8b\ncluster: 8xH100\nlayout: {engine: megatron, tp: 4}\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", {}),
        ("hidden_dropout: 0.0", "hidden_dropout: 0.1", {"edited": "note"}),
        ("tensor_model_parallel_size: 4", "tensor_model_parallel_size: 2", {"run-directory": "error"}),
    ],
)
def test_run_directories_have_rules_too(old: str, new: str, said: dict[str, str], tmp_path: Path) -> None:
    recipe = file_with(tmp_path / "recipe.yaml", RECIPE)
    path = write_run(kit.plan(kit.load_recipe(recipe)), RunSpec(data=DataSpec(train="train")), tmp_path / "run").path
    replace_in(path / "megatron.yaml", old, new)
    assert found(path, {}) == said


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_tutorials_print(name: str) -> None:
    """Configurations and launch lines as tutorials print them, with their mistakes; and the same without."""
    case = EXPECTED[name]
    rules = {rule for rule, severity in found(TUTORIALS / name, case.get("context", {})).items() if severity != "note"}
    assert rules == set(case["finds"])


@pytest.mark.slow
def test_what_is_called_refused_is_refused_by_deepspeed_itself() -> None:
    import deepspeed.runtime.config as parser

    for case in (each for each in DEEPSPEED_CASES if each.refused):
        assert isinstance(case.bad, dict)
        assert isinstance(case.good, dict)
        with pytest.raises(Exception) as caught:  # DeepSpeed raises half a dozen kinds
            parser.DeepSpeedConfig(dict(case.bad))
        assert not isinstance(caught.value, KeyError | AttributeError), case
        if "auto" not in json.dumps(case.good):
            parser.DeepSpeedConfig(dict(case.good))


ZERO_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def judged(directory: Path, content: dict[str, Any], rule: str = "prediction", **given: Any) -> tuple[str, float]:
    """Severity and words of what is said of Llama 3.1 8B on 8 H100, and its first number of GiB."""
    path = write(directory, content, ".yaml" if "distributed_type" in content else ".json")
    found = lint(path, **{"model": load_model("llama-3.1-8b"), "cluster": parse_cluster("8xH100")} | given)
    said = "".join(f"{each.severity}: {each.why}; {each.fix}" for each in found if each.rule == rule)
    return said, float(match[1]) if (match := re.search(r"about (\d+) GiB", said)) else 0.0


def in_bf16(micro: int = 1, **zero: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": micro, "bf16": {"enabled": True}, "zero_optimization": ZERO_3 | zero}


@pytest.mark.parametrize(
    ("key", "small", "large", "grows_gib"),
    [
        ("reduce_bucket_size", 1e8, 5e9, 9.1),
        ("stage3_max_live_parameters", 1e9, 6e9, 9.3),
        ("max_live_parameters", 1e9, 6e9, 9.3),
        ("stage3_prefetch_bucket_size", 1e7, 2e9, 3.7),
        ("stage3_param_persistence_threshold", 1e5, 1e14, 14.0),
    ],
)
def test_memory_takes_the_sizes_that_stand_in_the_file(
    key: str, small: float, large: float, grows_gib: float, tmp_path: Path
) -> None:
    """2 bytes an element."""
    grown = judged(tmp_path, in_bf16(**{key: large}))[1] - judged(tmp_path, in_bf16(**{key: small}))[1]
    assert grown == pytest.approx(grows_gib, abs=1.5)


@pytest.mark.parametrize(("policy", "gib"), [("NO_WRAP", 44.9), ("TRANSFORMER_BASED_WRAP", 22.0)])
def test_memory_of_one_fsdp_group_is_that_of_all_weights(policy: str, gib: float, tmp_path: Path) -> None:
    """N = 8.03e9: 16 N / 8 of states, and 2 N + 2 N of gathered weights and gradients on each rank; a group a layer
    gathers the root's and two layers'."""
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": policy, "fsdp_activation_checkpointing": True}
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": fsdp}
    assert judged(tmp_path, config)[1] == pytest.approx(gib, abs=1.5)


def test_sequences_and_gradient_checkpointing_can_be_told(tmp_path: Path) -> None:
    """What does not fit is told with gradient checkpointing where that helps."""
    usual, long, saved = (
        judged(tmp_path, in_bf16(), **given)[1]
        for given in ({}, {"seq_length": 8192}, {"seq_length": 8192, "gradient_checkpointing": True})
    )
    assert (long > usual + 10, saved < long - 20) == (True, True)
    said = partial(judged, tmp_path, in_bf16(), "does-not-fit")
    begins = f"warning: llama-3.1-8b at 8192 tokens, micro batch 1 peaks at about {long:.0f} GiB without "
    ends = f"H100 has 75 usable; turn gradient checkpointing on (about {saved:.0f} GiB)"
    assert (said(seq_length=8192)[0][: len(begins)], said(seq_length=8192)[0][-len(ends) :]) == (begins, ends)
    assert said(seq_length=8192, gradient_checkpointing=True) == ("", 0)
    never = said(seq_length=1 << 18, gradient_checkpointing=True)[0]
    assert (never[:7], "GiB with gradient checkpointing" in never) == ("error: ", True)


AUTOS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
NVME = {"device": "nvme", "nvme_path": "/tmp"}


def of_fsdp(**keys: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": keys}


@pytest.mark.parametrize(
    ("content", "given", "expected"),
    [
        # transformers/integrations/deepspeed.py fills hidden², 0.9 hidden² and 10 hidden; 4096 here.
        (in_bf16(**AUTOS), {}, {"reduce_bucket_size": 16777216, "stage3_prefetch_bucket_size": 15099494,
                                "stage3_param_persistence_threshold": 40960}),
        # runtime/zero/config.py.
        (in_bf16(**AUTOS), {"reader": "deepspeed"}, {"reduce_bucket_size": 500_000_000,
         "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000}),
        (in_bf16(), {}, {"reduce_bucket_size": 500_000_000, "stage3_max_live_parameters": 10**9}),
        (in_bf16(prefetch_bucket_size=7, stage3_max_live_parameters=1e18), {},
         {"stage3_prefetch_bucket_size": 7, "stage3_max_live_parameters": 10**15}),
        (in_bf16(offload_param=NVME | {"buffer_count": 0, "buffer_size": 3e8}), {},
         {"param_buffer_count": 1, "param_buffer_size": 300_000_000, "sub_group_size": 10**9, "offload_param": "nvme",
          "offload_optimizer": "none"}),
        (in_bf16(offload_param=NVME, offload_optimizer=NVME), {}, {"param_buffer_count": 5, "param_buffer_size": 10**8,
         "optimizer_buffer_count": 4, "offload_optimizer": "nvme"}),
        (in_bf16(4) | {"gradient_accumulation_steps": 6}, {"processes": 4}, {"micro_batch_size": 4, "dp": 4,
         "gradient_accumulation_steps": 6, "global_batch_size": 96, "zero_stage": 3, "recompute": "none"}),
        (in_bf16(), {"gradient_checkpointing": True}, {"dp": 8, "recompute": "full", "global_batch_size": 8}),
        (in_bf16(), {}, {"precision": "bf16", "seq_length": 4096}),
        (in_bf16(), {"seq_length": 512}, {"seq_length": 512}),
        (in_bf16(), {"model": load_model("gpt2")}, {"seq_length": 1024}),
        (in_bf16() | {"bf16": {"enabled": "auto"}}, {}, {"precision": "bf16"}),
        (in_bf16() | {"bf16": {"enabled": False}}, {}, {"precision": "fp32"}),
        (in_bf16() | {"fp16": {"enabled": True}}, {}, {"precision": "fp16"}),
        (of_fsdp() | {"mixed_precision": "fp16"}, {}, {"precision": "fp16", "zero_stage": 3, "engine": "torch"}),
        (of_fsdp() | {"mixed_precision": "bf16"}, {}, {"precision": "bf16", "recompute": "none"}),
        (of_fsdp(fsdp_version=2), {}, {"zero_stage": 3, "precision": "fp32"}),
        (of_fsdp(fsdp_version=2, fsdp_reshard_after_forward=False), {}, {"zero_stage": 2}),
        (of_fsdp(fsdp_version=1, fsdp_reshard_after_forward=False), {}, {"zero_stage": 3}),
        (of_fsdp(fsdp_sharding_strategy="shard_grad_op"), {}, {"zero_stage": 2}),
        (of_fsdp(fsdp_sharding_strategy=3), {}, {"zero_stage": 0}),
        (of_fsdp(fsdp_activation_checkpointing=True), {}, {"recompute": "full"}),
        ({"distributed_type": "MULTI_GPU"}, {"gradient_checkpointing": True}, {"zero_stage": 0, "recompute": "full"}),
    ],
)  # fmt: skip
def test_a_file_is_described_by_its_own_sizes(
    content: dict[str, Any], given: dict[str, Any], expected: dict[str, Any]
) -> None:
    known = {"model": load_model("llama-3.1-8b"), "cluster": parse_cluster("8xH100")} | given
    work = described(Config(document=Document("ds.json", content, {}), **known))
    assert {name: getattr(work.layout, name, getattr(work.job, name, None)) for name in expected} == expected


def test_host_memory_takes_buffers_of_offload(tmp_path: Path) -> None:
    """16 buffers of 5e10 elements are more than the host has; the defaults are not."""
    for size, expected in ((5e10, "error"), (1e8, None)):
        content = in_bf16(offload_param=NVME | {"buffer_count": 16, "buffer_size": size}) | {"aio": {}}
        said = findings(write(tmp_path, content, ".json"), {"model": "llama-3.1-8b", "gpus": "8xH100"})
        assert [each.severity for each in said if each.rule == "host-ram"] == [expected] * bool(expected)
        assert not expected or "zero_optimization.offload_param" in [each.key for each in said]


@pytest.mark.parametrize(
    ("reader", "host_gib", "gpus", "expected"),
    [
        ("trainer", 700.0, "8xA100-40", True),
        ("accelerate", 700.0, "8xA100-40", True),
        ("trainer", 900.0, "8xA100-40", False),
        ("trainer", 300.0, "8xA100-40", False),  # too little for what is offloaded, which is told instead
        ("deepspeed", 700.0, "8xA100-40", False),
        ("trainer", 700.0, "8xA100-80", False),
    ],
)
def test_the_flat_copy_that_a_trainer_makes_in_host_memory_is_judged(
    reader: str, host_gib: float, gpus: str, expected: bool, tmp_path: Path
) -> None:
    """14.77e9 weights of 2 bytes are 27.5 GiB, twice too many for an A100 of 40 GB. 8 processes copy and flatten them
    on the host: 440 GiB beside the 328 of offload. kit's own engine makes no such copy."""
    content = in_bf16() | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    cluster = dataclasses.replace(parse_cluster(gpus), host_ram_gib=host_gib)
    said, _ = judged(tmp_path, content, "host-ram", reader=reader, cluster=cluster, model=load_model("qwen2.5-14b"))
    assert ("768 GiB while they load" in said and "so 8 processes make" in said) == expected


def test_a_corrected_copy_has_none_of_the_errors(tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "train_batch_size": 30,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "2",
        "overlap_comm": True,
        "fp16": {"enabled": "true"},
        "bf16": {"enabled": True},
        "optimizer": {"type": "OneBitAdam", "params": {"max_grad_norm": 1.0}},
        "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1, "cpu_offload": True},
        "amp": {},
    }
    path = write(tmp_path, bad, ".json")
    write_fixed(read_values(path), lint(path), tmp_path / "fixed.json")
    assert [str(f) for f in lint(tmp_path / "fixed.json") if f.severity == "error"] == []
    assert read_values(path) == bad
    assert {"gradient_clipping": 1.0, "zero_optimization": {
        "stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True
    }}.items() <= read_values(tmp_path / "fixed.json").items()  # fmt: skip
    assert "not overwritten" in refusal(SpecError, write_fixed, bad, (), tmp_path / "fixed.json")
    write_fixed(bad, (), tmp_path / "copy.yml")
    assert read_values(tmp_path / "copy.yml") == bad
    assert (tmp_path / "copy.yml").read_text().startswith("train_batch_size: 30\n")
    assert "cannot be written: No such file" in refusal(
        SpecError, write_fixed, bad, (), tmp_path / "absent" / "fixed.json"
    )


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("bad", "rule", "corrected"),
    [
        ({"max_grad_norm": 1.0, "gradient_clipping": 2.0}, "unknown-key", {"gradient_clipping": 2.0}),
        ({"max_grad_norm": 1.0}, "unknown-key", {"gradient_clipping": 1.0}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": False}}, "deprecated-key",
        {"zero_optimization": {"stage": 2}}),
        ({"zero_optimization": {"cpu_offload_param": True}}, "deprecated-key",
        {"zero_optimization": {"offload_param": CPU}}),
        ({"zero_optimization": {"stage3_gather_fp16_weights_on_model_save": True}}, "deprecated-key",
         {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}),
        ({"bfloat16": {"enabled": True}}, "deprecated-key", {"bf16": {"enabled": True}}),
        ({"gradient_clipping": "1e0"}, "text-value", {"gradient_clipping": 1.0}),
        ({"steps_per_print": "10"}, "text-value", {"steps_per_print": 10}),
        ({"wall_clock_breakdown": "FALSE"}, "text-value", {"wall_clock_breakdown": False}),
        ({"bf16": {"enabled": True}}, "bf16-hardware", {"bf16": {"enabled": False}, "fp16": {"enabled": True}}),
    ],
)  # fmt: skip
def test_what_a_correction_writes(bad: dict[str, Any], rule: str, corrected: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, BASE | bad, ".json")
    said = [each for each in lint(path, cluster=parse_cluster("8xV100-32")) if each.rule == rule]
    assert json.dumps(fixed(BASE | bad, said), sort_keys=True) == json.dumps(BASE | corrected, sort_keys=True)


def test_a_section_that_one_correction_removes_is_not_brought_back_by_another(tmp_path: Path) -> None:
    bad = BASE | {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "buffer_count": "auto"}}}
    said = lint(write(tmp_path, bad, ".json"))
    assert {"offload-stage", "auto-unfilled"} <= {each.rule for each in said}
    assert fixed(bad, said)["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "x.json:2: not valid JSON: Expecting ':' delimiter at '2}'"),
        ('{"a": 1\n "b": 2}', "x.json:2: not valid JSON: Expecting ',' delimiter at '\"b\": 2}'"),
        ('{"a":\n nothing_of_json}', "x.json:2: not valid JSON: Expecting value at 'nothing_of_j'"),
        ('{"a": tru}', "x.json:1: not valid JSON: Expecting value at 'tru}'"),
        ('{"a": "x\n"}', "x.json:1: not valid JSON: Invalid control character at ''"),
        ('{"a": [1, 2', "x.json:1: not valid JSON: Expecting ',' delimiter at ''"),
        ("[]", "x.json: holds a list where an object is expected"),
        ("{} 1", "x.json:1: not valid JSON: Extra data at '1'"),
    ],
)
def test_json_that_cannot_be_read_names_the_line(text: str, message: str) -> None:
    assert message in refusal(SpecError, parse_json, text, "x.json")


def test_the_command_line(tmp_path: Path) -> None:
    bad, good = str(write(tmp_path, {"train_batch_sise": 8}, ".json")), str(tmp_path / "good.json")
    run = kit_main("lint", bad, "--json", "--write-fixed", good)
    assert (run.code, {item["rule"] for item in json.loads(run.out)}) == (1, {"unknown-key", "batch-missing"})
    run = kit_main("lint", good)
    assert (run.code, run.err) == (0, "")
    assert "not overwritten" in kit_refusal(["lint", bad, "--write-fixed", bad])
    script = str(write(tmp_path, "swift sft", ".sh"))
    said = [kit_main("lint", *paths) for paths in ([good, script], [script])]
    assert [(run.code, run.out.splitlines()[-1]) for run in said] == [
        (0, "0 errors, 1 warnings, 0 notes"), (2, "0 errors, 1 warnings, 0 notes"),
    ]  # fmt: skip
    for paths in ([bad, good], [script]):
        assert "writes a copy of one file" in kit_refusal(["lint", *paths, "--write-fixed", str(tmp_path / "new.json")])


def test_each_of_several_in_one_file_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, BASE | {"amp": {}, "nebula": {}, "steps_per_print": "10", "seed": "1"}, ".json")
    told = [(each.rule, each.key) for each in lint(path) if each.rule in ("removed-key", "text-value")]
    quoted = [("text-value", "steps_per_print"), ("text-value", "seed")]
    assert told == [("removed-key", "amp"), ("removed-key", "nebula"), *quoted]


@pytest.mark.parametrize(("wrong", "shown", "last"), [(49, 49, ""), (50, 50, ""), (53, 50, "3 more of the same")])
def test_of_very_many_findings_fifty_are_shown_and_the_others_counted(
    wrong: int, shown: int, last: str, tmp_path: Path
) -> None:
    (tmp_path / "all.sh").write_text("python train.py --seed 1 --seed 2\n" * wrong)
    said = [finding for finding in lint(tmp_path / "all.sh") if finding.rule == "given-twice"]
    named = [(finding.line, finding.key) for finding in said if finding.line is not None]
    assert named == [(number, "--seed") for number in range(1, shown + 1)]
    assert [strict_yaml.to_plain(finding) for finding in said if finding.line is None] == (
        [{"rule": "given-twice", "severity": "warning", "file": "all.sh", "line": None, "key": "", "why": last,
          "fix": "see the first", "fixable": False}] if last else []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "given", "said"),
    [
        ("a.sh", "python t.py", {"gpus": "8xH100"}, ("memory-not-judged", "memory needs both a model and GPUs")),
        ("a.sh", "python t.py", {"gpus": "8xH100", "model": "gpt2"}, ("memory-not-judged", "nothing here says how")),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 16\n", {"gpus": "8xH100", "model": "gpt2"},
         ("memory-not-judged", "16 processes, and dgx-h100 has 8 GPUs")),
        ("a.json", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": '
         "16}}", {"gpus": "8xH100", "model": "gpt2"}, ("memory-not-judged", "whose tensors or sequences are split")),
        ("a.sh", "swift sft", {"gpus": "8xH100"}, ("not-read", "what swift starts")),
        ("a.sh", "python t.py", {}, ()),
        ("a.yaml", "learning_rate: 1e-5\nmodel_name_or_path: x\n", {}, ("not-read", "it looks like ")),
        ("a.yaml", "five: 1\nkeys: 1\nof: 1\nothers: 1\n", {}, ("not-read", "its keys are neither")),
        ("a.yml", "model: gpt2\ncluster: 8xH100\nlayuot: {tp: 3}\n", {}, ("recipe", "layuot")),
        ("a.yaml", RECIPE, {}, ()),
        ("a.yaml", RECIPE.replace("tp: 4", "tp: 3"), {}, ("recipe", "tp=3")),
        ("a.yaml", "distributed_type: NO\nfive: 1\nkeys: 1\nof: 1\nothers: 1\n", {}, ("unknown-key", "of accelerate")),
        ("a.json", '{"train_batch_size": 8, "five": 1, "keys": 1, "of": 1, "others": 1}', {}, ("unknown-key",
        "DeepSpeed")),
        ("a.json", '{"train_batch_sise": 8, "steps": 1}', {}, ("not-read", "its keys are neither")),
        ("a.json", "{}", {}, ("batch-missing", "neither train_batch_size")),
    ],
)  # fmt: skip
def test_the_kind_of_a_file_is_known_by_its_keys(
    name: str, text: str, given: dict[str, str], said: tuple[str, str] | tuple[()], tmp_path: Path
) -> None:
    told = [(each.rule, each.why) for each in findings(file_with(tmp_path / name, text), given)]
    assert any(rule == said[0] and said[1] in why for rule, why in told) if said else told == []


def test_the_files_that_a_run_directory_starts_with_are_read(tmp_path: Path) -> None:
    """kit's ZeRO over Megatron's tensor parallelism: of 8 GPUs 4 are data-parallel ranks of DeepSpeed's batch."""
    pins = kit.Pins(engine="deepspeed", implementation="local", tp=2, zero_stage=1)
    plan = kit.plan("llama-3.2-1b", "8xH100", pins=pins)
    rundir = write_run(plan, RunSpec(data=DataSpec(train="train")), tmp_path / "run")
    assert found(rundir.path, {}) == {}
    assert plan.layout.dp == 4
    split = file_with(
        rundir.path / "megatron.yaml",
        "parallel_state: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 3}\n",
    )
    assert [model_parallel(each) for each in (split, tmp_path / "megatron.yaml")] == [6, 1]
