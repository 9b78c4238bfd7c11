"""Checkpoints, failures and data reading of a run."""

from __future__ import annotations

import math

from kit.cost.memory.states import moment_bytes
from kit.cost.workload import Workload
from kit.specs.optimizers import OPTIMIZERS
from kit.specs.validation import stored
from kit.units import GB, SECONDS_PER_HOUR

GPU_HOURS_PER_FAILURE = 50_700.0
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, section 3.3.4). Other clusters:
BLOOM on 384 A100 lost one or two GPUs a week, 32,000 to 65,000 hours each (arXiv 2211.05100, section 3.2)."""
WRITE_GBYTES_PER_S_PER_NODE = 0.71
READ_GBYTES_PER_S_PER_NODE = 2.6
"""A parallel file system under 384 nodes: 273 GB/s written, 1 TB/s read (Narayanan et al. 2021, arXiv 2104.04473,
section 5.10: checkpoints of a trillion parameters)."""
RESTART_S = 600.0
"""Time to notice a failure, replace the node, start processes and build the model: ten minutes, assumed. Reading the
checkpoint comes on top."""
STORAGE_USD_PER_GB_MONTH = 0.023
"""Object storage: Amazon S3 Standard takes $0.023 to $0.026 by region (cloudhealthtech.com/blog/
s3-cost-aws-cloud-storage-costs-explained). Parallel file systems take several times that."""
TOKEN_BYTES = 4


@stored
class Operation:
    """A run beside its steps: checkpoints and failures."""

    checkpoint_gb: float
    """Weights and optimizer state."""
    checkpoint_s: float
    """Time to write one, all nodes at once, while training waits."""
    checkpoint_interval_s: float
    """Interval that loses the least time to checkpoints and failures together."""
    hours_between_failures: float
    """Mean time between failures of the whole cluster."""
    goodput: float
    """Share of the wall time that is left for training after checkpoints and failures."""
    data_mbytes_per_s: float
    """Tokens read, over all ranks."""
    checkpoint_usd_per_month: float
    """Cost of keeping one in object storage, at list price."""


def operation(workload: Workload, step_time_s: float) -> Operation:
    """Checkpoint size, best checkpoint interval, failures and goodput of a run.

    If a checkpoint takes C seconds and failures are M seconds apart, an interval T loses C/T + (T/2 + restart)/M of the
    time. The minimum is at T = √(2·C·M) (Young 1974, "A first order approximation to the optimum checkpoint interval").
    """
    cluster, job = workload.cluster, workload.job
    size = checkpoint_bytes(workload)
    write = size / (WRITE_GBYTES_PER_S_PER_NODE * GB * cluster.num_nodes)
    read = size / (READ_GBYTES_PER_S_PER_NODE * GB * cluster.num_nodes)
    between = GPU_HOURS_PER_FAILURE * SECONDS_PER_HOUR / cluster.num_gpus
    interval = max(math.sqrt(2 * write * between), step_time_s)
    lost = write / interval + (interval / 2 + RESTART_S + read) / between
    batch = job.tokens_per_step
    return Operation(
        checkpoint_gb=size / GB,
        checkpoint_s=write,
        checkpoint_usd_per_month=size / GB * STORAGE_USD_PER_GB_MONTH,
        checkpoint_interval_s=interval,
        hours_between_failures=between / SECONDS_PER_HOUR,
        goodput=max(0.0, 1 - lost),
        data_mbytes_per_s=batch * TOKEN_BYTES / step_time_s / 1e6,
    )


def checkpoint_bytes(workload: Workload) -> float:
    """Bytes of one checkpoint, which every engine writes alike (kit/training/checkpoint/manifest): master weights and
    moments of trained parameters in fp32, and 8-bit moments in their own precision too."""
    name = workload.job.optimizer.name
    exact = moment_bytes(workload.layout, name).rest if name.endswith("-8bit") else 0.0
    return (4.0 + 4.0 * len(OPTIMIZERS[name].state) + exact) * workload.trained_parameters
