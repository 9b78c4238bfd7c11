"""Every rule speaks where it must, is silent beside it, and says no more than what the readers themselves do."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.diagnose.lint import lint, read_values, write_fixed
from kit.diagnose.lint.json_text import parse_json
from kit.diagnose.lint.rule import CHECKS, RULES, markdown
from kit.emit.run_directory import write as write_run
from kit.errors import SpecError
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.run import DataSpec, RunSpec
from tests.diagnose.lint_cases import (
    ACCELERATE_CASES,
    BASE,
    COMMAND_CASES,
    CONSEQUENCE_CASES,
    DEEPSPEED_CASES,
    LintCase,
)

ROOT = Path(__file__).parents[2]
TUTORIALS = Path(__file__).parent / "tutorials"
DS_OF_TWO = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}


EXPECTED = strict_yaml.read(TUTORIALS / "expected.yaml").data


def name(case: LintCase) -> str:
    return case.rule


def write(directory: Path, content: dict[str, Any] | str, suffix: str) -> Path:
    path = directory / f"config{suffix}"
    text = (
        content if isinstance(content, str) else json.dumps(content) if suffix == ".json" else strict_yaml.dump(content)
    )
    path.write_text(text)
    (directory / "ds.json").write_text(json.dumps(DS_OF_TWO))
    return path


def found(path: Path, context: dict[str, str]) -> dict[str, str]:
    """Rule → severity."""
    findings = lint(
        path,
        reader=context.get("reader"),  # type: ignore[arg-type]
        model=load_model(context["model"]) if "model" in context else None,
        cluster=parse_cluster(context["gpus"]) if "gpus" in context else None,
    )
    return {finding.rule: finding.severity for finding in findings}


@pytest.mark.parametrize("case", DEEPSPEED_CASES + CONSEQUENCE_CASES, ids=name)
def test_deepspeed_rule(case: LintCase, tmp_path: Path) -> None:
    bad = found(write(tmp_path, case.bad, ".json"), case.context)
    assert bad.get(case.rule) == case.severity
    context = case.context if case.good_context is None else case.good_context
    assert case.rule not in found(write(tmp_path, case.good, ".json"), context)


@pytest.mark.parametrize("case", ACCELERATE_CASES, ids=name)
def test_accelerate_rule(case: LintCase, tmp_path: Path) -> None:
    assert found(write(tmp_path, case.bad, ".yaml"), case.context).get(case.rule) == case.severity
    assert case.rule not in found(write(tmp_path, case.good, ".yaml"), case.context)


@pytest.mark.parametrize("case", COMMAND_CASES, ids=name)
def test_rule_of_launch_lines(case: LintCase, tmp_path: Path) -> None:
    assert found(write(tmp_path, case.bad, ".sh"), {}).get(case.rule) == case.severity
    assert case.rule not in found(write(tmp_path, case.good, ".sh"), {})


def test_every_rule_has_a_case_and_a_line_in_the_docs() -> None:
    """The ids are those that the sources give to findings, and those of tables with a case; three are raised by whole
    checks of their own."""
    sources = "".join(file.read_text() for file in sorted((ROOT / "kit/diagnose/lint").glob("*.py")))
    before = r"(?:finding\(|Finding\(|unknown_keys\(config, \w+\(\),|yield)"
    given = before + r'\s*"([a-z0-9]+(?:-[a-z0-9]+)+|prediction|recipe|edited|hostfile)"'
    rows = [each for checks in CHECKS.values() for each in checks if isinstance(each, partial)]
    ids = set(re.findall(given, sources)) | {row.args[0] for row in rows if row.args[1]}
    assert ids == set(RULES)
    cases = (*DEEPSPEED_CASES, *CONSEQUENCE_CASES, *ACCELERATE_CASES, *COMMAND_CASES)
    assert ids - {case.rule for case in cases} == {"recipe", "run-directory", "edited"}
    assert markdown() in (ROOT / "docs/lint.md").read_text(), "kit lint --rules"


def test_recipes_and_run_directories_have_rules_too(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: llama-3.1-8b\ncluster: 8xH100\nlayout: {engine: megatron, tp: 3}\n")
    assert set(found(recipe, {})) == {"recipe"}
    recipe.write_text(recipe.read_text().replace("tp: 3", "tp: 4"))
    assert found(recipe, {}) == {}
    rundir = write_run(kit.plan(kit.load_recipe(recipe)), RunSpec(data=DataSpec(train="train")), tmp_path / "run")
    assert found(rundir.path, {}) == {}
    launched = rundir.path / "megatron.yaml"
    text = launched.read_text()
    launched.write_text(text.replace("hidden_dropout: 0.0", "hidden_dropout: 0.1"))
    assert found(rundir.path, {}) == {"edited": "note"}
    launched.write_text(text.replace("tensor_model_parallel_size: 4", "tensor_model_parallel_size: 2"))
    assert found(rundir.path, {}) == {"run-directory": "error"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_tutorials_print(name: str) -> None:
    """Configurations and launch lines as tutorials print them, with their mistakes; and the same without."""
    case = EXPECTED[name]
    rules = {rule for rule, severity in found(TUTORIALS / name, case.get("context", {})).items() if severity != "note"}
    assert rules == set(case["finds"])


@pytest.mark.parametrize("case", [case for case in DEEPSPEED_CASES if case.refused], ids=name)
def test_what_is_called_refused_is_refused_by_deepspeed_itself(case: LintCase) -> None:
    import deepspeed.runtime.config as parser

    assert isinstance(case.bad, dict)
    assert isinstance(case.good, dict)
    with pytest.raises(Exception) as caught:  # DeepSpeed raises half a dozen kinds
        parser.DeepSpeedConfig(dict(case.bad))
    assert not isinstance(caught.value, KeyError | AttributeError)
    if "auto" not in json.dumps(case.good):
        parser.DeepSpeedConfig(dict(case.good))


def test_a_pipeline_section_is_read_for_a_pipeline_module_alone(tmp_path: Path) -> None:
    """DeepSpeed's own engine takes a plain model at stage 3 with it."""
    import deepspeed.runtime.config as parser
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = BASE | {"zero_optimization": {"stage": 3}, "pipeline": {"pipeline_parallel_size": 1}}
    assert parser.DeepSpeedConfig(dict(config)).pipeline["pipeline_parallel_size"] == 1
    assert not re.search(r"_config\.pipeline\b", inspect.getsource(DeepSpeedEngine))
    assert "error" not in found(write(tmp_path, config, ".json"), {}).values()


