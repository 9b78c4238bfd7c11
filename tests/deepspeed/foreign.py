"""Other programs' runs in the worker processes, which write checkpoints of their own; and kit's runs from these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.emit.deepspeed import ds_config
from kit.emit.trainer import trainer_config, training_arguments
from kit.engines.protocol import IGNORE_INDEX, MicroBatch
from kit.planner.plan import Plan
from tests.deepspeed import cases
from tests.support.checkpoints import load
from tests.training import batches

SAVED_AT, STEPS = 3, 6
"""The step of each checkpoint, and the last step of the run that wrote it."""


Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The samples of ``batches``, as transformers takes them: labels not shifted, the first of which never counts."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = batches.sample(index)
        return {"input_ids": tokens, "labels": torch.cat([torch.tensor([IGNORE_INDEX]), labels[:-1]])}


def _config(chosen: Plan) -> dict[str, Any]:
    """The plan's ds_config. In fp16 the loss scale is fixed: a skipped step would move the curve. DeepSpeed refuses
    fp16 on CPU processes because they are slow at it: its accelerator is told that they take it."""
    config = ds_config(chosen)
    if chosen.job.precision == "fp16":
        from deepspeed.accelerator import get_accelerator

        type(get_accelerator()).is_fp16_supported = lambda self: True
        config["fp16"]["loss_scale"] = 1024
    return config


def by_kit(chosen: Plan, checkpoint: Path, directory: Path) -> Curve:
    """Losses and gradient norms of steps 3 to 6 on one of kit's engines, from a checkpoint."""
    settings = _config(chosen) if chosen.layout.engine == "deepspeed" else None
    with closing(cases.build(chosen, None, directory, settings)) as engine:
        return [
            (
                engine.forward_backward(as_kit(step, engine, chosen)).mean,
                engine.apply(chosen.job.learning_rate).gradient,
            )
            for step in range(load(engine, checkpoint, chosen).step, STEPS)
        ]


def as_kit(step: int, engine: Any, plan: Plan) -> list[MicroBatch]:
    """The same step's micro batches of this rank as kit's engines take them: the last label does not count."""
    layout = plan.layout
    sizes = {"mbs": layout.micro_batch_size, "accumulation": layout.gradient_accumulation_steps}
    found = batches.micro_batches(step, **sizes, dp_rank=engine.dp_rank, dp_size=engine.dp_size)
    for each in found:
        each.labels[:, -1] = IGNORE_INDEX
    return found


@contextmanager
def _deepspeed() -> Iterator[Any]:
    """DeepSpeed with this case's process group; afterwards nothing keeps it."""
    import deepspeed
    from accelerate.state import AcceleratorState
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # otherwise it compiles one (deepspeed/build.py)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    try:
        yield deepspeed
        groups._release_process_group_references(group=None)
    finally:
        unset_hf_deepspeed_config()
        AcceleratorState._reset_state(reset_partial_state=True)


def by_trainer(
    chosen: Plan, start: Path, out: Path, resume: bool = False, config: dict[str, Any] | None = None
) -> Curve:
    """Train by the Hugging Face Trainer on DeepSpeed: a checkpoint at step 3, then on to step 6; with ``resume``, from
    that checkpoint. Returns the losses and gradient norms that it logs."""
    from transformers import Trainer, TrainingArguments

    with _deepspeed():
        args = TrainingArguments(
            output_dir=str(out),
            deepspeed=copy.deepcopy(config or trainer_config(chosen)),
            report_to=[],
            max_steps=STEPS,
            save_steps=SAVED_AT,
            logging_steps=1,
            disable_tqdm=True,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            save_total_limit=5,
            **training_arguments(chosen),
        )
        trainer = Trainer(model=_model(start), args=args, train_dataset=Rows())
        trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED_AT}") if resume else None)
        return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]


def _model(start: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(start, local_files_only=True, dtype=dtype)


def by_deepspeed(chosen: Plan, start: Path, out: Path) -> Curve:
    """Train on DeepSpeed's engine alone: its checkpoint at step 3, then on to step 6. Returns losses and norms."""
    with _deepspeed() as deepspeed:
        model = _model(
            start, {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[chosen.job.precision]
        )
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(chosen))
        for group in engine.optimizer.param_groups:
            group["lr"] = chosen.job.learning_rate

        def stepped(loss: torch.Tensor) -> Any:
            engine.backward(loss)
            engine.step()
            return engine.get_global_grad_norm()

        curve = _steps(engine, stepped, lambda: engine.save_checkpoint(str(out)))
        engine.destroy()
        return curve


def by_accelerate(chosen: Plan, start: Path, out: Path) -> Curve:
    """Train by accelerate's Accelerator on DeepSpeed; ``save_state`` at step 3, then on to step 6. Returns losses and
    norms."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim

    with _deepspeed():
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config(chosen)))
        model = _model(start)
        engine, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=chosen.job.learning_rate))

        def stepped(loss: torch.Tensor) -> Any:
            accelerator.backward(loss)
            return engine.get_global_grad_norm()

        curve = _steps(engine, stepped, lambda: accelerator.save_state(str(out)))
        engine.destroy()
        return curve


def by_fsdp(chosen: Plan, start: Path, out: Path) -> Curve:
    """Train on torch's FSDP2; at step 3 accelerate's functions write its sharded checkpoint (on CPUs its Accelerator
    would take DDP); then on to step 6. Returns the losses and gradient norms."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(start), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = chosen.job.optimizer
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (optimizer.beta1, optimizer.beta2)
    adam = torch.optim.AdamW(groups, lr=chosen.job.learning_rate, betas=betas, eps=optimizer.eps)

    def stepped(loss: torch.Tensor) -> Any:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.job.grad_clip).full_tensor()
        adam.step()
        adam.zero_grad()
        return norm

    def save() -> None:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        where = PartialState(cpu=True)
        save_fsdp_model(plugin, where, model, str(out))
        save_fsdp_optimizer(plugin, where, adam, model, str(out))
        PartialState._reset_state()

    return _steps(model, stepped, save)


def _steps(model: Any, stepped: Callable[[torch.Tensor], Any], save: Callable[[], object]) -> Curve:
    """Losses and norms of every step. ``stepped``: backward and optimizer of a loss, returns the norm; ``save``: writes
    the checkpoint."""
    curve = []
    for step in range(STEPS):
        rows = [Rows()[step * 4 + dist.get_rank() * 2 + k] for k in range(2)]
        inputs, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
        tokens = torch.tensor(int((labels != IGNORE_INDEX).sum()))
        dist.all_reduce(tokens)
        loss = model(input_ids=inputs, labels=labels, num_items_in_batch=tokens).loss
        total, norm = loss.detach().float(), stepped(loss * dist.get_world_size())
        dist.all_reduce(total)
        curve.append((float(total), float(norm)))
        if step + 1 == SAVED_AT:
            save()
    return curve
