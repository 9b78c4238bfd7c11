"""What runs inside a pool of workers: checkpoints written on one layout and read on another, or in a thread."""

from __future__ import annotations

import threading
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.engines.full_tensors import full_tensors
from kit.engines.huggingface.models import HfDirectory
from kit.engines.protocol import StateKind
from kit.training.checkpoint import store
from kit.training.checkpoint.checkpoints import RunCheckpoints
from kit.training.checkpoint.manager import CheckpointManager
from kit.training.checkpoint.manifest import Checkpoint
from kit.training.counters import Counters
from tests.megatron.cases import KINDS, steps
from tests.support.checkpoints import export
from tests.support.checkpoints import load as load_checkpoint
from tests.training.disk import full_disk

COUNTERS = Counters(step=2, samples_seen=16, tokens_seen=512, optimizer_steps=2, samples_skipped=0)


def checkpoints(rundir: Any, root: Path) -> RunCheckpoints:
    return RunCheckpoints(root, rundir.plan, keep_last=9, log=lambda _: None)


def save(engine: Any, rundir: Any, root: Path) -> list[float]:
    """Train 2 steps, save, and in small files of another directory; returns the curve of the 2 steps after."""
    steps(engine, rundir, 0)
    checkpoints(rundir, root).write(store.state_of(engine), COUNTERS, engine.is_main)
    export(engine, root / "small", rundir.plan, COUNTERS, shard_bytes=20_000)
    return steps(engine, rundir, 2)


def load(engine: Any, rundir: Any, root: Path) -> dict[str, Any]:
    """Load what ``save`` wrote on another layout: whether the state equals the files, and the curve."""
    counters = checkpoints(rundir, root / "elsewhere").load(engine, root / "step-00000002")
    written = Checkpoint(root / "small")
    differing = [
        (kind.value, name)
        for kind in KINDS
        for name, tensor in full_tensors(engine, kind).items()
        if not torch.equal(tensor, written.source(kind).read(name))
    ]
    found = {"counters": counters, "steps": engine.optimizer_steps, "differing": differing}
    return found | {"curve": steps(engine, rundir, 2)}


def after(engine: Any, rundir: Any, directory: Path) -> list[float]:
    """The curve of steps 2 and 3 from a checkpoint."""
    load_checkpoint(engine, directory, rundir.plan)
    return steps(engine, rundir, 2)


def in_the_background(engine: Any, rundir: Any, root: Path) -> dict[str, Any]:
    """Save in a thread while training goes on, then see that the checkpoint is of the moment at which it was begun."""
    steps(engine, rundir, 0)
    written = checkpoints(rundir, root)
    background = CheckpointManager(written, asynchronous=True)
    write, training_is_ahead = store.write_blocks, threading.Event()

    def write_late(*arguments: Any, **options: Any) -> Any:
        training_is_ahead.wait(60)
        return write(*arguments, **options)

    store.write_blocks = write_late
    assert background.save(engine, COUNTERS, wait=False) is None
    expected = steps(engine, rundir, 2)
    training_is_ahead.set()
    assert background.wait() is None
    store.write_blocks = write

    with full_disk(1_000):
        background.save(engine, Counters(4, 32, 1024, 4, 0), wait=False)
        steps(engine, rundir, 4, 1)
        failure = background.wait() or "none"
    dist.barrier()
    counters = written.load_newest(engine)
    found = steps(engine, rundir, 2)
    return {"expected": expected, "found": found, "counters": counters, "failure": failure}


def roundtrip(engine: Any, rundir: Any, directory: Path) -> None:
    """Hugging Face → this layout → a checkpoint, in blocks smaller than any matrix."""
    from kit.engines.io import parallel_safetensors

    whole, parallel_safetensors.BLOCK_BYTES = parallel_safetensors.BLOCK_BYTES, 1000
    export(engine, directory, rundir.plan, COUNTERS, shard_bytes=20_000)
    parallel_safetensors.BLOCK_BYTES = whole


def from_the_start(engine: Any, rundir: Any, model: Path) -> list[float]:
    """The curve of steps 2 and 3 with the weights of a Hugging Face directory."""
    engine.import_state(StateKind.MASTER, HfDirectory(model))
    return steps(engine, rundir, 2)


def read_by_megatron(engine: Any, rundir: Any, directory: Path, written: Path) -> dict[str, Any]:
    """Load with megatron-core's own loaders, as Megatron-LM's trainer calls them (training/checkpointing.py,
    ``load_checkpoint``): the state that differs from the checkpoint of kit, what the groups say, and the curve."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.utils import unwrap_model

    # Names of norms as its own layers say them; before experts those of Transformer Engine's layers are others.
    names = dict(get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map)
    if rundir.plan.model.num_experts:
        del names["pre_mlp_layernorm."]
    (chunk,), optimizer = unwrap_model(engine._chunks), engine._optimizer
    for layer in chunk.decoder.layers:
        layer.submodules_config.sharded_state_dict_keys_map = names
    said = dist_checkpointing.load_content_metadata(directory) | {"dp_cp_group": engine._resharder._dense.data}
    model = chunk.sharded_state_dict(metadata=said)
    sharded = {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=True, metadata=said)}
    # What it calls extra state (of fp8 products, None here) is not in the checkpoint.
    found, _, absent = dist_checkpointing.load(sharded, str(directory), strict="return_all")
    assert all("_extra_state" in key for key in absent), absent
    chunk.load_state_dict(found["model"], strict=False)
    optimizer.load_state_dict(found["optimizer"])
    # From 0 to 1e-3 in 4 samples, then to 1e-4 at sample 32; a constant weight decay.
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=4,
        lr_decay_steps=32,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    schedule.load_state_dict(found["opt_param_scheduler"])
    differing = [
        (kind, name)
        for kind in KINDS
        for name, tensor in full_tensors(engine, kind).items()
        if not torch.equal(tensor, Checkpoint(written).source(kind).read(name))
    ]
    of_group = itemgetter("step", "betas", "eps", "bias_correction", "default_config", "lr")
    return {
        "differing": differing,
        "groups": list({*map(of_group, optimizer.param_groups)}),
        "curve": steps(engine, rundir, 2),
    }
