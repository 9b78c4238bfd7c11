"""Results as one Markdown page. What is missing is said in words; ratios of one run are all of that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    about, rows = result["machine"], result["rows"]
    dry = about["device"] == "cpu"
    title = "# A dry run on a CPU, with tiny shapes: no figure here is a GPU's" if dry else "# What one GPU measured"
    parts = [
        title,
        _machine(result),
        _peaks(rows.get("peaks", [])),
        _predicted(rows.get("predicted", []), dry),
        _side_by_side(rows.get("side by side", []), rows.get("predicted", []), dry),
        _devices(rows.get("devices", [])),
        f"## kit doctor\n\n```\n{result['doctor']}\n```",
        _missing(rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(result: dict[str, Any]) -> str:
    about = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    hardware = ", ".join(f"{key} {value}" for key, value in (about["hardware"] or {}).items())
    return (
        f"{about['date']}, commit {about['commit'] or 'unknown'}, {result.get('seconds', 0)} s, "
        f"at most {result['minutes']:g} min. {hardware}. Python {about['python']}, {versions}."
    )


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
        )
        for row in rows
        if row["status"] == "ok"
    ]
    heads = ("case", "implementation", "GiB predicted", "measured", "ratio", "step s predicted", "measured", "ratio")
    note = "\n\nOn a CPU neither the memory nor the speed of a GPU's plan can be measured: no ratios." if dry else ""
    return _table("Predicted and measured", (*heads, "MFU predicted", "measured"), body) + (note if body else "")


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
    lines = [heads, ("---",) * len(heads), *body]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {title}\n\n{text}"


def _g(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
