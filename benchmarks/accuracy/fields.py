"""Reads the words of a row: engine, precision, optimizer, offload, dispatcher, and whose program ran.

A row is described by its fields alone, never by its name. A word that no rule here knows leaves the row out, and the
reason names the field.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args

from benchmarks.accuracy.pipelines import NotPredictedError, Row
from kit.cost.time.elementwise import LOW_PRECISIONS
from kit.specs.job import OptimizerName, Precision
from kit.specs.layout import RecomputeModule
from kit.specs.optimizers import BLOCK

ENGINES = {
    "megatron": ("megatron", "transformer_engine"),
    "nanotron": ("nanotron", "nanotron"),
    "deepspeed": ("deepspeed", "huggingface"),
    "fsdp": ("fsdp", "torchtitan"),
    "ddp": ("ddp", "torchtune"),
    "torchtune": ("ddp", "torchtune"),
    "litgpt": ("fsdp", "litgpt"),
}
"""A row's engine → the engine whose collectives are computed, and the program whose layers ran. Recipes of torchtune on
one device reduce nothing."""
PRECISIONS = {
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "fp8": "fp8",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "amp": "bf16",
    "mixed": "bf16",
}
"""First word of a row's precision → the GEMMs'."""
DISPATCHERS = ("deepep", "hybridep", "alltoall", "allgather", "flex")
PROGRAMS = {
    "torchtune": r"torchtune",
    "torchtitan": r"torchtitan|pytorch/ao\b",
    "huggingface": r"transformers|hugging ?face|fsdp_qlora|accelerate|axolotl|llama-?factory|\btrl\b|peft",
}
"""Program name in a row's source or notes → the program whose layers FSDP shards (torchao measures torchtitan)."""
_KNOWN = {"transformer_impl": r"^(te|transformer.engine|local)", "grad_dtype": r"fp32|bf16|fp16"}


def require(row: Row, *sizes: str) -> None:
    """Raises ``NotPredictedError`` for a size of the model, or one of ``sizes`` of the job, that is not stated, and for
    a word that is not understood."""
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "seq_length")
    missing = [name for name in needed if row["model"].get(name) is None]
    missing += [name for name in ("engine", *sizes) if row["job"].get(name) is None]
    if missing:
        raise NotPredictedError(f"not stated: {', '.join(missing)}")
    for name, known in _KNOWN.items():
        value = row["job"].get(name)
        if value is not None and not re.search(known, str(value), re.IGNORECASE):
            raise unknown(f"job.{name}", value)
    if re.search("actual length far below|lengths vary", _notes(row)):
        raise NotPredictedError("batches of unstated length: the sequence length is an upper bound only")
    for read in (engine_of, precision_of, dispatcher_of):
        read(row)
    optimizer_of(row["job"])
    offload_of(row["job"])


def unknown(field: str, value: Any) -> NotPredictedError:
    return NotPredictedError(f"{field}={value!r:.60} is not understood")


def _engine(row: Row) -> tuple[str, str]:
    stated = row["job"].get("engine")
    if stated not in ENGINES:
        raise unknown("job.engine", stated)
    return ENGINES[stated]


def engine_of(row: Row) -> str:
    """The engine whose collectives are computed."""
    return _engine(row)[0]


def kernels_of(row: Row) -> str:
    """The implementation whose layers ran. Megatron-FSDP runs Megatron's under the engine ``fsdp``."""
    if megatron_layers(row):
        local = row["job"].get("transformer_impl") == "local" or old_megatron(row)
        return "megatron-local" if local else "transformer_engine"
    return program_of(row) if row["job"]["engine"] == "ddp" else _engine(row)[1]


def megatron_layers(row: Row) -> bool:
    """Whether Megatron's layers ran. Transformer Engine's attention runs in no others."""
    job = row["job"]
    of_megatron = job.get("transformer_impl") is not None or str(job.get("attention")).startswith("te")
    return engine_of(row) == "megatron" or of_megatron or recent_nvidia(row)


def precision_of(row: Row) -> str:
    """What GEMMs compute in, bf16 where it is not stated."""
    words = str(row["job"].get("precision") or "bf16").lower()
    found = next((precision for start, precision in PRECISIONS.items() if words.startswith(start)), None)
    if found is None:
        raise unknown("job.precision", row["job"]["precision"])
    return found


def precision_of_layers(row: Row) -> Precision:
    """What linear layers save their inputs in: 8 or 4 bits, fp32, or 16 bits."""
    precision = precision_of(row)
    if row["job"].get("fp8") or precision in LOW_PRECISIONS:
        return "fp8"
    return "fp32" if precision == "fp32" else "bf16"


