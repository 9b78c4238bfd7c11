"""Every reader answers whatever stands in its file: with a value, or with clear lines, in bounded time and memory.

python -m tests.test_readers runs 250 inputs a reader instead of 15 (make prove NAME=readers).
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kit
from kit.diagnose.lint import lint
from kit.diagnose.logs import diagnose
from kit.emit.run_directory import RunDirectory, write
from kit.errors import KitError
from kit.planner import calibration
from kit.planner.plan import Plan
from kit.specs import strict_yaml
from kit.specs.catalog import load_model, parse_cluster
from kit.specs.recipe import load_recipe
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.counters import Counters
from kit.training.checkpoint.engine_checkpoint import read_manifest
from kit.training.checkpoint.exchange import ExchangeCheckpoint, exchange_json
from kit.training.checkpoint.files import sealed
from kit.training.logging.metrics import MetricsLog, logged_steps
from tests.emit.test_preflight import CONFIG

EXAMPLES = int(os.environ.get("READERS_EXAMPLES", "15"))
SECONDS, HANGS_AFTER, GROWTH_KIB = 2.0, 20, 500 << 10
LONGEST, MOST_LINES = 20_000, 60
HERE = "@@here@@"
"""Stands where raw text is put into a file."""

VALUES = st.sampled_from(
    [
        None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**32, 2**63, 10**30, 10**63, 10**400, 0.0, 0.5, -0.5, 1e-300,
        5e-324, 1e30, 1e308, -1e308, float("inf"), float("-inf"), float("nan"), "", " ", "auto", "none", "x", "1e999",
        "8xH100", "9999999999xH100", "13B", "9" * 400 + "B", "../x", "~nobody/x", "~", "/", ".", "a\0b", "a\nb",
        "\ud800", "\u2028", "x" * 300, "x/" * 3000, "é" * 5000, [], {}, [None], [[]], [0, 1], [-1], ["x"] * 3,
        {"x": 1}, {"": {}}, {"rope_type": []}, {"rope_type": "linear", "factor": "x"}, {"name": "x"},
        ["full_attention", 1], ["sliding_attention"] * 2,
    ]
)  # fmt: skip


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


RAW = {
    "json": [
        "9" * 5000, "-" + "9" * 4000, "0." + "1" * 5000, "1e999", "NaN", "-Infinity", '{"a": 1, "a": 2}', '"\\ud800"',
        '"\\u0000"', "'x'", "", "{", "// x", "tru", _nested("[", "", "]", 70), _nested("[", "1", "]", 900),
        _nested('{"a":', "1", "}", 950), "[" * 100_000, '{"a":' * 100_000, "[" + "[]," * 100_000 + "[]]",
        "{" + ",".join(f'"k{i}": {i}' for i in range(20_000)) + "}", '"' + "x" * 1_000_000 + '"', "1" * 1_000_000,
        '"' + "\\n" * 300_000 + '"', " " * 2_000_000 + "1", "\n" * 900_000 + "1",
    ],
    "yaml": [
        "9" * 5000, "0x" + "f" * 5000, "1:" * 3000 + "1", ".inf", "-.inf", ".nan", "1e999", "2024-01-01",
        "2024-01-01 10:00:00", "!!set {a, b}", "!!binary aGVsbG8=", "!!omap [a: 1]", "!!int x", "!!bool x",
        "!!float x", "!!timestamp x", "!!null x", "!!python/object/apply:os.system [id]", "!x y", "{? [a] : 1}",
        "{? {a: 1} : 1}", "{? !!binary aGk= : 1}", "{1: x, null: y, 1.5: z}", "{true: x}", "=", "<<", "{<<: {a: 1}}",
        "{<<: 1}", "{<<: [1]}", "*nothing", "&a [*a, *a]", "&a {x: *a}", '"a\\0b"', "'", '"', "%", "@", "`", "\t",
        "- ", "? ", ": ", "|", ">", "--- 1", "...", "[" * 100_000, "{a: " * 50_000, "- " * 20_000, "? " * 20_000,
        _nested("[", "1", "]", 70), _nested("{a: ", "1", "}", 900), "[" + "[]," * 200_000 + "]",
        "{" + ", ".join(f"k{i}: {i}" for i in range(40_000)) + "}", "x" * 1_000_000, "[" + "1," * 300_000 + "]",
        "[&a0 [x,x], " + ", ".join(f"&a{i} [" + f"*a{i - 1}," * 9 + "]" for i in range(1, 12)) + "]",
        "{a0: &a0 {x: 1}, " + ", ".join(f"a{i}: &a{i} {{<<: [" + f"*a{i - 1}," * 9 + "]}" for i in range(1, 9)) + "}",
    ],
    "text": [
        "9" * 5000, "\\", "'", '"', "$((", "`", "\t" * 1000, "\\\n" * 2000, "x" * 1_000_000, "\n" * 200_000,
        "--a=" * 5000,
        "torchrun --nproc_per_node " + "9" * 5000 + " t.py", "#SBATCH --ntasks=" + "9" * 5000,
        "accelerate launch --num_processes -1 --config_file /dev/zero t.py",
        "deepspeed --num_gpus 1e999 t.py --deepspeed .",
        '{"step": ' + "[" * 5000, '{"step": 1e999}', '{"step": "1", "loss": {}}', '{"step": 1}',
        '{"step": -1, "loss": null}',
        '{"step": 1, "loss": "x", "grad_norm": []}', "[1]", "null", '{"step": true, "loss": 1, "grad_norm": 1}',
        "Traceback (most recent call last):\n" * 300, '  File "' + "x" * 5000, "[rank9999999]: RuntimeError: ",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB",
    ],
}  # fmt: skip
"""By format: what PyYAML, ``json`` or a program has a tag, a limit or a repetition for."""
WHOLE: list[bytes] = [
    b"", b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"null", b"[]", b"{}", b"1", b"\x80" * 100, b"a", b"{}\n{}",
    b"--- a\n--- b",
    b"PK\x03\x04", b"\x1f\x8b\x08" + b"\0" * 100, b"\x80\x04\x95cos\nsystem\n", b"x" * 3_000_000, b"\0" * 3_000_000,
    b"\n" * 3_000_000, "".join(f"k{i}: {i}\n" for i in range(60_000)).encode(),
    ("{" + ",".join(f'"k{i}":{i}' for i in range(60_000)) + "}").encode(),
]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A file that kit reads, and what reads it."""

    name: str
    """The file's, below a directory that ``make`` fills."""
    read: Callable[[Path], object]
    """Of the file's path."""
    good: Callable[[Path], Any]
    """Values of a file that is read without an error, of its path; text for a file that is no tree."""
    make: Callable[[Path], None] = lambda directory: None
    reseal: bool = False
    """Whether its own hash is put right after the damage, as by who means harm."""

    @property
    def format(self) -> str:
        """Kind of text."""
        return {".json": "json", ".yaml": "yaml"}.get(Path(self.name).suffix, "text")

    def spelt(self, values: Any) -> str:
        """The file's text."""
        if self.format == "yaml":
            return strict_yaml.dump(values)
        return json.dumps(values) if self.format == "json" else str(values)


