"""LoRA's parameters on a rank of a published run (arXiv 2106.09685, section 4): r·(inputs + outputs) of each matrix."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.accuracy.programs.setup import PublishedSetup
from kit.cost.setup import Lora, Shape, TrainingSetup
from kit.cost.stages import layers_on_stage


def adapter_parameters(setup: TrainingSetup, stage: int) -> float:
    """Adapter parameters of one rank. Tensor parallelism splits one of the two matrices; here this is taken as half
    of both."""
    lora = setup.lora
    if lora is None:
        return 0.0
    each = _layer(setup.shape, lora) * len(layers_on_stage(setup, stage))
    if "head" in lora.targets and stage == setup.pp - 1:
        each += lora.rank * (setup.shape.hidden_size + setup.shape.vocab_size)
    return each * (1 + 1 / setup.tp) / 2


def with_adapters(setup: PublishedSetup) -> PublishedSetup:
    """The setup with what adapters hold on its first stage."""
    return setup if setup.lora is None else replace(setup, adapters=adapter_parameters(setup, 0))


def _layer(shape: Shape, lora: Lora) -> float:
    h, query, key_value = shape.hidden_size, shape.query_width, shape.key_value_width
    copies = shape.experts.num_experts if shape.experts else 1
    width = shape.experts.ffn_hidden_size if shape.experts else shape.ffn_hidden_size
    sizes = {"query": h + query, "key": h + key_value, "value": h + key_value, "projection": query + h}
    sizes["mlp"] = (3 if shape.gated_mlp else 2) * (h + width) * copies
    return lora.rank * sum(sizes.get(target, 0) for target in lora.targets)
