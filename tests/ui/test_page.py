"""``kit ui`` in Chromium, driven by Playwright: what a visitor does, sees and hears, and what the server refuses.

``KIT_PICTURES=docs/images pytest tests/ui`` draws the pictures of README and docs again.
"""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.addons.config_files import TIGHT
from tests.support import ROOT
from tests.support.files import file_with, files_in
from tests.support.runs import free_port
from tests.support.waiting import comes_true

pytest.importorskip("nicegui", reason="needs the extra ui")
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)

PICTURES = os.environ.get("KIT_PICTURES")
MOST_OF_A_PICTURE = 200_000
WAIT_MS = 60_000
"""The machine that runs the tests runs others beside them."""
WATCHED = """
import os, sys
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def watch(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        os.write(log, os.fsencode(args[0]) + b"\\n")
sys.addaudithook(watch)
from kit.cli import main
main()
"""
"""``kit``, with every file that it opens in a log."""


class Server(NamedTuple):
    port: int
    opened: Path
    directory: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``kit ui mine.yaml`` in a directory with files that it must not read."""
    directory = files_in(tmp_path_factory.mktemp("ui"), {
        "mine.yaml": "model: llama-3.2-1b\ncluster: 1xA100-80\njob: {seq_length: 2048}\n",
        "secret.yaml": "model: llama-3.2-1b\ncluster: 8xH100\n",
        "llama-3.1-8b/config.json": "{}",
        "Qwen/Qwen3-8B/config.json": "{}",
        "ds.json": '{"zero_optimization": {"stage": 3}}',
    })  # fmt: skip
    port = free_port()
    opened = directory / "opened.log"
    # NiceGUI behaves in another way where pytest runs it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    started = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(opened), "ui", "mine.yaml", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert f"http://127.0.0.1:{port}" in started.stdout.readline()
    with socket.socket() as probe:  # the address is printed a moment before the server accepts connections
        assert comes_true(lambda: probe.connect_ex(("127.0.0.1", port)) != errno.ECONNREFUSED, 30)
    yield Server(port, file_with(opened, ""), directory)
    started.send_signal(signal.SIGINT)
    started.wait(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Chromium's sandbox is not there for root; it shows this machine's own page alone.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with (
        sync_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM, args=arguments) as launched,
    ):
        yield launched


class Visitor:
    """A browser context of its own, and the words in which a test drives it."""

    def __init__(self, browser: Any, server: Server, query: str = "", scheme: str = "light", width: int = 1180) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        self.context.set_default_timeout(WAIT_MS)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(server.url + query)
        self.page.get_by_role("status").filter(has_text=" ").wait_for()

    def sees(self, text: str) -> None:
        """Waits until the plan in words has the text."""
        self.page.get_by_role("region", name="The plan").filter(has_text=text).wait_for()

    def link_has(self, part: str) -> None:
        self.page.wait_for_function("part => decodeURIComponent(location.search).includes(part)", arg=part)

    def choose(self, label: str, option: str) -> None:
        self.page.get_by_role("combobox", name=label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def chart(self, name: str) -> Any:
        return self.page.locator(f"[data-chart={name}]")

    def points(self, color: str = "#3c9a5f") -> Any:
        """Layouts of an engine that fit."""
        return self.chart("layouts").locator(f'path[fill="{color}"][fill-opacity="0.75"]')


@pytest.fixture(scope="module")
def visitor(browser: Any, server: Server) -> Iterator[Visitor]:
    first = Visitor(browser, server, "?model=llama-3.1-8b&cluster=8xH100")
    yield first
    first.context.close()


@pytest.mark.nightly
def test_a_point_says_its_layout_and_a_click_pins_it(visitor: Visitor, server: Server) -> None:
    page, point = visitor.page, visitor.points().nth(40)
    point.hover(force=True)
    page.get_by_text("Megatron-core TP", exact=False).filter(has_text="a step", visible=True).last.wait_for()
    point.click(force=True)
    visitor.link_has("pin=megatron")
    visitor.sees("Megatron-core")
    assert all(url.startswith((server.url, "data:", "blob:")) for url in visitor.asked)
    page.get_by_role("cell", name="peak GiB").wait_for()  # what changed since the last choice
    pinned = dict(part.split("=", 1) for part in page.url.partition("?")[2].split("&"))["pin"]
    page.reload()
    visitor.link_has("pin=megatron")
    page.get_by_role("status").filter(has_text="layouts compared").wait_for()
    assert f"pin={pinned}" in page.url
    visitor.choose("Pinned layout", "the planner's choice")
    page.wait_for_function("!location.search.includes('pin=')")


@pytest.mark.nightly
def test_the_keyboard_reaches_every_control_and_each_has_a_name(visitor: Visitor, server: Server) -> None:
    page = visitor.page
    page.goto(server.url)
    visitor.sees("llama-3.2-1b")
    reached = ""
    for _ in range(40):
        page.keyboard.press("Tab")
        reached += " | " + page.evaluate(
            "() => {const e = document.activeElement; return e.getAttribute('aria-label') || "
            "(e.labels && e.labels.length ? e.labels[0].innerText : '') || e.innerText || ''}"
        )
    controls = (
        "Copy link", "Model", "Cluster", "GPUs", "GPUs, powers of two", "Sequence length", "Sequences a step",
        "Tokens in all", "Precision", "Method", "Engine", "Pinned layout", "File", "Download all",
    )  # fmt: skip
    assert [name for name in controls if name.lower() not in reached.lower()] == [], reached
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('input, button, textarea, [role=slider], [role=img], [role=combobox]')]
           .filter(e => e.offsetParent && !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
                        || (e.labels && e.labels.length) || e.innerText)).map(e => e.outerHTML.slice(0, 200))"""
    )
    assert unnamed == []


