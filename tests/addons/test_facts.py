"""Facts of a machine (machines/facts): this one's, read for real, and what DCGM answers."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kit.addons.doctor.machines import facts
from tests.addons.machines import HEALTHY
from tests.emit.plans import stand_in
from tests.support import ROOT
from tests.support.calls import before
from tests.support.files import file_with
from tests.support.refusals import refusal

DCGM_3 = """warning: something before it
{"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
  {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}, null,
  {"name": "Row Remap", "results": [{"gpu_ids": "1", "status": "STATUS", "warnings": WARNINGS}]}
]}]}} and after"""
DCGM_4 = """{"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [{"name": "software",
  "results": [{"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [
    {"error_id": 29, "error_severity": 5, "warning": "no persistence"},
    {"error_id": 29, "error_severity": SEVERITY, "warning": "hot"}]}], "test_summary": {"status": "Fail"}}]}]}}"""
REMAP = {"test": "Row Remap", "gpu": "1", "failed": True, "said": "a; b"}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (DCGM_3.replace("STATUS", "PASS"), []),
        (DCGM_3.replace("STATUS", "SKIPPED"), []),
        (DCGM_3.replace("STATUS", "WARN"), [REMAP | {"failed": False}]),
        (DCGM_3.replace("STATUS", "FAIL"), [REMAP]),
        (DCGM_3.replace("STATUS", "error"), [REMAP]),
        (DCGM_3.replace("STATUS", "FAIL").replace("WARNINGS", '"no row left"'), [REMAP | {"said": "no row left"}]),
        (DCGM_3.replace("STATUS", "FAIL").replace("WARNINGS", "[]"), [REMAP | {"said": "no reason given"}]),
        (DCGM_3.replace("STATUS", "FAIL").replace('"warnings": WARNINGS', '"info": "x"'), [REMAP | {"said": "x"}]),
        # dcgm_errors.h: 5 is a setting of the node, and no fault of its hardware
        (
            DCGM_4.replace("SEVERITY", "5"),
            [{"test": "software", "gpu": "3", "failed": False, "said": "no persistence; hot"}],
        ),
        (
            DCGM_4.replace("SEVERITY", "2"),
            [{"test": "software", "gpu": "3", "failed": True, "said": "no persistence; hot"}],
        ),
    ],
)
def test_what_dcgm_says(text: str, problems: list[dict[str, Any]]) -> None:
    assert facts.dcgm_problems(text.replace("WARNINGS", '["a", "b"]')) == problems


def test_dcgm_that_is_not_there_or_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name on the path, as the real one behaves without its daemon."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.dcgm_answer() is None
    for script, said in (
        ("echo 'Error: Unable to connect' >&2; exit 1", "Unable to connect"), ("exit 9", "dcgmi: exit code 9"),
    ):  # fmt: skip
        stand_in(tmp_path, dcgmi=f"#!/bin/sh\n{script}\n")
        assert re.search(said, refusal(OSError, facts.dcgm_answer))
    stand_in(tmp_path, dcgmi='#!/bin/sh\necho "$@" {}; exit 1\n')
    assert facts.dcgm_answer() == "diag -r 1 -j {}\n"
    assert [
        text
        for text in ('{"DCGM Diagnostic": {"version": "4.2.3"}}', "no JSON")
        if not re.search(r"no test|substring", refusal(ValueError, facts.dcgm_problems, text))
    ] == []


def test_this_machines_facts_are_read_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = str(tmp_path / "absent")
    scripts = {"nvcc": "#!/bin/sh\necho release 11.2, V11.2.9\n", "g++": "#!/bin/sh\necho 9.8.7\n"}
    failing = {"dcgmi": "#!/bin/sh\nexit 9\n", "nvidia-smi": "#!/bin/sh\necho 0, H100\n"}
    stand_in(tmp_path, ninja="", pdsh="", **scripts, **failing)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "x")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = facts.gather(
            {"ports": [port], "writable": [str(tmp_path), absent, str(tmp_path / "ninja")],
            "paths": [str(ROOT / "README.md"), absent],
             "names": ["localhost", "no-such-name.invalid"]}
        )  # fmt: skip
    assert found.keys() >= HEALTHY.keys()
    assert facts.gather({"ports": [port]})["ports"] == {str(port): True}
    assert found["packages"]["torch"]
    shm = os.statvfs("/dev/shm")
    assert found["shm_free_bytes"] == pytest.approx(shm.f_bavail * shm.f_frsize, rel=0.05)
    assert (found["ports"], found["names"], found["hub_token"], found["contents"][absent]) == (
        {str(port): False}, {"localhost": ["127.0.0.1"], "no-such-name.invalid": []}, True, None,
    )  # fmt: skip
    assert [found["writable"][name]["error"] for name in (absent, str(tmp_path / "ninja"))] == [
        "No such file or directory", "Not a directory",
    ]  # fmt: skip
    assert found["dcgm"] == {"error": "OSError: dcgmi: exit code 9"}
    assert found["gpus"]["error"].startswith("ValueError: zip() ")
    assert [found["tools"][name] for name in ("nvcc", "g++", "pdsh")] == ["11.2", "9.8.7", str(tmp_path / "pdsh")]
    as_sent = json.loads(json.dumps(found))
    assert min(as_sent["memory"]["MemAvailable"], as_sent["writable"][str(tmp_path)]["free_bytes"]) > 0
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho no number\n")
    assert facts.gather({})["tools"]["nvcc"] == str(tmp_path / "nvcc")


def test_one_byte_of_a_large_file_or_of_a_directory_changes_its_digest(tmp_path: Path) -> None:
    """Of its two ends; of the middle, its size alone."""
    file, large, end = tmp_path / "data.bin", 5 << 20, 1 << 20
    seen = [facts.digest(file)]
    for content in (
        b"",
        bytes(9),
        bytes(large),
        b"1" + bytes(large - 1),
        bytes(large - 1) + b"1",
        bytes(end - 1) + b"1",
    ):
        file.write_bytes(content.ljust(large if len(content) == end else 0, b"\0"))
        seen += [facts.digest(file), facts.digest(tmp_path)]
    assert (seen[0], len(set(seen))) == (None, len(seen))
    assert facts.digest(file_with(file, bytes(large // 2) + b"x" + bytes(large - large // 2 - 1))) == seen[5]


def test_a_file_system_that_refuses_direct_io_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: str, flags: int, *rest: Any, **named: Any) -> None:
        if flags & os.O_DIRECT:
            raise OSError("Invalid argument")

    before(monkeypatch, os, "open", refusing)
    assert facts.free_bytes(tmp_path) > 0
    assert "tmpfs and overlays" in refusal(ValueError, facts.free_bytes, tmp_path, direct=True)
