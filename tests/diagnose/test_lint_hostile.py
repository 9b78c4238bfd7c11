"""Whatever stands in a file, lint answers with findings or one clear error."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.diagnose.lint import lint
from kit.diagnose.lint.known_keys import accelerate_keys, deepspeed_keys
from kit.errors import KitError
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster

MODEL, CLUSTER = load_model("llama-3.2-1b"), parse_cluster("2xH100")
VALUES = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 3, 2**63, 10**400, 1e308, -1e308, 0.5, "", "auto", "none", "cpu", "nvme"]
    ),
    st.sampled_from(
        ["1e999", "nan", "inf", "-inf", "Lamb", "DEEPSPEED", "FSDP", "MULTI_GPU", "NO", "0,1", "x" * 300, "\u0000"]
    ),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=1),
)


def below(tree: Any) -> st.SearchStrategy[Any]:
    """Some keys of a reader, with anything behind them."""
    if not isinstance(tree, dict):
        return VALUES
    return st.one_of(VALUES, st.fixed_dictionaries({}, optional={key: below(inner) for key, inner in tree.items()}))


def some(tree: Any) -> st.SearchStrategy[Any]:
    keys = st.lists(st.sampled_from(sorted(tree)), min_size=1, max_size=6, unique=True)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: below(tree[key]) for key in chosen}))


FUZZ = settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def answer(path: Path) -> None:
    with contextlib.suppress(KitError):
        for finding in lint(path, model=MODEL, cluster=CLUSTER):
            assert len(str(finding)) < 2000


@FUZZ
@given(data=some(dict(deepspeed_keys().tree)), named=st.booleans())
def test_deepspeed_configurations(tmp_path_factory: pytest.TempPathFactory, data: Any, named: bool) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "ds.json"
    path.write_text(json.dumps(data | ({"zero_optimization": {"stage": 3}} if named else {})))
    answer(path)


@FUZZ
@given(data=some(dict(accelerate_keys().tree)), kind=st.sampled_from(["DEEPSPEED", "FSDP", "MULTI_GPU", "NO", None]))
def test_accelerate_configurations(tmp_path_factory: pytest.TempPathFactory, data: Any, kind: str | None) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "accelerate.yaml"
    path.write_text(strict_yaml.dump(data | ({"distributed_type": kind} if kind else {})))
    answer(path)


@FUZZ
@given(
    words=st.lists(
        st.sampled_from(
            [
                "torchrun",
                "deepspeed",
                "accelerate",
                "launch",
                "srun",
                "python",
                "-m",
                "t.py",
                "--nproc_per_node",
                "8",
                "=",
                "$X",
                "\\",
                "\n",
                "--deepspeed",
                "CUDA_VISIBLE_DEVICES=0,",
                "--nnodes",
                "9" * 400,
                "$((",
                "))",
                "'",
                "#SBATCH --ntasks=2",
                "#SBATCH --nodes=2",
                "--node_rank",
                "pretrain_gpt.py",
                "--micro-batch-size",
                "--global-batch-size",
                "0",
                "A=(",
                ")",
                '"${A[@]}"',
                "A=8",
                '"$@"',
                "--gpu_ids",
                ",",
            ]
        ),
        max_size=12,
    )
)
def test_launch_lines(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "run.sh"
    path.write_text(" ".join(words))
    answer(path)


JOBS = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(
        st.sampled_from(
            [
                "spec",
                "replicas",
                "command",
                "args",
                "env",
                "containers",
                "resources",
                "limits",
                "nvidia.com/gpu",
                "name",
                "value",
                "pytorchReplicaSpecs",
                "Worker",
                "numNodes",
                "completions",
            ]
        ),
        inner | st.lists(inner | st.sampled_from(["bash", "-c", "torchrun --nnodes 2 t.py", "$(R)"]), max_size=3),
        max_size=4,
    ),
    max_leaves=12,
)


@FUZZ
@given(data=JOBS)
def test_kubernetes_jobs(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "job.yaml"
    path.write_text(strict_yaml.dump({"apiVersion": "v1", "kind": "Job", "spec": data}))
    answer(path)


def test_variables_that_hold_each_other_many_times_are_read_at_once(tmp_path: Path) -> None:
    nested = "".join(f"V{i}=${{V{i - 1}}}${{V{i - 1}}}\n" for i in range(1, 60))
    many = "torchrun --nproc_per_node $V9 t.py\n" * 3000
    (tmp_path / "run.sh").write_text(f"V0=xx\n{nested}torchrun {'$V9 ' * 10_000} t.py\n{many}")
    begin = time.process_time()
    assert len(lint(tmp_path / "run.sh")) < 300
    assert time.process_time() - begin < 5


def test_files_that_no_reader_should_take(tmp_path: Path) -> None:
    """Each is answered with one clear line, at once."""
    os.mkfifo(tmp_path / "pipe.json")
    with (tmp_path / "sparse.json").open("wb") as stream:
        stream.truncate(1 << 34)
    (tmp_path / "deep.json").write_text('{"a":' * 50_000 + "1" + "}" * 50_000)
    (tmp_path / "deep.yaml").write_text("{a: " * 5_000 + "1" + "}" * 5_000)
    (tmp_path / "binary.sh").write_bytes(bytes(range(128, 256)))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(KitError) as caught:
            lint(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_a_hundred_thousand_keys_are_counted_and_not_listed(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(
        json.dumps({"train_batch_size": 8} | {f"zzz{i}": i for i in range(60_000)}, indent=1)
    )
    begin = time.process_time()
    findings = lint(tmp_path / "keys.json")
    assert time.process_time() - begin < 5
    assert len(findings) < 30
    assert "60000 keys" in findings[0].why
    (tmp_path / "keys.json").write_text(json.dumps({"scheduler": {"params": {f"a{i}": "1" for i in range(1000)}}}))
    texts = [finding for finding in lint(tmp_path / "keys.json") if finding.rule == "text-value"]
    assert len(texts) == 51
    assert texts[-1].why == "950 more of the same"
