"""``kit plan`` of another trainer's file: what it reads, what it says, and what its patch does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kit.addons.configs.answer import Answer, answer, reads_back
from kit.addons.configs.entries import UNRESOLVED
from kit.addons.configs.known import recorded
from kit.addons.configs.patch import edited, unified_diff
from kit.addons.configs.reading import asked_of, source_of
from kit.addons.configs.shell_words import shell_lines
from kit.addons.configs.tables import tables
from kit.addons.configs.variants import variants
from kit.addons.configs.workload import Described
from kit.addons.lint.known_keys import trainer_arguments
from kit.cli.app import app
from kit.cost.memory.peak import peak_gib
from kit.errors import SpecError
from kit.specs.job import GrpoSpec, LoraSpec, OptimizerSpec
from tests.support.refusals import refusal

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

AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 64, local_batch_size: 2}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-8B}
distributed: {strategy: fsdp2, tp_size: 1, activation_checkpointing: true}
dataset: {seq_length: 2048}
optimizer: {_target_: torch.optim.AdamW}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a file, and names it from its own folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return Path(name)

    return write


def read(path: Path, gpus: str = "8xH100", row_tokens: int | None = None) -> Described:
    return asked_of(path, gpus, row_tokens).described({})


def layout(path: Path, gpus: str = "8xH100") -> dict[str, Any]:
    """Fields of a layout that are not its defaults."""
    made = read(path, gpus).workload.layout
    plain = {each.name: each.default for each in fields(made)}
    return {name: value for name, value in vars(made).items() if value != plain[name]}


ON_TORCH = {"engine": "torch", "implementation": "huggingface"}


READ: dict[str, tuple[str, str, str, dict[str, Any], dict[str, Any]]] = {
    # case → file, text, GPUs, the layout, and values of the job and of what was read
    "axolotl": ("axolotl.yaml", AXOLOTL, "2xRTX-4090", ON_TORCH | {
        "dp": 2, "recompute": "full", "micro_batch_size": 2, "gradient_accumulation_steps": 3, "cp_comm_type": "p2p"},
        {"seq_length": 4096, "global_batch_size": 12, "precision": "bf16", "objective": "sft", "packed": True,
         "lora": LoraSpec(rank=32, alpha=16.0, target_modules=("q_proj", "v_proj")),
         "optimizer": OptimizerSpec(name="adamw-8bit"), "gaps": [], "notes": (), "model": "qwen3-8b"}),
    # GPUs, the accumulation and the sizes of DeepSpeed's buffers that nobody wrote down; h is 3,584.
    "ms-swift": ("train.sh", SWIFT, "8xH100", {
        "engine": "deepspeed", "implementation": "huggingface", "zero_stage": 3, "dp": 4, "micro_batch_size": 2,
        "gradient_accumulation_steps": 2, "recompute": "full", "reduce_bucket_size": 3584**2,
        "stage3_prefetch_bucket_size": int(0.9 * 3584**2), "stage3_param_persistence_threshold": 10 * 3584,
        "stage3_max_live_parameters": 10**9, "cp_comm_type": "a2a"},
        {"seq_length": 2048, "notes": ("the file starts 4 processes, and --gpus 8xH100 has 8 GPUs: judged on 4",),
         "gpus": 4}),
    "as many GPUs as processes": ("train.sh", SWIFT, "4xH100", {}, {"notes": (), "gpus": 4}),
    "megatron sft": ("train.sh", MEGATRON_SWIFT, "8xH100", {
        "engine": "megatron", "implementation": "transformer_engine", "dp": 4, "tp": 2, "ep": 4, "sp": True,
        "zero_stage": 1, "recompute": "selective", "gradient_accumulation_steps": 4},
        {"gaps": [("least", "the fullest rank's experts are counted as the mean")]}),
    # 16 rows a step, where nothing is said; sequence parallelism is read with tensor parallelism alone
    "megatron sft of a dense model": ("dense.sh", "NPROC_PER_NODE=4 megatron sft --model Qwen/Qwen3-8B "
        "--tensor_model_parallel_size 1 --sequence_parallel true --recompute_granularity full\n", "4xH100", {
        "engine": "megatron", "implementation": "transformer_engine", "dp": 4, "zero_stage": 1, "recompute": "full",
        "gradient_accumulation_steps": 4}, {}),
    # Under FSDP2 it trains the 16 bits that it loads, unless it loads fp32.
    "automodel": ("sft.yaml", AUTOMODEL, "8xH100", ON_TORCH | {
        "dp": 8, "zero_stage": 3, "recompute": "full", "cp_comm_type": "p2p", "micro_batch_size": 2,
        "gradient_accumulation_steps": 4}, {"packed": False, "seq_length": 2048, "keys": ["states"]}),
    "automodel in fp32": ("sft.yaml", AUTOMODEL.replace("pretrained_model", "torch_dtype: float32, pretrained_model"),
                          "8xH100", {}, {"gaps": [], "lora": None}),
    "automodel's adapters": ("sft.yaml", AUTOMODEL + "peft: {_target_: nemo_automodel.PeftConfig, dim: 8, alpha: 32}\n",
                             "8xH100", {}, {"lora": LoraSpec(rank=8, alpha=32.0)}),
    **{f"automodel packs {size}": ("sft.yaml", f"{AUTOMODEL}packed_sequence: {{packed_sequence_size: {size}}}\n",
                                   "8xH100", {}, {"packed": size > 0, "seq_length": size or 2048})
       for size in (0, 8192)},
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_what_a_file_says(case: str, file: Callable[[str, str], Path]) -> None:
    name, text, gpus, planned, expected = READ[case]
    path = file(name, text)
    found = read(path, gpus)
    work = found.workload
    seen = vars(work.job) | {
        "gaps": [(gap.bound, gap.why) for gap in found.gaps], "keys": [gap.key for gap in found.gaps],
        "packed": found.packed, "notes": found.notes, "model": work.model.name, "gpus": work.cluster.num_gpus,
    }  # fmt: skip
    assert not planned or layout(path, gpus) == planned
    assert {key: seen[key] for key in expected} == expected


SILENT = {
    "axolotl.yaml": (
        "base_model: Qwen/Qwen3-8B\n",
        512,
        {"states"},
        ON_TORCH | {"dp": 8, "cp_comm_type": "p2p"},
        "bf16",
        None,
    ),
    "factory.yaml": (
        FACTORY,
        2048,
        set[str](),
        ON_TORCH | {"dp": 8, "recompute": "full", "micro_batch_size": 8},
        "bf16",
        LoraSpec(rank=4, alpha=8.0),
    ),
    "v1.yaml": (
        "model: Qwen/Qwen3-8B\nmodel_class: llm\ndist_config: {name: fsdp2}\nglobal_batch_size: 32\n",
        2048,
        set[str](),
        ON_TORCH
        | {"dp": 8, "recompute": "full", "zero_stage": 3, "cp_comm_type": "a2a", "gradient_accumulation_steps": 4},
        "bf16",
        None,
    ),
    "swift.yaml": (
        "model: Qwen/Qwen3-8B\ntuner_type: lora\n",
        40960,
        set[str](),
        ON_TORCH | {"dp": 8, "recompute": "full", "cp_comm_type": "a2a", "gradient_accumulation_steps": 2},
        "bf16",
        LoraSpec(rank=8, alpha=32.0, dropout=0.05),
    ),
}
"""File → its text, and what its program does where it says nothing: length, gaps, layout, precision, adapters."""


@pytest.mark.parametrize("name", SILENT)
def test_what_a_file_does_not_say_is_the_programs_own(file: Callable[[str, str], Path], name: str) -> None:
    text, length, gaps, planned, precision, lora = SILENT[name]
    path = file(name, text)
    job = read(path).workload.job
    assert layout(path) == planned
    assert (job.seq_length, job.precision, job.lora) == (length, precision, lora)
    assert {gap.key for gap in read(path).gaps} == gaps


@pytest.mark.parametrize(
    ("name", "decided"),
    {
        "zero1": ("deepspeed", 1, "none", "none"),
        "zero2": ("deepspeed", 2, "none", "none"),
        "zero2_offload": ("deepspeed", 2, "cpu", "none"),
        "zero3": ("deepspeed", 3, "none", "none"),
        "zero3_offload": ("deepspeed", 3, "cpu", "cpu"),
    }.items(),
)
def test_files_that_a_program_brings(file: Callable[[str, str], Path], name: str, decided: tuple[Any, ...]) -> None:
    made = read(file("train.sh", SWIFT.replace("zero3", name)), "4xH100").workload.layout
    assert (made.engine, made.zero_stage, made.offload_optimizer, made.offload_param) == decided


GRPO = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B --tuner_type full --beta 0.04 {} \\\n"


@pytest.mark.parametrize(("words", "share"), [("--use_vllm true", 0.9), ("--use_vllm true --vllm_mode server", None)])
def test_grpo_shares_the_gpu_with_a_vllm_of_its_own(
    file: Callable[[str, str], Path], words: str, share: float | None
) -> None:
    text = GRPO.format(words) + " --num_generations 4 --max_completion_length 1024 --max_length 2048\n"
    assert read(file("grpo.sh", text)).workload.job.grpo == GrpoSpec(
        num_generations=4, max_completion_length=1024, beta=0.04, vllm_gpu_memory_utilization=share
    )


def test_rows_that_are_not_packed_are_a_worst_case(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL.replace("sample_packing: true", "sample_packing: false"))
    packed = answer(file("packed.yaml", AXOLOTL), "1xH100", row_tokens=256)
    assert (packed.worst_case, packed.plan.job.seq_length) == (False, 4096)
    worst, usual = answer(path, "1xH100"), answer(path, "1xH100", row_tokens=256)
    assert (worst.worst_case, worst.bound, worst.plan.job.seq_length) == (True, "most", 4096)
    assert (usual.worst_case, usual.bound, usual.plan.job.seq_length) == (False, None, 256)
    assert usual.now.peak_gib < worst.now.peak_gib
    assert answer(path, "1xH100", row_tokens=9000).plan.job.seq_length == 4096


FSDP = "fsdp: [full_shard, auto_wrap]\nfsdp_config:\n  fsdp_offload_params: true\n  activation_checkpointing: true\n"
MEANINGS = {
    "fsdp": (FSDP, {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu", "recompute": "full"}),
    "fsdp 2": ("fsdp_version: 2\nfsdp_config: {reshard_after_forward: false}\n", {"zero_stage": 2}),
    "fsdp by name": ("fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", {"zero_stage": 2}),
    "offload": ("gradient_checkpointing: offload\n", {"recompute": "full", "activation_offloading": True}),
    "cce": ("plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n", {"chunked_loss": True}),
    "no cce": ("cut_cross_entropy: false\n", {}),
    "yes": ("gradient_checkpointing: yes\n", {"recompute": "full"}),
    "quoted": ("micro_batch_size: '4'\n", {"micro_batch_size": 4}),
    "cp": ("context_parallel_size: 2\nfsdp_version: 2\n", {"cp": 2, "dp": 4, "zero_stage": 3}),
}


@pytest.mark.parametrize("case", MEANINGS)
def test_what_an_axolotl_key_decides(file: Callable[[str, str], Path], case: str) -> None:
    text, decided = MEANINGS[case]
    path = file("axolotl.yaml", f"base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 8\nlora_alpha: 16\n{text}")
    assert layout(path) == ON_TORCH | {"dp": 8, "cp_comm_type": "p2p"} | decided


GAPS = {
    "load_in_8bit: true": ("most", "load_in_8bit"),
    "optimizer: paged_adamw_8bit": ("most", "optimizer"),
    "lora_target_modules: [q_proj, lm_head]": ("least", "lora_target_modules"),
    "lora_modules_to_save: [embed_tokens]": ("least", "lora_modules_to_save"),
    "expert_parallel_size: 4": ("most", "expert_parallel_size"),
    "attn_implementation: eager": ("least", "attn_implementation"),
    "quantize_moe_experts: true": ("most", "quantize_moe_experts"),
    "peft_layers_to_transform: [0, 1]": ("most", "peft_layers_to_transform"),
}


@pytest.mark.parametrize("line", GAPS)
def test_what_kit_does_not_model_makes_the_answer_a_bound(file: Callable[[str, str], Path], line: str) -> None:
    found = read(file("axolotl.yaml", f"{AXOLOTL}{line}\n"))
    assert [(gap.bound, gap.key) for gap in found.gaps] == [GAPS[line]]
    assert found.gaps[0].line == AXOLOTL.count("\n") + 1


def test_a_bound_is_never_called_a_fit(file: Callable[[str, str], Path]) -> None:
    """Exit code 0 for what certainly fits alone."""
    verdicts = {}
    for gpu in ("RTX-4090", "H200"):
        for line in ("", "load_in_8bit: true", "lora_modules_to_save: [lm_head]"):
            found = answer(file("axolotl.yaml", f"{AXOLOTL}{line}\n".replace("size: 2", "size: 4")), f"1x{gpu}")
            verdicts[gpu, line[:6]] = (found.verdict, found.exit_code)
    assert verdicts == {
        ("RTX-4090", ""): ("does not fit", 1),
        ("RTX-4090", "load_i"): ("may fit", 1),
        ("RTX-4090", "lora_m"): ("does not fit", 1),
        ("H200", ""): ("fits", 0),
        ("H200", "load_i"): ("fits", 0),
        ("H200", "lora_m"): ("may not fit", 1),
    }


REFUSED = {
    "qat": ("axolotl.yaml", AXOLOTL + "qat: {weight_dtype: int8}\n", "axolotl.yaml:19: qat.weight_dtype=int8"),
    "frozen": ("axolotl.yaml", AXOLOTL + "unfrozen_parameters: [lm_head]\n", "a partly frozen model"),
    "value": ("axolotl.yaml", AXOLOTL.replace("bf16: auto", "bf16: maybe"), "axolotl.yaml:16: bf16=maybe: kit knows"),
    "optimizer": ("f.yaml", FACTORY + "optim: galore_adamw\n", "optim=galore_adamw: GaLore"),
    "freeze": ("f.yaml", FACTORY.replace("type: lora", "type: freeze"), "a partly frozen model"),
    "file": ("f.yaml", FACTORY + "deepspeed: there/none.json\n", "neither here nor above"),
    "spread": ("s.sh", SWIFT.replace("NPROC_PER_NODE=$GPUS \\\n", ""), "device_map spreads the layers"),
    "variable": ("s.sh", SWIFT.replace("${LENGTH:-2048}", "$LENGTH"), "s.sh:9: max_length is a variable"),
    "tower": ("s.sh", SWIFT.replace("zero3", "zero3 --freeze_vit false"), "a trained vision tower"),
    "fsdp": ("s.sh", MEGATRON_SWIFT.strip() + " --use_megatron_fsdp true\n", "Megatron-FSDP"),
    "batch": ("s.sh", MEGATRON_SWIFT.replace("size 16", "size 15"), "15 is no multiple of micro batch 1 · 4 ranks"),
    "stages": ("pp.yaml", AUTOMODEL.replace("tp_size: 1", "pp_size: 2"), "pipeline parallelism on torch"),
    "no model": ("axolotl.yaml", "base_model:\nsequence_len: 8\n", "the file names no model"),
    "nothing": ("s.sh", "echo swift sft\npip install x\n", "no command that kit knows"),
    "another": (
        "a.yaml",
        "trainer: 1\nexp_manager: 2\nmodel: qwen3-8b\n",
        "NeMo; kit plan reads those of Automodel, axolotl, ",
    ),
    "accelerate": ("a.yaml", "distributed_type: FSDP\n", "kit lint a.yaml judges it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(file: Callable[[str, str], Path], case: str) -> None:
    name, text, why = REFUSED[case]
    assert why in refusal(SpecError, read, file(name, text.replace("echo swift sft", "echo nothing")))


ZERO_2 = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 12345, "offload_optimizer": {"device": "cpu"}}}
LINKED = {
    "mine.json": json.dumps(ZERO_2),
    "acc.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
    "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_offload_params: true}\n",
}
LINKS: dict[str, tuple[str, dict[str, Any]]] = {
    "f.yaml": (FACTORY + "deepspeed: mine.json\n", {
        "engine": "deepspeed", "zero_stage": 2, "reduce_bucket_size": 12345, "offload_optimizer": "cpu",
        "offload_param": "none"}),
    "s.sh": (SWIFT.replace("--deepspeed zero3", f"--deepspeed '{json.dumps(ZERO_2)}'"), {
        "zero_stage": 2, "offload_optimizer": "cpu"}),
    "t.sh": ("accelerate launch --config_file acc.yaml src/train.py --model_name_or_path Qwen/Qwen3-8B --bf16 true\n", {
        "engine": "torch", "zero_stage": 2, "dp": 4, "offload_param": "cpu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_linked_files(name: str, file: Callable[[str, str], Path]) -> None:
    for linked, text in LINKED.items():
        file(linked, text)
    text, decided = LINKS[name]
    made = vars(read(file(name, text), "4xH100").workload.layout)
    assert {key: made[key] for key in decided} == decided


def test_a_misspelt_key_is_found(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL + "sequense_len: 8192\nwandb_project: mine\n")
    (finding,) = answer(path, "8xH100").findings
    assert (finding.rule, finding.line, finding.key) == ("unknown-key", 19, "sequense_len")
    assert "did you mean sequence_len?" in finding.fix


# ---------------------------------------------------------------- shell

WORDS = {
    "run 'b c' \"d $X\" e\\ f": ["run", "b c", "d 1", "e f"],
    "run --x=$X ${Y:-7} ${Z:=q} ${X:-9} $UNSET": ["run", "--x=1", "7", "q", "1", None],
    "run $((X + 15)) $(expr 16 / $X) $(nproc) `date`": ["run", "16", "16", None, None],
    'A=(--a 1\n --b "2 3" # why\n)\nrun "${A[@]}" ${A[*]} end': ["run", *["--a", "1", "--b", "2 3"] * 2, "end"],
    'A=(1); A+=(2)\nrun "${A[@]}"': ["run", "1", "2"],
    'O="--a 1 --b"\nrun $O "$O"': ["run", "--a", "1", "--b", "--a 1 --b"],
    "run a > log.txt 2>&1": ["run", "a"],
    "run a \\\n  b # c \\\n": ["run", "a", "b"],
    'if [ -z "$Q" ]; then Q=2; fi\nrun $Q': ["run", "2"],
    "Q=1\nif true; then Q=2; fi\nrun $Q": ["run", None],
    "for Q in 1 2; do\nrun $Q\ndone": ["run", None],
    "cat <<EOF\nrun wrong\nEOF\nrun right": ["run", "right"],
    "Q=3 run $Q": ["run", None],
    "run '$X' \"\\$X\"": ["run", "$X", "$X"],
    'run "$@" a': ["run", "a"],
    "export Q=5\nrun x$Q": ["run", "x5"],
}


@pytest.mark.parametrize("script", WORDS)
def test_words_of_a_shell(script: str) -> None:
    (found,) = [line for line in shell_lines(f"X=1\n{script}\n") if line.words and line.words[0].value == "run"]
    assert [word.value for word in found.words] == WORDS[script]


def test_flags_of_a_command() -> None:
    text = "X=1\nswift sft --model $M --a 1 2 --flag --b=3 --four-bit true --c '' --system 'x=y'\n"
    source, _ = source_of(text, "s.sh")
    values = {key: entry.value for key, entry in source.entries.items() if not key.startswith("env.")}
    assert values == {
        "model": UNRESOLVED, "a": ["1", "2"], "flag": True, "b": "3", "four_bit": "true", "c": "", "system": "x=y"
    }  # fmt: skip
    b = source.entries["b"]
    assert (text[b.start : b.end], b.line, source.entries["env.X"].value) == ("3", 2, "1")


# ---------------------------------------------------------------- patches

EDITS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "scalar": ("a.yaml", "a: 1  # one\nbase_model: x\n", {"a": 22}, "a: 22  # one\nbase_model: x\n"),
    "switch": ("a.yaml", "base_model: x\na: True # so\n", {"a": False}, "base_model: x\na: false # so\n"),
    "empty": ("a.yaml", "base_model: x\na:\nb: 2\n", {"a": 3}, "base_model: x\na: 3\nb: 2\n"),
    "new": ("a.yaml", "base_model: x  # m\n# end\n", {"b": "y/z.json"}, "base_model: x  # m\nb: y/z.json\n# end\n"),
    "two": ("a.yaml", "base_model: x\n", {"b": 1, "c": 2}, "base_model: x\nb: 1\nc: 2\n"),
    "no newline": ("a.yaml", "base_model: x", {"b": 1}, "base_model: x\nb: 1"),
    "list last": (
        "a.yaml",
        "base_model: x\nl:\n  - 1\n  - 2\n\n# c\n",
        {"b": 1},
        "base_model: x\nl:\n  - 1\n  - 2\nb: 1\n\n# c\n",
    ),
    "section": (
        "a.yaml",
        "base_model: x\ns:\n    p: 1 # p\nq: 2\n",
        {"s.r": 3},
        "base_model: x\ns:\n    p: 1 # p\n    r: 3\nq: 2\n",
    ),
    "new section": ("a.yaml", "base_model: x\n", {"s.r": 3}, "base_model: x\ns:\n  r: 3\n"),
    "empty section": ("a.yaml", "base_model: x\ns:\nq: 2\n", {"s.r": 3}, "base_model: x\ns:\n  r: 3\nq: 2\n"),
    "flow": ("a.yaml", "base_model: x\ns: {p: 1}\n", {"s.r": True}, "base_model: x\ns: {p: 1, r: true}\n"),
    "json": (
        "a.json",
        '{\n  "base_model": "x",\n  "a": 1\n}\n',
        {"a": "z", "b": True},
        '{\n  "base_model": "x",\n  "a": "z",\n  "b": true\n}\n',
    ),
    "flag": ("s.sh", "swift sft --a 1 \\\n  --b 2 # c\n", {"a": 5}, "swift sft --a 5 \\\n  --b 2 # c\n"),
    "equals": ("s.sh", "swift sft --a='1' --b 2\n", {"a": 5}, "swift sft --a=5 --b 2\n"),
    "new flag": (
        "s.sh",
        "swift sft \\\n  --a 1\necho\n",
        {"b_c": "x y"},
        "swift sft \\\n  --a 1 \\\n  --b_c 'x y'\necho\n",
    ),
    "variable": ("s.sh", 'A=1\nswift sft --a "$A" --b $A\n', {"a": 5}, "A=1\nswift sft --a 5 --b $A\n"),
    "in a variable": ("s.sh", 'O="--a 1"\nswift sft $O\n', {"a": 5}, 'O="--a 1"\nswift sft $O \\\n    --a 5\n'),
    "array": (
        "s.sh",
        'A=(--a 1 # x\n --b 2)\nswift sft "${A[@]}"\n',
        {"a": 5},
        'A=(--a 5 # x\n --b 2)\nswift sft "${A[@]}"\n',
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_changes_the_value_alone(case: str, tmp_path: Path) -> None:
    name, before, values, after = EDITS[case]
    source, _ = source_of(before, name)
    assert edited(source, values) == after
    again, _ = source_of(after, name)
    assert {key: str(again.entries[key].value).lower() for key in values} == {
        key: str(value).lower() for key, value in values.items()
    }
    (tmp_path / name).write_text(before, encoding="utf-8")
    diff = unified_diff(source, name, values)
    subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / name).read_text(encoding="utf-8") == after


TIGHT = {
    "axolotl.yaml": (AXOLOTL.replace("micro_batch_size: 2", "micro_batch_size: 16"), "2xRTX-4090"),
    "f.yaml": (FACTORY.replace("type: lora", "type: full"), "8xA100-40"),
    "train.sh": (SWIFT.replace("zero3", "zero2").replace("7B", "14B"), "4xH100"),
    "megatron.sh": (MEGATRON_SWIFT, "8xH100"),
}
"""Files that do not fit where they are asked about."""


@pytest.fixture(params=TIGHT)
def tight(request: pytest.FixtureRequest, file: Callable[[str, str], Path]) -> Answer:
    text, gpus = TIGHT[request.param]
    return answer(file(request.param, text), gpus)


def test_the_nearest_change_fits_and_its_patch_reads_back(tight: Answer, tmp_path: Path) -> None:
    assert not tight.now.fits
    assert tight.nearest is not None
    subprocess.run(["patch", "-p1", "-s"], input=tight.patch, text=True, cwd=tmp_path, check=True)
    again = answer(tight.path, tight.asked.gpus)
    assert again.now.fits
    assert again.now.described.workload == tight.nearest.described.workload
    assert again.now.peak_gib == pytest.approx(peak_gib(tight.nearest.described.workload))
    fewer = [each for each in variants(tight.asked, tight.now) if len(each.values) < len(tight.nearest.values)]
    assert not any(each.fits and each.peak_gib * 1.08 < 78 and each.host_is_known for each in fewer if len(fewer) < 400)


def test_a_change_keeps_what_the_file_asks_for(tight: Answer) -> None:
    for found in (tight.nearest, tight.fastest):
        if found is not None:
            work = found.described.workload
            assert work.job == tight.plan.job
            assert work.layout.global_batch_size == tight.plan.layout.global_batch_size
            assert work.layout.world_size == tight.plan.layout.world_size
            assert reads_back(tight.asked, found)
    if tight.fastest is not None and tight.nearest is not None:
        assert tight.fastest.step_s <= tight.nearest.step_s * 1.03


def test_a_patch_that_would_not_read_back_is_not_printed(tight: Answer) -> None:
    """Such as one of a value that another key overrules."""
    assert tight.nearest is not None
    values = dict(tight.nearest.values)
    values.popitem()
    assert not reads_back(tight.asked, type(tight.nearest)(**{**vars(tight.nearest), "values": values}))


# ---------------------------------------------------------------- the command


def kit(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    ("name", "gpus", "code", "said"),
    [
        ("axolotl.yaml", "2xH200", 0,
         ["axolotl.yaml: axolotl's, as it is", "verdict   fits", "GiB       weights", "micro-batch 2 × 3"]),
        ("big.yaml", "2xRTX-4090", 1, ["does not fit"]),
    ],
)  # fmt: skip
def test_the_command(name: str, gpus: str, code: int, said: list[str], file: Callable[[str, str], Path]) -> None:
    """A bar is not longer than the GPU."""
    asked = ("plan", file(name, AXOLOTL if code == 0 else TIGHT["axolotl.yaml"][0]), "--gpus", gpus)
    shown, data = kit(*asked), json.loads(kit(*asked, "--json").output)
    assert (shown.exit_code, [text for text in said if text not in shown.output]) == (code, [])
    assert max(map(len, shown.output.splitlines())) <= 110
    assert (data["verdict"] == "fits", data["bound"], data["gaps"], data["findings"]) == (code == 0, None, [], [])
    assert data["plan"]["layout"]["dp"] == 2
    if code:
        patch = kit(*asked, "--patch")
        assert (patch.exit_code, patch.output.startswith(f"--- a/{name}\n+++ b/{name}\n")) == (0, True)
        assert re.search(r"^-micro_batch_size: 16$", patch.output, re.M)


def test_the_command_that_is_printed_patches_a_file_in_another_folder(
    file: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = file("a b.yaml", TIGHT["axolotl.yaml"][0]).resolve()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = kit("plan", big, "--gpus", "2xRTX-4090").output
    typed = re.sub(r"\s+", " ", said[said.index("next ") + 4 :].replace("kit plan", f"{sys.executable} -m kit plan", 1))
    subprocess.run(typed, shell=True, check=True)
    assert kit("plan", big, "--gpus", "2xRTX-4090").exit_code == 0


def test_what_the_command_refuses(file: Callable[[str, str], Path]) -> None:
    path = file("axolotl.yaml", AXOLOTL)
    assert "--gpus 8xH100" in refusal(SpecError, answer, path, None)
    for words, why in (
        ((path,), "--gpus is missing"),
        (("qwen3-8b", "--gpus", "8xH100", "--patch"), "are of another trainer's file"),
        (("qwen3-8b", "--gpus", "8xH100", "--row-tokens", 8), "are of another trainer's file"),
    ):
        said = kit("plan", *words)
        assert isinstance(said.exception, SpecError)
        assert why in str(said.exception)


# ---------------------------------------------------------------- tables


def test_every_key_of_a_table_is_a_setting_of_its_program() -> None:
    for table in tables():
        if table.target:
            names = recorded(table.target) | set(trainer_arguments().defaults)
            own = {key for key in table.keys if not key.startswith(("env.", "launcher.")) and key != "command"}
            unknown = {key for key in own if not {key, key.split(".")[-1], key.split(".")[0]} & names}
            assert unknown == set(), table.program
            assert {*table.choices, *table.batch} <= table.keys.keys()