@cache
def planned() -> Plan:
    job = kit.JobSpec(seq_length=32, global_batch_size=8, total_tokens=10_000, precision="fp32")
    return kit.plan(MODEL, parse_cluster("2xcpu"), job, kit.Pins(engine="deepspeed", zero_stage=2))


MODEL = dataclasses.replace(load_model("llama-3.2-1b"), num_layers=2, hidden_size=64, head_dim=2, ffn_hidden_size=64)
CLUSTER = parse_cluster("2xH100")
RECIPE = {
    "model": {
        "name": "own", "family": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "cluster": "2xcpu",
    "job": {"seq_length": 32, "global_batch_size": 8, "learning_rate": 1e-3,
            "optimizer": {"name": "adamw", "eps": 1e-8}, "lora": None, "grad_clip": 1.0},
    "run": {"data": {"train": "x", "seed": 1}, "seed": 1, "steps": 3, "nvme_path": "y", "limits": {"hang_seconds": 9.0},
            "schedule": {"warmup_steps": 2}, "logging": {"gradients_at_steps": [1]}},
    "layout": {"engine": "deepspeed", "zero_stage": 2, "micro_batch_size": 1, "recompute": "none", "tp": 1},
}  # fmt: skip
OWN_CLUSTER = {
    "num_nodes": 2,
    "gpus_per_node": 2,
    "intra_node_gbytes_per_s": 9.0,
    "inter_node_gbytes_per_s": 9.0,
    "gpu": "H100",
    "host_ram_gib": 64,
}
DS_CONFIG = {
    "train_batch_size": 16, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "initial_scale_power": 16}, "gradient_clipping": 1.0, "wall_clock_breakdown": False,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "sub_group_size": 1e9, "overlap_comm": True,
                          "offload_optimizer": {"device": "nvme", "nvme_path": "/x", "buffer_count": 4},
                          "offload_param": {"device": "cpu", "buffer_size": 1e8}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "activation_checkpointing": {"number_checkpoints": 2}, "aio": {"block_size": 1048576},
}  # fmt: skip
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1,
    "mixed_precision": "bf16", "machine_rank": 0, "main_process_port": 29500, "gpu_ids": "all", "downcast_bf16": "no",
    "deepspeed_config": {"zero_stage": 3, "gradient_accumulation_steps": 1, "offload_optimizer_device": "cpu"},
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip
STEP = '{"step": 1, "loss": 2.0, "grad_norm": 1.0, "samples_seen": 8}\n'
HASH = {"bytes": 3, "xxh3_128": "0" * 32}


