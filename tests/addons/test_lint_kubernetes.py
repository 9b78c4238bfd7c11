"""The rules of launch lines read Kubernetes jobs too: each pair differs in one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kit
from kit.addons.lint import lint
from kit.addons.lint.job import Job
from kit.addons.lint.kubernetes_job import pod_scripts
from kit.emit.run_directory import files_of
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.job import JobSpec
from tests.support.files import file_with

LINE = "torchrun --nnodes 2 --nproc_per_node 8 --master_addr job-0.job --master_port 29500 --node_rank"
OF_LIMITS, INDEX, PER_NODE, ON_HOST = (
    {"valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    "$JOB_COMPLETION_INDEX",
    "torchrun --nproc_per_node $N t.py",
    "accelerate launch --use_deepspeed --num_processes 8 --zero_stage 2 --offload_optimizer_device cpu t.py",
)


def job(script: str, nodes: int = 2, gpus: int = 8, env: dict[str, Any] | None = None) -> dict[str, Any]:
    container = {
        "command": ["bash", "-c", script],
        "env": [
            {"name": name} | (value if isinstance(value, dict) else {"value": value})
            for name, value in (env or {}).items()
        ],
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
    ("unset-variable", job(PER_NODE, env={"M": "8"}), job(PER_NODE, env={"N": OF_LIMITS})),
    ("not-read", job("sleep 1"), job("python t.py")),
    ("one-thread", job(ON_HOST, nodes=1), job(ON_HOST, nodes=1, env={"OMP_NUM_THREADS": "12"})),
    ("one-thread", job(ON_HOST, nodes=1), job(ON_HOST, nodes=1, env={"OMP_NUM_THREADS": OF_LIMITS})),
)


def rules(data: dict[str, Any], directory: Path) -> set[str]:
    return {each.rule for each in lint(file_with(directory / "job.yaml", "# first\n---\n" + strict_yaml.dump(data)))}


def pod(*words: str, **more: Any) -> dict[str, Any]:
    return {"template": {"containers": [{"command": [*words], **more}]}}


def told(
    text: str, nodes: int, gpus: int | None = None, kubeflow: bool = False, *variables: str
) -> list[tuple[str, Job]]:
    return [(text, Job("kubernetes", nodes, 1, gpus, ranks_by_environment=kubeflow, variables=variables))]


NAMED = {"env": [{"name": "R", "value": "a b"}, {"name": "Q", "valueFrom": {}}]}
MASTER_AND_WORKERS = {"Master": {"replicas": 1, **pod("t")}, "Worker": {"replicas": 3}}
PODS: tuple[tuple[dict[str, Any], list[tuple[str, Job]]], ...] = (
    ({"spec": {"completions": 2, "parallelism": 3, **pod("t")}}, told("t", 3)),
    ({"spec": {"completions": 3, "parallelism": 2, **pod("t")}}, told("t", 3)),
    ({"spec": {"jobs": [{"replicas": 2, "template": {"spec": {"parallelism": 4, **pod("t")}}}]}}, told("t", 8)),
    ({"spec": {"completions": True, "parallelism": 10**7, "replicas": 0, **pod("t")}}, told("t", 1)),
    ({"spec": {"trainer": {"numNodes": 4, "command": ["t"], "resourcesPerNode": {"limits": {"x.com/gpu": "8"}}}}},
     told("t", 4, 8, True)),
    ({"spec": {"pytorchReplicaSpecs": MASTER_AND_WORKERS}}, told("t", 4, None, True)),
    ({"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, **pod("t")}}, "replicas": 9}}, told("t", 2, None,
    True)),
    (pod("torchrun", "a b", "$(R)", "$(S)", **NAMED), told("R='a b'\ntorchrun 'a b' $R $(S)", 1, None, False, "R",
    "Q")),
    (pod("/bin/sh", "-ec", "a\nb", "c"), told("a\nb\nc", 1)),
    (pod("t", "bash"), told("t bash", 1)),
    ({"args": ["t", 1], "resources": {"requests": {"cpu": 4, "nvidia.com/gpu": 2}}}, told("t", 1, 2)),
    (pod("t", resources={"limits": {"nvidia.com/gpu": "$N"}}), told("t", 1)),
    (pod("t", resources={"limits": {"memory": 8}, "requests": {"amd.com/gpu": 8}}), told("t", 1)),
    (pod("t", env=[{"name": "PET_NNODES", "value": 2}]), told("PET_NNODES=2\nt", 1, None, True, "PET_NNODES")),
    ({"command": "t"}, []),
)  # fmt: skip


@pytest.mark.parametrize(("data", "scripts"), PODS, ids=range(len(PODS)))
def test_each_container_has_its_nodes_and_gpus(data: dict[str, Any], scripts: list[tuple[str, Job]]) -> None:
    assert list(pod_scripts(data)) == scripts


@pytest.mark.parametrize(("lists", "scripts"), [(30, told("t", 1)), (31, [])], ids=["as deep as allowed", "deeper"])
def test_containers_are_searched_thirty_levels_deep(lists: int, scripts: list[tuple[str, Job]]) -> None:
    """The container stands in as many lists or mappings, the document's own among them."""
    data: Any = {"command": ["t"]}
    for _ in range(lists - 1):
        data = [data]
    assert list(pod_scripts({"spec": data})) == scripts


