"""Results as one Markdown page. What is missing is said in words; ratios of one run are all of that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.peers import BARE
from tests.support.page import table

Row = dict[str, Any]


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    parts, rows = result["parts"], result["rows"]
    dry = parts[-1]["device"] == "cpu"
    title = "# A dry run on a CPU, with tiny shapes: no figure here is a GPU's" if dry else "# What one GPU measured"
    sections = [
        title,
        _head(parts, rows),
        _peaks(rows.get("peaks", [])),
        _predicted(rows.get("predicted", []), dry),
        _side_by_side(rows.get("side by side", []), rows.get("predicted", []), dry),
        _loops(rows.get("side by side", []), rows.get("predicted", []), dry),
        _devices(rows.get("devices", [])),
        _ops(rows.get("compiled ops", [])),
        *(_doctor(part, number, len(parts)) for number, part in enumerate(parts, 1)),
        _missing(rows),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(parts: Sequence[Row], rows: dict[str, list[Row]]) -> str:
    """Every part by itself: when, of which commit, how long, and which rows here are its own."""
    body = [
        (
            str(number),
            part["date"],
            (part["commit"] or "unknown") + (" with changes" if part["changed"] else ""),
            f"{part['seconds']:g}",
            f"{part['minutes']:g}",
            _asked(part),
            _own(rows, number),
            f"{part['load']:g}",
        )
        for number, part in enumerate(parts, 1)
    ]
    heads = ("part", "begun", "commit", "seconds", "of minutes", "asked for", "rows here", "load before")
    title = "One run" if len(parts) == 1 else f"{len(parts)} parts, one after the other"
    equipped = [_equipment(part) for part in parts]
    same = len(set(equipped)) == 1
    told = equipped[:1] if same else [f"Part {number}: {text}" for number, text in enumerate(equipped, 1)]
    return "\n\n".join([_table(title, heads, body), *told])


def _asked(part: Row) -> str:
    words = [f'only "{part["only"]}"'] if part["only"] else []
    words += [f'without "{word}"' for word in part["without"]]
    return ", ".join(words) or "all rows"


def _own(rows: dict[str, list[Row]], number: int) -> str:
    counts = {section: sum(row["part"] == number for row in some) for section, some in rows.items()}
    return ", ".join(f"{count} {section}" for section, count in counts.items() if count) or "none"


def _equipment(part: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items() if version)
    hardware = ", ".join(f"{key} {value}" for key, value in (part["hardware"] or {}).items())
    return f"{hardware}. Python {part['python']}, {versions}."


def _doctor(part: Row, number: int, of: int) -> str:
    title = "## kit doctor" + (f", before part {number}" if of > 1 else "")
    return f"{title}\n\n```\n{part['doctor']}\n```"


def _ops(rows: list[Row]) -> str:
    """Seconds, or why not; a second means that it was there already."""
    found = {name: value for row in rows for name, value in row.get("ops", {}).items()}
    body = [(name, f"{value:g} s" if isinstance(value, float) else value) for name, value in found.items()]
    return _table("DeepSpeed's ops: loaded, compiled before where they were not there", ("", ""), body)


def _peaks(rows: list[Row]) -> str:
    peaks = [peak for row in rows for peak in row.get("peaks", [])]
    body = [(p["name"], _g(p["measured"]), _g(p["catalog"]), _ratio(p["ratio"]), p["unit"], p["note"]) for p in peaks]
    return _table("Peaks", ("", "measured", "catalog", "ratio", "", "how"), body)


def _predicted(rows: list[Row], dry: bool) -> str:
    body = [
        (
            row["name"],
            row["layout"]["implementation"],
            _g(row["predicted_allocated_gib"]),
            _g(row.get("measured_allocated_gib")),
            _ratio(row.get("memory_ratio")),
            _g(row["predicted_step_s"]),
            _g(row["measured_step_s"]),
            _ratio(row.get("step_ratio")),
            _percent(row.get("predicted_mfu")),
            _percent(row["mfu"]),
            _g(row.get("on_disk_gib")),
            str(row["waits"]),
        )
        for row in rows
        if row["status"] == "ok"
    ]
    heads = ("case", "implementation", "GiB predicted", "measured", "ratio", "step s predicted", "measured", "ratio")
    more = ("MFU predicted", "measured", "GiB on disk", "host waits a step")
    note = "\n\nOn a CPU neither the memory nor the speed of a GPU's plan can be measured: no ratios." if dry else ""
    return _table("Predicted and measured", (*heads, *more), body) + (note if body else "")


def _side_by_side(rows: list[Row], cases: list[Row], dry: bool) -> str:
    """kit's engines without its loop stand beside; the ratio is to kit's plain-torch loop, larger is slower."""
    engines = [
        {**row, "name": f"{row['name']} (engine alone)", "flags": row["layout"]}
        for row in cases[:5]
        if row["status"] == "ok"
    ]
    done = [row for row in rows if row["status"] == "ok"] + engines
    base = next((row["measured_step_s"] for row in done if row["name"] == "kit train, torch"), None)
    base = None if dry else base
    body = [
        (
            row["name"],
            _g(row["measured_step_s"]),
            _ratio(row["measured_step_s"] / base if base else None),
            _percent(row["mfu"]),
            _g(row.get("measured_allocated_gib")),
            _g(row.get("loop_s")),
            ", ".join(f"{key}={value}" for key, value in row["flags"].items()),
        )
        for row in done
    ]
    heads = ("the 1B recipe by", "step s", "over kit's torch loop", "MFU", "GiB allocated", "loop's own s", "flags")
    note = "\n\nTiny shapes on a shared CPU: these times order nothing." if dry and body else ""
    return _table("Side by side", heads, body) + note


def _loops(rows: list[Row], cases: list[Row], dry: bool) -> str:
    """kit's whole loop over the same work in the same sizes without it."""
    by_name = {row["name"]: row for row in (*rows, *cases) if row["status"] == "ok"}
    pairs = [(by_name[loop], by_name[bare]) for loop, bare in BARE.items() if loop in by_name and bare in by_name]
    body = [
        (
            loop["name"],
            bare["name"] + (" (engine alone)" if "predicted_step_s" in bare else ""),
            _g(loop["measured_step_s"]),
            _g(bare["measured_step_s"]),
            "" if dry else _ratio(loop["measured_step_s"] / bare["measured_step_s"]),
            _g(loop["loop_s"]),
        )
        for loop, bare in pairs
    ]
    heads = ("kit's loop", "bare loop", "step s", "bare", "ratio", "of it, the loop's own s")
    return _table("What kit's loop costs", heads, body)


def _devices(rows: list[Row]) -> str:
    body = [
        (
            row["name"],
            one["model"],
            f"{one['gradient_error']:.1e}",
            f"{one['loss_error']:.1e}",
            f"{one['norm_error']:.1e}",
            f"{one['bound']:.0e}",
            "agrees" if one["agrees"] else f"DISAGREES at {one['at']}",
        )
        for row in rows
        for one in row.get("compared", [])
    ]
    return _table("Against the CPU in fp32", ("run", "model", "worst gradient", "loss", "norm", "bound", ""), body)


def _missing(rows: dict[str, list[Row]]) -> str:
    body = [
        (section, row["name"], row["status"], row.get("why", ""))
        for section, some in rows.items()
        for row in some
        if row["status"] != "ok"
    ]
    return _table("Not measured", ("", "", "", "why"), body)


def _table(title: str, heads: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> str:
    if not body:
        return ""
    return f"## {title}\n\n{table(heads, body)}"


def _g(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
