"""Memory of a rank of the plain-torch trainers: litgpt, torchtune, torchtitan, nanotron."""

from __future__ import annotations

from benchmarks.accuracy.programs.adapters import adapter_parameters
from benchmarks.accuracy.programs.published import PublishedWorkload
from benchmarks.accuracy.programs.rank_params import largest_layer_parameters
from benchmarks.accuracy.programs.torch_layer import kept_bytes, layer_terms, logits_bytes, working_bytes
from kit.cost.hardware import cublas_workspaces
from kit.cost.memory.parts import RankParts
from kit.cost.memory.states import NF4_TWICE_BYTES, StateBytes
from kit.cost.memory.states_and_buffers import fsdp_buffers
from kit.cost.model.pipeline import in_flight

NF4_BYTES = 0.5 + 4 / 64
"""Bytes per weight: four bits, and an fp32 scale per block of 64 (QLoRA, arXiv 2305.14314, section 3)."""


def rank_parts(workload: PublishedWorkload, stage: int) -> RankParts:
    """Memory of a rank of one pipeline stage, by component."""
    layout = workload.layout
    sharded = layout.zero_stage >= 2 and workload.implementation != "nanotron"
    if workload.lora is not None:
        states = _adapter_states(workload, sharded)
    elif sharded:
        states = _sharded_states(workload, stage)
    else:
        states = _states(workload, stage)
    saved = sum(
        (kept_bytes(workload, dense) + (kept_bytes(workload, experts, True) if experts else 0.0)) * count
        for (dense, experts), count in zip(
            workload.stages.chunk_kinds[stage :: layout.pp],
            in_flight(layout.pp, layout.vp, layout.gradient_accumulation_steps, stage),
            strict=True,
        )
    )
    if stage == layout.pp - 1 and workload.implementation == "torchtitan":
        saved += 8.0 * workload.model.hidden_size * workload.shard_tokens  # the final norm, which is never compiled
    gradients = states["gradients"]
    # Gradients are made by backward, unless earlier micro batches left theirs or a flat buffer holds them. FSDP makes
    # them on a stream of its own, so that what the allocator reserves for them serves nothing else.
    held = (
        workload.implementation == "nanotron"
        or workload.layout.gradient_accumulation_steps > 1
        or workload.lora is not None
        or (workload.reserved and sharded)
    )
    # In a pipeline FSDP adds up whole gradients in its reduction's fp32 until the last micro batch (_fsdp_param.py).
    whole = 4.0 * workload.parameters[stage].total if sharded and layout.pp > 1 else 0.0
    after = 0.0 if workload.optimizer_in_backward else gradients
    in_loss, in_backward, at_end = _gathered(workload, stage, sharded)
    if workload.layout.recompute == "none":
        recomputed = 0.0
    else:
        experts = workload.stages.stage_kinds[stage][1] > 0
        recomputed = sum(layer_terms(workload, experts).values())
        recomputed -= kept_bytes(workload, 1, experts) if workload.layout.recompute == "selective" else 0.0
    return RankParts(
        states=StateBytes(
            weights=states["weights"],
            optimizer=states["optimizer"],
            gradients_in_forward=gradients + whole if held else 0.0,
            gradients=after + whole,
            gradients_in_step=after,
            gradients_between_steps=after,
            extra_in_step=0.0,
        ),
        buffers=cublas_workspaces(workload.generation) + (_gather_pool(workload, stage) if sharded else 0.0),
        gathered_in_loss=in_loss,
        gathered=in_backward,
        gathered_at_end=at_end,
        saved_activations=saved,
        recomputed_layer=max(recomputed, 0.0),
        backward_workspace=working_bytes(workload),
        loss=logits_bytes(workload) if stage == workload.layout.pp - 1 else 0.0,
        # 16-bit gradients of a whole backward, then added to fp32 (optim/gradient_accumulator.py, backward).
        after_backward=2.0 * workload.parameters[stage].total if workload.implementation == "nanotron" else 0.0,
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
    """FSDP: everything over dp·cp ranks, experts over those that hold the same ones."""
    if workload.parameters_offload:
        return {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    layout, parameters = workload.layout, workload.parameters[stage]
    owners = layout.dp * layout.cp
    experts = parameters.experts / max(owners * layout.tp / (layout.ep * layout.etp), 1.0)
    held = parameters.dense / owners + experts
    return {
        "weights": workload.weight_bytes * held,
        "gradients": workload.main_gradient_bytes * held,
        "optimizer": workload.optimizer_bytes * held * (1 - workload.optimizer_offload),
    }


def _adapter_states(workload: PublishedWorkload, sharded: bool) -> dict[str, float]:
    """A frozen base, in four bits where quantised; not embedding and norms."""
    lora = workload.lora
    assert lora is not None
    share = 0.0 if workload.parameters_offload else 1 / (workload.layout.dp * workload.layout.cp) if sharded else 1.0
    width, total = workload.weight_bytes, workload.parameters[0].total
    base = width * total
    if lora.four_bit:
        # Parameters of linear layers, of litgpt the head's too.
        head = workload.implementation == "litgpt" and not workload.model.tied_embeddings
        vocabulary = workload.model.vocab_size * workload.model.hidden_size
        linear = workload.parameters[0].dense_matrices + (vocabulary if head else 0)
        base = width * (total - linear) + _nf4_bytes(workload) * linear
    adapters = adapter_parameters(workload, lora, 0) * share
    return {
        "weights": base * share + width * adapters,
        "gradients": workload.main_gradient_bytes * adapters,
        "optimizer": workload.optimizer_bytes * adapters * (1 - workload.optimizer_offload),
    }


def _nf4_bytes(workload: PublishedWorkload) -> float:
    """litgpt's ``bnb.nf4`` leaves scales in fp32; torchao quantises them too (dtypes/nf4tensor.py)."""
    return NF4_BYTES if workload.implementation == "litgpt" else NF4_TWICE_BYTES


def _gathered(workload: PublishedWorkload, stage: int, sharded: bool) -> tuple[float, float, float]:
    """What is gathered in the loss, in a layer's backward, at the end; with a pipeline FSDP keeps all weights gathered
    (torchtitan/models/llama3/infra/parallelize.py)."""
    parameters = workload.parameters[stage]
    if workload.implementation == "nanotron":
        # Buckets of torch's DistributedDataParallel, copies of 16-bit gradients (nanotron/trainer.py)
        constant = 2.0 * parameters.total if workload.layout.dp > 1 else 0.0
    elif not sharded:
        constant = _dequantised(workload)
    elif workload.layout.pp > 1:
        constant = 2.0 * parameters.total
    elif workload.lora is not None:
        # Frozen weights have no gradients on their way to be scattered.
        width = _nf4_bytes(workload) if workload.lora.four_bit else 2.0
        constant = 2.0 * parameters.vocabulary + 2 * width * largest_layer_parameters(workload, stage)
        constant += _dequantised(workload)
    else:
        model, layer = workload.model, largest_layer_parameters(workload, stage)
        mlp = (3 if model.gated_mlp else 2) * model.hidden_size * model.ffn_hidden_size / workload.layout.tp
        return fsdp_buffers(
            root=parameters.vocabulary,
            head=model.vocab_size * model.hidden_size / workload.layout.tp,
            layer=layer,
            attention=workload.dense_layer_matrices - mlp,
            after_forward=0.0,
            element=2.0,
        )
    return constant, constant, constant


def _gather_pool(workload: PublishedWorkload, stage: int) -> float:
    """What the allocator reserves for all-gathers: they run on a stream of their own, into a flat buffer that is copied
    out; the root's is there until the first layer's has been (torch, _fully_shard/_fsdp_collectives.py,
    foreach_all_gather; _fsdp_param_group.py, all_gather_state)."""
    if not workload.reserved:
        return 0.0
    return 2.0 * (workload.parameters[stage].vocabulary + largest_layer_parameters(workload, stage))


def _dequantised(workload: PublishedWorkload) -> float:
    """The largest weight in 16 bits while it is multiplied."""
    if workload.lora is None or not workload.lora.four_bit:
        return 0.0
    model = workload.model
    head = model.vocab_size if workload.implementation == "litgpt" and not model.tied_embeddings else 0
    return 2.0 * model.hidden_size * max(model.ffn_hidden_size, head)
