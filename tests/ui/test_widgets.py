"""What a visitor of ``kit ui`` does and then sees, at the widgets themselves, without a browser."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest

import kit
from kit.addons.configs.answer import answer as answer_of_file
from kit.addons.configs.text import text_of
from kit.addons.ui.answer import pareto_front
from kit.addons.ui.server import LocalOnly
from kit.addons.ui.state import offer
from kit.emit.run_directory import files_of
from kit.report.html import page as report
from kit.report.view import view_of
from kit.specs.catalog import load_model
from kit.specs.huggingface import config_from_model
from tests.addons.config_files import AXOLOTL, SWIFT, TIGHT
from tests.support.files import files_in
from tests.support.in_process import kit_main

nicegui = pytest.importorskip("nicegui", reason="needs the extra ui: pip install nicegui")
LLAMA = "model=llama-3.2-1b&cluster=8xH100"
OFFERS = {"model": ["llama-3.2-1b"], "cluster": ["8xH100"]}
Act = Callable[[Any], Any]
"""What is done to a page."""


async def visited(query: str, acts: Sequence[Act], offered: Any = None) -> Any:
    """A visitor's page after these acts, each of which is answered before the next."""
    from kit.addons.ui.page import _Page

    nicegui.core.loop, running = asyncio.get_running_loop(), nicegui.background_tasks.running_tasks
    client = nicegui.Client(nicegui.ui.page("/"))
    with client:
        page = _Page(offered or {}, OFFERS, client)
        if acts[:1] and getattr(acts[0], "__self__", None) is not None:  # wants the page before its first answer
            acts[0](page)
            acts = acts[1:]
        for act in (lambda page: page.open(parse_qsl(query)), *acts):
            if (asked := act(page)) is not None:
                await asked
            while tasks := [task for task in running if not task.get_name().startswith("outbox")]:
                await asyncio.wait(tasks, timeout=60)
    return page


FORM = {
    "model": "model", "cluster": "cluster", "gpus": "gpus", "seq_length": "job.seq_length",
    "batch": "job.global_batch_size", "objective": "job.objective", "tokens": "job.total_tokens",
    "precision": "job.precision", "method": "job.lora", "engine": "layout.engine", "pin": "pin",
}  # fmt: skip
"""Name of a field in these tests → its key in the form."""
SLIDERS = {"gpus": ("GPUs", 1), "seq_length": ("Sequence length", 256), "batch": ("Sequences a step", 1)}
"""Name of a field with a slider → its label, and the slider's first number."""


def slider_of(page: Any, name: str) -> Any:
    return there(page, nicegui.ui.element, aria_label=f"{SLIDERS[name][0]}, powers of two")[0]


def there(page: Any, kind: type, **props: str) -> list[Any]:
    """Elements of a kind that the visitor sees, with these props."""
    elements = [each for each in page.client.elements.values() if isinstance(each, kind) and {
        name.replace("_", "-"): value for name, value in props.items()}.items() <= each.props.items()]  # fmt: skip
    return [each for each in elements if all(shown.visible for shown in (each, *each.ancestors()))]


def texts(page: Any, name: str) -> list[str]:
    """The text of a region, on a screen and on a telephone where it has both."""
    return [each.text for each in there(page, nicegui.ui.label, role="region", aria_label=name)]


def see(page: Any) -> dict[str, Any]:
    """What the form and the answer show."""
    slid, ui = {name: slider_of(page, name).props for name in SLIDERS}, nicegui.ui
    return {
        **{name: page.form[key].value for name, key in FORM.items()},
        **{f"{name} slid": first * 2 ** slid[name].get("value", 0) for name, (_, first) in SLIDERS.items()},
        **{f"{name} said": slid[name].get("aria-valuetext") for name in SLIDERS},
        "link": page.state.query(),
        "message": page.message.text if page.message.visible else "",
        "status": page.status.text,
        "plan": next(iter(texts(page, "The plan")), ""),
        "stale": "stale" in page.results.classes,
        "command": next(
            (each.parent_slot.children[0].text for each in there(page, ui.button, label="Copy command")), ""
        ),
        "file": next((each.value for each in there(page, ui.select, label="File")), None),
        "changed": [row["what"] for table in there(page, ui.table) for row in table.rows],
        "charts": [chart.props["data-chart"] for chart in there(page, ui.echart) if chart.options["series"]],
        "files": next((each.options for each in there(page, ui.select, label="File")), []),
        "colours": next(each.options for each in there(page, ui.toggle)),
    }


