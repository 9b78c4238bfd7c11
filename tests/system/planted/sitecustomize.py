"""Python imports this by itself where the folder is on its path: launched as always, a rank then trains with the faults
that KIT_PLANT names. The reference beside a rehearsal's scaled-down copy stays right."""

from __future__ import annotations

import os
from pathlib import Path

if "KIT_PLANT" in os.environ and Path("plan.yaml").exists():
    from tests.system.rehearsal_faults import plant

    plant(os.environ["KIT_PLANT"], Path.cwd().name)
