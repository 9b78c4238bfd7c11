"""Planted faults: proof that the comparison can fail. Nothing in the kit package knows of them.

A fault replaces one function of an engine with a wrong one, in a rank's process before its engine is built. Each names
the launched layout in which it must show (``cases.py``); the layouts in which it must show on pools of
processes stand in the tests of tests/deepspeed, tests/megatron and tests/training.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.protocol import IGNORE_INDEX, StateKind


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    replaces: str
    """``module:name`` or ``module:Class.name``."""
    wrong: Callable[[Any], Any]
    """What stands there → what is put in its place."""
    case: str = ""
    """Name of the launched parity case that must turn red; empty: it shows on pools of processes only."""

    def install(self) -> Callable[[], None]:
        """Plant it in this process. Returns what takes it out again."""
        owner, name = _owner(self.replaces)
        right = getattr(owner, name)
        setattr(owner, name, self.wrong(right))
        return functools.partial(setattr, owner, name, right)


def _owner(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    # The module by import: megatron-core hides some behind functions of the same name.
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def _instead(path: str) -> Callable[[Any], Any]:
    """What stands at another path."""
    return lambda _: getattr(*_owner(path))


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A fault while the block runs, none for None: for processes that live on."""
    take_out = FAULTS[fault].install() if fault else lambda: None
    try:
        yield
    finally:
        take_out()


def _before(act: Callable[..., object]) -> Callable[[Any], Any]:
    """``act`` on what a function is given, then the function itself."""
    return lambda right: lambda *given, **named: (act(*given, **named), right(*given, **named))[1]


def _after(act: Callable[..., object]) -> Callable[[Any], Any]:
    """The function itself, then ``act`` on what it was given."""
    return lambda right: lambda *given, **named: (right(*given, **named), act(*given, **named))[0]