def _run_directory(path: Path) -> None:
    path.rmdir()
    write(planned(), RunSpec(data=DataSpec(train=str(path / "train"))), path)


def _opened(path: Path) -> None:
    run = RunDirectory.open(path.parent)
    run.memory_after_edits()
    "\n".join(map(str, run.edits))


def _metrics(path: Path) -> None:
    logged_steps(path, 3, 100)
    MetricsLog(path, 3).close()


def _exchange() -> Any:
    from kit.engines.base import StateKind
    from kit.training.checkpoint.files import FileRecord

    counters = Counters(step=1, samples_seen=8, tokens_seen=64, optimizer_steps=1, samples_skipped=0)
    return exchange_json(counters, MODEL, {StateKind.MASTER: {"w": "f"}}, {"f": FileRecord(**HASH)})  # type: ignore[arg-type]


def _native() -> Any:
    counters = {"step": 1, "samples_seen": 8, "tokens_seen": 64, "optimizer_steps": 1, "samples_skipped": 0}
    kept = {"format": "kit-native", "version": 3, "plan_hash": "x", "world_size": 1, "model": "x"}
    return sealed({**kept, "counters": counters, "files": {"state/x": HASH}})


def _linted(path: Path) -> None:
    for finding in lint(path, model=MODEL, cluster=CLUSTER):
        assert len(str(finding)) < LONGEST


