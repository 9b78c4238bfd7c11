"""DeepSpeed's PipelineModule and AutoEP on two processes beside plain torch, for docs/pipeline-choice.md.

    python -m benchmarks.tables.pipeline_choice

What a Hugging Face model needs for PipelineModule is ``as_layers``: a family's forward pass written once more, as a
list of modules that hand over one tensor, with everything that the model computes once (positions, mask) in each.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from tests.workers import pool

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
SEQ_LENGTH, MICRO_BATCH, MICRO_BATCHES, STEPS, WORLD_SIZE = 32, 2, 4, 5, 2
EXPERT_STEPS = 3
LEARNING_RATE = 0.1


class _Layer(torch.nn.Module):
    """A decoder layer that makes its own rotary embedding: a pipeline hands over hidden states alone."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, copy.deepcopy(rotary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
        )


def as_layers(model: LlamaForCausalLM) -> list[torch.nn.Module]:
    """Embedding, layers, norm, head."""
    inner = model.model
    return [inner.embed_tokens, *(_Layer(each, inner.rotary_emb) for each in inner.layers), inner.norm, model.lm_head]


def llama() -> LlamaForCausalLM:
    """Four layers, the same weights on every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES, intermediate_size=128, num_hidden_layers=4))


def mixtral() -> MixtralForCausalLM:
    """Two layers of four experts, the same weights on every process."""
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return MixtralForCausalLM(MixtralConfig(**_SIZES, **experts, intermediate_size=96, num_hidden_layers=2))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def data(steps: int, micro_batches: int, rows: int, seed: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """(inputs, labels) of every micro batch of every step."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, _SIZES["vocab_size"], (steps, micro_batches, rows, SEQ_LENGTH + 1), generator=generator)
    return [[(each[:, :-1], each[:, 1:]) for each in step] for step in tokens]


PIPELINE_DATA, EXPERT_DATA = data(STEPS, MICRO_BATCHES, MICRO_BATCH, 5), data(EXPERT_STEPS, 1, WORLD_SIZE, 0)


def one_process(model: PreTrainedModel, steps: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[float]:
    """Losses of plain torch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for batches in steps:
        total = 0.0
        for inputs, labels in batches:
            loss = loss_of(model(input_ids=inputs, use_cache=False).logits, labels) / len(batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _settings(stage: int, micro_batch: int, micro_batches: int, ranks: int, **more: Any) -> dict[str, Any]:
    """fp32, SGD and no clipping (DeepSpeed clips at 1.0 where nothing is said): nothing that hides a difference."""
    return {
        "train_batch_size": micro_batch * micro_batches * ranks,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        **more,
    }


def _deepspeed() -> Any:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed


def two_stages(stage: int) -> list[float] | str:
    """In a worker of two: losses of a pipeline, or why DeepSpeed refuses it."""
    deepspeed = _deepspeed()
    from deepspeed.pipe import PipelineModule

    piped = PipelineModule(layers=as_layers(llama()), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    config = _settings(stage, MICRO_BATCH, MICRO_BATCHES, 1)
    try:
        engine, *_ = deepspeed.initialize(model=piped, model_parameters=piped.parameters(), config=config)
    except AssertionError as error:
        return str(error)
    batches = iter([batch for step in PIPELINE_DATA for batch in step])
    return [float(engine.train_batch(data_iter=batches)) for _ in range(STEPS)]


def two_expert_ranks(patched: bool) -> list[float] | str:
    """In a worker of two: losses of AutoEP, or what a user would see. ``patched``: transformers' registry of recorded
    outputs gets the method that AutoEP calls."""
    import torch.distributed as dist
    from transformers.utils import output_capturing

    deepspeed = _deepspeed()
    if patched:
        _take_names_and_defaults(type(output_capturing._CAN_RECORD_REGISTRY))
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}
    config = _settings(1, 1, 1, WORLD_SIZE, expert_parallel=experts)
    losses = []
    try:
        model = mixtral()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for ((inputs, labels),) in EXPERT_DATA:
            own = slice(dist.get_rank(), dist.get_rank() + 1)
            loss = loss_of(engine(input_ids=inputs[own], use_cache=False).logits, labels[own])
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / WORLD_SIZE)
    except Exception as error:  # what a user would see
        return f"{type(error).__name__}: {error}"
    return losses


def _take_names_and_defaults(registry: Any) -> None:
    """AutoEP (auto_ep_presets/base.py) asks by a class's name and with a default; transformers 5.23 takes a model."""
    of_model = registry.get

    def get(self: Any, key: Any, *default: Any) -> Any:
        return dict.get(self, key, *default) if isinstance(key, str) else of_model(self, key)

    registry.get = get


def main() -> int:
    """Prints losses beside plain torch's."""
    print("one process        ", one_process(llama(), PIPELINE_DATA))
    for stage in (0, 1, 2):
        print(f"two stages, ZeRO-{stage} ", pool("deepspeed", WORLD_SIZE).run(two_stages, stage)[0])
        pool("deepspeed", WORLD_SIZE).close()  # it leaves process groups behind
    print("experts, one process", one_process(mixtral(), EXPERT_DATA))
    for patched in (False, True):
        print(f"AutoEP, patched={patched}", pool("deepspeed", WORLD_SIZE).run(two_expert_ranks, patched)[0])
        pool("deepspeed", WORLD_SIZE).close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
