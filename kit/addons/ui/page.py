"""The page: NiceGUI's widgets, bound to a state and its answer. ``answer`` and ``charts`` compute the content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from nicegui import Client, events, ui
from starlette.requests import Request

from kit.addons.configs.answer import Answer as FileAnswer
from kit.addons.configs.text import text_of
from kit.addons.ui import charts
from kit.addons.ui.answer import (
    MOST_GPUS,
    Answer,
    answer,
    catalog_cluster,
    cluster_cost,
    cluster_text,
    pareto_front,
    with_gpus,
)
from kit.addons.ui.dropped import judged, label_of
from kit.addons.ui.state import Offered, State
from kit.errors import KitError
from kit.planner.plan import Plan
from kit.report.summary import summary
from kit.report.view import spoken
from kit.specs.catalog import gpu_names, model_names, node_names
from kit.specs.layout import ENGINES, doubled
from kit.specs.recipe import Recipe
from kit.specs.text_files import MOST_BYTES

_STYLE = """
.nicegui-echart text { fill: currentColor !important; stroke: none !important; opacity: 1 !important; }
.message { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
.problem { position: sticky; top: 4.5rem; z-index: 9; padding: 0.5rem; background: #fff; color: #c1121f; }
.body--dark .problem { background: #121212; color: #ff8a8a; }
.stale { opacity: 0.4; }
.narrow { display: none; }
.columns { flex-wrap: nowrap; }
@media (max-width: 743px) {
  .columns { flex-wrap: wrap; } .columns > * { width: 100%; } .wide { display: none; } .narrow { display: block; }
  .problem { position: static; } .own .nicegui-expansion-content { padding: 0.5rem 0; }
}
.screen { white-space: pre; max-height: 32rem; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; }
.screen.wide, .screen.narrow { max-height: none; }
.q-uploader__subtitle { display: none; }
input[type=range] { accent-color: #1d5fa8; }
:focus-visible { outline: 2px solid #8a63d2; outline-offset: 2px; }
"""
_OBJECTIVES = {
    "pretrain": "pretraining", "sft": "SFT", "seq2seq": "sequence to sequence", "dpo": "DPO", "kto": "KTO",
    "reward": "reward model", "grpo": "GRPO",
}  # fmt: skip
_PRECISIONS = ["bf16", "fp8", "fp16", "fp32"]
_METHODS = {
    "null": "all weights",
    "{four_bit: false}": "LoRA",
    "{four_bit: true}": "QLoRA (4 bits)",
    "{eight_bit: true}": "LoRA on 8-bit weights",
}
_STARTED = ("launch.sh", "own_script.py")
"""Files that start the plan: one is shown first."""
_WIDTH, _NARROW = 92, 44
"""Columns of the plan in words, on a screen and on a telephone."""


def offers_of(offered: Offered) -> dict[str, list[str]]:
    """What the lists of models and clusters offer: the labels of own files first, then the catalog's names."""
    clusters = [f"8x{name}" for name in gpu_names() if catalog_cluster(f"8x{name}")]
    return {
        "model": [*(label for label in offered if "model" in offered[label]), *model_names()],
        "cluster": [
            *(label for label in offered if "model" not in offered[label]),
            *clusters,
            *(f"{name}:1" for name in node_names()),
        ],
    }


def build(offered: Offered) -> None:
    """Register the page. Each visitor has a ``_Page`` of its own."""
    offers = offers_of(offered)

    async def index(request: Request, client: Client) -> None:
        page = _Page(offered, offers, client)
        await client.connected(timeout=30)
        await page.open(request.query_params.multi_items())

    ui.page("/")(index)


class _Page:
    """One visitor's page."""

    def __init__(self, offered: Offered, offers: dict[str, list[str]], client: Client) -> None:
        self.offered, self.offers, self.client = offered, offers, client
        self.state, self.shown, self.answer = State(), State(), None  # type: State, State, Answer | None
        self.before: Plan | None = None
        self.dropped: tuple[str, bytes] | None = None
        self.filling = self.busy = False
        ui.add_css(_STYLE)
        ui.colors(primary="#1d5fa8")
        with ui.header().classes("items-center justify-between"):
            ui.label("kit: plan a training run").classes("text-lg").props('role="heading" aria-level="1"')
            with ui.row().classes("items-center"):
                ui.button("Copy link", icon="link", on_click=self._copy_link, color=None).props("flat")
                schemes = {None: "as the system", False: "light", True: "dark"}
                scheme = ui.toggle(schemes).props(
                    "flat no-caps text-color=white toggle-color=white toggle-text-color=white"
                )
                scheme.props('role="group" aria-label="Colours"').bind_value(ui.dark_mode(None))
        self.message = ui.label().classes("message problem w-full").props('role="alert"')
        self.message.set_visibility(False)
        with ui.expansion("Drop the config that you already have").classes("w-full own").props("duration=0"):
            self._own_file()
        with ui.row().classes("w-full columns items-start gap-6"):
            with ui.column().classes("w-80 shrink-0").props('role="form" aria-label="What to plan"'):
                self._form()
            with ui.column().classes("grow min-w-0").props('role="region" aria-label="The answer"'):
                self._results()

    # ---------------------------------------------------------------- widgets

    def _form(self) -> None:
        self.model = self._select("Model", "model", [*self.offers["model"]], typed=True)
        # Without a transition: a click on a button that still slides would miss it.
        with ui.expansion("Paste a model or a recipe").classes("w-full").props("duration=0"):
            self.paste = ui.textarea("config.json, or a recipe in YAML").classes("w-full").props("outlined")
            ui.button("Use this text", on_click=self._use_text, color=None).props("outline")
        self.cluster = self._select("Cluster", "cluster", [*self.offers["cluster"]], typed=True)
        self.gpus = self._dial("GPUs", list(doubled(1, MOST_GPUS)), self._ask_gpus)
        self.seq_length = self._dial("Sequence length", list(doubled(256, 1 << 20)), self._asker("job.seq_length"))
        self.batch = self._dial("Sequences a step", list(doubled(1, 1 << 15)), self._asker("job.global_batch_size"))
        self.objective = self._select("Objective", "job.objective", _OBJECTIVES)
        self.tokens = ui.number("Tokens in all, in billions", on_change=self._ask_tokens)
        self.tokens.props("debounce=400").classes("w-full")
        self.precision = self._select("Precision", "job.precision", _PRECISIONS)
        self.method = self._select("Method", "job.lora", _METHODS)
        self.engine = self._select("Engine", "layout.engine", {"": "the fastest", **{name: name for name in ENGINES}})
        self.pin = ui.select({"": "the planner's choice"}, label="Pinned layout", value="", on_change=self._ask_pin)
        self.pin.classes("w-full").props('options-html="false"')

    def _select(self, label: str, key: str, options: Any, typed: bool = False) -> ui.select:
        mode: Any = {"with_input": True, "new_value_mode": "add-unique"} if typed else {}
        return ui.select(options, label=label, on_change=self._asker(key), **mode).classes("w-full")

    def _dial(
        self, label: str, values: list[int], ask: Callable[[Any], Any]
    ) -> tuple[ui.number, ui.element, list[int]]:
        """A number to type, and a slider over powers of two."""
        with ui.column().classes("w-full gap-0"):
            number = ui.number(label, on_change=self._whole(label, ask), step=1).props("debounce=400")
            number.classes("w-full")
            # The browser's own slider: Quasar's takes the focus without a name.
            slider = ui.element("input").props(
                f'type=range min=0 max={len(values) - 1} aria-label="{label}, powers of two"'
            )
            slider.classes("w-full").on(
                "input",
                lambda event: self._slid(number, values[int(event.args)]),
                js_handler="(event) => emit(event.target.value)",
                throttle=0.2,
            )
        return number, slider, values

    def _own_file(self) -> None:
        ui.label(
            "A file of axolotl, LLaMA-Factory, ms-swift, Megatron-LM, Automodel, TRL, OpenRLHF or verl, judged as it "
            "is on the cluster that is chosen below. Files that it names are not opened."
        )
        ui.upload(
            label="Drop a file here, or choose one with +",
            max_file_size=MOST_BYTES,
            on_upload=self._take,
            on_rejected=lambda: self._show_own("refused", f"drop one file of at most {MOST_BYTES:,} bytes"),
            auto_upload=True,
        ).props("flat bordered").classes("w-full max-w-md")
        self.own_title = ui.label().classes("text-lg").props('role="heading" aria-level="2" aria-live="polite"')
        self.own_problem = ui.label().classes("message problem w-full").props('role="alert"')
        self.own_words = self._screen("The file as it is", "wide"), self._screen("The file as it is", "narrow")
        with ui.column().classes("w-full") as self.diff_box:
            ui.button("Copy diff", icon="content_copy", on_click=self._copy_diff, color=None).props("outline")
            self.diff = self._screen("Diff of the file")
        self._show_own()

    def _screen(self, name: str, where: str = "") -> ui.label:
        """A text with the lines that it has. ``where``: wide or narrow, where one of both is shown."""
        return ui.label().classes(f"screen {where} w-full").props(f'role="region" aria-label="{name}" tabindex="0"')

    def _results(self) -> None:
        with ui.row().classes("items-center no-wrap"):
            self.spinner = ui.spinner(size="sm")
            self.status = ui.label().props('role="status" aria-live="polite"')
        with ui.column().classes("w-full") as self.results:
            self._shown_results()
        self.results.set_visibility(False)

    def _shown_results(self) -> None:
        with ui.row().classes("items-center") as self.typed:
            self.command = ui.label().classes("message")
            ui.button("Copy command", icon="content_copy", on_click=self._copy_command, color=None).props("flat dense")
        self.words, self.narrow_words = self._screen("The plan", "wide"), self._screen("The plan", "narrow")
        self.changed = ui.table(
            columns=[
                {"name": name, "label": label, "field": name, "align": "left"}
                for name, label in (("what", "since the last choice"), ("before", "before"), ("now", "now"),
                                    ("change", "change"))
            ],
            rows=[], row_key="what",
        ).props("dense flat")  # fmt: skip
        self.charts: dict[str, tuple[ui.column, ui.echart]] = {}
        for name, title, height in (
            ("layouts", "Layouts that were compared: click one to pin it", 24),
            ("memory", "Memory of a GPU", 16),
            ("schedule", "The pipeline's schedule", 16),
            ("step", "Where a step's time goes", 9),
            ("cost", "Cost against time, over cluster sizes", 16),
        ):
            with ui.column().classes("w-full gap-0") as box:
                ui.label(title).classes("text-lg").props('role="heading" aria-level="2"')
                chart = ui.echart({"series": []}, on_point_click=self._clicked, renderer="svg")
                chart.classes("w-full").style(f"height: {height}rem").props(f'role="img" data-chart="{name}"')
            self.charts[name] = box, chart
        with ui.column().classes("w-full") as self.files_box:
            ui.label("Files").classes("text-lg").props('role="heading" aria-level="2"')
            self.file = ui.select([], label="File", on_change=self._show_file).classes("w-96")
            with ui.row():
                for text, icon, act in (
                    ("Copy file", "content_copy", self._copy_file),
                    ("Download file", "download", self._download_file),
                    ("Download all", "folder_zip", self._download_all),
                    ("Download report", "summarize", self._download_report),
                ):
                    ui.button(text, icon=icon, on_click=act, color=None).props("outline")
            self.code = self._screen("Text of the file")

    # ---------------------------------------------------------------- what the visitor does

    def _asker(self, key: str) -> Callable[[events.ValueChangeEventArguments[Any]], Any]:
        def ask(event: events.ValueChangeEventArguments[Any]) -> Any:
            value = event.value
            if value is None or self.filling:
                return None
            text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
            return self._ask(self.state.having(**{key.replace(".", "__"): text}))

        return ask

    def _whole(self, label: str, ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Asks only with a number of 1 or more; another one is refused under its label."""

        def asked(event: events.ValueChangeEventArguments[Any]) -> Any:
            if event.value is None or self.filling:
                return None
            if event.value < 1 or event.value % 1:
                return self._say(f"{label}: {event.value:g} is refused; use a whole number of 1 or more")
            return ask(event)

        return asked

    def _ask_gpus(self, event: events.ValueChangeEventArguments[Any]) -> Any:
        cluster = self.state.get("cluster") or (cluster_text(self.answer.recipe) if self.answer else "")
        found = with_gpus(cluster, int(event.value))
        if found is None:
            return self._say(f"GPUs: no {cluster} with {event.value:,.0f} GPUs is known; choose another number")
        return self._ask(self.state.having(cluster=found))

    def _ask_tokens(self, event: events.ValueChangeEventArguments[Any]) -> Any:
        if event.value is None or self.filling:
            return None
        if event.value <= 0:
            return self._say(f"Tokens in all, in billions: {event.value:g} is refused; use a number above 0")
        return self._ask(self.state.having(job__total_tokens=str(round(event.value * 1e9))))

    def _ask_pin(self, event: events.ValueChangeEventArguments[Any]) -> Any:
        return None if self.filling else self._ask(replace(self.state, pin=event.value or ""))

    def _clicked(self, event: events.EChartPointClickEventArguments) -> Any:
        pin = event.data.get("id") if isinstance(event.data, dict) else None
        return self._ask(replace(self.state, pin=str(pin))) if pin else None

    def _slid(self, number: ui.number, value: int) -> None:
        if not self.filling:
            number.value = value  # asks

    async def _use_text(self) -> None:
        await self._ask(self.state.pasting(self.paste.value or ""))

    async def _take(self, event: events.UploadEventArguments) -> None:
        data = await anext(event.file.iterate(chunk_size=MOST_BYTES + 1), b"")  # enough to see that it is too long
        self.dropped = label_of(event.file.name), data
        event.sender.run_method("reset")
        await self._judge()

    def _copy_link(self) -> None:
        ui.run_javascript("navigator.clipboard.writeText(location.href)")
        self._say_status("the link is copied")

    def _copy_command(self) -> None:
        ui.clipboard.write(self.command.text)
        self._say_status("the command is copied")

    def _copy_diff(self) -> None:
        ui.clipboard.write(self.diff.text)
        self._say_status("the diff is copied")

    def _copy_file(self) -> None:
        ui.clipboard.write(self.code.text)
        self._say_status(f"{self.file.value} is copied")

    def _download_file(self) -> None:
        ui.download.content(self.code.text, self.file.value)

    def _download_all(self) -> None:
        if self.answer:
            ui.download.content(self.answer.archive(), "run.zip")

    async def _download_report(self) -> None:
        if self.answer:
            ui.download.content(await asyncio.to_thread(self.answer.report), "report.html")

    def _show_file(self) -> None:
        self.code.text = self.answer.files.get(self.file.value, "") if self.answer else ""

    # ---------------------------------------------------------------- answers

    async def open(self, items: list[tuple[str, str]]) -> None:
        """Show what the link asks for."""
        try:
            state = State.of_query(items) if items else State.of_files(self.offered)
        except KitError as error:
            return self._say(str(error))
        return await self._ask(state)

    def _ask(self, state: State) -> Coroutine[Any, Any, None]:
        """Takes the state at once: the next choice, perhaps of the same moment, is made from it."""
        self.state = state
        return self._newest()

    async def _newest(self) -> None:
        """Answers the newest state; skips states that a newer one has replaced."""
        if self.busy:
            return
        self.busy = True
        try:
            while self.shown is not self.state or self.answer is None:
                asked = self.state
                await self._answer(asked)
                if asked is self.state:
                    break
        finally:
            self.busy = False
        await self._judge()
        await self._compare_sizes()

    async def _answer(self, state: State) -> None:
        self.shown = state
        self._say_status(f"comparing the layouts of {state.get('model') or 'the pasted model'} …")
        self.spinner.set_visibility(True)
        try:
            query = state.query()
            recipe = await asyncio.to_thread(state.recipe, self.offered)
            with self.client:
                self._fill(recipe)
            found = await asyncio.to_thread(answer, recipe, state.pin)
        except KitError as error:
            return self._say(str(error))
        finally:
            self.spinner.set_visibility(False)
        with self.client:
            ui.navigate.history.replace(f"/?{query}")
            self.answer = found
            self._fill_pins(found)
            self._say(found.refused)
            self._show(found)
            self.before = found.plan or self.before
        return None

    async def _judge(self) -> None:
        """Shows the answer for the dropped file on the cluster, unless another of either is chosen meanwhile."""
        if (dropped := self.dropped) is None:
            return
        state, found, problem = self.state, None, ""
        self.own_title.text = f"reading {dropped[0]} …"
        try:
            recipe = await asyncio.to_thread(state.recipe, self.offered)
            found = await asyncio.to_thread(judged, *dropped, recipe.cluster)
        except KitError as error:
            problem = str(error)
        if (dropped, state) == (self.dropped, self.state):
            self._show_own(f"{dropped[0]}: {found.verdict if found else 'not read'}", problem, found)

    def _show_own(self, title: str = "", problem: str = "", found: FileAnswer | None = None) -> None:
        self.own_title.text, self.own_problem.text, self.diff.text = title, problem, found.patch if found else ""
        for words, width in zip(self.own_words, (_WIDTH, _NARROW), strict=True):
            words.text = text_of(found, (), width, str) if found else ""
        for label in (self.own_problem, *self.own_words):
            label.set_visibility(bool(label.text))
        self.diff_box.set_visibility(bool(self.diff.text))

    def _say(self, problem: str) -> None:
        """Shows a message above the last answer."""
        self.message.text = problem
        self.message.set_visibility(bool(problem))
        self.results.classes(add="stale" if problem else "", remove="" if problem else "stale")
        if problem:
            self.spinner.set_visibility(False)
            self._say_status("no plan for this; the message says why")

    def _say_status(self, text: str) -> None:
        self.status.text = text

    def _fill(self, recipe: Recipe) -> None:
        """Fills the form with what is asked, defaults included."""
        self.filling = True
        try:
            for box, value in (
                (self.model, self.state.get("model") or recipe.model.name),
                (self.cluster, self.state.get("cluster") or cluster_text(recipe)),
            ):
                box.set_options(list(dict.fromkeys([*box.options, value])), value=value)
            self._set(self.gpus, recipe.cluster.num_gpus)
            self._set(self.seq_length, recipe.job.seq_length)
            self._set(self.batch, recipe.job.global_batch_size)
            self.tokens.value = recipe.job.total_tokens and recipe.job.total_tokens / 1e9
            self.objective.value = recipe.job.objective
            self.precision.value = recipe.job.precision
            self.engine.value = recipe.layout.engine or ""
            lora = recipe.job.lora
            method = 1 + ["", "four_bit", "eight_bit"].index(lora.quantised) if lora else 0
            self.method.value = list(_METHODS)[method]
        finally:
            self.filling = False

    def _fill_pins(self, found: Answer) -> None:
        """Fills the list of layouts that may be pinned."""
        self.filling = True
        try:
            names = [each.name for each in pareto_front(found.comparison.layouts)]
            named = [self.state.pin] if self.state.pin else []
            options = {"": "the planner's choice"} | {name: spoken(name) for name in [*names, *named] if name}
            self.pin.set_options(options, value=self.state.pin)
        finally:
            self.filling = False

    def _set(self, dial: tuple[ui.number, ui.element, list[int]], value: int) -> None:
        number, slider, values = dial
        number.value = value
        slider.props["value"] = min(range(len(values)), key=lambda index: abs(values[index] - value))
        slider.props["aria-valuetext"] = f"{value:,}"

    def _show(self, found: Answer) -> None:
        plan, view = found.plan, found.view
        fitting = sum(each.fits for each in found.comparison.layouts)
        if view is not None:
            self.words.text, self.narrow_words.text = (summary(view, width=width) for width in (_WIDTH, _NARROW))
            number = len(found.comparison.layouts)
            self._say_status(f"{number} layouts compared, {fitting} fit; the plan: {view.words}")
        self.results.set_visibility(True)
        for words in (self.words, self.narrow_words):
            words.set_visibility(plan is not None)
        self.command.text = self.shown.command(self.offered)
        self.typed.set_visibility(plan is not None and bool(self.command.text))
        self.changed.rows = found.changed_since(self.before)
        self.changed.set_visibility(bool(self.changed.rows))
        self._draw("layouts", charts.layouts(found) if found.comparison.layouts else None)
        self._draw("memory", charts.memory(found) if plan else None)
        self._draw("step", charts.step(found) if plan else None)
        self._draw("schedule", charts.schedule(found) if found.schedule() else None)
        self.files_box.set_visibility(plan is not None)
        names = list(found.files)
        started = next((name for name in names if name in _STARTED), next(iter(names), None))
        self.file.set_options(names, value=self.file.value if self.file.value in names else started)
        self._show_file()

    def _draw(self, name: str, options: dict[str, Any] | None) -> None:
        box, chart = self.charts[name]
        box.set_visibility(options is not None)
        if options is not None:
            chart.options.clear()
            chart.options.update(options)
            chart.props["aria-label"] = options["aria"]["label"]["description"]
            chart.update()

    async def _compare_sizes(self) -> None:
        """Shows days and cost of other cluster sizes one by one; stops if the visitor changes the state."""
        found, points = self.answer, []
        if found is None or found.plan is None:
            return self._draw("cost", None)
        for cluster in found.cluster_sizes():
            point = await asyncio.to_thread(cluster_cost, found.recipe, cluster)
            if self.answer is not found:
                return None
            points += [point] if point else []
            if points:
                self._draw("cost", charts.cost(points))
        return None
