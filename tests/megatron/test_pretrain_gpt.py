"""pretrain_gpt.sh: every flag is one of Megatron-LM's, and says what megatron.yaml says."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from kit.addons.targets.pretrain_gpt import _FLAGS, pretrain_gpt_arguments, pretrain_gpt_script, why_not
from kit.emit.extra import with_extra
from kit.emit.megatron import megatron_settings
from kit.emit.run_directory import files_of, write
from kit.errors import EngineError
from kit.planner.make_plan import make_plan
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.extra import Extra
from kit.specs.job import JobSpec, OptimizerSpec
from kit.specs.layout import Pins
from kit.specs.run import BlendedSetSpec, DataSpec, RunSpec
from tests.emit.plans import stand_in
from tests.megatron.test_settings import plans
from tests.support import tiny
from tests.support.refusals import refusal

FUSED = {"engine": "megatron", "implementation": "transformer_engine"}
RECORDED = json.loads((Path(__file__).parent / "pretrain_gpt_arguments.json").read_text(encoding="utf-8"))
TABLE = RECORDED["arguments"]
KINDS = {"int": int, "float": float, "str": str, "tuple_type": lambda text: tuple(map(int, text.split(",")))}


def parsed(plan, table=TABLE):
    """Flag → value, as the recorded parser would read it."""
    found = {}
    for flag, *values in pretrain_gpt_arguments(plan):
        assert flag in table, f"{flag} is not one of Megatron-LM's"
        row = table[flag]
        assert flag not in found, f"{flag} twice"
        if row["kind"] == "flag":
            assert not values, flag
            found[flag] = True
            continue
        assert "nargs" in row or len(values) == 1, (flag, values)
        assert all(value in row.get("choices", [value]) for value in values), (flag, values)
        read = [KINDS[row["kind"]](value) for value in values]
        found[flag] = read if "nargs" in row else read[0]
    return found


def test_every_flag_is_in_the_recorded_table_and_agrees_with_the_plan():
    """A flag with False is not there."""
    seen = set()
    for plan in plans():
        assert (why_not(plan) is None) == plan.model.traits.transformer_engine, (plan.model.family, plan.layout)
        if why_not(plan):
            continue
        model, job, layout, flags = plan.model, plan.job, plan.layout, parsed(plan)
        grouped = model.num_key_value_heads != model.num_attention_heads
        expected = {
            "--num-layers": model.num_layers,
            "--hidden-size": model.hidden_size,
            "--ffn-hidden-size": model.ffn_hidden_size,
            "--num-attention-heads": model.num_attention_heads,
            "--num-query-groups": grouped and model.num_key_value_heads,
            "--group-query-attention": grouped,
            "--tensor-model-parallel-size": layout.tp,
            "--pipeline-model-parallel-size": layout.pp,
            "--context-parallel-size": layout.cp,
            "--num-virtual-stages-per-pipeline-rank": layout.vp > 1 and layout.vp,
            "--sequence-parallel": layout.sp,
            "--num-experts": model.num_experts or False,
            "--expert-model-parallel-size": model.num_experts > 0 and layout.ep,
            "--expert-tensor-parallel-size": model.num_experts > 0 and layout.etp,
            "--calculate-per-token-loss": not job.balancing,
            "--micro-batch-size": layout.micro_batch_size,
            "--global-batch-size": job.global_batch_size,
            "--seq-length": job.seq_length,
            "--bf16": job.precision == "bf16",
            "--untie-embeddings-and-output-weights": not model.tied_embeddings,
            "--swiglu": model.gated_mlp,
            "--disable-bias-linear": not model.linear_bias,
            "--add-qkv-bias": model.qkv_bias,
            "--qk-layernorm": model.traits.qk_norm == "head",
            "--norm-epsilon": model.norm_eps,
            "--rotary-base": not model.learned_positions and model.rope_theta,
            "--use-distributed-optimizer": layout.zero_stage == 1,
        }
        if job.balancing:
            kind, coefficient = job.balancing.moe_router_load_balancing_type, job.balancing.moe_aux_loss_coeff
            expected |= {
                "--moe-router-load-balancing-type": [kind],
                "--moe-aux-loss-coeff": [coefficient * (layout.dp if kind == "global_aux_loss" else 1)],
                "--moe-z-loss-coeff": 0.125,
                "--moe-expert-capacity-factor": 2.0,
            }
        assert {flag: flags.get(flag, False) for flag in expected} == expected, (model.family, layout)
        assert ("--recompute-granularity" in flags) == (layout.recompute != "none")
        assert ("--window-size" in flags) == model.windowed(job.seq_length)
        # NullTokenizer counts one more than it is told; rows are then padded to a multiple of 1·tp.
        rows = -(-(flags["--vocab-size"] + 1) // (flags["--make-vocab-size-divisible-by"] * layout.tp)) * layout.tp
        assert rows == megatron_settings(plan)["model"]["vocab_size"]
        seen |= flags.keys()
    assert len(seen) > 50


def with_switches(plan, **switches):
    return with_extra(plan, Extra(megatron={"transformer_config": switches}))


def test_experts_get_the_fast_options():
    flags = parsed(tiny.plan(tiny.model("mixtral"), **FUSED, ep=2, dp=2))
    assert {"--moe-grouped-gemm", "--moe-permute-fusion"} <= flags.keys()
    assert flags["--moe-token-dispatcher-type"] == "alltoall"


def test_megatron_lm_gets_the_switches_of_extra():
    """Of a recipe: what kit's own worker has no schedule or package for."""
    plan = tiny.plan(tiny.model("mixtral"), job={"precision": "bf16"}, **FUSED, ep=2, dp=2)
    flags = parsed(with_switches(plan, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep"))
    assert (flags["--moe-token-dispatcher-type"], flags["--moe-flex-dispatcher-backend"]) == ("flex", "deepep")
    flags = parsed(with_switches(plan, overlap_moe_expert_parallel_comm=True, moe_shared_expert_overlap=True))
    assert {"--overlap-moe-expert-parallel-comm", "--moe-shared-expert-overlap"} <= flags.keys()
    assert why_not(with_switches(plan, moe_deepep_num_sms=8)) == (
        "it has no flag for transformer_config.moe_deepep_num_sms of megatron.yaml"
    )


BF16_MOMENTS = tiny.plan(
    tiny.model(), job={"precision": "bf16"}, **FUSED, zero_stage=1, dp=2, optimizer_state_dtype="bf16"
)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            with_switches(tiny.plan(tiny.model("mixtral"), **FUSED), overlap_moe_expert_parallel_comm=True),
            "transformer_config.overlap_moe_expert_parallel_comm=true: .*or remove the key",
        ),
        (BF16_MOMENTS, "layout.optimizer_state_dtype=bf16: .*or use fp32"),
        (
            tiny.plan(tiny.model(), job={"precision": "fp8"}, **FUSED, zero_stage=1, dp=2, fp8_param_gather=True),
            "layout.fp8_param_gather=true: .*or use false",
        ),
    ],
    ids=["schedule", "moments", "weights"],
)
def test_kits_worker_refuses_what_only_megatron_lm_runs(plan, says):
    from kit.engines.megatron.engine import MegatronEngine

    said = refusal(EngineError, MegatronEngine, SimpleNamespace(plan=plan, run=None, settings=megatron_settings(plan)))
    assert re.fullmatch(says, said), said


