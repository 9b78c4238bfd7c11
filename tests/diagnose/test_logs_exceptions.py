"""An uncaught exception is a cause, with the frame of the user's own code, and the first rank before its victims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.diagnose.logs import Cause, diagnose

LIBRARY = "/opt/env/lib/python3.11/site-packages/torch/nn/modules/module.py"
KEY_ERROR = (
    "Traceback (most recent call last):",
    '  File "/project/train.py", line 88, in <module>',
    "    main()",
    '  File "/project/train.py", line 42, in main',
    "    loss = model(batch)",
    f'  File "{LIBRARY}", line 1751, in _call_impl',
    "    return forward_call(*args, **kwargs)",
    "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
    "KeyError: 'labels'",
)
RESET = (
    "Traceback (most recent call last):",
    '  File "/project/train.py", line 51, in main',
    "    dist.all_reduce(loss)",
    "ConnectionResetError: [Errno 104] the other side is gone",
)
TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_17:16:03
  host      : node-1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 3953)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_17:16:01
  host      : node-1
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 3954)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
LAUNCHER = """Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/env/lib/python3.11/site-packages/torch/distributed/run.py", line 918, in main
    run(args)
"""


def marked(lines: tuple[str, ...], mark: str) -> list[str]:
    return [f"{mark}{line}" for line in lines]


def read(tmp_path: Path, text: str) -> tuple[Cause, ...]:
    (tmp_path / "all.log").write_text(text)
    return diagnose([tmp_path / "all.log"])


def test_an_exception_names_rank_line_and_both_frames(tmp_path: Path) -> None:
    text = "\n".join(["[rank0]: step 7", *marked(KEY_ERROR, "[rank3]: "), ""])
    (cause,) = read(tmp_path, text + LAUNCHER + TABLE.format(rank=3))
    assert (cause.cause, cause.ranks, cause.place) == ("exception", (3,), "all.log:10")
    assert cause.meaning == "KeyError: 'labels'"
    assert cause.frames == f"/project/train.py:42 in main, raised in {LIBRARY}:1751 in _call_impl"
    assert str(cause).splitlines()[1] == f"  from   {cause.frames}"


@pytest.mark.parametrize("mark", ["[rank{}]: ", "[default{}]:", "node-{}: [rank{}]: "])
def test_lines_of_several_ranks_may_alternate(mark: str, tmp_path: Path) -> None:
    """One rank's own error, and that of a rank which lost its connection; each line of one after one of the other."""
    one, two = marked(RESET, mark.format(0, 0)), marked(KEY_ERROR, mark.format(5, 5))
    mixed = [line for pair in zip(one, two[: len(one)], strict=True) for line in pair] + two[len(one) :]
    causes = read(tmp_path, "\n".join(mixed) + "\n")
    assert [(cause.cause, cause.meaning.split(":")[0]) for cause in causes] == [
        ("exception", "KeyError"),
        ("exception", "ConnectionResetError"),
    ]
    assert causes[0].frames is not None
    assert causes[0].frames.startswith("/project/train.py:42 in main, raised in")


def test_the_rank_that_failed_first_is_named_before_those_that_failed_after_it(tmp_path: Path) -> None:
    """Rank 2 comes first in the log, and torchrun says that rank 6 was the first."""
    later = tuple(line.replace("KeyError: 'labels'", "RuntimeError: odd") for line in KEY_ERROR)
    text = "\n".join(
        [*marked(later, "[rank2]: "), *marked(KEY_ERROR, "[rank6]: "), *marked(KEY_ERROR, "[rank1]: "), ""]
    )
    causes = read(tmp_path, text + LAUNCHER + TABLE.format(rank=6))
    assert [(cause.meaning, cause.ranks) for cause in causes] == [
        ("KeyError: 'labels'", (6, 1)),
        ("RuntimeError: odd", (2,)),
    ]


def test_one_file_a_rank_and_the_launchers_own(tmp_path: Path) -> None:
    """torchrun's files have the same name in every rank's directory, and here errors on the same line."""
    full = tuple(
        line.replace("KeyError: 'labels'", "OSError: [Errno 28] No space left on device") for line in KEY_ERROR
    )
    for rank, lines in ((0, RESET), (1, KEY_ERROR), (2, full)):
        path = tmp_path / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text("\n" * (len(KEY_ERROR) - len(lines)) + "\n".join(lines) + "\n")
    (tmp_path / "launcher.log").write_text(LAUNCHER + TABLE.format(rank=1))
    causes = diagnose([tmp_path])
    assert [(cause.cause, cause.ranks) for cause in causes] == [
        ("exception", (1,)),
        ("disk-full", (2,)),
        ("exception", (0,)),
    ]
    assert causes[0].meaning == "KeyError: 'labels'"


def test_a_handled_exception_is_not_the_one_that_ended_the_run(tmp_path: Path) -> None:
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    last = tuple(line.replace("KeyError: 'labels'", "ValueError: no labels") for line in KEY_ERROR)
    (cause,) = read(tmp_path, "\n".join([*KEY_ERROR, *between, *last, ""]))
    assert cause.meaning == "ValueError: no labels"
    ignored = "Exception ignored in: <function DataLoader.__del__ at 0x7f>\n" + "\n".join(KEY_ERROR) + "\n"
    assert read(tmp_path, ignored) == ()