def put(name: str, value: Any) -> Act:
    """Types or chooses a value."""

    def act(page: Any) -> None:
        box = page.form[FORM[name]] if name in FORM else getattr(page, name)
        box.value = value

    return act


def heard(element: Any, kind: str, *args: Any) -> None:
    """What the browser sends of an element."""
    for listener in [each for each in element._event_listeners.values() if each.type == kind]:
        listener.handler(*args)


def press(label: str) -> Act:
    """Clicks the button, which has to be there."""

    def act(page: Any) -> None:
        (button,) = (each for each in there(page, nicegui.ui.button) if each.text == label)
        heard(button, "click", None)

    return act


def click(**data: Any) -> Act:
    return lambda page: page._clicked(SimpleNamespace(data=data))


PINNED = kit.compare("llama-3.2-1b", "8xH100").layouts[3].name
CASES: dict[str, tuple[str, list[Act], dict[str, Any]]] = {
    "an empty link": ("", [], {"link": "model=llama-3.1-8b&cluster=8xH100", "model": "llama-3.1-8b"}),
    # 262,144 = 256 · 2^10 sequences of tokens are no setting: defaults of the job are shown, and asked of nobody.
    "a link": (LLAMA, [], {
        "link": LLAMA, "model": "llama-3.2-1b", "cluster": "8xH100", "gpus": 8, "gpus slid": 8, "seq_length": 4096,
        "seq_length slid": 4096, "seq_length said": "4,096", "batch": 512, "batch slid": 512, "precision": "bf16",
        "method": "null", "engine": "", "pin": "", "message": "", "changed": [],
        "charts": ["layouts", "memory", "step", "cost"],
        "colours": {None: "as the system", False: "light", True: "dark"},
    }),
    "a sequence length": (LLAMA, [put("seq_length", 8192.0)], {
        "link": f"{LLAMA}&job.seq_length=8192", "seq_length slid": 8192, "seq_length said": "8,192"}),
    "a sequence length between two powers": (LLAMA, [put("seq_length", 5000)], {
        "link": f"{LLAMA}&job.seq_length=5000", "seq_length": 5000, "seq_length slid": 4096}),
    "a slider": (LLAMA, [lambda page: heard(slider_of(page, "batch"), "input", SimpleNamespace(args="8"))], {
        "link": f"{LLAMA}&job.global_batch_size=256", "batch": 256, "batch slid": 256}),
    "two choices of one moment": (LLAMA, [lambda page: [act(page) for act in (
        put("precision", "fp8"), put("seq_length", 2048))] and None], {"seq_length": 2048, "precision": "fp8"}),
    "more GPUs": (LLAMA, [put("gpus", 16)], {
        "link": "model=llama-3.2-1b&cluster=16xH100", "cluster": "16xH100", "gpus": 16, "gpus slid": 16}),
    "a number of GPUs that no cluster has": (LLAMA, [put("gpus", 12)], {
        "link": LLAMA, "message": "GPUs: no 8xH100 with 12 GPUs is known; choose another number",
        "status": "no plan for this; the message says why", "stale": True}),
    "no GPUs": (LLAMA, [put("gpus", 0)], {
        "link": LLAMA, "message": "GPUs: 0 is refused; use a whole number of 1 or more", "stale": True}),
    "fewer than no GPUs": (LLAMA, [put("gpus", -3)], {
        "link": LLAMA, "message": "GPUs: -3 is refused; use a whole number of 1 or more"}),
    "a part of a token": (LLAMA, [put("seq_length", 0.5)], {
        "link": LLAMA, "message": "Sequence length: 0.5 is refused; use a whole number of 1 or more"}),
    "no tokens in all": (LLAMA, [put("tokens", 0)], {
        "link": LLAMA, "message": "Tokens in all, in billions: 0 is refused; use a number above 0"}),
    "a number after a wrong one": (LLAMA, [put("gpus", 0), put("gpus", 16)], {
        "gpus": 16, "message": "", "stale": False, "command": "kit plan llama-3.2-1b --gpus 16xH100"}),
    "an objective": (LLAMA, [put("objective", "sft")], {
        "link": f"{LLAMA}&job.objective=sft", "objective": "sft", "batch": 128,
        "command": "kit plan llama-3.2-1b --gpus 8xH100 job.objective=sft", "file": "launch.sh"}),
    "an emptied field": (LLAMA, [put("gpus", None), put("tokens", None), put("seq_length", None)], {
        "link": LLAMA, "message": ""}),
    "tokens": (LLAMA, [put("tokens", 2.5)], {"link": f"{LLAMA}&job.total_tokens=2500000000", "tokens": 2.5}),
    "a precision": (LLAMA, [put("precision", "fp8")], {
        "link": f"{LLAMA}&job.precision=fp8", "precision": "fp8", "message": "",
        "changed": ["step", "tokens/s a GPU", "MFU", "peak GiB"]}),
    "a precision, while a file is read": (LLAMA, [put("file", "plan.yaml"), put("precision", "fp8")], {
        "file": "plan.yaml", "precision": "fp8"}),
    "LoRA": (LLAMA, [put("method", "{four_bit: false}")], {
        "method": "{four_bit: false}", "objective": "sft", "seq_length": 2048,
        "command": "kit plan llama-3.2-1b --gpus 8xH100 'job.lora={four_bit: false}'"}),
    "QLoRA": (LLAMA, [put("method", "{four_bit: true}")], {"method": "{four_bit: true}"}),
    "an engine": (LLAMA, [put("engine", "torch")], {"link": f"{LLAMA}&layout.engine=torch", "engine": "torch"}),
    "an engine, and back": (LLAMA, [put("engine", "torch"), put("engine", "")], {"link": LLAMA, "engine": ""}),
    "a click on a layout": (LLAMA, [click(id=PINNED)], {"pin": PINNED, "command": ""}),
    "a click on a layout, and on the legend": (LLAMA, [click(id=PINNED), click(name="x")], {"pin": PINNED}),
    "the planner's choice again": (LLAMA, [click(id=PINNED), put("pin", "")], {"pin": "", "link": LLAMA}),
    "a text": (LLAMA, [put("paste", "model: gpt2\ncluster: 1xA100-80\n"), press("Use this text")], {
        "model": "gpt2", "cluster": "1xA100-80", "gpus": 1, "message": ""}),
    "a wrong text": (LLAMA, [put("paste", "{"), press("Use this text")], {
        "model": "llama-3.2-1b", "status": "no plan for this; the message says why"}),
    "a model of another name": (LLAMA, [put("precision", "fp8"), put("model", "llama-3.2-3b")], {
        "link": "model=llama-3.2-3b&cluster=8xH100&job.precision=fp8", "model": "llama-3.2-3b"}),
    "a link that is wrong": ("model=gpt2&model=gpt2", [], {
        "message": "this link has 2 values; use each key once, and at most 60 of them", "plan": ""}),
    "a model that does not fit": ("model=llama-3.1-405b&cluster=1xA100-80", [], {"plan": "", "files": [],
    "charts": ["layouts"]}),
    "a pipeline": (f"{LLAMA}&layout.pp=2&layout.engine=megatron", [], {
        "charts": ["layouts", "memory", "schedule", "step", "cost"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_act_changes_the_link_the_form_and_the_plan(name: str) -> None:
    query, acts, expected = CASES[name]
    page = asyncio.run(visited(query, acts))
    seen = see(page)
    assert {what: seen[what] for what in expected} == expected
    assert bool(seen["plan"]) == bool(seen["files"])
    if page.answer is not None and page.answer.plan is not None and not seen["message"]:
        layouts = page.answer.comparison.layouts
        assert (
            f"{len(layouts)} layouts compared, {sum(each.fits for each in layouts)} fit; the plan: " in seen["status"]
        )
        assert texts(page, "Text of the file") == [page.answer.files[page.file.value]]
        assert [*page.form["pin"].options][:1] == [""]
        assert {each.name for each in pareto_front(page.answer.comparison.layouts)} < {*page.form["pin"].options}


@pytest.mark.parametrize(
    ("offered", "shown"),
    [
        ({"own.yaml": {"model": "gpt2", "cluster": "1xA100-80", "job": {"seq_length": 512}}}, ("own.yaml", 1, 512)),
        ({"mine": {"model": "gpt2"}}, ("mine", 8, 1024)),
        ({"c.yaml": {"cluster": "2xA100-80"}}, ("llama-3.1-8b", 2, 4096)),
        ({"mine": {"model": "gpt2"}, "c.yaml": {"cluster": "2xA100-80"}}, ("mine", 2, 1024)),
    ],
    ids=["recipe", "model", "cluster", "model and cluster"],
)
def test_the_page_opens_with_the_files_that_it_was_started_with(offered: Any, shown: tuple[str, int, int]) -> None:
    seen = see(asyncio.run(visited("", [], offered)))
    assert (seen["model"], seen["gpus"], seen["seq_length"]) == shown
    assert bool(seen["command"]) == (seen["model"] == "llama-3.1-8b" and "c.yaml" not in offered)


def test_the_command_names_a_file_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = "model: gpt2\ncluster: 1xA100-80\njob: {seq_length: 512, total_tokens: 3000000}\n"
    files_in(tmp_path, dict.fromkeys(("own.yaml", "elsewhere/other.yaml"), own))
    offered = offer([Path("own.yaml"), Path("elsewhere/other.yaml")])
    seen = see(asyncio.run(visited("", [put("gpus", 2), put("precision", "fp16")], offered)))
    assert seen["command"] == "kit plan own.yaml cluster=2xA100-80 job.precision=fp16"
    assert kit_main(*shlex.split(seen["command"])[1:]).out.startswith(seen["plan"].split("512 tokens")[0])
    assert see(asyncio.run(visited("", [], offered)))["command"] == "kit plan own.yaml"
    assert see(asyncio.run(visited("", [put("model", "other.yaml")], offered)))["command"] == ""


def test_while_the_first_plan_runs_the_form_is_filled_and_nothing_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    from kit.addons.ui import page as module

    seen: dict[str, Any] = {}
    answer = module.answer

    def watched(*asked: Any) -> Any:
        seen.update(see(pages[0]), busy=pages[0].spinner.visible, results=[*pages[0].results])
        return answer(*asked)

    pages: list[Any] = []
    monkeypatch.setattr(module, "answer", watched)
    page = asyncio.run(visited("model=gpt2&cluster=2xA100-80&job.seq_length=512", [pages.append]))
    assert (seen["model"], seen["gpus"], seen["seq_length slid"], seen["objective"]) == ("gpt2", 2, 512, "pretrain")
    assert (seen["status"], seen["busy"], seen["results"]) == ("comparing the layouts of gpt2 …", True, [])
    assert (page.spinner.visible, [*page.results] != []) == (False, True)


def test_choices_of_one_moment_are_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from kit.addons.ui import page as module

    asked: list[Any] = []
    answer = module.answer
    monkeypatch.setattr(module, "answer", lambda *words: asked.append(words) or answer(*words))
    asyncio.run(visited(*CASES["two choices of one moment"][:2]))
    assert len(asked) == 2, "of the link, and of both choices"


def test_two_visitors_do_not_see_each_other() -> None:
    async def both() -> tuple[Any, ...]:
        return await asyncio.gather(visited(LLAMA, [put("precision", "fp8")]), visited("", [put("gpus", 16)]))

    one, other = map(see, asyncio.run(both()))
    assert (one["link"], one["model"]) == (f"{LLAMA}&job.precision=fp8", "llama-3.2-1b")
    assert (other["link"], other["precision"]) == ("model=llama-3.1-8b&cluster=16xH100", "bf16")


def test_what_is_copied_and_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}
    ui, plan = nicegui.ui, kit.plan("llama-3.2-1b", "8xH100")
    monkeypatch.setattr(ui.download, "content", lambda content, name: taken.update({name: content}))
    copied: list[str] = []
    monkeypatch.setattr(ui.clipboard, "write", copied.append)
    said: list[str] = []
    acts: list[Act] = [
        put("file", "launch.sh"), press("Copy file"), lambda page: said.append(page.status.text),
        press("Download file"), press("Download all"), press("Download report"),
        press("Copy link"), lambda page: said.append(page.status.text),
        press("Copy command"), lambda page: said.append(page.status.text),
    ]  # fmt: skip
    asyncio.run(visited(LLAMA, acts))
    files = files_of(plan)
    assert (taken["launch.sh"], taken["report.html"]) == (files["launch.sh"], report(view_of(plan)))
    assert copied == [files["launch.sh"], "kit plan llama-3.2-1b --gpus 8xH100"]
    with zipfile.ZipFile(io.BytesIO(taken["run.zip"])) as archive:
        assert {*archive.namelist()} == {*files}
    assert said == ["launch.sh is copied", "the link is copied", "the command is copied"]


def test_every_box_has_its_name() -> None:
    page = asyncio.run(visited(LLAMA, []))
    assert [box.props["label"] for box in (*page.form.values(), page.file)] == [
        "Model", "Cluster", "GPUs", "Sequence length", "Sequences a step", "Objective", "Tokens in all, in billions",
        "Precision", "Method", "Engine", "Pinned layout", "File",
    ]  # fmt: skip


# ---------------------------------------------------------------- a trainer's file that is dropped

CARDS = "model=llama-3.2-1b&cluster=2xRTX-4090"


def drop(name: str, text: str | bytes) -> Act:
    """What the browser sends when a file is dropped."""
    data = text.encode() if isinstance(text, str) else text

    def act(page: Any) -> Any:
        (box,) = (each for each in page.client.elements.values() if isinstance(each, nicegui.ui.upload))
        return box.handle_uploads([box.SmallFileUpload(name, "", data)])

    return act


def own(page: Any) -> dict[str, Any]:
    """What is said of the dropped file."""
    return {
        "title": page.own_title.text,
        "problem": "".join(
            each.text for each in there(page, nicegui.ui.label, role="alert") if each is not page.message
        ),
        "text": [*texts(page, "The file as it is"), ""][0],
        "narrow": [*texts(page, "The file as it is"), "", ""][1],
        "diff": next(iter(texts(page, "Diff of the file")), ""),
    }


def test_a_dropped_file_gets_the_answer_and_the_diff_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copied: list[str] = []
    monkeypatch.setattr(nicegui.ui.clipboard, "write", copied.append)
    text, gpus = TIGHT["axolotl.yaml"]
    path = Path(files_in(tmp_path, {"big.yaml": text + "sequense_len: 8192\n"}), "big.yaml").relative_to(tmp_path)
    found = answer_of_file(path, gpus)
    visitor = visited(CARDS, [drop("/home/you/big.yaml", path.read_bytes()), press("Copy diff")])
    seen = own(asyncio.run(visitor))
    assert (seen["title"], seen["problem"]) == ("big.yaml: does not fit", "")
    assert (seen["text"], seen["narrow"]) == tuple(text_of(found, (), width, str) for width in (92, 44))
    assert "did you mean sequence_len?" in " ".join(seen["text"].split())
    assert seen["diff"] == kit_main("plan", "big.yaml", "--gpus", gpus, "--patch").out == copied[0] != ""


def test_a_dropped_file_is_judged_on_the_cluster_that_is_chosen() -> None:
    seen = own(asyncio.run(visited(CARDS, [drop("a.yaml", AXOLOTL)])))
    assert (seen["title"], "2 × RTX-4090" in seen["text"]) == ("a.yaml: does not fit", True)
    seen = own(asyncio.run(visited(CARDS, [drop("a.yaml", AXOLOTL), put("cluster", "2xH200")])))
    assert (seen["title"], "2 × H200" in seen["text"]) == ("a.yaml: fits", True)
    node = {"gpu": "H200", "gpus_per_node": 1, "intra_node_gbytes_per_s": 450, "price_per_node_hour_usd": 7}
    mine = {"own.yaml": {"cluster": node}}
    page = asyncio.run(visited("model=llama-3.2-1b&cluster=own.yaml", [drop("a.yaml", AXOLOTL)], mine))
    assert "at $7.00 a node" in own(page)["text"]
    launched = SWIFT.replace("GPUS=4", "GPUS=2").replace("0,1,2,3", "0,1")
    seen = own(asyncio.run(visited("model=llama-3.2-1b&cluster=8xH100", [drop("train.sh", launched)])))
    assert "2 processes, and --gpus 8xH100 has 8 GPUs: judged on 2" in " ".join(seen["text"].split())


UNOPENED = "no file that a dropped one names is opened"
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "an absolute path": ("a.yaml", AXOLOTL + "deepspeed: /etc/passwd\n", f":19: deepspeed=/etc/passwd: {UNOPENED}"),
    "a path from here": ("a.yaml", AXOLOTL + "deepspeed: ds.json\n", f"deepspeed=ds.json: {UNOPENED}"),
    "a path above": ("a.yaml", AXOLOTL + "deepspeed: ../x/ds.json\n", UNOPENED),
    "of accelerate": ("t.sh", "accelerate launch --config_file acc.yaml sft.py --model_name_or_path gpt2\n", UNOPENED),
    "of a command": ("t.sh", "NPROC_PER_NODE=2 swift sft --config more.yaml\n", UNOPENED),
    "a directory of a model": ("a.yaml", AXOLOTL.replace("Qwen/Qwen3-8B", "./mine"), "neither in the catalog"),
    "an id of the hub": ("a.yaml", AXOLOTL.replace("Qwen/Qwen3-8B", "some/mine"), "neither in the catalog"),
    "another program's": ("a.yaml", "trainer: {}\nexp_manager: {}\nmodel: {}\n", "configuration of NeMo; kit plan"),
    "no mapping": ("a.yaml", "- 1\n", "a.yaml: no mapping of keys"),
    "no UTF-8": ("a.yaml", b"a: \xff\n", "a.yaml: not UTF-8 text"),
    "too long": ("a.yaml", AXOLOTL + "#" * (1 << 20), "a.yaml: it has more than 1,048,576 bytes"),
    "nothing": ("", "", "file: no mapping"),
    "a name of two lines": ("../b\n+++ c.yaml", "- 1\n", "b_+++ c.yaml: no mapping"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_dropped_file_reaches_no_other_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps(config_from_model(load_model("llama-3.2-1b")))
    stage = '{"zero_optimization": {"stage": 3}}'
    accelerate = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"
    files_in(tmp_path, {
        **dict.fromkeys(("x/ds.json", "here/ds.json"), stage), "here/acc.yaml": accelerate,
        "here/more.yaml": "model: Qwen/Qwen3-8B\ntrain_type: full\n",
        **dict.fromkeys(("here/mine/config.json", "here/some/mine/config.json"), config),
    })  # fmt: skip
    monkeypatch.chdir(tmp_path / "here")
    label, text, problem = REFUSED[name]
    page = asyncio.run(visited(CARDS, [drop("a.yaml", AXOLOTL), drop(label, text)]))
    seen = own(page)
    assert problem in seen["problem"]
    assert (seen["title"].split(": ")[-1], seen["text"], seen["diff"]) == ("not read", "", "")
    assert (see(page)["message"], see(page)["stale"]) == ("", False)  # the plan is as it was


def test_a_model_and_a_file_that_are_known_by_name_are_not_those_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = AXOLOTL + "deepspeed: deepspeed_configs/zero3_bf16.json\n"
    dropped = [("a.yaml", named), ("train.sh", SWIFT + "torchrun --nnodes 2 x.py --deepspeed zero3.json\n")]
    before = [own(asyncio.run(visited(CARDS.replace("2x", "4x"), [drop(*each)]))) for each in dropped]
    assert [(each["problem"], "[node-rank]" in each["text"]) for each in before] == [("", False), ("", True)]
    config = json.dumps(config_from_model(load_model("llama-3.2-1b")))
    wrong = '{"zero_optimization": {"stage": 1, "offload_param": {"device": "nvme"}}, "fp61": {}}'
    files_in(tmp_path, {
        **dict.fromkeys(("Qwen/Qwen3-8B/config.json", "Qwen/Qwen2.5-7B-Instruct/config.json"), config),
        **dict.fromkeys(("deepspeed_configs/zero3_bf16.json", "zero3.json"), wrong),
    })  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert [own(asyncio.run(visited(CARDS.replace("2x", "4x"), [drop(*each)]))) for each in dropped] == before


OWN = ("host", "127.0.0.1:8000")


@pytest.mark.parametrize(
    ("kind", "headers", "sent"),
    [
        ("http", [OWN], "passed"),
        ("http", [("host", "LOCALHOST:8000"), ("origin", "http://127.0.0.1:8000")], "passed"),
        ("websocket", [OWN, ("origin", "http://localhost:8000")], "passed"),
        ("lifespan", [], "passed"),
        ("http", [], 403),
        ("http", [("host", "127.0.0.1:8001")], 403),
        ("http", [("host", "127.0.0.1")], 403),
        ("http", [("host", "127.0.0.1.evil.example:8000")], 403),
        ("http", [("host", "evil.example"), ("origin", "http://127.0.0.1:8000")], 403),
        ("http", [OWN, ("host", "evil.example")], 403),
        ("http", [("host", "evil.example"), OWN], 403),
        ("http", [OWN, ("origin", "null")], 403),
        ("websocket", [OWN, ("origin", "http://evil.example")], 1008),
    ],
)
def test_only_this_machines_own_page_is_answered(kind: str, headers: list[tuple[str, str]], sent: object) -> None:
    """ASGI: a refused socket is closed before it is accepted."""
    said: list[Any] = []

    async def app(*_: Any) -> None:
        said.append("passed")

    async def send(message: dict[str, Any]) -> None:
        said.append(message.get("status") or message.get("code") or message["body"])

    pairs = [(name.encode(), value.encode()) for name, value in headers]
    asyncio.run(LocalOnly(app, 8000)({"type": kind, "headers": pairs}, None, send))
    assert said == [sent, *[b"kit ui answers this machine alone\n"] * (sent == 403)]
