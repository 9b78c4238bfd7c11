"""Files of other trainers that the tests of ``kit plan FILE`` read, and what kit reads in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kit.addons.configs.reading import asked_of
from kit.addons.configs.workload import Described
from kit.specs.layout import DEFAULTS


def read(path: Path, gpus: str = "8xH100") -> Described:
    return asked_of(path, gpus).described({})


def changed(found: Described) -> dict[str, Any]:
    """The layout's fields that are not as they are by default."""
    made = vars(found.workload.layout)
    return {name: made[name] for name in made if made[name] != DEFAULTS[name]}


def decided(found: Described) -> tuple[Any, ...]:
    """Model, sizes and kind of the job, and what is only bounded."""
    job = found.workload.job
    sizes = found.workload.model.name, job.seq_length, job.global_batch_size
    return *sizes, job.objective, job.precision, job.optimizer.name, found.packed, found.gaps


AXOLOTL = """\
base_model: Qwen/Qwen3-8B   # any spelling
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca

sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 3
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
optimizer: adamw_bnb_8bit
learning_rate: 1e-4
bf16: auto
gradient_checkpointing: true
# the end
"""
FACTORY = """\
### model
model_name_or_path: meta-llama/Llama-3.1-8B
stage: sft
finetuning_type: lora
lora_rank: 4
bf16: true
"""
SWIFT = """\
# one node
GPUS=4
NPROC_PER_NODE=$GPUS \\
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type full \\
    --torch_dtype bfloat16 \\
    --max_length ${LENGTH:-2048} \\
    --per_device_train_batch_size 2 \\
    --packing true \\
    --deepspeed zero3
"""
MEGATRON_SWIFT = """\
NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 --sequence_parallel true \\
  --expert_model_parallel_size 4 --micro_batch_size 1 --global_batch_size 16 --max_length 4096 --packing true
"""
OPENRLHF = """\
deepspeed --module openrlhf.cli.train_sft --model.model_name_or_path Qwen/Qwen3-14B \\
   --train.batch_size 32 --train.micro_batch_size 4 --ds.zero_stage 2 --ds.packing_samples --data.max_len 4096
"""
VERL = """\
torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer \\
    model.path=Qwen/Qwen3-8B data.max_token_len_per_gpu=16384 \\
    model.enable_gradient_checkpointing=False
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
# converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1

[compile]
enable=false
components = ["model", "loss"]

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "op"  # "int" = ac every positive int layer or 'op', ac based on ops policy

[quantize.linear.float8]
filter_fqns = ["output"]
"""
"""torchtitan/models/llama3/train_configs/llama3_8b.toml, 238fa9953e4a, without what decides nothing."""
REGISTRY = """\
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

ROW = 8192


def llama_8b() -> Trainer.Config:
    \"\"\"Two rows a GPU, four a step.\"\"\"
    spec = model_registry("8B", attn_backend="flex")
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary(spec))),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * ROW,
            num_tokens_per_train_step=32 * ROW,
            max_context_length=ROW,
            steps=1000,
        ),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama_8b_replicated() -> Trainer.Config:
    config = llama_8b()
    config.training.num_tokens_per_microbatch_per_dp_rank = ROW
    config.training.num_tokens_per_train_step = -1
    config.parallelism = ParallelismConfig(data_parallel_replicate_degree=8, data_parallel_shard_degree=1)
    config.activation_checkpoint = FullAC.Config()
    config.training.steps = 10
    return config
"""
"""In the style of torchtitan's models/llama3/config_registry.py, b5bcd76c."""
TIGHT = {
    "axolotl.yaml": (AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 16"), "2xRTX-4090"),
    "f.yaml": (FACTORY.replace("type: lora", "type: full"), "8xA100-40"),
    "train.sh": (SWIFT.replace("zero3", "zero2").replace("7B", "14B"), "4xH100"),
    "megatron.sh": (MEGATRON_SWIFT, "8xH100"),
    "openrlhf.sh": (OPENRLHF, "4xH100"),
    "verl.sh": (VERL, "8xH100"),
    "titan.toml": (TITAN.replace("size = 1", "size = 2"), "8xA100-40"),
}
"""Files that do not fit where they are asked about."""
