"""What other tools would say of the same run, written from their formulas, for comparison only."""

from __future__ import annotations

from dataclasses import replace

from kit.cost.rank_params import layer_parameters, rank_parameters
from kit.cost.setup import TrainingSetup


def model_parameters(setup: TrainingSetup) -> float:
    """Parameters of the whole model, as on one rank of an unsplit run."""
    whole = replace(setup, tp=1, pp=1, vp=1, cp=1, ep=1, etp=1, stage_layers=())
    return rank_parameters(whole, 0).total


def megatron_theoretical(setup: TrainingSetup) -> float:
    """Bytes of Megatron-LM's report_theoretical_memory (megatron/training/theoretical_memory_usage.py).

    First pipeline stage; activations with sequence parallelism and selective recompute, whatever the run does.
    """
    shape, h = setup.shape, setup.shape.hidden_size
    gate = 1.5 if shape.gated_mlp else 1.0
    experts = shape.experts.num_experts if shape.experts else 1
    ratio = shape.query_width / h
    layers = (
        2.0
        * shape.num_layers
        * h
        * h
        * (
            (1 + shape.num_key_value_heads / shape.num_attention_heads) * ratio
            + shape.ffn_hidden_size / h * experts * gate
            + 2 / h
            + 1 / (shape.num_layers * h)
        )
    )
    table = float(h * shape.vocab_size)
    shard = (layers / setup.pp + table) / setup.tp
    if not shape.tied_embeddings and setup.pp == 1:
        shard += table / setup.tp
    per_parameter = 6 + 12 / setup.dp if setup.sharding == "optimizer" else 18.0
    tokens = setup.micro_batch_size * setup.seq_length
    activations = tokens * h * (18 + 4 * shape.ffn_hidden_size / h) * shape.num_layers
    activations += 8 * tokens * setup.pp + tokens * h * setup.pp
    if setup.vp > 1:
        activations *= 1 + (setup.pp - 1) / (setup.pp * setup.vp)
    elif setup.pp > 1:
        activations *= min(1.0, setup.micro_batches / setup.pp)
    if setup.pp == 1:
        activations += tokens * h * 4 * (1 + shape.vocab_size / h)
    return shard * per_parameter + activations / setup.tp


def deepspeed_zero3_estimate(setup: TrainingSetup) -> float:
    """Bytes a GPU of estimate_zero3_model_states_mem_needs without offload (deepspeed/runtime/zero/stage3.py)."""
    largest = max(sum(layer_parameters(replace(setup, tp=1), False)), setup.shape.vocab_size * setup.shape.hidden_size)
    return 4 * largest + 18 * model_parameters(setup) / (setup.dp * setup.tp * setup.pp * setup.cp)


def accelerate_estimate(setup: TrainingSetup) -> float:
    """Bytes of ``accelerate estimate-memory``'s "training using Adam" in 16 bits: parameters, gradients, two moments in
    fp32, on one device (accelerate/commands/estimate.py)."""
    return 16 * model_parameters(setup)
