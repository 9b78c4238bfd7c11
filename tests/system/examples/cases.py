"""Scripts, the configurations that they run under, and the commands that start them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.emit import own_script
from kit.emit.own_optimizer import ACCELERATE
from kit.emit.run_directory import files_of
from kit.emit.trainer import script_arguments
from kit.planner.plan import Plan
from kit.specs.layout import Pins
from tests.support import ROOT
from tests.support.files import files_in
from tests.support.plain_adamw import trained
from tests.system.examples.inputs import (
    BLOCK,
    EPS,
    GLOBAL_BATCH,
    LEARNING_RATE,
    MICRO_BATCH,
    STEPS,
    plan_for,
)

EXAMPLES = ROOT / "examples"
TIME_LIMIT_S = 400
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]

LAYOUTS: dict[str, Pins] = {
    "ZeRO-1": Pins(engine="deepspeed", zero_stage=1),
    "ZeRO-2": Pins(engine="deepspeed", zero_stage=2),
    "ZeRO-3": Pins(engine="deepspeed", zero_stage=3),
    "ZeRO-3 + CPU offload": Pins(engine="deepspeed", zero_stage=3, offload_optimizer="cpu", offload_param="cpu"),
    "FSDP2": Pins(engine="torch", zero_stage=3),
}
"""Two processes each."""

DDP = Pins(engine="torch", zero_stage=0)
DDP_BY_HAND = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
"""Without any accelerate file of kit's."""

OF_TRAINER = 0.0
"""Weight decay of scripts with a Trainer: its own optimizer spares norms and biases, DeepSpeed's, which it makes where
ds_config.json names one, decays all that it is given (transformers/integrations/deepspeed.py)."""

_REPORT = '{"engine"'

OWN_OPTIMIZER = "own optimizer"
"""accelerate_loop.py under the files without an optimizer, beside which it makes torch's AdamW."""
SCRIPTS = ("accelerate_loop", OWN_OPTIMIZER, "trainer", "trl_sft", "trl_dpo", "trl_reward", "trl_kto", "trl_grpo")
_LOOPS = ("accelerate_loop", OWN_OPTIMIZER)
_BY_PROCESS = ("trl_kto", "trl_grpo")
"""Scripts whose rows depend on the processes: KTO pairs prompts with answers of other rows of the micro batch, and each
process draws completions from its own seed. Their reference is DDP on as many processes."""


