"""``kit convert model … --push``: what is asked of the Hub's own client, which has no server here; a run's card."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from typer.testing import CliRunner, Result

from kit.cli import app
from kit.emit.run_directory import write
from kit.specs.job import LoraSpec
from kit.specs.run import DataSpec, RunSpec
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.exchange import ExchangeCheckpoint
from kit.training.publish import card
from tests.support import tiny
from tests.support.assets import prepare


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """The client, by the signatures of the installed version; nothing leaves this process."""
    client = mock.create_autospec(huggingface_hub.HfApi, instance=True)
    client.create_repo.return_value = "https://hub/org/name"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    return client


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exchange checkpoint in a run directory with a log."""
    run = tmp_path_factory.mktemp("publish") / "run"
    write(tiny.plan(tiny.model()), RunSpec(data=DataSpec(train="/home/somebody/secret/corpus")), run)
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 2.5, "validation_loss": 2.25}\n{"step": 9, "loss": 1.0}\n')
    convert(prepare().model, "exchange", run / "checkpoints" / "exchange-step-00000000")
    return run / "checkpoints" / "exchange-step-00000000"


def push(source: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["convert", "model", str(source), "--out", str(out), *more])


def test_the_card_is_the_runs(checkpoint: Path) -> None:
    text = card("org/name", checkpoint)
    assert text.startswith("---\nlibrary_name: transformers\n---\n\n# name\n")
    rows = {cells[1].strip(): cells[2].strip() for line in text.splitlines() if len(cells := line.split("|")) == 4}
    expected = {
        "model": "tiny-llama", "objective": "pretrain", "data": "corpus", "sequence length": "32", "precision": "fp32",
        "global batch": "2 sequences", "optimizer": "adamw, learning rate 0.01", "steps": "0", "tokens seen": "0",
        "loss": "2.5000 nats per token", "validation loss": "2.2500 nats per token",
    }  # fmt: skip
    assert expected.items() <= rows.items()
    assert not {"started from", "chat template"} & rows.keys()
    assert "somebody" not in text
    assert "No run was beside this checkpoint" in card("org/name", prepare().model)


def test_a_card_of_adapters_names_peft_and_their_chat_template(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ExchangeCheckpoint(checkpoint)
    exchange.lora, exchange.chat_template = LoraSpec(rank=2), "{{ messages }}"
    monkeypatch.setattr("kit.training.publish.ExchangeCheckpoint", lambda _: exchange)
    text = card("org/name", checkpoint)
    assert "library_name: peft\n" in text
    assert "| chat template | [chat_template.jinja](chat_template.jinja) |" in text


def test_the_hub_gets_every_file(hub: mock.Mock, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    done = push(checkpoint, out, "--extras-from", str(prepare().model), "--push", "org/name")
    assert "uploaded to https://hub/org/name" in done.stdout
    hub.create_repo.assert_called_once_with("org/name", private=True, exist_ok=True)
    hub.upload_folder.assert_called_once_with(repo_id="org/name", folder_path=out, commit_message="Upload of name")
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    assert (out / "README.md").read_text() == card("org/name", checkpoint)


@pytest.mark.parametrize("error", [OSError("no route"), huggingface_hub.errors.HTTPError("refused")])
def test_a_broken_upload_loses_nothing(hub: mock.Mock, checkpoint: Path, tmp_path: Path, error: Exception) -> None:
    hub.upload_folder.side_effect = error
    done = push(checkpoint, tmp_path / "model", "--push", "org/name")
    assert "org/name is not complete on the Hub" in str(done.exception)
    assert (tmp_path / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "token", "offline", "more", "said"),
    [
        ("org/name", "", False, (), "needs your own token: run hf auth login, or set HF_TOKEN"),
        ("org/name", "hf_x", True, (), "with HF_HUB_OFFLINE=1, which forbids connections"),
        ("name", "hf_x", False, (), "--push name has no owner; use org/name"),
        ("org/na me", "hf_x", False, (), "--push org/na me is no name of a model"),
        ("org/name", "hf_x", False, ("--to", "dcp"), "the Hub takes models; use --to hf"),
    ],
)
def test_what_cannot_work_stops_before_the_conversion(
    name, token, offline, more, said, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    assert said in str(push(checkpoint, tmp_path / "model", "--push", name, *more).exception)
    assert not (tmp_path / "model").exists()
