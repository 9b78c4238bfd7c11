"""``python -m tests.system.huggingface_scripts --scripts DIR``: Hugging Face's own examples, unchanged.

DIR is ``examples/pytorch`` of a checkout of transformers (Apache-2.0); ``SCRIPTS`` has the SHA-256 of each file that
was run. Each script trains a tiny model on two CPU processes under kit's emitted files of every layout, and under DDP
by ``accelerate launch`` without any configuration of kit's. It must say that it became the engine of the layout, and
reach DDP's numbers. ``own_script.py`` joins the ranks without GPUs; metrics come from local files. The scripts need
evaluate beside the extra all.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import load_file

from kit.emit import own_script
from kit.emit.own_optimizer import ACCELERATE
from tests.support.assets import ROOT
from tests.support.page import Section, table, write_json
from tests.support.program import chosen, run
from tests.system.examples.cases import DDP, DDP_BY_HAND, LAUNCH, LAYOUTS, start, with_files, words
from tests.system.examples.inputs import BLOCK, EPS, plan_for, prepare

RESULTS = ROOT / "benchmarks" / "results" / "huggingface-scripts.json"
BOUND = {"moved": 1e-2}
"""Relative, of each number; 1e-5 where it is not here. ``moved`` is the Euclidean distance between exported weights and
DDP's, over how far DDP's moved from the start: Adam's epsilon is 1e-8 in scripts without a Trainer, and rounding
decides the sign of steps whose gradient is almost zero."""
PROCESSES, BATCH, EPOCHS = 2, 4, 6
ROWS = PROCESSES * BATCH
"""One step is the whole set: ZeRO-3 draws random numbers while it builds the model, so shuffles differ."""
METRICS = {"accuracy": "accuracy", "sacrebleu": "score"}
"""Name that a script loads → its key. The share of equal values: evaluate takes a folder of the working directory for
a metric, and a hub cannot be reached."""
_METRIC = '''"""The share of predictions that are equal to their reference."""
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("{kind}")
        references = kind if "{kind}" == "int64" else datasets.Sequence(kind)
        features = datasets.Features({{"predictions": kind, "references": references}})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        wanted = [r[0] if isinstance(r, list) else r for r in references]
        equal = sum(a == b for a, b in zip(predictions, wanted, strict=True))
        return {{"{key}": equal / len(wanted)}}
'''
_MESSAGE = "the weather is as it was on day"


@dataclass(frozen=True)
class Script:
    """One of Hugging Face's examples."""

    folder: str
    sha256: str
    model: str
    trainer: bool
    measured: tuple[str, ...]
    """What is compared: numbers of its results or log, or ``moved``."""


SCRIPTS = {
    "run_clm_no_trainer.py": Script(
        "language-modeling",
        "9b0e4bc0d6f67730de478e82813f285a948f7206f7252d3cd1e060c5689de6a8",
        "gpt2",
        trainer=False,
        measured=("perplexity", "moved"),
    ),
    "run_clm.py": Script(
        "language-modeling",
        "c79870eeb0321fc45b40d8ef6df37bd8589f4c870141aa7665c04a3a85997460",
        "gpt2",
        trainer=True,
        measured=("train_loss", "eval_loss"),
    ),
    "run_translation_no_trainer.py": Script(
        "translation",
        "a83ebe8b3ee23e9ac9e3f7e6be16dab983b661d34c60252e81fa7db6b723827c",
        "t5",
        trainer=False,
        measured=("moved",),
    ),
    "run_translation.py": Script(
        "translation",
        "cf332f896c8b43fa482c0535153773503cfbecade16ce88a1818f99c3d0fb1fc",
        "t5",
        trainer=True,
        measured=("train_loss", "eval_loss"),
    ),
}


UPSTREAM = {("t5", "FSDP2"): "is shared with a parameter already managed by another FSDP group"}
"""(model, layout) that accelerate itself cannot run → what it says."""


class ScriptError(AssertionError):
    """A script failed, ran on another engine than its layout's, or reached other numbers."""


Only = Annotated[list[str], typer.Option(help="only this one; repeatable", default_factory=list)]


