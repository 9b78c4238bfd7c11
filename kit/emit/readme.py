"""``README.md`` of a run directory: which file starts which program."""

from __future__ import annotations

import shlex

from kit.emit import not_carried, own_optimizer, own_script, slurm
from kit.emit.deepspeed import runs_deepspeed
from kit.emit.derived_file import DerivedFile, added_files
from kit.emit.launch import processes_per_node
from kit.emit.markdown import plain
from kit.emit.trainer import OPTIM, script_arguments
from kit.emit.trl import trl_arguments, words
from kit.planner.plan import Plan
from kit.specs.job import TRL
from kit.specs.layout import describe

_WITHOUT_DATA = (
    "kit's own training loop needs data (`run.data.train` in the recipe), which was not given: no file here starts it."
)


def readme(plan: Plan, own_loop: bool = True) -> str:
    """Markdown: a section for each way to run the plan, and the reasons for missing ways. ``own_loop``: whether the
    directory has the files of kit's own training loop."""
    sections = [
        f"# {plain(plan.model.name)} on {plan.cluster.num_gpus} x {plain(plan.cluster.gpu.name)}",
        f"{describe(plan.layout)}. `plan.yaml` has the layout, the predictions and the reason of each decision. "
        "Run every command in this directory.",
    ]
    if plan.job.objective not in TRL:
        sections += _own_loop(plan) if own_loop else [_WITHOUT_DATA]
    if own_script.applies(plan):
        sections += _own_scripts(plan)
    elif plan.layout.implementation == "huggingface" and plan.layout.world_size > 1:
        sections.append(
            "There is no file for your own accelerate script: accelerate.yaml has no tensor, context or sequence "
            "parallelism of kit's (`--target accelerate-parallelism` writes FSDP2's)."
        )
    sections += [text for file in added_files() for text in file.told(plan)]
    return "\n\n".join(sections) + "\n"


def _own_loop(plan: Plan) -> list[str]:
    """How to start kit's own training loop: on one node, or on all of them."""
    effect = "is refused" if plan.job.lora else "starts from random weights, and says so"
    tuned = f"`model_path` of `run.yaml` is the model to fine-tune; a run without it {effect}."
    sections = [
        "## kit's own training loop",
        "`run.yaml` names the data and the checkpoints.",
        *[tuned] * bool(plan.job.lora or plan.job.objective != "pretrain"),
    ]
    if plan.cluster.num_nodes == 1:
        return [*sections, _command("./launch.sh"), *["Under Slurm: `sbatch slurm.sbatch`."] * slurm.applies(plan)]
    return [
        *sections,
        "Under Slurm, which starts every node:",
        _command("sbatch slurm.sbatch"),
        "From one node over ssh: write your hosts' names into `hostfile`, then",
        _command("./launch_hosts.sh"),
        "By hand on every node, with its rank and the address of node 0:",
        _command("NODE_RANK=0 MASTER_ADDR=node-0 ./launch.sh"),
        "The same command on every node, which goes on after a failure:",
        _command("RDZV_ENDPOINT=node-0:29500 ./launch_elastic.sh"),
    ]


def launched(plan: Plan, config: str, arguments: str) -> str:
    """The command that starts a script on this node under an accelerate file. ``arguments``: the script and its own."""
    node = ' --machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR"' if plan.cluster.num_nodes > 1 else ""
    return f"accelerate launch --config_file {config}{node} {own_script.NAME} {arguments}"


def by_deepspeed(plan: Plan, arguments: str) -> str:
    """The command of DeepSpeed's launcher, on one node."""
    count = f"--{'num_gpus' if plan.cluster.gpu.device == 'cuda' else 'num_accelerators'} {processes_per_node(plan)}"
    return f"deepspeed --no_local_rank {count} {own_script.NAME} {arguments} --deepspeed ds_config.trainer.json"


def _no_epochs(plan: Plan) -> list[str]:
    """What decides the length where TRL is not told: its trainers count epochs, or steps."""
    if plan.job.epochs is not None:
        return []
    return ["The plan has no `job.epochs`: TRL makes three unless you add `--num_train_epochs` or `--max_steps`."]


