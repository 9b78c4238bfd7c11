"""kit's fields as a file decides them → the workload, on the GPUs that the user names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kit.addons.configs.extra_memory import extra_gib, tower_parameters
from kit.addons.configs.walk import Gap, Reading
from kit.addons.lint.described import ProgramWorkload, zero_sizes
from kit.cost.memory.peak import peak_gib
from kit.cost.model.lora import named_layers
from kit.cost.workload import Workload
from kit.errors import SpecError
from kit.planner.rules import violations
from kit.planner.search import MEMORY_MARGIN
from kit.specs import strict_yaml
from kit.specs.catalog import parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.job import MLP_LAYERS, JobSpec
from kit.specs.layout import DEFAULTS, ZERO_KEYS, Layout, Pins
from kit.specs.model import ModelSpec

_PRICED = frozenset(
    {
        "bf16_state",
        "chunked_loss_fp16",
        "dora",
        "fast_path_family",
        "fsdp2_offload",
        "host_ram",
        "kto_needs_two_rows",
        "lora",
        "megatron_family",
        "nvme",
        "objective",
        "optimizer",
        "paged_needs_whole_matrices",
        "tiled_mlp_dense",
        "torch_cp_needs_fsdp2",
        "torch_tp_family",
        "transformer_engine_family",
        "trl_precision_and_optimizer",
    }
)
"""Rules of kit's own engines, of layouts that the cost model has figures for all the same; torch_expert_parallel is one
more where FSDP2 shards whole experts that are trained."""
_NEAREST: Mapping[str, tuple[tuple[str, ...], str]] = {
    "compile_below_zero_3": (("compile_layers",), "torch.compile is not counted"),
    "compile_whole_layers": (("compile_layers",), "torch.compile is not counted"),
    "chunked_loss_whole_head": (("chunked_loss",), "a loss in chunks is counted as one of all logits"),
    "selective_recompute": (("recompute",), "selective recompute is counted as none"),
    "torch_expert_parallel": (("ep",), "experts that ranks share out are gathered a layer at a time in the figures"),
    "trl_has_its_own_loop": (
        ("chunked_loss", "tiled_mlp", "compile_layers", "activation_offloading", "gradient_compression"),
        "it is not counted beside pairs and completions",
    ),
}
"""Rule → fields of a layout that break it, without which there are figures, and how these are too large."""
_PAIRED = ("dpo", "kto", "reward")
"""Objectives of rows with two answers (of KTO one is for the KL term), which are packed together: both fill one length
(ms-swift, swift/dataset/packing.py, create_packed_idx)."""
_COPY = re.compile(r"^.*/models--[^/]*--|/snapshots/[^/]*$|-mcore$")
"""What the hub's cache and Megatron-SWIFT's copies add to a model's name."""


@dataclass(frozen=True)
class Described:
    """A file's workload, and what the figures leave out."""

    workload: Workload
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]
    """Contradictions between the file and what the user says."""
    packed: bool
    """Whether every row of a batch is as long as the longest."""

    alone: Workload
    """The workload without the memory of a vLLM for which weights and optimizer state leave the GPU; else itself."""

    @property
    def peak_gib(self) -> float:
        """The fullest GPU's, with what the program has there beside the workload."""
        vllm = self.workload.vllm_share * self.workload.cluster.gpu.memory_gib
        alone = peak_gib(self.alone) + extra_gib(self.alone)
        return max(alone, vllm) if self.alone != self.workload else alone