def known_to_megatron_core(plan):
    """Whether its OptimizerConfig has every setting."""
    from megatron.core.optimizer import OptimizerConfig

    return megatron_settings(plan)["optimizer"].keys() <= {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_megatron_lm_and_megatron_core_take_the_optimizer_on_the_host():
    h20 = dataclasses.replace(parse_cluster("4x8xH20"), host_ram_gib=2048.0)
    pins = Pins(engine="megatron", tp=4, pp=8, ep=4, last_stage_layers=10, offload_optimizer="cpu")
    plan = make_plan(load_model("qwen3-235b-a22b"), h20, JobSpec(), pins)
    half = dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, optimizer_offload_fraction=0.5))
    flags = parsed(plan)
    assert {"--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--use-distributed-optimizer"} <= flags.keys()
    assert [parsed(each)["--optimizer-offload-fraction"] for each in (plan, half)] == [1, 0.5]
    assert known_to_megatron_core(plan)


def test_megatron_lm_and_megatron_core_take_bf16_moments():
    flags = parsed(BF16_MOMENTS)
    assert "--use-precision-aware-optimizer" in flags
    assert (flags["--exp-avg-dtype"], flags["--exp-avg-sq-dtype"]) == ("bf16", "bf16")
    assert known_to_megatron_core(BF16_MOMENTS)


def test_muon_has_the_flags_of_the_megatron_lm_that_has_it():
    job = {"precision": "bf16", "optimizer": OptimizerSpec(name="muon")}
    layout = FUSED | {"tp": 2}
    plan = tiny.plan(tiny.model(), job=job, **layout)
    flags = parsed(plan, TABLE | RECORDED["core_v0.19.2"])
    assert {
        "--optimizer": "muon",
        "--muon-tp-mode": "duplicated",
        "--muon-momentum": 0.95,
        "--muon-extra-scale-factor": 0.2,
        "--muon-nesterov": True,
        "--muon-coefficient-type": "simple",  # Keller Jordan's, which torch has too
    }.items() <= flags.items()
    assert "--adam-beta1" in flags
    script = pretrain_gpt_script(plan)
    assert "tag core_v0.19.2" in script
    assert "orthogonalises gate and up as one matrix" in script
    assert "fp32 is highest" in why_not(tiny.plan(tiny.model(), job=job | {"precision": "fp32"}, **layout))
    if importlib.util.find_spec("megatron.training") is None:  # the wheels of older versions do not have it
        assert not version("megatron-core").startswith("0.19")
        return
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    add_megatron_arguments(parser)
    options = {option: action for action in parser._actions for option in action.option_strings}
    assert flags.keys() <= options.keys()
    for flag, row in RECORDED["core_v0.19.2"].items():
        action = options[flag]
        assert ("flag" if action.nargs == 0 else action.type.__name__) == row["kind"]
        assert action.choices == row.get("choices")


