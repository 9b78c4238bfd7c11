"""Rules of the Hugging Face Trainer's command line: arguments that transformers dropped, and a DeepSpeed file that
contradicts an argument or its default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from kit.addons.lint.command_rules import processes
from kit.addons.lint.commands import Command, plain_name
from kit.addons.lint.config import Config, finite
from kit.addons.lint.finding import Finding
from kit.addons.lint.known_keys import trainer_arguments
from kit.addons.lint.parallelism_rules import size
from kit.addons.lint.rule import Each, Rule, check, table

INSTEAD = {
    "adafactor": "write --optim adafactor",
    "evaluation_strategy": "write --eval_strategy",
    "fp16_backend": "remove it; --fp16 or --bf16 is enough",
    "fsdp_min_num_params": "write min_num_params into the file of --fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "write transformer_layer_cls_to_wrap into the file of --fsdp_config",
    "group_by_length": "write --train_sampling_strategy group_by_length",
    "half_precision_backend": "remove it; --fp16 or --bf16 is enough",
    "include_inputs_for_metrics": "write --include_for_metrics inputs",
    "include_tokens_per_second": "write --include_num_input_tokens_seen",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR",
    "no_cuda": "write --use_cpu",
    "per_gpu_eval_batch_size": "write --per_device_eval_batch_size",
    "per_gpu_train_batch_size": "write --per_device_train_batch_size",
    "push_to_hub_model_id": "write --hub_model_id",
    "push_to_hub_token": "write --hub_token",
    "torchdynamo": "write --torch_compile_backend",
    "warmup_ratio": "write --warmup_steps, which takes a fraction below 1 too",
}
"""Dropped argument → what does the same today."""
OF_THE_TRAINER = {
    "evaluation_strategy",
    "eval_strategy",
    "ddp_find_unused_parameters",
    "fsdp_config",
    "load_best_model_at_end",
    "logging_strategy",
    "per_device_train_batch_size",
    "save_strategy",
    "save_total_limit",
}
"""Arguments that tell the Trainer's program from others, which also call theirs --logging_dir or --no_cuda."""


def _is_trainers(command: Command) -> bool:
    """``--deepspeed FILE`` is the Trainer's; DeepSpeed's own --deepspeed is a switch."""
    return (
        bool(OF_THE_TRAINER & command.argument_names)
        or command.argument("deepspeed") is not None
        or command.argument("fsdp") is not None
    )


def _dropped(command: Command) -> list[str]:
    """transformers/hf_argparser.py, parse_args_into_dataclasses, refuses what no dataclass has."""
    options = dict.fromkeys(option for option, _ in command.arguments) if _is_trainers(command) else ()
    return [option for option in options if plain_name(option) in trainer_arguments().dropped]


@check(
    None,
    Rule(
        "trainer-mismatch",
        "script",
        "an argument of the Trainer, or its default, that the DeepSpeed file contradicts",
        "it stops",
    ),
)
def contradicts_config(command: Command, config: Config) -> Iterator[Finding]:
    """transformers/integrations/deepspeed.py, fill_match, compares these keys with the arguments, given or not;
    trainer_config_finalize stops at a difference."""
    for dotted, expected, said in _expected(command) if command.argument("deepspeed") is not None else ():
        there = config.get(dotted)
        if there is not None and there != expected and not isinstance(there, str):  # "auto"; of a number: text-value
            why = f"{said}, and {dotted} is {str(there).lower()}: the Trainer stops at the difference"
            fix = f'write "auto" for {dotted}'
            yield command.finding("trainer-mismatch", "error", said.split(" ")[0], why, fix)


def _in_bf16(command: Command) -> list[str]:
    """The Trainer steps the weights as they are loaded. DeepSpeed, and accelerate under FSDP, make fp32 ones of them
    (accelerate/utils/fsdp_utils.py, fsdp2_prepare_model); peft trains adapters in fp32 (autocast_adapter_dtype)."""
    names = command.argument_names
    # The file of accelerate launch may name DeepSpeed or FSDP.
    split = command.argument("deepspeed", "fsdp") is not None or command.launcher in ("deepspeed", "accelerate launch")
    adapters = any("peft" in name or "lora" in name for name in names)
    if split or adapters or not (_is_trainers(command) or "per_device_train_batch_size" in names):
        return []
    bf16 = ("bfloat16", "bf16", "torch.bfloat16")
    return [name for name in ("dtype", "model_dtype", "torch_dtype") if command.argument(name) in bf16]


