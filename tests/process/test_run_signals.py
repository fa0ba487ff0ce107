"""`stopbath run`: signals reach the command once, its exit is ours, its pipes are its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stopbath
from observing import alive, state_of, wait_until
from stopbath.lifecycle import Deadline
from wrapped import STOPBATH, Holdings, Wrapped, wrapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_left")

QUICK = ("--drain", "0.3", "--terminate", "0.3", "--kill", "2")
ROOT = os.geteuid() == 0

# Prints the name of every signal it gets, ends at a SIGTERM or at the word given.
COUNTS = """
import signal, sys, os
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
    if signal.Signals(number).name in sys.argv[1:]: os._exit(7)
for n in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"):
    if signal.getsignal(getattr(signal, "SIG" + n)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, "SIG" + n), heard)
print("up", os.getpid(), flush=True)
while True: signal.pause()
"""


@pytest.fixture
def wrap(nothing_left: None, tmp_path: Path) -> Iterator[Callable[..., Wrapped]]:  # noqa: ARG001  (runs around this)
    yield from wrapping(tmp_path)


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test's dead run left is swept, and said, by others than these."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def python(code: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-c", textwrap.dedent(code), *args)


# -- exit codes


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 3"), 3),
        (("sh", "-c", "kill -SEGV $$"), 128 + 11),
        (("/no/such/command",), 127),
        (("no-such-command-anywhere",), 127),
        (("/etc/passwd",), 126),
        (("",), 127),
    ],
)
def test_it_exits_as_a_shell_would(
    wrap: Callable[..., Wrapped], command: tuple[str, ...], code: int
) -> None:
    run = wrap(*command)
    assert run.ended() == code
    if code in {126, 127}:
        assert len(run.errors.splitlines()) == 1
        assert run.errors.startswith(f"stopbath: {command[0]}: ")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--drain", "x", "--", "true"],
        ["--nonsense", "--", "true"],
        ["--watch", "a:0", "--", "true"],
        ["--isolate", "net", "--", "true"],
        ["--report"],
        ["--tty", "--", "true"],
    ],
)
def test_what_it_cannot_do_is_one_line_and_2(wrong: list[str]) -> None:
    done = subprocess.run(
        [STOPBATH, "run", *wrong],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_a_report_that_cannot_be_written_is_said_and_changes_no_exit_code() -> None:
    done = subprocess.run(
        [STOPBATH, "run", "--report", "/no/such/folder/report.json", "--", "sh", "-c", "exit 4"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "report could not be written" in done.stderr


# -- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_the_first_signal_arrives_as_it_came_and_once(
    wrap: Callable[..., Wrapped], number: signal.Signals
) -> None:
    run = wrap(*python(COUNTS), options=QUICK)
    run.says("up")
    run.send(number)
    run.says(number.name)
    assert run.ended() == 137
    heard = run.out.read_text().split()[2:]
    # Its own, then SIGTERM with SIGCONT to everybody when the first grace was over.
    assert heard.count(number.name) == 1 + (number is signal.SIGTERM)
    assert set(heard) <= {number.name, "SIGTERM", "SIGCONT"}


def test_an_orderly_end_within_the_grace_is_the_exit_code(wrap: Callable[..., Wrapped]) -> None:
    run = wrap(*python(COUNTS, "SIGINT"))
    run.says("up")
    run.send(signal.SIGINT)
    assert run.ended() == 7
    assert run.report["asked_by"] == "SIGINT"
    assert run.errors == ""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH])
def test_what_is_no_stop_is_passed_on(wrap: Callable[..., Wrapped], number: signal.Signals) -> None:
    run = wrap(*python(COUNTS, number.name))
    run.says("up")
    run.send(number)
    assert run.ended() == 7
    assert run.report["asked_by"] == "the end of command"


def test_ctrl_c_on_a_terminal_reaches_everybody_in_front(wrap: Callable[..., Wrapped]) -> None:
    """A parent often waits for its child: had only the parent been told, both would sit there."""
    code = """
        import os, signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        child = os.fork()
        if child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _, status = os.waitpid(child, 0)
            print("child", os.waitstatus_to_exitcode(status), flush=True)
            os._exit(5)
        print("up", flush=True)
        while True: signal.pause()
    """
    run = wrap(*python(code), terminal=True)
    run.says("up")
    run.ctrl_c()
    assert run.ended() == 5
    assert run.out.read_text().split() == ["up", "child", "-2"]


def test_a_second_signal_shortens_and_a_third_kills(wrap: Callable[..., Wrapped]) -> None:
    run = wrap(*python(COUNTS), options=("--drain", "60", "--terminate", "60"))
    run.says("up")
    run.send(signal.SIGINT)
    run.says("SIGINT")
    run.send(signal.SIGINT)
    run.says("SIGTERM")
    run.send(signal.SIGINT)
    assert run.ended() == 137
    assert run.out.read_text().count("SIGINT") == 1


def test_a_background_job_that_ignores_sigint_by_birth_is_still_stopped_by_it(
    wrap: Callable[..., Wrapped],
) -> None:
    """Shells start background jobs so. The command goes on ignoring it, and gets the next step."""
    ignoring = ("sh", "-c", 'trap "" INT; exec "$@"', "-")
    run = wrap(*python(COUNTS, "SIGTERM"), options=QUICK, before=ignoring)
    run.says("up")
    run.send(signal.SIGINT)
    assert run.ended() == 7
    assert "SIGINT" not in run.out.read_text()


def test_nohup_holds(wrap: Callable[..., Wrapped]) -> None:
    run = wrap(*python(COUNTS, "SIGTERM"), options=QUICK, before=("nohup",))
    run.says("up")
    run.send(signal.SIGHUP)
    run.send(signal.SIGUSR1)
    run.says("SIGUSR1")  # what had been sent before has been dealt with
    run.send(signal.SIGTERM)
    assert run.ended() == 7
    assert "SIGHUP" not in run.out.read_text()
    assert run.report["asked_by"] == "SIGTERM"


def test_broken_pipes_end_the_command_as_they_would_alone() -> None:
    """Python ignores SIGPIPE; what it starts must not inherit that."""
    with subprocess.Popen(
        [STOPBATH, "run", "--", "yes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        run.stdout.read(10)
        run.stdout.close()
        assert run.wait(10) == 128 + signal.SIGPIPE
        assert run.stderr is not None
        assert run.stderr.read() == b""  # as silent as a shell
    ignored = []
    for before in ((), (STOPBATH, "run", "--")):
        argv = [*before, "grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]
        words = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
        # 32 and 33 are the C library's own: posix_spawn ignores them, for every program.
        ignored.append([int(word, 16) & ~(3 << 31) for word in words[1::2]])
    assert ignored[0] == ignored[1]


@pytest.mark.parametrize("who", ["guardian", "keeper", "command"])
def test_no_single_kill_9_leaves_anything(wrap: Callable[..., Wrapped], who: str) -> None:
    code = """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for prefix in ([], ["setsid"]):
            subprocess.Popen([*prefix, "sh", "-c", "trap '' TERM INT; while :; do sleep 1; done"])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                print("up", flush=True)
                while True: signal.pause()
            os._exit(0)
        os.wait()
        while True: signal.pause()
    """
    run = wrap(*python(code), options=QUICK)
    run.says("up")
    held = Holdings.of(run)
    assert len(held.pids) >= 6
    os.kill(getattr(run, who), signal.SIGKILL)
    code_ = run.ended()
    assert code_ == {"guardian": -9, "keeper": 125, "command": 137}[who]
    held.are_gone(3)


def test_as_pid_1_it_reaps_what_others_left_and_forwards(tmp_path: Path) -> None:
    if not ROOT:
        pytest.skip("needs root for a PID namespace")
    orphan = "(sh -c 'sleep 0.05 & exit 0'); "
    script = f"trap 'ps -eo stat= >&2; exit 9' TERM; {orphan} echo up; sleep 60 & wait"
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", STOPBATH, "run",
         "--report", tmp_path / "report.json", "--", "sh", "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as outer:  # fmt: skip
        assert outer.stdout is not None
        assert outer.stdout.readline() == "up\n"
        path = f"/proc/{outer.pid}/task/{outer.pid}/children"
        with open(path) as file:  # noqa: PTH123
            guardian = int(file.read().split()[0])
        os.kill(guardian, signal.SIGTERM)
        _, said = outer.communicate(timeout=10)
        assert outer.returncode == 9
        assert "Z" not in said
    assert json.loads((tmp_path / "report.json").read_text())["clean"]


# -- pipes


def test_stdin_and_stdout_are_the_commands_own_byte_for_byte() -> None:
    data = bytes(range(256)) * 4096
    done = subprocess.run(
        [STOPBATH, "run", "--", "cat"], input=data, check=True, capture_output=True
    )
    assert done.stdout == data
    assert done.stderr == b""


def test_whoever_reads_sees_the_end_when_the_command_closes_and_not_when_it_ends(
    wrap: Callable[..., Wrapped],
) -> None:
    read_end, write_end = os.pipe()
    run = wrap(*python("import os, signal; os.write(1, b'x'); os.close(1); signal.pause()"),
               stdout=os.fdopen(write_end, "wb"))  # fmt: skip
    with os.fdopen(read_end, "rb") as reader:
        assert reader.read() == b"x"
    assert alive(run.guardian)
    run.send(signal.SIGTERM)
    assert run.ended() == 143


@pytest.mark.parametrize("by", ["path", "name"])
def test_a_script_without_an_interpreter_is_the_shells(tmp_path: Path, by: str) -> None:
    script = tmp_path / "a-script"
    script.write_text("exit $1\n")
    script.chmod(0o700)
    argv = [STOPBATH, "run", "--", script if by == "path" else script.name, "6"]
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{tmp_path}"}
    assert subprocess.run(argv, env=env, check=False).returncode == 6


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_fault_of_the_command(closed: str, tmp_path: Path) -> None:
    argv = ["bash", "-c", f'exec "$@" {closed}', "bash", STOPBATH, "run"]
    report = tmp_path / "report.json"
    done = subprocess.run([*argv, "--report", report, "--", "sh", "-c", "exit 6"], check=False)
    assert done.returncode == 6
    assert json.loads(report.read_text())["clean"]


def test_the_environment_is_the_commands_own_but_for_the_marks() -> None:
    """Python sets LC_CTYPE for itself where there is no locale."""
    given = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    given["A"] = "b\udcff"
    seen = []
    for before in ((), (STOPBATH, "run", "--")):
        argv = [*before, "cat", "/proc/self/environ"]
        words = subprocess.run(argv, env=given, check=True, capture_output=True).stdout.split(b"\0")
        seen.append({word for word in words if not word.startswith(b"STOPBATH_")})
    assert seen[0] == seen[1]


def test_what_lies_beside_the_package_hides_no_standard_module(tmp_path: Path) -> None:
    """Backports in site-packages have such names; there they come last, and here too."""
    (tmp_path / "stopbath").symlink_to(Path(stopbath.__file__).parent)
    for name in ("enum", "typing", "json", "socket", "selectors", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(99)")
    code = f"""
        import sys
        from stopbath.cli import launch
        launch.__file__ = {str(tmp_path / "stopbath/cli/launch.py")!r}
        sys.argv[1:] = ["run", "--", "sh", "-c", "exit 6"]
        from stopbath.cli import main
        main()
    """
    done = subprocess.run(python(code), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (6, "")


def test_a_directory_that_is_gone_is_said_in_one_line(tmp_path: Path) -> None:
    where = tmp_path / "gone"
    where.mkdir()
    code = f'rmdir {where}; exec "$@"'
    argv = ["sh", "-c", code, "sh", STOPBATH, "run", "--report", "r.json", "--", "true"]
    done = subprocess.run(argv, cwd=where, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the current directory is gone" in done.stderr


def test_too_few_descriptors_are_said() -> None:
    argv = ["sh", "-c", f"ulimit -n 11; exec {STOPBATH} run -- true"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 125
    assert "Too many open files" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_descriptors_are_handed_on() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader:
        subprocess.run(
            [STOPBATH, "run", "--", "bash", "-c", f"echo through >&{write_end}"],
            pass_fds=[write_end],
            check=True,
        )
        os.close(write_end)
        assert reader.read() == b"through\n"


def test_captured_stderr_arrives_whole_and_is_in_the_report(tmp_path: Path) -> None:
    code = "import os; os.write(2, b''.join(b'line %d\\r' % i for i in range(50000))); "
    code += "os.write(2, b'\\nthe end')"
    report = tmp_path / "report.json"
    argv = [STOPBATH, "run", "--capture", "--report", report, "--", *python(code)]
    done = subprocess.run(argv, check=True, capture_output=True)
    alone = subprocess.run(python(code), check=True, capture_output=True)
    assert done.stderr == alone.stderr
    assert json.loads(report.read_text())["workers"][0]["last_stderr"][-1] == "the end"


def test_a_stderr_nobody_reads_does_not_hold_the_command_up(tmp_path: Path) -> None:
    """What is dropped then is the oldest, and a line says how much; the end is kept."""
    code = """
        import os
        for i in range(8000): os.write(2, b"%07d " % i * 128)
        os.write(2, b"\\nthe end\\n")
        open("done", "w").close()
    """
    argv = [STOPBATH, "run", "--capture", "--", *python(code)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, cwd=tmp_path) as run:
        assert run.stderr is not None
        by = Deadline.after(20)
        wait_until((tmp_path / "done").exists, by, "it is not held up")
        said = run.stderr.read()
        assert run.wait(10) == 0
    assert said.startswith(b"0000000 ")
    assert b" bytes of stderr dropped: nobody read them" in said
    assert said.endswith(b"\nthe end\n")


# -- the terminal


def test_with_a_terminal_the_command_is_in_front_and_ctrl_c_is_its_own(
    wrap: Callable[..., Wrapped],
) -> None:
    code = """
        import os, signal
        def heard(*_): print("heard", flush=True); os._exit(5)
        signal.signal(signal.SIGINT, heard)
        print("front", os.tcgetpgrp(0) == os.getpgrp(), flush=True)
        line = input()
        print("line", line, flush=True)
        while True: signal.pause()
    """
    run = wrap(*python(code), options=("--tty",), terminal=True)
    run.says("front")
    run.type(b"hello\n")
    run.says("line hello")
    run.ctrl_c()
    assert run.ended() == 5
    assert run.out.read_text().count("heard") == 1
    assert run.report["asked_by"] == "the end of command"


# A shell with job control, as small as it can be.
SHELL = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen(sys.argv[1:], process_group=0)
os.tcsetpgrp(0, job.pid)
_, status = os.waitpid(job.pid, os.WUNTRACED)
print("stopped", os.WIFSTOPPED(status), flush=True)
os.tcsetpgrp(0, os.getpgrp())
input()
os.tcsetpgrp(0, job.pid)
os.kill(-job.pid, signal.SIGCONT)
_, status = os.waitpid(job.pid, 0)
os.tcsetpgrp(0, os.getpgrp())
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("options", [(), ("--tty",)])
def test_ctrl_z_stops_both_and_fg_continues_both(
    wrap: Callable[..., Wrapped], options: tuple[str, ...]
) -> None:
    run = wrap(*python(COUNTS, "SIGINT"), options=options, terminal=True, before=python(SHELL))
    run.says("up")
    command = int(run.out.read_text().split()[1])
    run.type(b"\x1a")
    run.says("stopped True")
    wait_until(lambda: state_of(command) == "T", Deadline.after(5), "the command is stopped")
    run.type(b"\n")
    run.says("SIGCONT")
    run.ctrl_c()
    assert run.ended() == 7


def test_a_leader_of_its_session_is_not_stopped_for_ever(wrap: Callable[..., Wrapped]) -> None:
    """Nobody could continue it: Ctrl-Z means nothing there, as the kernel has it too."""
    run = wrap(*python(COUNTS, "SIGUSR1"), terminal=True)
    run.says("up")
    run.type(b"\x1a")
    run.send(signal.SIGUSR1)
    assert run.ended() == 7