BATCHES = {
    "#SBATCH --nodes=3\n#SBATCH --ntasks=4\n#SBATCH --gpus=7": Job("sbatch", 3, 2, 2),
    "#SBATCH -N 2 -n4 -G 16": Job("sbatch", 2, 2, 8),
    "#SBATCH --ntasks=4 --gpus h100:8": Job("sbatch", None, 4, 8),
    "#SBATCH --nodes 2 --ntasks-per-node 8 --gpus-per-node=h100:4 --ntasks=1": Job("sbatch", 2, 8, 4),
    "#SBATCH --nodes=2\n#SBATCH --nodes=4 --gres=gpu:8": Job("sbatch", 4, None, 8),
    "# srun is for later; hostfile; PET_X\npython t.py": Job(),
    "srun python t.py": Job(reaches_hosts=True),
    "for h in $HOSTS; do ssh $h t; done": Job(reaches_hosts=True),
    "cat $HOST_FILE": Job(names_hosts=True),
    "export PET_NNODES=2": Job(ranks_by_environment=True),
}


@pytest.mark.parametrize("text", BATCHES, ids=range(len(BATCHES)))
def test_what_a_batch_script_asks_for(text: str) -> None:
    """Tasks and GPUs of all nodes are shared among them: tasks rounded up, GPUs down."""
    assert Job.of_batch(text) == BATCHES[text]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_the_same_rules(pair: tuple[str, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    rule, wrong, right = pair
    assert rule in rules(wrong, tmp_path)
    assert rule not in rules(right, tmp_path)


def test_a_finding_has_the_line_of_the_file(tmp_path: Path) -> None:
    path = file_with(
        tmp_path / "job.yaml",
        "apiVersion: batch/v1\nkind: Job\nspec:\n  completions: 2\n  template:\n    containers:\n    - command:\n"
        f"      - bash\n      - -c\n      - |\n        set -e\n        {LINE} 0 t.py\n",
    )
    assert [(each.rule, each.line) for each in lint(path)] == [("node-rank", 12)]


def test_one_container_of_two_trains(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("")
    both = job("torchrun --n_proc 8 t.py") | {"sidecar": {"command": ["sleep", "1"]}}
    assert rules(both, tmp_path) == {"unknown-option", "one-process", "one-node"}
    assert rules(job("sleep 1") | {"sidecar": {"command": ["sleep", "2"]}}, tmp_path) == {"not-read"}
    assert rules(job("python t.py\nswift sft", nodes=1), tmp_path) == {"not-read"}
    assert [each.severity for each in lint(tmp_path / "job.yaml")] == ["note"]


def test_the_jobs_that_kit_writes_are_read_with_their_launch_script(tmp_path: Path) -> None:
    written = files_of(kit.plan(load_model("llama-3.1-8b"), parse_cluster("16xH100"), JobSpec()), ["k8s"])
    manifests = [name for name in written if name.endswith(".yaml") and name.startswith("k8s.")]
    assert len(manifests) == 2
    for name in manifests:
        assert {each.rule for each in lint(file_with(tmp_path / name, written[name]))} == {"not-read"}
    (tmp_path / "launch.sh").write_text(written["launch.sh"])
    assert [finding for name in manifests for finding in lint(tmp_path / name)] == []
