"""What kit plans of every model type of the installed transformers, and how far the approximate road is off.

``python -m benchmarks.tables.model_types`` builds every type on torch's meta device (three minutes) and writes
``benchmarks/results/model-types.json``, ``kit/specs/catalog/approximate.yaml`` and the table in docs/model-types.md.
"""

from __future__ import annotations

import json
import math
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from kit.cost.memory.activations_huggingface import layer_bytes
from kit.cost.model.flops import model_flops_per_token
from kit.cost.model.params import count
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.planner.rules.megatron_layers import NOT_IN_MEGATRON
from kit.specs.approximate import approximated
from kit.specs.catalog import described_names, load_model, parse_cluster
from kit.specs.families import FAMILIES
from kit.specs.huggingface import TEXT_PARTS
from kit.specs.job import JobSpec
from kit.specs.layout import Layout
from kit.specs.model import ModelSpec
from kit.units import human_count
from tests.support import ROOT
from tests.support.page import Section, table, write_json

RESULTS = ROOT / "benchmarks" / "results" / "model-types.json"
BANDS = ROOT / "kit" / "specs" / "catalog" / "approximate.yaml"
USUAL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""For types that transformers does not build from their defaults."""
_QUANTITIES = ("parameters", "activations", "FLOPs")
_LAYOUTS = (
    Layout(engine="deepspeed", implementation="huggingface", zero_stage=3, dp=8),
    Layout(engine="torch", implementation="huggingface", dp=8),
)


def counted_type(model_type: str) -> dict[str, Any]:
    """What is planned of a type, by its default configuration or by usual sizes."""
    from kit.engines.huggingface.count_parameters import described

    if model_type in FAMILIES:
        return {"planned": "exactly"}
    found: dict[str, Any] = {}
    for sizes in ({}, USUAL):
        try:
            config = {"model_type": model_type, **sizes}
            answer = described(config)
            part = answer.get("sizes", {}).get("model_type")
            if (part := TEXT_PARTS.get(part, part)) in FAMILIES:
                return {"planned": "exactly", "text part": part}
            model = approximated(config, answer, model_type, "default")
        except SpecError as error:
            return {"planned": "refused", "why": str(error)}
        except Exception as error:  # whatever transformers raises of its own defaults
            found = {"planned": "refused", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
            continue
        known = model.approximate
        assert known is not None
        kept = "attention_layers", "windowed_layers", "recurrent_layers"
        return {
            "planned": "approximately",
            **({"text part": model.model_type} if model.model_type != model_type else {}),
            **({"usual sizes": True} if sizes else {}),
            "parameters": count(model).total,
            "active": active_parameters(model),
            "layers": model.num_layers,
            **{key: getattr(known, key) for key in kept},
            "expert_layers": model.num_layers - model.first_dense_layers if model.num_experts else 0,
        }
    return found


def active_parameters(model: ModelSpec) -> int:
    """Parameters that take part in computing the next token; all of them without experts."""
    counts, experts = count(model), max(model.num_experts, 1)
    layer = counts.layer
    used = sum(each * model.experts_per_token // experts for each in (layer.experts, layer.expert_biases))
    idle = (counts.num_layers - counts.first_layers) * (layer.routed - used)
    return counts.total - counts.prediction_heads - idle


def quantities(model: ModelSpec) -> tuple[float, ...]:
    """Parameters, bytes of activations without and with autocast, and model FLOPs a token."""
    job = JobSpec(seq_length=min(4096, model.max_position_embeddings))
    node = parse_cluster("8xH100")
    kept = [
        sum(layer_bytes(Workload(model, node, job, layout), model.has_experts(i)) for i in range(model.num_layers))
        for layout in _LAYOUTS
    ]
    return float(count(model).total), *kept, model_flops_per_token(model, job.seq_length)


def errors(model: ModelSpec, counted: bool) -> dict[str, float]:
    """How far the approximate road is off for a model that is described, by quantity."""
    from kit.engines.huggingface.count_parameters import described
    from kit.engines.huggingface.models import hf_config

    config = {**hf_config(model).to_dict(), "model_type": model.family}
    answer = described(config) if counted else None
    found, exact = quantities(approximated(config, answer, model.name, "exact")), quantities(model)
    off = [abs(a / b - 1) for a, b in zip(found, exact, strict=True)]
    return dict(zip(_QUANTITIES, (off[0], max(off[1:3]), off[3]), strict=True))


def bands(models: list[ModelSpec]) -> dict[str, Any]:
    """For each road and quantity: what four of five families stay below, and all; of a family its worst model."""
    found = {}
    for road in ("counted", "estimated"):
        worst: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for model in models:
            for quantity, off in errors(model, road == "counted").items():
                worst[quantity][model.family] = max(worst[quantity][model.family], off)
        found[road] = {
            quantity: [_above(sorted(off.values())[-(-len(off) * 4 // 5) - 1]), _above(max(off.values()))]
            for quantity, off in worst.items()
        }
    return found


def _above(off: float) -> float:
    return math.ceil(round(off * 1e3, 3)) / 1e3


def decoders() -> Iterator[ModelSpec]:
    """Models of the catalog that the approximate road could take."""
    for name in described_names():
        if not (model := load_model(name)).is_encoder_decoder:
            yield model


def tiny() -> Iterator[ModelSpec]:
    """Three small random shapes of each family."""
    from tests.support.models import FAMILIES as DECODERS
    from tests.support.models import random_model

    for family in DECODERS:
        yield from (random_model(random.Random(seed), family) for seed in range(3))


def text() -> str:
    """The table, by what is planned, from the committed results."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    types, rows = kept["types"], []
    for name, row in types.items():
        part = f"text part {row['text part']}" if "text part" in row else ""
        if row["planned"] == "exactly":
            traits = FAMILIES[row.get("text part", name)]
            rows.append((name, "exactly", "", "yes" if traits.megatron else "no", part))
        elif row["planned"] == "approximately":
            kinds = {
                "attention": row["attention_layers"] - row["windowed_layers"],
                "sliding": row["windowed_layers"],
                "state": row["recurrent_layers"],
                "experts": row["expert_layers"],
            }
            layers = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
            size = human_count(row["parameters"])
            size += f" ({human_count(row['active'])} active)" if row["active"] != row["parameters"] else ""
            sizes = "usual sizes: transformers does not build its defaults" if "usual sizes" in row else ""
            lacks = NOT_IN_MEGATRON.get(row.get("text part", name), "no")
            rows.append((name, "approximately", size, lacks, "; ".join(filter(None, (layers, part, sizes)))))
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, row in types.items():
        if row["planned"] == "refused":
            none = "no causal language model" in row["why"]
            reasons["no causal language model of transformers" if none else row["why"]].append(name)
    numbers = {
        how: sum(row["planned"] == how for row in types.values()) for how in ("exactly", "approximately", "refused")
    }
    return "\n\n".join(
        [
            f"Of {len(types)} model types of transformers {kept['transformers']}: {numbers['exactly']} exactly, "
            f"{numbers['approximately']} approximately, {numbers['refused']} refused.",
            table(("model type", "planned", "parameters of its defaults", "on Megatron", "layers, text part"), rows),
            "Refused:",
            table(("why", "model types"), ((why, ", ".join(names)) for why, names in sorted(reasons.items()))),
        ]
    )


SECTION = Section("docs/model-types.md", "model types", text)


def main() -> None:
    """Counts everything and writes everything."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

    from scripts.compile_catalog import CATALOG, compiled

    warnings.filterwarnings("ignore")
    found = bands([*decoders(), *tiny()])
    lines = BANDS.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines if line.startswith("#")]
    rows = [f"{road}: {{{', '.join(f'{q}: {off}' for q, off in by.items())}}}" for road, by in found.items()]
    BANDS.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")
    (CATALOG / "catalog.json").write_text(compiled(), encoding="utf-8")
    types = {name: counted_type(name) for name in sorted(CONFIG_MAPPING_NAMES)}
    write_json(RESULTS, {"transformers": version("transformers"), "torch": version("torch"), "types": types})
    SECTION.write()


if __name__ == "__main__":
    main()
