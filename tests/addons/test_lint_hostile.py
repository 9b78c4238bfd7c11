"""Whatever stands in a file, lint answers with findings or one clear error."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.addons.lint import lint
from kit.addons.lint.known_keys import known_keys
from kit.specs.catalog import load_model, parse_cluster
from tests.support import hostile

MODEL, CLUSTER = load_model("llama-3.2-1b"), parse_cluster("2xH100")
WORDS = (
    "torchrun", "deepspeed", "accelerate", "launch", "srun", "python", "-m", "t.py", "--nproc_per_node", "8", "=", "$X",
    "\\", "\n", "--deepspeed", "CUDA_VISIBLE_DEVICES=0,", "--nnodes", "9" * 400, "$((", "))", "'", "#SBATCH --ntasks=2",
    "#SBATCH --nodes=2", "--node_rank", "pretrain_gpt.py", "--micro-batch-size", "--global-batch-size", "0", "A=(", ")",
    '"${A[@]}"', "A=8", '"$@"', "--gpu_ids", ",",
)  # fmt: skip
IN_JOBS = (
    "spec", "replicas", "command", "args", "env", "containers", "resources", "limits", "nvidia.com/gpu", "name",
    "value",
    "pytorchReplicaSpecs", "Worker", "numNodes", "completions",
)  # fmt: skip
LINES = st.lists(hostile.VALUES | st.sampled_from(["bash", "-c", "torchrun --nnodes 2 t.py", "$(R)"]), max_size=3)
JOBS = st.recursive(
    hostile.VALUES, lambda inner: st.dictionaries(st.sampled_from(IN_JOBS), inner | LINES, max_size=4), max_leaves=12
)
FILES: dict[str, st.SearchStrategy[Any]] = {
    "ds.json": hostile.filled(known_keys("DeepSpeed").tree).map(
        lambda data: {"zero_optimization": {"stage": 3}} | data
    ),
    "accelerate.yaml": hostile.filled(known_keys("accelerate").tree).flatmap(
        lambda data: st.sampled_from(["DEEPSPEED", "FSDP", "NO", []]).map(
            lambda kind: data | {"distributed_type": kind}
        )
    ),
    "run.sh": hostile.of(WORDS, between=" "),
    "job.yaml": JOBS.map(lambda spec: {"apiVersion": "v1", "kind": "Job", "spec": spec}),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_any_file_gets_an_answer(name: str, tmp_path: Path) -> None:
    @hostile.fuzz(25)
    @given(FILES[name])
    def answered(content: Any) -> None:
        path = tmp_path / name
        path.write_bytes(hostile.spelt(content, path.suffix.replace(".sh", "")))
        hostile.answer(lambda path: lint(path, model=MODEL, cluster=CLUSTER), path)

    answered()


NESTED = "V0=xx\n" + "".join(f"V{i}=${{V{i - 1}}}${{V{i - 1}}}\n" for i in range(1, 60))
LARGE = {
    # variables that hold each other many times
    "run.sh": f"{NESTED}torchrun {'$V9 ' * 10_000} t.py\n" + "torchrun --nproc_per_node $V9 t.py\n" * 3000,
    "keys.json": json.dumps({"train_batch_size": 8} | {f"zzz{i}": i for i in range(60_000)}, indent=1),
    "texts.json": json.dumps({"scheduler": {"params": {f"a{i}": "1" for i in range(1000)}}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_very_many_keys_and_variables_are_read_at_once_and_counted(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(LARGE[name])
    begin = time.process_time()
    findings = lint(tmp_path / name)
    assert time.process_time() - begin < 5
    assert len(findings) < (300 if name == "run.sh" else 60)
    whys = [each.why for each in findings if each.rule in ("unknown-key", "text-value")]
    assert name != "keys.json" or "60000 keys" in whys[0]
    assert name != "texts.json" or (len(whys), whys[-1]) == (51, "950 more of the same")
