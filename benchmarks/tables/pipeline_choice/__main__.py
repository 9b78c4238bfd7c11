"""``python -m benchmarks.tables.pipeline_choice``: run PipelineModule and AutoEP on two processes."""

from __future__ import annotations

from benchmarks.tables.pipeline_choice import experts, pipeline
from tests.workers import pool

WORLD_SIZE = 2


def main() -> int:
    """Prints losses beside plain torch's."""
    print("one process        ", pipeline.one_process())
    for stage in (0, 1, 2):
        ran = pool("deepspeed", WORLD_SIZE).run(pipeline.two_stages, stage)[0]
        print(f"two stages, ZeRO-{stage} ", ran.refused or ran.losses)
        pool("deepspeed", WORLD_SIZE).close()  # it leaves process groups behind
    print("experts, one process", experts.one_process())
    for patched in (False, True):
        found = pool("deepspeed", WORLD_SIZE).run(experts.two_ranks, 1, patched)[0]
        print(f"AutoEP, patched={patched}", found.failed or found.losses)
        pool("deepspeed", WORLD_SIZE).close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
