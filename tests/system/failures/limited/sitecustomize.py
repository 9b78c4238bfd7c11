"""Python imports this by itself where the folder is on its path: rank 1 of a run of kit's gets no more memory from
its first step on."""

from __future__ import annotations

import os

if os.environ.get("RANK") == "1":
    from typing import Any

    import kit.engines

    build = kit.engines.build_engine

    def limited(rundir: Any) -> Any:
        """The engine, with no room for what its first step makes."""
        engine = build(rundir)
        step = engine.forward_backward

        def without_room(micro_batches: Any) -> Any:
            from tests.system.failures.memory import leave_only

            leave_only(0)
            return step(micro_batches)

        engine.forward_backward = without_room
        return engine

    kit.engines.build_engine = limited
