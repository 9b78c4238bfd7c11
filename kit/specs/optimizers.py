"""The optimizers: bytes of their state, the engines that run them, and by which implementation. One row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kit.specs.job import OptimizerName
from kit.specs.layout import EngineName

BLOCK = 256
"""Elements that share a scale in 8-bit moments: bitsandbytes' choice (optim/optimizer.py, init_state)."""
_MOMENT_IN_8_BITS = 1 + 4 / BLOCK


class Moments(NamedTuple):
    """Bytes per parameter of an optimizer's moments, without master weights."""

    matrices: float
    """Moments of the layers' matrices."""
    rest: float
    """Moments of embeddings and head; of norms and biases too, unless ``vectors`` says otherwise."""
    vectors: float | None = None


@dataclass(frozen=True)
class OptimizerTraits:
    """What planning and engines must know of an optimizer."""

    moments: Moments
    implementations: Mapping[EngineName, str]
    """Engine → what steps the parameters there. Other engines refuse the optimizer."""
    state: tuple[str, ...]
    """The moments in a checkpoint: exp_avg, exp_avg_sq or both."""
    state_of: OptimizerName
    """Optimizers of the same value can continue from each other's checkpoints."""
    missing: Mapping[EngineName, str] = field(default_factory=dict)
    """Engine → why it does not run the optimizer, as a clause."""
    needs: Mapping[EngineName, str] = field(default_factory=dict)
    """Engine → limits there, for the documentation; kit/planner/rules/optimizers.py checks them."""
    oldest: Mapping[EngineName, Mapping[str, str]] = field(default_factory=dict)
    """Engine → package, or Python → oldest version there, where the optimizer needs more than the engine."""
    gathered_in_step: Mapping[EngineName, float] = field(default_factory=dict)
    """Engine → temporary bytes in the step per element of one whole matrix at a time."""
    exports_a_copy: bool = False
    """Whether the moments of an export are computed, one parameter at a time, and not the live state."""


_NO_8_BIT: Mapping[EngineName, str] = {"megatron": "has an optimizer of its own with fp32 moments"}
_NO_OFFLOAD = "`offload_optimizer: none`"

OPTIMIZERS: Mapping[OptimizerName, OptimizerTraits] = {
    "adamw": OptimizerTraits(
        moments=Moments(matrices=8.0, rest=8.0),
        implementations={
            "torch": "torch.optim.AdamW",
            "deepspeed": "FusedAdam; torch.optim.AdamW; DeepSpeedCPUAdam with offload",
            "megatron": "torch's AdamW kernel in megatron-core's optimizers",
        },
        state=("exp_avg", "exp_avg_sq"),
        state_of="adamw",
    ),
    "adamw-8bit": OptimizerTraits(
        # Two moments of a byte, an fp32 scale for each block; vectors in fp32 (kit/engines/eight_bit.py).
        moments=Moments(matrices=2 * _MOMENT_IN_8_BITS, rest=2 * _MOMENT_IN_8_BITS, vectors=8.0),
        implementations=dict.fromkeys(
            ("torch", "deepspeed"), "bitsandbytes' 8-bit kernel; torch.optim.AdamW for vectors"
        ),
        state=("exp_avg", "exp_avg_sq"),
        state_of="adamw",
        missing=_NO_8_BIT,
        needs={"deepspeed": _NO_OFFLOAD},
        exports_a_copy=True,
    ),
    "paged-adamw-8bit": OptimizerTraits(
        # Pages of these stay on the GPU until memory runs out; a plan counts all.
        moments=Moments(matrices=2 * _MOMENT_IN_8_BITS, rest=2 * _MOMENT_IN_8_BITS, vectors=8.0),
        implementations={"torch": "bitsandbytes.optim.PagedAdamW8bit; torch.optim.AdamW for vectors"},
        state=("exp_avg", "exp_avg_sq"),
        state_of="adamw",
        missing={"deepspeed": "steps flat partitions, which bitsandbytes' class counts in 32 bits", **_NO_8_BIT},
        needs={"torch": "`zero_stage: 0`"},
        exports_a_copy=True,
    ),
    "sgd": OptimizerTraits(
        moments=Moments(matrices=4.0, rest=4.0),
        implementations={
            "torch": "torch.optim.SGD",
            "deepspeed": "torch.optim.SGD",
            "megatron": "torch.optim.SGD in megatron-core's optimizers",
        },
        state=("exp_avg",),
        state_of="sgd",
        needs={"deepspeed": _NO_OFFLOAD, "megatron": "`zero_stage: 0`"},
    ),
    "lion": OptimizerTraits(
        moments=Moments(matrices=4.0, rest=4.0),
        implementations={"torch": "bitsandbytes' Lion kernel", "deepspeed": "FusedLion"},
        state=("exp_avg",),
        state_of="lion",
        missing={"megatron": "has Lion for matrices of layers only (megatron-core 0.19), and Adam for the rest"},
        needs={"deepspeed": f"a GPU, {_NO_OFFLOAD}"},
    ),
    "lion-8bit": OptimizerTraits(
        moments=Moments(matrices=_MOMENT_IN_8_BITS, rest=_MOMENT_IN_8_BITS, vectors=4.0),
        implementations=dict.fromkeys(
            ("torch", "deepspeed"), "bitsandbytes' 8-bit kernel; its 32-bit Lion for vectors"
        ),
        state=("exp_avg",),
        state_of="lion",
        missing=_NO_8_BIT,
        needs={"deepspeed": _NO_OFFLOAD},
        exports_a_copy=True,
    ),
    "adafactor": OptimizerTraits(
        # Means of rows and columns of the second moment, no first one (arXiv 1804.04235): a few vectors.
        moments=Moments(matrices=0.0, rest=0.0),
        implementations={"torch": "torch.optim.Adafactor on gathered parameters", "deepspeed": "torch.optim.Adafactor"},
        state=("exp_avg_sq",),
        state_of="adafactor",
        missing={"megatron": "has no Adafactor (megatron-core 0.16.1 and 0.19.2)"},
        needs={"deepspeed": "`zero_stage: 0`, `tp: 1`"},
        # Weight, gradient and update, in fp32 (torch/optim/_adafactor.py, _single_tensor_adafactor).
        gathered_in_step={"torch": 12.0},
        exports_a_copy=True,
    ),
    "muon": OptimizerTraits(
        # One momentum for matrices of layers, AdamW for embeddings, head and vectors (Keller Jordan's Muon, 2024).
        moments=Moments(matrices=4.0, rest=8.0),
        implementations={
            "torch": "torch.optim.Muon's steps on gathered matrices; torch.optim.AdamW for the rest",
            "megatron": "megatron-core's TensorParallelMuon on each Hugging Face matrix; AdamW for the rest",
        },
        state=("exp_avg", "exp_avg_sq"),
        state_of="muon",
        missing={
            "deepspeed": "orthogonalises before it clips (runtime/zero/stage_1_and_2.py), which is another optimizer",
        },
        needs={
            "megatron": "megatron-core 0.19 (so Python 3.12), `zero_stage: 0`, a `tp` that divides the key/value heads"
        },
        oldest={"megatron": {"Python": "3.12", "megatron-core": "0.19", "emerging-optimizers": "0.3"}},
        # torch: the matrix in bf16, and three matrices of the iteration (torch/optim/_muon.py). Megatron: in fp32
        # the update, the ranks' parts, the matrix and the normalised one, and that in bf16 (emerging_optimizers,
        # newton_schulz_tp; 17.98 bytes were measured).
        gathered_in_step={"torch": 8.0, "megatron": 18.0},
    ),
}
