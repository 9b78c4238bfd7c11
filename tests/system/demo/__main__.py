"""The demo, top to bottom. Every step prints what it does; the first step that breaks ends it."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import kit
from kit.emit.run_directory import RunDirectory
from kit.report.plan_text import render
from kit.report.view import view_of
from tests.support import ROOT, runs
from tests.support.assets import RECIPE, Assets, prepare
from tests.support.compare import compare_curves, compare_gradients, compare_runs
from tests.system.demo.exports import Verdict, judge
from tests.system.demo.ledger import Ledger
from tests.system.parity.__main__ import GRADIENTS, train_planted

BUILD = ROOT / "build" / "demo"
RECIPES = {
    "torch": RECIPE,
    "zero3": RECIPE.with_name("tiny-llama-pretrain-zero3-2xcpu.yaml"),
    "tp2": RECIPE.with_name("tiny-llama-pretrain-tp2-2xcpu.yaml"),
    "bf16": RECIPE.with_name("tiny-llama-pretrain-cpu-bf16.yaml"),
}
REAL_CASES = (("llama-3.1-8b", "aws:p5.48xlarge:1"), ("llama-3-70b", "aws:p4de.24xlarge:8"))
TITLES = {
    "torch": "plain torch, 1 process",
    "zero3": "DeepSpeed ZeRO-3, 2 processes",
    "tp2": "Megatron-core TP=2, 2 processes",
    "bf16": "plain torch, bf16 autocast",
    "relay": "relay: ZeRO-3, killed, resumed, then TP=2",
}
Rows = list[dict[str, Any]]
GRADIENT_BOUND = 1e-5
CURVE_BOUND = 1e-4
BF16_DISTANCE = (1e-5, 5e-2)
"""bf16 keeps 8 bits: a run closer than the first never computed in it, one farther than the second went astray."""
KILL_AFTER_STEP, HAND_OVER_STEP = 25, 40


def main() -> int:
    """Run everything; 0 only if every claim holds."""
    console, began = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120), time.monotonic()
    ledger, out = Ledger(console), BUILD / datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        console.rule("1. Plans of real cases")
        for model, gpus in REAL_CASES:
            plan_real_case(ledger, model, gpus)
        console.rule("2. Three engines, one curve")
        assets = prepare()
        three = train_three_engines(ledger, out)
        console.rule("3. The relay: killed, resumed, moved to another engine")
        relay = run_relay(ledger, out, three["zero3"])
        console.rule("4. Out again: Hugging Face models")
        export_and_judge(ledger, assets, {**three, "relay": relay}, out)
        console.rule("5. A planted fault is caught")
        plant_fault(ledger, out, three["torch"])
    except (runs.RunFailed, kit.KitError) as error:
        console.print(f"[bold red]the demo stopped:[/bold red] {error}", highlight=False)
        return 1
    console.print(ledger.table)
    console.print(f"{time.monotonic() - began:.0f} s; runs, logs and models: {out.relative_to(ROOT)}")
    return 0 if ledger.all_hold else 1


def plan_real_case(ledger: Ledger, model: str, gpus: str) -> None:
    """Plan, print the whole plan, and claim that it fits."""
    plan = kit.plan(model, gpus)
    found, memory = plan.predicted, plan.cluster.gpu.memory_gib
    ledger.console.print(render(view_of(plan)))
    ledger.add(
        f"{model} on {gpus} has a plan that fits", f"kit plan {model} --gpus {gpus}",
        f"peak {found.peak_gib:.1f} of {memory:.1f} GiB, {found.step_time_s:.2f} s a step, MFU {found.mfu:.0%}",
        found.peak_gib <= memory,
    )  # fmt: skip


def train_three_engines(ledger: Ledger, out: Path) -> dict[str, RunDirectory]:
    """60 steps by each engine; gradients of step 1 and all curves against plain torch."""
    rundirs = {name: runs.emit(recipe, out / name, []) for name, recipe in RECIPES.items()}
    with ThreadPoolExecutor(2) as pool:  # one process each: they fill two cores together
        list(pool.map(lambda name: runs.train(rundirs[name]), ("torch", "bf16")))
    reference = rundirs["torch"]
    for name in ("zero3", "tp2"):
        runs.train(rundirs[name])
        compare(ledger, reference, rundirs[name], TITLES[name], f"{out.relative_to(ROOT)}/{name}/launch.sh")
    distance = compare_curves(runs.metrics(reference), runs.metrics(rundirs["bf16"]), "loss").worst_relative_error
    low, high = BF16_DISTANCE
    ledger.add(
        "bf16 trains, farther from fp32 than any engine", f"{out.relative_to(ROOT)}/bf16/launch.sh",
        f"loss differs by up to {distance:.1e}, between {low:.0e} and {high:.0e}", low < distance < high,
    )  # fmt: skip
    return rundirs


def compare(ledger: Ledger, reference: RunDirectory, other: RunDirectory, title: str, command: str) -> None:
    """The three bounds of one engine against the reference."""
    gradients = compare_gradients(reference.path / GRADIENTS, other.path / GRADIENTS)
    detail = f"worst of {gradients.compared} parameters: {gradients.worst}"
    text = f"{title}: every gradient of step 1"
    ledger.add_bound(text, command, gradients.worst_relative_error, GRADIENT_BOUND, detail)
    curves(ledger, f"{title}: {{key}} at every step", command, runs.metrics(reference), runs.metrics(other))


def curves(ledger: Ledger, text: str, command: str, reference: Rows, other: Rows, how: str = "") -> None:
    """Loss and gradient norm within their bound; ``{key}`` stands for either in the text."""
    for key, curve in compare_runs(reference, other).items():
        detail = f"{how}worst of {curve.compared} steps: {curve.worst}"
        ledger.add_bound(text.format(key=key), command, curve.worst_relative_error, CURVE_BOUND, detail)


def run_relay(ledger: Ledger, out: Path, uninterrupted: RunDirectory) -> RunDirectory:
    """ZeRO-3, kill -9, resume, hand over at step 40, finish on TP=2."""
    first = runs.emit(RECIPES["zero3"], out / "relay-zero3", [])
    killed_at = runs.train_until_killed(first, KILL_AFTER_STEP)
    ledger.console.print(f"  killed -9 after step {killed_at}; the last checkpoint is of step 20")
    runs.train(first, "--resume", "auto", "--stop-at-step", str(HAND_OVER_STEP))
    step = first.path / "checkpoints" / f"step-{HAND_OVER_STEP:08d}"
    second = runs.emit(RECIPES["tp2"], out / "relay-tp2", [])
    runs.train(second, "--resume", str(step))
    curves(
        ledger, "relay ZeRO-3 → TP=2: {key} on the uninterrupted curve",
        f"{first.path.name}/launch.sh --resume auto",
        runs.metrics(uninterrupted), [*runs.metrics(first), *runs.metrics(second)],
        f"killed at {killed_at}, moved at {HAND_OVER_STEP}; ",
    )  # fmt: skip
    return second


def export_and_judge(ledger: Ledger, assets: Assets, rundirs: dict[str, RunDirectory], out: Path) -> None:
    """Every run becomes a Hugging Face model; the fp32 ones must be the same model."""
    from kit.training.checkpoint.formats import open_step
    from kit.training.checkpoint.to_huggingface import opened_to_hf

    seq_length = rundirs["torch"].plan.job.seq_length
    before = judge(assets.model, assets.validation, seq_length)
    verdicts: dict[str, Verdict] = {}
    for name, rundir in rundirs.items():
        exported = out / f"{name}-hf"
        opened_to_hf(
            open_step(rundir.path / "checkpoints" / "step-00000060"),
            exported,
            dtype="float32",
            extras_from=assets.model,
        )
        verdicts[name] = judge(exported, assets.validation, seq_length)
        loss = verdicts[name].held_out_loss
        ledger.add(
            f"{TITLES[name]}: exported and learned",
            f"kit convert model …/{name}/checkpoints/step-00000060",
            f"held-out loss {loss:.4f}, {before.held_out_loss:.4f} before training",
            loss < before.held_out_loss - 1,
        )
    fp32, torch = [verdict for name, verdict in verdicts.items() if name != "bf16"], verdicts["torch"]
    ledger.add_bound(
        "all fp32 exports: equal held-out loss", "AutoModelForCausalLM.from_pretrained",
        max(abs(each.held_out_loss / torch.held_out_loss - 1) for each in fp32), CURVE_BOUND, f"{len(fp32)} models",
    )  # fmt: skip
    same = len({verdict.generated for verdict in fp32})
    figure = f"{same} distinct outputs of {len(fp32)} models, {sum(map(len, torch.generated))} tokens"
    ledger.add("all fp32 exports: same greedy tokens", "model.generate(do_sample=False)", figure, same == 1)
    ledger.console.print(f"  {torch.text!r}", highlight=False)


def plant_fault(ledger: Ledger, out: Path, reference: RunDirectory) -> None:
    """Swap Q and K in the weight map: the same comparison must turn red."""
    rundir = runs.emit(RECIPES["tp2"], out / "planted", ["run.steps=2"])
    train_planted(rundir, "megatron-swap-qk")
    gradients = compare_gradients(reference.path / GRADIENTS, rundir.path / GRADIENTS)
    loss = abs(runs.metrics(rundir)[0]["loss"] / runs.metrics(reference)[0]["loss"] - 1)
    error, command = gradients.worst_relative_error, "python -m tests.system.parity --plant megatron-swap-qk"
    figure = f"gradient error {error:.1e} at {gradients.worst}; loss alone differs by {loss:.1e}"
    ledger.add("swapped Q and K turn the comparison red", command, figure, error > GRADIENT_BOUND)


if __name__ == "__main__":
    sys.exit(main())
