"""A layout in one line."""

from __future__ import annotations

from kit.specs.layout import Layout


def engine_name(layout: Layout) -> str:
    """The engine, and whose layers it runs where they are another's."""
    over = layout.engine == "deepspeed" and layout.implementation != "huggingface"
    return layout.engine + (" over megatron" if over else "")


def describe(layout: Layout) -> str:
    """One line: engine, then every size that is not one."""
    parts: list[str] = [engine_name(layout)]
    sizes = ("tp", "cp", "pp", "vp", "ep", "etp")
    parts += [f"{name}={getattr(layout, name)}" for name in sizes if getattr(layout, name) > 1]
    ends = [str(end) for end in (layout.first_stage_layers, layout.last_stage_layers) if end]
    parts += [f"ends of {' and '.join(ends)} layers"] if ends else []
    parts += ["sp"] if layout.sp else []
    parts += [f"dp={layout.dp}"]
    parts += [f"ZeRO-{layout.zero_stage}"] if layout.zero_stage else []
    parts += [f"hpZ {layout.zero_hpz}"] if layout.zero_hpz > 1 else []
    parts += ["int8 weights sent"] if layout.zero_quantized_weights else []
    parts += ["int4 gradients sent"] if layout.zero_quantized_gradients else []
    parts += [f"{layout.gradient_compression} gradients sent"] if layout.gradient_compression != "none" else []
    parts += [f"{layout.gradient_dtype} gradients"] if layout.gradient_dtype != "fp32" else []
    parts += ["autocast"] if layout.autocast else []
    places = {"cpu": "host", "nvme": "NVMe"}
    parts += [f"optimizer on {places[layout.offload_optimizer]}"] if layout.offload_optimizer != "none" else []
    parts += [f"parameters on {places[layout.offload_param]}"] if layout.offload_param != "none" else []
    parts += [f"{layout.recompute} recompute"] if layout.recompute != "none" else []
    parts += ["compiled blocks"] if layout.compile_layers else []
    parts += ["chunked loss"] if layout.chunked_loss else []
    parts += ["Liger's loss"] if layout.loss_kernel == "liger" else []
    parts += [f"{layout.attention_kernel} attention"] if layout.attention_kernel != "default" else []
    parts += ["ring"] if layout.cp > 1 and layout.cp_comm_type == "p2p" else []
    return ", ".join([*parts, f"micro batch {layout.micro_batch_size} x {layout.gradient_accumulation_steps}"])
