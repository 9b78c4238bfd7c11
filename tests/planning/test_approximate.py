"""Model types that no family describes: counted by transformers, planned with a warning, refused with a reason.

What is estimated and how a count corrects a configuration: specs/test_configs.py.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from kit.api import plan
from kit.cost.model.params import count
from kit.engines.huggingface.count_parameters import answer_of, described
from kit.engines.huggingface.models import hf_config
from kit.errors import PlanError, SpecError
from kit.planner.plan import Plan
from kit.report.plan_text import render
from kit.report.view import view_of
from kit.specs import counting, strict_yaml
from kit.specs.approximate import approximated
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.families import FAMILIES, Family
from kit.specs.huggingface import model_from_config, read_config
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from kit.specs.validation import adapter
from tests.support import ROOT
from tests.support.parameter_shapes import parameter_shapes
from tests.support.refusals import refusal

KEPT = json.loads((ROOT / "benchmarks" / "results" / "model-types.json").read_text(encoding="utf-8"))["types"]
ALWAYS = ("qwen3_next", "falcon_h1", "exaone_moe", "llama4_text", "nemotron_h", "gemma3n_text", "kimi_linear")
SMALL = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code counts in this process: to import torch takes seconds. Its cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(counting, "_asked", lambda text, name: answer_of(json.loads(text)))


@pytest.mark.parametrize("name", ALWAYS)
def test_parameters_are_those_of_the_model_that_the_engine_builds(name: str) -> None:
    model = approximated({"model_type": name}, described({"model_type": name}), name, "default")
    assert AutoConfig.for_model(name).model_type == model.model_type
    assert count(model).total == sum(map(math.prod, parameter_shapes(model).values())) == KEPT[name]["parameters"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt_neox", "gpt_oss", "bloom"])
def test_traits_are_seen_as_those_of_a_family_that_is_described(name: Family) -> None:
    found = described({"model_type": name, **SMALL})["traits"]
    assert found == {
        trait: getattr(FAMILIES[name], trait)
        for trait in ("norm", "norm_placement", "qk_norm", "fused_attention", "attention_sinks", "fused_qkv")
    }


@pytest.mark.slow
@pytest.mark.nightly
def test_a_process_gives_the_same_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "arcee", **SMALL}
    here = model_from_config(config, "tiny", "config.json")
    monkeypatch.undo()
    assert counting._asked(json.dumps(config), "tiny")["parameters"] == count(here).total


def test_without_transformers_parameters_are_estimated() -> None:
    config = AutoConfig.for_model("cwm").to_dict()
    exact, estimate = (approximated(config, answer, "CWM", "default") for answer in (described(config), None))
    assert count(estimate).total == pytest.approx(count(exact).total, rel=1e-4)


@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "mamba2"])
def test_infinity_is_read_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    """All five limit a time step to [0, ∞); the lower end here is not the class's default. As transformers 5 saves it,
    and as 4 did."""
    AutoConfig.for_model(name, time_step_limit=[0.25, math.inf]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    today = file.read_text()
    for text in (today, re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", today)):
        file.write_text(text)
        model = read_config(tmp_path)
        assert [
            list(config.time_step_limit) for config in (hf_config(model), AutoConfig.from_pretrained(tmp_path))
        ] == [[0.25, math.inf]] * 2
        assert count(model).total == KEPT[name]["parameters"]
        kept = json.dumps(strict_yaml.to_plain(model))
        assert adapter(ModelSpec).validate_json(kept) == model, "as a plan's file keeps it"
    assert text != today


def test_the_text_part_of_a_model_of_images_is_the_family_s() -> None:
    text = {"model_type": "llama", **SMALL, "intermediate_size": 96, "max_position_embeddings": 64}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    asked = model_from_config(config, "llava", "config.json")
    assert (asked.family, asked.hidden_size, asked.num_layers) == ("llama", 64, 2)


@pytest.mark.slow
def test_a_plan_says_that_it_is_approximate_and_how_far_off(tmp_path: Path) -> None:
    model = load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")
    found = plan(model, parse_cluster("64xH200"))
    text = " ".join(render(view_of(found)).split())
    assert "model type qwen3_next is not described; transformers counted its parameters" in text
    assert f"({rows('approximate')['counted']['activations'][1]:.1%})" in text
    found.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == found
    assert re.search(
        r"family=qwen3_next of qwen3-next-80b-a3b.* which has llama, mistral",
        refusal(PlanError, plan, model, parse_cluster("64xH200"), pins=Pins(engine="megatron")),
    )


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen9"}, "not known to the installed transformers; a newer version may know it"),
        ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "x.Y"}}, "is code in its repository"),
        ({"model_type": "clip"}, "is no causal language model of transformers"),
        ({"model_type": "arcee", **SMALL, "num_hidden_layers": -1}, "num_hidden_layers|num_layers|refuses"),
        ({"model_type": "arcee", **SMALL, "hidden_size": "wide"}, "hidden_size|refuses config.json"),
        ({"model_type": "arcee", **SMALL, "num_attention_heads": 0}, "refuses config.json"),
    ],
)
def test_what_transformers_cannot_build_is_refused(config: dict[str, Any], said: str) -> None:
    (line,) = refusal(SpecError, model_from_config, config, "mine", "config.json").splitlines()
    assert re.search(said, line)
