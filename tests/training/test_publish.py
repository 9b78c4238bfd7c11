"""``kit convert model … --push``: the Hub's own client against a server of this test, and the card of a run."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kit.cli import app
from kit.emit.run_directory import write
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.convert import convert
from kit.training.publish import card
from tests.support import tiny
from tests.support.assets import prepare


@dataclass
class Hub:
    """What the server was asked, and whether it refuses commits."""

    url: str = ""
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    created: list[dict[str, object]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    refuses: bool = False


@pytest.fixture
def hub() -> Iterator[Hub]:
    """The Hub's create, check of a card, preupload and commit, by the addresses that huggingface_hub 2.4 asks."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length) if length else self._chunks()
            state.calls.append((self.path, self.headers.get("Authorization")))
            if self.path == "/api/repos/create":
                state.created.append(json.loads(body))
                return self._reply({"url": f"{state.url}/org/name", "name": "org/name", "id": "org/name"})
            if "/preupload/" in self.path:
                asked = json.loads(body)["files"]
                return self._reply(
                    {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]}
                )
            if self.path == "/api/validate-yaml":
                return self._reply({"errors": [], "warnings": []})
            if state.refuses:
                return self._reply({"error": "storage is full"}, status=507)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    state.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._reply({"commitUrl": f"{state.url}/org/name/commit/1", "commitOid": "1", "hookOutput": ""})

        def do_GET(self) -> None:
            self._reply({"id": "org/name", "sha": "0", "siblings": []})

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            return b"".join(parts)

        def _reply(self, answer: dict[str, object], status: int = 200) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def push(hub: Hub, source: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, because huggingface_hub reads HF_ENDPOINT when it is imported."""
    words = [sys.executable, "-m", "kit", "convert", "model", str(source), "--out", str(out), *more]
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_of_the_test", "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HOME": str(out.parent / "hf-home"), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(words, env=os.environ | own, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exchange checkpoint in a run directory with a log."""
    model = prepare().model
    run = tmp_path_factory.mktemp("publish") / "run"
    plan = tiny.plan(tiny.model())
    write(plan, RunSpec(data=DataSpec(train="/home/somebody/secret/corpus")), run)
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 2.5, "validation_loss": 2.25}\n{"step": 9, "loss": 1.0}\n')
    convert(model, "exchange", run / "checkpoints" / "exchange-step-00000000")
    return run / "checkpoints" / "exchange-step-00000000"


def test_the_card_is_the_runs(checkpoint: Path) -> None:
    text = card("org/name", checkpoint)
    assert text.startswith("---\nlibrary_name: transformers\n---\n\n# name\n")
    for row in ("| data | corpus |", "| objective | pretrain |", "| loss | 2.5000 nats per token |", "| steps | 0 |"):
        assert row in text
    assert "| validation loss | 2.2500 nats per token |" in text
    assert "somebody" not in text
    assert "No run was beside this checkpoint" in card("org/name", prepare().model)


@pytest.mark.nightly
def test_the_hub_gets_every_file(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    done = push(hub, checkpoint, tmp_path / "model", "--extras-from", str(prepare().model), "--push", "org/name")
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {hub.url}/org/name" in done.stdout
    assert (hub.created[0]["organization"], hub.created[0]["name"], hub.created[0]["visibility"]) == (
        "org",
        "name",
        "private",
    )
    assert {token for _, token in hub.calls} == {"Bearer hf_of_the_test"}
    written = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir() if path.is_file()}
    assert hub.files == written
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= written.keys()


@pytest.mark.nightly
def test_a_broken_upload_loses_nothing(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.refuses = True
    done = push(hub, checkpoint, tmp_path / "model", "--push", "org/name")
    assert done.returncode
    assert "org/name is not complete on the Hub" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "token", "offline", "said"),
    [
        ("org/name", "", False, "needs your own token: run hf auth login, or set HF_TOKEN"),
        ("org/name", "hf_x", True, "with HF_HUB_OFFLINE=1, which forbids connections"),
        ("name", "hf_x", False, "--push name has no owner; use org/name"),
        ("org/na me", "hf_x", False, "--push org/na me is no name of a model"),
    ],
)
def test_what_cannot_work_stops_before_the_conversion(name, token, offline, said, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    out = tmp_path / "model"
    done = CliRunner().invoke(app, ["convert", "model", str(checkpoint), "--out", str(out), "--push", name])
    assert said in str(done.exception)
    assert not out.exists()


def test_the_hub_takes_models_alone(checkpoint, tmp_path):
    words = ["convert", "model", str(checkpoint), "--out", str(tmp_path / "out"), "--to", "dcp", "--push", "org/name"]
    assert "the Hub takes models; use --to hf" in str(CliRunner().invoke(app, words).exception)
