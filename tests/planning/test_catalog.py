"""Names, sources and what a user mistypes."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import kit
from kit.cost.hardware import generation_of
from kit.cost.model.params import count
from kit.errors import SpecError
from kit.specs.catalog import gpu_names, load_gpu, load_model, model_called, node_names, parse_cluster
from kit.specs.catalog.models import _plain, _spellings
from kit.specs.catalog.rows import rows
from tests.support.files import file_with
from tests.support.refusals import refusal

PUBLISHED = {
    # Sizes as model pages on the Hugging Face hub show them. Recalled, the pages not opened: a guard against a change
    # by accident. What transformers builds is the proof, in test_params.py.
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2-vl-2b": 1_543_714_304,
    "qwen1.5-1.8b": 1_836_828_672,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "phi-3-mini-4k": 3_821_079_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neox-20b": 20_554_567_680,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bloom-560m": 559_214_592,
    "bloom-1b7": 1_722_408_960,
    "bloom-7b1": 7_069_016_064,
    "bloom-176b": 176_247_271_424,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "phi-4": 14_659_507_200,
    "phi-3-medium-4k": 13_960_238_080,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "codellama-34b": 33_743_970_304,
    "mistral-large-2407": 122_610_069_504,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-3b": 2_851_598_336,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "blenderbot-400m-distill": 364_802_560,
    "blenderbot-3b": 2_696_268_800,
}


def test_every_row_says_where_it_was_read() -> None:
    tables = {**{table: rows(table) for table in ("models", "gpus", "nodes")}, "efficiency": rows("efficiency")["gpus"]}
    assert "default" in tables["efficiency"]
    least = {"efficiency": 1}
    for table, found in tables.items():
        assert found
        assert [name for name, row in found.items() if len(row.get("source", "")) < least.get(table, 20)] == []


def test_a_plan_says_where_what_kernels_reach_is_assumed() -> None:
    known, assumed = (kit.plan("llama-3.2-1b", gpus).predicted.step_time_evidence for gpus in ("1xRTX-4090", "1xL40S"))
    assert known == "no published run on RTX-4090 to compare with"
    assert assumed == (
        "no published run on L40S to compare with; what its kernels reach is assumed (efficiency.yaml, default)"
    )


def test_the_generation_is_the_catalogs_where_a_gpu_does_not_say_it() -> None:
    h100 = load_gpu("H100")
    assert h100.generation == generation_of(dataclasses.replace(h100, generation=None)) == "hopper"
    assert generation_of(dataclasses.replace(h100, generation="ada")) == "ada"
    assert generation_of(dataclasses.replace(h100, name="own", generation=None)) == "unknown"


@pytest.mark.parametrize("name", gpu_names())
def test_figures_of_a_gpu_hang_together(name: str) -> None:
    """fp8 is twice bf16 where there is fp8 (data sheets round); fp16 is not slower than bf16."""
    gpu = load_gpu(name)
    assert gpu.bf16_tflops in (0, gpu.fp16_tflops) or gpu.device == "cpu"
    assert gpu.fp8_tflops == 0 or abs(gpu.fp8_tflops / gpu.bf16_tflops - 2) < 0.03
    assert gpu.fp32_tflops < max(gpu.fp16_tflops, 0.1)
    assert 10 <= gpu.hbm_gbytes_per_s <= 10_000
    assert parse_cluster(f"1x{name}").num_gpus == 1


@pytest.mark.parametrize("name", node_names())
def test_every_node_is_a_cluster_with_the_links_of_its_gpu(name: str) -> None:
    """Links per GPU and direction: NVLink as the GPU has it, or PCIe where there is none or no bridge."""
    cluster = parse_cluster(name)
    links = {cluster.gpu.nvlink_gbytes_per_s, cluster.gpu.pcie_gbytes_per_s}
    assert cluster.intra_node_gbytes_per_s in links or cluster.gpu.device == "cpu"
    assert cluster.inter_node_gbytes_per_s <= cluster.intra_node_gbytes_per_s
    assert (cluster.num_gpus, cluster.gpu) == (cluster.gpus_per_node, load_gpu(cluster.gpu.name))
    assert cluster.price_per_node_hour_usd is None or cluster.price_date


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert count(load_model(name)).total == parameters


SAID = re.compile(r"([\d.]+)([MBT]) counted and ([\d.]+)([MBT]) (?:named|published)")
OTHERWISE = {"llama-4-scout": 0.012, "kimi-linear-48b-a3b": 0.024}
"""Models whose publisher counts otherwise, and by which share."""


def _said(number: str, unit: str) -> tuple[float, float]:
    """Parameters, and half of the last digit."""
    one = {"M": 1e6, "B": 1e9, "T": 1e12}[unit]
    return float(number) * one, 0.51 * one / 10 ** len(number.partition(".")[2])


@pytest.mark.parametrize(
    ("name", "said"),
    [(name, found) for name in rows("models") if (found := SAID.search(rows("models")[name]["source"]))],
)
def test_a_row_counts_what_its_source_says(name: str, said: re.Match[str]) -> None:
    parameters = count(model_called(name)).total
    (counted, half), (named, of_named) = _said(said[1], said[2]), _said(said[3], said[4])
    assert abs(parameters - counted) <= half
    assert abs(parameters - named) <= of_named + OTHERWISE.get(name, 0.005) * named


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama3.1-8b", "llama-3.1-8b"),
        ("llama-31-8b", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("google/codegemma-7b", "gemma-7b"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "llama-3.1-8b"),
        ("unsloth/Llama-3.2-1B-Instruct-GGUF", "llama-3.2-1b"),
        ("acme/Meta-Llama-3-8B-Instruct-AWQ", "llama-3-8b"),
        ("acme/Llama-3.3-70B-Instruct-quantized.w8a8", "llama-3.3-70b"),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "qwen3-30b-a3b-2507"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-2507"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "qwen2.5-14b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "deepseek-r1-distill-qwen-1.5b"),
        ("google/gemma-4-31B-it", "gemma-4-31b"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    assert load_model(written).name == name


def test_a_spelling_is_of_one_model() -> None:
    """A repository that two rows name, or a row whose name without its words is another's, would be found as either."""
    rows = [(spelling, name) for name, spellings in _spellings().items() for spelling in spellings]
    owners = {spelling: [name for other, name in rows if other == spelling] for spelling, _ in rows}
    shared = {spelling: names for spelling, names in owners.items() if len(names) > 1}
    assert {tuple(names) for spelling, names in shared.items() if spelling not in map(_plain, names)} == set()


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen2.5-VL-9B",
        "Qwen/Qwen3-8C",
        "acme/llama-3-8b-and-more",
        "meta-llama/Llama-3.2-11B-Vision",
        "acme/lama-3.1-8b",
    ],
)
def test_an_id_that_is_only_like_a_name_is_another_model(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be of another shape: only the hub knows. A name without an organisation is what a person mistyped."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert f"model {name} is not on this disk" in refusal(SpecError, load_model, name)
    assert "nor an id of the hub" in refusal(SpecError, model_called, name)


@pytest.mark.parametrize(
    ("text", "node", "gpus_per_node", "num_nodes"),
    [
        ("8xH100", "dgx-h100", 8, 1),
        ("64xA100-80", "dgx-a100-80", 8, 8),
        ("2x8xH100", "dgx-h100", 8, 2),
        ("4xH200", "dgx-h200", 4, 1),
        ("2x4xh100", "dgx-h100", 4, 2),
        ("aws:p4d.24xlarge:8", "p4d.24xlarge", 8, 8),
        ("P4D.24xlarge:2", "p4d.24xlarge", 8, 2),
        ("p5.48xlarge", "p5.48xlarge", 8, 1),
        ("oci:BM.GPU.H100.8:2", "bm.gpu.h100.8", 8, 2),
        ("dgx-h100:4", "dgx-h100", 8, 4),
        ("1xRTX4090", "workstation-rtx-4090", 1, 1),
        ("8xRTX-3090", "workstation-rtx-3090", 8, 1),
        ("1x6xRTX-5090", "workstation-rtx-5090", 6, 1),
        ("4xA6000", "A6000 node", 4, 1),
        ("4xcpu", "cpu-host", 4, 1),
    ],
)
def test_forms_of_a_cluster(text: str, node: str, gpus_per_node: int, num_nodes: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.name, cluster.gpus_per_node, cluster.num_nodes) == (node, gpus_per_node, num_nodes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9xA6000", "no node of the catalog has A6000, so nothing is known of links between nodes; use up to 8 GPUs"),
        ("2x4xA6000", "use up to 8 GPUs"),
        ("20xRTX-4090", "no fabric"),
        ("2x1xRTX-4090", "no fabric"),
        ("65537x8xH100", "has 65,537 nodes; use at most 65,536"),
        ("20xH100", "use 16xH100 or 24xH100, or nodes x GPUs"),
        ("2x9xH100", "has 8 GPUs, not 9; use 2x8xH100"),
        ("0x8xH100", "has no GPU"),
        ("azure:nd-h100-v9:2", "did you mean nd96isr-h100-v5 or dgx-h100 or nd96amsr-a100-v4?"),
        ("0xH100", "has no GPU"),
        ("p4d.24xlarge:0", "has no node"),
        ("p4d.24xlarge:-3", "has no node"),
        ("8xA100", "A100-40 or A100-80"),
        ("8xH101", "did you mean H100"),
        ("12xH100", "8xH100 or 16xH100"),
        ("2x9xH100", "2x8xH100"),
        ("aws:p4x.24xlarge:8", "p4d.24xlarge"),
        ("aws:dgx-h100:2", "use dgx-h100:2"),
        ("a:b:p4d.24xlarge:8", "forms are"),
        ("gcp:p4d.24xlarge:8", "use aws:p4d.24xlarge"),
        ("32xRTX-4090", "no fabric"),
        ("H100", "did you mean 1xH100 or 8xH100?"),
        ("", "forms are"),
        ("8x", "forms are"),
        ("eight H100", "forms are"),
    ],
)
def test_clusters_that_are_refused(text: str, said: str) -> None:
    refused = refusal(SpecError, parse_cluster, text)
    assert said in refused
    assert "\n" not in refused


def test_an_unknown_card_is_described_in_the_line_of_the_message(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'RTX-3095' is not in the catalog \(did you mean .*RTX-3090") as error:
        parse_cluster("2xRTX-3095")
    assert "'H10' is not in the catalog (did you mean H100" in refusal(SpecError, parse_cluster, "8xH10")
    cluster = parse_cluster(str(file_with(tmp_path / "card.yaml", str(error.value).rpartition("card.yaml: ")[2])))
    assert (cluster.num_gpus, cluster.gpu.memory_gib, cluster.gpu.fp16_tflops) == (2, 24.0, 71.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3-9b", "llama-3-8b"),
        ("qwen", "did you mean"),
        ("", "the nearest of"),
        *((name, "did you mean .* or ") for name in ("mistral-7b", "qwen3", "llama-3.1-9b", "qwen3-3", "gpt-oss")),
    ],
)
def test_models_that_are_refused(name: str, said: str) -> None:
    assert re.search(said, refusal(SpecError, load_model, name))