def _changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``change`` of what a function returns."""
    return lambda right: lambda *given, **named: change(right(*given, **named))


def _local_positions(build):
    def first(self, settings):
        model = build(self, settings)
        forward = model.forward
        model.forward = lambda *args, position_ids, **rest: forward(
            *args, position_ids=position_ids - position_ids[:, :1], **rest
        )
        return model

    return first


def _rounded_frequencies(init):
    from kit.engines.deepspeed.over_megatron import DeepSpeedTensorOverride as Override

    overrides = {"tensor_overrides": [Override.device, Override.dtype], "dtype": torch.bfloat16}
    return lambda **keywords: init(**(keywords | overrides))


def _keys_before_queries(slices):
    def swapped(self, shapes, model, tp, rank):
        query, key, value = shapes
        found = slices(self, (key, query, value), model, tp, rank)
        return [dataclasses.replace(piece, tensor={0: 1, 1: 0, 2: 2}[piece.tensor]) for piece in found]

    return swapped


def _renumbered(part: str, number: Callable[[int, Any], int]) -> Callable[[Any], Any]:
    """In the names of all parameters, the number after ``part``: ``number`` of it and the configuration."""

    def other(name, config):
        before, found, after = name.partition(f".{part}.")
        own, dot, rest = after.partition(".")
        return f"{before}{found}{number(int(own), config)}{dot}{rest}" if found else name

    return lambda global_names: (
        lambda config, chunks: {other(name, config): param for name, param in global_names(config, chunks).items()}
    )


twice_the_gradients = _after(lambda chunks, *_, **__: [chunk.scale_gradients(2.0) for chunk in chunks])
"""Doubles gradients: with Adam, losses and weights hardly notice."""
_CONTEXT = "kit.engines.torch.context_parallel:ContextParallel"
_DISPATCHER = "transformers.distributed.expert_parallel:AllToAllEP"
_DEEPSPEED, _MEGATRON = "kit.engines.deepspeed", "kit.engines.megatron"
_GLOBAL_NAMES = f"{_MEGATRON}.resharding.huggingface:global_names"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
_ROUTER = "megatron.core.transformer.moe.router"

FAULTS: dict[str, Fault] = {
    # Doubles gradients, as if the division by the number of ranks were cancelled twice. Losses stay right.
    "deepspeed-double-gradients": Fault(
        "deepspeed:DeepSpeedEngine.backward",
        lambda backward: lambda self, loss, **keywords: backward(self, loss * 2, **keywords),
        "deepspeed-zero3",
    ),
    # Every rank trains on the samples of rank 0, as with a sampler that does not know its rank.
    "deepspeed-repeated-data": Fault(
        f"{_DEEPSPEED}.engine:DeepSpeedEngine.forward_backward",
        _before(lambda _, batches: [dist.broadcast(t, src=0) for b in batches for t in (b.input_ids, b.labels)]),
        "deepspeed-zero2-accumulation",
    ),
    # The loss is divided by the tokens of this rank instead of those of all.
    "deepspeed-local-token-count": Fault(
        "kit.engines.hf_engine:global_tokens",
        lambda _: (
            lambda micro_batches, device, group: sum((each.labels != IGNORE_INDEX).sum() for each in micro_batches).to(
                device
            )
        ),
        "deepspeed-zero1",
    ),
    # Each rank counts the positions of its part of the sequence from 0.
    "ulysses-local-positions": Fault(f"{_DEEPSPEED}.ulysses:UlyssesSequenceParallel.build", _local_positions),
    # Stage 3 treated as the stages below it, whose gradients are not divided by the sequence-parallel ranks.
    "ulysses-one-average": Fault(
        f"{_DEEPSPEED}.ulysses:UlyssesSequenceParallel.averaged_over", lambda _: property(lambda self: self.dp_size)
    ),
    # Norms of single heads keep the gradient of their own rank's heads.
    "autotp-partial-norms": Fault(
        "deepspeed.module_inject.auto_tp:AutoTP.register_replicated_grad_hooks", lambda _: lambda self, model: None
    ),
    # Gradients of norms stay those of one rank's part of the sequence.
    "over-megatron-partial-norms": Fault(
        f"{_DEEPSPEED}.over_megatron:_sum_over", lambda _: lambda group, gradient: gradient
    ),
    # zero.Init makes bf16 of everything, RoPE's frequencies too. That becomes of a dtype of fp32 on CPUs without fp16
    # (partition_parameters.py, _set_dtype); on others it would not show.
    "over-megatron-rounded-frequencies": Fault(f"{_DEEPSPEED}.over_megatron:deepspeed.zero.Init", _rounded_frequencies),
    # The second copy of the weights stays what it was before they were set.
    "hpz-stale-copy": Fault(f"{_ZERO_3}.invalidate_secondary_tensor", lambda _: lambda self: None),
    # The decoder attends to what pads its source.
    "pairs-see-padding": Fault(
        "kit.engines.kernels.prepare_model:call_arguments",
        lambda call_arguments: (
            lambda batch, device: {
                key: value for key, value in call_arguments(batch, device).items() if key != "attention_mask"
            }
        ),
    ),
    # A resumed optimizer begins with empty moments.
    "resume-forgets-moments": Fault(
        f"{_DEEPSPEED}.engine:DeepSpeedEngine.import_state",
        lambda read: lambda self, kind, source: read(self, kind, source) if kind is StateKind.MASTER else None,
    ),
    # Keys before queries in each group of the fused projection, in both directions of the weight map.
    "megatron-swap-qk": Fault(f"{_MEGATRON}.weights.sharding:QKV.slices", _keys_before_queries, "megatron-tp2"),
    # Gradients of norms stay those of one rank's part of the sequence.
    "megatron-skip-sequence-parallel-reduction": Fault(
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads", lambda _: lambda *_, **__: None, "megatron-tp2-sp"
    ),
    "megatron-double-gradients": Fault(
        f"{_MEGATRON}.engine:finalize_model_grads", twice_the_gradients, "megatron-dp2-distributed-optimizer"
    ),
    # The interleaved schedule with megatron-core's default way of exchanging activations.
    "megatron-batched-interleaving": Fault(
        f"{_MEGATRON}.engine:transformer_config",
        lambda made: lambda settings: made({**settings, "overlap_p2p_comm": False, "batch_p2p_comm": True}),
        "megatron-pp2-interleaved",
    ),
    # Each stage holds the layers from one further on.
    "megatron-shifted-stages": Fault(
        _GLOBAL_NAMES, _renumbered("layers", lambda layer, config: (layer + 1) % config.num_layers), "megatron-pp2"
    ),
    # The gradients of a part of the keys and values go on before they are added to.
    "megatron-ring-forgets-a-part": Fault(
        "kit.engines.kernels.ring_attention:_kernel_backward",
        lambda backward: (
            lambda *tensors: backward(*tensors[:-3], tensors[-3] if tensors[-2] else tensors[-3].clone(), *tensors[-2:])
        ),
    ),
    # Each rank counts the positions of its part of the sequence from 0.
    "context-local-positions": Fault(
        f"{_CONTEXT}.shard_batch",
        _changed(
            lambda own: dataclasses.replace(
                own, position_ids=torch.arange(own.input_ids.shape[1]).expand_as(own.input_ids)
            )
        ),
    ),
    # Rotary embeddings take a rank's largest position for the length of the sequence.
    "context-length-of-own-part": Fault(
        "kit.engines.huggingface.whole_length_rope:_with_last", lambda _: lambda forward: forward
    ),
    # A query attends to all earlier tokens of its row, whatever document they are of.
    "ring-joins-documents": Fault(
        "kit.engines.torch.context_parallel:ring_attention", lambda ring: lambda *given: ring(*given[:-1], None)
    ),
    "split-rows-join-documents": Fault(
        "kit.engines.huggingface.inputs:set_documents", lambda _: lambda micro_batch: None
    ),
    # The loss is multiplied by dp, and FSDP2 divides by dp·cp.
    "context-scaled-by-data-ranks": Fault(
        "kit.engines.hf_engine:mean_scale", lambda scale: lambda tokens, averaged_over: scale(tokens, 1)
    ),
    # An expert's gradient is divided by the number of its copies, not by that of all ranks.
    "experts-averaged-over-copies": Fault(
        "torch.distributed.fsdp:FSDPModule.set_gradient_divide_factor",
        lambda right: lambda self, ranks: right(self, ranks / 2),
    ),
    # The last expert of every token counts nothing.
    "experts-drop-a-weight": Fault(
        f"{_DISPATCHER}._dispatch_tokens",
        lambda right: (
            lambda self, tokens, chosen, weights: right(
                self, tokens, chosen, torch.cat([weights[:, :-1], torch.zeros_like(weights[:, -1:])], dim=1)
            )
        ),
    ),
    # What experts computed goes to tokens in the order of experts.
    "experts-return-in-their-order": Fault(
        f"{_DISPATCHER}._combine_tokens",
        lambda right: lambda self, output, state: right(self, output, state._replace(order=state.order.sort().values)),
    ),
    # Modules take all experts for this rank's, because they come before their parameters.
    "experts-counted-before-they-are-spread": Fault(
        "kit.engines.torch.expert_parallel:apply_expert_parallelism",
        lambda right: (
            lambda model, mesh, alone, plan, how: right(model, mesh, alone, dict(reversed(plan.items())), how)
        ),
    ),
    # Latent attention: the gradient of the key that all heads share is that of this rank's heads, as megatron-core has
    # it without Transformer Engine.
    "megatron-shared-key-of-own-heads": Fault(
        f"{_MEGATRON}.model.mla:gather_from_sequence_parallel_region",
        lambda gather: (
            lambda tensor, tensor_parallel_output_grad, group: gather(
                tensor, tensor_parallel_output_grad=False, group=group
            )
        ),
    ),
    # A norm of all heads is one of this rank's heads alone.
    "megatron-norm-of-own-heads": Fault(
        f"{_MEGATRON}.model.norms:reduce_from_tensor_model_parallel_region",
        lambda _: lambda squares: squares * dist.get_world_size(),
    ),
    # Layers without positions have them.
    "megatron-rotated-everywhere": Fault("kit.specs.model:ModelSpec.rotates", lambda _: lambda model, layer: True),
    # No collective between A and B of an adapter.
    "megatron-adapters-without-collective": Fault(
        f"{_MEGATRON}.model.adapted_linear:_collective",
        lambda _: lambda linear, sequence_parallel: torch.nn.Identity(),
    ),
    # Gradients of the adapters that every rank has are those of its part of the sequence.
    "megatron-adapters-of-own-sequence": Fault(
        f"{_MEGATRON}.model.adapted_linear:Adapter.__init__",
        _after(lambda self, *_: [setattr(part, "sequence_parallel", False) for part in (self.a, self.b)]),
    ),
    # Muon takes query, key and value for one matrix, and gate and up.
    "megatron-muon-of-fused-matrices": Fault(
        f"{_MEGATRON}.engine:mark_matrices",
        lambda _: (
            lambda resharder: [
                setattr(getattr(each, "main_param", each), "is_qkv", False) for each in resharder.parameters.values()
            ]
        ),
    ),
    # A checkpoint's first moments are not read back.
    "megatron-lost-momentum": Fault(
        f"{_MEGATRON}.resharding.optimizer_state:LocalState.targets",
        lambda targets: lambda self, kind, *rest: [] if kind is StateKind.EXP_AVG else targets(self, kind, *rest),
    ),
    # What a layer adds is not multiplied.
    "megatron-whole-residual": Fault(
        f"{_MEGATRON}.model.layer_variants:ScaledRowParallelLinear.forward",
        _instead("megatron.core.tensor_parallel.layers:RowParallelLinear.forward"),
    ),
    # Shared experts have no weight.
    "megatron-ungated-shared-expert": Fault(
        "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward",
        lambda _: (
            lambda self, hidden_states: _instead("megatron.core.transformer.mlp:MLP.forward")(_)(self, hidden_states)[0]
        ),
    ),
    # Layers rotate by the base of those with windows only where a sequence is longer than the window.
    "megatron-one-rotation": Fault(f"{_MEGATRON}.model.layers:_local_layers", lambda _: lambda model: frozenset()),
    # DeepSeek-V3's router chooses experts by their scores alone.
    "megatron-forgotten-correction": Fault(
        f"{_ROUTER}:topk_routing_with_score_function",
        lambda choose: lambda *args, **keywords: choose(*args, **(keywords | {"expert_bias": None})),
    ),
    # Loads stay those of one rank.
    "local-expert-loads": Fault("kit.engines.routing:RoutingRecord.reduce", lambda _: lambda self: None),
    # Losses of routers are divided by the number of ranks here and by the engine once more.
    "router-losses-averaged-twice": Fault(
        "kit.engines.huggingface.routing:HfRouting.begin",
        lambda begin: lambda self, batches, averaged_over, loss_scale=1.0: begin(self, batches, 1, loss_scale),
    ),
    # Losses of routers are added as they are to a loss that is a sum over tokens.
    "megatron-unscaled-router-losses": Fault(
        f"{_MEGATRON}.routing:MegatronRouting.begin",
        _after(lambda self, _: setattr(self._config, "grad_scale_func", None)),
    ),
    # The loss of multi-token prediction is multiplied by the scale of router losses.
    "megatron-scaled-prediction-loss": Fault(
        f"{_MEGATRON}.prediction_heads:PredictionHeads.begin", lambda begin: lambda self, scale: begin(self, None)
    ),
    # The last stage's copy of the embedding keeps its gradients from the first stage's.
    "megatron-lone-last-embedding": Fault(
        f"{_FINALIZE}:_allreduce_word_embedding_grads", lambda _: lambda *args, **keywords: None
    ),
    # Auxiliary losses weigh experts by the tokens of this rank's part of the sequence.
    "megatron-loads-of-this-rank": Fault(
        f"{_ROUTER}:get_tokens_per_expert_and_token_count",
        lambda _: (
            lambda routing_map, reduce_group, **_: (
                routing_map.sum(0) * reduce_group.size(),
                len(routing_map),
                len(routing_map) * reduce_group.size(),
            )
        ),
    ),
    # Each rank moves its biases by the loads that it saw.
    "megatron-biases-of-this-rank": Fault(
        f"{_FINALIZE}:get_updated_expert_bias",
        lambda _: lambda tokens, bias, rate: bias + rate * torch.sign(tokens.mean(-1, keepdim=True) - tokens),
    ),
    # Under sequence parallelism the gradient of an expert's bias is added to those of other ranks' experts, as
    # megatron-core has it.
    "megatron-summed-expert-biases": Fault(
        f"{_MEGATRON}.model.layers:ExpertRowParallelLinear",
        _instead("megatron.core.tensor_parallel.layers:RowParallelLinear"),
    ),
    # Attention does not stop at the end of a document.
    "megatron-joined-documents": Fault(
        f"{_MEGATRON}.model.cp_all_gather:causal_attention",
        lambda attend: lambda *tensors_and_how: attend(*tensors_and_how[:4]),
    ),
    # Positions go on counting where a document begins. Rotary ones matter by their differences only: learned ones.
    "megatron-running-positions": Fault(
        f"{_MEGATRON}.model.build:LanguageModel.forward",
        lambda forward: (
            lambda self, input_ids, position_ids, *args, **keywords: forward(
                self, input_ids, torch.arange(position_ids.shape[1]).expand_as(position_ids), *args, **keywords
            )
        ),
    ),
    # Weight decay on norms too: megatron-core leaves the exception to a scheduler that is not used here.
    "megatron-decayed-norms": Fault(
        "megatron.core.optimizer:get_standard_config_overrides", lambda _: lambda config: {}, "megatron-tp2"
    ),
    # Each two neighbouring experts swapped, in both directions, while the router keeps its order.
    "megatron-swapped-experts": Fault(
        _GLOBAL_NAMES, _renumbered("local_experts", lambda expert, config: expert ^ 1), "megatron-ep2-mixtral"
    ),
    # Ranks take neighbouring parts of the sequence, while attention believes in the zig-zag order.
    "megatron-unbalanced-context": Fault(
        f"{_MEGATRON}.microbatches:local_part",
        lambda _: lambda tensor, dim, group: tensor.chunk(group.size(), dim)[group.rank()],
        "megatron-cp2",
    ),
}
"""Name → fault."""
