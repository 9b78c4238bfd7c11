"""What is to be trained: everything about the job that changes the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from kit.errors import SpecError
from kit.specs.validation import Checked, Count, FrozenMap, Text, Within, spec

LoadBalancingType = Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss"]
_LARGEST_COEFFICIENT = 1e3


@spec
class BalancingSpec:
    """Balancing of experts while a model trains. Fields are named and mean as in megatron-core
    (transformer/transformer_config.py); the default is none at all."""

    moe_router_load_balancing_type: LoadBalancingType = "none"
    """What the auxiliary loss of each layer is taken over (arXiv 2101.03961, equation 4). aux_loss: one micro batch of
    one data-parallel rank, so that it depends on the layout. seq_aux_loss: each sequence. global_aux_loss: loads of all
    ranks and of the step's micro batches so far (arXiv 2501.11873)."""
    moe_aux_loss_coeff: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """Coefficient of the auxiliary loss, which is 1 for even loads, whatever the number of experts."""
    moe_z_loss_coeff: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """Coefficient of the router's z-loss (arXiv 2202.08906, equation 5); 0 = none."""
    moe_router_bias_update_rate: Annotated[float, Within(ge=0, le=_LARGEST_COEFFICIENT)] = 0.0
    """After each step this is added to the bias of every expert with less than the mean load, and subtracted from the
    bias of every expert with more (arXiv 2408.15664). Only for routers with sigmoid scores. 0 = biases do not
    change."""
    moe_expert_capacity_factor: Annotated[float, Within(gt=0, le=_LARGEST_COEFFICIENT)] | None = None
    """An expert computes at most this many times the mean load of a micro batch: the tokens with the largest router
    weight for it. Other tokens are dropped. Only engine=megatron. null: no token is dropped."""
    source: Text = "user"
    """Where these values were published."""

    def __post_init__(self) -> None:
        kind, coefficient = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        if (kind == "none") != (coefficient == 0):
            fix = "give its type, or 0" if coefficient else "give its coefficient, or none"
            raise SpecError(
                f"moe_router_load_balancing_type={kind} with moe_aux_loss_coeff={coefficient:g}: an auxiliary loss "
                f"needs both; {fix}"
            )

    @property
    def has_loss(self) -> bool:
        """Whether anything is added to the gradient of a router."""
        return bool(self.moe_aux_loss_coeff or self.moe_z_loss_coeff)


MOST_SEQUENCES = 10**7
"""The largest batch: a hundred times the largest batches; in ``run.steps`` steps they still fit into 64 bits."""
_MOST_TOKENS = 10**18
"""The longest job: ten thousand times all text there is, and what 64 bits count."""
_LONGEST_SEQUENCE = 10**8
_MOST_EPOCHS = 10**6

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Objective = Literal["pretrain", "sft", "seq2seq", "dpo", "kto", "reward", "grpo"]
OptimizerName = Literal["adamw", "adamw-8bit", "paged-adamw-8bit", "adafactor", "sgd", "lion", "lion-8bit", "muon"]


@spec
class OptimizerSpec:
    """An optimizer. Weight decay is decoupled, except for sgd; one-dimensional parameters (norms, biases) have none."""

    name: OptimizerName = "adamw"
    """adamw-8bit and lion-8bit: moments of matrices take a byte each. muon: for matrices of layers, with momentum 0.95
    and AdamW's update size (arXiv 2502.16982); AdamW for the rest. docs/optimizers.md says which engine runs which."""
    beta1: Annotated[float, Within(ge=0, lt=1)] = 0.9
    """Decay of the first moment; sgd's momentum."""
    beta2: Annotated[float, Within(ge=0, lt=1)] = 0.95
    """Decay of the second moment; for lion, of its only one. sgd and adafactor do not read it."""
    eps: Annotated[float, Within(ge=1e-30, le=1)] = 1e-8
    """Added to the root of the second moment, by AdamW only."""
    weight_decay: Annotated[float, Within(ge=0, le=100)] = 0.1


ATTENTION_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj"})
_Rank = Annotated[int, Count(gt=0, le=65536)]
_Alpha = Annotated[float, Within(gt=0, le=1e6)]