GPUS = {"model": "llama-3.1-8b", "gpus": "8xH100"}
ZERO_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}


def predicted_gib(directory: Path, zero: dict[str, Any], **given: Any) -> float:
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    path = write(directory, config, ".json")
    findings = lint(path, model=load_model("llama-3.1-8b"), cluster=parse_cluster("8xH100"), **given)
    (why,) = (finding.why for finding in findings if finding.rule == "prediction")
    return float(re.search(r"about (\d+) GiB a GPU", why)[1])  # type: ignore[index]


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
    grown = predicted_gib(tmp_path, ZERO_3 | {key: large}) - predicted_gib(tmp_path, ZERO_3 | {key: small})
    assert grown == pytest.approx(grows_gib, abs=1.5)


@pytest.mark.parametrize(("policy", "gib"), [("NO_WRAP", 44.9), ("TRANSFORMER_BASED_WRAP", 22.0)])
def test_memory_of_one_fsdp_group_is_that_of_all_weights(policy: str, gib: float, tmp_path: Path) -> None:
    """N = 8.03e9: 16 N / 8 of states, and 2 N + 2 N of gathered weights and gradients on each rank; a group a layer
    gathers the root's and two layers'."""
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": policy, "fsdp_activation_checkpointing": True}
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": fsdp}
    path = write(tmp_path, config, ".yaml")
    findings = lint(path, model=load_model("llama-3.1-8b"), cluster=parse_cluster("8xH100"))
    (why,) = (finding.why for finding in findings if finding.rule == "prediction")
    found_gib = float(re.search(r"about (\d+) GiB a GPU", why)[1])  # type: ignore[index]
    assert found_gib == pytest.approx(gib, abs=1.5)


def test_sequences_and_gradient_checkpointing_can_be_told(tmp_path: Path) -> None:
    usual, long, saved = (
        predicted_gib(tmp_path, ZERO_3, **given)
        for given in ({}, {"seq_length": 8192}, {"seq_length": 8192, "gradient_checkpointing": True})
    )
    assert long > usual + 10
    assert saved < long - 20


def test_host_memory_takes_buffers_of_offload(tmp_path: Path) -> None:
    """16 buffers of 5e10 elements are more than the host has; the defaults are not."""
    nvme = {"device": "nvme", "nvme_path": "/tmp"}
    for size, expected in ((5e10, "error"), (1e8, None)):
        zero = ZERO_3 | {"offload_param": nvme | {"buffer_count": 16, "buffer_size": size}}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "aio": {}}
        assert found(write(tmp_path, config, ".json"), GPUS).get("host-ram") == expected


