"""Clusters: this machine as nvidia-smi and Linux tell it, rows of the catalog and parts of them, and files."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kit.errors import SpecError
from kit.specs import local, recipe
from kit.specs.catalog import cheapest_node_with, gpu_names, load_gpu, parse_cluster
from kit.specs.cluster import ClusterSpec
from kit.specs.strict_yaml import parse_text
from tests.support.files import file_with
from tests.support.refusals import refusal

GPUS = {name: load_gpu(name) for name in gpu_names()}
NVLINK = (
    "        GPU0    GPU1    CPU Affinity\nGPU0     X      NV18    0-15\nGPU1    NV18     X      0-15\n\nLegend: NV#"
)
FILES = {
    "/proc/meminfo": "MemTotal:       1048576 kB\nMemFree:        1 kB\nMemAvailable:    524288 kB\n",
    "/sys/block/nvme0n1/size": "2097152\n",  # sectors of 512 bytes: 1 GiB
    "/sys/block/nvme1n1/size": "4194304\n",
    "/sys/block/nvme2n1/size": "",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine without GPUs, of three cores, 1 GiB of memory and disks of 3 GiB; what nvidia-smi prints by its first
    argument goes into the mapping."""
    printed: dict[str, str] = {}
    monkeypatch.setattr(local, "nvidia_smi", lambda *args: printed.get(args[0].partition("=")[0]))
    monkeypatch.setattr(local, "_text", lambda path: FILES.get(str(path), ""))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [Path(name) for name in FILES if "nvme" in name])
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    return printed


def test_a_machine_without_gpus_has_a_process_a_core(machine: dict[str, str]) -> None:
    found = parse_cluster("local")
    assert (found.gpu.name, found.gpus_per_node, found.num_nodes) == ("cpu", 3, 1)
    assert (found.inter_node_gbytes_per_s, found.intra_node_gbytes_per_s) == (0, GPUS["cpu"].pcie_gbytes_per_s)
    assert (found.host_ram_gib, found.gpu.memory_gib, found.nvme_gib) == (1.0, pytest.approx(1 / 3), 3.0)
    assert local.host_memory() == {"MemTotal": 2**30, "MemAvailable": 2**29}
    assert local.nvidia_gpus() is None


@pytest.mark.parametrize(("topology", "link"), [(NVLINK, 450.0), (NVLINK.replace("NV18", "NODE"), 64.0), ("", 64.0)])
def test_gpus_are_those_that_the_driver_lists(topology: str, link: float, machine: dict[str, str]) -> None:
    machine |= {"--query-gpu": "NVIDIA H100 80GB HBM3, 81559\nNVIDIA H100 80GB HBM3, 81559\n\n", "topo": topology}
    found = parse_cluster(" THIS ")
    assert (found.gpu, found.gpus_per_node, found.intra_node_gbytes_per_s) == (GPUS["H100"], 2, link)
    assert local.nvidia_gpus() == [("NVIDIA H100 80GB HBM3", 81559 / 1024)] * 2


@pytest.mark.parametrize(("listed", "installed"), [("NVIDIA H100 80GB HBM3, 81559", True), ("", False)])
def test_transformer_engine_of_this_environment_counts_on_gpus(
    listed: str, installed: bool, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine |= {"--query-gpu": listed, "topo": ""}
    assert not parse_cluster("local").transformer_engine
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name == "transformer_engine" else None)
    assert parse_cluster("local").transformer_engine is installed


