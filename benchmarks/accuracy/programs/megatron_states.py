"""Weights, gradients and optimizer state of a Megatron rank."""

from __future__ import annotations

from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.rank_params import largest_layer_parameters
from benchmarks.accuracy.programs.setup import PublishedSetup
from kit.cost.memory.rank_states import RankStates
from kit.cost.model.params import RankParameters


def rank_states(setup: PublishedSetup, stage: int) -> RankStates:
    """Training states of a rank of one pipeline stage."""
    held = _state_bytes(setup, stage)
    copies = gradient_copies(setup, stage)
    moments = setup.optimizer_bytes - 4 if setup.weight_bytes == 2 else setup.optimizer_bytes
    return RankStates(
        weights=held["weights"],
        optimizer=held["optimizer"],
        gradients_in_forward=held["gradients"],
        gradients=held["gradients"],
        gradients_in_step=held["gradients"],
        gradients_between_steps=held["gradients"] + copies,
        extra_in_step=copies,
        moments=held["optimizer"] * moments / setup.optimizer_bytes,
    )


def _state_bytes(setup: PublishedSetup, stage: int) -> dict[str, float]:
    """Bytes of a rank: 6 + 12/d with the distributed optimizer, 18 without (megatron-core, docs of dist_optimizer).

    Dense parameters have d = dp·cp owners, experts dp·cp·tp/(ep·etp); optimizer instances divide both.
    """
    parameters = setup.parameters[stage]
    dense_owners = expert_owners = 1.0
    if setup.sharding in ("optimizer", "full"):
        dense_owners = setup.dp * setup.cp / setup.optimizer_instances
        expert_owners = max(setup.dp * setup.cp * setup.tp / (setup.ep * setup.etp) / setup.optimizer_instances, 1.0)
    if setup.lora is not None:
        # A frozen base has neither gradients nor optimizer state.
        trained = adapter_parameters(setup, stage)
        return {
            "weights": setup.weight_bytes * (parameters.total + trained),
            "gradients": setup.main_gradient_bytes * trained,
            "optimizer": setup.optimizer_bytes * trained / dense_owners,
        }
    whole = setup.sharding == "full"
    shards = (parameters.dense / dense_owners, parameters.experts / expert_owners)
    held = shards if whole else (parameters.dense, parameters.experts)
    optimizer = _optimizer(setup, parameters, dense_owners, expert_owners)
    return {
        "weights": setup.weight_bytes * sum(held),
        "gradients": setup.main_gradient_bytes * sum(held),
        "optimizer": optimizer * (1 - setup.optimizer_offload),
    }


def _optimizer(setup: PublishedSetup, parameters: RankParameters, dense_owners: float, expert_owners: float) -> float:
    per_matrix = setup.optimizer_bytes if setup.matrix_optimizer_bytes is None else setup.matrix_optimizer_bytes
    rest = parameters.vectors + parameters.vocabulary
    dense = per_matrix * parameters.dense_matrices + setup.optimizer_bytes * rest
    return dense / dense_owners + per_matrix * parameters.experts / expert_owners


def gradient_copies(setup: PublishedSetup, stage: int) -> float:
    """fp32 copies of 16-bit gradients, from the optimizer step until the next begins (optimizer/optimizer.py,
    _copy_model_grads_to_main_grads, zero_grad); a precision-aware optimizer makes none."""
    if setup.main_gradient_bytes == 4 or setup.optimizer_bytes < 12:
        return 0.0
    return 4.0 * setup.parameters[stage].total


def gathered_bytes(setup: PublishedSetup, stage: int) -> float:
    """Megatron-FSDP: weights and gradients of a layer and of the vocabulary, gathered (distributed/fsdp)."""
    if setup.sharding != "full":
        return 0.0
    layer = largest_layer_parameters(setup, stage)
    table = setup.shape.vocab_size / setup.tp * setup.shape.hidden_size
    return (setup.weight_bytes + setup.main_gradient_bytes) * 2 * max(layer, table)
