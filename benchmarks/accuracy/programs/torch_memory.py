"""Memory of a rank of the plain-torch trainers: litgpt, torchtune, torchtitan, nanotron."""

from __future__ import annotations

from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.rank_params import layer_parameters
from benchmarks.accuracy.programs.setup import PublishedSetup
from benchmarks.accuracy.programs.torch_layer import kept_bytes, layer_terms, logits_bytes, working_bytes
from kit.cost.memory.phases import RankParts, cublas_workspaces
from kit.cost.memory.rank_states import RankStates
from kit.cost.memory.states import NF4_BYTES
from kit.cost.stages import chunks, chunks_in_flight


def rank_parts(setup: PublishedSetup, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage, by component."""
    if setup.lora is not None:
        states = _adapter_states(setup)
    elif setup.sharding == "full":
        states = _sharded_states(setup, stage)
    else:
        states = _states(setup, stage)
    kept = sum(
        kept_bytes(setup) * len(layers) * count
        for layers, count in zip(chunks(setup, stage), chunks_in_flight(setup, stage), strict=True)
    )
    gradients = states["gradients"]
    # Gradients are made by backward, unless earlier micro batches left theirs or a flat buffer holds them.
    held = setup.kernels == "nanotron" or setup.micro_batches > 1 or setup.lora is not None
    # In a pipeline FSDP adds up whole gradients in its reduction's fp32 until the last micro batch (_fsdp_param.py).
    whole = 4.0 * setup.parameters[stage].total if setup.sharding == "full" and setup.pp > 1 else 0.0
    after = 0.0 if setup.optimizer_in_backward else gradients
    gathered = _gathered(setup, stage)
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
        buffers=cublas_workspaces(setup.gpu_generation),
        gathered_in_loss=gathered,
        gathered=gathered,
        gathered_at_end=gathered,
        kept=kept,
        again=sum(layer_terms(setup).values()) if setup.recompute != "none" else 0.0,
        working=working_bytes(setup),
        loss=logits_bytes(setup) if stage == setup.pp - 1 else 0.0,
        after_backward=_unreduced(setup, stage),
    )


def _states(setup: PublishedSetup, stage: int) -> dict[str, float]:
    parameters = setup.parameters[stage].total
    owners = setup.dp if setup.sharding in ("optimizer", "gradients") else 1
    return {
        "weights": setup.weight_bytes * parameters,
        "gradients": setup.main_gradient_bytes * parameters / (setup.dp if setup.sharding == "gradients" else 1),
        "optimizer": setup.optimizer_bytes * parameters / owners,
    }


def _sharded_states(setup: PublishedSetup, stage: int) -> dict[str, float]:
    """FSDP: everything over dp·cp ranks."""
    parameters = setup.parameters[stage].total / (setup.dp * setup.cp)
    return {
        "weights": setup.weight_bytes * parameters,
        "gradients": setup.main_gradient_bytes * parameters,
        "optimizer": setup.optimizer_bytes * parameters,
    }


def _adapter_states(setup: PublishedSetup) -> dict[str, float]:
    """A frozen base, in four bits where quantised (linear layers, the head too; not embedding and norms)."""
    lora, shape = setup.lora, setup.shape
    assert lora is not None
    parameters = setup.parameters[0]
    table = float(shape.vocab_size * shape.hidden_size)
    linear = parameters.dense_matrices + (0.0 if shape.tied_embeddings else table)
    base = 2.0 * parameters.total
    if lora.four_bit:
        base = 2.0 * (parameters.total - linear) + NF4_BYTES * linear
    adapters = adapter_parameters(setup, 0)
    return {
        "weights": base + 2.0 * adapters,
        "gradients": 2.0 * adapters,
        "optimizer": 4.0 * adapters,
    }


def _gathered(setup: PublishedSetup, stage: int) -> float:
    """FSDP: the root's weights stay gathered from forward to backward, two layers come and go; in a pipeline all stay.

    torch/distributed/fsdp/_fully_shard; torchtitan/models/llama3/infra/parallelize.py (with a pipeline it does not
    reshard after forward).
    """
    if setup.kernels == "nanotron":
        # Buckets of torch's DistributedDataParallel, copies of 16-bit gradients (nanotron/trainer.py)
        return 2.0 * setup.parameters[stage].total if setup.dp > 1 else 0.0
    if setup.sharding != "full":
        return _dequantised(setup)
    layer = sum(layer_parameters(setup, False))
    parameters = setup.parameters[stage]
    if setup.pp > 1:
        return 2.0 * parameters.total
    return 2.0 * (parameters.vocabulary + 2 * layer) + (2.0 + 4.0) * layer


def _unreduced(setup: PublishedSetup, stage: int) -> float:
    """nanotron: 16-bit gradients of a whole backward, then added to fp32 (optim/gradient_accumulator.py, backward)."""
    if setup.kernels == "nanotron":
        return 2.0 * setup.parameters[stage].total
    return 0.0


def _dequantised(setup: PublishedSetup) -> float:
    """The largest weight in 16 bits while it is multiplied."""
    if setup.lora is None or not setup.lora.four_bit:
        return 0.0
    shape = setup.shape
    head = 0 if shape.tied_embeddings else shape.vocab_size
    return 2.0 * shape.hidden_size * max(shape.ffn_hidden_size, head)
