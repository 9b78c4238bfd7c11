"""README.md of a run directory: which commands it prints for a plan, and what of it a script does not get; nothing
is lost in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kit.emit.not_carried import flags, note
from kit.emit.readme import readme
from kit.emit.run_directory import files_of
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from tests.emit.plans import ADAPTED, DENSE, FSDP2, MEGATRON, ON_CPU, SFT, TORCH, ZERO2, ZERO3, commands, plan_of

QLORA = LoraSpec(rank=4, alpha=12, target_modules=("q_proj", "v_proj"), four_bit=True)
DPO = {"objective": "dpo", "seq_length": 1024}
TWO = {"cluster": "16xH100", "dp": 16}
NODES = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" own_script.py'
START = "accelerate launch --config_file accelerate.yaml own_script.py"
OWN = "accelerate launch --config_file accelerate.own_optimizer.yaml own_script.py"
BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 3"
ADAM = "--learning_rate 2e-05 --adam_beta1 0.8 --adam_beta2 0.97 --adam_epsilon 1e-07 --weight_decay 0.03"
TRAINER = f"{BATCH} --max_grad_norm 0.7 {ADAM} --bf16 true"
BY_DEEPSPEED = "deepspeed --no_local_rank --num_gpus 8 own_script.py"
OF_FILE = "--deepspeed ds_config.trainer.json"
LION8 = OptimizerSpec(name="lion-8bit")
ADAM8 = OptimizerSpec(name="adamw-8bit")
NO_EPOCHS = "has no `job.epochs`: TRL makes three unless you add `--num_train_epochs` or `--max_steps`."
COMMANDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "zero2 of rows": (
        ZERO2 | {"job": SFT | {"epochs": 2.5}},
        [
            f"{OWN} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {BATCH}",
            f"{START} SCRIPT {TRAINER} --gradient_checkpointing true --num_train_epochs 2.5",
            f"{BY_DEEPSPEED} SCRIPT {TRAINER} --gradient_checkpointing true --num_train_epochs 2.5 {OF_FILE}",
            # TRL turns bf16 and recomputation on where nothing is said
            f"{START} trl_sft.py --bf16 true --gradient_checkpointing true {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--num_train_epochs 2.5 --max_length 2048 --model DIR …",
        ],
    ),
    "zero2 in 8 bits": (
        ZERO2 | {"job": {"optimizer": ADAM8}},
        [
            f"{OWN} SCRIPT {BATCH} --learning_rate 0.0003",
            f"{START} SCRIPT {BATCH} --max_grad_norm 1.0 --learning_rate 0.0003 --adam_beta1 0.9 --adam_beta2 0.95 "
            "--adam_epsilon 1e-08 --weight_decay 0.1 --optim adamw_bnb_8bit --bf16 true --gradient_checkpointing true",
            f"{BY_DEEPSPEED} SCRIPT {BATCH} --max_grad_norm 1.0 --learning_rate 0.0003 --adam_beta1 0.9 --adam_beta2 "
            f"0.95 --adam_epsilon 1e-08 --weight_decay 0.1 --optim adamw_bnb_8bit --bf16 true "
            f"--gradient_checkpointing true {OF_FILE}",
        ],
    ),
    # the Trainer refuses to be told twice what FSDP2's file has, and bf16 on CPUs without use_cpu
    "fsdp2 on cpus": (
        FSDP2 | ON_CPU | {"recompute": "full", "job": SFT | {"objective": "pretrain"}},
        [
            f"{START} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {BATCH} --max_grad_norm 0.7 {ADAM}",
        ],
    ),
    "ddp on cpus": (
        FSDP2 | ON_CPU | {"zero_stage": 0, "recompute": "full", "job": SFT | {"objective": "pretrain"}},
        [
            f"{START} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {TRAINER} --gradient_checkpointing true --use_cpu true",
        ],
    ),
    "rows under ddp": (
        FSDP2 | {"zero_stage": 0, "job": SFT},
        [
            f"{START} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {TRAINER}",
            f"{START} trl_sft.py --bf16 true --gradient_checkpointing false {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--max_length 2048 --model DIR …",
        ],
    ),
    "zero2 on cpus": (
        ZERO2 | ON_CPU | {"recompute": "none", "job": SFT | {"objective": "pretrain", "precision": "fp16"}},
        [
            f"{OWN} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {BATCH}",
            f"{START} SCRIPT {TRAINER.replace('bf16', 'fp16')} --use_cpu true",
            f"{BY_DEEPSPEED} SCRIPT {TRAINER.replace('bf16', 'fp16')} --use_cpu true {OF_FILE}".replace(
                "num_gpus 8", "num_accelerators 2"
            ),
        ],
    ),
    "autocast in 8 bits": (
        FSDP2 | {"zero_stage": 0, "autocast": True, "job": SFT | {"objective": "pretrain", "optimizer": ADAM8}},
        [
            f"{START} SCRIPT {BATCH} --learning_rate 2e-05",
            f"{START} SCRIPT {BATCH} --max_grad_norm 0.7 --learning_rate 2e-05 --adam_beta1 0.9 --adam_beta2 0.95 "
            "--adam_epsilon 1e-08 --weight_decay 0.1 --optim adamw_bnb_8bit",
        ],
    ),
    "fp8": (
        FSDP2 | {"job": SFT | {"objective": "pretrain", "precision": "fp8"}},
        [f"{START} SCRIPT {BATCH} --learning_rate 2e-05", f"{START} SCRIPT {TRAINER}"],
    ),
    # TRL's trainer of preferences; FSDP2 shards floating-point tensors alone, all of one dtype
    "4 bits under FSDP2": (
        FSDP2 | {"job": SFT | DPO | {"lora": QLORA}},
        [
            f"{START} trl_dpo.py --bf16 true --gradient_checkpointing false {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--max_length 1024 --use_peft true --lora_r 4 --lora_alpha 12 --lora_dropout 0.0 --lora_target_modules "
            "q_proj v_proj --dtype bfloat16 --load_in_4bit true --bnb_4bit_quant_storage bfloat16 --model DIR …",
        ],
    ),
    "adapters of a reward": (
        ZERO2 | {"recompute": "none", "job": SFT | DPO | {"objective": "reward", "precision": "fp16", "lora": LoraSpec(
            rank=8, alpha=16.5, dropout=0.1, targets="attention", use_rslora=True, use_dora=True, four_bit=True)}},
        [
            f"{START} trl_reward.py --bf16 false --gradient_checkpointing false {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--fp16 true --max_length 1024 --use_peft true --lora_r 8 --lora_alpha 16 --lora_dropout 0.1 "
            "--lora_target_modules k_proj o_proj q_proj v_proj --dtype float16 --lora_task_type SEQ_CLS "
            "--use_rslora true --use_dora true --load_in_4bit true --model DIR …",
        ],
    ),
    "completions": (
        ZERO3 | {"recompute": "none", "job": SFT | {"objective": "grpo", "precision": "fp32", "lora": LoraSpec(),
                 "grpo": GrpoSpec(num_generations=4, beta=0.04, vllm_gpu_memory_utilization=0.35)}},
        [
            f"{START} trl_grpo.py --bf16 false --gradient_checkpointing false {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--num_generations 4 --max_completion_length 512 --beta 0.04 --use_vllm true --vllm_mode colocate "
            "--vllm_gpu_memory_utilization 0.35 --use_peft true --lora_r 16 --lora_alpha 32 --lora_dropout 0.0 "
            "--lora_target_modules all-linear --dtype float32 --model DIR …",
        ],
    ),
    "completions by transformers": (
        ZERO3 | {"recompute": "none", "job": SFT | {"objective": "grpo", "precision": "fp32"}},
        [
            f"{START} trl_grpo.py --bf16 false --gradient_checkpointing false {BATCH} --max_grad_norm 0.7 {ADAM} "
            "--num_generations 8 --max_completion_length 512 --beta 0.0 --model DIR …",
        ],
    ),
    "two nodes": (
        ZERO2 | TWO,
        [
            f"{OWN} SCRIPT {BATCH} --learning_rate 0.0003".replace("own_script.py", NODES),
            f"{START} SCRIPT {BATCH}".replace("own_script.py", NODES),
            f"{START} SCRIPT {BATCH} --max_grad_norm 1.0 --learning_rate 0.0003 --adam_beta1 0.9 --adam_beta2 0.95 "
            "--adam_epsilon 1e-08 --weight_decay 0.1 --bf16 true --gradient_checkpointing true".replace(
                "own_script.py", NODES
            ),
        ],
    ),
    "one process": (TORCH | {"cluster": "1xH100"}, []),
    "split tensors": (FSDP2 | {"dp": 4, "tp": 2}, []),
    "split tensors under zero": (ZERO2 | {"dp": 4, "tp": 2}, []),
    "megatron": (DENSE, []),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_these_commands_start_a_script(case: str) -> None:
    plan, expected = COMMANDS[case]
    made = plan_of(**plan)
    assert commands(readme(made)) == expected
    assert ("own_script.py" in files_of(made)) == bool(expected)


WITHOUT = "`save_pretrained` without `state_dict=accelerator.get_state_dict(model)`"
NO_FILE = "There is no file for your own accelerate script"
T5 = FSDP2 | {"model": "t5-small", "job": {"objective": "seq2seq", "seq_length": 512}}
LIGERS = "a fused linear cross entropy, such as Liger's"
SAYS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "one node": (
        FSDP2,
        ["# llama-3.1-8b on 8 x H100", "```bash\n./launch.sh\n```", "Under Slurm: `sbatch slurm.sbatch`.",
         "Run every command in this directory.", "stops with an error", WITHOUT, "## An accelerate script\n"],
        ["hostfile", "model_path", "Start each on every node", NO_FILE, "pretrain_gpt", "DummyOptim"],
    ),
    "two nodes": (
        ZERO3 | TWO,
        ["sbatch slurm.sbatch\n", "`hostfile`", "./launch_hosts.sh", "NODE_RANK=0 MASTER_ADDR=node-0 ./launch.sh",
         "RDZV_ENDPOINT=node-0:29500 ./launch_elastic.sh", "Start each on every node, with `NODE_RANK`",
         "writes empty tensors", WITHOUT, "DummyOptim", "clipped at 1 whether the script clips or not"],
        ["Under Slurm: `", "DeepSpeed's launcher"],
    ),
    "zero2": (ZERO2, ["By DeepSpeed's launcher"], [WITHOUT]),
    "fsdp2 at stage 2": (FSDP2 | {"zero_stage": 2}, [WITHOUT], []),
    "ddp": (FSDP2 | {"zero_stage": 0}, [], [WITHOUT, "Of the plan it does not get"]),
    "cpus": (FSDP2 | ON_CPU, ["./launch.sh"], ["Slurm"]),
    "rows": (
        ZERO2 | {"job": SFT},
        ["`model_path` of `run.yaml` is the model to fine-tune; a run without it starts from random weights, and says",
         "## TRL's SFTTrainer", "`trl_sft.py` is kit's examples/trl_sft.py", f"The plan {NO_EPOCHS}"],
        ["does not train this objective", "is refused"],
    ),
    "epochs": (ZERO2 | {"job": SFT | {"epochs": 0.5}}, ["--num_train_epochs 0.5"], ["has no `job.epochs`"]),
    "adapters": (
        FSDP2 | {"job": {"lora": ADAPTED}},
        ["a run without it is refused", "Adapters are no argument of accelerate or the Trainer",
         "model = AutoModelForCausalLM.from_pretrained(DIR, dtype=torch.bfloat16)\n",
         "LoraConfig(r=8, lora_alpha=24.0, lora_dropout=0.1, target_modules=['q_proj', 'v_proj'])",
         "**Of the plan it does not get adapters (job.lora; see above)**, unless the script does that itself."],
        ["BitsAndBytes", "4-bit weights", "TRL's"],
    ),
    "4 bits": (
        FSDP2 | {"job": {"precision": "fp16", "lora": LoraSpec(
            four_bit=True, use_dora=True, use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 2.0})}},
        ['BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16, '
         "bnb_4bit_quant_storage=torch.float16)", "target_modules='all-linear', use_rslora=True, use_dora=True, "
         "rank_pattern={'q_proj': 4}, alpha_pattern={'q_proj': 2.0})", "dtype=torch.float16, quantization_config=quant",
         "4-bit weights and adapters (job.lora; see above)"],
        [],
    ),
    "8 bits": (
        ZERO2 | {"job": SFT | {"lora": LoraSpec(eight_bit=True)}},
        ["quantized = BitsAndBytesConfig(load_in_8bit=True)\n", "8-bit weights and adapters (job.lora; see above)",
         "--load_in_8bit true"],
        ["4-bit", "bnb_4bit", "load_in_4bit"],
    ),
    "4 bits under zero": (
        ZERO2 | {"job": SFT | {"precision": "fp32", "lora": QLORA}},
        ["bnb_4bit_compute_dtype=torch.float32)\n"], ["quant_storage"],
    ),
    "what TRL has no argument for": (
        ZERO2 | {"job": DPO | {"lora": LoraSpec(alpha=16.5, rank_pattern={"q_proj": 4})}},
        ["**Of the plan it does not get job.lora.rank_pattern={'q_proj': 4}, job.lora.alpha=16.5**",
        "## TRL's DPOTrainer",
         "kit's own loop does not train this objective."],
        ["launch.sh", "alpha_pattern", "adapters (job.lora", "needs data"],
    ),
    "flags of the loop": (
        FSDP2 | {"recompute": "full", "chunked_loss": True, "compile_layers": True, "attention_kernel": "cudnn",
                 "tiled_mlp": True, "activation_offloading": True},
        ["does not get saved layer inputs on host, chunked loss, tiled MLP, compiled blocks, cudnn attention**",
         f"(chunked loss: {LIGERS}; compiled blocks: `torch.compile` of each block; cudnn attention: `attn_implem",
         " Without them a rank needs ", "; with them "],
        ["recompute: `model", "Without it"],
    ),
    # DDP has no file for recomputation; a Trainer is told by an argument
    "recomputation under ddp": (
        FSDP2 | {"zero_stage": 0, "recompute": "full"},
        ["does not get full recompute**, unless the script does that itself (full recompute: "
         "`model.gradient_checkpointing_enable()`). Without it a rank needs"],
        [],
    ),
    "selective recomputation": (ZERO2 | {"recompute": "selective"}, ["does not get selective recompute**"], []),
    "fp8": (FSDP2 | {"job": {"precision": "fp8"}}, ["does not get fp8 (bf16 instead)**"], []),
    "sgd of a Trainer": (
        FSDP2 | {"job": {"optimizer": OptimizerSpec(name="sgd")}},
        ["does not get the optimizer sgd (AdamW instead)**"], [],
    ),
    "sgd of the file": (
        ZERO3 | {"recompute": "none", "job": {"optimizer": OptimizerSpec(name="sgd")}}, [], ["does not get"],
    ),
    "8 bits of a Trainer": (
        FSDP2 | {"job": {"optimizer": LION8}}, [], ["AdamW instead"],
    ),
    "8 bits under zero": (
        ZERO2 | {"job": {"optimizer": LION8}},
        ["DeepSpeed has no optimizer with 8-bit moments: such a script makes `bitsandbytes.optim.Lion8bit`."],
        ["DummyOptim"],
    ),
    "8-bit adam under zero": (ZERO2 | {"job": {"optimizer": ADAM8}}, ["`bitsandbytes.optim.AdamW8bit`"], []),
    "split tensors": (FSDP2 | {"dp": 4, "tp": 2}, [NO_FILE], ["own_script.py"]),
    "one process": (TORCH | {"cluster": "1xH100"}, [], [NO_FILE]),
    "encoder and decoder": (T5, ["accelerate's FSDP2 does not train this encoder-decoder"], []),
    "encoder and decoder under ddp": (T5 | {"zero_stage": 0}, [], ["does not train this encoder-decoder"]),
    "encoder and decoder under zero": (
        ZERO2 | {"model": "t5-small", "job": T5["job"]}, [], ["does not train this encoder-decoder"],
    ),
    "megatron": (DENSE, ["## Megatron-LM's pretrain_gpt.py\n\n`pretrain_gpt.sh` starts it."], [NO_FILE, "own_script"]),
    "megatron's rows": (
        DENSE | {"job": SFT},
        ["There is no `pretrain_gpt.sh`: job.objective is sft, and pretrain_gpt.py trains on whole documents"], [],
    ),
    "a setting without a flag": (
        MEGATRON | {"model": "gemma-2-9b", "implementation": "local", "tp": 8},
        ["There is no `pretrain_gpt.sh`: it has no flag for transformer_config.layernorm_zero_centered_gamma"], [],
    ),
    "muon in fp32": (
        DENSE | {"job": {"precision": "fp32", "optimizer": OptimizerSpec(name="muon")}},
        ["--muon-fp32-matmul-prec takes low, medium or high, and fp32 is highest"], [],
    ),
    "muon": (DENSE | {"job": {"optimizer": OptimizerSpec(name="muon")}}, ["`pretrain_gpt.sh` starts it."], []),
    "layers of its own": (
        MEGATRON | {"model": "olmo-2-7b", "implementation": "local", "dp": 8},
        ["its model builder has no layers for olmo2"], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAYS)
def test_the_page_says_what_belongs_to_the_plan_and_nothing_else(case: str) -> None:
    plan, has, lacks = SAYS[case]
    page = readme(plan_of(**plan))
    assert ([text for text in has if text not in page], [text for text in lacks if text in page]) == ([], [])


def test_memory_without_what_a_script_does_not_get_is_told() -> None:
    """Without chunks the logits of two sequences of 4,096 tokens and 128,256 words are there at once, in bf16 and fp32
    with gradients: 8,192 x 128,256 x (2 + 4 + 2) bytes are 7.8 GiB more at least."""
    plan = plan_of("llama-3.2-1b", **FSDP2, chunked_loss=True)
    told = re.search(r"Without it a rank needs ([\d.]+) GiB of 75.1 usable; with it (\d+\.\d+)\.", readme(plan))
    assert told
    without, given = map(float, told.groups())
    assert given == pytest.approx(plan.predicted.peak_gib, abs=0.06)
    assert without > given + 7.8
    assert (flags(plan, trainer=True), flags(plan, trainer=True, trl=True)) == (["chunked_loss"], [])
    larger = plan_of("llama-3.2-1b", **FSDP2 | {"micro_batch_size": 64}, chunked_loss=True)
    assert "75.1 usable, which does not fit; with it" in readme(larger)


@pytest.mark.parametrize(
    ("plan", "trainer", "missing"),
    [
        (FSDP2 | {"recompute": "full"}, False, []),  # accelerate.yaml has it
        (ZERO2, False, ["recompute"]),
        (ZERO2, True, []),
        (FSDP2 | {"zero_stage": 0, "recompute": "full"}, False, ["recompute"]),
        (FSDP2 | {"offload_param": "cpu", "offload_optimizer": "cpu"}, False, []),
        (ZERO3 | {"recompute": "none", "zero_hpz": 4, "zero_quantized_weights": True, "autocast": True}, False, []),
        (FSDP2 | {"autocast": True}, False, ["autocast"]),
        (ZERO2 | {"recompute": "none", "gradient_compression": "bf16", "reduce_bucket_size": 7}, False, []),
        (FSDP2 | {"gradient_compression": "bf16"}, False, ["gradient_compression"]),
    ],
)
def test_a_flag_is_left_out_unless_a_file_or_an_argument_carries_it(
    plan: dict[str, Any], trainer: bool, missing: list[str]
) -> None:
    assert flags(plan_of(**plan), trainer) == missing


SGD = {"job": {"optimizer": OptimizerSpec(name="sgd")}}


@pytest.mark.parametrize(
    ("plan", "trainer", "trl", "missing"),
    [
        (FSDP2 | SGD, False, False, ""),  # an accelerate script makes its own optimizer
        (FSDP2 | SGD, True, False, "the optimizer sgd (AdamW instead)"),
        (ZERO3 | {"recompute": "none"} | SGD, True, False, ""),
        (FSDP2 | {"job": {"optimizer": ADAM8}}, True, False, ""),
        (FSDP2 | {"job": {"lora": ADAPTED}}, True, True, ""),
        (FSDP2 | {"job": {"lora": ADAPTED}}, True, False, "adapters (job.lora; see above)"),
        (FSDP2 | {"job": {"lora": LoraSpec(alpha=16.5)}}, True, True, "job.lora.alpha=16.5"),
        (
            FSDP2 | {"job": {"lora": LoraSpec(alpha_pattern={"a": 2.0})}},
            True,
            True,
            "job.lora.alpha_pattern={'a': 2.0}",
        ),
        (FSDP2 | {"job": {"precision": "fp8"}}, False, False, "fp8 (bf16 instead)"),
    ],
)
def test_what_of_a_job_a_script_does_not_get(plan: dict[str, Any], trainer: bool, trl: bool, missing: str) -> None:
    said = [f"**Of the plan it does not get {missing}**, unless the script does that itself."] if missing else []
    assert note(plan_of(**plan), trainer, trl) == said
