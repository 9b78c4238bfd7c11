"""Planted faults: proof that the comparison can fail. Nothing in the kit package knows of them.

A fault replaces one function of an engine with a wrong one, in a rank's process before its engine is built. Each names
the launched layout in which it must show (``cases.py``); the cells and resumes in which it must show on pools of
processes stand in ``deepspeed_layouts.py`` and ``megatron_layouts.py``.
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

from kit.engines.base import IGNORE_INDEX, StateKind


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
        module, _, path = self.replaces.partition(":")
        *owners, name = path.split(".")
        # The module by import: megatron-core hides some behind functions of the same name.
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        right = getattr(owner, name)
        setattr(owner, name, self.wrong(right))
        return functools.partial(setattr, owner, name, right)


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """A fault while the block runs, none for None: for processes that live on."""
    take_out = FAULTS[fault].install() if fault else lambda: None
    try:
        yield
    finally:
        take_out()


# ---------------------------------------------------------------------- DeepSpeed


def _twice_the_loss(backward):
    """Doubles gradients, as if the division by the number of ranks were cancelled twice. Losses stay right."""
    return lambda self, loss, **keywords: backward(self, loss * 2, **keywords)


def _data_of_rank_0(forward_backward):
    """Every rank trains on the samples of rank 0, as with a sampler that does not know its rank."""

    def repeated(self, micro_batches):
        for micro_batch in micro_batches:
            dist.broadcast(micro_batch.input_ids, src=0)
            dist.broadcast(micro_batch.labels, src=0)
        return forward_backward(self, micro_batches)

    return repeated


def _tokens_of_this_rank(_):
    """The loss is divided by the tokens of this rank instead of those of all."""
    return lambda micro_batches, device, group: sum((each.labels != IGNORE_INDEX).sum() for each in micro_batches).to(
        device
    )


def _local_positions(build):
    """Each rank counts the positions of its part of the sequence from 0."""

    def first(self, settings):
        model = build(self, settings)
        forward = model.forward
        model.forward = lambda *args, position_ids, **rest: forward(
            *args, position_ids=position_ids - position_ids[:, :1], **rest
        )
        return model

    return first


def _one_average(_):
    """Stage 3 treated as the stages below it, whose gradients are not divided by the sequence-parallel ranks."""
    return property(lambda self: self.dp_size)


def _own_heads_of_norms(_):
    """Norms of single heads keep the gradient of their own rank's heads."""
    return lambda self, model: None


def _own_part_of_norms(_):
    """Gradients of norms stay those of one rank's part of the sequence."""
    return lambda group, gradient: gradient


def _rounded_frequencies(init):
    """zero.Init makes bf16 of everything, RoPE's frequencies too. That becomes of a dtype of fp32 on CPUs without
    fp16 (partition_parameters.py, _set_dtype); on others it would not show."""
    from kit.engines.deepspeed.over_megatron import DeepSpeedTensorOverride as Override

    overrides = {"tensor_overrides": [Override.device, Override.dtype], "dtype": torch.bfloat16}
    return lambda **keywords: init(**(keywords | overrides))


def _stale_copy(_):
    """The second copy of the weights stays what it was before they were set."""
    return lambda self: None


def _without_mask(call_arguments):
    """The decoder attends to what pads its source."""
    return lambda batch, device: {
        key: value for key, value in call_arguments(batch, device).items() if key != "attention_mask"
    }


def _masters_alone(import_state):
    """A resumed optimizer begins with empty moments."""
    return lambda self, kind, source: import_state(self, kind, source) if kind is StateKind.MASTER else None


# ---------------------------------------------------------------------- Megatron


def _keys_before_queries(slices):
    """Keys before queries in each group of the fused projection, in both directions of the weight map."""

    def swapped(self, shapes, model, tp, rank):
        query, key, value = shapes
        other = {0: 1, 1: 0, 2: 2}
        found = slices(self, (key, query, value), model, tp, rank)
        return [dataclasses.replace(piece, tensor=other[piece.tensor]) for piece in found]

    return swapped


def _no_reduction(_):
    """Gradients of norms stay those of one rank's part of the sequence."""
    return lambda *_, **__: None


def twice_the_gradients(finalize):
    """Doubles gradients: with Adam, losses and weights hardly notice."""

    def doubled(chunks, *args, **keywords):
        finalize(chunks, *args, **keywords)
        for chunk in chunks:
            chunk.scale_gradients(2.0)

    return doubled


