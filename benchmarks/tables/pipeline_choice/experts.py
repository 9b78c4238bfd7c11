"""DeepSpeed's AutoEP on two processes: experts of a Hugging Face Mixtral shared out over ranks, beside plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

CONFIG = MixtralConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=None,
    attn_implementation="sdpa",
)
SEQ_LENGTH, RANKS, STEPS, LEARNING_RATE = 32, 2, 3, 0.1


@dataclass(frozen=True)
class Ran:
    """What came of it."""

    losses: list[float]
    """Means over the ranks, a step each."""
    failed: str


def model() -> MixtralForCausalLM:
    """The same weights everywhere."""
    torch.manual_seed(0)
    return MixtralForCausalLM(CONFIG)


def tokens(step: int) -> torch.Tensor:
    """One row a rank."""
    return torch.randint(0, 128, (RANKS, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(trained: Any, rows: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of the rows."""
    logits = trained(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def one_process() -> list[float]:
    """Plain torch."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = loss_of(trained, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def two_ranks(stage: int, patched: bool) -> Ran:
    """In a worker of two. ``patched``: transformers' registry of recorded outputs gets the method that AutoEP calls."""
    import deepspeed
    import torch.distributed as dist
    from transformers.utils import output_capturing

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    if patched:
        _take_names_and_defaults(type(output_capturing._CAN_RECORD_REGISTRY))
    config = {
        "train_batch_size": RANKS,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 1.0 where nothing is said
        "expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"},
        "steps_per_print": None,
    }
    try:
        trained = model()
        engine, *_ = deepspeed.initialize(model=trained, model_parameters=trained.parameters(), config=config)
        losses = []
        for step in range(STEPS):
            loss = loss_of(engine, tokens(step)[dist.get_rank() : dist.get_rank() + 1])
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / RANKS)
        return Ran(losses, "")
    except Exception as error:  # what a user would see
        return Ran([], f"{type(error).__name__}: {error}")


def _take_names_and_defaults(registry: Any) -> None:
    """AutoEP (auto_ep_presets/base.py) asks by a class's name and with a default; transformers 5.23 takes a model."""
    of_model = registry.get

    def get(self: Any, key: Any, *default: Any) -> Any:
        return dict.get(self, key, *default) if isinstance(key, str) else of_model(self, key)

    registry.get = get
