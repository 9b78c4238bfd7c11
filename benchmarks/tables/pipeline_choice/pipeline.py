"""DeepSpeed's PipelineModule on two processes: what a Hugging Face model needs to become one, and how near it comes.

What it needs is ``as_layers``: a family's forward pass written once more, as a list of modules that hand over one
tensor, with everything that the model computes once (positions, mask) computed in each.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
SEQ_LENGTH, MICRO_BATCH, MICRO_BATCHES, STEPS = 32, 2, 4, 5
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


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(inputs, labels) of every micro batch of every step."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(
        0, CONFIG.vocab_size, (STEPS * MICRO_BATCHES, MICRO_BATCH, SEQ_LENGTH + 1), generator=generator
    )
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def model() -> LlamaForCausalLM:
    """The same weights on every process."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def one_process() -> list[float]:
    """Losses of plain torch."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=LEARNING_RATE)
    losses, batches = [], data()
    for step in range(STEPS):
        total = 0.0
        for inputs, labels in batches[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]:
            loss = loss_of(trained(input_ids=inputs, use_cache=False).logits, labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def settings(stage: int, clipping: float = 0.0) -> dict[str, Any]:
    """fp32 and SGD: nothing that hides a difference. DeepSpeed clips at 1.0 where nothing is said."""
    return {
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": clipping,
        "steps_per_print": None,
    }


@dataclass(frozen=True)
class Ran:
    """What two stages did."""

    losses: list[float]
    """Of each step; empty where DeepSpeed refused."""
    refused: str
    layers: int
    """Modules on this rank."""


def two_stages(stage: int) -> Ran:
    """In a worker of two: train, or be refused."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    piped = PipelineModule(layers=as_layers(model()), num_stages=2, loss_fn=loss_of, partition_method="uniform")
    try:
        engine, *_ = deepspeed.initialize(model=piped, model_parameters=piped.parameters(), config=settings(stage))
    except AssertionError as error:
        return Ran([], str(error), len(piped.forward_funcs))
    batches = iter(data())
    losses = [float(engine.train_batch(data_iter=batches)) for _ in range(STEPS)]
    return Ran(losses, "", len(piped.forward_funcs))
