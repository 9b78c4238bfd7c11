"""What a program has on each GPU beside kit's workload: towers that are not trained, adapters on experts, and the
reference model on Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kit.cost.memory.states import quantised
from kit.cost.memory.states_and_buffers import engine_memory
from kit.cost.workload import Workload
from kit.specs import strict_yaml
from kit.specs.job import MLP_LAYERS
from kit.units import to_gib

_TOWERS = Path(__file__).with_name("tables") / "_towers.yaml"


@cache
def tower_parameters() -> Mapping[str, float]:
    """Catalog's model → parameters of its towers, and of the layers from them to the text part."""
    return {name: 1e6 * millions for name, millions in strict_yaml.read(_TOWERS).data.items()}


def extra_gib(workload: Workload) -> float:
    """GiB of each GPU, beside ``peak_gib`` of the workload."""
    return to_gib(_towers(workload) + _adapters_of_experts(workload) + _reference(workload))


def _reference(workload: Workload) -> float:
    """Megatron-SWIFT builds the model twice, with the same ranks (swift/megatron/trainers/rlhf_mixin.py,
    prepare_model). The cost model counts a reference model of the other engines."""
    if workload.layout.engine != "megatron" or not workload.holds_reference:
        return 0.0
    return workload.weight_bytes * max(each.total for each in workload.parameters)


def _towers(workload: Workload) -> float:
    """Weights alone, which bitsandbytes quantises as the text part's. A pass through a tower that is not trained keeps
    nothing for backward, and is over before the layers of the text part have saved anything."""
    layout, lora = workload.layout, workload.job.lora
    base = quantised(lora)
    parameters = tower_parameters().get(workload.model.name, 0.0) if layout.offload_param == "none" else 0.0
    in_fp32 = lora is None and layout.engine == "torch" and layout.optimizer_state_dtype == "fp32"
    each = base.codes if base else 4.0 if in_fp32 else 2.0
    sharded = layout.zero_stage == 3 and layout.engine != "megatron"
    return each * parameters / (layout.dp * layout.cp if sharded else 1)


def _adapters_of_experts(workload: Workload) -> float:
    """Megatron-SWIFT adapts the grouped GEMMs of experts too, each expert for itself (ms-swift,
    swift/megatron/utils/utils.py, find_all_linears); kit's engines and peft's names leave them out."""
    model, layout, lora = workload.model, workload.layout, workload.job.lora
    if layout.engine != "megatron" or lora is None or not model.num_experts or not MLP_LAYERS & lora.layers:
        return 0.0
    up, down = model.hidden_size + 2 * model.mlp_width, model.mlp_width + model.hidden_size  # A and B; up has the gate
    layers = (model.num_layers - model.first_dense_layers) / layout.pp
    state = engine_memory(workload).experts
    held = state.weights + state.gradients + state.optimizer
    return lora.rank * (up + down) * layers * model.num_experts / layout.ep * held
