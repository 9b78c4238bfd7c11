"""Rules that layouts of engine=torch break."""

from __future__ import annotations

import dataclasses

from kit.specs.job import LoraSpec, OptimizerSpec
from tests.planning.examples import deepspeed, torch
from tests.planning.rule_cases import STARCODER, Case

CASES = [
    Case(
        "precision",
        torch(),
        "Titan-RTX, which has no bf16",
        torch(),
        gpus="1xTitan-RTX",
        good_change={"precision": "fp32"},
    ),
    Case(
        "positions",
        torch(),
        "use at most 1024",
        torch(),
        model="gpt2",
        change={"seq_length": 2048},
        good_change={"seq_length": 1024},
    ),
    Case(
        "implementation",
        dataclasses.replace(torch(), implementation="local"),
        "use huggingface",
        torch(),
    ),
    Case(
        "stacks",
        torch(),
        "use pretrain or sft",
        torch(),
        change={"objective": "seq2seq"},
        good_change={"objective": "sft"},
    ),
    Case("data_parallel_only", torch(sp=True), "sp=True on engine=torch", torch()),
    Case(
        "supported_job",
        torch(zero_stage=2),
        "precision=fp16 is not supported",
        deepspeed(zero_stage=2),
        change={"precision": "fp16"},
        good_change={"precision": "fp16"},
    ),
    Case("autocast_is_deepspeeds", torch(autocast=True), "always autocasts", torch()),
    Case(
        "compression_has_a_hook",
        torch(zero_stage=2, gradient_compression="powersgd"),
        r"zero_stage=0 \(DDP\)",
        torch(gradient_compression="powersgd"),
    ),
    Case("compression_has_a_hook", torch(gradient_compression="bf16"), "nothing is sent", torch(), gpus="1xH100"),
    Case(
        "zeropp", torch(zero_stage=3, zero_quantized_weights=True), "part of DeepSpeed's stage 3", torch(zero_stage=3)
    ),
    Case("torch_tensor_parallel", torch(tp=2), "goes with FSDP2", torch(tp=2, zero_stage=3)),
    Case(
        "torch_tensor_parallel",
        torch(tp=2, zero_stage=3),
        "it is done for llama, mistral, qwen2",
        torch(zero_stage=3),
        model="gpt2",
        change={"seq_length": 1024},
    ),
    Case(
        "torch_tensor_parallel",
        torch(tp=16, zero_stage=3),
        "use a divisor of both",
        torch(tp=8, zero_stage=3),
        gpus="16xH100",
    ),
    Case("torch_zero", torch(zero_stage=1), r"FSDP2 \(2 and 3\)", torch(zero_stage=3)),
    Case(
        "supported_job",
        torch(),
        "precision=fp16 is not supported; use bf16 or fp32",
        torch(),
        change={"precision": "fp16"},
        good_change={"precision": "fp32"},
    ),
    Case(
        "supported_job",
        torch(),
        "optimizer.name=sgd is not supported; use adamw or adamw-8bit",
        torch(),
        change={"optimizer": OptimizerSpec(name="sgd")},
        good_change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case("supported_split", torch(recompute="selective"), "recompute=selective is not supported", torch()),
    Case(
        "chunked_loss",
        torch(tp=2, zero_stage=3, chunked_loss=True),
        "needs a whole head",
        torch(zero_stage=3, chunked_loss=True),
    ),
    Case("gradient_dtype", torch(gradient_dtype="bf16"), "it is for FSDP2", torch()),
    Case(
        "gradient_dtype",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        "it is for adamw-8bit",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        good_change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case(
        "gradient_dtype",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=8),
        "gradient_accumulation_steps=2: every sum",
        torch(zero_stage=3, gradient_dtype="bf16", micro_batch_size=16),
        change={"optimizer": OptimizerSpec(name="adamw-8bit")},
    ),
    Case(
        "loss_kernel",
        torch(zero_stage=3, loss_kernel="liger"),
        "use chunked_loss=true",
        torch(zero_stage=3, loss_kernel="liger", chunked_loss=True),
    ),
    Case(
        "loss_kernel",
        torch(loss_kernel="liger", chunked_loss=True),
        "Triton makes kernels for GPUs",
        torch(chunked_loss=True),
        gpus="8xcpu",
    ),
    Case(
        "loss_kernel",
        torch(zero_stage=3, loss_kernel="liger", chunked_loss=True),
        "whose logits are capped",
        torch(zero_stage=3, chunked_loss=True),
        model="gemma-2-2b",
    ),
    Case(
        "compile_layers",
        torch(tp=2, zero_stage=3, compile_layers=True),
        "graphs break at every layer",
        torch(zero_stage=3, compile_layers=True),
    ),
    Case(
        "converted_by_torchao",
        torch(zero_stage=3),
        "A100-80, which has no fp8",
        torch(zero_stage=3),
        gpus="8xA100-80",
        good_gpus="8xcpu",  # emulated
        change={"precision": "fp8"},
    ),
    Case(
        "converted_by_torchao",
        torch(zero_stage=3),
        "Conv1D",
        torch(zero_stage=3),
        model="gpt2",
        change={"precision": "fp8", "seq_length": 1024},
        good_change={"precision": "bf16"},
    ),
    Case(
        "converted_by_torchao",
        torch(zero_stage=3, tp=2),
        "with tp=2: it was tried with whole decoders",
        torch(zero_stage=3),
        change={"precision": "fp8"},
    ),
    Case(
        "converted_by_torchao",
        torch(),
        "with job.lora: it was tried",
        torch(zero_stage=2),
        change={"precision": "fp8", "lora": LoraSpec()},
        good_change={"lora": None},
    ),
    Case(
        "converted_by_torchao",
        torch(zero_stage=3),
        "hidden_size=1000 of odd",
        torch(zero_stage=3, compile_layers=True, chunked_loss=True),
        shape=dataclasses.replace(
            STARCODER, name="odd", hidden_size=1000, num_attention_heads=4, num_key_value_heads=4, head_dim=250
        ),
        change={"precision": "fp8"},
        good_change={"precision": "bf16"},
    ),
    Case(
        "converted_by_torchao",
        torch(),
        r"micro_batch_size·seq_length=1000.*use seq_length=1008",
        torch(),
        change={"precision": "fp8", "seq_length": 1000},
        good_change={"seq_length": 1008},
    ),
]
