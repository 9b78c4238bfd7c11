"""The page: NiceGUI's widgets, bound to a state and its answer. ``form``, ``answer`` and ``charts`` compute the
content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from nicegui import Client, events, ui
from starlette.requests import Request

from kit.addons.configs.answer import Answer as FileAnswer
from kit.addons.configs.text import text_of
from kit.addons.ui import charts
from kit.addons.ui.answer import Answer, ClusterCost, answer, cluster_cost, pareto_front
from kit.addons.ui.dropped import judged, label_of
from kit.addons.ui.form import FIELDS, Field, asked, offers_of, shown_values
from kit.addons.ui.state import Offered, State
from kit.errors import KitError
from kit.planner.plan import Plan
from kit.report.summary import summary
from kit.report.view import spoken
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
_STARTED = ("launch.sh", "own_script.py")
"""Files that start the plan: one is shown first."""
_WIDTHS = {"wide": 92, "narrow": 44}
"""Columns of a text in words, on a screen and on a telephone; one of both is shown."""
_CHARTS = {
    "layouts": ("Layouts that were compared: click one to pin it", 24),
    "memory": ("Memory of a GPU", 16),
    "schedule": ("The pipeline's schedule", 16),
    "step": ("Where a step's time goes", 9),
    "cost": ("Cost against time, over cluster sizes", 16),
}
"""Name → title, and height in rem."""
_FREE = {"": "the planner's choice"}
_TYPED: dict[str, Any] = {"with_input": True, "new_value_mode": "add-unique"}
"""A list that takes any other text too."""
_CHANGED = {"what": "since the last choice", "before": "before", "now": "now", "change": "change"}
"""Columns of the table of what changed."""


def build(offered: Offered) -> None:
    """Register the page. Each visitor has a ``_Page`` of its own."""
    offers = offers_of(offered)

    @ui.page("/")
    async def index(request: Request, client: Client) -> None:
        page = _Page(offered, offers, client)
        await client.connected(timeout=30)
        await page.open(request.query_params.multi_items())


class _Page:
    """One visitor's page."""

    def __init__(self, offered: Offered, offers: dict[str, list[str]], client: Client) -> None:
        self.offered, self.offers, self.client = offered, offers, client
        self.state, self.shown, self.answer = State(), State(), None  # type: State, State, Answer | None
        self.before: Plan | None = None
        self.file: ui.select | None = None
        self.dropped: tuple[str, bytes] | None = None
        self.filling, self.answering = False, asyncio.Lock()
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
        self.message = _alert()
        with ui.expansion("Drop the config that you already have").classes("w-full own").props("duration=0"):
            self._own_file()
        with ui.row().classes("w-full columns items-start gap-6"):
            with ui.column().classes("w-80 shrink-0").props('role="form" aria-label="What to plan"'):
                self._form()
            with ui.column().classes("grow min-w-0").props('role="region" aria-label="The answer"'):
                with ui.row().classes("items-center no-wrap"):
                    self.spinner = ui.spinner(size="sm")
                    self.status = ui.label().props('role="status" aria-live="polite"')
                self.results = ui.column().classes("w-full")

    # ---------------------------------------------------------------- widgets

    def _form(self) -> None:
        self.form: dict[str, Any] = {"model": self._list("model", "Model", [*self.offers["model"]], **_TYPED)}
        # Without a transition: a click on a button that still slides would miss it.
        with ui.expansion("Paste a model or a recipe").classes("w-full").props("duration=0"):
            self.paste = ui.textarea("config.json, or a recipe in YAML").classes("w-full").props("outlined")
            ui.button("Use this text", on_click=self._use_text, color=None).props("outline")
        self.form["cluster"] = self._list("cluster", "Cluster", [*self.offers["cluster"]], **_TYPED)
        for key, field in FIELDS.items():
            with ui.column().classes("w-full gap-0"):
                self.form[key] = (
                    self._list(key, field.label, dict(field.options)) if field.options else self._number(key, field)
                )
        self.form["pin"] = self._list("pin", "Pinned layout", _FREE, value="").props('options-html="false"')

    def _list(self, key: str, label: str, options: Any, **more: Any) -> ui.select:
        box = ui.select(options, label=label, on_change=lambda event: self._chosen(key, event.value), **more)
        return box.classes("w-full")

    def _number(self, key: str, field: Field) -> ui.number:
        """A number to type, and a slider over powers of two that follows it and sets it."""
        number = ui.number(
            field.label, on_change=lambda event: self._chosen(key, event.value), step=1 if field.slid else None
        )
        number.classes("w-full").props("debounce=400")
        if not field.slid:
            return number
        # The browser's own slider: Quasar's takes the focus without a name.
        slider = ui.element("input").props(
            f'type=range min=0 max={len(field.slid) - 1} aria-label="{field.label}, powers of two"'
        )

        def follow(event: events.ValueChangeEventArguments[Any]) -> None:
            if (value := event.value) is not None:
                slider.props["value"] = min(range(len(field.slid)), key=lambda at: abs(field.slid[at] - value))
                slider.props["aria-valuetext"] = f"{value:,.0f}"

        number.on_value_change(follow)
        slider.classes("w-full").on(
            "input",
            lambda event: number.set_value(field.slid[int(event.args)]),  # asks
            js_handler="(event) => emit(event.target.value)",
            throttle=0.2,
        )
        return number

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
        self.own = ui.column().classes("w-full")

    def _results(self, found: Answer) -> None:
        """What there is to show of an answer."""
        if found.view is not None:
            if command := self.shown.command(self.offered):
                with ui.row().classes("items-center"):
                    ui.label(command).classes("message")
                    self._copy_button("Copy command", lambda: (command, "the command")).props("flat dense")
            for where, width in _WIDTHS.items():
                _screen("The plan", summary(found.view, width=width), where)
        if rows := found.changed_since(self.before):
            heads = [{"name": name, "label": label, "field": name, "align": "left"} for name, label in _CHANGED.items()]
            ui.table(columns=heads, rows=rows, row_key="what").props("dense flat")
        drawn = charts.drawn(found)
        for name in _CHARTS:
            if options := drawn.get(name):
                self._chart(name, options)
        self.cost = ui.column().classes("w-full")
        if found.files:
            self._files(found)

    def _chart(self, name: str, options: dict[str, Any]) -> None:
        title, height = _CHARTS[name]
        with ui.column().classes("w-full gap-0"):
            ui.label(title).classes("text-lg").props('role="heading" aria-level="2"')
            chart = ui.echart(options, on_point_click=self._clicked, renderer="svg").classes("w-full")
            chart.style(f"height: {height}rem").props(f'role="img" data-chart="{name}"')
            chart.props["aria-label"] = options["aria"]["label"]["description"]

    def _files(self, found: Answer) -> None:
        """The files, of which one is shown: the one that was, or the one that starts the plan."""
        before, names = self.file.value if self.file else None, [*found.files]
        started = next((name for name in names if name in _STARTED), names[0])
        ui.label("Files").classes("text-lg").props('role="heading" aria-level="2"')
        file = self.file = ui.select(names, label="File", value=before if before in names else started).classes("w-96")

        def shown() -> tuple[str, str]:
            return found.files[file.value], file.value

        with ui.row():
            self._copy_button("Copy file", shown).props("outline")
            for label, icon, taken in (
                ("Download file", "download", shown),
                ("Download all", "folder_zip", lambda: (found.archive(), "run.zip")),
                ("Download report", "summarize", lambda: (found.report(), "report.html")),
            ):
                ui.button(label, icon=icon, on_click=partial(_download, taken), color=None).props("outline")
        _screen("Text of the file").bind_text_from(file, "value", found.files.get)

    def _copy_button(self, label: str, copied: Callable[[], tuple[str, str]]) -> ui.button:
        """``copied``: the text, and what it is called."""

        def copy() -> None:
            text, name = copied()
            ui.clipboard.write(text)
            self.status.text = f"{name} is copied"

        return ui.button(label, icon="content_copy", on_click=copy, color=None)

    # ---------------------------------------------------------------- what the visitor does

    def _chosen(self, key: str, value: Any) -> Any:
        """Asks with a visitor's value; None is none."""
        if value is None or self.filling:
            return None
        try:
            state = asked(self.state, key, value, self.answer.recipe if self.answer else None)
        except KitError as refused:
            return self._say(str(refused))
        return self._ask(state)

    def _clicked(self, event: events.EChartPointClickEventArguments) -> Any:
        return self._chosen("pin", event.data.get("id") if isinstance(event.data, dict) else None)

    async def _use_text(self) -> None:
        await self._ask(self.state.pasting(self.paste.value or ""))

    async def _take(self, event: events.UploadEventArguments) -> None:
        data = await anext(event.file.iterate(chunk_size=MOST_BYTES + 1), b"")  # enough to see that it is too long
        self.dropped = label_of(event.file.name), data
        event.sender.run_method("reset")
        await self._judge()

    def _copy_link(self) -> None:
        ui.run_javascript("navigator.clipboard.writeText(location.href)")
        self.status.text = "the link is copied"

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
        async with self.answering:
            if self.shown is self.state:
                return
            await self._answer(self.state)
            if self.shown is not self.state:
                return  # a newer one waits
        await self._judge()
        await self._compare_sizes()

    async def _answer(self, state: State) -> None:
        self.shown = state
        self.status.text = f"comparing the layouts of {state.get('model') or 'the pasted model'} …"
        self.spinner.set_visibility(True)
        try:
            query = state.query()
            recipe = await asyncio.to_thread(state.recipe, self.offered)
            values = shown_values(state, recipe)
            with self.client:
                offers = {key: [*dict.fromkeys([*self.form[key].options, values[key]])] for key in self.offers}
                self._fill(values, offers)
            found = await asyncio.to_thread(answer, recipe, state.pin)
        except KitError as error:
            return self._say(str(error))
        finally:
            self.spinner.set_visibility(False)
        names = [each.name for each in pareto_front(found.comparison.layouts)] + [state.pin]
        with self.client:
            ui.navigate.history.replace(f"/?{query}")
            self.answer = found
            pins = _FREE | {name: spoken(name) for name in names if name}
            self._fill({"pin": state.pin}, {"pin": pins})
            self._say(found.refused)
            if found.view is not None:
                fits = [each.fits for each in found.comparison.layouts]
                self.status.text = f"{len(fits)} layouts compared, {sum(fits)} fit; the plan: {found.view.words}"
            self.results.clear()
            with self.results:
                self._results(found)
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

    def _show_own(self, title: str, problem: str = "", found: FileAnswer | None = None) -> None:
        self.own_title.text = title
        self.own.clear()
        with self.own:
            _alert(problem)
            if found:
                for where, width in _WIDTHS.items():
                    _screen("The file as it is", text_of(found, (), width, str), where)
                if patch := found.patch:
                    self._copy_button("Copy diff", lambda: (patch, "the diff")).props("outline")
                    _screen("Diff of the file", patch)

    def _say(self, problem: str) -> None:
        """Shows a message above the last answer."""
        self.message.text = problem
        self.results.classes(add="stale" if problem else "", remove="" if problem else "stale")
        if problem:
            self.spinner.set_visibility(False)
            self.status.text = "no plan for this; the message says why"

    def _fill(self, values: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Fills boxes of the form, and lists of some; asks nothing."""
        self.filling = True
        try:
            for key, value in values.items():
                if key in options:
                    self.form[key].set_options(options[key], value=value)
                else:
                    self.form[key].value = value
        finally:
            self.filling = False

    async def _compare_sizes(self) -> None:
        """Shows days and cost of other cluster sizes one by one; stops if the visitor changes the state."""
        found, points = self.answer, list[ClusterCost]()
        if found is None or found.plan is None:
            return
        for cluster in found.cluster_sizes():
            points += filter(None, [await asyncio.to_thread(cluster_cost, found.recipe, cluster)])
            if self.answer is not found:
                return
            if points:
                self.cost.clear()
                with self.cost:
                    self._chart("cost", charts.cost(points))


async def _download(taken: Callable[[], tuple[str | bytes, str]]) -> None:
    """``taken``: the content, and the name of its file."""
    ui.download.content(*await asyncio.to_thread(taken))


def _alert(problem: str = "") -> ui.label:
    """A problem; it is there while it has a text."""
    label = ui.label(problem).classes("message problem w-full").props('role="alert"')
    return label.bind_visibility_from(label, "text", backward=bool)


def _screen(name: str, text: str = "", where: str = "") -> ui.label:
    """A text with the lines that it has. ``where``: wide or narrow, where one of both is shown."""
    return ui.label(text).classes(f"screen {where} w-full").props(f'role="region" aria-label="{name}" tabindex="0"')
