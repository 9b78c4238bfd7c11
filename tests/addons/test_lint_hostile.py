"""Whatever stands in a file, lint answers with findings or one clear error."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.addons.lint import lint
from kit.addons.lint.known_keys import accelerate_keys, deepspeed_keys
from kit.errors import KitError
from kit.specs.catalog import load_model, parse_cluster
from tests.support import hostile
from tests.support.refusals import refusal

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
    "ds.json": hostile.filled(deepspeed_keys().tree).map(lambda data: {"zero_optimization": {"stage": 3}} | data),
    "accelerate.yaml": hostile.filled(accelerate_keys().tree).flatmap(
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


@pytest.mark.slow
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
    for name, text in (("deep.json", '{"a":' * 50_000), ("deep.yaml", "{a: " * 5_000), ("binary.sh", "\ud890" * 99)):
        (tmp_path / name).write_text(text, errors="surrogatepass")
    for path in sorted(tmp_path.iterdir()):
        refused = refusal(KitError, lint, path)
        assert "\n" not in refused
        assert len(refused) < 300


@pytest.mark.slow
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
