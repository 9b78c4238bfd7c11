"""Offload to NVMe: what it takes on disk and in host memory, when it is refused, and when the planner turns to it."""

from __future__ import annotations

import dataclasses

import pytest

import kit
from kit.cost.memory import deepspeed_sizes as sizes
from kit.cost.memory.offload import host_ram_gib_per_node, nvme_gib_per_node
from kit.cost.memory.peak import peak_gib
from kit.cost.model.params import count
from kit.cost.time.step import step_time_components_s
from kit.cost.workload import Workload
from kit.errors import PlanError
from kit.planner.rules import violations
from kit.specs.catalog import load_model, parse_cluster
from tests.support.models import deepspeed, job

LLAMA = load_model("llama-3.1-8b")
NODE = parse_cluster("8xA100-40")
PARAMETERS = count(LLAMA).total


def layout(optimizer="nvme", param="nvme", **changes):
    chosen = {"zero_stage": 3, "dp": 8, "micro_batch_size": 1, "gradient_accumulation_steps": 16}
    return deepspeed(offload_optimizer=optimizer, offload_param=param, **(chosen | changes))


def test_bytes_on_disk_by_hand() -> None:
    """12 of masters and moments, 4 of gradients, 2 of weights; on two nodes half on each."""
    two = dataclasses.replace(NODE, num_nodes=2)
    assert nvme_gib_per_node(Workload(LLAMA, NODE, job(precision="bf16"), layout())) == pytest.approx(
        PARAMETERS * 18 / 2**30
    )
    assert nvme_gib_per_node(Workload(LLAMA, NODE, job(precision="bf16"), layout(param="none"))) == pytest.approx(
        PARAMETERS * 16 / 2**30
    )
    assert nvme_gib_per_node(Workload(LLAMA, NODE, job(precision="bf16"), layout(optimizer="cpu"))) == pytest.approx(
        PARAMETERS * 2 / 2**30
    )
    assert nvme_gib_per_node(Workload(LLAMA, two, job(precision="bf16"), layout(dp=16))) == pytest.approx(
        PARAMETERS * 9 / 2**30
    )