class Optimizer(NamedTuple):
    """The optimizer state of a run."""

    name: OptimizerName
    moments: int
    """Number of moments of a layer's matrix."""
    moment_bytes: float | None
    """Bytes per element of a moment; None: the program's default."""
    short_masters: bool
    """Master weights and gradients in 16 bits: no fp32 copy exists (DeepSpeed's bf16_master_weights_and_grads, trainers
    whose weights are bf16 throughout)."""
    paged: bool
    """Moments in managed memory, which torch's allocator does not count (bitsandbytes, Paged…)."""
    in_backward: bool
    """Whether backward steps each parameter as soon as its gradient is ready, and then frees the gradient."""


def optimizer_of(job: Row) -> Optimizer:
    """The optimizer in ``job.optimizer``; AdamW by default."""
    text = str(job.get("optimizer") or "adamw").lower()
    names: list[tuple[str, OptimizerName, int]] = [
        (r"muon", "muon", 1),
        (r"adafactor", "adafactor", 0),
        (r"adam", "adamw", 2),
        (r"lion|sgd|momentum", "sgd", 1),
    ]
    found = next(((name, moments) for word, name, moments in names if re.search(word, text)), None)
    if found is None:
        raise unknown("job.optimizer", job["optimizer"])
    widths = [
        (r"8.?bit|int8|fp8 (states|moments)|adamwfp8", 1 + 4 / BLOCK),
        (r"4.?bit", 0.5 + 4 / 128),
        (r"(bf16|16.?bit)(?!.*fp32 (state|moment)).*(states?|moments?)", 2.0),
    ]
    width = next((size for word, size in widths if re.search(word, text)), None)
    return Optimizer(
        name="adamw-8bit" if found[0] == "adamw" and width == 1 + 4 / BLOCK else found[0],
        moments=found[1],
        moment_bytes=width,
        short_masters=bool(re.search(r"bf16_master|(bf16|16.?bit) (master|main)", text)),
        paged="paged" in text or "paged" in str(job.get("offload")).lower(),
        in_backward=bool(re.search(r"in.(the.)?backward", text)),
    )


class Offload(NamedTuple):
    """State that a run offloaded from the device."""

    optimizer: float = 0.0
    """Share of the optimizer's state."""
    parameters: bool = False
    activations: bool = False
    layers: int | None = None
    """Number of layers whose activations are offloaded; None: all."""
    place: Literal["cpu", "nvme"] = "cpu"
    steps_on_device: bool = False
    """Whether optimizer state lives on the host and is stepped on the device."""


def offload_of(job: Row) -> Offload:
    """The offload in ``job.offload``. A place alone means the optimizer state, as in DeepSpeed's ``offload_optimizer``;
    with FSDP it means all sharded state (CPUOffload). Azure's post names offload of states that its GPUs have room for,
    without saying which rows had it: none is assumed."""
    text = str(job.get("offload") or "none").lower()
    if text in ("none", "no", "false") or "exact flags not per row" in text:
        return Offload()
    optimizer, parameters, activations, nvme = (
        bool(re.search(words, text)) for words in ("optim|paged", "param|weight|model", "activation", "nvme|disk|ssd")
    )
    if not (optimizer or parameters or activations):
        if not re.search(r"cpu|host|ram|true", text) and not nvme:
            raise unknown("job.offload", job["offload"])
        optimizer, parameters = True, job.get("engine") == "fsdp"
    layers = re.search(r"(\d+) layers", text)
    share = re.search(r"fraction[ =:]*([\d.]+)|([\d.]+) ?%", text)
    fraction = 1.0 if share is None else float(share.group(1) or float(share.group(2)) / 100)
    return Offload(
        optimizer=fraction if optimizer else 0.0,
        parameters=parameters,
        activations=activations,
        layers=int(layers.group(1)) if layers and activations else None,
        place="nvme" if nvme else "cpu",
        steps_on_device="update on gpu" in text,
    )


_MODULES: dict[str, str] = {name: name for name in get_args(RecomputeModule)} | {
    "norm": "layernorm",
    "act": "moe_act",
    "op": "op",
    "preset": "op",
}
"""Words for what selective recompute covers → Megatron's module, or ``op``: torchtitan's policy, also as its preset."""


def recomputed_modules(words: str) -> frozenset[str]:
    """What selective recompute covers; attention's core where it names nothing."""
    named = frozenset(_MODULES[word] for word in re.findall(r"[a-z_]+", words.lower()) if word in _MODULES)
    return named or frozenset({"core_attn"})


