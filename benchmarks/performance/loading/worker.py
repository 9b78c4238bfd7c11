"""What one rank measures: the memory of loading and exporting."""

from __future__ import annotations

from kit.emit.run_directory import RunDirectory
from kit.engines import build_engine
from kit.engines.protocol import StateKind
from tests.support.peak_memory import Peak, return_freed_memory


def loaded(rundir: RunDirectory) -> dict[str, int]:
    """Bytes that are kept, of loading, and of exporting the masters as a checkpoint would."""
    return_freed_memory()
    with Peak() as loading:
        engine = build_engine(rundir)
    with Peak() as exporting:
        for block in engine.export_blocks([StateKind.MASTER]):
            del block
    engine.close()
    return {"kept": loading.kept, "loading": loading.grown, "exporting": exporting.grown}