@dataclass(frozen=True)
class Facts:
    """What a script said of itself at its end, the main rank's."""

    engine: str
    zero_stage: int | None
    processes: int
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Gradient norm of each step, before clipping."""


class ExampleError(AssertionError):
    """A script failed, or did not become what its configuration says."""


def alone(script: str, directory: Path) -> Facts:
    """The script without any configuration: on one process without a launcher, or under DDP on two."""
    processes = 2 if script in _BY_PROCESS else 1
    arguments = [str(file_of(script)), *_arguments(script, directory, GLOBAL_BATCH // MICRO_BATCH // processes)]
    if processes == 1:
        return _run([sys.executable, *arguments], directory)
    place = with_files(directory / f"{script} DDP", plan_for(directory / "model", DDP))
    return _run([*LAUNCH, *DDP_BY_HAND, own_script.NAME, *arguments], place)


def plain_torch(directory: Path) -> Facts:
    """What the script should compute, by torch alone: the text's blocks in order, a step's in one batch; the mean over
    its tokens."""
    tokens = AutoTokenizer.from_pretrained(directory / "model")((directory / "text.txt").read_text())["input_ids"]
    blocks = torch.tensor(tokens[: len(tokens) // BLOCK * BLOCK]).reshape(-1, BLOCK)
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    batches = blocks.split(GLOBAL_BATCH)

    def backward(step: int) -> float:
        logits, labels = model(batches[step]).logits[:, :-1], batches[step][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.item()

    losses, norms, _ = trained(
        dict(model.named_parameters()),
        STEPS,
        backward=backward,
        clip=lambda: float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
        rate=lambda step: LEARNING_RATE,
        build=functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=EPS, weight_decay=0.1),
        decays=lambda name, parameter: True,
    )
    return Facts("plain torch", None, 1, tuple(losses), tuple(norms))


def launched(script: str, layout: str, directory: Path) -> Facts:
    """The script under the emitted files of a layout, on two processes, by ``accelerate launch``."""
    pins = LAYOUTS[layout]
    fsdp = pins.engine == "torch"
    plan = plan_for(directory / "model", pins, weight_decay=0.1 if script in _LOOPS else OF_TRAINER)
    place = with_files(directory / f"{script} {layout}", plan)
    arguments = _arguments(script, directory, plan.layout.gradient_accumulation_steps)
    if script not in _LOOPS:
        arguments += words({key: value for key, value in script_arguments(plan).items() if key != "use_cpu"})
    named = ACCELERATE if script == OWN_OPTIMIZER and not fsdp else "accelerate.yaml"
    facts = _run([*LAUNCH, "--config_file", named, own_script.NAME, str(file_of(script)), *arguments], place)
    expected = ("FSDP" if fsdp else "DeepSpeedEngine", None if fsdp else pins.zero_stage, 2)
    found = (facts.engine[: len(expected[0])], facts.zero_stage, facts.processes)
    if found != expected:
        raise ExampleError(f"{script} under {layout}: {found} was started where {expected} was configured")
    return facts


def with_files(place: Path, plan: Plan) -> Path:
    """A directory with the files that kit emits for a plan."""
    return files_in(place, files_of(plan))


def file_of(script: str) -> Path:
    """Several rows may run one file."""
    return EXAMPLES / ("accelerate_loop.py" if script in _LOOPS else f"{script}.py")


def _arguments(script: str, directory: Path, accumulation: int) -> list[str]:
    model = {"model": directory / ("reward" if script == "trl_reward" else "model")}
    text = {"text": directory / "text.txt", "block": BLOCK}
    if script in _LOOPS:
        sizes = {"batch": MICRO_BATCH, "accumulation": accumulation, "steps": STEPS, "lr": LEARNING_RATE, "eps": EPS}
        return words({**model, **text, **sizes})
    preferences = {"preferences": directory / "preferences.jsonl"}
    prompts = {"prompts": directory / "prompts.jsonl", "beta": 0.1, "num_generations": 2, "max_completion_length": 8}
    data: dict[str, Mapping[str, object]] = {
        "trainer": text,
        "trl_sft": {"chats": directory / "chats.jsonl"},
        "trl_dpo": preferences,
        "trl_reward": preferences,
        "trl_kto": {"answers": directory / "answers.jsonl"},
        "trl_grpo": prompts,
    }
    # As ds_config.json has them; under a launcher they are given once more, by the plan.
    common = {
        "output_dir": directory / "out",
        "max_steps": STEPS,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": LEARNING_RATE,
        "adam_beta2": 0.95,
        "adam_epsilon": EPS,
        "weight_decay": OF_TRAINER,
        "disable_tqdm": True,
        "bf16": False,
    }
    return words({**model, **data[script], **common})


def words(options: Mapping[str, object]) -> list[str]:
    """``--key value`` of each."""
    told = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in options.items()}
    return [word for key, value in told.items() for word in (f"--{key}", value)]


def start(command: list[str], place: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
    """A script to its end, with kit's emitted files in ``place``."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(place.parent / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
        "DS_SKIP_CUDA_CHECK": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("DS_ACCELERATOR", None)
    return subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )


def _run(command: list[str], place: Path) -> Facts:
    done = start(command, place, TIME_LIMIT_S)
    reports = list(_reports(done.stdout))
    if done.returncode or len(reports) != 1:
        raise ExampleError(
            f"{' '.join(command)} ended with {done.returncode} and {len(reports)} reports, one is expected\n"
            f"{done.stdout[-1500:]}\n{done.stderr[-3500:]}"
        )
    return Facts(**{key: tuple(value) if isinstance(value, list) else value for key, value in reports[0].items()})


def _reports(output: str) -> Iterator[dict[str, Any]]:
    """What scripts said of themselves. Other processes may write on the same line."""
    decoder, begin = json.JSONDecoder(), output.find(_REPORT)
    while begin >= 0:
        found, end = decoder.raw_decode(output, begin)
        yield found
        begin = output.find(_REPORT, end)