@spec
class LoraSpec:
    """Low-rank adapters on frozen weights (arXiv 2106.09685). Names are those of peft's LoraConfig."""

    rank: _Rank = 16
    alpha: _Alpha = 32.0
    """Adapters are scaled by alpha/rank."""
    use_rslora: bool = False
    """Scale adapters by alpha/√rank, so that a large rank learns as fast as a small one (arXiv 2312.03732)."""
    use_dora: bool = False
    """DoRA: also train the length of each row of an adapted weight (arXiv 2402.09353). Slower, in more memory."""
    dropout: Annotated[float, Within(ge=0, lt=1)] = 0.0
    targets: Literal["attention", "all-linear"] = "all-linear"
    """Linear layers that get adapters: those of attention, or all but the output head."""
    target_modules: tuple[Text, ...] = ()
    """Last names of the layers that get adapters, such as [q_proj, v_proj]; empty: those of targets."""
    rank_pattern: Annotated[dict[Text, _Rank], Checked(FrozenMap)] = FrozenMap({})
    """Last name of a layer → its rank, where it is not rank."""
    alpha_pattern: Annotated[dict[Text, _Alpha], Checked(FrozenMap)] = FrozenMap({})
    """Last name of a layer → its alpha, where it is not alpha."""
    four_bit: bool = False
    """QLoRA: frozen linear weights in nf4 (arXiv 2305.14314)."""
    eight_bit: bool = False
    """Frozen linear weights in int8, one scale a row (LLM.int8(), arXiv 2208.07339): load_in_8bit of transformers."""
    quantize_moe_experts: bool = False
    """With four_bit: routed experts in nf4 too. bitsandbytes dequantises those of one layer at a time."""

    def __post_init__(self) -> None:
        if self.four_bit and self.eight_bit:
            raise SpecError("lora.four_bit=true with eight_bit=true: weights are quantised once; leave one of them out")

    @property
    def quantised(self) -> Literal["", "four_bit", "eight_bit"]:
        """Which of the fields is set that quantise frozen weights; empty: they have 16 bits, or 32."""
        return "four_bit" if self.four_bit else "eight_bit" if self.eight_bit else ""

    @property
    def layers(self) -> frozenset[str]:
        """Llama's names of the layers that get adapters, for every family."""
        return frozenset(self.target_modules) or ATTENTION_LAYERS | (
            frozenset() if self.targets == "attention" else MLP_LAYERS
        )

    def rank_of(self, layer: str) -> int:
        """Rank of the adapters of a layer, which is given by its last name."""
        return int(self.rank_pattern.get(layer, self.rank))

    def scale_of(self, layer: str) -> float:
        """Factor of B·A of a layer, which is given by its last name."""
        alpha, rank = float(self.alpha_pattern.get(layer, self.alpha)), self.rank_of(layer)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@spec
class GrpoSpec:
    """How GRPO generates completions (arXiv 2402.03300). Names and defaults are those of TRL's GRPOConfig."""

    num_generations: Annotated[int, Count(ge=2, le=4096)] = 8
    """Completions of a prompt, which are compared with each other."""
    max_completion_length: Annotated[int, Count(gt=0, le=_LONGEST_SEQUENCE)] = 512
    """Tokens of a completion; the prompt takes the rest of seq_length."""
    beta: Annotated[float, Within(ge=0, le=100)] = 0.0
    """Weight of the KL term; above 0 a reference model is held."""
    vllm_gpu_memory_utilization: Annotated[float, Within(gt=0, lt=1)] | None = None
    """Share of each GPU's memory for a vLLM on the same GPU (TRL's own default is 0.3); null: transformers
    generates."""
    vllm_enable_sleep_mode: bool = False
    """Whether that vLLM leaves the GPU while the model trains: its weights, and its keys and values."""


