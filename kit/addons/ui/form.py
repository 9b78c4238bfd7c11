"""The form: what each field shows of a recipe, and what a visitor's value of it makes of the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kit.addons.ui.answer import MOST_GPUS, catalog_cluster, cluster_text, with_gpus
from kit.addons.ui.state import Offered, State
from kit.errors import SpecError
from kit.specs.catalog import gpu_names, model_names, node_names
from kit.specs.layout import ENGINES, doubled
from kit.specs.recipe import Recipe
from kit.specs.text import refuse

_METHODS = {
    "null": "all weights",
    "{four_bit: false}": "LoRA",
    "{four_bit: true}": "QLoRA (4 bits)",
    "{eight_bit: true}": "LoRA on 8-bit weights",
}
_OBJECTIVES = {
    "pretrain": "pretraining", "sft": "SFT", "seq2seq": "sequence to sequence", "dpo": "DPO", "kto": "KTO",
    "reward": "reward model", "grpo": "GRPO",
}  # fmt: skip
GPUS = "gpus"
"""The field that changes the number in the cluster's name."""


@dataclass(frozen=True)
class Field:
    """One field, of one key of a recipe."""

    label: str
    shows: Callable[[Recipe], Any]
    """Its value for a recipe, defaults included."""
    options: Mapping[str, str] | None = None
    """Value → words, of a field with a list; None: a number is typed."""
    slid: tuple[int, ...] = ()
    """The numbers of its slider."""
    factor: float = 1
    """What a typed number is multiplied by for the recipe."""


def _method(recipe: Recipe) -> str:
    lora = recipe.job.lora
    return list(_METHODS)[1 + ["", "four_bit", "eight_bit"].index(lora.quantised) if lora else 0]


FIELDS = {
    GPUS: Field("GPUs", lambda recipe: recipe.cluster.num_gpus, slid=tuple(doubled(1, MOST_GPUS))),
    "job.seq_length": Field("Sequence length", lambda each: each.job.seq_length, slid=tuple(doubled(256, 1 << 20))),
    "job.global_batch_size": Field(
        "Sequences a step", lambda recipe: recipe.job.global_batch_size, slid=tuple(doubled(1, 1 << 15))
    ),
    "job.objective": Field("Objective", lambda recipe: recipe.job.objective, _OBJECTIVES),
    "job.total_tokens": Field(
        "Tokens in all, in billions",
        lambda recipe: recipe.job.total_tokens and recipe.job.total_tokens / 1e9,
        factor=1e9,
    ),
    "job.precision": Field(
        "Precision", lambda recipe: recipe.job.precision, {name: name for name in ("bf16", "fp8", "fp16", "fp32")}
    ),
    "job.lora": Field("Method", _method, _METHODS),
    "layout.engine": Field(
        "Engine", lambda recipe: recipe.layout.engine or "", {"": "the fastest", **{name: name for name in ENGINES}}
    ),
}
"""Key of a recipe → its field, in the order of the form, below the boxes of model and cluster."""


def shown_values(state: State, recipe: Recipe) -> dict[str, Any]:
    """Key → what the form shows."""
    model, cluster = state.get("model") or recipe.model.name, state.get("cluster") or cluster_text(recipe)
    return {"model": model, "cluster": cluster, **{key: field.shows(recipe) for key, field in FIELDS.items()}}


def asked(state: State, key: str, value: Any, recipe: Recipe | None) -> State:
    """The state with a visitor's value. ``recipe``: what is shown now. Raises ``SpecError`` for a number that cannot
    be, and where no cluster has so many GPUs."""
    field = FIELDS.get(key)
    if field is None or field.options is not None:
        return state.having(key, str(value))
    refuse(
        {
            f"{field.label}: {value:g} is refused; use a whole number of 1 or more": (
                field.slid and (value < 1 or value % 1)
            ),
            f"{field.label}: {value:g} is refused; use a number above 0": value <= 0,
        }
    )
    if key != GPUS:
        return state.having(key, str(round(value * field.factor)))
    cluster = state.get("cluster") or (cluster_text(recipe) if recipe else "")
    if (found := with_gpus(cluster, int(value))) is None:
        raise SpecError(f"GPUs: no {cluster} with {value:,.0f} GPUs is known; choose another number")
    return state.having("cluster", found)


def offers_of(offered: Offered) -> dict[str, list[str]]:
    """What the lists of models and clusters offer: the labels of own files first, then the catalog's names."""
    clusters = [f"8x{name}" for name in gpu_names() if catalog_cluster(f"8x{name}")]
    return {
        "model": [*(label for label in offered if "model" in offered[label]), *model_names()],
        "cluster": [
            *(label for label in offered if "model" not in offered[label]),
            *clusters,
            *(f"{name}:1" for name in node_names()),
        ],
    }