def test_torchruns_table_alone_is_a_cause(tmp_path: Path) -> None:
    """No rank printed why; the doctor was silent here."""
    (cause,) = read(tmp_path, LAUNCHER + TABLE.format(rank=4))
    assert (cause.cause, cause.ranks) == ("worker-failed", (4,))
    assert "exit code 1 (pid: 3954) on node-1" in cause.meaning


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        (
            "[ERROR] [launch.py:322:sigkill_handler] ['python', 't.py', '--local_rank=3'] exits with return code = 1",
            (3,),
        ),
        ("srun: error: node-2: task 11: Exited with exit code 1", (11,)),
    ],
)
def test_other_launchers_words_of_a_failed_process(line: str, ranks: tuple[int, ...], tmp_path: Path) -> None:
    (cause,) = read(tmp_path, f"{line}\n")
    assert (cause.cause, cause.ranks) == ("worker-failed", ranks)


@pytest.mark.parametrize(("unallocated", "named"), [("12.40 GiB", True), ("1.90 GiB", True), ("140.00 MiB", False)])
def test_memory_in_pieces_names_the_setting_of_the_allocator(unallocated: str, named: bool, tmp_path: Path) -> None:
    """CUDACachingAllocator.cpp. 1.75 GiB were asked for."""
    (cause,) = read(
        tmp_path,
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 3 has a capacity of "
        "79.11 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. "
        f"Of the allocated memory 64.11 GiB is allocated by PyTorch, and {unallocated} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=...\n",
    )
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in cause.fix) is named
    assert (f"{unallocated} were reserved but unallocated" in cause.meaning) is named


def test_the_allocators_setting_is_one_that_the_installed_torch_reads() -> None:
    import torch

    source = Path(torch.__file__).parent / "include/c10/cuda/CUDAAllocatorConfig.h"
    assert all(f'get_env("{name}")' in source.read_text() for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))


GROUP = """
import asyncio


async def write(shard):
    await asyncio.sleep(0)
    if shard:
        raise OSError(f"shard {shard} is short")


async def upload():
    raise ValueError("no bucket")


async def export():
    async with asyncio.TaskGroup() as shards:
        for shard in range(3):
            shards.create_task(write(shard))


def main():
    errors = []
    for part in (export(), upload()):
        try:
            asyncio.run(part)
        except Exception as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("the checkpoint is incomplete", errors)


main()
"""


@pytest.mark.parametrize("mark", ["", "[rank3]: ", "[default3]:"])
def test_of_an_exception_group_its_members_are_the_causes(mark: str, tmp_path: Path) -> None:
    """Python's own text of a group in a group: two shards failed in one line, the upload in another; the wrappers are
    no causes."""
    (tmp_path / "save.py").write_text(GROUP)
    ended = subprocess.run([sys.executable, tmp_path / "save.py"], capture_output=True, text=True, check=False)
    assert ended.stderr.count("Exception Group Traceback") == 2
    lines = marked(tuple(ended.stderr.splitlines()), mark)
    causes = read(tmp_path, "\n".join(["step 7", *lines, ""]))
    assert [cause.meaning for cause in causes] == ["OSError: shard 1 is short", "ValueError: no bucket"]
    assert {cause.ranks for cause in causes} == {(3,) if mark else ()}
    assert [cause.frames for cause in causes] == [
        f"{tmp_path / 'save.py'}:8 in write",
        f"{tmp_path / 'save.py'}:12 in upload",
    ]
    places = [int(cause.place.rpartition(":")[2]) for cause in causes]
    assert [lines[place - 2].rpartition("| ")[2] for place in places] == [cause.meaning for cause in causes]


def test_a_group_of_members_that_were_never_raised_is_the_cause(tmp_path: Path) -> None:
    program = "raise ExceptionGroup('two shards', [OSError('a'), OSError('b')])"
    (tmp_path / "save.py").write_text(program)
    ended = subprocess.run([sys.executable, tmp_path / "save.py"], capture_output=True, text=True, check=False)
    (cause,) = read(tmp_path, ended.stderr)
    assert cause.meaning == "ExceptionGroup: two shards (2 sub-exceptions)"
    assert cause.frames == f"{tmp_path / 'save.py'}:1 in <module>"


def test_a_launchers_table_without_a_rank_names_none(tmp_path: Path) -> None:
    table = TABLE.format(rank=3).replace("rank      : 3 (local_rank: 3)", "rank      : unknown")
    (cause,) = read(tmp_path, "\n".join([*marked(KEY_ERROR, "[rank3]: "), LAUNCHER + table]))
    assert (cause.meaning, cause.ranks) == ("KeyError: 'labels'", (3,))


def test_an_exception_after_very_many_of_another_is_still_seen(tmp_path: Path) -> None:
    other = (*KEY_ERROR[:4], "ValueError: the last of all")
    causes = read(tmp_path, "\n".join([*(line for _ in range(150) for line in KEY_ERROR), *other, ""]))
    assert {cause.meaning for cause in causes} == {"KeyError: 'labels'", "ValueError: the last of all"}