def _batched_exchange(transformer_config):
    """The interleaved schedule with megatron-core's default way of exchanging activations."""
    return lambda settings: transformer_config({**settings, "overlap_p2p_comm": False, "batch_p2p_comm": True})


def _renumbered(part: str, number: Callable[[int, Any], int]) -> Callable[[Any], Any]:
    """In the names of all parameters, the number after ``part``: ``number`` of it and the configuration."""

    def wrong(global_names):
        def renamed(config, chunks):
            def other(name):
                parts = name.split(".")
                if part in parts[:-1]:
                    place = parts.index(part) + 1
                    parts[place] = str(number(int(parts[place]), config))
                return ".".join(parts)

            return {other(name): param for name, param in global_names(config, chunks).items()}

        return renamed

    return wrong


def _other_ranks_parts_lost(kernel_backward):
    """The gradients of a part of the keys and values go on before they are added to."""

    def forgetful(*tensors_and_how):
        *tensors, of_part, own, scale = tensors_and_how
        return kernel_backward(*tensors, of_part if own else of_part.clone(), own, scale)

    return forgetful


def _own_positions(shard_batch):
    """Each rank counts the positions of its part of the sequence from 0."""

    def counted(self, micro_batch):
        own = shard_batch(self, micro_batch)
        places = torch.arange(own.input_ids.shape[1]).expand_as(own.input_ids)
        return dataclasses.replace(own, position_ids=places)

    return counted


def _own_length(_):
    """Rotary embeddings take a rank's largest position for the length of the sequence."""
    return lambda self, forward: forward


def _scaled_by_data_ranks(mean_scale):
    """The loss is multiplied by dp, and FSDP2 divides by dp·cp."""
    return lambda tokens, averaged_over: mean_scale(tokens, 1)


def _without_sum(gather):
    """Latent attention: the gradient of the key that all heads share is that of this rank's heads, as megatron-core has
    it without Transformer Engine."""
    return lambda tensor, tensor_parallel_output_grad, group: gather(
        tensor, tensor_parallel_output_grad=False, group=group
    )


def _scores_alone(choose):
    """DeepSeek-V3's router chooses experts by their scores alone."""
    return lambda *args, **keywords: choose(*args, **(keywords | {"expert_bias": None}))


def _own_heads(_):
    """A norm of all heads is one of this rank's heads alone."""
    return lambda squares: squares * dist.get_world_size()


def _rotated_everywhere(_):
    """Layers without positions have them."""
    return lambda model, layer: True


def _whole(_):
    """What a layer adds is not multiplied."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return RowParallelLinear.forward


def _ungated(_):
    """Shared experts have no weight."""
    from megatron.core.transformer.mlp import MLP

    return lambda self, hidden_states: MLP.forward(self, hidden_states)[0]


def _by_windows_that_cut(_):
    """Layers rotate by the base of those with windows only where a sequence is longer than the window."""
    return lambda model: frozenset()


def _summed_biases(_):
    """Under sequence parallelism the gradient of an expert's bias is added to those of other ranks' experts, as
    megatron-core has it."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    return RowParallelLinear


def _across_documents(attend):
    """Attention does not stop at the end of a document."""
    return lambda *tensors_and_how: attend(*tensors_and_how[:4])


def _running_positions(forward):
    """Positions go on counting where a document begins. Rotary ones matter by their differences only: learned ones."""

    def running(self, input_ids, position_ids, *args, **keywords):
        positions = torch.arange(position_ids.shape[1]).expand_as(position_ids)
        return forward(self, input_ids, positions, *args, **keywords)

    return running


def _neighbouring_parts(_):
    """Ranks take neighbouring parts of the sequence, while attention believes in the zig-zag order."""
    return lambda tensor, dim, group: tensor.chunk(group.size(), dim)[group.rank()]


def _decayed_norms(_):
    """Weight decay on norms too: megatron-core leaves the exception to a scheduler that is not used here."""
    return lambda config: {}


def _unscaled_router_losses(begin):
    """Losses of routers are added as they are to a loss that is a sum over tokens."""

    def unscaled(self, micro_batches):
        begin(self, micro_batches)
        self._config.grad_scale_func = None

    return unscaled


def _scaled_prediction_loss(begin):
    """The loss of multi-token prediction is multiplied by the scale of router losses."""
    return lambda self, scale: begin(self, None)


def _lone_last_embedding(_):
    """The last stage's copy of the embedding keeps its gradients from the first stage's."""
    return lambda *args, **keywords: None


