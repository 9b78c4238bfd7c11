"""Files of every shipped recipe for Kubernetes and SkyPilot, read by the parsers of the projects that will read them.

    python -m tests.system.cloud_targets [--environment DIR] [--plant]

Kubeflow's generated classes (kubeflow-trainer-api, with JobSet's and Kubernetes') read and write each manifest: what
they drop is no key of theirs. SkyPilot makes a task of each sky.yaml. Their dependencies clash with kit's, so they are
installed in a virtual environment of their own, DIR, which is kept for the next time. No cluster is asked.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from kit.emit.run_directory import files_of
from kit.specs.shipped import recipe_names
from scripts.shipped_files import shipped_plan
from tests.support import readers
from tests.support.files import file_with
from tests.support.program import run

ENVIRONMENT = Path(".venv/cloud-parsers")
PACKAGES = ("kubeflow-trainer-api==2.3.0", "skypilot==0.14.1", "pyyaml")
READER = """
import json, pathlib, sys, yaml
import sky
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

KINDS = {"JobSet": JobsetV1alpha2JobSet, "TrainJob": TrainerV1alpha1TrainJob}
problems = {}
for path in map(pathlib.Path, sys.argv[1:]):
    data = yaml.safe_load(path.read_text())
    try:
        if path.name == "sky.yaml":
            del data["file_mounts"]  # a bucket of the user's, which SkyPilot would look for
            nodes = data.get("num_nodes")
            assert sky.Task.from_yaml_config(data).num_nodes == nodes
        else:
            kept = KINDS[data["kind"]].from_dict(data).to_dict()
            assert json.loads(json.dumps(kept)) == data, f"kept {kept}"
    except Exception as error:
        problems[str(path)] = repr(error)[:500]
print(json.dumps(problems))
"""


def main(environment: Path = ENVIRONMENT, plant: bool = False) -> int:
    """0 where every file is accepted. ``--plant``: misspell a key of each file, which has to be noticed."""
    python = readers.environment(environment, whole=PACKAGES, borrows=False)
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        plans = {recipe: plan for recipe in recipe_names() if (plan := shipped_plan(recipe)) is not None}
        for recipe in (each for each, plan in plans.items() if plan.cluster.gpu.device != "cpu"):
            files = files_of(plans[recipe], ("k8s", "sky"))
            for name in files.keys() - files_of(plans[recipe]).keys():
                wrong = files[name].replace("replicatedJobs", "replicatedJob").replace("num_nodes", "nodes")
                paths.append(file_with(Path(folder) / recipe / name, wrong if plant else files[name]))
        return readers.judged(python, READER, paths, plant)


if __name__ == "__main__":
    run(main)
