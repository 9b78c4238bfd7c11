"""State on NVMe (ZeRO-Infinity): reads a sub group of master weights and moments, and writes it back if it changed.

DeepSpeed's own functions do not suffice:

- Its accessors read and write a whole sub group for every parameter. Here a sub group stays in memory until another
  one is needed.
- Its setters refuse parameters with weights on NVMe (stage3.py, set_local_hp_param, compares with an empty tensor).
"""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed import DeepSpeedEngine

from kit.engines.deepspeed.state import FullyPartitionedState, Parameter


class NvmeState(FullyPartitionedState):
    """Stage 3 with the optimizer, the weights or both on NVMe."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        super().__init__(engine)
        self._resident: int | None = None

    def gradient(self, parameter: Parameter) -> torch.Tensor:
        if not self._optimizer.offload_optimizer:
            return super().gradient(parameter)
        group, start, length = self._position(parameter)
        gradient = self._swap_in(group).grad
        assert gradient is not None
        return self._optimizer._fp32_state_allgather(parameter, gradient.narrow(0, start, length).float())

    def release_buffers(self) -> None:
        """Release the swap buffers, which the next step needs. Writes the sub group in memory back if it changed."""
        if self._resident is None:
            return
        if self._changed:
            self._optimizer._optimizer_states_and_gradient_swap_out(self._resident)
        else:
            self._optimizer._release_swap_buffers(self._resident)
        self._resident, self._changed = None, False

    def create_moments(self) -> None:
        for index, group in enumerate(self._groups()):
            master = self._swap_in(index)
            self._changed |= self._create_moments_of(master, group)
        self.release_buffers()

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by kind as in ``ParameterState``, and of swap files (``nvme``)."""
        self.release_buffers()
        swappers = self._optimizer.optimizer_swapper, getattr(self._optimizer.fp16_groups[0][0], "nvme_swapper", None)
        files = (file for each in swappers if each for file in Path(each.swap_folder).glob("*.swp"))
        return super().memory_bytes() | {"nvme": sum(file.stat().st_size for file in files)}

    # ------------------------------------------------------------------ helpers

    def _swap_in(self, group: int) -> torch.Tensor:
        """Read a sub group and its moments into the swap buffers. They stay until ``release_buffers`` or the next
        sub group."""
        if group != self._resident and self._optimizer._swappable_optimizer_subgroup(group):
            self.release_buffers()
            self._optimizer._optimizer_states_and_gradient_swap_in(group)
            self._resident = group
        return super()._swap_in(group)
