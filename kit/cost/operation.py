"""Beside the steps: checkpoints, failures, and reading the data."""

from __future__ import annotations

import math

from kit.cost.params import count
from kit.cost.prediction import Operation
from kit.cost.states import MOMENTS
from kit.specs.cluster import ClusterSpec
from kit.specs.job import JobSpec
from kit.specs.model import ModelSpec
from kit.units import GB, SECONDS_PER_HOUR

GPU_HOURS_PER_FAILURE = 50_700.0
"""419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, section 3.3.4). Other clusters:
BLOOM on 384 A100 lost one or two GPUs a week, 32,000 to 65,000 hours each (arXiv 2211.05100, section 3.2)."""
WRITE_GBYTES_PER_S_PER_NODE = 0.71
READ_GBYTES_PER_S_PER_NODE = 2.6
"""A parallel file system under 384 nodes: 273 GB/s written, 1 TB/s read (Narayanan et al. 2021, arXiv 2104.04473,
section 5.10: checkpoints of a trillion parameters)."""
RESTART_S = 600.0
"""To notice, replace the node, start processes and build the model: ten minutes, assumed. Reading the checkpoint comes
on top."""
STORAGE_USD_PER_GB_MONTH = 0.023
"""Object storage: Amazon S3 Standard takes $0.023 to $0.026 by region (cloudhealthtech.com/blog/
s3-cost-aws-cloud-storage-costs-explained). Parallel file systems take several times that."""
TOKEN_BYTES = 4


def operation(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, step_time_s: float) -> Operation:
    """What a run of that step time loses, at the checkpoint interval that loses least.

    With C seconds for a checkpoint and M between failures, an interval T loses C/T + (T/2 + restart)/M: least at
    √(2·C·M) (Young 1974, "A first order approximation to the optimum checkpoint interval").
    """
    size = checkpoint_bytes(model, job)
    write = size / (WRITE_GBYTES_PER_S_PER_NODE * GB * cluster.num_nodes)
    read = size / (READ_GBYTES_PER_S_PER_NODE * GB * cluster.num_nodes)
    between = GPU_HOURS_PER_FAILURE * SECONDS_PER_HOUR / cluster.num_gpus
    interval = max(math.sqrt(2 * write * between), step_time_s)
    lost = write / interval + (interval / 2 + RESTART_S + read) / between
    batch = job.global_batch_size * job.seq_length
    return Operation(
        checkpoint_gb=size / GB,
        checkpoint_s=write,
        checkpoint_usd_per_month=size / GB * STORAGE_USD_PER_GB_MONTH,
        checkpoint_interval_s=interval,
        hours_between_failures=between / SECONDS_PER_HOUR,
        goodput=max(0.0, 1 - lost),
        data_mbytes_per_s=batch * TOKEN_BYTES / step_time_s / 1e6,
    )


def checkpoint_bytes(model: ModelSpec, job: JobSpec) -> float:
    """fp32 masters and moments, and 16-bit weights where training is mixed: 14 bytes a parameter, 980 GB for 70B.
    8-bit moments are stored as they are held. Adapters are stored alone."""
    trained = count(model).total
    return checkpoint_width(job) * (0.01 * trained if job.lora is not None else trained)


def checkpoint_width(job: JobSpec) -> float:
    """Bytes of ``checkpoint_bytes`` for a trained parameter."""
    return 4.0 + MOMENTS[job.optimizer.name].rest + (0.0 if job.precision == "fp32" else 2.0)
