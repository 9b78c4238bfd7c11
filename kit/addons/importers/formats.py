"""The formats of other programs' checkpoints that kit reads and writes. Pickles are read by a closed list.

Each is an entry point of ``kit.checkpoint_formats`` (pyproject.toml).
"""

from __future__ import annotations

from pathlib import Path

from kit.addons.importers import deepspeed, kit_native, peft, torch_dcp, torchtitan, universal
from kit.addons.importers.megatron import opened as megatron
from kit.addons.importers.model_of import model_of
from kit.addons.importers.stored import FoundState, found_in, read_weights, with_trainer_state
from kit.addons.importers.tensors import sources
from kit.addons.importers.to_universal import write_universal
from kit.addons.importers.torch_dist import Checkpoint
from kit.engines.huggingface.models import weight_files
from kit.engines.io.sharded_safetensors import file_names
from kit.errors import CheckpointError
from kit.training.checkpoint.formats import Format, Opened


def _open(path: Path, found: FoundState, model: str | None) -> Opened:
    """Open a checkpoint whose tensors have the names of its program's modules."""
    torch_dcp.verify_archives(found.directory)
    spec, state = model_of(path, model), found.state()
    if torchtitan.is_torchtitan(state):
        state = torchtitan.as_hugging_face(state, spec)
    lora = peft.lora_of(path, spec, state) if (path / peft.CONFIG).is_file() else None
    return Opened(spec, state.counters, sources(state, spec, lora is not None), lora, state.notes)


def _deepspeed(path: Path) -> FoundState | None:
    directory = deepspeed.deepspeed_directory(path)
    trainer = (path / "trainer_state.json").is_file()
    # The tag that Accelerator.save_state chooses.
    accelerate = directory is not None and directory.name == "pytorch_model"
    program = "Hugging Face Trainer with DeepSpeed" if trainer else f"{'accelerate with ' * accelerate}DeepSpeed"
    return found_in(directory, program, lambda found: with_trainer_state(deepspeed.read_deepspeed(found), path))


def _distributed(path: Path) -> FoundState | None:
    model, optimizer = path / "pytorch_model_fsdp_0", path / "optimizer_0"
    if (model / ".metadata").is_file():
        directories = [model, *([optimizer] if optimizer.is_dir() else [])]
        if not all((directory / ".metadata").is_file() for directory in directories):
            raise CheckpointError(
                f"{optimizer} has no .metadata, which torch writes last: its save was cut off, or a file is missing; "
                "copy the checkpoint again, or remove this directory to convert the weights alone"
            )
        trainer = (path / "trainer_state.json").is_file()
        program = "Hugging Face Trainer with FSDP" if trainer else "accelerate: FSDP, sharded"

        return found_in(path, program, lambda _: with_trainer_state(torch_dcp.read_distributed(directories), path))
    directory = megatron.torch_dist_directory(path)
    titan = directory is not None and torchtitan.EMBEDDING in Checkpoint(directory).tensors
    program = f"{'torchtitan: ' * titan}torch.distributed.checkpoint"
    return found_in(directory, program, lambda found: torch_dcp.read_distributed([found]))


FILE = Format(
    "file",
    "*.safetensors as a file",
    lambda path: found_in(
        path if path.is_file() else None,
        "one file of tensors",
        lambda found: read_weights(dict.fromkeys(file_names(found), found)),
    ),
    priority=1,
)
NATIVE = Format(
    "kit-native", "exchange.json (an earlier kit)", kit_native.recognise, kit_native.open_native, priority=10
)
UNIVERSAL = Format(
    "universal",
    "zero/*/fp32.pt (DeepSpeed, universal)",
    lambda path: found_in(
        universal.universal_directory(path), "DeepSpeed: universal checkpoint", universal.read_universal
    ),
    _open,
    write_universal,
    priority=20,
)
DEEPSPEED = Format("deepspeed", "*_model_states.pt (DeepSpeed)", _deepspeed, _open, priority=30)
MEGATRON = Format(
    "megatron",
    "common.pt (Megatron)",
    megatron.recognise_megatron,
    megatron.open_megatron,
    megatron.write_megatron,
    takes_dtype=True,
    priority=40,
)
DCP = Format("dcp", ".metadata (torch)", _distributed, _open, torch_dcp.write_distributed, priority=50)
MEGATRON_OLD = Format(
    "megatron-old",
    "mp_rank_*/model_optim_rng.pt (Megatron)",
    megatron.recognise_torch_format,
    megatron.open_old,
    priority=60,
)
PEFT = Format(
    "peft",
    f"{peft.CONFIG} (peft)",
    lambda path: found_in(
        path if (path / peft.CONFIG).is_file() else None,
        "peft: adapters",
        lambda found: read_weights(weight_files(found, "adapter_model.safetensors", "adapter_model.bin")),
    ),
    _open,
    priority=70,
)
