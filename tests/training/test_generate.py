"""``kit generate`` says what transformers says of the same weights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from kit.cli import app
from kit.engines.huggingface.models import random_model
from kit.errors import CheckpointError, KitError
from kit.training.checkpoint.convert import convert
from kit.training.checkpoint.of_run import newest_step, started_from
from kit.training.generate import generate
from tests.support import tiny
from tests.support.assets import prepare
from tests.support.files import file_with, files_in
from tests.support.hostile import spoil
from tests.support.refusals import refusal

PROMPTS = ["import os\n", "def "]


def expected(directory: Path, prompt: str) -> str:
    """transformers' greedy continuation of eight tokens, in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    given = tokenizer(prompt, return_tensors="pt")
    output = model.generate(input_ids=given["input_ids"], max_new_tokens=8, do_sample=False)
    return tokenizer.decode(output[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer, in bf16."""
    directory = tmp_path_factory.mktemp("generate") / "model"
    shutil.copytree(prepare().model, directory)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 9.0}')
    return directory


def test_a_model_and_a_checkpoint_of_it_continue_alike(model: Path, tmp_path: Path) -> None:
    convert(model, "step", tmp_path / "step")
    for path, tokenizer in ((model, None), (tmp_path / "step", model)):
        found = generate(path, PROMPTS, tokenizer=tokenizer, max_new_tokens=8)
        assert [each.completion for each in found] == [expected(model, prompt) for prompt in PROMPTS]
        assert [each.prompt for each in found] == PROMPTS


def test_a_decoder_s_answer_is_all_of_its_text(model: Path, tmp_path: Path) -> None:
    """Of an encoder-decoder, whose output begins with a special token, and not with the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    directory = tmp_path / "t5"
    made = random_model(tiny.model("t5", vocab_size=len(tokenizer)), 0)
    made.generation_config.decoder_start_token_id = tokenizer.eos_token_id
    made.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (found,) = generate(directory, ["import os"], max_new_tokens=4)
    theirs = AutoModelForSeq2SeqLM.from_pretrained(directory)
    output = theirs.generate(**tokenizer("import os", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert found.completion == tokenizer.decode(output[0], skip_special_tokens=True) != ""


def test_draws_repeat_with_their_seed(model: Path) -> None:
    first, again, other = (generate(model, ["x"], temperature=2.0, seed=seed)[0].completion for seed in (1, 1, 2))
    assert first == again != other


def test_a_whole_model_has_nothing_to_merge(model: Path) -> None:
    assert re.search(
        r"--merge-into .* is for adapters, and .* is a whole model; omit it",
        refusal(CheckpointError, generate, model, ["x"], merge_into=model),
    )


def test_what_is_missing_is_named(model: Path, tmp_path: Path) -> None:
    convert(model, "step", tmp_path / "step")
    assert re.search(
        r"step has no tokenizer .* name its directory with --tokenizer",
        refusal(CheckpointError, generate, tmp_path / "step", PROMPTS),
    )
    (tmp_path / "config.json").write_text("{}")  # a model without its weights
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "--tokenizer", str(model), "--prompt", "x"])
    assert done.exit_code
    assert isinstance(done.exception, KitError)
    done = CliRunner().invoke(app, ["generate", str(model), "--prompt", "def ", "--max-new-tokens", "8"])
    assert done.stdout == "def " + expected(model, "def ") + "\n"


def test_a_prompt_is_a_turn_of_the_chat_template(model: Path, tmp_path: Path) -> None:
    """Of the model, or of the rows that a checkpoint was trained on; ``raw`` continues the text."""
    chat = shutil.copytree(model, tmp_path / "chat")
    turns = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
    (chat / "chat_template.jinja").write_text(turns + "{% if add_generation_prompt %}# a{% endif %}")
    spoil(chat / "config.json", ("dtype",), "bfloat16")
    turned = expected(model, "# user\ndef \n# a")
    assert [each.completion for each in generate(chat, ["def "], max_new_tokens=8)] == [turned]
    assert generate(chat, ["def "], max_new_tokens=8)[0].chat
    (plain,) = generate(chat, ["def "], max_new_tokens=8, raw=True)
    assert (plain.completion, plain.chat) == (expected(model, "def "), False)
    convert(model, "step", tmp_path / "step")
    (of_step,) = generate(tmp_path / "step", ["def "], tokenizer=chat, max_new_tokens=8)
    assert (of_step.completion, of_step.chat) == (plain.completion, False)  # its rows were no chats


def test_a_run_stands_for_its_newest_whole_checkpoint_and_its_model(model: Path, tmp_path: Path) -> None:
    run = file_with(tmp_path / "run" / "run.yaml", "model_path: ../model\n").parent
    shutil.copytree(model, tmp_path / "model")
    for step in (9, 20, 100):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert "without a checkpoint" in refusal(CheckpointError, newest_step, run)
    files_in(run / "checkpoints", {f"step-{step:08d}/manifest.json": "{}" for step in (9, 20)})
    newest = run / "checkpoints" / "step-00000020"
    assert newest_step(run) == newest == newest_step(newest)
    assert started_from(newest) == tmp_path / "model"
    (run / "run.yaml").write_text("model_path: ../none\n")
    assert started_from(newest) is None is started_from(model)