@spec
class JobSpec:
    """A training job. These are the defaults of pretraining; a recipe and the commands take those of the objective and
    the method (``kit.specs.job_defaults``)."""

    objective: Objective = "pretrain"
    """pretrain: every token counts. sft: rows with label masks. seq2seq: pairs, for an encoder-decoder. dpo, kto,
    reward, grpo: TRL's trainers, under kit's files."""
    lora: LoraSpec | None = None
    """Train adapters instead of the weights; null: all weights."""
    seq_length: Annotated[int, Count(gt=0, le=_LONGEST_SEQUENCE)] = 4096
    """Tokens in a sequence."""
    global_batch_size: Annotated[int, Count(gt=0, le=MOST_SEQUENCES)] = 512
    """Sequences in an optimizer step; pairs for dpo and reward, completions for grpo."""
    total_tokens: Annotated[int, Count(gt=0, le=_MOST_TOKENS)] | None = None
    """Length of the run in tokens; of rows without padding. The length is this, epochs or run.steps."""
    epochs: Annotated[float, Within(gt=0, le=_MOST_EPOCHS)] | None = None
    """Length of the run in passes over its training data, such as 3 or 0.5; the last step is whole. The run counts the
    rows when it starts."""
    precision: Precision = "bf16"
    """bf16: bf16 compute with fp32 master weights and moments. fp32: everything in fp32. fp16: as bf16, with loss
    scaling. fp8: bf16 with the GEMMs of linear layers in fp8, by Transformer Engine (megatron) or torchao (torch)."""
    optimizer: OptimizerSpec = OptimizerSpec()
    learning_rate: Annotated[float, Within(ge=1e-12, le=100)] = 3e-4
    """Peak learning rate; the schedule is in ``run.schedule``. A step of Adam changes a weight by about as much."""
    grad_clip: Annotated[float, Within(ge=0, le=1e9)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    balancing: BalancingSpec | None = None
    """Balancing of experts. null: in pretraining what the model's family was published with, which a plan then shows;
    otherwise none."""
    mtp_num_layers: Annotated[int, Count(ge=0, le=8)] = 0
    """Heads of multi-token prediction that are trained (DeepSeek-V3, arXiv 2412.19437, section 2.2), on megatron."""
    mtp_loss_scaling_factor: Annotated[float, Within(ge=0, le=100)] = 0.1
    """Weight of the mean loss of these heads. DeepSeek-V3 began with 0.3 and ended with 0.1."""
    expert_load: Annotated[float, Within(ge=1, le=1000)] = 1.0
    """Tokens of the fullest expert-parallel rank over the mean: all ranks wait for it, and it needs the most memory.
    The metric expert_load_max of an earlier run is the fullest expert's, which is no less. 1: even loads."""
    grpo: GrpoSpec | None = None
    """For objective grpo; null: the defaults."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.total_tokens is not None:
            raise SpecError(
                f"epochs={self.epochs:g} and total_tokens={self.total_tokens} are both there; the length of a run is "
                "one of job.epochs, run.steps and job.total_tokens: leave out one"
            )

    @property
    def rows(self) -> str:
        """What a batch counts."""
        return {"dpo": "pairs", "reward": "pairs", "grpo": "completions"}.get(self.objective, "sequences")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step trains on; both answers of a pair count."""
        return self.global_batch_size * self.seq_length * (2 if self.rows == "pairs" else 1)


LENGTHS_OF_JOB = ("epochs", "total_tokens")
"""Keys that say how long a run is; ``run.steps`` is the third."""


# Objectives that TRL's trainers run under kit's files: what they compute and hold beside a step of the model. One row
# each, read in TRL 1.16 (trl/trainer/*_trainer.py).


class TrlObjective(NamedTuple):
    """One of TRL's trainers. Its batch counts rows."""

    trainer: str
    """TRL's class, and the script of examples/ that calls it: DPOTrainer, trl_dpo.py."""
    sequences: int = 1
    """Sequences of a row: a pair of answers has two."""
    policy_forwards: int = 0
    """Forwards of the trained model without gradient, for each sequence."""
    reference_forwards: int = 0
    """Forwards of the reference model, a frozen copy of the model; 0: there is none."""
    scores: bool = False
    """Whether the head is one score instead of the vocabulary."""
    generates: bool = False
    """Whether the step begins with generating the completions."""


TRL: Mapping[Objective, TrlObjective] = {
    "dpo": TrlObjective("DPOTrainer", sequences=2, reference_forwards=1),
    # Both models also score each prompt with the answer of another row, for the KL term (_compute_kl_logps).
    "kto": TrlObjective("KTOTrainer", policy_forwards=1, reference_forwards=2),
    "reward": TrlObjective("RewardTrainer", sequences=2, scores=True),
    "grpo": TrlObjective("GRPOTrainer", generates=True),
}


def trl_objective(job: JobSpec) -> TrlObjective | None:
    """The row of the job's objective; None where kit's own loop trains. GRPO has a reference model where beta > 0, and
    scores vLLM's completions once more, because vLLM's own probabilities differ (vllm_importance_sampling_correction).
    """
    row = TRL.get(job.objective)
    if row is None or not row.generates:
        return row
    grpo = job.grpo or GrpoSpec()
    return row._replace(
        reference_forwards=int(grpo.beta > 0), policy_forwards=int(grpo.vllm_gpu_memory_utilization is not None)
    )
