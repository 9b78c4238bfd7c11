"""What of a plan a script that is not kit's does not get from the emitted files and arguments.

A layout flag is left out unless a table here says which file or argument carries it, so that a new one is never lost in
silence.
"""

from __future__ import annotations

from dataclasses import replace

from kit.cost.hardware import usable_gib
from kit.cost.memory.peak import peak_gib
from kit.emit.deepspeed import runs_deepspeed
from kit.emit.trainer import OPTIM, by_fsdp
from kit.emit.trl import not_in_trl, target_modules
from kit.planner.plan import Plan
from kit.specs.layout import DEFAULTS, FLAGS, ZERO_KEYS, flag_text

_OF_ACCELERATE = frozenset({"offload_param", "offload_optimizer", "cp_comm_type"})
"""Flags that accelerate.yaml carries for FSDP2, as ds_config.json does for DeepSpeed. The last is not read at cp=1."""
_OF_DEEPSPEED = _OF_ACCELERATE | {
    "zero_hpz",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "gradient_compression",
    "optimizer_state_dtype",
    "autocast",
    *ZERO_KEYS,
}
_FIX = {
    "recompute": "`model.gradient_checkpointing_enable()`",
    "chunked_loss": "a fused linear cross entropy, such as Liger's",
    "compile_layers": "`torch.compile` of each block",
    "attention_kernel": "`attn_implementation`",
    "optimizer_state_dtype": "`from_pretrained(dtype=torch.bfloat16)` and no mixed precision",
    "bf16_stochastic_round": "`torchao.optim.AdamW8bit(bf16_stochastic_round=True)`",
}
"""Flag → how the script gets it by itself."""


def flags(plan: Plan, trainer: bool, trl: bool = False) -> list[str]:
    """Layout flags that a script does not get. ``trainer``: it is a Trainer, with kit's arguments. ``trl``: TRL's."""
    layout = plan.layout
    carried = set(_OF_DEEPSPEED if runs_deepspeed(plan) else _OF_ACCELERATE)
    carried |= {"recompute"} if layout.recompute == "full" and (trainer or by_fsdp(plan)) else set()
    carried |= {"chunked_loss"} if trl else set()  # TRL's fused LM head has no whole logits
    return [name for name in FLAGS if name not in carried and getattr(layout, name) != DEFAULTS[name]]


def _of_job(plan: Plan, trainer: bool, trl: bool) -> list[str]:
    """What the job asks for and the script does not get."""
    job, found = plan.job, []
    if job.lora is not None and not trl:
        bits = {"four_bit": "4-bit weights and ", "eight_bit": "8-bit weights and "}.get(job.lora.quantised, "")
        found.append(f"{bits}adapters (job.lora; see above)")
    if job.lora is not None and job.lora.quantize_moe_experts:
        found.append("4-bit experts (job.lora.quantize_moe_experts)")
    found += not_in_trl(plan) if trl else ()
    if job.precision == "fp8":
        found.append("fp8 (bf16 instead)")
    named = runs_deepspeed(plan) or not trainer or job.optimizer.name in ("adamw", *OPTIM)
    return found if named else [*found, f"the optimizer {job.optimizer.name} (AdamW instead)"]


def note(plan: Plan, trainer: bool, trl: bool = False) -> list[str]:
    """Paragraphs for README.md: what the script does not get, what that costs, how to do it there; none where it gets
    all."""
    layout, left_out = plan.layout, flags(plan, trainer, trl)
    words = {name: flag_text(layout, name, value := getattr(layout, name)) or f"{name}={value}" for name in left_out}
    missing = [*_of_job(plan, trainer, trl), *words.values()]
    if not missing:
        return []
    fixes = [f"{text}: {_FIX[name]}" for name, text in words.items() if name in _FIX]
    text = f"**Of the plan it does not get {', '.join(missing)}**, unless the script does that itself"
    text += f" ({'; '.join(fixes)})." if fixes else "."
    if words:
        without = replace(layout, **{name: DEFAULTS[name] for name in left_out})
        gib, usable = peak_gib(plan.workload.with_layout(without)), usable_gib(plan.cluster.gpu)
        fits = "" if gib <= usable else ", which does not fit"
        text += (
            f" Without {'it' if len(words) == 1 else 'them'} a rank needs {gib:.1f} GiB of {usable:.1f} usable{fits}; "
            f"with {'it' if len(words) == 1 else 'them'} {peak_gib(plan.workload):.1f}."
        )
    return [text]


def adapters(plan: Plan) -> list[str]:
    """Paragraphs with the Python that makes a model of the plan's adapters and quantised weights; none without."""
    lora = plan.job.lora
    if lora is None:
        return []
    compute = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.job.precision, "float32")
    targets = target_modules(plan.job)
    values = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": "all-linear" if targets == ["all-linear"] else targets,
        **{name: True for name in ("use_rslora", "use_dora") if getattr(lora, name)},
        **{name: dict(given) for name in ("rank_pattern", "alpha_pattern") if (given := getattr(lora, name))},
    }
    lines = ["from peft import LoraConfig, get_peft_model"]
    quantized = ""
    if lora.quantised:
        stored = f", bnb_4bit_quant_storage=torch.{compute}" if by_fsdp(plan) else ""
        of_nf4 = f', bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{compute}{stored}'
        bits = f"load_in_4bit=True{of_nf4}" if lora.four_bit else "load_in_8bit=True"
        lines += ["from transformers import BitsAndBytesConfig", "", f"quantized = BitsAndBytesConfig({bits})"]
        quantized = ", quantization_config=quantized"
    config = ", ".join(f"{name}={value!r}" for name, value in values.items())
    lines += [
        f"model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.{compute}{quantized})",
        f"model = get_peft_model(model, LoraConfig({config}))",
    ]
    code = "\n".join(["```", *lines, "```"])  # ruff would format what is called Python, and differ from kit
    return ["Adapters are no argument of accelerate or the Trainer: a script makes them so.", code]
