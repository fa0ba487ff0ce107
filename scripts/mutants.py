"""Classic defects, one by one in a copy of the source: the suite must go red.

`python scripts/mutants.py [NAME …]`. Each defect is a change of a line or two that somebody
made, or could make, in good faith. The tests that are to notice it run against the copy; a
defect that no test notices survives, and gives exit code 1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from defect import Change, Mutant, one
from defects_of_run import MUTANTS_OF_RUN

from stopbath.lifecycle import ProcessRef
from stopbath.lifecycle._process import become_subreaper, children, reap_pid

ROOT = Path(__file__).resolve().parent.parent
JOBS = 2
LONGEST_S = 120.0  # a test that hangs has noticed too
CLEAN_S = 600.0  # for all of their tests, without a mutant
HANG_S = 25.0  # for one test


_P, _U = "tests/process", "tests/unit"
_STOP, _FAIL = f"{_P}/test_group_stop.py", f"{_P}/test_group_failure.py"
_SEED, _HOST = f"{_P}/test_seed_regression.py", f"{_P}/test_group_host.py"
_ZYGOTE = f"{_P}/test_zygote.py"
_START, _FIRST = f"{_P}/test_group_start.py", f"{_P}/test_first_instants.py"


_NO_CGROUP = one("_containment.py", "        own = own_cgroup()\n", "        own = None\n")

MUTANTS: tuple[Mutant, ...] = (
    *MUTANTS_OF_RUN,
    Mutant(
        "no SIGCONT with SIGTERM",
        (f"{_STOP}::test_the_report_says_which_step_ended_a_worker",),
        (one("_worker.py", "        self.ref.send(signal.SIGCONT)", "        pass"),),
    ),
    Mutant(
        "end of a pipe instead of a pidfd",
        (f"{_FAIL}::test_a_death_is_noticed_at_once_and_takes_its_subtree",),
        (
            one(
                "_keeper_loop.py",
                "        self._poll.register(ref.fileno(), select.POLLIN)\n        if access",
                "        if access",
            ),
            one(
                "_supervisor.py",
                "        self._selector.register(\n            member.ref, "
                "selectors.EVENT_READ, lambda: group.died(member, time.monotonic())\n        )",
                "        return",
            ),
            one(
                "_supervisor.py",
                "            self._unregister(member.channel)  # its pidfd",
                "            group.died(member, time.monotonic())  #",
            ),
        ),
    ),
    Mutant(
        "a deadline for each worker",
        (f"{_STOP}::test_sixteen_that_ignore_everything_are_gone_by_the_deadline[1.0]",),
        (
            one(
                "_core.py",
                "                    member.act(action, now, within_s)\n",
                "                    member.act(action, now, within_s)\n"
                "                    member.ref and member.ref.dead(within_s)\n",
            ),
        ),
    ),
    Mutant(
        "SIGKILL without reaping",
        (f"{_SEED}::test_dead_deaf_and_broken_at_once",),
        (
            one("_keeper_loop.py", "        reap(child.ref)\n", ""),
            # And the second line of defence: what is dead and nobody's is reaped in passing.
            one(
                "_strays.py",
                "                self._lay_to_rest(pid, stat)",
                "                continue",
            ),
        ),
    ),
    Mutant(
        "survivors dropped",
        (f"{_SEED}::test_a_survivor_is_named_kept_and_watched",),
        (
            one(
                "_core.py",
                "for m in self.members if m.state is WorkerState.SURVIVED and m.pid]",
                "for m in self.members if False]",
            ),
        ),
    ),
    Mutant(
        "getppid() == 1 means orphaned",
        (f"{_FIRST}::test_a_worker_whose_parent_died_before_it_armed_leaves",),
        (one("_child.py", "os.getppid() != parent_pid", "os.getppid() == 1"),),
    ),
    Mutant(
        "signal handlers installed late",
        (f"{_FIRST}::test_whoever_has_a_keeper_hears_signals",),
        (
            one(
                "_guardian.py",
                "    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n    with",
                "    with",
            ),
        ),
    ),
    Mutant(
        "an exception stops the loop over workers",
        (f"{_SEED}::test_one_that_cannot_be_signalled_never_stops_work_on_the_others",),
        (
            one(
                "_member.py",
                "        except Exception as exception:",
                "        except ArithmeticError as exception:",
            ),
            one(
                "_core.py",
                "                except Exception as error:  # one never stops",
                "                except ArithmeticError as error:  #",
            ),
        ),
    ),
    Mutant(
        "the parent-death signal not armed",
        (f"{_FIRST}::test_a_worker_in_c_dies_with_program_and_keeper",),
        (one("_child.py", "libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL", "libc.prctl(3, 0"),),
    ),
    Mutant(
        "the keeper's end not watched where no signal tells it",
        (f"{_P}/test_parent_death.py::test_a_keeper_that_is_killed",),
        (one("_parent_death.py", "    for fd in fds:", "    for fd in fds[:1]:"),),
    ),
    Mutant(
        "no subreaper",
        (f"{_FAIL}::test_a_death_is_noticed_at_once_and_takes_its_subtree",),
        (
            _NO_CGROUP,
            one("_keeper.py", "    become_subreaper()\n    me =", "    me ="),
            one(
                "_child.py", "ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)", "pass"
            ),
        ),
    ),
    Mutant(
        "the process group is all that is killed",
        (f"{_FAIL}::test_a_death_is_noticed_at_once_and_takes_its_subtree",),
        (
            _NO_CGROUP,
            one(
                "_strays.py",
                "            elif take and pid not in",
                "            elif take and pid in",
            ),
        ),
    ),
    Mutant(
        "a write to stderr that blocks",
        (f"{_HOST}::test_a_full_standard_error_stops_nothing",),
        (
            one(
                "_words.py",
                "        while view and any(mask & select.POLLOUT for _, mask in poll.poll(0)):\n",
                "        while view:\n",
            ),
        ),
    ),
    Mutant(
        "the exit status lost",
        (f"{_FAIL}::test_the_cause_names_worker_end_and_last_words_and_the_peers_are_stopped",),
        (
            one(
                "_keeper_loop.py",
                "            child.exit = peek_exit(child.ref)\n",
                "            child.exit = peek_exit(child.ref) and Exit()\n",
            ),
        ),
    ),
    Mutant(
        "callbacks told before the cause is known",
        (f"{_FAIL}::test_the_cause_names_worker_end_and_last_words_and_the_peers_are_stopped",),
        (
            one(
                "_core.py",
                "            member.status_due = now + _STATUS_WAIT_S",
                "            self._ended_untold(member, now)",
            ),
        ),
    ),
    Mutant(
        "the last fault is the cause, not the first",
        (_FAIL, _SEED, f"{_U}/test_report.py", f"{_P}/test_stuck.py"),
        (
            one(
                "_core.py",
                "        if self.cause is None:\n            assert self._sup",
                "        if True:\n            assert self._sup",
            ),
        ),
    ),
    Mutant(
        "a shortened stop takes longer",
        (f"{_U}/test_escalation.py", f"{_STOP}::test_a_second_caller_never_lengthens"),
        (
            one("_stop.py", "min(self._deadline, deadline)", "deadline"),
            one("_stop.py", ".no_later_than(self._schedule)", ""),
            one("_stop.py", " or self._deadline < self._schedule.over_at:", " or True:"),
        ),
    ),
    Mutant(
        "not single flight",
        (
            f"{_STOP}::test_a_second_caller_joins_and_shortens",
            f"{_STOP}::test_many_callers_at_once_get_one_account",
            f"{_SEED}::test_a_failure_and_an_explicit_stop_at_the_same_time_act_once",
        ),
        (
            one(
                "_core.py",
                "        if self.state is GroupState.STOPPING and self._stop is not None:\n"
                "            self._stop.shorten",
                "        if self._stop is None and done is None:\n            self._stop.shorten",
            ),
            one("_member.py", "if self.sent is not None and self.sent >= action:", "if False:"),
        ),
    ),
    Mutant(
        "descriptors inherited",
        (f"{_START}::test_descriptors_and_environment_reach_the_worker",),
        (
            one("_child.py", "        os.closerange(first, fd)\n", ""),
            one("_child.py", "    os.closerange(first, 1 << 20)\n", ""),
            one("_keeper.py", "    os.closerange(max(fd, record_fd) + 1, 1 << 20)\n", ""),
        ),
    ),
    Mutant(
        "no deadline after SIGKILL",
        (f"{_SEED}::test_a_survivor_is_named_kept_and_watched",),
        (
            one(
                "_stop.py",
                "        return now >= self._over_at\n",
                "        return self.applied is not Action.SIGKILL and now >= self._over_at\n",
            ),
        ),
    ),
    Mutant(
        "the exit code is that of the last error",
        (f"{_U}/test_exitcode.py",),
        (
            one(
                "_exitcode.py",
                "    if ending.survivors:\n        return SURVIVORS\n"
                "    if ending.exit.code in _OWN:",
                "    if ending.exit.code in _OWN:",
            ),
        ),
    ),
    Mutant(
        "what a dead run left is not swept",
        (f"{_P}/test_sweep.py::test_the_next_start_ends_what_a_dead_run_left",),
        (one("_sweep.py", "        if not left.processes:", "        if True:"),),
    ),
    Mutant(
        "a pid is taken for a process",
        (f"{_P}/test_sweep.py::test_a_pid_that_changed_hands_is_never_touched",),
        (
            one("_process.py", "(start is not None and stat.start != start)", "False"),
            one("_leftovers.py", "found.start != start", "start < 0"),
        ),
    ),
    Mutant(
        "a broken group is drained",
        (f"{_FAIL}::test_the_cause_names_worker_end_and_last_words_and_the_peers_are_stopped",),
        (
            one(
                "_core.py",
                'self.stop(Action.SIGTERM, math.inf, "a fault")',
                'self.stop(Action.DRAIN, math.inf, "a fault")',
            ),
        ),
    ),
    Mutant(
        "a worker that is just born is taken for a stray",
        (f"{_ZYGOTE}::test_many_are_born_at_once",),
        (one("_keeper_loop.py", "take=take, spare=zygotes)", "take=take)"),),
    ),
    Mutant(
        "a zygote that does not answer is waited for",
        (f"{_ZYGOTE}::test_a_zygote_that_does_not_answer_is_given_up",),
        (one("_nursery.py", "time.monotonic() >= self._asked.due:", "False:"),),
    ),
    Mutant(
        "a stop waits for whoever is not born",
        (f"{_ZYGOTE}::test_a_stop_while_the_zygote_imports",),
        (one("_core.py", "            keeper.cancel(member.spawn_id)\n", "            pass\n"),),
    ),
    Mutant(
        "a forked worker without a parent-death signal",
        (f"{_P}/test_parent_death.py::test_the_default_here_is_the_kernels_way",),
        (one("_child.py", '=ends == "kernel")', '=ends == "kernel" and not forked)'),),
    ),
    Mutant(
        "a zygote outlives its client",
        (f"{_ZYGOTE}::test_a_forked_worker_that_starts_workers",),
        (one("_keeper_loop.py", "        self._nursery.dismiss(client)\n", ""),),
    ),
)


class Outcome(NamedTuple):
    """What the tests said of a mutant."""

    red: bool
    took_s: float
    by: str


def _pytest(
    source: Path, tests: tuple[str, ...], log: Path, within_s: float = LONGEST_S
) -> subprocess.CompletedProcess[str]:
    runtime = log.with_suffix(".runtime")
    runtime.mkdir(mode=0o700)
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"),
            *("--timeout", str(HANG_S), "-o", "faulthandler_timeout=0"),
            *("--basetemp", str(log.with_suffix(".tests")), *tests),
        ],
        cwd=ROOT,
        # Before the editable install's own path; keeper and children are run by path, from here.
        env={**os.environ, "PYTHONPATH": str(source), "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )


def _end_left(home: Path) -> None:
    """End what the mutants have left, which is what mutants do; then sweep their records."""
    by = time.monotonic() + 5.0
    while (pids := children()) and time.monotonic() < by:
        for pid in pids:
            try:
                ref = ProcessRef.open(pid)
            except ProcessLookupError:
                continue
            ref.send(signal.SIGKILL)
            ref.dead(wait_s=0.5)
            reap_pid(pid)
            ref.close()
    for runtime in {record.parent.parent for record in home.rglob("*.run")}:
        subprocess.run(
            [sys.executable, "-m", "stopbath", "sweep", "--yes"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
            capture_output=True,
            check=False,
        )


def _apply(source: Path, changes: tuple[Change, ...]) -> None:
    for change in changes:
        path = source / "stopbath" / change.file
        text = path.read_text()
        if text.count(change.old) != 1:
            raise LookupError(
                f"{change.file} has {text.count(change.old)} times what is replaced: "
                f"{change.old.strip()[:60]!r}"
            )
        path.write_text(text.replace(change.old, change.new))


def _try(home: Path, mutant: Mutant) -> Outcome:
    source = Path(tempfile.mkdtemp(dir=home)) / "src"
    shutil.copytree(
        ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    began = time.monotonic()
    try:
        _apply(source, mutant.changes)
        done = _pytest(source, mutant.tests, source.parent / "log")
    except LookupError as error:
        return Outcome(False, 0.0, f"cannot be made: {error}")
    except subprocess.TimeoutExpired:
        return Outcome(True, time.monotonic() - began, "its tests came to no end")
    took = time.monotonic() - began
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    # 1, or a signal: what hangs is ended by pytest-timeout. A copy that cannot even be imported
    # gives 2 and no failed test.
    red = bool(failed) or done.returncode == 1 or done.returncode < 0
    by = failed[0].split("::", 1)[-1].split(" - ")[0] if failed else "a hang" if red else ""
    return Outcome(red, took, by or f"pytest ended with {done.returncode}")


def _check_clean(home: Path) -> str:
    """The same tests are green without a mutant, or a red would prove nothing."""
    tests = tuple(sorted({test for mutant in MUTANTS for test in mutant.tests}))
    said = ""
    for _ in range(2):  # a bound may be missed once on a busy machine
        try:
            log = Path(tempfile.mkdtemp(dir=home)) / "log"
            done = _pytest(ROOT / "src", tests, log, CLEAN_S)
        except subprocess.TimeoutExpired:
            return "its tests came to no end"
        if done.returncode == 0:
            return ""
        said = done.stdout[-1500:]
    return said


def main(names: list[str]) -> int:
    """Try every mutant, or those whose names hold one of `names`; print a table."""
    chosen = [it for it in MUTANTS if not names or any(name in it.name for name in names)]
    began = time.monotonic()
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="stopbath-mutants-") as folder:
        home = Path(folder)
        problem = "" if names else _check_clean(home)
        if problem:
            sys.stdout.write(f"the suite is red without a mutant:\n{problem}\n")
            return 1
        with ThreadPoolExecutor(JOBS) as pool:
            outcomes = list(pool.map(lambda mutant: _try(home, mutant), chosen))
        _end_left(home)
    sys.stdout.write(f"{'MUTANT':<42} {'SUITE':<9} {'TOOK':>6}  BY\n")
    for mutant, outcome in zip(chosen, outcomes, strict=True):
        word = "red" if outcome.red else "SURVIVED"
        sys.stdout.write(f"{mutant.name:<42} {word:<9} {outcome.took_s:5.1f}s  {outcome.by[:60]}\n")
    dead = sum(outcome.red for outcome in outcomes)
    took = time.monotonic() - began
    sys.stdout.write(f"{dead} of {len(outcomes)} noticed; {took:.0f} s\n")
    return int(dead < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