table(
    "launch",
    {
        Rule("dropped-argument", "script", "an argument of the Trainer that transformers 5 dropped", "it stops"): (
            Each(
                "error",
                lambda c, option: option,
                _dropped,
                lambda c, option: (
                    f"transformers {trainer_arguments().version} has no such argument: its parser stops, unless the "
                    "program defines it"
                ),
                lambda c, option: INSTEAD.get(plain_name(option), f"remove it, or define --{plain_name(option)}"),
            ),
        ),
        Rule(
            "weights-in-bf16",
            "script",
            "a Trainer's model loaded in bf16, all of it trained, without DeepSpeed or FSDP",
            "no fp32 master weights: small updates are lost",
        ): (
            Each(
                "warning",
                lambda c, name: f"--{name}",
                _in_bf16,
                "the weights are bf16, and so are their gradients and AdamW's moments: an update below a 256th of a "
                "weight may be rounded away",
                lambda c, name: f"write --{name} float32 with --bf16, at 8 bytes more per parameter, or compare losses",
            ),
        ),
    },
)


_EXPECTED: dict[str, tuple[tuple[str, ...], Callable[..., object]]] = {
    "train_micro_batch_size_per_gpu": (("per_device_train_batch_size",), lambda ranks, value: value),
    "gradient_accumulation_steps": (("gradient_accumulation_steps",), lambda ranks, value: value),
    "gradient_clipping": (("max_grad_norm",), lambda ranks, value: value),
    "optimizer.params.lr": (("learning_rate",), lambda ranks, value: value),
    "optimizer.params.eps": (("adam_epsilon",), lambda ranks, value: value),
    "optimizer.params.weight_decay": (("weight_decay",), lambda ranks, value: value),
    "scheduler.params.warmup_max_lr": (("learning_rate",), lambda ranks, value: value),
    "optimizer.params.betas": (("adam_beta1", "adam_beta2"), lambda ranks, *betas: [*betas]),
    "train_batch_size": (
        ("per_device_train_batch_size", "gradient_accumulation_steps"),
        lambda ranks, micro, steps: ranks * micro * steps if ranks else None,
    ),
    "scheduler.params.total_num_steps": (("max_steps",), lambda ranks, longest: longest if longest > 0 else None),
}
"""Key → the arguments that decide it, and its value: a function of the number of processes and of the arguments. None:
nothing is expected."""
_SWITCHES = {"bf16.enabled": ("bf16", "bf16_full_eval"), "fp16.enabled": ("fp16", "fp16_full_eval")}
"""Key → the arguments of which one must be on."""
NO = ("no", "false", "f", "n", "0")
"""transformers/hf_argparser.py, string_to_bool."""


def _expected(command: Command) -> Iterator[tuple[str, object, str]]:
    """(key, the value that it must have, the arguments that say so), of the values that the line tells."""
    complete, defaults = _complete(command), trainer_arguments().defaults

    def number(name: str) -> float | None:
        """The value of an argument; None if a variable holds it."""
        text = command.argument(name)
        return finite(text if text is not None else defaults[name] if complete else None)

    def said(*names: str) -> str:
        texts = ((name, command.argument(name)) for name in names)
        return ", ".join(
            f"--{name} {defaults[name]} by default" if text is None else f"--{name} {text}" for name, text in texts
        )

    ranks, warmup, longest = processes(command), number("warmup_steps"), number("max_steps") or 0
    for dotted, (names, value) in _EXPECTED.items():
        given = [number(name) for name in names]
        if None not in given and (expected := value(ranks, *given)) is not None:
            yield dotted, expected, said(*names) + (f" on {ranks} processes" if dotted == "train_batch_size" else "")
    if warmup is not None and (warmup >= 1 or warmup == 0 or longest > 0):
        steps = int(warmup) if warmup >= 1 else math.ceil(longest * warmup)
        yield "scheduler.params.warmup_num_steps", max(1, steps), said("warmup_steps")
    for dotted, names in _SWITCHES.items():
        on = [
            option
            for option, value in command.arguments
            if option[2:].replace("-", "_") in names and str(value).lower() not in NO
        ]
        if on or complete:
            yield dotted, bool(on), on[0] if on else f"--{names[0]} false by default"


def _complete(command: Command) -> bool:
    """Whether every argument stands on the line: none is in a variable or in a file of arguments, and the program is
    none of TRL's, whose defaults are others."""
    if "trl" in command.program.split("/") or command.argument("config") is not None:
        return False
    switches = {name for name, value in trainer_arguments().defaults.items() if isinstance(value, bool)}
    return command.says_all(switches)


@check(
    None,
    Rule("packing-split", "script", "TRL's packing of rows that accelerate's context parallelism splits", "it stops"),
)
def packs_split_rows(command: Command, config: Config) -> Iterator[Finding]:
    """trl/trainer/sft_trainer.py, SFTTrainer.__init__, refuses both: the split drops the mask between documents."""
    packs = [value for name, value in command.arguments if plain_name(name) in ("packing", "eval_packing")]
    if size(config, "cp") > 1 and any(str(value).lower() not in NO for value in packs):
        why = f"TRL does not pack rows under cp_size {size(config, 'cp'):g}: documents would attend to each other"
        fix = "leave it out, or train by kit's own loop, which packs rows that ranks split"
        yield command.finding("packing-split", "error", "--packing", why, fix)
