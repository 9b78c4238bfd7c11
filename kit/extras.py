"""What pip installs: the name of the distribution, and which of its extras (pyproject.toml) has a missing package."""

from __future__ import annotations

DISTRIBUTION = "deepspeed-megatron-kit"
"""PyPI's ``kit`` is another project."""
EXTRAS = {
    **dict.fromkeys(("accelerate", "numpy", "psutil", "safetensors", "torch", "transformers", "xxhash"), "torch"),
    **dict.fromkeys(("megatron", "megatron-core"), "megatron"),
    **dict.fromkeys(("datasets", "pyarrow"), "data"),
    **dict.fromkeys(("fsspec", "s3fs"), "storage"),
    **dict.fromkeys(("nicegui", "starlette"), "ui"),
    "bitsandbytes": "eight-bit",
    "deepspeed": "deepspeed",
    "gguf": "gguf",
    "huggingface_hub": "hub",
    "peft": "lora",
    "prometheus_client": "tracking",
    "torchao": "torchao",
}
"""Module, or distribution of another name → the extra that installs it."""


def install(*extras: str) -> str:
    """The command that installs extras. pip reads those of the kit that is installed, also of a checkout."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing(error: ModuleNotFoundError) -> str | None:
    """What to say of a module that is not installed; None if no extra has it."""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return extra and f"this needs {error.name}, which is not installed: {install(extra)}"
