"""Replicas of a whole server: isolation, restarts, crash loops, and a stop in the middle."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from observing import alive, wait_until
from served import serve
from stopbath.lifecycle import Deadline

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_death_in_one_replica_does_not_touch_the_other(tmp_path: Path) -> None:
    """Its request hears worker and signal at once; the other's goes on; what waits moves."""
    with serve(tmp_path, replicas=2, ranks=2, parallel="cfg") as server:
        held = []
        for count in (1, 2):  # one after the other: the first runs on replica0
            held.append(server.ask(prompt="hold"))
            server.running(count)
        waiting = server.ask(prompt="quick")
        wait_until(lambda: server.status()["queue"]["waiting"] == 1, Deadline.after(10))
        others = [server.pid(1, rank) for rank in range(2)]
        peer = server.pid(0, 0)
        killed_s = server.kill(0, 1)
        lost, came_s = held[0].wait()
        assert lost.status_code == 503
        error = lost.json()["error"]
        assert error["code"] == "worker_died"
        assert "replica0/rank1" in error["message"]
        assert "SIGKILL" in error["message"]
        assert came_s - killed_s < 0.5  # 0.1 on an idle machine
        assert server.client.get("/health/ready").status_code == 200
        assert [server.pid(1, rank) for rank in range(2)] == others
        wait_until(lambda: not alive(peer), Deadline.after(5), "the peer has gone, too")
        status = server.status()
        names = [rank["name"] for replica in status["replicas"] for rank in replica["ranks"]]
        assert names == ["replica0/rank0", "replica0/rank1", "replica1/rank0", "replica1/rank1"]
        assert [replica["cause"] is None for replica in status["replicas"]] == [False, True]
        server.kill(1, 0)
        assert "replica1/rank0" in held[1].wait()[0].json()["error"]["message"]
        assert waiting.wait()[0].json()["error"]["code"] == "worker_died"
        assert server.end() == 4
        assert {worker["name"] for worker in server.report["workers"]} == {"server", *names}


def test_a_lost_request_is_begun_anew_where_the_operator_allows_it(tmp_path: Path) -> None:
    """The first death costs it nothing but time, the second ends it."""
    with serve(tmp_path, replicas=2, retry_on_death=True) as server:
        held = server.ask(prompt="hold")
        server.running(1)
        server.kill(0)
        wait_until(lambda: server.replica(0)["cause"], Deadline.after(10))
        server.running(1)
        assert server.client.get("/health/ready").status_code == 200
        server.kill(1)
        answer, _ = held.wait()
        assert "replica1/rank0" in answer.json()["error"]["message"]
        assert server.end() == 4


def test_a_replica_is_restarted_and_serves_again(tmp_path: Path) -> None:
    """Not ready meanwhile, with the cause; afterwards the stop is a clean one."""
    with serve(tmp_path, on_engine_death="restart") as server:
        held = server.ask(prompt="hold")
        server.running(1)
        waiting = server.ask()
        wait_until(lambda: server.status()["queue"]["waiting"] == 1, Deadline.after(10))
        old = server.pid()
        server.kill()
        assert held.wait()[0].json()["error"]["code"] == "worker_died"
        assert "SIGKILL" in server.client.get("/health").json()["cause"]
        refused = server.client.post("/v1/images/generations", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert waiting.wait()[0].status_code == 200
        server.ready(200)
        replica = server.replica()
        assert (replica["state"], replica["restarts"]) == ("ready", 1)
        assert "SIGKILL" in replica["cause"]
        assert server.status()["cause"] is None
        assert server.pid() != old
        assert server.stop() == 0
        report = server.report
        assert (report["cause"], report["clean"], report["survivors"]) == (None, True, [])
        (retired,) = report["retired"]
        assert retired["workers"][0]["pid"] == old
        assert retired["cause"]["exit"]["signal"] == signal.SIGKILL


def test_a_crash_loop_ends_the_server(tmp_path: Path) -> None:
    """With 4, after as many restarts as were allowed, and no sooner."""
    with serve(tmp_path, on_engine_death="restart", max_restarts=2) as server:
        for restarts in range(3):
            server.ready(200)
            assert server.replica()["restarts"] == restarts
            server.kill()
            if restarts < 2:
                wait_until(
                    lambda: server.replica()["restarts"] == restarts + 1,  # noqa: B023
                    Deadline.after(10),
                )
        assert server.end() == 4
        assert any("not restarted again" in line for line in server.lines)


def test_a_restart_that_cannot_start_counts_too(tmp_path: Path) -> None:
    """The other replica goes on serving; the last one's end is the server's."""
    marker = tmp_path / "broken"
    with serve(
        tmp_path, replicas=2, on_engine_death="restart", max_restarts=2, model=str(marker)
    ) as server:
        marker.touch()
        server.kill(0)
        server.hear("replica0 is not restarted again")
        assert server.client.get("/health/ready").status_code == 200
        replica = server.replica(0)
        assert (replica["state"], replica["restarts"]) == ("stopped", 2)
        assert "the weights are gone" in replica["cause"]
        assert server.ask().wait()[0].status_code == 200
        server.kill(1)
        assert server.end() == 4


@pytest.mark.parametrize("moment", ["is restarted in", "starting"])
def test_a_stop_in_the_middle_of_a_restart(tmp_path: Path, moment: str) -> None:
    """Nothing is started any more, nothing is left, and the code says that it was dead."""
    with serve(tmp_path, on_engine_death="restart", model="slow") as server:
        waiting = [server.ask(prompt="hold")]
        server.running(1)
        waiting.append(server.ask())
        wait_until(lambda: server.status()["queue"]["waiting"] == 1, Deadline.after(10))
        server.kill()
        if moment == "starting":
            wait_until(lambda: server.replica()["restarts"] == 1, Deadline.after(10))
        else:
            server.hear(moment)
        server.process.send_signal(signal.SIGTERM)
        codes = [answer.wait()[0].json()["error"]["code"] for answer in waiting]
        assert codes == ["worker_died", "draining"]
        assert server.end() == 4
        assert server.report["survivors"] == []


def test_on_hold_the_server_stays_and_says_why(tmp_path: Path) -> None:
    with serve(tmp_path, on_engine_death="hold") as server:
        server.kill()
        server.ready(503)
        assert "SIGKILL" in server.client.get("/health").json()["cause"]
        assert server.stop() == 4


def test_a_stuck_rank_is_treated_as_a_death(tmp_path: Path) -> None:
    """The request ends as stuck, and the replica comes back."""
    with serve(tmp_path, on_engine_death="restart", step_budget_s=0.5) as server:
        hung = server.ask(prompt="hang")
        error = hung.wait()[0].json()["error"]
        assert error["code"] == "stuck"
        assert "replica0/rank0" in error["message"]
        assert "in generate" in "\n".join(server.lines)
        server.ready(200)
        assert server.ask().wait()[0].status_code == 200
        assert server.stop() == 0


def test_a_rank_inside_the_server_answers_and_leaves_with_it(tmp_path: Path) -> None:
    """`--executor inproc`: the rank's pid is the server's, and the server says what that means."""
    with serve(tmp_path, executor="inproc") as server:
        server.hear("(--executor inproc): a call that hangs cannot be ended")
        assert server.pid() == server.status()["server_pid"]
        assert server.ask(prompt="seven").wait()[0].status_code == 200
        held = server.ask(prompt="hold")
        server.running(1)
        assert server.stop() == 0
        assert held.wait()[0].status_code == 503
    assert server.report["clean"]
