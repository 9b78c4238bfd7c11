"""Planted faults: proof that the comparison can fail. Nothing in the kit package knows of them.

A fault is installed in a rank's process before its engine is built, by replacing one function of an engine with a
wrong one. Each names the layout in which it must show (``benchmarks/system_tests/parity/cases.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One mistake."""

    case: str
    """Name of the parity case that must turn red; empty: a cell of ``megatron_layouts.py`` only."""
    install: Callable[[], None]
    """Plants it in this process."""


_replaced: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def uproot() -> None:
    """Undo what was planted through ``_replace``: for tests, whose processes live on."""
    while _replaced:
        setattr(*_replaced.pop())


# ---------------------------------------------------------------------- DeepSpeed


def _deepspeed_double_gradients() -> None:
    """Doubles gradients, as if the division by the number of ranks were cancelled twice. Losses stay right."""
    import deepspeed

    backward = deepspeed.DeepSpeedEngine.backward

    def doubled(self, loss, **keywords):
        return backward(self, loss * 2, **keywords)

    _replace(deepspeed.DeepSpeedEngine, "backward", doubled)


def _deepspeed_repeated_data() -> None:
    """Every rank trains on the samples of rank 0, as with a sampler that does not know its rank."""
    import torch.distributed as dist

    from kit.engines.deepspeed.engine import DeepSpeedEngine

    forward_backward = DeepSpeedEngine.forward_backward

    def repeated(self, micro_batches):
        for micro_batch in micro_batches:
            dist.broadcast(micro_batch.input_ids, src=0)
            dist.broadcast(micro_batch.labels, src=0)
        return forward_backward(self, micro_batches)

    _replace(DeepSpeedEngine, "forward_backward", repeated)


def _deepspeed_local_token_count() -> None:
    """The loss is divided by the tokens of this rank instead of those of all."""
    import torch

    from kit.engines.base import IGNORE_INDEX
    from kit.engines.deepspeed import engine

    def local_tokens(micro_batches, device: torch.device, group) -> torch.Tensor:
        return sum((micro_batch.labels != IGNORE_INDEX).sum() for micro_batch in micro_batches).to(device)

    _replace(engine, "global_tokens", local_tokens)


# ---------------------------------------------------------------------- Megatron


def _megatron_swap_qk() -> None:
    """Keys before queries in each group of the fused projection, in both directions of the weight map."""
    import dataclasses

    from kit.engines.megatron.weights.sharding import QKV

    slices = QKV.slices

    def swapped(self, shapes, model, tp, rank):
        query, key, value = shapes
        other = {0: 1, 1: 0, 2: 2}
        found = slices(self, (key, query, value), model, tp, rank)
        return [dataclasses.replace(piece, tensor=other[piece.tensor]) for piece in found]

    _replace(QKV, "slices", swapped)


def _megatron_skip_sequence_parallel_reduction() -> None:
    """Gradients of norms stay those of one rank's part of the sequence."""

    # The package hides this module behind the function of the same name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    _replace(module, "_allreduce_non_tensor_model_parallel_grads", lambda *_, **__: None)


def _megatron_double_gradients() -> None:
    """Twice the gradient: with Adam, losses and weights hardly notice."""
    from kit.engines.megatron import engine

    finalize = engine.finalize_model_grads

    def doubled(chunks, *args, **keywords):
        finalize(chunks, *args, **keywords)
        for chunk in chunks:
            chunk.scale_gradients(2.0)

    _replace(engine, "finalize_model_grads", doubled)


def _megatron_batched_interleaving() -> None:
    """The interleaved schedule with megatron-core's default way of exchanging activations."""
    from kit.engines.megatron import engine

    build = engine.transformer_config

    def batched(settings):
        return build({**settings, "overlap_p2p_comm": False, "batch_p2p_comm": True})

    _replace(engine, "transformer_config", batched)


def _megatron_shifted_stages() -> None:
    """Each stage holds the layers from one further on."""
    from kit.engines.megatron.resharding import huggingface

    names = huggingface._global_names

    def shifted(config, chunks):
        def later(name):
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str((int(parts[2]) + 1) % config.num_layers)
            return ".".join(parts)

        return {later(name): param for name, param in names(config, chunks).items()}

    _replace(huggingface, "_global_names", shifted)


def _megatron_ring_forgets_a_part() -> None:
    """The gradients of a part of the keys and values go on before they are added to."""
    from kit.engines.megatron.model import cp_ring

    backward = cp_ring._kernel_backward

    def forgetful(*tensors_and_how):
        of_query, *of_part = backward(*tensors_and_how)
        own = tensors_and_how[5]
        return of_query, *(gradient if own else 0 * gradient for gradient in of_part)

    _replace(cp_ring, "_kernel_backward", forgetful)


