"""How fast a disk writes and reads, past the page cache: ``python -m kit.preflight.disk PATH BYTES``.

Blocks of eight MiB with direct I/O, one after another from one process: DeepSpeed's asynchronous I/O keeps more in
flight, so this is a lower bound, near to the truth for one drive and low for several. Prints JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path

BLOCK_BYTES = 8 << 20


def speed(directory: Path, size_bytes: int) -> dict[str, float]:
    """GB/s written and read. Raises OSError, also where the file system refuses direct I/O."""
    block = mmap.mmap(-1, BLOCK_BYTES)  # aligned to a page, as direct I/O asks
    block.write(os.urandom(1 << 20) * (BLOCK_BYTES >> 20))
    blocks = max(1, size_bytes // BLOCK_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".kit-doctor-") as file:
        descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        try:
            begin = time.perf_counter()
            for _ in range(blocks):
                os.write(descriptor, block)
            os.fsync(descriptor)
            written = time.perf_counter() - begin
            os.lseek(descriptor, 0, os.SEEK_SET)
            begin = time.perf_counter()
            for _ in range(blocks):
                os.readv(descriptor, [block])
            read = time.perf_counter() - begin
        finally:
            os.close(descriptor)
    return {"write": blocks * BLOCK_BYTES / written / 1e9, "read": blocks * BLOCK_BYTES / read / 1e9}


if __name__ == "__main__":
    print(json.dumps(speed(Path(sys.argv[1]), int(sys.argv[2]))))
