"""Builds the engine that a plan names. Each engine is imported only when a plan names it.

Its rooms, in the order in which data walks:

    protocol                    the interface between the loop and an engine
    torch, deepspeed, megatron  the engines
    hf_engine                   what the first two share: a step's loss and gradients, and the weights at the start
    huggingface                 transformers' models for them
    kernels                     attention and losses of kit's own
    collective                  Python values over ranks
    routing                     metrics of experts over ranks
    moments, eight_bit          the moments in an optimizer's state, under any name; moments in 8 bits
    full_tensors, io            tensors gathered, and on disk
    safe_unpickle               files of ``torch.save``, read without running anything
"""

from __future__ import annotations

import logging

from kit.emit.run_directory import RunDirectory
from kit.engines.protocol import Engine
from kit.errors import EngineError
from kit.planner.rules import violations

# transformers imports torchao wherever it is installed. In every process, torchao warns about kernels for other
# machines and about torch's next version. bitsandbytes warns of every 8-bit GEMM that it casts its input to fp16.
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.autograd._functions"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def build_engine(rundir: RunDirectory) -> Engine:
    """Collective. Build the engine that the plan names, with its model and optimizer. Initialise torch.distributed
    before.

    Raises EngineError if the plan breaks a rule of the planner, or if it is for another number of processes.
    """
    from torch.distributed import get_world_size

    workload = rundir.plan.workload
    broken = violations(workload)
    if broken:
        raise EngineError("\n".join(map(str, broken)))
    if get_world_size() != workload.layout.world_size:
        raise EngineError(
            f"{get_world_size()} processes for a plan of {workload.layout.world_size}; start as many as planned, with "
            "launch.sh of the run directory"
        )
    match workload.layout.engine:
        case "torch":
            from kit.engines.torch.engine import TorchEngine

            return TorchEngine(rundir)
        case "deepspeed":
            from kit.engines.deepspeed.engine import DeepSpeedEngine

            return DeepSpeedEngine(rundir)
        case "megatron":
            from kit.engines.megatron.engine import MegatronEngine

            return MegatronEngine(rundir)