def test_host_memory_is_buffers_and_summed_gradients() -> None:
    """fp32 sums of gradients stay; four buffers of a sub group, five of the embedding's part, one of whole weights."""
    embedding = LLAMA.vocab_size * LLAMA.hidden_size // 8
    group = sizes.NVME_SUB_GROUP + embedding
    rank = 1.5 * 4 * PARAMETERS / 8 + 4 * 4 * group + 5 * 2 * embedding + 2 * group * 8
    assert host_ram_gib_per_node(Workload(LLAMA, NODE, job(precision="bf16"), layout())) == pytest.approx(
        8 * rank / 2**30
    )
    # A model smaller than a sub group is one sub group.
    small = load_model("gpt2")
    assert sizes.largest_sub_group(small, layout(), 10**8) == -(-count(small).total // 8)


def test_a_buffer_holds_the_largest_weight() -> None:
    for name in ("llama-3.1-8b", "llama-3-70b", "gpt2", "qwen2.5-7b"):
        model = load_model(name)
        assert sizes.least_param_buffer(model, layout()) * 8 >= model.vocab_size * model.hidden_size
        assert sizes.least_param_buffer(model, layout()) * 8 >= model.hidden_size * model.ffn_hidden_size


def test_pinned_sizes_are_what_is_counted() -> None:
    def workload(**changes):
        return Workload(LLAMA, NODE, job(precision="bf16"), layout(optimizer="none", param="none", **changes))

    chosen = sizes.buffer_sizes(LLAMA, NODE, layout(optimizer="none", param="none"))
    plain, same = workload(), workload(**chosen)
    assert peak_gib(same) == peak_gib(plain)
    assert step_time_components_s(same) == step_time_components_s(plain)
    for name, bytes_each in (("reduce_bucket_size", 2), ("stage3_max_live_parameters", 2)):
        more = workload(**{name: chosen[name] + 2**30})
        assert peak_gib(more) - peak_gib(plain) == pytest.approx(bytes_each), name
    # Key and value matrices (4096 x 1024) stay whole on every rank, and are gathered no more.
    whole = workload(stage3_param_persistence_threshold=5_000_000)
    kept = 2 * 32 * 4096 * 1024
    assert peak_gib(whole) - peak_gib(plain) == pytest.approx(2 * kept / 2**30)


def test_small_buckets_wait_for_a_long_ring() -> None:
    """On 512 ranks a matrix is too short a message for the fabric, and the bucket that is chosen holds more."""
    many = parse_cluster("512xA100-80")

    def step_s(**changes):
        wide = layout(optimizer="none", param="none", dp=512, gradient_accumulation_steps=1, **changes)
        return sum(step_time_components_s(Workload(LLAMA, many, job(precision="bf16"), wide)).values())

    chosen = sizes.buffer_sizes(LLAMA, many, layout(optimizer="none", param="none", dp=512))["reduce_bucket_size"]
    assert step_s(reduce_bucket_size=chosen) == step_s()
    assert step_s() < step_s(reduce_bucket_size=chosen // 4) < step_s(reduce_bucket_size=1000)


def test_pinned_nvme_buffers_take_host_memory() -> None:
    def host(**changes):
        return host_ram_gib_per_node(Workload(LLAMA, NODE, job(precision="bf16"), layout(**changes)))

    part = sizes.least_param_buffer(LLAMA, layout())
    group = sizes.NVME_SUB_GROUP + part
    assert host(optimizer_buffer_count=5) - host() == pytest.approx(8 * 4 * group / 2**30)
    assert host(param_buffer_count=7) - host() == pytest.approx(8 * 2 * 2 * part / 2**30)
    assert host(param_buffer_size=2 * part) - host() == pytest.approx(8 * 5 * 2 * part / 2**30)
    smaller = 4 * 4 * (sizes.NVME_SUB_GROUP // 2) + 2 * 8 * (sizes.NVME_SUB_GROUP // 2)
    assert host() - host(sub_group_size=sizes.NVME_SUB_GROUP // 2) == pytest.approx(8 * smaller / 2**30)


def test_rules() -> None:
    cluster = dataclasses.replace(NODE, host_ram_gib=4000.0, nvme_gib=8000.0)
    assert broken(cluster, layout()) == []
    assert broken(cluster, layout(param="none", zero_stage=2)) == ["nvme_needs_zero_3"]
    assert broken(dataclasses.replace(cluster, nvme_gib=None), layout()) == ["nvme"]
    assert broken(dataclasses.replace(cluster, nvme_gib=100.0), layout()) == ["nvme"]
    assert broken(dataclasses.replace(cluster, host_ram_gib=10.0), layout()) == ["host_ram"]


def broken(cluster, chosen):
    workload = Workload(model=LLAMA, cluster=cluster, job=job(), layout=chosen)
    return [violation.rule for violation in violations(workload)]


def test_faster_disks_make_faster_steps_and_host_memory_is_faster_still() -> None:
    def offload(chosen, gbytes_per_s):
        cluster = dataclasses.replace(NODE, nvme_gbytes_per_s=gbytes_per_s)
        return step_time_components_s(Workload(LLAMA, cluster, job(), chosen))["offload"]

    on_disk = [offload(layout(), speed) for speed in (2.0, 8.0, 32.0)]
    assert on_disk == sorted(on_disk, reverse=True)
    assert offload(layout("cpu", "cpu"), 2.0) < on_disk[2]
    # Masters, moments and gradients, each in and out, at 8 GB/s and nothing else in the way.
    alone = offload(layout(param="none"), 8.0) - offload(layout("cpu", "none"), 8.0)
    assert alone == pytest.approx(32 * PARAMETERS / 8e9)


def test_the_planner_turns_to_disks_where_host_memory_is_short() -> None:
    cluster = dataclasses.replace(parse_cluster("1xA100-40"), host_ram_gib=200.0, nvme_gib=2000.0)
    plan = kit.plan("llama-2-13b", cluster, job(seq_length=2048))
    assert "nvme" in (plan.layout.offload_optimizer, plan.layout.offload_param)
    assert plan.predicted.nvme_gib_per_node > 100
    with pytest.raises(PlanError, match="does not fit"):
        kit.plan("llama-2-13b", dataclasses.replace(cluster, nvme_gib=None), job(seq_length=2048))
