"""Defects of `stopbath run`: signals, exit codes, streams, strays, leftovers, device memory."""

from __future__ import annotations

from defect import Change, Mutant, one

__all__ = ["MUTANTS_OF_RUN"]

_SIGNALS = "tests/process/test_run_signals.py"
_LEFT = "tests/process/test_run_leftovers.py"
_WATCH = "tests/process/test_run_watch.py"
_DEVICES = "tests/process/test_run_devices.py"

MUTANTS_OF_RUN = (
    Mutant(
        "the first signal is sent twice",
        (f"{_SIGNALS}::test_the_first_signal_arrives_as_it_came_and_once",),
        (
            one(
                "_running.py",
                "        self.command.first_signal = arrival.number\n",
                "        self.command.first_signal = arrival.number\n"
                "        self._signal(arrival.number, group=False)\n"
                "        time.sleep(0.05)  # two that are pending at once are one\n",
            ),
        ),
    ),
    Mutant(
        "every first signal is SIGTERM",
        (f"{_SIGNALS}::test_the_first_signal_arrives_as_it_came_and_once",),
        (
            one(
                "_running.py",
                "        self.command.first_signal = arrival.number\n",
                "",
            ),
        ),
    ),
    Mutant(
        "a Ctrl-C reaches the main process alone",
        (f"{_SIGNALS}::test_ctrl_c_on_a_terminal_reaches_everybody_in_front",),
        (
            one(
                "_running.py",
                "        self.command.to_group = arrival.sender == 0",
                "        self.command.to_group = False",
            ),
        ),
    ),
    Mutant(
        "the second signal shortens nothing",
        (f"{_SIGNALS}::test_a_second_signal_shortens_and_a_third_kills",),
        (
            one(
                "_guardian_loop.py",
                "        stage = min(count - 1 + early, len(_STAGES) - 1)",
                "        stage = 0",
            ),
        ),
    ),
    Mutant(
        "signals that are no stop are not passed on",
        (f"{_SIGNALS}::test_what_is_no_stop_is_passed_on",),
        (
            one(
                "_running.py",
                "        if arrival.number in _PASSED_ON:\n",
                "        if arrival.number in _PASSED_ON:\n            return True\n"
                "        if arrival.number in _PASSED_ON:\n",
            ),
        ),
    ),
    Mutant(
        "nohup is undone",
        (f"{_SIGNALS}::test_nohup_holds",),
        (one("_guardian.py", "        heard.remove(signal.SIGHUP)", "        pass"),),
    ),
    Mutant(
        "Python's own LC_CTYPE reaches the command",
        (f"{_SIGNALS}::test_the_environment_is_the_commands_own_but_for_the_marks",),
        (one("_guardian.py", '        env.pop("LC_CTYPE", None)\n', "        pass\n"),),
    ),
    Mutant(
        "128+n is lost",
        (f"{_SIGNALS}::test_it_exits_as_a_shell_would",),
        (
            one(
                "_exitcode.py",
                "        return 128 + ending.exit.signal\n    if ending.exit.code is None or",
                "        return ending.exit.signal\n    if ending.exit.code is None or",
            ),
        ),
    ),
    Mutant(
        "not found and not executable are one",
        (f"{_SIGNALS}::test_it_exits_as_a_shell_would",),
        (
            one(
                "_exitcode.py",
                "NOT_FOUND if ending.spawn_errno == errno.ENOENT else NOT_EXECUTABLE",
                "NOT_FOUND",
            ),
        ),
    ),
    Mutant(
        "as PID 1 nothing is reaped",
        (f"{_SIGNALS}::test_as_pid_1_it_reaps_what_others_left_and_forwards",),
        (
            one(
                "_guardian_loop.py",
                '            if pid not in awaited and stat is not None and stat.state == "Z":\n',
                "            if pid in awaited and stat is None:\n",
            ),
            # And what comes to the keeper, which is nearer.
            one(
                "_strays.py",
                "                self._lay_to_rest(pid, stat)",
                "                continue",
            ),
        ),
    ),
    Mutant(
        "stdin and stdout are kept open",
        (
            f"{_SIGNALS}::test_whoever_reads_sees_the_end_when_the_command_closes_and_not_when_it_ends",
        ),
        (one("_keeper_loop.py", "            self._let_go()\n", ""),),
    ),
    Mutant(
        "other descriptors are not handed on",
        (f"{_SIGNALS}::test_other_descriptors_are_handed_on",),
        (
            one(
                "_guardian.py",
                '    job["inherited"] = _inherited()\n',
                '    job["inherited"] = _inherited()\n'
                '    for fd in job["inherited"]: os.set_inheritable(fd, False)\n',
            ),
        ),
    ),
    Mutant(
        "captured bytes are swallowed",
        (f"{_SIGNALS}::test_captured_stderr_arrives_whole_and_is_in_the_report",),
        (
            one(
                "_tee.py",
                "                self._held[0] = first[done:]\n",
                "                self._held.popleft()\n",
            ),
        ),
    ),
    Mutant(
        "a reader that is slow holds the command up",
        (f"{_SIGNALS}::test_a_stderr_nobody_reads_does_not_hold_the_command_up",),
        (
            one(
                "_tee.py",
                "        while self._held and any(mask & select.POLLOUT for _, mask in "
                "poll.poll(0)):\n",
                "        os.set_blocking(self._out, True)\n        while self._held:\n",
            ),
        ),
    ),
    Mutant(
        "the terminal is not lent",
        (f"{_SIGNALS}::test_with_a_terminal_the_command_is_in_front_and_ctrl_c_is_its_own",),
        (
            one(
                "_terminal.py",
                "                os.tcsetpgrp(self._fd, group)\n",
                "                return\n",
            ),
        ),
    ),
    Mutant(
        "strays outlive the command",
        (f"{_WATCH}::test_what_the_command_leaves_is_ended_and_named",),
        (
            one(
                "_command.py",
                "            self._keeper.signal_tree(number)\n",
                "            self._keeper.signal_child(self.spawn_id, number, group=True)\n",
            ),
        ),
    ),
    Mutant(
        "one that may not be signalled ends the keeper",
        (f"{_WATCH}::test_what_is_another_users_is_named_and_stops_nothing_else",),
        (
            one(
                "_process.py",
                "            return self.send(number)\n        except PermissionError:",
                "            return self.send(number)\n        except ArithmeticError:",
            ),
        ),
    ),
    Mutant(
        "--linger is ignored",
        (f"{_WATCH}::test_linger_lets_a_program_daemonise_on_purpose",),
        (one("_core.py", "self._linger_s = member.linger_s\n", "self._linger_s = 0.0\n"),),
    ),
    Mutant(
        "a death that --watch sees is no fault",
        (f"{_WATCH}::test_a_rank_that_dies_ends_a_command_that_does_not_notice",),
        (one("_running.py", "            self._core.fault(self.command, what)\n", ""),),
    ),
    Mutant(
        "a replacement is not looked for",
        (f"{_WATCH}::test_a_rank_that_was_replaced_in_time_is_no_fault",),
        (one("_watch.py", "        for pid in found[it]:\n            self._take(it, pid)\n", ""),),
    ),
    Mutant(
        "a stop counts as a death that --watch sees",
        (f"{_WATCH}::test_a_stop_that_was_asked_for_is_no_fault_of_a_watched_process",),
        (
            one(
                "_running.py",
                "            self._watch.end()\n        self._finder.look_now",
                "            pass\n        self._finder.look_now",
            ),
            one(
                "_running.py",
                "        if self._core is not None and self._core.state is GroupState.READY:\n",
                "        if self._core is not None:\n",
            ),
        ),
    ),
    Mutant(
        "what is proved is not noted before a kill",
        (f"{_LEFT}::test_it_is_removed_whoever_of_us_was_killed",),
        (one("_finder.py", "            self._record.note_resource(**it._asdict())\n", ""),),
    ),
    Mutant(
        "the keeper does not look before it kills",
        (f"{_LEFT}::test_a_socket_bound_since_the_last_look_is_removed_by_the_keeper",),
        (one("_keeper_loop.py", "            self._last_look.look()\n", "            pass\n"),),
    ),
    Mutant(
        "what a stranger holds too is taken for ours",
        (f"{_LEFT}::test_a_strangers_segment_that_was_born_meanwhile_survives",),
        (
            one("_finder.py", "            self._shared |= new & others.files\n", ""),
            one(
                "_finder.py", '            return "somebody holds it"\n', '            return ""\n'
            ),
        ),
    ),
    Mutant(
        "what is only inferred is removed unasked",
        (f"{_LEFT}::test_what_is_only_inferred_is_named_and_removed_on_request",),
        (one("_finder.py", "            if self._all:\n", "            if True:\n"),),
    ),
    Mutant(
        "a socket that answers is removed",
        (f"{_LEFT}::test_a_socket_that_was_handed_to_a_stranger_is_the_strangers",),
        (one("_finder.py", "if answers(it.path) else", "if not it.path else"),),
    ),
    Mutant(
        "a lock file older than the run is its leftover",
        (f"{_LEFT}::test_an_old_lock_file_that_the_tree_opens_is_nobodys_leftover",),
        (one("_finder.py", "st_ctime_ns >= self._born_ns", "st_ctime_ns > 0"),),
    ),
    Mutant(
        "a name is taken for a segment",
        (f"{_LEFT}::test_another_segment_under_the_same_name_is_another",),
        (one("_finder.py", "(about.st_dev, about.st_ino) != (it.dev, it.ino)", "False"),),
    ),
    Mutant(
        "device memory is not waited for",
        (f"{_DEVICES}::test_memory_that_comes_back_late_is_waited_for",),
        (
            Change(
                "devices/account.py",
                "        if by.passed or (found and not any",
                "        if by or (found and not any",
            ),
        ),
    ),
    Mutant(
        "a stranger's device memory is waited for",
        (f"{_DEVICES}::test_what_a_stranger_takes_meanwhile_is_not_ours_to_wait_for",),
        (Change("devices/account.py", "        if mine or command is None:", "        if True:"),),
    ),
    Mutant(
        "our own first memory is the baseline",
        (f"{_DEVICES}::test_what_the_command_itself_holds_already_is_foreign_to_nobody",),
        (
            Change("devices/account.py", "if claim.pid in ours]", "if False]"),
            Change("devices/account.py", "            if claim.pid not in ours\n", ""),
        ),
    ),
    Mutant(
        "a look at the devices outlives the guardian",
        (f"{_DEVICES}::test_a_look_dies_with_a_guardian_that_is_killed",),
        (Change("devices/look.py", "    arm_parent_death()\n", ""),),
    ),
)