def _loads_of_this_rank(_):
    """Auxiliary losses weigh experts by the tokens of this rank's part of the sequence."""
    return lambda routing_map, reduce_group, **_: (
        routing_map.sum(0) * reduce_group.size(),
        len(routing_map),
        len(routing_map) * reduce_group.size(),
    )


def _biases_of_this_rank(_):
    """Each rank moves its biases by the loads that it saw."""
    return lambda tokens, bias, rate: bias + rate * torch.sign(tokens.mean(-1, keepdim=True) - tokens)


def _no_sum_over_ranks(_):
    """Loads stay those of one rank."""
    return lambda self: None


def _mean_over_ranks_twice(begin):
    """Losses of routers are divided by the number of ranks here and by the engine once more."""
    return lambda self, micro_batches, averaged_over, loss_scale=1.0: begin(self, micro_batches, 1, loss_scale)


def _whole_parameters(_):
    """Muon takes query, key and value for one matrix, and gate and up."""

    def unsplit(resharder):
        for parameter in resharder.parameters.values():
            getattr(parameter, "main_param", parameter).is_qkv = False

    return unsplit


def _momentum_lost(put):
    """A checkpoint's first moments are not read back."""
    return lambda self, kind, *rest: None if kind is StateKind.EXP_AVG else put(self, kind, *rest)


def _identity(_):
    """No collective between A and B of an adapter."""
    return lambda linear, sequence_parallel: torch.nn.Identity()


def _own_part_of_the_sequence(init):
    """Gradients of the adapters that every rank has are those of its part of the sequence."""

    def forgetful(self, *args):
        init(self, *args)
        self.a.sequence_parallel = self.b.sequence_parallel = False

    return forgetful


_CONTEXT = "kit.engines.torch.context_parallel:ContextParallel"
_DEEPSPEED, _MEGATRON = "kit.engines.deepspeed", "kit.engines.megatron"
_GLOBAL_NAMES = f"{_MEGATRON}.resharding.huggingface:global_names"
_ZERO_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"

