"""What lint refuses of a Trainer's command line is what transformers itself refuses: each pair differs in one value."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kit.addons.lint import lint
from tests.support.files import file_with, files_in

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 100}
BASE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": ADAMW},
    "zero_optimization": {"stage": 2},
}
LINE = "--output_dir out --learning_rate 1e-4"


def optimizer(**keys: Any) -> dict[str, Any]:
    return BASE | {"optimizer": {"type": "AdamW", "params": ADAMW | keys}}


def scheduler(**keys: Any) -> dict[str, Any]:
    return BASE | {"scheduler": {"type": "WarmupDecayLR", "params": WARMUP | keys}}


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
HUNDRED = f"{LINE} --max_steps 100 --warmup_steps"
CASES: tuple[tuple[dict[str, Any], str, dict[str, Any], str], ...] = (
    # (refused: file and line, accepted: file and line)
    (optimizer(weight_decay=0.1), LINE, BASE, LINE),
    (optimizer(weight_decay=0.1), LINE, optimizer(weight_decay=0.1), f"{LINE} --weight-decay 0.1"),
    (optimizer(betas=[0.9, 0.95]), LINE, optimizer(betas=[0.9, 0.95]), f"{LINE} --adam_beta2 0.95"),
    (optimizer(betas=[0.95, 0.9]), f"{LINE} --adam_beta2 0.95", BASE, LINE),
    (optimizer(eps=1e-6), LINE, optimizer(eps=1e-6), f"{LINE} --adam_epsilon 1e-6"),
    (BASE, "--output_dir out", optimizer(lr=5e-5), "--output_dir out"),
    (BASE, f"{LINE} --learning_rate=2e-4", BASE, f"--learning_rate=2e-4 {LINE}"),
    (BASE | {"gradient_clipping": 0.5}, LINE, BASE, LINE),
    (BASE | {"gradient_accumulation_steps": 2}, LINE, BASE | {"gradient_accumulation_steps": "auto"}, LINE),
    (BASE | {"train_micro_batch_size_per_gpu": 4}, LINE, BASE | {"train_micro_batch_size_per_gpu": "auto"}, LINE),
    (BASE | {"train_batch_size": 128}, LINE, BASE, LINE),
    (BASE | BF16, LINE, BASE | BF16, f"{LINE} --bf16"),
    (BASE | {"bf16": {"enabled": False}}, f"{LINE} --bf16 True", BASE | BF16, f"{LINE} --bf16_full_eval true"),
    (BASE | FP16, f"{LINE} --fp16 no", BASE | FP16, f"{LINE} --fp16 yes"),
    (scheduler(), f"{HUNDRED} 11", scheduler(), f"{HUNDRED} 10"),
    (scheduler(), f"{HUNDRED} 0.2", scheduler(), f"{HUNDRED} 0.095"),
    (scheduler(), LINE, scheduler(warmup_num_steps=1, total_num_steps="auto"), LINE),
    (scheduler(total_num_steps=200), f"{HUNDRED} 10", scheduler(total_num_steps="auto"), f"{HUNDRED} 10"),
    (scheduler(warmup_max_lr=1e-3), f"{HUNDRED} 10", scheduler(), f"{HUNDRED} 10"),
    (BASE, f"{LINE} --evaluation_strategy no", BASE, f"{LINE} --eval_strategy no"),
    (BASE, f"{LINE} --warmup-ratio 0.1", BASE, f"{LINE} --warmup-steps 0.1"),
    (BASE, f"{LINE} --no_cuda", BASE, f"{LINE} --use_cpu"),
)


def transformers_refuses(file: dict[str, Any], line: str) -> bool:
    """The parser and the checks of the Trainer, on eight processes."""
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    given, rest = HfArgumentParser(TrainingArguments).parse_known_args(line.split())  # type: ignore[arg-type]
    if rest:
        return True
    given.world_size = 8
    given.get_warmup_steps = partial(TrainingArguments.get_warmup_steps, given)
    steps = given.max_steps if given.max_steps > 0 else 1000
    config = HfTrainerDeepSpeedConfig(json.loads(json.dumps(file)))
    config.trainer_config_process(given)
    with contextlib.suppress(ValueError):
        config.trainer_config_finalize(given, None, steps)
    return bool(config.mismatches)


def lint_refuses(file: dict[str, Any], line: str, directory: Path) -> bool:
    files_in(directory, {
        "ds.json": json.dumps(file), "run.sh": f"torchrun --nproc_per_node 8 train.py --deepspeed ds.json {line}\n"
    })  # fmt: skip
    return bool({"trainer-mismatch", "dropped-argument"} & {each.rule for each in lint(directory / "run.sh")})


@pytest.mark.parametrize("case", CASES, ids=[f"{number} {case[1]}" for number, case in enumerate(CASES)])
def test_lint_refuses_one_of_two(case: tuple[dict[str, Any], str, dict[str, Any], str], tmp_path: Path) -> None:
    refused, refused_line, accepted, accepted_line = case
    assert lint_refuses(refused, refused_line, tmp_path)
    assert not lint_refuses(accepted, accepted_line, tmp_path)


@pytest.mark.slow
def test_the_trainer_refuses_the_same() -> None:
    assert [
        case for case in CASES if [transformers_refuses(*case[:2]), transformers_refuses(*case[2:])] != [True, False]
    ] == []


@pytest.mark.parametrize("line", ["$ARGS", "--config sft.yaml", "--bf16 $MORE", "--output_dir $OUT ${ALL[@]}"])
def test_an_argument_that_may_stand_elsewhere_has_no_default(line: str, tmp_path: Path) -> None:
    assert not lint_refuses(optimizer(lr=0.1, weight_decay=0.1) | BF16, line, tmp_path)
    assert lint_refuses(optimizer(weight_decay=0.1), f"{line} --weight_decay 0.2", tmp_path)


def test_a_value_in_a_variable_leaves_the_other_defaults(tmp_path: Path) -> None:
    line = "--output_dir $OUT --learning_rate $LR"
    assert lint_refuses(optimizer(weight_decay=0.1), line, tmp_path)
    assert not lint_refuses(BASE, line, tmp_path)


@pytest.mark.parametrize("line", ["--logging_dir logs --report_to wandb --output_dir out", "--no_cuda --do_train"])
def test_programs_with_a_parser_of_their_own_keep_their_arguments(line: str, tmp_path: Path) -> None:
    assert lint(file_with(tmp_path / "run.sh", f"torchrun --nproc_per_node 8 train.py {line}\n")) == ()