def test_what_flags_cannot_say_is_not_written():
    other = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert all(
        why_not(tiny.plan(tiny.model(**rope), engine="megatron", implementation="local"))
        for rope in ({"rope_scaling": linear}, {"rope_scaling": other}, {"rope_theta": 1.5})
    )
    assert "pretrain_gpt.sh" not in files_of(tiny.plan())


def test_every_setting_has_a_flag_or_a_reason():
    settings = [megatron_settings(plan) for plan in plans() if plan.model.traits.transformer_engine]
    keys = {f"{section}.{key}" for each in settings for section, found in each.items() for key in found}
    assert keys <= _FLAGS.keys()


def words_of(script: Path, *more: str) -> list[str]:
    """What Megatron-LM gets: Python is a script that prints its words."""
    stand_in(script.parent, python='#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    variables = {
        "PYTHON": str(script.parent / "python"), "MEGATRON_LM": "/a dir/with $(spaces)", "NODE_RANK": "0",
        "MASTER_ADDR": "h",
    }  # fmt: skip
    command = ["bash", str(script), *more]
    ran = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


@pytest.mark.parametrize("nodes", [1, 2])
def test_bash_passes_on_what_was_planned(tmp_path, nodes):
    plan = next(plan for plan in plans() if plan.layout.tp == 2)
    cluster = dataclasses.replace(plan.cluster, num_nodes=nodes, inter_node_gbytes_per_s=1.0)
    plan = dataclasses.replace(plan, cluster=cluster)
    (script := tmp_path / "pretrain_gpt.sh").write_text(pretrain_gpt_script(plan), encoding="utf-8")
    words = words_of(script, "--data-path", "my data")
    expected = [word for words in pretrain_gpt_arguments(plan) for word in words]
    assert words[-len(expected) - 3 :] == ["/a dir/with $(spaces)/pretrain_gpt.py", *expected, "--data-path", "my data"]
    assert ("--nnodes" in words) == (nodes > 1)
    missing = subprocess.run(["bash", str(script)], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert missing.returncode != 0
    assert "MEGATRON_LM: directory of a Megatron-LM checkout" in missing.stderr


def words_of_a_blend(directory: Path, paths: dict[str, tuple[str, float]]) -> tuple[str, list[str]]:
    """(text, words that Megatron-LM gets) of a run's script."""
    blend = {name: BlendedSetSpec(path=path, weight=weight) for name, (path, weight) in paths.items()}
    plan, run = next(plan for plan in plans() if plan.layout.tp == 2), RunSpec(data=DataSpec(blend=blend))
    script = write(plan, run, directory / "run").path / "pretrain_gpt.sh"
    return script.read_text(encoding="utf-8"), words_of(script)


def test_a_blend_that_megatron_cannot_read_is_left_out_with_a_word(tmp_path):
    text, words = words_of_a_blend(tmp_path, {"web": ("gs://bucket/$(touch x)", 7), "code": ("/a", 0.25)})
    assert "--data-path" not in words
    assert "# It reads sets on a disk and at s3://, and run.data.blend has gs://bucket/$(touch x): " in text


@pytest.mark.parametrize("web", ["/sets/it's web", "s3://bucket/sets/it's $(touch x)"])
def test_a_blend_of_the_run_is_its_data_path(tmp_path, monkeypatch, web):
    """Of a set in object storage Megatron is told how to read it itself."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    code = tmp_path / "home/a $(set)"
    _, words = words_of_a_blend(tmp_path, {"web": (web, 7), "code": (str(code), 0.25)})
    first, given, second, local, *rest = words[words.index("--data-path") + 1 :]
    assert (float(first), float(second), Path(local).resolve()) == (7.0, 0.25, code)
    assert (given if web.startswith("s3") else str(Path(given).resolve())) == web
    stored = ["--no-mmap-bin-files", "--object-storage-cache-path", str(tmp_path / "run/indexes")]
    assert (rest[:3] == stored) == web.startswith("s3")
    assert [TABLE[flag]["kind"] for flag in stored[:2]] == ["flag", "str"]