@pytest.mark.nightly
@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 18, 18)")])
def test_dark_and_light_follow_the_system(
    browser: Any, server: Server, scheme: str, background: str, tmp_path: Path
) -> None:
    seen = Visitor(browser, server, "?model=llama-3.1-70b&cluster=aws:p5.48xlarge:8&layout.pp=4", scheme)
    seen.sees("llama-3.1-70b")
    seen.chart("cost").locator("text", has_text="256 GPUs").wait_for()
    ink, paper = seen.page.evaluate(
        """() => {const text = document.querySelector('[data-chart=memory] text');
           return [getComputedStyle(text).fill, getComputedStyle(document.body).backgroundColor]}"""
    )
    assert scheme == "light" or paper == background
    assert contrast(ink, background) > 7
    picture = Path(PICTURES or tmp_path) / f"ui-{scheme}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    seen.page.set_viewport_size({"width": 1180, "height": 1420})
    seen.page.wait_for_timeout(300)
    seen.page.screenshot(path=picture)
    assert picture.stat().st_size < MOST_OF_A_PICTURE
    seen.context.close()


def test_on_a_telephone_columns_stack_and_an_error_is_read(browser: Any, server: Server) -> None:
    seen = Visitor(browser, server, "?model=gpt2&cluster=2xA100-80", "dark", width=400)
    seen.sees("gpt2")
    page = seen.page
    form = page.get_by_role("form").bounding_box()
    assert page.get_by_role("region", name="The answer").bounding_box()["y"] >= form["y"] + form["height"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate(
        "e => e.scrollWidth <= e.clientWidth", page.get_by_role("region", name="The plan").element_handle()
    )
    page.get_by_label("GPUs", exact=True).fill("0")
    alert = page.get_by_role("alert")
    alert.filter(has_text="GPUs: 0 is refused").wait_for()
    ink, paper = alert.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
    assert contrast(ink, paper) > 4.5
    assert page.evaluate("getComputedStyle(document.querySelector('.stale')).opacity") == "0.4"
    page.goto(f"{server.url}?model={'x' * 300}&cluster=8xH100")
    alert.filter(has_text="x" * 50).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    seen.context.close()


def test_a_config_is_dropped_and_its_diff_is_copied(browser: Any, server: Server) -> None:
    seen = Visitor(browser, server, "?model=gpt2&cluster=2xRTX-4090", "dark", width=400)
    page, (text, _) = seen.page, TIGHT["axolotl.yaml"]
    page.get_by_text("Drop the config that you already have").click()
    dragged = page.evaluate_handle(
        "text => {const all = new DataTransfer(); all.items.add(new File([text], 'big.yaml')); return all}", text
    )
    page.locator(".q-uploader").dispatch_event("dragover", {"dataTransfer": dragged})
    page.locator(".q-uploader__dnd").dispatch_event("drop", {"dataTransfer": dragged})
    page.get_by_role("heading", name="big.yaml: does not fit").wait_for()
    words = page.get_by_role("region", name="The file as it is")
    # 44 columns of a monospaced font of 13 px
    assert words.evaluate("e => [44 * 7.9 <= e.clientWidth, e.scrollHeight <= e.clientHeight]") == [True, True]
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.get_by_role("button", name="Copy diff").click()
    page.get_by_role("status").filter(has_text="the diff is copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.get_by_role("region", name="Diff").text_content()
    for name, data, said in (
        ("big.yaml", f"{text}deepspeed: ds.json\n".encode(), "no file that a dropped one names is opened"),
        ("large.yaml", b"#" * (1 << 20) + b"\n", "drop one file of at most 1,048,576 bytes"),
    ):
        page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "text/plain", "buffer": data})
        page.get_by_role("alert").filter(has_text=said).wait_for()
        assert words.count() == 0
    seen.context.close()


