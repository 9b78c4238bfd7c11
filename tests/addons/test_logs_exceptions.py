"""An uncaught exception is a cause, with the frame of the user's own code, and the first rank before its victims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.addons.written import FULL, SITE, Files, read, say, trace
from tests.support.files import file_with

LIBRARY = f"{SITE}/torch/nn/modules/module.py"
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
FROM = f"\n  from   /project/train.py:42 in main, raised in {LIBRARY}:1751 in _call_impl\n"
RESET = (
    "Traceback (most recent call last):",
    '  File "/project/train.py", line 51, in main',
    "    dist.all_reduce(loss)",
    "ConnectionResetError: [Errno 104] the other side is gone",
)
ROW = """{begins}
[{number}]:
  time      : 2026-11-20_17:16:0{second}
  host      : node-1
  rank      : {rank} (local_rank: {rank})
  exitcode  : 1 (pid: 395{rank})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"""
LAUNCHER = f"""Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "{SITE}/torch/distributed/run.py", line 918, in main
    run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED"""
MARKS = ("[rank{}]: ", "[default{}]:", "node-{}: [rank{}]: ")
IGNORED = "Exception ignored in: <function DataLoader.__del__ at 0x7f>"
CHAIN = ("", "During handling of the above exception, another exception occurred:", "")
CAUSED = ("", "The above exception was the direct cause of the following exception:", "")


def launcher(rank: str | int) -> list[str]:
    """torchrun's words: rank 1 failed too, two seconds after ``rank``."""
    rows = ROW.format(begins="Failures:", number=1, second=3, rank=1), "-" * 60
    first = ROW.format(begins="Root Cause (first observed failure):", number=0, second=1, rank=rank)
    return "\n".join([LAUNCHER, *rows, first]).splitlines()


def marked(lines: tuple[str, ...], mark: str, error: str = "KeyError: 'labels'") -> list[str]:
    return [f"{mark}{line}".replace("KeyError: 'labels'", error) for line in lines]


def turns(one: list[str], two: list[str]) -> list[str]:
    """Lines of two ranks in turn."""
    return [line for pair in zip(one, two[: len(one)], strict=True) for line in pair] + two[len(one) :]


