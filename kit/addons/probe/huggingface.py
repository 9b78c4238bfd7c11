"""Traces one rank of a plan with a Hugging Face model: forward, loss, backward and AdamW of the torch engine. For
DeepSpeed only the layers: its states are measured on real processes (docs/deepspeed-bytes.md)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from kit.addons.probe import cuda_shims
from kit.addons.probe.result import MemorySnapshot
from kit.addons.probe.tracker import LiveBytes, storage_bytes
from kit.engines.huggingface import adapters, models
from kit.engines.kernels import fp8
from kit.engines.kernels.prepare_model import prepare, summed_loss
from kit.engines.protocol import MicroBatch
from kit.engines.torch import fsdp
from kit.engines.torch.context_parallel import ContextParallel
from kit.engines.torch.optimizer import Optimizer, vocabulary
from kit.planner.plan import Plan


def trace(plan: Plan, stage: int) -> MemorySnapshot:
    """Measure one step of a rank; there is one stage."""
    assert stage == 0
    with cuda_shims.installed(megatron=False), cuda_shims.fake_world(0, plan.layout.world_size):
        live = LiveBytes()
        # The mesh reads the values of its ranks, so they must be real tensors.
        mesh = fsdp.build_mesh(torch.device("cpu"), plan.layout.tp)
        with FakeTensorMode(allow_non_fake_inputs=True), live:
            return _step(plan, live, mesh)


def _step(plan: Plan, live: LiveBytes, mesh: DeviceMesh) -> MemorySnapshot:
    layout, job = plan.layout, plan.job
    # A frozen base is in the precision of the computation (kit/engines/huggingface/adapters.py, freeze).
    whole_precision = job.precision == "fp32" or (layout.engine == "torch" and job.lora is None)
    dtype = torch.float32 if whole_precision else torch.bfloat16
    model = models.random_model(plan.model, 0, dtype)
    if job.lora is not None:
        adapters.adapt(model, job.lora)
        if layout.engine == "deepspeed" and dtype == torch.bfloat16:
            cuda_shims.in_bfloat16(model)  # DeepSpeed casts the whole model
    if job.precision == "fp8" and layout.engine == "torch":
        fp8.convert(model, emulated=False)
    # A host's copies are none of the device's bytes, and fake tensors do not compile.
    traced = replace(plan, layout=layout.but(activation_offloading=False, compile_layers=False))
    chunked = prepare(model, traced, packing=False)
    context = ContextParallel(model, layout) if layout.cp > 1 and layout.engine == "torch" else None
    split = None
    if layout.engine == "torch" and layout.zero_stage:
        compute_dtype = torch.bfloat16 if job.precision != "fp32" else None
        split = fsdp.FsdpModel(model, layout.zero_stage, compute_dtype, torch.device("cpu"), mesh)
    parameters = list(model.parameters())
    local = [fsdp.local_shard(parameter) for parameter in parameters]
    live.leave_out(local)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        # Gradients are counted as gradients, so after accumulation they no longer count as activations.
        parameter.register_post_accumulate_grad_hook(lambda each: _gradient(each, live, layout.engine))
    moments: list[torch.Tensor] = []
    if layout.engine == "torch":
        optimizer = Optimizer(trained, job.optimizer, job.learning_rate, vocabulary(model))
        moments = optimizer.moments()
        live.leave_out(moments)
    begin = live.now
    live.restart()
    ids = torch.zeros(layout.micro_batch_size, job.seq_length, dtype=torch.long)
    batch = context.shard_batch(MicroBatch(ids, ids)) if context else MicroBatch(ids, ids)
    del ids  # a rank of context parallelism has its part alone
    run: Any = split.module(training=True) if split else model
    if plan.model.is_encoder_decoder:
        run = partial(run, decoder_input_ids=batch.input_ids)  # without a mask of the encoder's input: no row is padded
    autocast = layout.engine == "torch" and layout.zero_stage == 0 and job.precision != "fp32"
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = summed_loss(run, batch, batch.labels.device, chunked)
    kept = live.now - begin
    loss.backward()
    activations = live.peak - begin
    gradients = storage_bytes(fsdp.local_shard(p.grad) for p in parameters if p.grad is not None)
    return MemorySnapshot(
        weights=storage_bytes(local),
        gradients=gradients,
        optimizer=float(storage_bytes(moments)),
        activations=float(activations),
        kept=float(kept),
    )


def _gradient(parameter: torch.Tensor, live: LiveBytes, engine: str) -> None:
    assert parameter.grad is not None
    if engine == "deepspeed":
        parameter.grad = None  # DeepSpeed copies the gradient to a bucket and frees it
        return
    live.leave_out([fsdp.local_shard(parameter.grad)])