def _megatron_shared_key_of_own_heads() -> None:
    """Latent attention: the gradient of the key that all heads share is that of this rank's heads, as megatron-core has
    it without Transformer Engine."""
    from kit.engines.megatron.model import mla

    gather = mla.gather_from_sequence_parallel_region

    def without_sum(tensor, tensor_parallel_output_grad, group):
        return gather(tensor, tensor_parallel_output_grad=False, group=group)

    _replace(mla, "gather_from_sequence_parallel_region", without_sum)


def _megatron_forgotten_correction() -> None:
    """DeepSeek-V3's router chooses experts by their scores alone."""
    from megatron.core.transformer.moe import router

    choose = router.topk_routing_with_score_function
    changed = lambda *args, **kwargs: choose(*args, **(kwargs | {"expert_bias": None}))  # noqa: E731
    _replace(router, "topk_routing_with_score_function", changed)


def _megatron_summed_expert_biases() -> None:
    """Under sequence parallelism the gradient of an expert's bias is added to those of other ranks' experts, as
    megatron-core has it."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    from kit.engines.megatron.model import layers

    _replace(layers, "ExpertRowParallelLinear", RowParallelLinear)


def _megatron_joined_documents() -> None:
    """Attention does not stop at the end of a document."""
    from kit.engines.megatron.model import cp_all_gather

    attend = cp_all_gather.causal_attention
    _replace(cp_all_gather, "causal_attention", lambda *tensors_and_how: attend(*tensors_and_how[:4]))


def _megatron_running_positions() -> None:
    """Positions go on counting where a document begins. Rotary ones matter by their differences only: learned ones."""
    import torch

    from kit.engines.megatron.model.build import LanguageModel

    forward = LanguageModel.forward

    def running(self, input_ids, position_ids, *args, **keywords):
        positions = torch.arange(position_ids.shape[1]).expand_as(position_ids)
        return forward(self, input_ids, positions, *args, **keywords)

    _replace(LanguageModel, "forward", running)


def _megatron_unbalanced_context() -> None:
    """Ranks take neighbouring parts of the sequence, while attention believes in the zig-zag order."""
    from kit.engines.megatron import microbatches

    _replace(microbatches, "local_part", lambda tensor, dim, group: tensor.chunk(group.size(), dim)[group.rank()])


def _megatron_swapped_experts() -> None:
    """Each two neighbouring experts swapped, in both directions, while the router keeps its order."""
    from kit.engines.megatron.resharding import huggingface

    global_names = huggingface._global_names

    def swapped(config, chunks):
        def neighbour(name):
            parts = name.split(".")
            if "local_experts" in parts:
                place = parts.index("local_experts") + 1
                parts[place] = str(int(parts[place]) ^ 1)
            return ".".join(parts)

        return {neighbour(name): param for name, param in global_names(config, chunks).items()}

    _replace(huggingface, "_global_names", swapped)


def _megatron_decayed_norms() -> None:
    """Weight decay on norms too: megatron-core leaves the exception to a scheduler that is not used here."""
    import megatron.core.optimizer

    _replace(megatron.core.optimizer, "get_standard_config_overrides", lambda config: {})


FAULTS: dict[str, Fault] = {
    "deepspeed-double-gradients": Fault("deepspeed-zero3", _deepspeed_double_gradients),
    "deepspeed-repeated-data": Fault("deepspeed-zero2-accumulation", _deepspeed_repeated_data),
    "deepspeed-local-token-count": Fault("deepspeed-zero1", _deepspeed_local_token_count),
    "megatron-swap-qk": Fault("megatron-tp2", _megatron_swap_qk),
    "megatron-skip-sequence-parallel-reduction": Fault("megatron-tp2-sp", _megatron_skip_sequence_parallel_reduction),
    "megatron-double-gradients": Fault("megatron-dp2-distributed-optimizer", _megatron_double_gradients),
    "megatron-batched-interleaving": Fault("megatron-pp2-interleaved", _megatron_batched_interleaving),
    "megatron-shifted-stages": Fault("megatron-pp2", _megatron_shifted_stages),
    "megatron-ring-forgets-a-part": Fault("", _megatron_ring_forgets_a_part),
    "megatron-shared-key-of-own-heads": Fault("", _megatron_shared_key_of_own_heads),
    "megatron-forgotten-correction": Fault("", _megatron_forgotten_correction),
    "megatron-summed-expert-biases": Fault("", _megatron_summed_expert_biases),
    "megatron-joined-documents": Fault("", _megatron_joined_documents),
    "megatron-running-positions": Fault("", _megatron_running_positions),
    "megatron-decayed-norms": Fault("megatron-tp2", _megatron_decayed_norms),
    "megatron-swapped-experts": Fault("megatron-ep2-mixtral", _megatron_swapped_experts),
    "megatron-unbalanced-context": Fault("megatron-cp2", _megatron_unbalanced_context),
}
"""Name → fault."""