def test_the_flat_copy_that_a_trainer_makes_in_host_memory_is_judged(tmp_path: Path) -> None:
    """14.77e9 weights of 2 bytes are 27.5 GiB, twice too many for an A100 of 40 GB. 8 processes copy and flatten them
    on the host: 440 GiB beside the 328 of offload. kit's own engine makes no such copy."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    path = write(tmp_path, config, ".json")
    for reader, host, gpus, expected in (
        ("trainer", 700.0, "8xA100-40", True),
        ("trainer", 900.0, "8xA100-40", False),
        ("deepspeed", 700.0, "8xA100-40", False),
        ("trainer", 700.0, "8xA100-80", False),
    ):
        cluster = dataclasses.replace(parse_cluster(gpus), host_ram_gib=host)
        findings = lint(path, reader=reader, model=load_model("qwen2.5-14b"), cluster=cluster)  # type: ignore[arg-type]
        said = [finding.why for finding in findings if finding.rule == "host-ram"]
        assert any("768 GiB while they load" in why for why in said) == expected, (reader, host, gpus)


TABLES = ("launcher_options", "accelerate_keys", "deepspeed_keys", "layer_classes", "trainer_arguments")
WRITE_TABLES = """
import contextlib, io, json, runpy, sys
written, tables = {}, sys.argv[1:]
del sys.argv[1:]
for table in tables:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        runpy.run_path(f"scripts/{table}.py", run_name="__main__")
    written[table] = stream.getvalue()
print(json.dumps(written))
"""


def test_tables_are_what_the_installed_readers_read() -> None:
    """All in one process: importing the readers is what takes time."""
    words = [sys.executable, "-c", WRITE_TABLES, *TABLES]
    made = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    written = json.loads(made.stdout.splitlines()[-1])
    for table in TABLES:
        assert written[table] == (ROOT / f"kit/diagnose/lint/{table}.yaml").read_text(), table


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
    fixed = read_values(tmp_path / "fixed.json")
    assert fixed["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}
    assert fixed["gradient_clipping"] == 1.0
    with pytest.raises(SpecError, match="not overwritten"):
        write_fixed(bad, (), tmp_path / "fixed.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "b" 2}', "x.json:2: not valid JSON: Expecting ':' delimiter at '2}'"),
        ('{"a": 1\n "b": 2}', "x.json:2: not valid JSON: Expecting ',' delimiter at '\"b\": 2}'"),
        ('{"a": tru}', "x.json:1: not valid JSON: Expecting value at 'tru}'"),
        ('{"a": "x\n"}', "x.json:1: not valid JSON: Invalid control character at ''"),
        ('{"a": [1, 2', "x.json:1: not valid JSON: Expecting ',' delimiter at ''"),
        ("[]", "x.json: holds a list where an object is expected"),
        ("{} 1", "x.json:1: not valid JSON: Extra data at '1'"),
    ],
)
def test_json_that_cannot_be_read_names_the_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_json(text, "x.json")
    assert message in str(caught.value)


def test_json_is_read_as_json_reads_it() -> None:
    text = '{"a": [1, -2.5e-3, {"b": "\\u00e9\\n{//#"}], "c": null, "d": {}, "e": []}'
    parsed = parse_json(text, "x.json")
    assert parsed.document.data == json.loads(text)
    assert parsed.irregularities == ()


def test_the_command_line(tmp_path: Path) -> None:
    def kit(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "kit", "lint", *words], capture_output=True, text=True, cwd=ROOT)

    bad = write(tmp_path, {"train_batch_sise": 8}, ".json")
    run = kit(str(bad))
    assert run.returncode == 1
    assert "[unknown-key] train_batch_sise" in run.stdout
    assert "did you mean train_batch_size?" in run.stdout
    run = kit(str(bad), "--json", "--write-fixed", str(tmp_path / "good.json"))
    assert run.returncode == 1
    assert {item["rule"] for item in json.loads(run.stdout)} == {"unknown-key", "batch-missing"}
    assert kit(str(tmp_path / "good.json")).returncode == 0
    for words in (
        [str(tmp_path / "none.json")],
        [str(bad), "--reader", "nobody"],
        [str(bad), "--write-fixed", str(bad)],
    ):
        run = kit(*words)
        assert run.returncode == 2
        assert run.stderr.startswith("error: ")
        assert "Traceback" not in run.stderr


def test_the_correction_of_bf16_without_its_units_is_fp16(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}))
    (found,) = (each for each in lint(path, cluster=parse_cluster("8xV100-32")) if each.rule == "bf16-hardware")
    assert dict(found.changes) == {("bf16", "enabled"): False, ("fp16", "enabled"): True}


@pytest.mark.parametrize(("wrong", "shown", "last"), [(49, 49, ""), (50, 50, ""), (53, 50, "3 more of the same")])
def test_of_very_many_findings_fifty_are_shown_and_the_others_counted(
    wrong: int, shown: int, last: str, tmp_path: Path
) -> None:
    (tmp_path / "all.sh").write_text("torchrun train.py\n" * wrong)
    said = [finding for finding in lint(tmp_path / "all.sh") if finding.rule == "one-process"]
    assert [finding.line for finding in said if finding.line is not None] == list(range(1, shown + 1))
    assert [finding.why for finding in said if finding.line is None] == ([last] if last else [])
