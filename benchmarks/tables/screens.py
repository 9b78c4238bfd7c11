"""Pictures of a real run for the docs: its live line on a terminal, and TensorBoard on what its tracker wrote.

    python -m benchmarks.tables.screens [--out docs/images] [--steps 200]

The run is one process of plain torch in a pseudo terminal. Its bytes are played onto a screen, which rich draws as SVG.
TensorBoard is started on the run's directory and photographed by a headless Chromium (Debian: apt-get install
chromium). Exit code 1 where the live line, or curves on TensorBoard's page, are not there.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import matplotlib.image
import numpy as np
from rich.console import Console

import kit
from benchmarks.assets import RECIPE
from benchmarks.performance.overhead import runs
from kit.rehearsal import processes
from kit.rehearsal.assets import write_data

COLUMNS, ROWS = 118, 30
LIMIT_S = 300
FIRST_RUN = (255, 112, 67)
LEAST_CURVES = 2000
"""A page that has not drawn yet has some hundred pixels of that colour, of the box beside the run's name."""
SHOWN = "loss|grad_norm|learning_rate|validation_loss|tokens_per_s|step_time_s"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """0 where both pictures show what they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kit-screens-") as scratch:
        run = prepare(Path(scratch), arguments.steps)
        printed = in_a_terminal([sys.executable, "-m", "kit.training", str(run)])
        kept = live_line(printed, arguments.steps, arguments.out / "live-line.svg")
        kept &= tensorboard(run, arguments.out / "tensorboard.png")
    return 0 if kept else 1


def prepare(directory: Path, steps: int) -> Path:
    """A run directory whose data can be learnt from."""
    write_data(kit.load_recipe(RECIPE, ()).job, directory / "data")
    words = (
        f"run.data.train={directory / 'data' / 'train'}",
        f"run.data.validation={directory / 'data' / 'validation'}",
        f"run.steps={steps}",
        "run.validation_every_steps=50",
        "run.checkpoint.every_steps=50",
        "run.logging.trackers=[tensorboard]",
    )
    return runs.emit(directory / "run", *words, seq_length=64).path


def in_a_terminal(command: list[str]) -> str:
    """Everything that a command writes to a terminal of COLUMNS × ROWS. Raises SystemExit where it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    written = bytearray()
    while True:
        try:
            written += os.read(ours, 65536)
        except OSError:  # the last writer has closed it
            break
    if process.wait(LIMIT_S):
        raise SystemExit(f"the run failed:\n{written.decode(errors='replace')}")
    return written.decode(errors="replace")


def screen(output: str) -> list[str]:
    """What a terminal shows in the end, as far as rich's cursor moves go."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d*[A-Za-z]|\x1b\[\?\d+[hl]|\x1b\[[\d;]*m|\r|\n)", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part or ""):
            row -= int(part[2:-1] or 1)
        elif part and not part.startswith("\x1b") and part != "\r":
            lines[row] = part.rstrip()
    return [line for line in lines if line]


def live_line(printed: str, steps: int, path: Path) -> bool:
    """The screen while the run was at work, as SVG; whether the line was there once, and said all it should."""
    moments = [found.start() for found in re.finditer(r"step \d+/", printed)]
    if not moments:
        print(f"MISSED {path}: no live line in what was printed")
        return False
    lines = screen(printed[: moments[3 * len(moments) // 4]].rsplit("\r", 1)[0])
    text = " ".join(lines)
    good = len(re.findall(rf"step \d+/{steps} ", text)) == 1
    good &= all(word in text for word in ("loss", "tok/s/GPU", "predicted", "fwd+bwd", "data wait", "ETA"))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print("$ launch.sh", highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    console.print()  # rich clips the last line away
    drawn = console.export_svg(title="kit train")
    # Without its web fonts, which a reader would be made to fetch from elsewhere.
    path.write_text(re.sub(r"@font-face\s*{[^}]*}\s*", "", drawn), encoding="utf-8")
    print(f"{'ok    ' if good else 'MISSED'} {path}: {text}")
    return good


def tensorboard(run: Path, path: Path) -> bool:
    """A photograph of TensorBoard's page; whether there are curves on it."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"MISSED {path}: none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
        return False
    port = processes.free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "trackers/tensorboard", "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--load_fast", "false"], cwd=run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        address = f"http://127.0.0.1:{port}/"
        _wait_until_up(f"{address}data/plugin/scalars/tags")
        head = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1000"]
        head += ["--virtual-time-budget=30000", "--run-all-compositor-stages-before-draw"]
        # The older of its two pages: the newer draws in worker threads, which a browser's virtual time does not await.
        page = f"{address}#scalars&tagFilter={quote(f'^train/({SHOWN})$')}"
        shot = [*head, f"--screenshot={path.resolve()}", page]
        subprocess.run(shot, check=True, capture_output=True, timeout=LIMIT_S)
    finally:
        server.terminate()
        server.wait()
    drawn = curve_pixels(path)
    good = drawn >= LEAST_CURVES
    print(f"{'ok    ' if good else 'MISSED'} {path}: {drawn:,} pixels of curves, {path.stat().st_size / 1000:.0f} kB")
    return good


def curve_pixels(path: Path) -> int:
    """Of the colour that TensorBoard gives to its first run."""
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - np.array(FIRST_RUN) / 255).max(axis=-1) < 0.02).sum())


def _wait_until_up(address: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                if b"train/loss" in answer.read():
                    return
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"TensorBoard does not show the run at {address}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
