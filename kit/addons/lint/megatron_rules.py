"""Rules of Megatron-LM's trainer: sizes that its own validation refuses when all ranks have started."""

from __future__ import annotations

import math

from kit.addons.lint.command_rules import processes
from kit.addons.lint.commands import Command, number
from kit.addons.lint.rule import Case, Rule, table

_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_override_pattern",
)
"""Arguments with which stages have different numbers of layers."""


def _is_megatrons(command: Command) -> bool:
    names, program = command.argument_names, command.program.rsplit("/", 1)[-1]
    return bool({"micro_batch_size", "tensor_model_parallel_size"} & names) and (
        program.startswith("pretrain") or "num_layers" in names
    )


def _size(command: Command, name: str) -> int | None:
    """A size of parallelism: 1 unless given; None if a variable holds it."""
    if command.argument(name) is None:
        return 1 if name not in command.argument_names and command.says_all() else None
    return number(command.argument(name))


def _model_parallel(command: Command) -> int | None:
    """Ranks that share a model (arguments.py, validate_args, total_model_size)."""
    sizes = [_size(command, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")]
    known = [size for size in sizes if size]
    return math.prod(known) if len(known) == len(sizes) else None


def _data_parallel(command: Command) -> int | None:
    world, model = processes(command), _model_parallel(command)
    return world // model if world and model and world % model == 0 else None


def _rest(command: Command, whole: str, *parts: int | None) -> bool:
    """Whether the argument ``whole`` is no multiple of the product of the parts that are known."""
    value = number(command.argument(whole))
    return _is_megatrons(command) and value is not None and value % math.prod(part or 1 for part in parts) != 0


def _micro(command: Command) -> int | None:
    return number(command.argument("micro_batch_size"))


def _stages(command: Command) -> int | None:
    return None if set(_UNEVEN) & command.argument_names else number(command.argument("pipeline_model_parallel_size"))


def _virtual(command: Command) -> int | None:
    layers = number(command.argument("num_layers_per_virtual_pipeline_stage"))
    return layers if layers and _stages(command) else None


def _uneven_world(command: Command) -> bool:
    known = bool(processes(command) and _model_parallel(command))
    return _is_megatrons(command) and known and _data_parallel(command) is None


table(
    "launch",
    {
        # Megatron-LM core_v0.16.1, megatron/training/arguments.py, validate_args; megatron/core: TransformerConfig,
        # num_microbatches_calculator.py, transformer_block.py.
        Rule("megatron-argument", "script", "sizes that Megatron-LM's own validation refuses", "all ranks stop"): (
            Case(
                "error",
                "--global-batch-size",
                lambda c: (
                    "rampup_batch_size" not in c.argument_names
                    and _rest(c, "global_batch_size", _micro(c), _data_parallel(c))
                ),
                lambda c: (
                    f"{c.argument('global_batch_size')} is no multiple of micro batch {_micro(c)}"
                    + (f" · {_data_parallel(c)} data-parallel ranks" if _data_parallel(c) else "")
                ),
                "use a multiple",
            ),
            Case(
                "error",
                "",
                _uneven_world,
                lambda c: f"{processes(c)} processes are no multiple of the {_model_parallel(c)} that share a model",
                "tensor · pipeline · context parallel sizes divide the number of processes",
            ),
            Case(
                "error",
                "--num-layers",
                lambda c: _rest(c, "num_layers", _stages(c), _virtual(c)),
                lambda c: (
                    f"{c.argument('num_layers')} layers are no multiple of {_stages(c)} pipeline stages"
                    + (f" of chunks of {_virtual(c)}" if _virtual(c) else "")
                ),
                "use a divisor, or --decoder-first-pipeline-num-layers",
            ),
            Case(
                "error",
                "--num-attention-heads",
                lambda c: _rest(c, "num_attention_heads", number(c.argument("tensor_model_parallel_size"))),
                lambda c: (
                    f"{c.argument('num_attention_heads')} heads are no multiple of the tensor parallel size "
                    f"{c.argument('tensor_model_parallel_size')}"
                ),
                "use a divisor of the heads",
            ),
            Case(
                "error",
                "--num-query-groups",
                lambda c: (
                    "group_query_attention" in c.argument_names
                    and _rest(c, "num_attention_heads", number(c.argument("num_query_groups")))
                ),
                lambda c: f"{c.argument('num_attention_heads')} heads in {c.argument('num_query_groups')} query groups",
                "use a divisor of the heads",
            ),
            Case(
                "error",
                "--hidden-size",
                lambda c: (
                    "kv_channels" not in c.argument_names
                    and _rest(c, "hidden_size", number(c.argument("num_attention_heads")))
                ),
                lambda c: f"{c.argument('hidden_size')} is no multiple of {c.argument('num_attention_heads')} heads",
                "use a multiple, or give --kv-channels",
            ),
            Case(
                "error",
                "--num-experts",
                lambda c: _rest(c, "num_experts", number(c.argument("expert_model_parallel_size"))),
                lambda c: (
                    f"{c.argument('num_experts')} experts are no multiple of the expert parallel size "
                    f"{c.argument('expert_model_parallel_size')}"
                ),
                "use a divisor of the experts",
            ),
            Case(
                "error",
                "--max-position-embeddings",
                lambda c: (
                    _is_megatrons(c)
                    and (number(c.argument("seq_length")) or 0)
                    > (number(c.argument("max_position_embeddings")) or float("inf"))
                ),
                lambda c: f"{c.argument('max_position_embeddings')} positions for {c.argument('seq_length')} tokens",
                "use as many positions as tokens, or more",
            ),
            Case(
                "error",
                "",
                lambda c: _is_megatrons(c) and {"fp16", "bf16"} <= c.argument_names,
                "--fp16 and --bf16 at once",
                "keep one of them",
            ),
        ),
    },
)
