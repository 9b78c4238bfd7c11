"""Lists candidate layouts: every combination of divisors, with the pinned values.

Nothing here depends on a model's name. Pinned values are used even if they are impossible; the rules then explain what
is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial

from kit.cost.memory.states_and_buffers import least_megatron_gib
from kit.planner.request import Request
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.layout import PINNABLE, ContextExchange, EngineName, Layout, Offload, Pins, Recompute, divisors
from kit.specs.model import ModelSpec

_LARGEST_MICRO_BATCH_TOKENS = 65536
"""Largest micro batch in tokens: GEMMs reach their full rate below this, and larger ones only need more memory."""

_SHORTEST_CONTEXT = 4096
"""Fewest tokens of a sequence per rank under context parallelism, in the usual layouts."""


class LowerBound:
    """Megatron layouts that cannot win. The bound of a step is the same however a pipeline cuts the layers, so it is
    asked once for all pipelines of the other sizes."""

    def __init__(self, exceeds: Callable[[Layout], bool]) -> None:
        self._exceeds = exceeds
        self._known: dict[object, bool] = {}

    def rest(self, sizes: list[int], key: tuple[object, ...]) -> list[int]:
        """The micro batch sizes that may win. ``key``: all else that the bound depends on."""
        return [size for size in sizes if not self._known.get((size, key))]

    def __call__(self, layout: Layout, key: tuple[object, ...]) -> bool:
        key = (layout.micro_batch_size, key)
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._exceeds(layout)
        return found


def layouts(
    request: Request,
    engine: EngineName,
    further: bool = False,
    most_gib: float = math.inf,
    bound: LowerBound | None = None,
) -> Iterator[Layout]:
    """Layouts of one engine, legal or not. Layouts that differ only in the micro batch come in ascending order.

    ``further``: instead of the usual layouts, those that save memory at the cost of speed. For DeepSpeed these offload
    state, or use ZeRO on one GPU; for Megatron they leave a rank less than ``_SHORTEST_CONTEXT`` tokens of a sequence.
    ``most_gib``: skips Megatron layouts that need more memory per GPU; ``bound``: and those that cannot win.
    """
    if engine == "megatron":
        return _megatron(request, further, most_gib, bound)
    if engine == "deepspeed":
        return _deepspeed(request, further)
    return _torch(request, further)


def all_layouts(request: Request, engine: EngineName) -> Iterator[Layout]:
    """The usual layouts of one engine, then the further ones."""
    return itertools.chain(layouts(request, engine), layouts(request, engine, further=True))


def _torch(request: Request, further: bool) -> Iterator[Layout]:
    cluster, job, pins = request.cluster, request.job, request.pins
    pinned = _pinned_offload(pins)
    offloads = [pinned]
    if further:
        yield from _long_sequences(request)
        several = job.lora is not None or cluster.num_gpus > 1  # FSDP2 has whole models
        if several and pinned == ("none", "none") and not (pins.offload_param or pins.offload_optimizer):
            offloads.append(("cpu", "cpu"))
    for split in _torch_splits(request):
        if further and split.tp > 1:
            continue  # what saves memory needs whole layers
        dp = split.data_parallel(cluster)
        # DDP combines with no other parallelism.
        whole = [0] if split.cp == split.ep == 1 and (split.tp == 1 or pins.tp) else []
        stages = [pins.zero_stage] if pins.zero_stage is not None else ([*whole, 2, 3] if dp * split.cp > 1 else [0])
        usual = fast_paths(request, compiles=split.tp == 1)
        for offload in offloads:
            ways = _ways(pins, usual, offload != pinned) if further else usual
            for zero, (way, recompute) in itertools.product(stages, _each_recompute(ways, pins, further)):
                yield from _sized("torch", job, way, split, dp, zero, offload, recompute)


def _long_sequences(request: Request) -> Iterator[Layout]:
    """FSDP2 over ranks that split each sequence, for sequences longer than ``_LARGEST_MICRO_BATCH_TOKENS``: full
    recompute, and what else saves memory. On request there is more (``_torch_splits``)."""
    cluster, job, pins = request.cluster, request.job, request.pins
    if job.seq_length <= _LARGEST_MICRO_BATCH_TOKENS or job.objective not in ("pretrain", "sft"):
        return
    given = _Split.of(pins.but(cp=None, cp_comm_type=None))
    if given != _Split() or pins.cp == 1 or pins.zero_stage in (0, 1, 2) or _pinned_offload(pins) != ("none", "none"):
        return
    for cp in [pins.cp] if pins.cp else divisors(cluster.num_gpus)[1:]:
        split = _Split(cp=cp, cp_comm_type=pins.cp_comm_type or "p2p")
        dp, stays = split.data_parallel(cluster), _pinned_offload(pins)
        for way in _savers(pins):
            yield from _sized("torch", job, way, split, dp, 3, stays, pins.recompute or "full")


def fast_paths(request: Request, compiles: bool) -> list[Pins]:
    """Pins for eager mode, and for the fast path where it is tried: a chunked loss, and compiled blocks too in
    pretraining of dense decoders, for which they were tested.

    It was not measured on several GPUs, where it could decide which engine wins. There it is tried only with a pinned
    ``engine=torch``, or in fp8.
    """
    cluster, job, pins = request.cluster, request.job, request.pins
    # fp8 needs the fast path: in eager mode the casts to 8 bits cost more than the fp8 GEMMs save.
    tried = cluster.num_gpus == 1 or pins.engine == "torch" or job.precision == "fp8"
    tried = tried and compiles and cluster.gpu.device == "cuda" and job.precision in ("bf16", "fp32", "fp8")
    tried = tried and pins.implementation in (None, "huggingface")
    if not tried or request.model.is_encoder_decoder:
        return [pins]
    faster = pins.but(chunked_loss=True if pins.chunked_loss is None else pins.chunked_loss)
    if job.objective == "pretrain" and job.lora is None and not request.model.num_experts:
        faster = faster.but(compile_layers=True if pins.compile_layers is None else pins.compile_layers)
    return [pins] if faster == pins else [pins, faster]


_SAVERS = (
    ("chunked_loss", "activation_offloading", "tiled_mlp"),
    ("chunked_loss", "activation_offloading"),
    ("chunked_loss", "tiled_mlp"),
    ("chunked_loss",),
)
"""What saves memory of Hugging Face's layers at the cost of time, from the most to the least: if the most does not fit,
the search skips the others."""


@lru_cache(maxsize=64)
def _savers(pins: Pins) -> tuple[Pins, ...]:
    """``pins`` with what saves memory, as far as they leave it open."""
    left = [{name: True for name in names if getattr(pins, name) is None} for names in _SAVERS]
    return tuple(dict.fromkeys(pins.but(**names) for names in left))


def _ways(pins: Pins, usual: Sequence[Pins], offloads: bool) -> list[Pins]:
    """Pins of further layouts. ``offloads``: with offloaded state, only a chunked loss is tried beside ``usual``, and
    the rest if saved layer inputs are pinned to the host, as a last resort does."""
    if offloads and not pins.activation_offloading:
        return [*dict.fromkeys((pins, _savers(pins)[-1]))]
    return [way for way in dict.fromkeys((pins, *_savers(pins))) if offloads or way not in usual]


def _each_recompute(ways: Sequence[Pins], pins: Pins, further: bool) -> list[tuple[Pins, Recompute]]:
    """Every way with every kind of recompute. What is saved on the host are the layer inputs of full recompute."""
    both = itertools.product(ways, _recompute(pins, further))
    return [(way, recompute) for way, recompute in both if recompute == "full" or not way.activation_offloading]


def _torch_splits(request: Request) -> list[_Split]:
    """FSDP2 over all ranks, and FSDP2 combined with tensor parallelism inside a node, or with expert parallelism there.
    The latter was not measured on GPUs, so it is tried only with a pinned ``engine=torch``."""
    model, cluster, pins = request.model, request.cluster, request.pins
    split = _Split.of(pins)
    if split.cp > 1 and pins.cp_comm_type is None:
        split = replace(split, cp_comm_type="p2p")
    if pins.tp is not None or split != _Split() or pins.zero_stage in (0, 1):
        return [split]
    cut = [_Split(tp=tp) for tp in divisors(cluster.gpus_per_node)[1:]]
    found = [split, *(each for each in cut if each.data_parallel(cluster) > 1)]
    if pins.engine == "torch" and pins.ep is None and model.num_experts and request.job.lora is None:
        found += [_Split(ep=ep) for ep in divisors(math.gcd(model.num_experts, cluster.gpus_per_node))[1:]]
    return found


def _deepspeed(request: Request, further: bool) -> Iterator[Layout]:
    cluster, job, pins = request.cluster, request.job, request.pins
    split = _Split.of(pins)
    dp = split.data_parallel(cluster)
    if pins.engine is None and split != _Split():
        return  # AutoTP and Ulysses only if engine=deepspeed is pinned: Megatron's equivalents are faster and tested
    if split.cp > 1 and pins.cp_comm_type is None:
        split = replace(split, cp_comm_type="a2a")
    if pins.implementation == "local" and pins.sp is None:
        split = replace(split, sp=split.tp > 1 and job.seq_length % split.tp == 0)
    stages = [1, 2, 3] if pins.zero_stage is None else [pins.zero_stage]
    pinned = _pinned_offload(pins)
    # One rank cannot shard, so ZeRO is only useful for offload.
    unusual = dp == 1 and pins.engine is None and pins.zero_stage is None and pinned == ("none", "none")
    if unusual and not further:
        return
    for zero in stages:
        offloads = [pinned, *(_further_offloads(pins, zero) if further else [])]
        for offload, hpz in itertools.product(offloads, _second_copies(cluster, pins, split, zero)):
            own = pins.but(zero_hpz=hpz)
            ways = _ways(own, [own], unusual or offload != pinned) if further else [own]
            for way, recompute in _each_recompute(ways, own, further):
                yield from _sized("deepspeed", job, way, split, dp, zero, offload, recompute)
    # A pinned engine=deepspeed means ZeRO on a transformers model, which accelerate and the Trainer run.
    free = pins.engine is None and pins.implementation is None and not further
    if free and split == _Split() and pins.sp is None and pins.tp is None:
        yield from _zero_over_megatron(cluster, job, pins)


def _zero_over_megatron(cluster: ClusterSpec, job: JobSpec, pins: Pins) -> Iterator[Layout]:
    """ZeRO-2 and 3 over Megatron's tensor parallelism. ZeRO-1 is not tried: Megatron has its distributed optimizer."""
    stages = [2, 3] if pins.zero_stage is None else [stage for stage in (2, 3) if stage == pins.zero_stage]
    layers = pins.but(implementation="local", zero_hpz=pins.zero_hpz or 1)
    for tp, zero, recompute in itertools.product(divisors(cluster.gpus_per_node)[1:], stages, _recompute(pins)):
        split = _Split(tp=tp, sp=job.seq_length % tp == 0)
        offload = _pinned_offload(pins)
        yield from _sized("deepspeed", job, layers, split, split.data_parallel(cluster), zero, offload, recompute)


