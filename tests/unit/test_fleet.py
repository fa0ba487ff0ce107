"""Start, restart and stop of several replicas, through the server's own life."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from fake_executor import KILLED, FakeExecutor, FakeReport
from fake_server import PATIENCE_S, body
from running import PATH, Running, in_background
from stopbath.engine import restarts
from stopbath.lifecycle import Action, Deadline, StartupError

if TYPE_CHECKING:
    import httpx

pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for a pause between tries."""
    monkeypatch.setattr(restarts, "_FIRST_S", 0.0)


def loaded(name: str = "replica0", **options: Any) -> FakeExecutor:
    """Give an incarnation that is ready as soon as it is started."""
    made = FakeExecutor(name, **options)
    made.loaded.set()
    return made


class Lingering(FakeExecutor):
    """Its ranks take as long to end as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = threading.Event()

    def shutdown(self, by: Deadline | None = None, *, first: Action = Action.DRAIN) -> Any:
        """End when the test says so."""
        self.gone.wait(PATIENCE_S)
        return super().shutdown(by, first=first)


def status(client: httpx.Client) -> dict[str, Any]:
    told: dict[str, Any] = client.get("/v1/status").json()
    return told


def until(condition: Any) -> None:
    by = Deadline.after(PATIENCE_S)
    while not condition():
        assert not by.passed


def test_the_server_is_ready_when_every_replica_is() -> None:
    one, two = FakeExecutor("replica0", instant=True), FakeExecutor("replica1", instant=True)
    server = Running(one, two, replicas=2)
    one.loaded.set()
    assert not server.ctx.is_ready.wait(0.1)
    two.loaded.set()
    with server.wait_ready() as client:
        assert [replica["name"] for replica in status(client)["replicas"]] == [
            "replica0",
            "replica1",
        ]
    server.ctx.stop(Action.DRAIN)
    assert server.wait_end() == 0
    assert (one.shutdowns, two.shutdowns) == ([Action.DRAIN], [Action.DRAIN])
    assert len(server.ctx.reports[0]["groups"]) == 2


def test_one_replica_that_cannot_start_fails_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    """The others, ready or not, are stopped with it."""
    one, two = loaded("replica0"), FakeExecutor("replica1")
    two.start_error = StartupError(KILLED._replace(phase="loading the model"))
    server = Running(one, two, replicas=2)
    two.loaded.set()
    assert server.wait_end() == 3
    assert "killed by SIGKILL while loading the model" in capfd.readouterr().err
    assert (one.shutdowns, two.shutdowns) == ([Action.SIGTERM], [Action.SIGTERM])


def test_a_replica_lost_while_another_starts_fails_the_start() -> None:
    one, two = loaded("replica0"), FakeExecutor("replica1")
    server = Running(one, two, replicas=2, on_engine_death="restart")
    until(lambda: one._callbacks)
    one.die()
    two.loaded.set()
    assert server.wait_end() == 3


def test_an_exception_in_the_second_start_stops_the_first() -> None:
    """What was never started is not stopped."""
    one, two = FakeExecutor("replica0"), FakeExecutor("replica1")

    def fail() -> None:
        raise OSError(24, "too many open files")

    two.start = fail  # type: ignore[method-assign]
    server = Running(one, two, replicas=2)
    assert server.wait_end() == 3
    assert (one.shutdowns, two.shutdowns) == ([Action.SIGTERM], [])


def test_a_restart_builds_a_new_incarnation_when_the_old_is_gone() -> None:
    """And not before; the report knows both."""
    old, new = Lingering(), FakeExecutor(instant=True)
    old.loaded.set()
    server = Running(old, new, on_engine_death="restart")
    with server.wait_ready() as client:
        old.die()
        until(lambda: status(client)["state"] == "recovering")
        assert status(client)["replicas"][0]["restarts"] == 0
        old.gone.set()
        until(lambda: status(client)["replicas"][0]["restarts"] == 1)
        new.loaded.set()
        until(lambda: status(client)["state"] == "ready")
        assert client.post(PATH, json=body()).status_code == 200
        server.ctx.stop(Action.DRAIN)
        assert server.wait_end() == 0
    assert old.shutdowns == [Action.SIGTERM]
    (report,) = server.ctx.reports
    assert (report["cause"], len(report["groups"]), len(report["retired"])) == (None, 1, 1)


def test_over_survivors_nothing_is_restarted() -> None:
    """They may hold the device; who waits hears of it, and the code is theirs."""
    old = loaded()
    old.report = FakeReport(survivors=("rank1",))
    server = Running(old, on_engine_death="restart")
    with server.wait_ready() as client:
        answers = [in_background(lambda: client.post(PATH, json=body())) for _ in range(2)]
        assert old.called.acquire(timeout=PATIENCE_S)
        until(lambda: status(client)["queue"]["waiting"] == 1)
        old.die()
        said = [answer().json()["error"]["message"] for answer in answers]
    assert any("still alive" in message for message in said)
    assert server.wait_end() == 5


def test_restarts_in_a_row_have_an_end() -> None:
    """Whether they die or never start, and also with 4."""
    first, second, third = loaded(), loaded(), FakeExecutor()
    third.start_error = StartupError(KILLED)
    third.loaded.set()
    server = Running(first, second, third, on_engine_death="restart", max_restarts=2)
    with server.wait_ready() as client:
        first.die()
        until(lambda: status(client)["state"] == "ready" and second._callbacks)
        second.die()
        assert server.wait_end() == 4


def test_a_builder_that_fails_gives_the_replica_up() -> None:
    """A bug of ours leaves no request waiting."""
    only = loaded()
    server = Running(only, on_engine_death="restart")  # there is no second incarnation to give
    server.wait_ready().close()
    only.die()
    assert server.wait_end() == 4


@pytest.mark.parametrize("action", [Action.DRAIN, Action.SIGTERM])
def test_a_stop_while_a_replica_is_being_restarted(action: Action) -> None:
    """The incarnation that starts is stopped like any other, and none follows it."""
    old, new, never = loaded(), FakeExecutor(), loaded()
    new.start_error = StartupError(KILLED)  # which is how a start ends that a stop cuts short
    server = Running(old, new, never, on_engine_death="restart")
    with server.wait_ready() as client:
        old.die()
        until(lambda: status(client)["replicas"][0]["restarts"] == 1)
        server.ctx.stop(action, 10)
        assert server.wait_end() == 4
    assert (new.starts, never.starts) == (1, 0)
    assert new.shutdowns == [Action.DRAIN if action is Action.DRAIN else Action.SIGTERM]
    assert old.shutdowns == [Action.SIGTERM]


def test_a_stop_in_the_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the pause, and nothing is started after it."""
    monkeypatch.setattr(restarts, "_FIRST_S", 20.0)
    old, never = loaded(), loaded()
    server = Running(old, never, on_engine_death="restart")
    with server.wait_ready() as client:
        old.die()
        until(lambda: status(client)["state"] == "recovering" and old.shutdowns)
        server.ctx.stop(Action.DRAIN, 10)
        assert server.wait_end() == 4
    assert never.starts == 0


def test_the_last_stage_kills_every_replica() -> None:
    one, two = loaded("replica0"), loaded("replica1")
    server = Running(one, two, replicas=2)
    server.wait_ready().close()
    server.ctx.stop(Action.SIGKILL, 2)
    assert (one.kills, two.kills) == (1, 1)
    assert server.wait_end() == 0


@pytest.mark.parametrize("policy", ["exit", "restart"])
def test_one_of_two_is_enough_to_go_on(policy: str) -> None:
    """The server leaves, with 4, when the last has gone; asked to stop before, with 4 as well."""
    one, two = loaded("replica0", instant=True), loaded("replica1", instant=True)
    server = Running(one, two, replicas=2, on_engine_death=policy, max_restarts=0)
    with server.wait_ready() as client:
        one.die()
        until(lambda: status(client)["cause"])
        assert client.get("/health/ready").status_code == 200
        assert client.post(PATH, json=body()).status_code == 200
        if policy == "exit":
            server.ctx.stop(Action.DRAIN)
        else:
            two.die()
        assert server.wait_end() == 4