@pytest.mark.parametrize(
    ("listed", "name", "memory_gib", "count"),
    [
        ("NVIDIA A100-SXM4-40GB, 40960", "A100-40", 39.39, 1), ("NVIDIA A100-SXM4-80GB, 81920", "A100-80", 79.15, 1),
        ("NVIDIA H100 PCIe, 81559", "H100-PCIe", 79.1, 1), ("NVIDIA GeForce RTX 4090, 24564", "RTX-4090", 23.64, 1),
        ("Tesla V100-SXM2-16GB, 16384\nTesla V100-SXM2-16GB, 15000", "V100-16", 15000 / 1024, 2),
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA L4, 23034", "several kinds (NVIDIA H100 80GB HBM3, NVIDIA L4)", 0, 0),
        ("NVIDIA H100 80GB HBM3, 40960", "GPU 'NVIDIA H100 80GB HBM3' with 40 GiB is not in the catalog", 0, 0),
        ("NVIDIA H100 80GB HBM3, 74752", "H100", 73.0, 1),  # 8 % less than the catalog's 79.1 GiB; 13 % are too many
        ("NVIDIA H100 80GB HBM3, 71680", "GPU 'NVIDIA H100 80GB HBM3' with 70 GiB is not in the catalog", 0, 0),
        ("NVIDIA X9, 24564", "GPU 'NVIDIA X9' with 24 GiB is not in the catalog", 0, 0),
    ],
)  # fmt: skip
def test_a_card_is_found_by_its_words_and_its_memory(
    listed: str, name: str, memory_gib: float, count: int, machine: dict[str, str]
) -> None:
    """What is there of memory is the less of the driver's and the catalog's, which is torch's."""
    machine["--query-gpu"] = listed
    cards = local.nvidia_gpus()
    if not count:
        assert name in refusal(SpecError, local.listed_gpu, cards, GPUS)
        return
    found, number = local.listed_gpu(cards, GPUS)
    assert (found.name, number, found.memory_gib) == (name, count, pytest.approx(memory_gib, rel=0.005))