def main(script: Only, layout: Only, scripts: Annotated[Path, typer.Option(envvar="HF_EXAMPLES")]) -> int:
    """0 where every script runs under every layout. Each cell is kept as it is run; docs/own-scripts.md shows all."""
    directory, failed = _inputs(prepare()), False
    for name in chosen(script, SCRIPTS):
        path = _find(scripts, name)
        _run(path, None, directory)
        for way in chosen(layout, LAYOUTS):
            try:
                _run(path, way, directory)
                cell = ", ".join(_compared(path, way, directory))
            except ScriptError as error:
                reason = UPSTREAM.get((SCRIPTS[name].model, way))
                log = (directory / f"{path.stem} {way}" / "log").read_text(encoding="utf-8")
                cell = "accelerate cannot" if reason is not None and reason in log else f"fails: {error}"
            failed |= cell.startswith("fails")
            print(f"  {name:32} {way:22} {cell}", flush=True)
            cells = json.loads(RESULTS.read_text(encoding="utf-8"))
            cells.setdefault(name, {})[way] = {"date": time.strftime("%Y-%m-%d"), "cell": cell.partition(":")[0]}
            write_json(RESULTS, cells)
    Section("docs/own-scripts.md", "scripts", page).write()
    return int(failed)


def page() -> str:
    """Markdown: a row a script, a column a layout."""
    cells = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [[f"`{name}`", *(cells[name].get(way, {}).get("cell", "not run") for way in LAYOUTS)] for name in cells]
    return table(("script", *LAYOUTS), rows)


