"""Every rule by its id: the table of docs/lint.md is written from here (``kit lint --rules``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What a rule is for."""

    name: str
    files: str
    """What it reads: a DeepSpeed configuration (ds), accelerate's YAML, a recipe, a run directory, a script."""
    finds: str
    matters: str
    """What happens where nobody finds it."""


RULES = (
    Rule("json-syntax", "ds", "comments, trailing commas", "DeepSpeed forgives them, accelerate and the Trainer stop"),
    Rule("duplicate-key", "ds", "a key twice in one object", "refused by DeepSpeed; elsewhere the last one wins"),
    Rule(
        "unknown-key",
        "ds, accelerate",
        "misspelt, misplaced or invented keys, with the nearest valid one",
        "DeepSpeed ignores them at the top level, accelerate inside a section",
    ),
    Rule(
        "removed-key",
        "ds",
        "features that DeepSpeed dropped (amp, nebula, elasticity, MiCS, …)",
        "it refuses to start, and much advice is older",
    ),
    Rule(
        "deprecated-key",
        "ds",
        '`cpu_offload`, `bfloat16`, `"zero_optimization": true`, …',
        "read by some readers and not by others",
    ),
    Rule(
        "text-value",
        "ds",
        '`"true"`, `"8"` in quotes',
        "true whatever it says; unequal to the number it is compared with",
    ),
    Rule("batch-missing", "ds", "no batch size at all", "DeepSpeed refuses to guess"),
    Rule(
        "batch-arithmetic",
        "ds, accelerate",
        "sizes that do not multiply, here or on the GPUs given",
        "an assertion when every GPU is there already",
    ),
    Rule("two-precisions", "ds", "fp16 and bf16 at once", "refused"),
    Rule("bf16-hardware", "ds", "bf16 on Turing and older", "emulated, many times slower"),
    Rule("static-loss-scale", "ds", "a fixed fp16 scale", "overflows as training goes on"),
    Rule("bf16-accumulation", "ds", "many micro batches added up in bf16", "the later ones are lost to rounding"),
    Rule("removed-optimizer", "ds", "1-bit optimizers", "gone from DeepSpeed"),
    Rule(
        "gpu-optimizer-offloaded", "ds", "offload with an optimizer that has no CPU form", "refused at the first step"
    ),
    Rule("untested-optimizer", "ds", "an optimizer that ZeRO was not tested with", "refused"),
    Rule("adam-is-adamw", "ds", "`Adam` with weight decay", "DeepSpeed's Adam decays as AdamW does"),
    Rule("clipping-in-optimizer", "ds", "`max_grad_norm` in the optimizer", "refused"),
    Rule(
        "client-optimizer-offloaded",
        "ds",
        "offload and no optimizer section",
        "a torch optimizer of the script's own is refused",
    ),
    Rule("scheduler-name", "ds", "a misspelt scheduler", "fails at start"),
    Rule("zero-stage", "ds", "a stage that does not exist", "refused"),
    Rule("other-stage-key", "ds, accelerate", "keys of another stage", "accepted and never looked at"),
    Rule(
        "offload-stage",
        "ds, accelerate",
        "parameters offloaded below stage 3, state on NVMe below stage 3",
        "they stay on the GPU, or in host memory",
    ),
    Rule("nvme-path", "ds, accelerate", "NVMe without a path, or one that is no folder here", "fails at start"),
    Rule("nvme-aio", "ds", "NVMe without an aio section", "reads go one at a time, far below a drive's speed"),
    Rule(
        "gather-on-save",
        "ds, accelerate",
        "stage 3 without gathered weights on save",
        "the saved model is missing or empty",
    ),
    Rule("pipeline-zero", "ds", "ZeRO 2 or 3 with pipeline parallelism", "refused"),
    Rule("checkpointing-unused", "ds", "`activation_checkpointing` for a Hugging Face model", "nothing reads it"),
    Rule(
        "auto-unfilled",
        "ds",
        '`"auto"` where no reader fills it in',
        "a text where a number should be; in some sections DeepSpeed's default",
    ),
    Rule("auto-outside-trainer", "ds", '`"auto"` outside of the Hugging Face Trainer', "the same"),
    Rule(
        "bucket-memory",
        "ds, with a model",
        "buckets larger than all gradients, or of several GiB",
        "memory for nothing",
    ),
    Rule(
        "host-ram",
        "ds, with a model and GPUs",
        "more offloaded than a node's host memory holds, pinned or not",
        "killed by the kernel, or no page can be locked",
    ),
    Rule("does-not-fit", "ds, with a model and GPUs", "more than a GPU has", "out of memory at the first step"),
    Rule(
        "offload-for-nothing",
        "ds, with a model and GPUs",
        "offload of what fits on the GPUs",
        "a longer step, by the cost model",
    ),
    Rule(
        "stage-for-nothing",
        "ds, with a model and GPUs",
        "stage 3 where 1 or 2 fits and is faster",
        "weights gathered twice a micro batch, by the cost model",
    ),
    Rule(
        "prediction",
        "ds, with a model and GPUs",
        "nothing wrong: memory, step and MFU that the cost model predicts",
        "its errors are in [accuracy.md](accuracy.md)",
    ),
    Rule("distributed-type", "accelerate", "no `distributed_type`", "refused"),
    Rule(
        "one-process",
        "accelerate, script",
        "types and launch lines that start one process and end with exit code 0",
        "trains on one GPU in silence",
    ),
    Rule("machine-rank", "accelerate, script", "a rank that there is no machine for", "hangs"),
    Rule("main-process-ip", "accelerate, script", "several machines without an address", "each waits for itself"),
    Rule("processes-per-machine", "accelerate", "processes that do not divide by the machines", "refused"),
    Rule("decided-by-file", "accelerate", "a choice here beside the DeepSpeed file that makes it", "refused"),
    Rule(
        "config-file-missing",
        "accelerate, script",
        "a configuration that is not where it is said to be",
        "fails at start",
    ),
    Rule("fsdp2-key", "accelerate", "keys of FSDP1 under version 2", "refused or ignored"),
    Rule("unknown-option", "script", "options that the launcher does not know, with the nearest one", "it stops"),
    Rule(
        "former-launcher",
        "script",
        "`python -m torch.distributed.launch`",
        "hands over `--local-rank`, which newer scripts do not know",
    ),
    Rule(
        "hostfile", "script", "the deepspeed launcher for several nodes without a hostfile", "uses this machine alone"
    ),
    Rule("chosen-twice", "script", "`--include` or `--exclude` beside a number of GPUs or nodes", "refused"),
    Rule("trainer-mismatch", "script", "an argument of the Trainer that contradicts its DeepSpeed file", "it stops"),
    Rule("recipe", "recipe", "what `kit plan` says of it", "no plan"),
    Rule("run-directory", "run", "files that do not belong to their plan", "kit refuses to train"),
    Rule("edited", "run", "edits that are honoured", "told again at start"),
)


def markdown() -> str:
    """The table, a line a rule."""
    lines = ["| rule | reads | finds | why it matters |", "|---|---|---|---|"]
    lines += [f"| `{rule.name}` | {rule.files} | {rule.finds} | {rule.matters} |" for rule in RULES]
    return "\n".join(lines)
