"""One gloo process for the tests that need no second one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def one_process():
    """A process group of one rank; one thread, so that sums have one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)
