"""Memory of a rank of the plain-torch trainers: litgpt, torchtune, torchtitan, nanotron."""

from __future__ import annotations

from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import layer_parameters
from benchmarks.accuracy.programs.torch_layer import kept_bytes, layer_terms, logits_bytes, working_bytes
from kit.cost.memory.phases import RankParts, RankStates, cublas_workspaces
from kit.cost.memory.states import NF4_BYTES
from kit.cost.model.pipeline import in_flight


def rank_parts(workload: PublishedWorkload, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage, by component."""
    layout = workload.layout
    if workload.lora is not None:
        states = _adapter_states(workload)
    elif workload.layout.zero_stage == 3:
        states = _sharded_states(workload, stage)
    else:
        states = _states(workload, stage)
    saved = sum(
        kept_bytes(workload) * len(layers) * count
        for layers, count in zip(
            workload.stage_chunks(stage),
            in_flight(layout.pp, layout.vp, layout.gradient_accumulation_steps, stage),
            strict=True,
        )
    )
    gradients = states["gradients"]
    # Gradients are made by backward, unless earlier micro batches left theirs or a flat buffer holds them.
    held = (
        workload.implementation == "nanotron"
        or workload.layout.gradient_accumulation_steps > 1
        or workload.lora is not None
    )
    # In a pipeline FSDP adds up whole gradients in its reduction's fp32 until the last micro batch (_fsdp_param.py).
    whole = (
        4.0 * workload.parameters[stage].total if workload.layout.zero_stage == 3 and workload.layout.pp > 1 else 0.0
    )
    after = 0.0 if workload.optimizer_in_backward else gradients
    gathered = _gathered(workload, stage)
    return RankParts(
        states=RankStates(
            weights=states["weights"],
            optimizer=states["optimizer"],
            gradients_in_forward=gradients + whole if held else 0.0,
            gradients=after + whole,
            gradients_in_step=after,
            gradients_between_steps=after,
            extra_in_step=0.0,
            moments=0.0,
        ),
        buffers=cublas_workspaces(workload.generation),
        gathered_in_loss=gathered,
        gathered=gathered,
        gathered_at_end=gathered,
        saved_activations=saved,
        recomputed_layer=sum(layer_terms(workload).values()) if workload.layout.recompute != "none" else 0.0,
        backward_workspace=working_bytes(workload),
        loss=logits_bytes(workload) if stage == workload.layout.pp - 1 else 0.0,
        after_backward=_unreduced(workload, stage),
    )


def _states(workload: PublishedWorkload, stage: int) -> dict[str, float]:
    parameters = workload.parameters[stage].total
    owners = workload.layout.dp if workload.layout.zero_stage in (1, 2) else 1
    return {
        "weights": workload.weight_bytes * parameters,
        "gradients": workload.main_gradient_bytes
        * parameters
        / (workload.layout.dp if workload.layout.zero_stage == 2 else 1),
        "optimizer": workload.optimizer_bytes * parameters / owners,
    }


def _sharded_states(workload: PublishedWorkload, stage: int) -> dict[str, float]:
    """FSDP: everything over dp·cp ranks."""
    parameters = workload.parameters[stage].total / (workload.layout.dp * workload.layout.cp)
    return {
        "weights": workload.weight_bytes * parameters,
        "gradients": workload.main_gradient_bytes * parameters,
        "optimizer": workload.optimizer_bytes * parameters,
    }


def _adapter_states(workload: PublishedWorkload) -> dict[str, float]:
    """A frozen base, in four bits where quantised (linear layers, the head too; not embedding and norms)."""
    lora, model = workload.lora, workload.model
    assert lora is not None
    parameters = workload.parameters[0]
    table = float(model.vocab_size * model.hidden_size)
    linear = parameters.dense_matrices + (0.0 if model.tied_embeddings else table)
    base = 2.0 * parameters.total
    if lora.four_bit:
        base = 2.0 * (parameters.total - linear) + NF4_BYTES * linear
    adapters = adapter_parameters(workload, lora, 0)
    return {
        "weights": base + 2.0 * adapters,
        "gradients": 2.0 * adapters,
        "optimizer": 4.0 * adapters,
    }


def _gathered(workload: PublishedWorkload, stage: int) -> float:
    """FSDP: the root's weights stay gathered from forward to backward, two layers come and go; in a pipeline all stay.

    torch/distributed/fsdp/_fully_shard; torchtitan/models/llama3/infra/parallelize.py (with a pipeline it does not
    reshard after forward).
    """
    if workload.implementation == "nanotron":
        # Buckets of torch's DistributedDataParallel, copies of 16-bit gradients (nanotron/trainer.py)
        return 2.0 * workload.parameters[stage].total if workload.layout.dp > 1 else 0.0
    if workload.layout.zero_stage != 3:
        return _dequantised(workload)
    layer = sum(layer_parameters(workload, False))
    parameters = workload.parameters[stage]
    if workload.layout.pp > 1:
        return 2.0 * parameters.total
    return 2.0 * (parameters.vocabulary + 2 * layer) + (2.0 + 4.0) * layer


def _unreduced(workload: PublishedWorkload, stage: int) -> float:
    """nanotron: 16-bit gradients of a whole backward, then added to fp32 (optim/gradient_accumulator.py, backward)."""
    if workload.implementation == "nanotron":
        return 2.0 * workload.parameters[stage].total
    return 0.0


def _dequantised(workload: PublishedWorkload) -> float:
    """The largest weight in 16 bits while it is multiplied."""
    if workload.lora is None or not workload.lora.four_bit:
        return 0.0
    model = workload.model
    head = 0 if model.tied_embeddings else model.vocab_size
    return 2.0 * model.hidden_size * max(model.ffn_hidden_size, head)
