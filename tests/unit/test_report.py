from __future__ import annotations

import json
import os
import resource
import signal
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stopbath.lifecycle import Cause, Exit, ShutdownReport, StartupError, Survivor, WorkerReport
from stopbath.lifecycle._account import merge, write_report
from stopbath.lifecycle._errors import LOST_KEEPER
from stopbath.lifecycle._report import StepTaken, render

if TYPE_CHECKING:
    from pathlib import Path

CAUSE = Cause("rank0", 10, "denoising", "was killed by SIGKILL", Exit(signal=9), ("a", "b"))


def worker(name: str = "rank0", outcome: str = "drained", pid: int | None = 10) -> WorkerReport:
    return WorkerReport(
        name, 0, pid, outcome, Exit(code=0), (StepTaken("drain", 0.0),), 0.1, ("bye",)
    )


def report(**fields: object) -> ShutdownReport:
    base = ShutdownReport(
        group="g",
        cause=None,
        asked_by="SIGTERM",
        started_at="2026-01-01T00:00:00Z",
        duration_s=0.25,
        workers=(worker(),),
        strays=(),
        survivors=(),
    )
    return base._replace(**fields)


SURVIVOR = Survivor(11, "rank1", "D (disk sleep)", "nfs_wait", "SIGKILL", {"VmRSS": "1 kB"})


@pytest.mark.parametrize(
    ("fields", "clean"),
    [
        ({}, True),
        ({"workers": (worker(outcome="terminated"),)}, True),
        ({"workers": (worker(), worker("rank1", "killed"))}, False),
        ({"workers": (worker(outcome="survived"),)}, False),
        ({"workers": (worker(outcome="exited")._replace(crashed=True),)}, False),
        ({"cause": CAUSE}, False),
        ({"survivors": (SURVIVOR,)}, False),
    ],
)
def test_clean_means_asked_obeyed_and_nothing_left(fields: dict, clean: bool) -> None:  # noqa: FBT001
    assert report(**fields).clean is clean


def test_its_json_is_the_published_schema() -> None:
    told = json.loads(report(cause=CAUSE, survivors=(SURVIVOR,)).to_json())
    assert told["schema"] == "stopbath.shutdown/1"
    assert {"cause", "asked_by", "started_at", "duration_s", "clean", "workers"} <= told.keys()
    assert told["workers"][0] == {
        "name": "rank0",
        "role": "monolithic",
        "rank": 0,
        "pid": 10,
        "outcome": "drained",
        "exit": {"code": 0, "signal": None},
        "steps": [{"step": "drain", "at_s": 0.0}],
        "ended_at_s": 0.1,
        "last_stderr": ["bye"],
    }
    assert told["survivors"][0]["wchan"] == "nfs_wait"
    assert told["cause"]["exit"] == {"code": None, "signal": 9}


def test_a_failed_step_is_told_with_its_error() -> None:
    failed = worker()._replace(steps=(StepTaken("drain", 0.0, "closed"),))
    assert failed.to_dict()["steps"] == [{"step": "drain", "at_s": 0.0, "error": "closed"}]


def test_a_cause_is_one_line_and_names_worker_pid_and_last_words() -> None:
    assert str(CAUSE) == "rank0 (pid 10) was killed by SIGKILL while denoising; last words: b"


def test_a_startup_error_shows_the_last_lines() -> None:
    assert str(StartupError(CAUSE)).splitlines()[1:] == ["  | a", "  | b"]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (Exit(code=3), "exit code 3"),
        (Exit(signal=signal.SIGSEGV), "killed by SIGSEGV"),
        (Exit(signal=40), "killed by signal 40"),
        (Exit(), "exit status unknown"),
    ],
)
def test_an_end_is_said_in_words(end: Exit, words: str) -> None:
    assert str(end) == words


@given(st.text(min_size=1), st.lists(st.text(), max_size=3), st.integers(20, 200))
def test_any_name_and_words_can_be_rendered_and_written(
    name: str, words: list[str], width: int
) -> None:
    shown = report(
        cause=CAUSE._replace(worker=name),
        workers=(worker(name)._replace(last_stderr=tuple(words)),),
        strays=({"pid": 5, "argv": name, "outcome": "killed"},),
        survivors=(SURVIVOR,),
    )
    json.dumps(shown.to_dict())
    assert render(shown.to_dict(), width)
    assert "NOT clean" in str(shown)