def _find(root: Path, name: str) -> Path:
    places = (root / SCRIPTS[name].folder / name, root / name)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise SystemExit(f"{name} is neither in {places[0].parent} nor in {root}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != SCRIPTS[name].sha256:
        print(f"note: {name} is another version than the one in SCRIPTS", flush=True)
    return path


def _run(path: Path, layout: str | None, directory: Path) -> None:
    """Run the script under the emitted files of a layout; None: under DDP without them."""
    script, pins = SCRIPTS[path.name], DDP if layout is None else LAYOUTS[layout]
    fsdp, kind = pins.engine == "torch", {"torch": "FSDP", "deepspeed": "DEEPSPEED"}[pins.engine or "torch"]
    job: dict[str, Any] = {"objective": "seq2seq"} if script.model == "t5" else {}
    config, plan = DDP_BY_HAND, plan_for(directory / script.model, DDP, **job)
    if layout is not None:
        # The scripts without a Trainer never clip: neither does the plan.
        job["grad_clip"] = 1.0 if script.trainer else 0.0
        plan = plan_for(directory / script.model, pins, "2xcpu", 0.0, BATCH, **job)
        config = ["--config_file", "accelerate.yaml" if script.trainer or fsdp else ACCELERATE]
    place = with_files(directory / f"{path.stem} {layout or 'DDP'}", plan)
    for metric, key in METRICS.items():
        (place / metric).mkdir(exist_ok=True)
        text = _METRIC.format(kind="int64" if metric == "accuracy" else "string", key=key)
        (place / metric / f"{metric}.py").write_text(text, encoding="utf-8")
    command = [*LAUNCH, *config, own_script.NAME, str(path), *_arguments(script, directory, place, layout)]
    done = start(command, place, limit_s=1500, path=[str(Path(__file__).parent / "examples" / "older_names")])
    (place / "log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        first = done.stderr[max(done.stderr.find("Traceback"), 0) :][:3000]  # launchers add their own below
        raise ScriptError(f"ended with {done.returncode}\n{done.stdout[-1000:]}\n{first}")
    became = f"Distributed environment: {kind}" in done.stderr.replace("DistributedType.", "")
    if layout is not None and not script.trainer and not became:
        raise ScriptError(f"did not become {kind}\n{done.stderr[-3000:]}")


def _compared(path: Path, layout: str, directory: Path) -> Iterator[str]:
    """Relative difference of each number from DDP's. Raises ScriptError where one is too large."""
    script = SCRIPTS[path.name]
    ours, theirs = (directory / f"{path.stem} {kind}" for kind in (layout, "DDP"))
    for key in script.measured:
        # Without a Trainer the script calls save_pretrained on a model whose weights are sharded: under ZeRO-3
        # transformers writes empty tensors, under FSDP2 it stops with an error.
        if key == "moved" and not script.trainer and LAYOUTS[layout].zero_stage == 3:
            yield "not saved"
            continue
        if key == "moved":
            folders = (ours / "out", theirs / "out", directory / script.model)
            a, b, start = (load_file(folder / "model.safetensors") for folder in folders)
            difference = _distance(a, b) / _distance(b, start)
        else:
            found, wanted = (_number(place, key, script) for place in (ours, theirs))
            difference = abs(found - wanted) / abs(wanted)
        if not difference <= BOUND.get(key, 1e-5):
            raise ScriptError(f"{key} differs from DDP's by {difference:.1e}, relative")
        yield f"{difference:.0e}"


def _number(place: Path, key: str, script: Script) -> float:
    if script.trainer:
        return float(json.loads((place / "out" / "all_results.json").read_text(encoding="utf-8"))[key])
    return float(re.findall(rf"{key}: ([\d.e+-]+)", (place / "log").read_text(encoding="utf-8"))[-1])


def _distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return float(sum(((a[name] - b[name]).double() ** 2).sum() for name in b) ** 0.5)


def _arguments(script: Script, directory: Path, place: Path, layout: str | None) -> list[str]:
    lines, out = script.model == "gpt2", {"output_dir": place / "out"}
    data = directory / ("lines.json" if lines else "pairs.json")
    pairs = {"source_lang": "en", "target_lang": "de", "max_source_length": 64, "max_target_length": 32}
    adam = {"adam_epsilon": EPS, "adam_beta2": 0.95, "weight_decay": 0.0}
    sharded = layout is not None and LAYOUTS[layout].zero_stage == 3
    of_trainer = {**out, **adam, "report_to": "none", "do_train": "true", "do_eval": "true"}
    return words(
        {
            "model_name_or_path": directory / script.model,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "learning_rate": 1e-3,
            "num_train_epochs": EPOCHS,
            "lr_scheduler_type": "constant",
            "seed": 0,
            "train_file": data,
            "validation_file": data,
            **({"block_size": BLOCK} if lines else pairs),
            **(of_trainer if script.trainer else {} if layout == "FSDP2" else out),
            **({"use_cpu": "true"} if script.trainer and not sharded else {}),
            **({} if script.trainer or lines else {"num_beams": 1}),
        }
    )


def _inputs(directory: Path) -> Path:
    """A tiny GPT-2, a tiny T5, lines of text and pairs of equal length, beside the inputs of examples/inputs.py.

    GPT-2, because it has biases: run_clm_no_trainer.py puts what has no decay into a second group. Llama's is empty,
    DeepSpeed drops empty groups (engine.py, _configure_basic_optimizer), and torch's scheduler then ends with an error.
    """
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

    text = (directory / "text.txt").read_text(encoding="utf-8")
    # A byte is a token: the scripts cut this into ROWS blocks.
    (directory / "lines.json").write_text(json.dumps({"text": text[: ROWS * BLOCK + 1]}) + "\n", encoding="utf-8")
    pairs = [{"translation": {"en": f"{_MESSAGE} {k:02}", "de": f"{k:02} {_MESSAGE[:20]}"}} for k in range(ROWS)]
    (directory / "pairs.json").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    if not (directory / "t5").exists():
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=258, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=4,
            pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, dropout_rate=0.0,
        )  # fmt: skip
        T5ForConditionalGeneration(config).save_pretrained(directory / "t5")
        gpt2 = GPT2Config(
            vocab_size=258, n_embd=64, n_layer=2, n_head=4, n_positions=64, eos_token_id=1, bos_token_id=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        GPT2LMHeadModel(gpt2).save_pretrained(directory / "gpt2")
        for name in ("t5", "gpt2"):
            AutoTokenizer.from_pretrained(directory / "model").save_pretrained(directory / name)
    return directory


if __name__ == "__main__":
    run(main)
