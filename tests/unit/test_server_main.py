"""The server process from its configuration to its exit code, without processes."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

import httpx
import pytest

from fake_executor import KILLED, FakeExecutor, FakeReport
from fake_server import PATIENCE_S, body
from running import PATH, Running, in_background
from stopbath.lifecycle import Action, StartupError
from stopbath.server.exits import Ending, exit_code
from stopbath.server.listener import CannotListen, listen
from stopbath.server.logs import StderrLines

pytestmark = pytest.mark.usefixtures("logging_as_before")


def test_a_clean_stop(capfd: pytest.CaptureFixture[str]) -> None:
    """One ready line, a report, exit 0, and nobody behind the port."""
    server = Running(FakeExecutor(instant=True))
    with server.wait_ready() as client:
        assert client.get("/v1/status").json()["guardian_pid"] == 11
        assert client.post(PATH, json=body()).status_code == 200
        server.ctx.stop(Action.DRAIN)
        assert server.wait_end() == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
    assert server.executor.shutdowns == [Action.DRAIN]
    assert server.ctx.budget_s == pytest.approx(10.0)
    (report,) = server.ctx.reports
    assert report["groups"] == [FakeReport().to_dict()]
    assert (report["cause"], report["unfinished_requests"]) == (None, 0)
    lines = [line for line in capfd.readouterr().err.splitlines() if "stopbath: ready" in line]
    assert lines == [f"stopbath: ready {server.ctx.url}"]


def test_a_drain_finishes_the_running_request() -> None:
    """The ranks are stopped after the last answer, not before."""
    server = Running(FakeExecutor())
    with server.wait_ready() as client:
        answer = in_background(lambda: client.post(PATH, json=body()))
        assert server.executor.called.acquire(timeout=PATIENCE_S)
        server.ctx.stop(Action.DRAIN)
        while client.get("/health/ready").status_code != 503:
            pass
        assert server.executor.shutdowns == []
        server.executor.calls[0].finish()
        assert answer().status_code == 200
        assert server.wait_end() == 0


def test_a_slow_reader_gets_its_picture_during_the_drain() -> None:
    """An answer that is made is also brought: its client has until the drain's deadline."""
    server = Running(FakeExecutor(), drain_s=PATIENCE_S)
    with server.wait_ready() as client, socket.create_connection(address(server)) as slow:
        ask_raw(slow)
        assert server.executor.called.acquire(timeout=PATIENCE_S)
        server.ctx.stop(Action.DRAIN, 1000)
        while client.get("/health/ready").status_code != 503:
            pass
        picture = b"QUJD" * (4 << 20)
        server.executor.calls[0].finish([picture])
        threading.Event().wait(0.7)  # this client is slow
        received = b"".join(iter(lambda: slow.recv(1 << 20), b""))
        assert picture in received
        assert server.wait_end() == 0


def test_a_reader_that_never_reads_cannot_hold_the_server() -> None:
    """At the drain's deadline its connection is cut."""
    server = Running(FakeExecutor(), drain_s=0.3)
    with server.wait_ready() as client, socket.create_connection(address(server)) as deaf:
        ask_raw(deaf)
        assert server.executor.called.acquire(timeout=PATIENCE_S)
        server.executor.calls[0].finish([b"QUJD" * (4 << 20)])
        while client.get("/v1/status").json()["queue"]["running"]:
            pass
        server.ctx.stop(Action.DRAIN, 1000)
        assert server.wait_end() == 0


def ask_raw(sock: socket.socket) -> None:
    """Send a good request on a socket whose reading the test controls."""
    raw = json.dumps(body()).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    sock.sendall(head.encode() + raw)


def address(server: Running) -> tuple[str, int]:
    url = httpx.URL(server.ctx.url)
    return url.host, url.port or 0


def test_stop_now_does_not_wait_for_the_drain() -> None:
    """The second stage answers everybody at once and goes on to the ranks."""
    server = Running(FakeExecutor(slow_cancel=True), drain_s=600)
    with server.wait_ready() as client:
        answer = in_background(lambda: client.post(PATH, json=body()))
        assert server.executor.called.acquire(timeout=PATIENCE_S)
        server.ctx.stop(Action.DRAIN, 1000)
        while client.get("/health/ready").status_code != 503:
            pass
        server.ctx.stop(Action.SIGTERM, 4)
        response = answer()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
        assert server.wait_end() == 0
    assert server.executor.shutdowns[-1] is Action.SIGTERM
    assert server.ctx.reports[0]["unfinished_requests"] == 1


