"""torchtitan's own Trainer on CPU processes: a tiny Llama, a checkpoint at step 3, six steps in all.

Runs in an environment of torchtitan's, without kit:

    torchrun --nproc_per_node 2 titan_run.py SETTINGS.json OUT

torchtitan 0.3.0 looks for a GPU. Replaced here are the device that it finds, by the CPU; FlexAttention, which has no
backward pass on a CPU, by torchtitan's ScaledDotProductAttention; the mean in FSDP's reduce-scatter, which gloo does
not have, by torch's own sum; and ``set_pg_timeouts``, for torch 2.13 has no ``torch.distributed.set_timeout``. Trainer,
model, FSDP2, optimizer and checkpoint are torchtitan's.
"""

# mypy: ignore-errors
from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from functools import partial
from pathlib import Path

import torch
from torchtitan.tools import utils


class Cpu(types.ModuleType):
    """``torch.cpu`` with what torchtitan asks of ``torch.cuda``."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_name(self, *_):
        return "cpu"

    def get_device_properties(self, *_):
        return types.SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, *_):
        return {}

    def reset_peak_memory_stats(self, *_):
        pass

    def empty_cache(self):
        pass

    def current_device(self):
        return 0


utils.device_type, utils.device_module = "cpu", Cpu("cpu")

from tokenizers import Tokenizer, models  # noqa: E402 # torchtitan must find the device as it is imported
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

SETTINGS, OUT = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
MODEL, WORLD = SETTINGS["model"], int(os.environ["WORLD_SIZE"])


class Rows(BaseDataLoader):
    """Inputs and labels of each step from the settings; this rank's rows."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, **given):
        self.rank, self.ranks, self.step = given["dp_rank"], given["dp_world_size"], 0

    def __iter__(self):
        while True:
            step = SETTINGS["rows"][self.step]
            inputs, labels = (torch.tensor(step[key]).chunk(self.ranks)[self.rank] for key in ("inputs", "labels"))
            self.step += 1
            yield {"input": inputs}, labels

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def tiny(**_):
    """The model of the settings, a Hugging Face configuration."""
    dim, vocabulary, eps = MODEL["hidden_size"], MODEL["vocab_size"], MODEL["rms_norm_eps"]
    heads = MODEL["num_attention_heads"]
    rope = ComplexRoPE.Config(
        dim=dim // heads,
        max_seq_len=MODEL["max_position_embeddings"],
        theta=MODEL["rope_parameters"]["rope_theta"],
        scaling="none",
    )
    found = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            fuse_qkv=SETTINGS["fused"],
            n_layers=MODEL["num_hidden_layers"],
            dim=dim,
            n_heads=heads,
            n_kv_heads=MODEL["num_key_value_heads"],
            hidden_dim=MODEL["intermediate_size"],
            rope=rope,
            attn_backend="flex",
        ),
    )
    for layer in found.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = eps
    found.norm.eps = eps
    return found


def main() -> None:
    """Train, and write the curve beside the checkpoints. Larger weights than torchtitan's: with these, attention is so
    even that no loss shows in which order rows are rotated."""
    larger = {"weight": partial(torch.nn.init.normal_, std=0.2)}
    llama3._LINEAR_INIT.update(larger)
    llama3._depth_init = lambda _: larger
    llama3.llama3_configs["debugmodel"] = tiny
    config = config_registry.llama3_debugmodel()
    config.training = dataclasses.replace(
        config.training,
        steps=len(SETTINGS["rows"]),
        seq_len=len(SETTINGS["rows"][0]["inputs"][0]),
        local_batch_size=len(SETTINGS["rows"][0]["inputs"]) // WORLD,
        max_norm=SETTINGS["grad_clip"],
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    config.parallelism = dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor")
    config.checkpoint = dataclasses.replace(config.checkpoint, enable=True, interval=SETTINGS["saved_at"])
    config.lr_scheduler = dataclasses.replace(config.lr_scheduler, warmup_steps=0, decay_ratio=0.0, min_lr_factor=1.0)
    config.optimizer = default_adamw(**SETTINGS["adam"])
    config.dataloader, config.activation_checkpoint, config.dump_folder = Rows.Config(), None, str(OUT)
    rank = int(os.environ["RANK"])
    assets = OUT / f"tokenizer-{rank}"
    assets.mkdir(parents=True)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(assets / "tokenizer.json"))
    config.hf_assets_path = str(assets)
    distributed.set_pg_timeouts = lambda **_: None
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    curve, log = [], trainer.metrics_processor.log

    def keep(step, loss, worst, norm, **more):
        curve.append((loss, norm, more["extra_metrics"]["lr/AdamW"]))
        log(step, loss, worst, norm, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    if rank == 0:
        (OUT / "curve.json").write_text(json.dumps(curve))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
