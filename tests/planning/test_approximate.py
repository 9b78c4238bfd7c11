"""Model types that no family describes: counted by transformers, estimated without it, refused with a reason."""

from __future__ import annotations

import json
import math
import re
import subprocess
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NoReturn

import pytest
from transformers import AutoConfig

from kit.api import plan
from kit.cost.model.params import count
from kit.engines.huggingface.count_parameters import answer_of, described
from kit.engines.huggingface.models import hf_config, parameter_shapes
from kit.errors import PlanError, SpecError
from kit.planner.plan import Plan
from kit.report.plan_text import render
from kit.specs import counting, strict_yaml
from kit.specs.approximate import approximated
from kit.specs.base import adapter
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.frozen import thawed
from kit.specs.hf_floats import decoded
from kit.specs.huggingface import model_from_config, read_config
from kit.specs.layout import Pins
from kit.specs.model import ModelSpec
from tests.support.assets import ROOT

KEPT = json.loads((ROOT / "benchmarks" / "results" / "model-types.json").read_text(encoding="utf-8"))["types"]
APPROXIMATE = sorted(name for name, row in KEPT.items() if row["planned"] == "approximately")
ALWAYS = ("qwen3_next", "falcon_h1", "exaone_moe", "llama4_text", "nemotron_h", "gemma3n_text", "kimi_linear")
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code counts in this process: to import torch takes seconds."""
    monkeypatch.setattr(counting, "_asked", lambda text, name: answer_of(json.loads(text)))


@pytest.mark.parametrize("name", ALWAYS)
def test_parameters_are_those_of_the_model_that_the_engine_builds(name: str) -> None:
    config = {"model_type": name}
    model = approximated(config, described(config), name, "default")
    built = AutoConfig.for_model(name)
    assert built.model_type == model.model_type
    total = sum(map(math.prod, parameter_shapes(model).values()))
    assert count(model).total == total == KEPT[name]["parameters"]


def test_a_configuration_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "arcee", **SMALL}
    first = model_from_config(config, "tiny", "config.json")

    def none(*_: object, **__: object) -> NoReturn:
        raise AssertionError("asked again")

    monkeypatch.setattr(subprocess, "run", none)
    assert model_from_config(config, "tiny", "config.json") == first


def absent(_: str) -> NoReturn:
    raise PackageNotFoundError


def test_without_transformers_parameters_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("cwm").to_dict()
    exact = approximated(config, described(config), "CWM", "default")
    monkeypatch.setattr(counting, "version", absent)
    model = model_from_config(config, "CWM", "config.json")
    assert model.approximate is not None
    assert not model.approximate.counted
    assert count(model).total == pytest.approx(count(exact).total, rel=1e-4)


@pytest.mark.usefixtures("without_a_process")
@pytest.mark.parametrize("name", ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "mamba2"])
@pytest.mark.parametrize("saved", ["as today", "as in transformers 4"])
def test_infinity_is_read_as_transformers_reads_it(tmp_path: Path, name: str, saved: str) -> None:
    """All five limit a time step to [0, ∞); the lower end here is not the class's default."""
    asked = AutoConfig.for_model(name, time_step_limit=[0.25, math.inf])
    asked.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    assert '"__float__": "Infinity"' in file.read_text()
    if saved == "as in transformers 4":
        file.write_text(re.sub(r'\{\s*"__float__": "Infinity"\s*\}', "Infinity", file.read_text()))
        assert "Infinity" in file.read_text()
    model = read_config(tmp_path)
    built = hf_config(model)
    assert list(built.time_step_limit) == list(AutoConfig.from_pretrained(tmp_path).time_step_limit) == [0.25, math.inf]
    assert count(model).total == KEPT[name]["parameters"]
    assert adapter(ModelSpec).validate_json(json.dumps(strict_yaml.to_plain(model))) == model, (
        "as a plan's file keeps it"
    )


def test_infinity_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "version", absent)
    for infinity in ('{"__float__": "Infinity"}', "Infinity"):
        text = json.dumps({"model_type": "mamba2", **SMALL, "time_step_limit": [0.0, "here"]})
        (tmp_path / "config.json").write_text(text.replace('"here"', infinity))
        model = read_config(tmp_path)
        assert model.approximate is not None
        assert decoded(thawed(model.approximate.config))["time_step_limit"] == [0.0, math.inf]


@pytest.mark.usefixtures("without_a_process")
def test_the_text_part_of_a_model_of_images_is_the_family_s() -> None:
    text = {"model_type": "llama", **SMALL, "intermediate_size": 96, "max_position_embeddings": 64}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}
    asked = model_from_config(config, "llava", "config.json")
    assert (asked.family, asked.hidden_size, asked.num_layers) == ("llama", 64, 2)


def _next() -> ModelSpec:
    return load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")


def test_a_plan_says_that_it_is_approximate_and_how_far_off(tmp_path: Path) -> None:
    found = plan(_next(), parse_cluster("64xH200"))
    text = " ".join(render(found).split())
    worst = rows("approximate")["counted"]["activations"][1]
    assert "model type qwen3_next is not described; transformers counted its parameters" in text
    assert f"({worst:.1%})" in text
    found.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == found


def test_megatron_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"family=qwen3_next of qwen3-next-80b-a3b.* which has llama, mistral"):
        plan(_next(), parse_cluster("64xH200"), pins=Pins(engine="megatron"))


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
@pytest.mark.usefixtures("without_a_process")
def test_what_transformers_cannot_build_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as error:
        model_from_config(config, "mine", "config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_layers=1000000000"),
        ({"num_attention_heads": "many"}, "num_attention_heads='many'"),
        ({"num_hidden_layers": True}, "num_layers=True"),
    ],
)
def test_absurd_sizes_are_one_line_each(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as error:
        approximated({"model_type": "mine", **SMALL, **wrong}, None, "mine", "config.json")
    assert "\n" not in str(error.value)