FAULTS: dict[str, Fault] = {
    "deepspeed-double-gradients": Fault("deepspeed:DeepSpeedEngine.backward", _twice_the_loss, "deepspeed-zero3"),
    "deepspeed-repeated-data": Fault(
        f"{_DEEPSPEED}.engine:DeepSpeedEngine.forward_backward", _data_of_rank_0, "deepspeed-zero2-accumulation"
    ),
    "deepspeed-local-token-count": Fault(f"{_DEEPSPEED}.engine:global_tokens", _tokens_of_this_rank, "deepspeed-zero1"),
    "ulysses-local-positions": Fault(f"{_DEEPSPEED}.ulysses:UlyssesSequenceParallel.build", _local_positions),
    "ulysses-one-average": Fault(f"{_DEEPSPEED}.ulysses:UlyssesSequenceParallel.averaged_over", _one_average),
    "autotp-partial-norms": Fault(
        "deepspeed.module_inject.auto_tp:AutoTP.register_replicated_grad_hooks", _own_heads_of_norms
    ),
    "over-megatron-partial-norms": Fault(f"{_DEEPSPEED}.over_megatron:_sum_over", _own_part_of_norms),
    "over-megatron-rounded-frequencies": Fault(f"{_DEEPSPEED}.over_megatron:deepspeed.zero.Init", _rounded_frequencies),
    "hpz-stale-copy": Fault(f"{_ZERO_3}.invalidate_secondary_tensor", _stale_copy),
    "pairs-see-padding": Fault("kit.engines.kernels.prepare_model:call_arguments", _without_mask),
    "exchange-forgets-moments": Fault(f"{_DEEPSPEED}.engine:DeepSpeedEngine.import_state", _masters_alone),
    "megatron-swap-qk": Fault(f"{_MEGATRON}.weights.sharding:QKV.slices", _keys_before_queries, "megatron-tp2"),
    "megatron-skip-sequence-parallel-reduction": Fault(
        f"{_FINALIZE}:_allreduce_non_tensor_model_parallel_grads", _no_reduction, "megatron-tp2-sp"
    ),
    "megatron-double-gradients": Fault(
        f"{_MEGATRON}.engine:finalize_model_grads", twice_the_gradients, "megatron-dp2-distributed-optimizer"
    ),
    "megatron-batched-interleaving": Fault(
        f"{_MEGATRON}.engine:transformer_config", _batched_exchange, "megatron-pp2-interleaved"
    ),
    # Each stage holds the layers from one further on.
    "megatron-shifted-stages": Fault(
        _GLOBAL_NAMES, _renumbered("layers", lambda layer, config: (layer + 1) % config.num_layers), "megatron-pp2"
    ),
    "megatron-ring-forgets-a-part": Fault(
        "kit.engines.kernels.ring_attention:_kernel_backward", _other_ranks_parts_lost
    ),
    "context-local-positions": Fault(f"{_CONTEXT}.shard_batch", _own_positions),
    "context-length-of-own-part": Fault(
        "kit.engines.huggingface.whole_length_rope:WholeLengthRope._with_last", _own_length
    ),
    "context-scaled-by-data-ranks": Fault("kit.engines.torch.engine:mean_scale", _scaled_by_data_ranks),
    "megatron-shared-key-of-own-heads": Fault(
        f"{_MEGATRON}.model.mla:gather_from_sequence_parallel_region", _without_sum
    ),
    "megatron-norm-of-own-heads": Fault(
        f"{_MEGATRON}.model.norms:reduce_from_tensor_model_parallel_region", _own_heads
    ),
    "megatron-rotated-everywhere": Fault("kit.specs.model:ModelSpec.rotates", _rotated_everywhere),
    "megatron-adapters-without-collective": Fault(f"{_MEGATRON}.model.adapted_linear:_collective", _identity),
    "megatron-adapters-of-own-sequence": Fault(
        f"{_MEGATRON}.model.adapted_linear:Adapter.__init__", _own_part_of_the_sequence
    ),
    "megatron-muon-of-fused-matrices": Fault(f"{_MEGATRON}.engine:mark_matrices", _whole_parameters),
    "megatron-lost-momentum": Fault(f"{_MEGATRON}.resharding.optimizer_state:LocalState.put", _momentum_lost),
    "megatron-whole-residual": Fault(f"{_MEGATRON}.model.layer_variants:ScaledRowParallelLinear.forward", _whole),
    "megatron-ungated-shared-expert": Fault(
        "megatron.core.transformer.moe.shared_experts:SharedExpertMLP.forward", _ungated
    ),
    "megatron-one-rotation": Fault(f"{_MEGATRON}.model.layers:_local_layers", _by_windows_that_cut),
    "megatron-forgotten-correction": Fault(
        "megatron.core.transformer.moe.router:topk_routing_with_score_function", _scores_alone
    ),
    "local-expert-loads": Fault("kit.engines.routing:RoutingRecord.reduce", _no_sum_over_ranks),
    "router-losses-averaged-twice": Fault("kit.engines.huggingface.routing:HfRouting.begin", _mean_over_ranks_twice),
    "megatron-unscaled-router-losses": Fault(f"{_MEGATRON}.routing:MegatronRouting.begin", _unscaled_router_losses),
    "megatron-scaled-prediction-loss": Fault(
        f"{_MEGATRON}.prediction_heads:PredictionHeads.begin", _scaled_prediction_loss
    ),
    "megatron-lone-last-embedding": Fault(f"{_FINALIZE}:_allreduce_word_embedding_grads", _lone_last_embedding),
    "megatron-loads-of-this-rank": Fault(
        "megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count", _loads_of_this_rank
    ),
    "megatron-biases-of-this-rank": Fault(f"{_FINALIZE}:get_updated_expert_bias", _biases_of_this_rank),
    "megatron-summed-expert-biases": Fault(f"{_MEGATRON}.model.layers:ExpertRowParallelLinear", _summed_biases),
    "megatron-joined-documents": Fault(f"{_MEGATRON}.model.cp_all_gather:causal_attention", _across_documents),
    "megatron-running-positions": Fault(f"{_MEGATRON}.model.build:LanguageModel.forward", _running_positions),
    "megatron-decayed-norms": Fault(
        "megatron.core.optimizer:get_standard_config_overrides", _decayed_norms, "megatron-tp2"
    ),
    # Each two neighbouring experts swapped, in both directions, while the router keeps its order.
    "megatron-swapped-experts": Fault(
        _GLOBAL_NAMES, _renumbered("local_experts", lambda expert, config: expert ^ 1), "megatron-ep2-mixtral"
    ),
    "megatron-unbalanced-context": Fault(f"{_MEGATRON}.microbatches:local_part", _neighbouring_parts, "megatron-cp2"),
}
"""Name → fault."""