def contrast(*colors: str) -> float:
    """WCAG's ratio of two colours as CSS computes them."""
    parts = [[int(part) / 255 for part in each[each.index("(") + 1 : -1].split(",")[:3]] for each in colors]
    linear = [[part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in each] for each in parts]
    low, high = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in linear)
    return (high + 0.05) / (low + 0.05)


# ---------------------------------------------------------------- the server


def status(server: Server, path: str = "/", **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{server.port}", **headers})
    return connection.getresponse().status


@pytest.mark.parametrize(
    ("headers", "expected"),
    [({}, 200), ({"Host": "evil.example"}, 403), ({"Origin": "http://evil.example"}, 403)],
)
def test_other_hosts_and_origins_are_refused(headers: dict[str, str], expected: int, server: Server) -> None:
    """Every form of them, and sockets: test_widgets.py."""
    assert status(server, **headers) == expected


def test_it_listens_on_this_machine_alone(server: Server) -> None:
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    assert {row[1] for row in rows[1:] if row[3] == "0A" and row[1].endswith(f":{server.port:04X}")} == {
        f"0100007F:{server.port:04X}"
    }


def test_no_path_of_a_visitor_is_read(server: Server) -> None:
    """Runs after the tests of the page: whatever they asked for, the server opened nothing but its own code."""
    assert [
        status(server, path)
        for path in (
            "/../secret.yaml", "/..%2fsecret.yaml", "/_nicegui/../../secret.yaml", "/secret.yaml", "/static/%2e%2e/x",
        )
    ] == [404] * 5  # fmt: skip
    own = [
        *(sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")),
        *(str(Path(place).resolve()) for place in sys.path if place), str(ROOT), "/proc", "/dev", "/etc",
    ]  # fmt: skip
    opened = {Path(line) for line in server.opened.read_text(encoding="utf-8").splitlines()}
    assert [path for path in opened if not any(path.is_relative_to(place) for place in own)] == []
    assert [path for path in opened if server.directory in path.parents or path.name in ("passwd", "shadow")] == []


def test_a_port_in_use_and_a_missing_file_are_explained(server: Server) -> None:
    for words, part in ((["--port", str(server.port)], "cannot be used"), (["absent.yaml"], "absent.yaml")):
        done = subprocess.run(
            [sys.executable, "-m", "kit", "ui", *words],
            capture_output=True, text=True, cwd=ROOT, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, part in done.stderr) == (2, True), done.stderr
