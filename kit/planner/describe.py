"""A layout in one line."""

from __future__ import annotations

from kit.specs.layout import Layout


def describe(layout: Layout) -> str:
    """One line: engine, then every size that is not one."""
    parts: list[str] = [layout.engine]
    sizes = ("tp", "cp", "pp", "vp", "ep", "etp")
    parts += [f"{name}={getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1]
    parts += ["sp"] if layout.sp else []
    parts += [f"dp={layout.dp}"]
    parts += [f"ZeRO-{layout.zero_stage}"] if layout.zero_stage else []
    places = {"cpu": "host", "nvme": "NVMe"}
    parts += [f"optimizer on {places[layout.offload_optimizer]}"] if layout.offload_optimizer != "none" else []
    parts += [f"parameters on {places[layout.offload_param]}"] if layout.offload_param != "none" else []
    parts += ["full recompute"] if layout.recompute == "full" else []
    return ", ".join([*parts, f"micro batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"])