def _own_scripts(plan: Plan) -> list[str]:
    """How to run scripts without kit's worker: those that make their own optimizer, those that do not, Trainers."""
    several = "Start each on every node, with `NODE_RANK` and `MASTER_ADDR` of node 0 set. " * (
        plan.cluster.num_nodes > 1
    )
    head = [
        f"{several}`{own_script.NAME}` starts a rank of your script, and ends with an error where a launcher would "
        "train less than the plan and exit with 0: fewer processes, or as many runs of one process each."
    ]
    if plan.job.objective in TRL:
        return [*head, *_trl(plan, f"trl_{plan.job.objective}.py", TRL[plan.job.objective].trainer)]
    if plan.model.is_encoder_decoder and not runs_deepspeed(plan) and plan.layout.zero_stage:
        head.append(
            "accelerate's FSDP2 does not train this encoder-decoder: the embedding that both stacks share would be "
            "in two FSDP groups. Use kit's own loop, or plan for DeepSpeed (layout.engine: deepspeed)."
        )
    return [*head, *not_carried.adapters(plan), *_loops(plan), *_trainers(plan)]


def _loops(plan: Plan) -> list[str]:
    """Scripts with an ``Accelerator``."""
    layout = plan.layout
    batch = f"--per_device_train_batch_size {layout.micro_batch_size}"
    batch += f" --gradient_accumulation_steps {layout.gradient_accumulation_steps}"
    note = not_carried.note(plan, trainer=False)
    rate = f"--learning_rate {plan.job.learning_rate:g}"
    if not runs_deepspeed(plan):
        command = launched(plan, "accelerate.yaml", f"SCRIPT {batch} {rate}")
        return ["## An accelerate script", *note, *_saving(plan), _command(command)]
    return [
        "## An accelerate script that makes its own optimizer",
        "Hugging Face's `run_*_no_trainer.py` do. The file has no optimizer; accelerate takes the batch from the data "
        f"loaders. Gradients are clipped at {plan.job.grad_clip:g} whether the script clips or not.",
        *note,
        *_saving(plan),
        _command(launched(plan, own_optimizer.ACCELERATE, f"SCRIPT {batch} {rate}")),
        *_with_dummy_optim(plan, [*note, _command(launched(plan, "accelerate.yaml", f"SCRIPT {batch}"))]),
    ]


def _trainers(plan: Plan) -> list[str]:
    """The Trainer, and TRL's SFTTrainer where rows are chats."""
    arguments = shlex.join(words(script_arguments(plan)))
    sections = [
        "## The Hugging Face Trainer",
        *not_carried.note(plan, trainer=True),
        _command(launched(plan, "accelerate.yaml", f"SCRIPT {arguments}")),
    ]
    if runs_deepspeed(plan) and plan.cluster.num_nodes == 1:
        sections += ["By DeepSpeed's launcher:", _command(by_deepspeed(plan, f"SCRIPT {arguments}"))]
    return [*sections, *_trl(plan, "trl_sft.py", "SFTTrainer")] if plan.job.objective == "sft" else sections


def _trl(plan: Plan, script: str, trainer: str) -> list[str]:
    """How to start a trainer of TRL's."""
    loop = "kit's own loop does not train this objective." if plan.job.objective in TRL else ""
    return [
        f"## TRL's {trainer}",
        f"`{script}` is kit's examples/{script}, or your own with TRL's `ModelConfig`. {loop}".rstrip(),
        *_no_epochs(plan),
        *not_carried.note(plan, trainer=True, trl=True),
        _command(launched(plan, "accelerate.yaml", f"{script} {shlex.join(words(trl_arguments(plan)))} --model DIR …")),
    ]


def _with_dummy_optim(plan: Plan, how: list[str]) -> list[str]:
    """Scripts that leave the optimizer to the file, if it can name one."""
    if plan.job.optimizer.name in OPTIM:
        names = {"adamw-8bit": "AdamW8bit", "paged-adamw-8bit": "PagedAdamW8bit", "lion-8bit": "Lion8bit"}
        name = names[plan.job.optimizer.name]
        return [f"DeepSpeed has no optimizer with 8-bit moments: such a script makes `bitsandbytes.optim.{name}`."]
    return ["## An accelerate script with `accelerate.utils.DummyOptim`", *how]


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


FILES = (DerivedFile("README.md", readme),)
