"""``kit emit --target``: which plans a program's file is for. Each plan that is refused differs in one thing from one
that is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kit
from kit.emit.run_directory import TARGETS, RunDirectory, files_of, files_of_target, write
from kit.entry_points import registered
from kit.errors import SpecError
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from kit.specs.run import DataSpec, RunSpec
from tests.emit.plans import ADAPTED, DENSE, FSDP2, ZERO2, ZERO3, plan_of
from tests.support.files import replace_in
from tests.support.refusals import refusal

RUN = RunSpec(data=DataSpec(train="train"))
VLLM = GrpoSpec(vllm_gpu_memory_utilization=0.3)
SMALL = {"model": "llama-3.2-1b"}
GRPO = {"objective": "grpo", "seq_length": 2048, "grpo": VLLM}
DPO = {"objective": "dpo", "seq_length": 1024}
REWARD = DPO | {"objective": "reward"}
OF_FILES = "it has no file for this plan"
WHOLE = "counts whole epochs, and the job has 1.5; use job.epochs=2"
OPTIMIZER = {"job": {"optimizer": OptimizerSpec(name="lion")}}
GRACE = ZERO3 | {"cluster": "8xGH200-96", "offload_optimizer": "cpu"}
CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[dict[str, Any], str]]]] = {
    "verl": (
        FSDP2 | SMALL | {"job": GRPO | {"lora": LoraSpec(), "epochs": 2.0}},
        {
            "cpu": ({"cluster": "8xcpu"}, "verl needs GPUs"),
            "objective": ({"job": {"objective": "dpo"}}, "use job.objective=grpo"),
            "engine": ({"engine": "deepspeed"}, "use layout.engine=torch layout.zero_stage=3"),
            "ddp": ({"zero_stage": 0}, "use layout.engine=torch layout.zero_stage=3"),
            "precision": ({"job": {"precision": "fp32"}}, "and the plan in fp32; use job.precision=bf16"),
            "dropout": ({"job": {"lora": LoraSpec(dropout=0.1)}}, "four_bit or dropout"),
            "four bits": ({"job": {"lora": LoraSpec(four_bit=True)}}, "four_bit or dropout"),
            "rank": ({"job": {"lora": LoraSpec(rank=513)}}, "a rank up to 512"),
            "rslora": ({"job": {"lora": LoraSpec(use_rslora=True)}}, "verl has no use_rslora"),
            "dora": ({"job": {"lora": LoraSpec(use_dora=True)}}, "verl has no use_rslora, use_dora"),
            "eight bits": ({"zero_stage": 0, "job": {"lora": LoraSpec(eight_bit=True)}}, "use_dora, eight_bit, rank"),
            "ranks": ({"job": {"lora": LoraSpec(rank_pattern={"q_proj": 4})}}, "rank_pattern or alpha_pattern"),
            "alphas": ({"job": {"lora": LoraSpec(alpha_pattern={"q_proj": 4.0})}}, "rank_pattern or alpha_pattern"),
            "attention": ({"job": {"lora": LoraSpec(targets="attention")}}, "job.lora.target_modules=[q_proj,v_proj]"),
            "no vllm": ({"job": {"grpo": GrpoSpec()}}, "set job.grpo.vllm_gpu_memory_utilization=0.3"),
            "small share": (
                {"job": {"grpo": GrpoSpec(vllm_gpu_memory_utilization=0.003)}}, "share of a node holds no copy"
            ),
            "part of an epoch": ({"job": {"epochs": 1.5}}, f"verl {WHOLE}"),
            "memory": ({"micro_batch_size": 64, "recompute": "none"}, "and 75.1 are usable; use a smaller micro batch"),
        },
    ),
    "openrlhf": (
        ZERO2 | SMALL | {"job": REWARD | {"lora": ADAPTED, "epochs": 2.0}, "offload_optimizer": "cpu"},
        {
            "cpu": ({"cluster": "8xcpu"}, "OpenRLHF needs GPUs"),
            "objective": ({"job": {"objective": "kto"}}, "OpenRLHF's grpo, dpo and reward"),
            "rows": ({"job": {"objective": "sft"}}, "OpenRLHF's grpo, dpo and reward"),
            "engine": ({"engine": "torch", "offload_optimizer": "none"}, "use layout.engine=deepspeed"),
            "ranks of a sequence": ({"dp": 4, "cp": 2, "cp_comm_type": "a2a"}, "use layout.engine=deepspeed"),
            "precision": ({"job": {"precision": "fp32"}}, "use job.precision=bf16, without layout.autocast"),
            "autocast": ({"autocast": True}, "use job.precision=bf16, without layout.autocast"),
            "nvme": ({"zero_stage": 3, "offload_optimizer": "nvme"}, "use layout.offload_optimizer=cpu"),
            "weights on the host": ({"zero_stage": 3, "offload_param": "cpu"}, "use layout.offload_optimizer=cpu"),
            "int8": ({"zero_stage": 3, "zero_quantized_weights": True}, "OpenRLHF has no zero_quantized_weights"),
            "int4": ({"zero_stage": 3, "zero_quantized_gradients": True}, "OpenRLHF has no zero_quantized_weights"),
            "activations": ({"activation_offloading": True}, "or activation_offloading"),
            "a reference": ({"job": {"objective": "dpo"}}, "OpenRLHF loads a reference model beside adapters too"),
            "part of an epoch": ({"job": {"epochs": 1.5}}, f"OpenRLHF {WHOLE}"),
        },
    ),
    "deepcompile": (
        ZERO2,
        {
            "engine": ({"engine": "torch"}, "it needs engine=deepspeed on a Hugging Face model with tp=1, cp=1"),
            "split": ({"tp": 2, "dp": 4}, "it needs engine=deepspeed on a Hugging Face model with tp=1, cp=1"),
            "cpu": ({"cluster": "8xcpu"}, "it needs GPUs"),
            "no sharding": ({"zero_stage": 0}, "it needs zero_stage=2 or 3, or 1 with one micro batch"),
            "stage 1": ({"zero_stage": 1}, "it needs zero_stage=2 or 3, or 1 with one micro batch"),
            "nvme": ({"zero_stage": 3, "offload_optimizer": "nvme"}, "it needs offload_param=none, no nvme"),
            "weights on the host": ({"zero_stage": 3, "offload_param": "cpu"}, "it needs offload_param=none, no nvme"),
            "compiled": ({"compile_layers": True}, "and compile_layers=false"),
        },
    ),
    "superoffload": (
        GRACE,
        {
            "engine": ({"implementation": "local"}, "it needs engine=deepspeed"),
            "stage": ({"zero_stage": 2}, "it needs zero_stage=3, offload_optimizer=cpu and offload_param=none"),
            "home": ({"offload_optimizer": "none"}, "it needs zero_stage=3, offload_optimizer=cpu"),
            "weights": ({"offload_param": "cpu"}, "it needs zero_stage=3, offload_optimizer=cpu"),
            "optimizer": (OPTIMIZER, "it needs optimizer.name=adamw and precision=bf16"),
            "precision": ({"job": {"precision": "fp16"}}, "it needs optimizer.name=adamw and precision=bf16"),
            "chip": ({"cluster": "8xH100"}, "it needs a superchip (GH200, GB200, GB300), and H100 is none"),
        },
    ),
    "axolotl": (
        FSDP2 | {"job": {"objective": "sft", "lora": LoraSpec()}},
        {
            "attention": ({"job": {"lora": LoraSpec(targets="attention")}}, OF_FILES),
            "ranks": ({"job": {"lora": LoraSpec(rank_pattern={"q_proj": 4})}}, OF_FILES),
            "alphas": ({"job": {"lora": LoraSpec(alpha_pattern={"q_proj": 4.0})}}, OF_FILES),
            "objective": ({"job": {"objective": "dpo"}}, OF_FILES),
            "fp8": ({"job": {"precision": "fp8"}}, OF_FILES),
            "optimizer": (OPTIMIZER, OF_FILES),
            "split": ({"tp": 2, "dp": 4}, OF_FILES),
            "cpu": ({"cluster": "8xcpu"}, OF_FILES),
            "stage 2": ({"zero_stage": 2}, OF_FILES),  # its fsdp_config always reshards
            "16 bits": ({"zero_stage": 0, "job": {"lora": None}}, OF_FILES),  # as it loads a model for DDP
            "selective recompute": ({"recompute": "selective"}, OF_FILES),
            "ring": ({"cp": 2, "dp": 4}, OF_FILES),
            "tiles": ({"tiled_mlp": True}, OF_FILES),
            "megatron": ({"engine": "megatron", "implementation": "local", "zero_stage": 0}, OF_FILES),
        },
    ),
    "llamafactory": (
        ZERO2 | {"job": {"lora": LoraSpec(targets="attention", target_modules=("q_proj",))}},
        {"split": ({"tp": 2, "dp": 4}, OF_FILES), "cpu": ({"cluster": "8xcpu"}, OF_FILES)},
    ),
    "ms-swift": (
        FSDP2,
        {
            "fp8": ({"job": {"precision": "fp8"}}, OF_FILES),
            "stage 2": ({"zero_stage": 2}, OF_FILES),
            "16 bits": ({"zero_stage": 0}, OF_FILES),
        },
    ),
    "torchtitan": (
        FSDP2 | {"tp": 2, "dp": 4},
        {
            "model": ({"model": "llama-2-7b"}, OF_FILES),
            "adapters": ({"job": {"lora": LoraSpec()}}, OF_FILES),
            "objective": ({"job": {"objective": "sft"}}, OF_FILES),
            "precision": ({"job": {"precision": "fp16"}}, OF_FILES),
            "autocast": ({"autocast": True}, OF_FILES),
            "stage 2": ({"zero_stage": 2}, OF_FILES),
            "engine": ({"engine": "deepspeed"}, OF_FILES),
        },
    ),
    "accelerate-parallelism": (
        FSDP2 | {"tp": 2, "dp": 4},
        {
            "one process": ({"dp": 1, "tp": 1, "cluster": "1xH100"}, OF_FILES),
            "no sharding": ({"zero_stage": 0}, OF_FILES),
            "engine": ({"engine": "deepspeed"}, OF_FILES),
        },
    ),
    "k8s": (DENSE, {"cpu": ({"cluster": "8xcpu"}, OF_FILES), "TRL's": ({"job": DPO}, OF_FILES)}),
    "sky": (ZERO2, {"cpu": ({"cluster": "8xcpu"}, OF_FILES), "TRL's": ({"job": DPO}, OF_FILES)}),
}  # fmt: skip
PAIRS = [(target, change) for target, (_, changes) in CASES.items() for change in changes]


def merged(plan: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return plan | change | {"job": plan.get("job", {}) | change.get("job", {})}


@pytest.mark.parametrize(("target", "changed"), PAIRS, ids=[": ".join(pair) for pair in PAIRS])
def test_a_file_is_for_these_plans_alone(target: str, changed: str) -> None:
    plan, changes = CASES[target]
    change, reason = changes[changed]
    accepted, refused = plan_of(**plan), plan_of(**merged(plan, change))
    of_target = files_of_target(target)
    for file in of_target:
        assert (file.name in files_of(accepted, [target]), file.name in files_of(refused, [target])) == (True, False)
        assert file.name not in files_of(accepted)
        assert reason in file.refuses(refused)
    if of_target[0].refuses(accepted) != of_target[0].refuses(refused):
        assert of_target[0].refuses(accepted) == ""


def test_every_target_is_here() -> None:
    assert CASES.keys() == registered(TARGETS).keys()


@pytest.mark.parametrize(
    "plan",
    [
        FSDP2 | SMALL | {"zero_stage": 2, "job": GRPO | {"lora": LoraSpec(rank=512)}},
        ZERO3 | SMALL | {"job": GRPO},
        ZERO3 | SMALL | {"job": DPO | {"precision": "fp16"}},
        ZERO2 | {"zero_stage": 1, "gradient_accumulation_steps": 1},
        ZERO3 | {"offload_optimizer": "cpu"},
        FSDP2 | {"job": {"lora": LoraSpec()}},
        FSDP2 | {"cluster": "1xH100", "dp": 1, "zero_stage": 0, "job": {"lora": LoraSpec()}},
    ],
    ids=["verl", "openrlhf", "openrlhf", "deepcompile", "deepcompile", "llamafactory", "axolotl"],
)
def test_and_for_these(plan: dict[str, Any], request: pytest.FixtureRequest) -> None:
    target = request.node.callspec.id.rstrip("0123456789")
    assert files_of(plan_of(**plan), [target]).keys() - files_of(plan_of(**plan)).keys()


def test_they_are_written_only_when_asked_for_and_all_or_nothing(tmp_path: Path) -> None:
    plan = kit.plan("llama-3.2-1b", "p5.48xlarge:2", pins=kit.Pins(engine="torch"))
    assert RunDirectory.open(write(plan, RUN, tmp_path / "without").path).edits == ()
    found = {path.name for path in write(plan, RUN, tmp_path / "with", ["k8s", "sky"]).path.iterdir()}
    assert {"k8s.jobset.yaml", "k8s.trainjob.yaml", "sky.yaml"} <= found
    for targets, said in (
        (["k8s", "nomad"], "--target nomad: unknown; use accelerate-parallelism or axolotl or "),
        (["k8s", "openrlhf"], "--target openrlhf for .*: objective=pretrain, .*; OpenRLHF trains by DeepSpeed alone"),
    ):
        assert re.search(said, refusal(SpecError, write, plan, RUN, tmp_path / "other", targets))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["k8s.jobset.yaml", "k8s.trainjob.yaml"])
def test_an_image_set_by_hand_is_an_edit_that_is_honoured(name: str, tmp_path: Path) -> None:
    file = write(plan_of(**ZERO2, cluster="p5.48xlarge:1"), RUN, tmp_path / "run", ["k8s"]).path / name
    replace_in(file, "image: REPLACE-ME", "image: site/kit:1")
    (edit,) = RunDirectory.open(file.parent).edits
    assert (edit.file, edit.key.endswith(("trainer.image", "replicatedJobs"))) == (name, True)
    assert "site/kit:1" in str(edit.found)
