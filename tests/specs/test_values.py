"""Right values of what specs compute, and the refusal of each value that is wrong: worked out by hand, a row each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.errors import SpecError
from kit.specs import strict_yaml, text, text_files
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.epoch import Epoch, epoch_on_disk
from kit.specs.families import families_where, families_with
from kit.specs.hf_floats import decoded
from kit.specs.job import BalancingSpec, GrpoSpec, JobSpec, LoraSpec, OptimizerSpec, trl_objective
from kit.specs.layout import Layout, Pins, mlp_tiles
from kit.specs.model import Approximation, LatentAttention, ModelSpec
from kit.specs.run import (
    BlendedSetSpec,
    CheckpointSpec,
    DataSpec,
    RunSpec,
    ScheduleSpec,
    StreamSpec,
    absolute_paths,
    run_paths,
    with_paths,
)
from kit.specs.sizes import _aspect, _parameters, is_size, shape_of_size
from kit.specs.validation import FrozenMap, adapter, changed, thawed, trusted
from tests.support.files import file_with
from tests.support.refusals import refusal

LLAMA = ModelSpec(
    name="m", family="llama", num_layers=7, hidden_size=96, ffn_hidden_size=200, num_attention_heads=6,
    num_key_value_heads=3, head_dim=20, vocab_size=100, max_position_embeddings=512,
)  # fmt: skip
LATENT = LatentAttention(kv_lora_rank=5, nope_head_dim=11, rope_head_dim=4, value_head_dim=9)


def model(**fields: Any) -> ModelSpec:
    return dataclasses.replace(LLAMA, **fields)


EXPERTS = {"num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 30}
DEEPSEEK = {**EXPERTS, "family": "deepseek_v3", "num_key_value_heads": 6, "head_dim": 15, "latent": LATENT,
            "num_shared_experts": 3, "first_dense_layers": 2, "router_groups": 4, "router_top_groups": 2}  # fmt: skip
WINDOWED = {"family": "gemma2", "sliding_window": 64, "full_attention_every": 3, "query_pre_attn_scalar": 20}
T5 = {"family": "t5", "num_key_value_heads": 6, "encoder_layers": 4, "relative_attention_buckets": 32,
      "feed_forward_proj": "gated-gelu", "rope_theta": None}  # fmt: skip
APPROXIMATE = Approximation(
    config={"model_type": "mine"}, counted=True, parameters=10, tables=1, matrices=9, attention_layers=3,
    windowed_layers=2, mlp_layers=1, norm="layernorm",
)  # fmt: skip
NEOX = {"family": "gpt_neox", "num_key_value_heads": 6, "head_dim": 16}
OTHER = {"family": "transformers", "approximate": APPROXIMATE, "sliding_window": 64}
STREAM = {"path": "json", "data_files": ("a.jsonl", "s3://b/c.jsonl"), "tokenizer": "tok"}
BLEND = FrozenMap({"web": BlendedSetSpec(path="w", weight=1.0), "code": BlendedSetSpec(path="s3://b/c", weight=2.0)})
OF_TEXT = StreamSpec(**STREAM)
LAYOUT = Layout(engine="megatron", implementation="local")
PATHS = ("data.blend.web.path", "data.validation", "data.validation_sets.x", "model_path", "nvme_path")
RUN = RunSpec(
    model_path="m", nvme_path="n",
    data=DataSpec(blend=BLEND, validation="v", validation_sets=FrozenMap({"x": "vx"})),
)  # fmt: skip

VALUES: dict[str, tuple[Callable[[], Any], Any]] = {
    # A model's widths: 6 query heads of 20, 3 of keys; with latent attention values are 9 wide.
    "query, key, value width": (lambda: (LLAMA.query_width, LLAMA.key_value_width, LLAMA.value_width), (120, 60, 120)),
    "latent widths": (lambda: (LATENT.query_head_dim, model(**DEEPSEEK).value_width), (15, 54)),
    "width of an MLP, an expert, all shared experts": (
        lambda: (LLAMA.mlp_width, model(**DEEPSEEK).mlp_width, model(**DEEPSEEK).shared_ffn_hidden_size), (200, 30, 90)
    ),
    "layers with experts": (lambda: [model(**DEEPSEEK).has_experts(i) for i in range(4)], [False, False, True, True]),
    "a dense model has none": (lambda: LLAMA.has_experts(0), False),
    "windows of every layer but each third": (
        lambda: [model(**WINDOWED).window(i) for i in range(7)], [64, 64, None, 64, 64, None, 64]
    ),
    "windows of the first layers of an approximation": (
        lambda: [model(**OTHER).window(i) for i in range(3)], [64, 64, None]
    ),
    "a window of all layers": (lambda: model(family="mistral", sliding_window=64).window(2), 64),
    "whether a window cuts": (
        lambda: [model(**WINDOWED).windowed(n) for n in (63, 64, 65)] + [LLAMA.windowed(10**6)],
        [False, False, True, False],
    ),
    "a window of no layer cuts nothing": (
        lambda: model(**{**OTHER, "approximate": changed(APPROXIMATE, windowed_layers=0)}).windowed(100), False
    ),
    "layers with RoPE": (
        lambda: [model(family="smollm3", no_rope_every=3, head_dim=16).rotates(i) for i in range(4)],
        [True, True, False, True],
    ),
    "learned positions do not rotate": (
        lambda: (load_model("gpt2").rotates(0), load_model("gpt2").learned_positions), (False, True)
    ),
    "RoPE is not learned": (lambda: (LLAMA.rotates(6), LLAMA.learned_positions), (True, False)),
    "biases of llama, qwen2, gpt2": (
        lambda: [(each.qkv_bias, each.linear_bias) for each in map(load_model, ("llama-3.1-8b", "qwen2.5-7b", "gpt2"))],
        [(False, False), (True, False), (True, True)],
    ),
    "own traits": (
        lambda: (model(family="glm4_moe", **EXPERTS, biases="qkv").qkv_bias, model(**T5).gated_mlp,
                 model(**{**T5, "feed_forward_proj": "relu"}).gated_mlp,
                 (lambda traits: (traits.norm, traits.ulysses, traits.prefix))(model(**OTHER).traits)),
        (True, True, False, ("layernorm", False, "")),
    ),
    "two stacks": (lambda: (model(**T5).is_encoder_decoder, LLAMA.is_encoder_decoder), (True, False)),
    "transformers' name": (lambda: (LLAMA.model_type, model(**OTHER).model_type), ("llama", "mine")),
    "equal models have one hash": (lambda: hash(model(num_layers=8)) == hash(model(num_layers=8)) != hash(LLAMA), True),
    "families that tie, or may have a trait": (
        lambda: (families_where("ties_always"), families_with("encoder_layers"), families_with("no_rope_every")),
        (("t5",), ("t5", "bart", "blenderbot"), ("smollm3",)),
    ),
    # A layout of dp 5, tp 2, pp 3, cp 7; experts: 5 * 7 * 2 = edp * 10 * 1.
    "ranks": (lambda: LAYOUT.but(dp=5, tp=2, pp=3, cp=7).world_size, 210),
    "replicas of experts": (
        lambda: [LAYOUT.but(dp=dp, tp=2, cp=7, ep=5, etp=2).expert_dp for dp in (5, 15, 1)],
        [7, 21, 1],
    ),
    "sequences of a step": (
        lambda: Layout(engine="torch", implementation="huggingface", dp=5, tp=3, micro_batch_size=2,
                       gradient_accumulation_steps=7).global_batch_size, 70,
    ),
    "tiles, rounded up": (lambda: [mlp_tiles(tokens, 96) for tokens in (95, 96, 97, 960)], [1, 1, 2, 10]),
    "offload to disks": (
        lambda: [Pins(offload_param="nvme").but(tp=2), Layout(engine="deepspeed", implementation="huggingface").but(
            offload_optimizer="nvme").uses_nvme, Layout(engine="deepspeed", implementation="huggingface").uses_nvme],
        [Pins(offload_param="nvme", tp=2), True, False],
    ),
    # A job: pairs have two answers.
    "tokens of a step": (
        lambda: [JobSpec(objective=objective, seq_length=7, global_batch_size=3).tokens_per_step
                 for objective in ("sft", "dpo", "reward", "grpo")],
        [21, 42, 42, 21],
    ),
    "what a batch counts": (
        lambda: [JobSpec(objective=o).rows for o in ("pretrain", "kto", "dpo", "reward", "grpo")],
        ["sequences", "sequences", "pairs", "pairs", "completions"],
    ),
    "adapters": (
        lambda: [sorted(each.layers) for each in (LoraSpec(targets="attention"), LoraSpec(target_modules=("up_proj",)))]
        + [len(LoraSpec().layers)],
        [["k_proj", "o_proj", "q_proj", "v_proj"], ["up_proj"], 7],
    ),
    "ranks and scales of adapters": (
        lambda: (lambda lora: [(lora.rank_of(n), lora.scale_of(n)) for n in ("q_proj", "v_proj", "k_proj")])(
            LoraSpec(rank=8, alpha=16.0, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 24.0})),
        [(4, 4.0), (8, 3.0), (8, 2.0)],
    ),
    "rank-stabilised": (lambda: LoraSpec(rank=16, alpha=32.0, use_rslora=True).scale_of("q_proj"), 8.0),
    "TRL's forwards": (
        lambda: [each and (each.trainer, each.sequences, each.policy_forwards, each.reference_forwards) for each in (
            trl_objective(JobSpec(objective=o, grpo=g)) for o, g in (
                ("sft", None), ("dpo", None), ("kto", None), ("grpo", None), ("grpo", GrpoSpec(beta=0.1)),
                ("grpo", GrpoSpec(vllm_gpu_memory_utilization=0.3))))],
        [None, ("DPOTrainer", 2, 0, 1), ("KTOTrainer", 1, 1, 2), ("GRPOTrainer", 1, 0, 0), ("GRPOTrainer", 1, 0, 1),
         ("GRPOTrainer", 1, 1, 0)],
    ),
    "what changes a router's gradient": (
        lambda: [BalancingSpec(moe_z_loss_coeff=0.1).has_loss, BalancingSpec(moe_router_bias_update_rate=0.1).has_loss,
                 BalancingSpec(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1).has_loss],
        [True, False, True],
    ),
    # Data of a run: prefixes, addresses, files of a stream.
    "training paths": (
        lambda: [RUN.data.training_paths, DataSpec(train="t").training_paths, DataSpec(stream=OF_TEXT).training_paths,
                 DataSpec(stream=StreamSpec(path="a/b", tokenizer="t")).training_paths],
        [("w", "s3://b/c"), ("t",), ("a.jsonl", "s3://b/c.jsonl"), ("a/b",)],
    ),
    "whether there are data": (
        lambda: [DataSpec().named, DataSpec(train="t").named, RUN.data.named, DataSpec(stream=OF_TEXT).named],
        [False, True, True, True],
    ),
    "paths on a disk": (
        lambda: run_paths(RUN),
        dict(zip(PATHS, ("w", "v", "vx", "m", "n"), strict=True)),
    ),
    "paths of a stream": (
        lambda: [run_paths(RunSpec(data=DataSpec(stream=StreamSpec(**{**STREAM, **change})))) for change in (
            {}, {"path": "a/b"})],
        [{"data.stream.tokenizer": "tok", "data.stream.data_files.0": "a.jsonl"}, {"data.stream.tokenizer": "tok"}],
    ),
    "all paths replaced": (
        lambda: run_paths(with_paths(RUN, {key: f"/{key}" for key in run_paths(RUN)})),
        {key: f"/{key}" for key in PATHS},
    ),
    "a training prefix and a stream replaced": (
        lambda: (with_paths(RunSpec(data=DataSpec(train="t")), {"data.train": "/t"}).data.train,
                 absolute_paths(RunSpec(data=DataSpec(stream=OF_TEXT)), Path("/r")).data.stream),
        ("/t", StreamSpec(**{**STREAM, "tokenizer": "/r/tok", "data_files": ("/r/a.jsonl", "s3://b/c.jsonl")})),
    ),
    # Specs themselves.
    "made without validation": (lambda: trusted(OptimizerSpec, {"beta1": 7}).beta1, 7),
    "changed without validation": (
        lambda: changed(OptimizerSpec(eps=1e-6), beta1=7), trusted(OptimizerSpec, {"beta1": 7, "eps": 1e-6})
    ),
    "a frozen mapping is a value": (
        lambda: (hash(FrozenMap({"a": [1], "b": 2})) == hash(FrozenMap({"b": 2, "a": [1]})) != hash(FrozenMap({})),
                 FrozenMap({"a": [{"b": [1]}]})["a"], thawed(FrozenMap({"a": [{"b": [1]}]}))),
        (True, (FrozenMap({"b": [1]}),), {"a": [{"b": [1]}]}),
    ),
    "floats that JSON has not": (
        lambda: decoded({"a": [{"__float__": "-Infinity"}], "b": {"__float__": "1"}, "c": {"__float__": "NaN", "d": 1}})
        == {"a": [-math.inf], "b": {"__float__": "1"}, "c": {"__float__": "NaN", "d": 1}},
        True,
    ),
    "no float": (lambda: math.isnan(decoded({"__float__": "NaN"})), True),
    # Text for messages.
    "a long value is cut": (
        lambda: (text.shown("x" * 198), text.shown("x" * 199)), (f"'{'x' * 198}'", f"'{'x' * 199}… (201 characters)")
    ),
    "names for a message": (
        lambda: (text.listed("abcde"), text.listed("abcdefg", " or "), text.listed(["y" * 201, "b"])),
        ("a, b, c, d, e", "a or b or c or d or e and 2 more", f"{'y' * 200}… (201 characters), b")
    ),
    "ten problems": (
        lambda: [(len(found := text.first_ten("f", range(n), str)), found[-1]) for n in (10, 12)],
        [(10, "9"), (11, "f: and 2 more problems")],
    ),
    "nearest names": (
        lambda: [text.nearest("tpp", ["pp", "tp", "cp"]), text.nearest("x", ["b", "a"]),
                 text.nearest("zzz", list("abcdef"))[:19]],
        ["did you mean pp or tp?", "valid are a, b", "the nearest of 6 ar"],
    ),
    "what can be printed stays": (lambda: (text.escaped("é"), text.escaped("a\nb")), ("é", "a\\nb")),
    "characters that begin a line": (
        lambda: [bool(text.control_character(c)) for c in ("\n", "\x85", "\u2028", "\ud800", "\u200d", " ", "\u00a0")],
        [True, True, True, True, False, False, False],
    ),
    "places": (lambda: text.dotted(("a", 0, "b\n")), "a.0.b\\n"),
    "numbers of YAML 1.2": (
        lambda: strict_yaml.parse_text(
            "a: [1e3, 1.5e3, 1e-3, -1e3, +2e3, 1e30, .5, 5., yes, 2024-01-01, 0x1F, 1.5]", "f").data["a"],
        [1000, 1500, 0.001, -1000.0, 2000, 1e30, 0.5, 5.0, "yes", "2024-01-01", 31, 1.5],
    ),
    "an empty file is an empty mapping": (lambda: strict_yaml.parse_text("", "f").data, {}),
    "lines of values": (
        lambda: dict(strict_yaml.parse_text("a: 1\nb:\n  - x\n  - c: 2\n", "f").lines),
        {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4},
    ),
    "the line of the nearest value that has one": (
        lambda: [strict_yaml.Document("f", {}, {("a",): 3}).where(place) for place in (("a", "b"),
        ("c",))], ["f:3", "f"]
    ),
    "text that YAML would read as a number is quoted": (
        lambda: strict_yaml.dump({"z": "1e5", "a": "é"}), "z: '1e5'\na: é\n"
    ),
    "JSON in bounds": (
        lambda: [bool(text_files.parse_json("[" * 64 + "]" * 64)),
                 text_files.parse_json(f'[{"1" * 64}, {{"a": 1}}]', None)], [True, [int("1" * 64), {"a": 1}]],
    ),
    "what only Python writes": (lambda: text_files.parse_json("[NaN, -Infinity]", str), ["NaN", "-Infinity"]),
    "reasons": (
        lambda: [*map(text_files.reason, (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), ValueError("it is odd"),
                                          FileNotFoundError(2, "No such file")))],
        ["not UTF-8 text", "it is odd", "No such file"],
    ),
    # A bare size: Llama's matrices, by hand of 2 layers, hidden 128, MLP 256, 2 heads of 64, tied.
    "parameters of a made shape": (
        lambda: _parameters(50e6, 2, 128, 256), 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128) + 128 + 32_000 * 128
    ),
    "with grouped queries, untied": (  # 16 heads of 128, 8 of keys
        lambda: _parameters(40e9, 3, 2048, 512),
        3 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 512 + 2 * 2048) + 2048 + 2 * 32_000 * 2048,
    ),
    "hidden size over layers": (  # half-way between 1.3B and 7B on a logarithmic scale
        lambda: [_aspect(1e6), _aspect(125e6), round(_aspect(math.sqrt(1.3e9 * 7e9)), 6), _aspect(7e9), _aspect(1e13)],
        [64, 64, 106.5, 128.0, 200],
    ),
    "what is a size": (
        lambda: [is_size(each) for each in ("13B", " 1.5t ", "7", "B", "7K", "x7B")],
        [True, True, False, False, False, False]
    ),
    "shapes of sizes": (
        lambda: [(m.num_layers, m.hidden_size, m.ffn_hidden_size, m.num_attention_heads, m.num_key_value_heads,
                  m.tied_embeddings)
                 for m in map(shape_of_size, ("100M", "7B", "70B"))],
        [(12, 768, 1664, 12, 12, True), (32, 4096, 11648, 32, 32, False), (80, 8192, 29184, 64, 8, False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_value_is_that_of_the_definition(case: str) -> None:
    compute, expected = VALUES[case]
    assert compute() == expected
    assert repr(compute()) == repr(expected)  # 1.0 is no 1


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "num_key_value_heads=4 does not divide num_attention_heads=6 of m": (
        lambda: model(num_key_value_heads=4), "divisor of 6"
    ),
    "num_key_value_heads=3 of m: family gpt_neox has no grouped": (
        lambda: model(family="gpt_neox", head_dim=16), "use 6"
    ),
    "num_key_value_heads=3 of m: family deepseek_v3 has no": (
        lambda: model(**{**DEEPSEEK, "num_key_value_heads": 3}), "use 6"
    ),
    "head_dim=20 of m: in family phi3 the 6 heads": (lambda: model(family="phi3"), "hidden_size of 6·head_dim"),
    "head_dim=16 of m is not nope_head_dim + rope_head_dim": (lambda: model(**{**DEEPSEEK, "head_dim": 16}), "use 15"),
    "experts_per_token=9 of m is more than": (lambda: model(**{**DEEPSEEK, "experts_per_token": 9}), "use at most 8"),
    "router_groups=3, router_top_groups=2": (lambda: model(**{**DEEPSEEK, "router_groups": 3}), "num_experts=8"),
    "router_groups=4, router_top_groups=5": (lambda: model(**{**DEEPSEEK, "router_top_groups": 5}), "at most all"),
    "sliding_window=64 of m: family llama has none here": (lambda: model(sliding_window=64), "one of mistral, "),
    "activation=relu of m: family gpt_neox has gelu or gelu_tanh": (
        lambda: model(**NEOX, activation="relu"), "one of these"
    ),
    "num_experts of m is missing, which family mixtral needs": (lambda: model(family="mixtral"), "give it"),
    "family=transformers of m: approximate belongs": (lambda: model(family="transformers"), "no other"),
    "family=llama of m: approximate belongs": (lambda: model(approximate=APPROXIMATE), "no other"),
    "approximate.config of m has no model_type": (
        lambda: model(**{**OTHER, "approximate": changed(APPROXIMATE, config=FrozenMap({}))}), "transformers' name"
    ),
    "epochs=2 and total_tokens=5 are both there": (lambda: JobSpec(epochs=2.0, total_tokens=5), "leave out one"),
    "type=aux_loss with moe_aux_loss_coeff=0": (
        lambda: BalancingSpec(moe_router_load_balancing_type="aux_loss"), "or none"
    ),
    "type=none with moe_aux_loss_coeff=0.1": (lambda: BalancingSpec(moe_aux_loss_coeff=0.1), "give its type, or 0"),
    "inter_node_gbytes_per_s=0 of": (
        lambda: dataclasses.replace(parse_cluster("1xRTX-4090"), num_nodes=2), "num_nodes=2"
    ),
    "path=json without data_files": (lambda: StreamSpec(path="json", tokenizer="t"), "list the files"),
    "path=/a is a file or directory": (lambda: StreamSpec(path="/a", tokenizer="t"), "path=json or parquet or text"),
    "path=s3://b/c is a file or directory": (lambda: StreamSpec(path="s3://b/c", tokenizer="t"), "data_files"),
    "split=train[:5] is not one whole split": (
        lambda: StreamSpec(path="a/b", tokenizer="t", split="train[:5]"), "name one"
    ),
    "split=a+b is not": (lambda: StreamSpec(path="a/b", tokenizer="t", split="a+b"), "name one"),
    "data_files holds credentials": (
        lambda: StreamSpec(**{**STREAM, "data_files": ("s3://a:b@c/d",)}), "leave them out"
    ),
    "train is required and missing": (lambda: DataSpec(packing=True), "blend"),
    "train is required": (lambda: DataSpec(validation="v"), "missing"),
    "train is required and": (lambda: DataSpec(validation_sets={"x": "v"}), "missing"),
    "train=t and stream are both there": (lambda: DataSpec(train="t", stream=OF_TEXT), "leave out one"),
    "blend and stream are both": (lambda: DataSpec(blend=BLEND, stream=OF_TEXT), "leave out one"),
    "packing with stream": (lambda: DataSpec(packing=True, stream=OF_TEXT), "leave out packing"),
    "train=t and blend are both": (lambda: DataSpec(train="t", blend=BLEND), "list it in blend"),
    "wrap=false with blend": (lambda: DataSpec(blend=BLEND, wrap=False), "leave out wrap"),
    "the data set 'a b' has a name": (lambda: DataSpec(train="t", validation_sets={"a b": "v"}), "letters"),
    "validation holds credentials": (lambda: DataSpec(train="t", validation="s3://a:b@c/d"), "leave them out"),
    "decay_steps=5 is a key of kind=warmup_stable_decay": (lambda: ScheduleSpec(decay_steps=5), "kind is cosine"),
    "num_cycles=2 is a key of kind=cosine_with": (lambda: ScheduleSpec(num_cycles=2), "remove the key"),
    "kind=inverse_sqrt falls from": (lambda: ScheduleSpec(kind="inverse_sqrt", warmup_steps=0), "1 or more"),
    "remote=here has no protocol": (lambda: CheckpointSpec(remote="here"), "s3://"),
    "run.nvme_path=~nobody-here/x: this machine knows": (
        lambda: absolute_paths(RunSpec(nvme_path="~nobody-here/x"), Path("/")), "no home directory of ~nobody-here"
    ),
    "run.model_path='a\\nb'": (lambda: with_paths(RUN, {"model_path": "a\nb"}), "U+000A"),
    "has 4097 characters where at most 4096": (lambda: RunSpec(model_path="x" * 4097), "shorten"),
    "has 256 bytes where a file's name has at most 255": (lambda: model(name="é" * 128), "shorten"),
    "should be 0 or at least 1e-06": (
        lambda: dataclasses.replace(parse_cluster("8xH100"), intra_node_gbytes_per_s=1e-7), "0"
    ),
    "holds inf, which is no finite number": (lambda: model(rope_scaling={"a": [{"b": math.inf}]}), "finite"),
    "holds the control character U+000A": (lambda: model(rope_scaling={"a": {"b\n": 1}}), "one line"),
    "should be less than 1": (lambda: OptimizerSpec(beta1=1.0), "beta1"),
    "should be greater than or equal to 0.000000000000000000000000000001": (lambda: OptimizerSpec(eps=0.0), "eps"),
    "should be less than or equal to 100000000": (lambda: Pins(tp=10**8 + 1), "tp"),
    "model size '19M' is not between": (lambda: shape_of_size("19M"), "20T"),
    "model size '21T'": (lambda: shape_of_size("21T"), "20T"),
    "name='a\\x1bb': holds the control": (lambda: text.check_line("name", "a\x1bb"), "U+001B"),
    "f:1: not valid YAML: a number of 65 characters": (lambda: strict_yaml.parse_text(f"a: {'1' * 65}", "f"), "65"),
    "f:2: not valid YAML: a value of type binary": (
        lambda: strict_yaml.parse_text("a: 1\nb: !!binary aGk=", "f"), "binary"
    ),
    "f:1: not valid YAML: a key that is no text": (lambda: strict_yaml.parse_text("? [a]\n: 1", "f"), "key"),
    "f:1: not valid YAML: a key that is no": (lambda: strict_yaml.parse_text(f"{'1' * 65}: 1", "f"), "key"),
    "f: not valid YAML: a tag": (lambda: strict_yaml.parse_text("a: !!int x", "f"), "leave out the tag"),
    "f:1: not valid YAML: more than 50000 values": (lambda: strict_yaml.parse_text("[" * 65, "f"), "64 levels"),
    "it is nested more than 64 levels deep": (lambda: text_files.parse_json("[" * 66 + "]" * 66), "64"),
    "nested more than 64 levels": (lambda: text_files.parse_json("[" * 100_000), "64 levels"),
    "a number of 65 digits": (lambda: text_files.parse_json("1" * 65), "65"),
    "'b' is there twice": (lambda: text_files.parse_json('{"a": 1, "b": 2, "b": 3}'), "'b'"),
    "f:1: not valid YAML: more than 50000": (lambda: strict_yaml.parse_text(f"a: [{'1,' * 50_000}]", "f"), "values"),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_a_wrong_value_is_refused_by_its_rule(said: str) -> None:
    make, fix = REFUSED[said]
    refused = refusal((SpecError, ValueError), make)
    assert said in refused
    assert fix in refused


FINE: dict[str, Callable[[], Any]] = {
    "nesting of 64 levels": lambda: strict_yaml.parse_text("a: " + "[" * 62 + "]" * 62, "f"),
    "a number of 64 digits": lambda: strict_yaml.parse_text(f"a: {'1' * 64}", "f"),
    "40,000 values": lambda: strict_yaml.parse_text(f"a: [{'1,' * 40_000}]", "f"),
    "a text of 4,096 characters": lambda: RunSpec(model_path="x" * 4096),
    "a name of 255 bytes": lambda: model(name="x" * 255),
    "all groups": lambda: model(**{**DEEPSEEK, "router_top_groups": 4}),
    "all experts": lambda: model(**{**DEEPSEEK, "experts_per_token": 8}),
    "a choice of the family": lambda: model(**NEOX, activation="gelu_tanh"),
    "a lone node without fabric": lambda: parse_cluster("1xRTX-4090"),
    "the slowest rate": lambda: dataclasses.replace(parse_cluster("8xH100"), intra_node_gbytes_per_s=1e-6),
    "keys of a decay": lambda: ScheduleSpec(kind="warmup_stable_decay", decay_steps=5, decay_style="linear"),
    "a schedule from the first step": lambda: ScheduleSpec(warmup_steps=0),
    "a stream that ends the run": lambda: DataSpec(stream=OF_TEXT, wrap=False),
    "a checkpoint elsewhere": lambda: CheckpointSpec(remote="s3://bucket/prefix"),
    "the smallest and the largest size": lambda: (shape_of_size("20M"), shape_of_size("20T")),
}  # fmt: skip


@pytest.mark.parametrize("case", FINE)
def test_what_is_just_within_its_rule_is_taken(case: str) -> None:
    FINE[case]()


@pytest.mark.parametrize(
    ("words", "objective", "expected"),
    [
        ('{"num_documents": 20, "num_tokens": 700, "objective": "sft"}', "sft", Epoch(samples=20, tokens=700)),
        ('{"num_documents": 20, "num_tokens": 700, "objective": "sft"}', "dpo", None),
        ('{"num_documents": 20, "num_tokens": 700, "objective": "pretrain"}', "pretrain", None),
        ('{"num_documents": 0, "num_tokens": 700, "objective": "sft"}', "sft", None),
        ('{"num_documents": true, "num_tokens": 700, "objective": "sft"}', "sft", None),
        ('{"num_documents": 20.0, "num_tokens": 700, "objective": "sft"}', "sft", None),
        ('{"num_documents": 20, "objective": "sft"}', "sft", None),
        ("[", "sft", None), ("[]", "sft", None), (None, "sft", None),
    ],
)  # fmt: skip
def test_the_rows_of_a_set_are_those_that_its_file_counts(
    words: str | None, objective: Any, expected: Epoch | None, tmp_path: Path
) -> None:
    if words is not None:
        (tmp_path / "a.json").write_text(words)
    data = DataSpec(train=str(tmp_path / "a"))
    assert epoch_on_disk(data, objective) == expected
    assert epoch_on_disk(dataclasses.replace(data, packing=True), objective) is None
    assert epoch_on_disk(DataSpec(train="s3://bucket/a"), objective) is epoch_on_disk(DataSpec(), objective) is None


@pytest.mark.parametrize(
    ("path", "most", "said"),
    [
        ("a", 4, "it has 5 bytes, and a file of this kind has at most 4"),
        ("/proc/self/status", 4, "it has more than 4 bytes"),  # which says that it has 0
        ("", 9, "it is a directory"),
        ("/dev/null", 9, "it is a device, a socket or a FIFO"),
    ],
)
def test_files_are_read_in_bounds(path: str, most: int, said: str, tmp_path: Path) -> None:
    assert text_files.read_text(file_with(tmp_path / "a", "12345"), most=5) == "12345"
    assert said in refusal(ValueError, text_files.read_text, tmp_path / path, most=most)


def test_a_frozen_mapping_never_changes() -> None:
    frozen = FrozenMap({"a": {"b": 1}})
    assert [
        "never changes" in refusal(TypeError, change)
        for change in (lambda: frozen.update(a=1), lambda: frozen["a"].pop("b"), lambda: frozen.__setitem__("a", 1))
    ] == [True] * 3
    assert adapter(ModelSpec).dump_python(model(rope_scaling=frozen), mode="json")["rope_scaling"] == {"a": {"b": 1}}