def _second_copies(cluster: ClusterSpec, pins: Pins, split: _Split, zero: int) -> list[int]:
    """Sizes of hpZ to try: off, and one node if there are several. Unlike the rest of ZeRO++, hpZ is not lossy."""
    if pins.zero_hpz is not None:
        return [pins.zero_hpz]
    useful = zero == 3 and cluster.num_nodes > 1 and cluster.gpus_per_node > 1 and split == _Split()
    return [1, cluster.gpus_per_node] if useful else [1]


def _megatron(request: Request, further: bool, most_gib: float, bound: LowerBound | None) -> Iterator[Layout]:
    model, cluster, job, pins = request.model, request.cluster, request.job, request.pins
    if cluster.num_gpus == 1 and pins.engine is None and _Split.of(pins) == _Split():
        return  # one GPU has nothing to split, so Megatron has no advantage over transformers' model
    # Its distributed optimizer steps with Adam only.
    zero = int(job.optimizer.name == "adamw") if pins.zero_stage is None else pins.zero_stage
    offload = _pinned_offload(pins)
    for tp, pp, cp in _splits(request, further):
        sp = pins.sp if pins.sp is not None else tp > 1 and job.seq_length % (tp * cp) == 0
        first, last = _ends(model, pins, pp)
        ends = _Split(tp=tp, pp=pp, first_stage_layers=first, last_stage_layers=last, cp=cp, sp=sp)
        dp = ends.data_parallel(cluster)
        experts = _experts(model, pins, tp, dp * cp * tp)
        if most_gib < math.inf:
            kept = 0.0 if offload[0] != "none" else 0.5 if pins.optimizer_state_dtype == "bf16" else 1.0
            least = partial(least_megatron_gib, model, job, cluster.num_gpus, tp, pp, kept=kept)
            experts = [cut for cut in experts if least(math.prod(cut)) <= most_gib]
        gathers = cp > 1 or model.attention_softcap is not None
        ways = [*itertools.product(experts, _comm_types(pins, cp), _recompute(pins, further, gathers))]
        for vp in _virtual(model, pins, pp, first) if ways else ():
            for (ep, etp), comm_type, recompute in ways:
                whole = _Split(**vars(ends) | {"vp": vp, "ep": ep, "etp": etp, "cp_comm_type": comm_type})
                yield from _sized("megatron", job, pins, whole, dp, zero, offload, recompute, bound)