def test_stop_now_shortens_a_stop_of_the_ranks() -> None:
    """A stage that comes while the ranks drain reaches them."""
    executor = FakeExecutor()
    executor.stop_blocked.clear()
    server = Running(executor, drain_s=600)
    server.wait_ready().close()
    server.ctx.stop(Action.DRAIN, 1000)
    while not executor.shutdowns:
        threading.Event().wait(0.001)
    assert server.thread.is_alive()
    server.ctx.stop(Action.SIGTERM, 4)
    assert server.wait_end() == 0
    assert executor.shutdowns == [Action.DRAIN, Action.SIGTERM]


def test_the_last_stage_does_not_need_the_loop() -> None:
    """Kill runs on the thread that hears of it."""
    executor = FakeExecutor()
    server = Running(executor)
    server.wait_ready().close()
    server.ctx.stop(Action.SIGKILL, 2)
    assert executor.kills == 1
    assert server.wait_end() == 0


@pytest.mark.parametrize("action", [Action.DRAIN, Action.SIGTERM])
def test_a_stop_during_the_start(action: Action) -> None:
    """It ends at once, with 0: it was asked for."""
    server = Running(FakeExecutor())
    server.ctx.stop(action, 4)
    assert server.wait_end() == 0
    assert not server.ctx.is_ready.is_set()
    assert server.executor.shutdowns == [Action.SIGTERM]


def test_health_while_starting(capfd: pytest.CaptureFixture[str]) -> None:
    """Alive, not ready, and requests hear that it is worth coming back."""
    port = free_port()
    server = Running(FakeExecutor(instant=True), port=port)
    assert server.ctx.listening.wait(PATIENCE_S)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        assert client.get("/health/live").status_code == 200
        assert client.get("/health/ready").status_code == 503
        refused = client.post(PATH, json=body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "starting")
        assert "stopbath: ready" not in capfd.readouterr().err
        server.wait_ready().close()
        assert client.get("/health/ready").status_code == 200
    server.ctx.stop(Action.DRAIN)
    assert server.wait_end() == 0


def test_a_failed_start_is_told_readably(capfd: pytest.CaptureFixture[str]) -> None:
    """Exit 3, with the worker's own words and without a traceback of ours."""
    executor = FakeExecutor()
    executor.start_error = StartupError(KILLED._replace(phase="loading the model"))
    server = Running(executor)
    executor.loaded.set()
    assert server.wait_end() == 3
    said = capfd.readouterr().err
    assert "rank1 killed by SIGKILL while loading the model" in said
    assert "| bye" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("asked", [False, True])
def test_a_dead_engine_ends_the_server_with_4(asked: bool) -> None:  # noqa: FBT001
    """Whoever asked, and whatever the policy: the code says that the engine was dead."""
    server = Running(FakeExecutor(), on_engine_death="hold" if asked else "exit")
    with server.wait_ready() as client:
        answer = in_background(lambda: client.post(PATH, json=body()))
        assert server.executor.called.acquire(timeout=PATIENCE_S)
        server.executor.die()
        assert answer().json()["error"]["code"] == "worker_died"
        if asked:  # it stays up, and goes on saying why
            assert "SIGKILL" in client.get("/health").json()["cause"]
            assert server.thread.is_alive()
            server.ctx.stop(Action.DRAIN)
        assert server.wait_end() == 4
    assert "SIGKILL" in server.ctx.reports[0]["cause"]
    assert server.ctx.reports[0]["unfinished_requests"] == 1


def test_survivors_are_exit_5() -> None:
    """It comes before every other code."""
    executor = FakeExecutor()
    executor.report = FakeReport(survivors=("rank1",))
    server = Running(executor)
    server.wait_ready().close()
    executor.die()
    assert server.wait_end() == 5