def described(
    reading: Reading, gpus: str | ClusterSpec | None, row_tokens: int | None, load: Callable[[str], ModelSpec]
) -> Described:
    """The workload; ``load`` knows models by name. Raises ``SpecError`` where kit has no figures for it."""
    given = dict(reading.fields)
    model = load(_name(given)) if "model.num_layers" not in given else _by_sizes(given)
    cluster, notes = cluster_of(given, gpus)
    if "prompts" in given:  # of which each has several completions
        given["job.global_batch_size"] = int(given["prompts"]) * given["job.grpo.num_generations"]
    if "prompt_tokens" in given and given.get("job.objective") == "grpo":  # of others they are part of the rows
        given["job.seq_length"] = int(given["prompt_tokens"]) + given["job.grpo.max_completion_length"]
    length = given.get("packed_length") or given.get("job.seq_length")  # 0 is off
    length = model.max_position_embeddings if length in (None, "longest of the model") else int(length)
    if row_tokens is not None and not given.get("packing"):
        length = min(length, row_tokens)
    if tokens := int(given.get("rank_tokens", 0)):  # a batch is counted in tokens, which packed rows fill
        length = math.gcd(tokens, length)
        given |= {"layout.micro_batch_size": tokens // length}
        given |= {"job.global_batch_size": -(-step // length)} if (step := given["step_tokens"]) > 0 else {}
    if given.get("packing") and given.get("job.objective") in _PAIRED:
        length = max(1, length // 2)
    layout = _layout(given, model, cluster)
    layout, short = _filled(layout, int(given["micro_tokens"]), length) if given.get("filled") else (layout, ())
    experts, bits = "job.lora.quantize_moe_experts", given.get("job.lora.four_bit")
    if given.get(experts) and (layout.engine, layout.zero_stage, layout.recompute, bits) != ("torch", 0, "full", True):
        given[experts] = False
        short += (Gap("most", "quantize_moe_experts", "quantised experts are counted as 16 bits"),)
    job = _job(given, model, layout, length)
    workload: Workload = ProgramWorkload(
        model,
        cluster,
        job,
        layout,
        cross_entropy=given.get("loss", "unfused"),
        loss_chunks=given.get("loss_chunks", 0) * layout.chunked_loss,
    )
    if given.get("fp8"):
        in_fp8 = replace(workload, job=replace(job, precision="fp8"))
        other = {each.rule for each in violations(in_fp8)} - {each.rule for each in violations(workload)} - _PRICED
        short += (Gap("least", "fp8", "fp8 is counted as bf16"),) if other else ()
        workload = workload if other else in_fp8
    gaps = (*reading.gaps, *_left_out(given, workload), *short)
    sizes = {
        name: size
        for name in ZERO_KEYS
        if isinstance(size := given.get(f"layout.{name}"), int | float) or size == "auto"
    }
    workload = workload.with_layout(layout.but(**zero_sizes(sizes, workload)))
    workload, approximated = _priced(workload)
    if layout.ep > 1 and not given.get("even_experts") and _is_uneven(workload):
        approximated += (Gap("least", "model", "the fullest rank's experts are counted as the mean"),)
    alone, away = _without_vllm(workload), (given.get("away.model"), given.get("away.optimizer"))
    if any(away) and not all(away) and peak_gib(workload) > peak_gib(alone):
        approximated += (Gap("most", "vllm", "what is on the host while it generates is counted on the GPU"),)
    return Described(
        workload=workload,
        gaps=(*gaps, *approximated),
        notes=notes,
        packed=given.get("packing") is True or given.get("filled") is True or job.objective == "pretrain",
        alone=alone if all(away) else workload,
    )


def _name(given: Mapping[str, Any]) -> str:
    if not given.get("model") or not isinstance(given["model"], str):
        raise SpecError("the file names no model")
    return _COPY.sub("", given["model"])


def _by_sizes(given: Mapping[str, Any]) -> ModelSpec:
    """The model of Megatron-LM's flags, with what its arguments.py takes for those that are not there."""
    sizes = {key.removeprefix("model."): value for key, value in given.items() if key.startswith("model.")}
    if missing := [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if not sizes.get(name)]:
        raise SpecError(f"the file does not say {', '.join(missing)} of its model")
    hidden, heads, gated = sizes["hidden_size"], sizes["num_attention_heads"], sizes["family"] == "llama"
    ffn = sizes.get("ffn_hidden_size", hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    whole = {
        "name": "model",
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": ffn,
        **sizes,
    }
    norms = bool(whole.pop("qk_norm", None))
    dense = {"family": "qwen3" if norms and gated else sizes["family"], "experts_per_token": 0}
    of_experts = {
        "family": ("mixtral", "qwen3_moe")[norms],
        "moe_ffn_hidden_size": sizes.get("moe_ffn_hidden_size", ffn),
    }
    whole |= of_experts if sizes.get("num_experts") else dense
    return strict_yaml.parse(ModelSpec, whole, strict_yaml.Document("the file", {}, {}))


def _without_vllm(workload: Workload) -> Workload:
    """With one that sleeps while the model trains, and takes no memory before."""
    if not workload.vllm_sleeps or workload.job.grpo is None:
        return workload
    job = replace(workload.job, grpo=replace(workload.job.grpo, vllm_gpu_memory_utilization=1e-9))
    return replace(workload, job=job)


def _priced(workload: Workload) -> tuple[Workload, tuple[Gap, ...]]:
    """The nearest workload that the cost model has figures for. Raises ``SpecError`` where there is none."""
    gaps, layout = list[Gap](), workload.layout
    spread = workload.job.lora is None and layout.tp == 1 and layout.zero_stage > 1 and layout.offload_param == "none"
    priced = _PRICED | {"torch_expert_parallel"} if spread else _PRICED
    while broken := [each for each in violations(workload) if each.rule not in priced]:
        nearest = next((_NEAREST[each.rule] for each in broken if each.rule in _NEAREST), None)
        if nearest is None:
            raise SpecError("\n".join(map(str, broken)))
        fields, why = nearest
        chosen = {name: DEFAULTS[name] for name in fields if getattr(workload.layout, name) != DEFAULTS[name]}
        workload = workload.with_layout(workload.layout.but(**chosen))
        gaps += [Gap("most", name, why) for name in chosen]
    return workload, tuple(gaps)


def cluster_of(given: Mapping[str, Any], gpus: str | ClusterSpec | None) -> tuple[ClusterSpec, tuple[str, ...]]:
    """As many GPUs as the file starts processes, of the kind that the user names."""
    world = _count(given.get("world")) or (
        _count(given.get("gpus_per_node")) and (int(given["gpus_per_node"]) * int(_count(given.get("nodes")) or 1))
    )
    if not world and given.get("visible") not in (None, ""):
        if "," in str(given["visible"]):
            raise SpecError(f"one process with CUDA_VISIBLE_DEVICES={given['visible']}: device_map spreads the layers")
        world = 1
    if gpus is None:
        raise SpecError(f"--gpus is missing, which names the kind of GPU: --gpus {world or 8}xH100")
    cluster = gpus if isinstance(gpus, ClusterSpec) else parse_cluster(gpus)
    gpus = gpus if isinstance(gpus, str) else f"{cluster.num_gpus}x{cluster.gpu.name}"
    if not world or int(world) == cluster.num_gpus:
        return cluster, ()
    tp, pp, cp, ep = (int(given.get(f"layout.{name}") or 1) for name in ("tp", "pp", "cp", "ep"))
    least = pp * math.lcm(tp * cp, ep)
    if int(world) % least and not cluster.num_gpus % least:
        return cluster, (f"the file starts {world} processes, and its sizes take {least}: judged on {gpus}",)
    note = f"the file starts {world} processes, and --gpus {gpus} has {cluster.num_gpus} GPUs: judged on {world}"
    nodes = max(1, int(_count(given.get("nodes")) or math.ceil(int(world) / cluster.gpus_per_node)))
    if int(world) % nodes or not 0 < int(world) <= 65536:
        raise SpecError(f"{world} processes on {nodes} nodes: give each node as many, and at most 65,536 in all")
    return replace(cluster, num_nodes=nodes, gpus_per_node=int(world) // nodes), (note,)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _layout(given: Mapping[str, Any], model: ModelSpec, cluster: ClusterSpec) -> Layout:
    chosen = {
        name: value
        for key, value in given.items()
        if key.startswith("layout.") and (name := key.removeprefix("layout.")) not in ZERO_KEYS
    }
    chosen |= {"etp": chosen.get("tp", 1)} if chosen.get("etp") == "tp" else {}
    pins = strict_yaml.parse(Pins, chosen, strict_yaml.Document("the file", {}, {}))
    known = {**DEFAULTS, **{name: value for name, value in vars(pins).items() if value is not None}}
    unread = {
        "sp": known["tp"] == 1,
        "cp_comm_type": known["cp"] == 1,
        "recompute_modules": known["recompute"] != "selective",
    }
    known |= {name: DEFAULTS[name] for name, idle in unread.items() if idle}
    if given.get("layers_of_chunk"):
        known["vp"] = max(1, model.num_layers // (known["pp"] * int(given["layers_of_chunk"])))
    if known["engine"] == "megatron" and known["ep"] == 1:
        known["etp"] = known["tp"] if model.num_experts else 1
    split = known["tp"] * known["pp"] * known["cp"]
    if cluster.num_gpus % split:
        raise SpecError(f"tp·pp·cp={split} does not divide {cluster.num_gpus} GPUs")
    dp = cluster.num_gpus // split
    micro = known["micro_batch_size"] or 1
    accumulation = given.get("accumulation", 1)
    if accumulation == "16 rows a step":
        accumulation = max(1, math.ceil(16 / (micro * cluster.num_gpus)))
    if (rows := given.get("job.global_batch_size", 0)) > 0:
        if int(rows) % (micro * dp):
            raise SpecError(f"a global batch of {rows} is no multiple of micro batch {micro} · {dp} ranks")
        accumulation = int(rows) // (micro * dp)
    made = Layout(
        **known | {"dp": dp, "micro_batch_size": micro, "gradient_accumulation_steps": int(accumulation)},
    )
    made = made.but(engine="torch") if made.engine == "deepspeed" and made.zero_stage == 0 else made
    return made.but(optimizer_state_dtype="bf16") if _in_16_bits(made, given) else made


def _filled(layout: Layout, tokens: int, length: int) -> tuple[Layout, tuple[Gap, ...]]:
    """Micro batches that are filled up to so many tokens, as whole rows of the longest."""
    rows = layout.micro_batch_size * layout.gradient_accumulation_steps
    micro = next(each for each in range(max(1, min(tokens // max(1, length), rows)), 0, -1) if rows % each == 0)
    less = Gap("least", "use_dynamic_bsz", f"micro batches of {tokens:,} tokens are counted as {micro * length:,}")
    made = layout.but(micro_batch_size=micro, gradient_accumulation_steps=rows // micro)
    return made, (less,) if micro * length < tokens else ()


def _in_16_bits(layout: Layout, given: Mapping[str, Any]) -> bool:
    """Whether weights, gradients and moments are in 16 bits: where the program trains what it loads, and neither FSDP
    nor DeepSpeed makes fp32 of it."""
    kept = given.get("states") == "always" or (given.get("states") == "loaded" and layout.zero_stage == 0)
    whole = not given.get("job.lora") and given.get("job.precision", "fp32") != "fp32"
    return layout.engine == "torch" and kept and whole


_FULLEST = 3.7
"""The fullest expert over the mean where nothing balances them (docs/notes/experts.md); a rank's experts together have
less."""


def _is_uneven(workload: Workload) -> bool:
    """Whether uneven experts may need more than the error that any prediction is given room for. Where the nearest
    workload has no ``ep`` nothing is known."""
    load = min(float(workload.layout.ep), _FULLEST)
    uneven = replace(workload, job=replace(workload.job, expert_load=load))
    return load == 1 or peak_gib(uneven) > peak_gib(workload) * (1 + MEMORY_MARGIN)


def _left_out(given: Mapping[str, Any], workload: Workload) -> list[Gap]:
    """What the cost model has no figures for, whatever the file's keys are."""
    model, job, layout = workload.model, workload.job, workload.layout
    megatron = layout.engine == "megatron"
    known = model.name in tower_parameters()
    # DeepSpeed has moments for all that might be trained, also where no gradient arrives
    still = given.get("towers") == "frozen" or (
        given.get("towers") == "idle" and (job.lora is not None or layout.engine == "torch")
    )
    found = {
        "towers for images and sound are not counted": model.is_text_part and not known,
        "of towers for images and sound the weights alone are counted": model.is_text_part and known and not still,
        "heads of multi-token prediction are not counted": given.get("job.mtp_num_layers"),
        "log-probabilities of completions are counted as a loss": megatron and job.objective == "grpo",
        "quantised weights are counted on torch alone": megatron and job.lora is not None and job.lora.quantised,
    }
    return [Gap("least", "model", why) for why, there in found.items() if there]


def _job(given: Mapping[str, Any], model: ModelSpec, layout: Layout, length: int) -> JobSpec:
    lora = {key.removeprefix("job.lora."): value for key, value in given.items() if key.startswith("job.lora.")}
    if named := lora.get("target_modules"):
        known = named_layers(model)
        there = [name for name in named if name in known]
        some = set(there) < set(known)
        lora |= {"target_modules": there if some else []}
        lora |= {} if some or MLP_LAYERS & set(named) else {"targets": "attention"}
    if lora.get("alpha") == "2 x rank":
        lora["alpha"] = 2 * int(lora["rank"])
    grpo = {key.removeprefix("job.grpo."): value for key, value in given.items() if key.startswith("job.grpo.")}
    if given.get("vllm") is True and given.get("vllm.mode", "colocate") == "colocate":
        grpo["vllm_gpu_memory_utilization"] = given.get("vllm.share", 0.3)
    # on torch and Megatron fp16 takes as many bytes as bf16, with which kit has figures
    precision = str(given.get("job.precision", "fp32"))
    objective = given.get("job.objective", "sft")
    data = {
        "objective": objective,
        "seq_length": max(length, 1 + grpo.get("max_completion_length", 512)) if objective == "grpo" else length,
        "global_batch_size": layout.global_batch_size,
        "precision": "bf16" if precision == "fp16" and layout.engine != "deepspeed" else precision,
        "optimizer": {"name": given.get("job.optimizer.name", "adamw")},
        "lora": {key: value for key, value in lora.items() if value is not None} if given.get("job.lora") else None,
        "grpo": {key: value for key, value in grpo.items() if value is not None} if objective == "grpo" else None,
    }
    return strict_yaml.parse(JobSpec, data, strict_yaml.Document("the file", {}, {}))
