"""Clusters that no catalog lists: a user's file, and this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.errors import SpecError
from kit.specs.catalog import clusters, gpu_names, load_gpu, parse_cluster
from kit.specs.catalog.rows import rows
from kit.specs.local import has_nvlink, listed_gpu

GPUS = {name: load_gpu(name) for name in gpu_names()}


def test_a_node_of_the_catalog_with_changes(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("node: p5.48xlarge\nnum_nodes: 4\nhost_ram_gib: 1024\nprice_per_node_hour_usd: 40\n")
    cluster, node = parse_cluster(str(file)), parse_cluster("p5.48xlarge")
    assert (cluster.num_gpus, cluster.host_ram_gib, cluster.price_per_node_hour_usd) == (32, 1024.0, 40.0)
    assert (cluster.gpu, cluster.nvme_gib) == (node.gpu, node.nvme_gib)


def test_a_gpu_that_no_node_has_is_planned_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "rows", lambda name: {} if name == "nodes" else rows(name))
    cluster = parse_cluster("6xH100")
    assert (cluster.num_gpus, cluster.num_nodes, cluster.price_per_node_hour_usd) == (6, 1, None)
    assert cluster.intra_node_gbytes_per_s == cluster.gpu.nvlink_gbytes_per_s
    assert parse_cluster("2xRTX-4090").intra_node_gbytes_per_s == load_gpu("RTX-4090").pcie_gbytes_per_s
    for more in ("2x8xH100", "64xH100"):
        with pytest.raises(SpecError, match="no node of the catalog has H100"):
            parse_cluster(more)


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(
        "gpus_per_node: 2\nintra_node_gbytes_per_s: 32\n"
        "gpu: {memory_gib: 47.5, bf16_tflops: 154.8, fp32_tflops: 38.7, hbm_gbytes_per_s: 768, pcie_gbytes_per_s: 32}\n"
    )
    cluster = parse_cluster(str(file))
    assert (cluster.name, cluster.num_gpus, cluster.gpu.fp16_tflops, cluster.gpu.name) == ("lab", 2, 154.8, "own")
    file.write_text("gpu: L40S\ngpus_per_node: 2\nintra_node_gbytes_per_s: 32\n")
    assert parse_cluster(str(file)).gpu == load_gpu("L40S")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus_per_node: 2\nintra_node_gbytes_per_s: 32\n", "gpu: is required and missing"),
        ("gpu: L40T\ngpus_per_node: 2\n", "lab.yaml:1: gpu: GPU 'L40T' is not in the catalog"),
        ("node: p9.48xlarge\n", "lab.yaml:1: node: cluster 'p9.48xlarge' is not understood"),
        ("node: p5.48xlarge\nhost_ram: 3\n", "lab.yaml:2: host_ram: unknown key; did you mean host_ram_gib"),
        ("node: p5.48xlarge\nnum_nodes: 0\n", "lab.yaml:2: num_nodes=0"),
        (
            "gpu: L40S\ngpus_per_node: 2\nnum_nodes: 2\nintra_node_gbytes_per_s: 32\n",
            "inter_node_gbytes_per_s=0 of lab with num_nodes=2: ranks of different nodes exchange data",
        ),
    ],
)
def test_files_that_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(text)
    with pytest.raises(SpecError, match=said):
        parse_cluster(str(tmp_path / "lab.yaml"))


@pytest.mark.parametrize(
    ("listed", "name", "count"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\n" * 8, "H100", 8),
        ("NVIDIA A100-SXM4-40GB, 40960\nNVIDIA A100-SXM4-40GB, 40960", "A100-40", 2),
        ("NVIDIA A100-SXM4-80GB, 81920", "A100-80", 1),
        ("Tesla V100-SXM2-32GB, 32768", "V100-32", 1),
        ("NVIDIA GeForce RTX 4090, 24564", "RTX-4090", 1),
        ("NVIDIA TITAN RTX, 24576", "Titan-RTX", 1),
        ("NVIDIA L40S, 46068", "L40S", 1),
        ("NVIDIA L4, 23034", "L4", 1),
        ("NVIDIA A10G, 23028", "A10G", 1),
        ("NVIDIA H200, 143771", "H200", 1),
        ("NVIDIA H20, 97871", "H20", 1),
        ("NVIDIA B200, 183359", "B200", 1),
    ],
)
def test_names_as_the_driver_gives_them(listed: str, name: str, count: int) -> None:
    gpu, found = listed_gpu(listed, GPUS)
    assert (gpu.name, found) == (name, count)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ("NVIDIA H100 80GB HBM3, 81559\nNVIDIA L4, 23034", "several kinds"),
        ("NVIDIA RTX 6000 Ada Generation, 49140", "not in the catalog"),
        ("NVIDIA H100 PCIe MIG 1g.10gb, 9728", "not in the catalog"),
    ],
)
def test_gpus_that_are_not_known(listed: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        listed_gpu(listed, GPUS)


def test_links_of_a_topology() -> None:
    head = "\tGPU0\tGPU1\tCPU Affinity\n"
    assert has_nvlink(head + "GPU0\t X \tNV18\t0-63\nGPU1\tNV18\t X \t0-63\n\nLegend:\n  NV#  = bonded NVLinks\n")
    assert not has_nvlink(head + "GPU0\t X \tPHB\t0-63\nGPU1\tPHB\t X \t0-63\n\nLegend:\n  NV#  = bonded NVLinks\n")


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="has GPUs: it is then planned for those")
def test_this_machine_without_gpus() -> None:
    cluster = parse_cluster("local")
    assert (cluster.gpu.device, cluster.num_nodes) == ("cpu", 1)
    assert cluster.gpus_per_node == len(os.sched_getaffinity(0))
    kibibytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert cluster.host_ram_gib == pytest.approx(kibibytes / 1024**2)


def test_reading_this_machine_imports_no_torch() -> None:
    code = "import sys; from kit.specs.catalog import *; parse_cluster('this'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