@pytest.mark.parametrize(
    ("text", "said"),
    [("echo no driver; exit 9", "nvidia-smi: no driver"), ("exec /bin/sleep 9", "timed out"), ("echo $1", "")],
)
def test_a_driver_that_fails_is_no_gpu(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (local.nvidia_smi("-L"), local._asked("-L")) == (None, "")
    file_with(tmp_path / "nvidia-smi", f"#!/bin/sh\n{text}\n").chmod(0o755)
    if said:
        assert re.search(said, refusal((OSError, subprocess.TimeoutExpired), local.nvidia_smi, "-L", limit_s=0.2))
    else:
        assert local.nvidia_smi("-L") == local._asked("-L") == "-L\n"


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, place in (
        ("/c", Path("/c/kit/x")),
        ("relative", Path.home() / ".cache/kit/x"),
        ("", Path.home() / ".cache/kit/x"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert local.user_cache("x") == place


def test_parts_of_nodes_and_nodes_of_the_catalog() -> None:
    """A server's part has its share of memory and disks; a workstation with fewer GPUs keeps its memory."""
    whole, half, part = map(parse_cluster, ("8xH100", "4xH100", "2x2xH100"))
    assert (whole.host_ram_gib, part.host_ram_gib, part.num_gpus) == (1907, 1907 / 4, 4)
    assert (half.host_ram_gib, half.nvme_gib) == (1907 / 2, whole.nvme_gib and whole.nvme_gib / 2)
    assert parse_cluster("p5.48xlarge").price_per_node_hour_usd
    lone, a6000 = parse_cluster("4xA6000"), GPUS["A6000"]
    assert (lone.intra_node_gbytes_per_s, lone.inter_node_gbytes_per_s) == (
        a6000.nvlink_gbytes_per_s or a6000.pcie_gbytes_per_s, 0.0)  # fmt: skip
    assert len({parse_cluster(name).host_ram_gib for name in ("1xRTX-4090", "4xRTX-4090", "16xRTX-4090")}) == 1
    node, usd = cheapest_node_with(GPUS["A100-40"]) or (None, 0.0)
    assert (node and node.name, usd) == ("p4d.24xlarge", pytest.approx(21.96 / 8, rel=1e-3))
    assert cheapest_node_with(GPUS["RTX-4090"]) is None


OWN = (
    "gpus_per_node: 2\nintra_node_gbytes_per_s: 9\n"
    "gpu: {memory_gib: 24, bf16_tflops: 71, fp32_tflops: 36, hbm_gbytes_per_s: 936, pcie_gbytes_per_s: 32}\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OWN, {"name": "mine", "num_nodes": 1, "source": "mine.yml", "intra_node_gbytes_per_s": 9.0, "gpu.name": "own",
               "gpu.fp16_tflops": 71.0, "gpu.memory_gib": 24.0, "gpu.source": "mine.yml", "gpu.fp8_tflops": 0.0}),
        (OWN + "name: other\nnum_nodes: 2\ninter_node_gbytes_per_s: 3\n", {"name": "other", "num_gpus": 4}),
        ("node: p5.48xlarge\ngpu: H200\n", {"name": "p5.48xlarge", "gpu": load_gpu("H200"),
         "price_per_node_hour_usd": 55.04,
                                            "price_date": "2026-07-28", "num_nodes": 1}),
        ("node: p5.48xlarge:3\nprice_per_node_hour_usd: 40\n", {"num_nodes": 3, "price_per_node_hour_usd": 40.0,
         "price_date": None}),
        ("node: p5.48xlarge\nprice_per_node_hour_usd: 40\nprice_date: today\n", {"price_date": "today"}),
    ],
)  # fmt: skip
def test_a_file_describes_a_cluster(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = parse_cluster(str(file_with(tmp_path / "mine.yml", text)))
    shown = dataclasses.asdict(found) | {"num_gpus": found.num_gpus, "gpu": found.gpu}
    shown |= {f"gpu.{name}": value for name, value in dataclasses.asdict(found.gpu).items()}
    assert {key: shown[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node: p5.49xlarge\n", "mine.yaml:1: node: cluster 'p5.49xlarge' is not understood"),
        (f"{OWN}\nnum_nodes: 2\n", "inter_node_gbytes_per_s=0 of mine with num_nodes=2"),
        ("gpus_per_node: 2\ngpu: H101\n", "mine.yaml:2: gpu: GPU 'H101' is not in the catalog"),
        ("gpus_per_node: 2\ngpu: 7\n", "mine.yaml:2: gpu"), (OWN.replace("24", "x"), "mine.yaml:3: gpu.memory_gib=x"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_its_line(text: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(SpecError, parse_cluster, str(file_with(tmp_path / "mine.yaml", text))).replace("'x'", "x")


def test_a_cluster_that_is_no_mapping_is_refused_in_a_recipe() -> None:
    assert "cluster" in refusal(SpecError, recipe.recipe_of_document, parse_text("model: gpt2\ncluster: [1]\n", "r"))
    assert isinstance(recipe.recipe_of_document(parse_text("model: gpt2\ncluster: 8xH100\n", "r")).cluster, ClusterSpec)


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("256xGB200", (4, 64)),
        ("216xGB200", (3, 72)),
        ("576xGB200", (8, 72)),
        ("64xGB200", (1, 64)),
        ("72xGB200", (1, 72)),
    ],
)
def test_jobs_take_64_of_the_72_gpus_of_a_rack(text: str, split: tuple[int, int]) -> None:
    """Whole racks where they add up, as a rack has them; a rack's share of the host's memory."""
    found = parse_cluster(text)
    assert ((found.num_nodes, found.gpus_per_node), found.host_ram_gib) == (
        split,
        pytest.approx(16093.0 * split[1] / 72),
    )


def test_what_neither_whole_racks_nor_jobs_add_up_to_is_refused() -> None:
    assert "200 GPUs are not whole nodes of 72" in refusal(SpecError, parse_cluster, "200xGB200")
    assert "20 GPUs are not whole nodes of 8" in refusal(SpecError, parse_cluster, "20xH100")


def test_a_card_is_known_by_its_number_and_a_name_alone_asks_how_many() -> None:
    assert parse_cluster("2x3090") == parse_cluster("2xRTX-3090")
    for text, meant in {
        "4090": "1xRTX-4090 or 8xRTX-4090", "H100": "1xH100 or 8xH100", "A100": "1xA100-40 or 1xA100-80",
    }.items():  # fmt: skip
        said = refusal(SpecError, parse_cluster, text)
        assert said == f"cluster {text!r} has no number of GPUs; did you mean {meant}?"
