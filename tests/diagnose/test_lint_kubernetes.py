"""The rules of launch lines read Kubernetes jobs too: each pair differs in one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kit
from kit.diagnose.lint import lint
from kit.emit.run_directory import files_of
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec

LINE = "torchrun --nnodes 2 --nproc_per_node 8 --master_addr job-0.job --master_port 29500 --node_rank"
INDEX = "$JOB_COMPLETION_INDEX"


def job(script: str, nodes: int = 2, gpus: int = 8, env: dict[str, str] | None = None) -> dict[str, Any]:
    container = {
        "command": ["bash", "-c", script],
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    pod = {"template": {"spec": {"containers": [container]}}}
    return {"apiVersion": "batch/v1", "kind": "Job", "spec": {"completions": nodes, "parallelism": nodes, **pod}}


def pytorch_job(words: list[str], workers: int) -> dict[str, Any]:
    replica = {"template": {"spec": {"containers": [{"command": words}]}}}
    replicas = {"Worker": {"replicas": workers, **replica}}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": replicas}}


ONE = ["torchrun", "--nproc_per_node", "8", "--nnodes", "2", "--master_addr", "m", "t.py"]
RANK_0 = [*ONE[:1], "--node_rank", "0", *ONE[1:]]
PAIRS = (
    ("node-rank", job(f"{LINE} 0 t.py"), job(f"{LINE} {INDEX} t.py")),
    ("node-rank", job(f"{LINE} $R t.py", env={"R": "0"}), job(f"{LINE} $R t.py", env={"Q": "0"})),
    ("node-rank", pytorch_job(RANK_0, 2), pytorch_job(ONE, 2)),
    ("node-rank", pytorch_job(RANK_0, 2), pytorch_job(RANK_0, 1)),
    ("one-node", job("torchrun --nproc_per_node 8 t.py"), job("torchrun --nproc_per_node 8 t.py", nodes=1)),
    ("tasks-and-processes", job(f"{LINE} {INDEX} t.py", gpus=4), job(f"{LINE} {INDEX} t.py")),
    (
        "main-process-ip",
        job(f"{LINE} {INDEX} t.py".replace("job-0.job", "$M"), env={"M": "localhost"}),
        job(f"{LINE} {INDEX} t.py".replace("job-0.job", "$M"), env={"M": "job-0.job"}),
    ),
    ("not-read", job("sleep 1"), job("python t.py")),
)


def rules(data: dict[str, Any], directory: Path) -> set[str]:
    (directory / "job.yaml").write_text("# first\n---\n" + strict_yaml.dump(data))
    return {each.rule for each in lint(directory / "job.yaml")}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_the_same_rules(pair: tuple[str, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    rule, wrong, right = pair
    assert rule in rules(wrong, tmp_path)
    assert rule not in rules(right, tmp_path)


def test_a_finding_has_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "apiVersion: batch/v1\nkind: Job\nspec:\n  completions: 2\n  template:\n    containers:\n    - command:\n"
        f"      - bash\n      - -c\n      - |\n        set -e\n        {LINE} 0 t.py\n"
    )
    assert [(each.rule, each.line) for each in lint(path)] == [("node-rank", 12)]


def test_the_jobs_that_kit_writes_are_read_with_their_launch_script(tmp_path: Path) -> None:
    plan = kit.plan(load_model("llama-3.1-8b"), parse_cluster("16xH100"), JobSpec())
    written = files_of(plan, ["k8s"])
    manifests = [name for name in written if name.endswith(".yaml") and name.startswith("k8s.")]
    assert len(manifests) == 2
    for name in manifests:
        (tmp_path / name).write_text(written[name])
        assert {each.rule for each in lint(tmp_path / name)} == {"not-read"}
    (tmp_path / "launch.sh").write_text(written["launch.sh"])
    for name in manifests:
        assert lint(tmp_path / name) == ()
