"""What ``kit convert inspect`` says of a directory or file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Inspected:
    """A checkpoint, whoever wrote it."""

    path: str
    program: str
    """The program that wrote it, in words."""
    format: str
    """kit's name of the format."""
    step: int | None
    """None: the checkpoint does not say it."""
    optimizer_steps: int | None
    samples_seen: int | None
    layout: dict[str, int | str]
    """World size, ZeRO stage, TP, PP, precision: what the checkpoint says."""
    dtypes: list[str]
    """Dtypes of the stored weights."""
    parameters: int | None
    """Elements of all weights."""
    tensors: int | None
    adam: bool
    """Whether Adam's moments are there."""
    hyperparameters: list[dict[str, object]]
    """Learning rate, betas, eps and weight decay of Adam's parameter groups."""
    model: str | None
    notes: list[str]
    can: list[str]
    """What to do with it: commands."""

    def __str__(self) -> str:
        said = [("program", self.program), ("model", self.model or "not said")]
        counters = (("step", self.step), ("of Adam", self.optimizer_steps), ("samples", self.samples_seen))
        said.append(("step", ", ".join(f"{word} {n}" for word, n in counters if n is not None) or "not said"))
        said.append(("layout", ", ".join(f"{key}={value}" for key, value in self.layout.items()) or "not said"))
        if self.parameters is not None:
            said.append(("weights", f"{self.parameters:,} in {self.tensors} tensors, {', '.join(self.dtypes)}"))
        said.append(("Adam's state", "yes" if self.adam else "no"))
        for group in self.hyperparameters:
            said.append(("", ", ".join(f"{key} {value}" for key, value in group.items())))
        said += [("note", note) for note in self.notes] + [("do", command) for command in self.can]
        return "\n".join([self.path, *(f"  {name:<13} {value}" for name, value in said)])