def _as_emitted(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else strict_yaml.parse_text(text, path.name).data


READERS = {
    "recipe": Reader("recipe.yaml", load_recipe, lambda _: RECIPE),
    "planned recipe": Reader("recipe.yaml", lambda path: kit.plan(load_recipe(path)), lambda _: RECIPE),
    "cluster": Reader("cluster.yaml", lambda path: parse_cluster(str(path)), lambda _: OWN_CLUSTER),
    "model": Reader("config.json", lambda path: load_model(path.parent), lambda _: CONFIG),
    "plan": Reader("plan.yaml", lambda path: Plan.load(path).digest, _as_emitted, _run_directory),
    "manifest": Reader("manifest.json", _opened, _as_emitted, _run_directory),
    "run": Reader("run.yaml", _opened, _as_emitted, _run_directory),
    "edited ds_config": Reader("ds_config.json", _opened, _as_emitted, _run_directory),
    "native checkpoint": Reader(
        "manifest.json", lambda path: read_manifest(path.parent), lambda _: _native(), reseal=True
    ),
    "exchange checkpoint": Reader(
        "exchange.json", lambda path: ExchangeCheckpoint(path.parent), lambda _: _exchange(), reseal=True
    ),
    "calibration": Reader(
        "rows.yaml", calibration.load, lambda _: {"x": {"step_time_factor": 1.0, "extra_gib": 0.0, "runs": 1}}
    ),
    "metrics": Reader("metrics.jsonl", _metrics, lambda _: STEP + HERE + "\n" + STEP),
    "log": Reader(
        "rank0.log", lambda path: diagnose([path]), lambda _: f"[rank0]: step 1\n{HERE}\n[rank1]: Error: x\n"
    ),
    "ds_config": Reader("ds.json", _linted, lambda _: DS_CONFIG),
    "accelerate": Reader("accelerate.yaml", _linted, lambda _: ACCELERATE),
    "script": Reader(
        "run.sh", _linted, lambda _: f"#!/bin/bash\n#SBATCH --nodes=2\ntorchrun {HERE} --nnodes 2 t.py {HERE}\n"
    ),
}


def _places(tree: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place] * bool(place) + [found for key, value in inner for found in _places(value, (*place, key))]


def _put(tree: Any, place: tuple[Any, ...], value: Any, how: str) -> None:
    """Damages a tree; nothing where an earlier damage took the place away."""
    for step in place[:-1]:
        try:
            tree = tree[step]
        except (LookupError, TypeError):
            return
    if isinstance(tree, dict):
        if how == "remove":
            tree.pop(place[-1], None)
        else:
            tree[f"{place[-1]}{'x' * (how == 'add')}"] = value


def _damaged(data: st.DataObject, reader: Reader, directory: Path) -> bytes:
    """The file's bytes: a good tree with other values or raw text in some places, or something else altogether."""
    kind = data.draw(st.sampled_from(["values", "values", "values", "raw", "whole", "bytes", "cut"]))
    good = reader.good(directory / reader.name)
    if kind == "whole":
        return data.draw(st.sampled_from(WHOLE))
    if kind == "bytes":
        return data.draw(st.binary(max_size=200))
    raw = data.draw(st.sampled_from(RAW[reader.format]))
    if reader.format == "text":
        return str(good).replace(HERE, raw).encode()
    tree = json.loads(json.dumps(good))
    for place in data.draw(st.lists(st.sampled_from(_places(tree)), min_size=1, max_size=3)):
        how = data.draw(st.sampled_from(["change", "change", "change", "add", "remove"]))
        _put(tree, place, HERE if kind == "raw" else data.draw(VALUES), how)
    if reader.reseal and kind == "values" and data.draw(st.booleans()):
        tree = sealed(tree)
    text = json.dumps(tree) if reader.format == "json" else strict_yaml.dump(tree)
    if kind == "raw":
        text = text.replace(f'"{HERE}"' if reader.format == "json" else f"'{HERE}'", raw).replace(HERE, raw)
    encoded = text.encode(errors="surrogatepass")
    return encoded[: data.draw(st.integers(0, len(encoded)))] if kind == "cut" else encoded


class Hang(BaseException):
    """A reader that did not answer; no ``except Exception`` catches it."""


def _hangs(signal_number: int, frame: FrameType | None) -> None:
    raise Hang


def judge(reader: Reader, path: Path) -> str:
    """``answered`` or ``refused``; AssertionError where the reader took too long, too much, or raised anything else."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(HANGS_AFTER)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (2 << 30), limits[1]))  # a MemoryError, and not the end of all
    started = time.process_time()
    try:
        reader.read(path)
        outcome = "answered"
    except KitError as error:
        outcome, said = "refused", str(error)
        lines = said.splitlines()
        assert 0 < len(said) < LONGEST, said[:3000]
        assert len(lines) < MOST_LINES, said[:3000]
        assert all(line.isprintable() for line in lines), ascii(said[:3000])
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    seconds = time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert seconds < SECONDS, f"{seconds:.1f} s"
    assert grown < GROWTH_KIB, f"{grown >> 10} MB"
    return outcome


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports and tables are read once, before any clock runs."""
    for name, reader in READERS.items():
        (directory := tmp_path_factory.mktemp("warm") / "x").mkdir()
        reader.make(directory)
        path = directory / reader.name
        path.write_text(reader.spelt(reader.good(path)).replace(HERE, "x"), encoding="utf-8")
        try:
            reader.read(path)
        except KitError as error:
            raise AssertionError(f"{name}: the good file is refused: {error}") from None


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_answered_or_refused_in_words(name: str, tmp_path: Path) -> None:
    reader, counts = READERS[name], Counter[str]()
    (directory := tmp_path / "x").mkdir()
    reader.make(directory)
    path = directory / reader.name
    whole = path.read_bytes() if path.exists() else b""

    @settings(
        report_multiple_bugs=False, max_examples=EXAMPLES, deadline=None, database=None, derandomize=EXAMPLES < 100,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def damaged(data: st.DataObject) -> None:
        path.write_bytes(whole)
        path.write_bytes(_damaged(data, reader, directory))
        counts[judge(reader, path)] += 1

    damaged()
    print(f"\n{name}: {counts.total()} inputs, {dict(counts)}, 0 tracebacks, 0 hangs")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 33)


def _loop(path: Path) -> None:
    path.symlink_to(path)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "directory": Path.mkdir,
    "8 GiB of nothing": _sparse,
    "link to itself": _loop,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "missing": lambda path: None,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [name for name in READERS if name != "planned recipe"])
def test_what_is_no_file_is_refused_in_words(name: str, kind: str, tmp_path: Path) -> None:
    if name in ("log", "metrics") and kind == "8 GiB of nothing":
        return  # both may be as long: read in pieces, in time that grows with them (test_logs_large)
    reader = READERS[name]
    (directory := tmp_path / "x").mkdir()
    reader.make(directory)
    path = directory / reader.name
    path.unlink(missing_ok=True)
    SPECIAL[kind](path)
    fine = {("metrics", "missing")}  # to begin with
    fine |= {(each, "directory") for each in ("ds_config", "accelerate", "script")}  # a run directory
    assert judge(reader, path) == ("answered" if (name, kind) in fine else "refused")


if __name__ == "__main__":
    os.environ.setdefault("READERS_EXAMPLES", "250")  # read when pytest imports this file again
    sys.exit(pytest.main(["-q", "-s", __file__, *sys.argv[1:]]))
