"""``README.md`` of a run directory: which file starts which program."""

from __future__ import annotations

import shlex

from kit.emit import accelerate, own_optimizer, pretrain_gpt
from kit.emit.derived_file import DerivedFile
from kit.emit.markdown import plain
from kit.emit.trainer import OPTIM, for_trainer, optim, training_arguments
from kit.planner.describe import describe
from kit.planner.plan import Plan
from kit.specs.objectives import TRL

_ACCELERATE = "accelerate launch --config_file"


def readme(plan: Plan) -> str:
    """Markdown: a section for each way to run the plan, and the reasons for missing ways."""
    several = " Run it on every node with NODE_RANK and MASTER_ADDR." if plan.cluster.num_nodes > 1 else ""
    head = [
        f"# {plain(plan.model.name)} on {plan.cluster.num_gpus} x {plain(plan.cluster.gpu.name)}",
        f"{describe(plan.layout)}. `plan.yaml` has the layout, the predictions and the reason of each decision. "
        "Run every command in this directory.",
    ]
    if plan.job.objective in TRL:
        return "\n\n".join([*head, *_trl(plan)]) + "\n"
    sections = [
        *head,
        f"## kit's own training loop\n\n`run.yaml` names the data and the checkpoints.{several}",
        _command("./launch.sh"),
    ]
    if plan.job.lora or plan.job.objective != "pretrain":
        effect = "is refused" if plan.job.lora else "starts from random weights, and says so"
        sections.insert(3, f"`model_path` of `run.yaml` is the model to fine-tune; a run without it {effect}.")
    sections += _paged(plan)
    if accelerate.applies(plan) and plan.layout.implementation == "huggingface":
        sections += _own_scripts(plan)
    if plan.layout.engine == "megatron":
        reason = pretrain_gpt.why_not(plan)
        sections.append("## Megatron-LM's pretrain_gpt.py")
        sections.append(f"There is no `pretrain_gpt.sh`: {reason}." if reason else "`pretrain_gpt.sh` starts it.")
    return "\n\n".join(sections) + "\n"


def _trl(plan: Plan) -> list[str]:
    """How to start TRL's trainer, which trains the plan's objective."""
    arguments = " ".join(f"--{key} {str(value).lower()}" for key, value in training_arguments(plan).items())
    script = f"trl_{plan.job.objective}.py"
    several = " --machine_rank N --main_process_ip HOST" if plan.cluster.num_nodes > 1 else ""
    return [
        f"## TRL's {TRL[plan.job.objective].trainer}",
        f"`{script}` is kit's examples/{script}, or your own. kit's own loop does not train this objective.",
        *_no_epochs(plan),
        _command(f"{_ACCELERATE} accelerate.yaml{several} {script} {arguments} --model DIR …"),
    ]


def _no_epochs(plan: Plan) -> list[str]:
    """What decides the length where TRL is not told: its trainers count epochs, or steps."""
    if plan.job.epochs is not None:
        return []
    return ["The plan has no `job.epochs`: TRL makes three unless you add `--num_train_epochs` or `--max_steps`."]


def _own_scripts(plan: Plan) -> list[str]:
    """How to run scripts without kit's worker: those that make their own optimizer, and those that do not."""
    layout = plan.layout
    batch = f"--per_device_train_batch_size {layout.micro_batch_size}"
    batch += f" --gradient_accumulation_steps {layout.gradient_accumulation_steps}"
    if layout.engine == "torch":
        warning = []
        if plan.model.is_encoder_decoder and layout.zero_stage:
            warning.append(
                "accelerate's FSDP2 does not train this encoder-decoder: the embedding that both stacks share would be "
                "in two FSDP groups. Use kit's own loop above, or plan for DeepSpeed (layout.engine: deepspeed)."
            )
        command = _command(f"{_ACCELERATE} accelerate.yaml SCRIPT {batch}")
        return ["## An accelerate script, or the Trainer", *warning, *_saving(plan), command]
    if not for_trainer(plan):
        return []
    arguments = shlex.join(
        word for key, value in training_arguments(plan).items() for word in (f"--{key}", str(value).lower())
    )
    return [
        "## An accelerate script that makes its own optimizer",
        "Hugging Face's `run_*_no_trainer.py` do. The file has no optimizer; accelerate takes the batch from the data "
        f"loaders. Gradients are clipped at {plan.job.grad_clip:g} whether the script clips or not.",
        *_saving(plan),
        _command(f"{_ACCELERATE} {own_optimizer.ACCELERATE} SCRIPT {batch} --learning_rate {plan.job.learning_rate:g}"),
        *_with_dummy_optim(plan, _command(f"{_ACCELERATE} accelerate.yaml SCRIPT {batch}")),
        "## The Hugging Face Trainer, TRL",
        _command(f"{_ACCELERATE} accelerate.yaml SCRIPT {arguments}"),
        "On one node `deepspeed SCRIPT --deepspeed ds_config.trainer.json` with the same arguments does too.",
    ]


def _paged(plan: Plan) -> list[str]:
    """What pages moments in scripts without kit's worker."""
    if not plan.layout.paged_optimizer:
        return []
    if plan.layout.zero_stage:
        return ["bitsandbytes' paged optimizers do not step FSDP2's weights: only kit's own loop pages moments there."]
    bits = 8 if plan.job.optimizer.name == "adamw-8bit" else 32
    return [
        f"In another program the Trainer pages moments with `--optim {optim(plan)}`, and your own script with "
        f"`bitsandbytes.optim.PagedAdamW{bits}bit`. kit has run none of these on a GPU."
    ]


def _with_dummy_optim(plan: Plan, command: str) -> list[str]:
    """Scripts that leave the optimizer to the file, if it can name one."""
    if plan.job.optimizer.name in OPTIM:
        name = {"adamw-8bit": "AdamW8bit", "lion-8bit": "Lion8bit"}[plan.job.optimizer.name]
        return [f"DeepSpeed has no optimizer with 8-bit moments: such a script makes `bitsandbytes.optim.{name}`."]
    return ["## An accelerate script with `accelerate.utils.DummyOptim`", command]


def _saving(plan: Plan) -> list[str]:
    torch = plan.layout.engine == "torch"
    if plan.layout.zero_stage < (1 if torch else 3):
        return []
    effect = "stops with an error" if torch else "writes empty tensors"
    return [
        "Weights are sharded: `save_pretrained` without `state_dict=accelerator.get_state_dict(model)` "
        f"{effect}. Hugging Face's `run_*_no_trainer.py` do; keep a checkpoint of `accelerator.save_state` as well "
        "(`--checkpointing_steps`)."
    ]


def _command(text: str) -> str:
    return f"```bash\n{text}\n```"


FILES = (DerivedFile("README.md", readme, committed=True),)