@dataclass(frozen=True)
class _Split:
    """Sizes of all kinds of parallelism except data parallelism."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    cp: int = 1
    cp_comm_type: ContextExchange = "all_gather"
    sp: bool = False
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, pins: Pins) -> _Split:
        """The pinned sizes, and 1 (no split) for the others."""
        given = {field.name: getattr(pins, field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def data_parallel(self, cluster: ClusterSpec) -> int:
        return max(1, cluster.num_gpus // (self.tp * self.pp * self.cp))


def _splits(request: Request, further: bool) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, cp) to try. Tensor parallelism stays inside a node, because it has two collectives per layer."""
    model, cluster, job, pins = request.model, request.cluster, request.job, request.pins
    tps = [pins.tp] if pins.tp else divisors(cluster.gpus_per_node)
    for tp in tps:
        pps = [pins.pp] if pins.pp else [p for p in divisors(max(1, cluster.num_gpus // tp)) if _cuts(model, pins, p)]
        for pp in pps:
            rest = max(1, cluster.num_gpus // (tp * pp))
            if pins.cp:
                cps = [] if further else [pins.cp]
            else:
                cps = [] if further else [1]
                cps += [
                    c
                    for c in divisors(rest)[1:]
                    if job.seq_length % (2 * c) == 0 and (job.seq_length // c < _SHORTEST_CONTEXT) == further
                ]
            yield from ((tp, pp, cp) for cp in cps)


def _experts(model: ModelSpec, pins: Pins, tp: int, ranks: int) -> list[tuple[int, int]]:
    """(ep, etp) to try. ``ranks``: ranks of a pipeline stage, over which expert parallelism distributes experts."""
    if not model.num_experts:
        return [(pins.ep or 1, pins.etp or 1)]
    eps = [pins.ep] if pins.ep else [ep for ep in divisors(model.num_experts) if ranks % ep == 0]
    # Whole experts (etp=1) are faster than split ones; without expert parallelism etp must equal tp.
    return [(ep, pins.etp or (tp if ep == 1 else 1)) for ep in eps]


def _cuts(model: ModelSpec, pins: Pins, pp: int) -> bool:
    """Whether ``pp`` stages are tried: the layers divide evenly, or with the uneven ends of ``_ends``."""
    return model.num_layers % pp == 0 or _ends(model, pins, pp) != (None, None)


def _ends(model: ModelSpec, pins: Pins, pp: int) -> tuple[int | None, int | None]:
    """Layers of the first and last stage, if these have fewer layers than the others; else (None, None).

    The embedding and the loss each take about as long as a layer. With one layer fewer at both ends, 126 layers make 16
    stages (Llama 3, arXiv 2407.21783, section 3.3.2). If the layers still do not divide, the ends get even fewer, the
    last stage first: 61 layers make 3, fourteen times 4, and 2.
    """
    if pins.first_stage_layers or pins.last_stage_layers:
        return pins.first_stage_layers, pins.last_stage_layers
    each = -(-(model.num_layers + 2) // pp)
    last, longer = divmod(model.num_layers - (pp - 2) * each, 2)
    if model.num_layers % pp == 0 or each == 1 or last < 1:
        return None, None
    return last + longer, last


def _virtual(model: ModelSpec, pins: Pins, pp: int, first: int | None) -> list[int]:
    if pins.vp:
        return [pins.vp]
    if pp == 1:
        return [1]
    if first is not None and not (pins.first_stage_layers or pins.last_stage_layers):
        return divisors(first + 1) if (model.num_layers + 2) % pp == 0 else [1]
    return divisors(model.num_layers // pp)


def _recompute(pins: Pins, further: bool = False, selective: bool = False) -> Sequence[Recompute]:
    """Kinds of recompute to try. Selective recompute is tried only if attention saves gathered keys and values or
    unfused scores. Further layouts begin with full recompute: if that does not fit, the search skips the others."""
    if pins.recompute is not None:
        return (pins.recompute,)
    tried: tuple[Recompute, ...] = ("none", "selective", "full") if selective else ("none", "full")
    return tried[::-1] if further else tried


def _comm_types(pins: Pins, cp: int) -> Sequence[ContextExchange]:
    """``cp_comm_type`` to try. Compared with all_gather, the ring (p2p) sends as much in forward and twice as much in
    backward, but it overlaps attention and saves no gathered sequence."""
    if pins.cp_comm_type is not None:
        return (pins.cp_comm_type,)
    return ("all_gather", "p2p") if cp > 1 else ("all_gather",)


def _pinned_offload(pins: Pins) -> tuple[Offload, Offload]:
    return pins.offload_optimizer or "none", pins.offload_param or "none"


def _further_offloads(pins: Pins, zero: int) -> list[tuple[Offload, Offload]]:
    """(optimizer, parameters) offload of the further layouts: all combinations except that of the usual layouts."""
    places: tuple[Offload, ...] = ("none", "cpu", "nvme") if zero == 3 else ("none", "cpu")
    optimizers = places if pins.offload_optimizer is None else (pins.offload_optimizer,)
    params: tuple[Offload, ...] = (pins.offload_param or "none",) if pins.offload_param or zero < 3 else places
    found = [(o, p) for o in optimizers for p in params if p == "none" or o != "none" or pins.offload_param]
    return [both for both in found if both != _pinned_offload(pins)]


def _sized(
    engine: EngineName,
    job: JobSpec,
    pins: Pins,
    split: _Split,
    dp: int,
    zero: int,
    offload: tuple[Offload, Offload],
    recompute: Recompute,
    bound: LowerBound | None = None,
) -> Iterator[Layout]:
    """One layout for every micro batch size that divides a rank's share of the global batch."""
    share = job.global_batch_size // dp if job.global_batch_size % dp == 0 else 1
    most = max(1, _LARGEST_MICRO_BATCH_TOKENS // job.seq_length)
    sizes = [pins.micro_batch_size] if pins.micro_batch_size else [size for size in divisors(share) if size <= most]
    key = (split.tp, split.cp, split.cp_comm_type, split.sp, split.ep, split.etp, recompute)
    if bound is not None and not (sizes := bound.rest(sizes, key)):
        return
    choices = {"dp": dp, "zero_stage": zero, "offload_optimizer": offload[0], "offload_param": offload[1]}
    whole = _pinned(engine, job, pins).but(**vars(split) | choices, recompute=recompute)
    for size in sizes:
        accumulation = max(1, job.global_batch_size // (size * dp))
        layout = whole.but(micro_batch_size=size, gradient_accumulation_steps=accumulation)
        if bound is None or not bound(layout, key):
            yield layout


@lru_cache(maxsize=64)
def _pinned(engine: EngineName, job: JobSpec, pins: Pins) -> Layout:
    """The pinned choices; all others have their defaults."""
    pinned = {name: value for name in PINNABLE if (value := getattr(pins, name)) is not None}
    # Weights in bf16 lose small updates otherwise.
    rounded = engine == "torch" and pins.optimizer_state_dtype == "bf16"
    of_megatron = "transformer_engine" if job.precision == "fp8" else "local"
    implementation = of_megatron if engine == "megatron" else "huggingface"
    own = {"implementation": implementation, "bf16_stochastic_round": rounded}
    return Layout(**{**own, **pinned, "engine": engine})