CASES: dict[str, tuple[Files, tuple[tuple[str, ...], ...]]] = {
    # Words of a line that is no exception: its rank stands before it, and there is no line that it came from.
    **{f"a full disk, {mark}": (
        [f"{mark}tar: data: No space left on device"],
        ((f"disk-full{where}: ", "\n  seen   all.log:1: tar: data: No space left on device\n", "!  from "),),
    ) for mark, where in (("", ""), ("[rank2]: ", " on rank 2"), ("rank 3: ", " on rank 3"))},
    "rank, line and both frames": (
        ["[rank0]: step 7", *marked(KEY_ERROR, "[rank3]: "), *launcher(3)],
        (("exception on rank 3: KeyError: 'labels'" + FROM, "seen   all.log:10: KeyError: 'labels'\n",
          "do     look at /project/train.py:42 in main; other ranks'", "weight 3"),),
    ),
    # One rank's own error, and that of a rank which lost its connection; each line of one after one of the other.
    **{f"in turn, {mark}": (
        turns(marked(RESET, mark.format(0, 0)), marked(KEY_ERROR, mark.format(5, 5))),
        ((f"exception on rank 5: KeyError: 'labels'{FROM}", "weight 3"),
         ("exception on rank 0: ConnectionResetError: [Errno 104] the other side", "weight 1")),
    ) for mark in MARKS[:2]},
    "in turn, with the hosts' names": (
        turns(marked(RESET, MARKS[2].format(0, 0)), marked(KEY_ERROR, MARKS[2].format(5, 5))),
        ((f"exception: KeyError: 'labels'{FROM}",), ("exception: ConnectionResetError: ",)),
    ),
    # Rank 2 comes first in the log, and torchrun says that rank 6 was the first.
    "the rank that failed first comes before those that failed after it": (
        [*marked(KEY_ERROR, "[rank2]: ", "RuntimeError: odd"), *marked(KEY_ERROR, "[rank6]: "),
         *marked(KEY_ERROR, "[rank1]: "), *launcher(6)],
        (("exception on rank 6, 1: KeyError: 'labels'\n",), ("exception on rank 2: RuntimeError: odd\n",)),
    ),
    "without the launcher's word the log's order stands": (
        [*marked(KEY_ERROR, "[rank2]: ", "RuntimeError: odd"), *marked(KEY_ERROR, "[rank6]: "),
         *marked(KEY_ERROR, "[rank1]: ")],
        (("exception on rank 2: RuntimeError: odd\n",), ("exception on rank 6, 1: KeyError: 'labels'\n",)),
    ),
    # torchrun's files have the same name in every rank's directory, and here errors on the same line.
    "one file a rank and the launcher's own": (
        {"attempt_0/0/stderr.log": ["\n" * (len(KEY_ERROR) - len(RESET) - 1), *RESET],
         "attempt_0/1/stderr.log": KEY_ERROR, "attempt_0/2/stderr.log": marked(KEY_ERROR, "", FULL),
         "launcher.log": launcher(1)},
        (("exception on rank 1: KeyError: 'labels'\n",), ("disk-full on rank 2: ", FROM),
         ("exception on rank 0: ConnectionResetError",)),
    ),
    "a handled exception did not end the run": (
        [*KEY_ERROR, *CHAIN, *marked(KEY_ERROR, "", "ValueError: no labels")],
        (("exception: ValueError: no labels\n", "all.log:21"),),
    ),
    "nor one that another was raised from": (
        [*KEY_ERROR, *CAUSED, *marked(KEY_ERROR, "", "ValueError: no labels")], (("exception: ValueError: no",),),
    ),
    "of three, the one before the last is handled": (
        [*trace("OSError: busy"), *KEY_ERROR, *CHAIN, *marked(KEY_ERROR, "", "ValueError: no labels")],
        (("exception: OSError: busy\n",), ("exception: ValueError: no labels\n",)),
    ),
    "an exception that Python ignored": ([IGNORED, *KEY_ERROR], ()),
    "one that another rank's Python ignored": (
        [f"[rank1]: {IGNORED}", *marked(KEY_ERROR, "[rank0]: ")], (("exception on rank 0: KeyError",),),
    ),
    "a traceback without an end": (KEY_ERROR[:-1], ()),
    "no frame is the user's own": (
        [KEY_ERROR[0], *KEY_ERROR[5:]],
        ((f"exception: KeyError: 'labels'\n  from   {LIBRARY}:1751 in _call_impl\n",
          f"do     look at {LIBRARY}:1751 in _call_impl; "),),
    ),
    "an exception without a message": (
        [*KEY_ERROR[:-1], "my.package.NoLabels"], ((f"exception: NoLabels{FROM}", "all.log:9: my.package.NoLabels"),),
    ),
    # No rank printed why.
    "torchrun's table alone": (
        launcher(4),
        (("worker-failed on rank 4: a process ended first with exit code 1 (pid: 3954) on node-1, and these logs",
          "weight 2"),),
    ),
    "a table without a rank": (
        [*marked(KEY_ERROR, "[rank3]: "), *launcher("unknown")], (("exception on rank 3: KeyError: 'labels'\n",),),
    ),
    "a launcher's exception alone": (
        [*LAUNCHER.splitlines()[:5], "subprocess.CalledProcessError: Command 'torchrun' returned 1"],
        (("worker-failed: a process ended first with CalledProcessError: Command 'torchrun' returned 1, and these",),),
    ),
    "DeepSpeed's launcher": (
        ["[ERROR] [launch.py:322:sigkill_handler] ['python', 't.py', '--local_rank=3'] exits with return code = 1"],
        (("worker-failed on rank 3: a process ended first with exit code 1, ",),),
    ),
    "srun": (
        ["srun: error: node-2: task 11: Exited with exit code 7"],
        (("worker-failed on rank 11: a process ended first with exit code 7, ", "all.log:1"),),
    ),
    "the victims of an unknown failure": (
        ["srun: error: node-2: task 11: Exited with exit code 7", *marked(RESET, "[rank0]: ")],
        (("worker-failed on rank 11: ",), ("exception on rank 0: ConnectionResetError",)),
    ),
    # torchrun's own traceback stands before its table.
    "a failure after very many of another": (
        [*(line for _ in range(210) for line in KEY_ERROR), *KEY_ERROR[:4], "ValueError: the last of all"],
        (("exception: KeyError: 'labels'\n",),),
    ),
    "after many, but not very many": (
        [*(line for _ in range(150) for line in KEY_ERROR), *KEY_ERROR[:4], "ValueError: the last of all"],
        (("exception: KeyError: 'labels'\n",), ("exception: ValueError: the last of all\n",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_exception_that_ended_the_run_is_told(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    say(read(tmp_path, files), *expected)


def test_the_allocators_setting_is_one_that_the_installed_torch_reads() -> None:
    from importlib.util import find_spec

    (place,) = find_spec("torch").submodule_search_locations  # type: ignore[union-attr, misc]
    source = (Path(place) / "include/c10/cuda/CUDAAllocatorConfig.h").read_text()
    assert all(f'get_env("{name}")' in source for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))


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
NEVER_RAISED = "raise ExceptionGroup('two shards', [OSError('a'), OSError('b')])"


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Python's own text of a group in a group (two shards failed in one line, the upload in another), and of a group
    whose members were never raised."""
    told = {}
    for name, program in (("save", GROUP), ("never", NEVER_RAISED)):
        script = file_with(tmp_path_factory.mktemp("group") / f"{name}.py", program)
        ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        told[name] = ended.stderr.replace(str(script), f"/job/{name}.py").splitlines()
    return told


@pytest.mark.parametrize("mark", ["", "[rank3]: ", "[default3]:"])
def test_of_an_exception_group_its_members_are_the_causes(
    mark: str, groups: dict[str, list[str]], tmp_path: Path
) -> None:
    """The wrappers are no causes; a group of members that were never raised is one."""
    assert sum("Exception Group Traceback" in line for line in groups["save"]) == 2
    lines, on = [f"{mark}{line}" for line in ["step 7", *groups["save"]]], " on rank 3" if mark else ""
    places = [1 + next(i for i, line in enumerate(lines) if line.endswith(end)) for end in ("1 is short", "no bucket")]
    say(
        read(tmp_path, lines),
        (f"exception{on}: OSError: shard 1 is short\n  from   /job/save.py:8 in write\n", f"all.log:{places[0]}: "),
        (f"exception{on}: ValueError: no bucket\n  from   /job/save.py:12 in upload\n", f"all.log:{places[1]}: "),
    )
    said = f"exception{on}: ExceptionGroup: two shards (2 sub-exceptions)\n  from   /job/never.py:1 in <module>\n"
    say(read(tmp_path, [f"{mark}{line}" for line in groups["never"]]), (said,))
