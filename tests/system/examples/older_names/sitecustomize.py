"""Python imports this by itself where the folder is on its path: examples of transformers 4.57 ask for a name that
accelerate 1.0 changed."""

from __future__ import annotations

import os

if "LOCAL_RANK" in os.environ:  # not in the launcher, which imports accelerate too and has no rank
    from accelerate.utils import DistributedType

    DistributedType.TPU = getattr(DistributedType, "TPU", DistributedType.XLA)  # type: ignore[misc]