def recomputed_layers(words: str, layers: int) -> int | None:
    """How many of ``layers`` full recompute recomputes (of a chunk, with Megatron's ``block``); null: all."""
    if every := re.search(r"every (\d+)(?:nd|rd|th) layer", words):
        return max(1, layers // int(every.group(1)))
    block = re.search(r"block\D*(\d+)", words)
    return int(block.group(1)) if block else None


def dispatcher_of(row: Row) -> str | None:
    """The dispatcher of experts that a field or the notes name; null where none is named."""
    job, experts = row["job"], row["model"].get("moe") or {}
    stated = job.get("dispatcher") or job.get("moe_dispatcher") or experts.get("dispatcher")
    words = re.sub(r"[^a-z ]", "", str(stated).lower()) if stated else _notes(row)
    named = re.search("|".join(DISPATCHERS), words)
    if stated and not named:
        raise unknown("dispatcher", stated)
    return named.group() if named else None


def program_of(row: Row) -> str:
    """The program whose layers FSDP sharded: from ``job.program``, or else from the source and the notes.

    If none names a program, torchtitan is assumed for compiled layers or recompute per operator, otherwise
    transformers.
    """
    stated = row["job"].get("program") or row["job"].get("trainer")
    texts = [stated] if stated else [address_of(row), row.get("notes")]
    by_operator = re.search(r"\bop\b|operator", str(row["job"].get("recompute_detail")))
    assumed = "torchtitan" if by_operator or row["job"].get("compile") else "huggingface"
    pairs = ((program, text) for text in texts for program in PROGRAMS)
    named = (program for program, text in pairs if re.search(PROGRAMS[program], str(text or ""), re.IGNORECASE))
    return next(named, assumed)


def compiled(row: Row) -> bool:
    """Whether torch.compile ran: a field, or a word of the notes. torchtune's table adds one setting a row to those
    before it, so all of its rows but those that say eager are compiled."""
    stated, notes = row["job"].get("compile"), _notes(row)
    if stated is None and "torchtune" in address_of(row):
        return "eager" not in notes
    said = re.search(r"compile\b", notes) and not re.search(r"\b(not|without) compile", notes)
    return bool(said if stated is None else stated)


def deepcompile(row: Row) -> bool:
    """Whether DeepSpeed's compiler scheduled the collectives."""
    return "deepcompile" in _notes(row)


def mean_length(row: Row) -> int:
    """Tokens of a sequence: the model's, or the mean where tokens/s counts those of shorter sequences alone."""
    counted = re.search(r"counts real tokens \(([\d,]+) over ([\d,]+) steps of (\d+)\)", _notes(row))
    if counted is None:
        return int(row["model"]["seq_length"])
    tokens, steps, batch = (int(number.replace(",", "")) for number in counted.groups())
    return round(tokens / steps / batch)


def date_of(row: Row) -> str:
    """Day or month of the program that ran (2025-04), or of the table that the row is from; far in the future where
    neither is stated, for the program as it is now."""
    stated = row["source"].get("date")
    named = re.search(r"[_-](20\d\d)-?(0[1-9]|1[0-2])[_.-]", address_of(row))
    return str(stated) if stated else "-".join(named.groups()) if named else "9999"


def address_of(row: Row) -> str:
    """Where the row was published; names the program."""
    return str(row["source"].get("address") or "")


def _notes(row: Row) -> str:
    return str(row.get("notes") or "").lower()


def recent_nvidia(row: Row) -> bool:
    """Recipes of NeMo and Megatron-Bridge: fused loss, user buffers, fused exchanges."""
    return published_by(row, "NVIDIA-NeMo/", "NVIDIA/NeMo:")


def torchtitan(row: Row) -> bool:
    """pytorch/torchtitan, and torchao's tables over it."""
    return "torchtitan" in address_of(row) or "torchtitan" in _notes(row)


LLM_FOUNDRY, SAILOR = "llm-foundry", "eth-easl/sailor"
"""Repositories. MosaicML's trainer: flash-attn's first version, norms in 16 bits. Sailor's copy of Megatron-DeepSpeed:
unfused attention, gradients reduced after backward."""


def published_by(row: Row, *repositories: str) -> bool:
    """Whether the row's address names one of these."""
    return any(repository in address_of(row) for repository in repositories)


def megatron_deepspeed(row: Row) -> bool:
    """GPT of DeepSpeed's early tables: Megatron's layers without fused attention, under ZeRO."""
    family = str(row["model"].get("family") or "").lower()
    return engine_of(row) == "deepspeed" and family in ("gpt", "gpt3", "bloom")


OLD_MEGATRON = "2023"
"""Megatron before this year: attention of separate operators, gradients reduced after backward (Megatron-LM v2, v3)."""


def old_megatron(row: Row) -> bool:
    """Megatron-LM and Megatron-DeepSpeed before fused attention."""
    return engine_of(row) == "megatron" and date_of(row) < OLD_MEGATRON