def test_an_executor_that_never_returns_cannot_hold_the_server() -> None:
    """The wait for the stop is bounded too; the end is not called clean."""
    executor = FakeExecutor()
    server = Running(executor, drain_s=0.1, terminate_s=0.1, kill_s=0.1)
    server.wait_ready().close()
    blocked = threading.Event()
    executor.shutdown = lambda *_, **__: blocked.wait(60)  # type: ignore[method-assign]
    server.ctx.stop(Action.DRAIN)
    assert server.wait_end() == 1
    blocked.set()


@pytest.mark.parametrize("raises", [True, False])
def test_an_end_of_the_http_layer_stops_everything(
    raises: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A server without HTTP must not go on holding its devices."""

    async def broken(*_: Any, **__: Any) -> None:
        if raises:
            raise RuntimeError("no more file descriptors")

    monkeypatch.setattr("stopbath.server.serving.HttpServer.serve", broken)
    server = Running(FakeExecutor())
    assert server.wait_end() == 1
    assert server.executor.shutdowns == [Action.SIGTERM]
    assert ("no more file descriptors" in capfd.readouterr().err) == raises


def free_port() -> int:
    with listen("127.0.0.1", 0) as probe:
        return int(probe.getsockname()[1])


def test_a_taken_port_names_its_holder(capfd: pytest.CaptureFixture[str]) -> None:
    """One line with address, pid and command, before anything heavy is started."""
    with listen("127.0.0.1", 0) as taken:
        server = Running(FakeExecutor(), port=taken.getsockname()[1])
        assert server.wait_end() == 3
    said = capfd.readouterr().err
    assert f"cannot listen on 127.0.0.1:{server_port(said)}: Address already in use" in said
    assert f"held by pid {os.getpid()}: " in said
    assert not server.ctx.callbacks


def server_port(said: str) -> str:
    return said.partition("127.0.0.1:")[2].partition(":")[0]


def test_the_port_is_free_again_at_once() -> None:
    """Connections in TIME_WAIT do not keep a restart away."""
    server = Running(FakeExecutor(instant=True), port=(port := free_port()))
    with server.wait_ready() as client:
        client.post(PATH, json=body())
        server.ctx.stop(Action.DRAIN)
        assert server.wait_end() == 0
    listen("127.0.0.1", port).close()


def test_an_address_that_is_none() -> None:
    """A name that does not resolve is one line as well."""
    with pytest.raises(CannotListen, match=r"cannot listen on no\.such\.host\.invalid:80"):
        listen("no.such.host.invalid", 80)


def test_the_listener_is_not_inherited() -> None:
    """A rank that held it would accept connections that nobody serves."""
    with listen("127.0.0.1", 0) as listener:
        assert not listener.get_inheritable()
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@pytest.mark.parametrize("config", [{"ranks": 0}, {"ranks": "x"}, {"port": 70000}])
def test_what_cannot_be_is_exit_2(config: dict[str, Any]) -> None:
    """Usage errors end before anything is bound."""
    server = Running(FakeExecutor(), **config)
    assert server.wait_end() == 2


def test_exit_codes_take_precedence() -> None:
    """5 > 4 > 3 > 1 > 0."""
    order = [Ending.ASKED, Ending.ERROR, Ending.START_FAILED, Ending.ENGINE_DEAD, Ending.SURVIVORS]
    codes = [exit_code(set(order[: n + 1])) for n in range(len(order))]
    assert codes == [0, 1, 3, 4, 5]
    assert exit_code(set()) == 1


def test_a_full_stderr_never_blocks() -> None:
    """Lines are dropped and counted; whoever logs goes on."""
    reader, writer = os.pipe()
    lines = StderrLines(writer)
    for _ in range(3000):
        lines.write("x" * 1000)  # a pipe holds 65 of them, the queue 1000
    drained: list[bytes] = []

    def drain() -> None:
        while piece := os.read(reader, 1 << 16):
            drained.append(piece)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    while lines._lines.qsize() > 900:
        threading.Event().wait(0.001)
    lines.write("the last line")
    lines.close(PATIENCE_S)
    os.close(writer)
    thread.join(PATIENCE_S)
    os.close(reader)
    said = b"".join(drained)
    assert b"log lines were dropped" in said
    assert said.endswith(b"the last line\n")