def test_one_account_is_made_of_the_guardians_and_the_servers() -> None:
    outer = report(workers=(worker("server", pid=1),)).to_dict()
    inner = {"groups": [report().to_dict()], "cause": None, "unfinished_requests": 2}
    foreign = [{"name": "rank0", "pid": 10, "exit": {"code": 0, "signal": None}}]
    merged = merge(outer, inner, foreign, [], [], run_id="r", asked_by="SIGTERM")
    assert [it["name"] for it in merged["workers"]] == ["server", "rank0"]
    assert merged["unfinished_requests"] == 2
    assert merged["clean"]


def test_ranks_of_a_server_that_told_nothing_are_accounted_for() -> None:
    fault = {"cause": CAUSE, "asked_by": "a fault"}
    outer = report(workers=(worker("server", pid=1),), **fault).to_dict()
    killed = {"code": None, "signal": 9}
    foreign = [
        {"name": "rank0", "pid": 10, "exit": killed},
        {"name": "rank1", "pid": 11, "exit": killed},
    ]
    stray = {"pid": 12, "argv": "ffmpeg", "outcome": "killed"}
    merged = merge(outer, None, foreign, [stray], [], run_id="r", asked_by="")
    assert [it["outcome"] for it in merged["workers"]] == ["drained", "killed", "killed"]
    assert [it["rank"] for it in merged["workers"]] == [0, 0, 1]
    assert merged["strays"] == [stray]
    assert merged["asked_by"] == "a fault"
    assert merged["unfinished_requests"] is None


def test_the_keepers_end_is_the_servers_cause_whatever_its_ranks_said_of_it() -> None:
    """A server that lives on for a moment blames a rank; a rank that fell before is to blame."""
    echo = Cause("rank0", 10, "running", LOST_KEEPER, None, ())
    server = Cause("server", 9, "running", LOST_KEEPER, None, ())
    for inner, outer, said in ((echo, server, server), (CAUSE, server, CAUSE), (echo, None, echo)):
        told = {"groups": [report(cause=inner).to_dict()], "unfinished_requests": 0}
        whole = report(cause=outer).to_dict()
        merged = merge(whole, told, [], [], [], run_id="r", asked_by="")
        assert merged["cause"]["worker"] == said.worker
        assert not merged["clean"]


def test_a_report_is_written_beside_its_target_and_renamed(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    before = target.stat().st_ino
    assert write_report(str(target), {"clean": True}) is None
    assert json.loads(target.read_text()) == {"clean": True}
    assert target.stat().st_ino != before
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_target_that_is_no_regular_file_is_written_in_place() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as file:
        try:
            assert write_report(f"/proc/self/fd/{write_end}", {"clean": True}) is None
        finally:
            os.close(write_end)
        assert json.loads(file.read()) == {"clean": True}


def test_a_report_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    assert "No such file" in (write_report(str(tmp_path / "no" / "dir"), {}) or "")
    assert "Is a directory" in (write_report(str(tmp_path), {}) or "")
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_that_nobody_reads_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert write_report(str(pipe), {}) == f"{pipe}: nobody reads it"
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert write_report(str(pipe), {"clean": True}) is None
        assert json.loads(os.read(reader, 1000)) == {"clean": True}
        began = time.monotonic()
        problem = write_report(str(pipe), {"words": ["x" * 1000] * 1000})
        assert problem == f"{pipe}: its reader does not read"
        assert time.monotonic() - began < 2
    finally:
        os.close(reader)


def test_a_full_device_is_told() -> None:
    assert "No space left" in (write_report("/dev/full", {}) or "")


@pytest.mark.parametrize("how", ["beside", "in place"])
def test_a_full_disk_leaves_the_old_report_as_it_was(tmp_path: Path, how: str) -> None:
    """A limit of the file size stands in for it."""
    old = '{"clean": true}'
    report = tmp_path / "report.json"
    report.write_text(old)
    target = report
    if how == "in place":
        target = tmp_path / "link"
        target.symlink_to(report)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        problem = write_report(str(target), {"words": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert problem == f"{target}: File too large"
    assert report.read_text() == old
    assert {path.name for path in tmp_path.iterdir()} == {report.name, target.name}


def test_a_link_is_written_through_and_stays_one(tmp_path: Path) -> None:
    """`--report /dev/stdout > file`, as root, must not put a file in the place of /dev/stdout."""
    link, file = tmp_path / "stdout", tmp_path / "file"
    file.write_text("what was there before, and is longer than the report")
    link.symlink_to(file)
    assert write_report(str(link), {"clean": True}) is None
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"clean": True}
