"""What ps and doctor find, sorted without a host to look at."""

from __future__ import annotations

import pytest

from stopbath.devices import Claim, Device, Holder, LedgerAbsent
from stopbath.devices.fake import FakeLedger, FakeNvml
from stopbath.devices.nvml import NvmlLedger
from stopbath.lifecycle._leftovers import Left, Leftovers
from stopbath.lifecycle._runs import Identity, Run
from stopbath.survey.budget import divide
from stopbath.survey.doctor import examine, gpu
from stopbath.survey.finding import Finding
from stopbath.survey.known import Known, recognise
from stopbath.survey.listing import Listing, Sight, list_all, look
from stopbath.survey.processes import Process

HOST = "boot pid:[1]"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("command", "product", "role"),
    [
        ("VLLM::EngineCore", "vLLM", "worker"),
        ("VLLM::Worker_TP1", "vLLM", "worker"),
        ("/usr/bin/python3 /usr/local/bin/vllm serve m", "vLLM", "launcher"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vLLM", "launcher"),
        ("python3 /opt/bin/vllm serve m --omni", "vLLM-Omni", "launcher"),
        ("python -u -m vllm_omni.entrypoints.x", "vLLM-Omni", "launcher"),
        ("sglang::scheduler_TP0", "SGLang", "worker"),
        ("python -X dev -m sglang.launch_server", "SGLang", "launcher"),
        ("ray::Worker.run", "Ray", "worker"),
        ("/site-packages/ray/core/src/ray/raylet/raylet --x", "Ray", "worker"),
        ("/x/ray/core/src/ray/gcs/gcs_server", "Ray", "worker"),
        ("python /x/site-packages/ray/dashboard/dashboard.py", "Ray", "worker"),
        ("trtllm-serve m", "TensorRT-LLM", "launcher"),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", "Triton", "launcher"),
        ("/opt/tritonserver/backends/python/triton_python_backend_stub x", "Triton", "worker"),
        ("python /home/u/ComfyUI/main.py --listen", "ComfyUI", "launcher"),
        ("/usr/bin/python3.11 /v/bin/torchrun --nproc 2 t.py", "torchrun", "launcher"),
        ("python -m torch.distributed.run t.py", "torchrun", "launcher"),
        ("python -I -S /x/stopbath/lifecycle/_keeper.py 3", "Stopbath", "worker"),
    ],
)
def test_a_model_server_is_known_by_what_is_run(command: str, product: str, role: str) -> None:
    assert recognise(command.split()) == Known(product, role)


@pytest.mark.parametrize(
    "command",
    [
        "vim vllm.py",
        "grep -r sglang .",
        "tail -f /var/log/ray/raylet.out",
        "python -c import\\ vllm",
        "python /home/u/main.py",
        "bash -c vllm serve",
        "arrayd",
        "",
    ],
)
def test_what_only_mentions_one_is_none(command: str) -> None:
    assert recognise(command.split()) is None


def process(
    pid: int, ppid: int, command: str, *, start: int = 0, state: str = "sleeping"
) -> Process:
    argv = tuple(command.split())
    return Process(pid, ppid, start or pid, "u", argv, argv[0], state, 100.0 - pid / 10, pid * 1000)


def sight(*processes: Process, runs: tuple[Run, ...] = (), **more: object) -> Sight:
    facts = {
        "processes": {one.pid: one for one in processes},
        "ports": {},
        "runs": runs,
        "left": {},
        "devices": (),
        "claims": (),
        "holders": (),
        "host": HOST,
        "notes": (),
    }
    return Sight(**(facts | more))  # type: ignore[arg-type]


def run(*identities: Identity, live: bool = True) -> Run:
    return Run("p", "ab12", "serve", "serve", (), HOST, "now", identities, (), live)


def parts(listing: Listing) -> list[tuple[int, int, str]]:
    return [(one.pid, one.depth, one.part) for one in listing.runs[0].processes]


def test_a_run_is_a_tree_with_what_its_workers_started() -> None:
    seen = sight(
        process(1, 0, "init"),
        process(10, 1, "guardian"),
        process(11, 10, "keeper"),
        process(12, 11, "server"),
        process(13, 11, "rank"),
        process(14, 13, "ffmpeg"),
        process(20, 1, "somebody"),
        runs=(
            run(
                Identity("guardian", "serve", 10, 10),
                Identity("keeper", "keeper", 11, 11),
                Identity("worker", "server", 12, 12),
                Identity("worker", "rank0", 13, 13),
                Identity("worker", "rank1", 20, 19),  # dead; its number is somebody's now
            ),
        ),
        ports={12: [8000]},
        claims=(Claim(0, 13, 3 * GIB),),
    )
    listing = list_all(seen)
    assert parts(listing) == [
        (10, 0, "guardian"),
        (11, 1, "keeper"),
        (12, 2, "worker"),
        (13, 2, "worker"),
        (14, 3, "child"),
    ]
    server, rank = listing.runs[0].processes[2:4]
    assert server.ports == (8000,)
    assert (rank.name, rank.device_bytes, rank.devices) == ("rank0", 3 * GIB, ("device 0",))
    assert listing.foreign == ()


def test_the_program_of_a_group_is_shown_and_its_other_children_are_not() -> None:
    seen = sight(
        process(10, 1, "program"),
        process(11, 10, "keeper"),
        process(12, 11, "rank"),
        process(13, 10, "pool"),
        runs=(
            run(
                Identity("program", "g", 10, 10),
                Identity("keeper", "keeper", 11, 11),
                Identity("worker", "rank0", 12, 12),
            ),
        ),
    )
    assert [pid for pid, _, _ in parts(list_all(seen))] == [10, 11, 12]


def test_what_a_dead_run_left_is_marked_with_the_proof() -> None:
    dead = run(live=False)
    left = Leftovers(
        dead,
        (Left("sleep", "carries the run's mark", 30, 30),),
        (Left("shm /dev/shm/x", "recorded"),),
        (Left("bash", "another user's", 31, 31),),
    )
    seen = sight(process(30, 1, "sleep"), runs=(dead,), left={"ab12": left})
    (found,) = list_all(seen).runs
    assert not found.live
    assert found.processes[0].orphan == "its run is dead; carries the run's mark"
    assert found.resources == ("shm /dev/shm/x",)
    assert found.untouched == ("bash: another user's",)


def test_a_worker_whose_launcher_is_gone_is_an_orphan_and_a_service_is_none() -> None:
    seen = sight(
        process(1, 0, "systemd"),
        process(5, 1, "systemd"),
        process(30, 5, "VLLM::EngineCore"),
        process(31, 30, "VLLM::Worker_TP0"),
        process(32, 1, "python -m vllm.entrypoints.openai.api_server"),
        process(33, 32, "VLLM::EngineCore"),
        process(34, 2, "ray::IDLE"),
        process(35, 32, "VLLM::EngineCore", state="zombie"),
    )
    orphans = {one.pid: one.orphan for one in list_all(seen).foreign}
    assert "its parent is 5 (systemd)" in orphans[30]
    assert orphans[31] == orphans[32] == orphans[33] == ""
    assert "nobody" in orphans[34]
    assert orphans[35] == "dead, and not reaped by its parent 32"


def test_a_launcher_that_is_the_containers_first_process_makes_no_orphans() -> None:
    seen = sight(process(1, 0, "vllm serve m"), process(7, 1, "VLLM::EngineCore"))
    assert [one.orphan for one in list_all(seen).foreign] == ["", ""]


def test_who_holds_a_device_is_shown_whatever_it_is_called() -> None:
    seen = sight(
        process(40, 1, "trainer"),
        process(41, 1, "viewer"),
        process(42, 1, "editor"),
        holders=(Holder(40, ("/dev/nvidia0",)),),
        claims=(Claim(1, 41, None), Claim(0, 99, 5)),
    )
    listing = list_all(seen)
    found = {one.pid: (one.part, one.device_bytes, one.devices) for one in listing.foreign}
    assert found == {
        40: ("device holder", None, ("/dev/nvidia0",)),
        41: ("device holder", 0, ("device 1",)),
    }
    assert any("99" in note for note in listing.notes)


def test_a_listing_looks_at_this_host_with_any_ledger() -> None:
    ledger = FakeLedger()
    listing = list_all(look(0.0, ledger))
    assert [device.name for device in listing.devices] == ["Fake device"]
    assert listing.to_dict()["schema"] == "stopbath.ps/1"


def test_a_stop_that_fits_and_one_that_does_not() -> None:
    phases, (docker, kubernetes) = divide(5, 2, 2)
    assert [(it.name, it.from_s, it.to_s) for it in phases] == [
        ("drain", 0, 5),
        ("SIGTERM", 5, 7),
        ("SIGKILL", 7, 9),
        ("report", 9, 10),
    ]
    assert (docker.cut, kubernetes.cut) == ("", "")
    _, (docker, kubernetes) = divide(20, 7, 4)
    assert docker.cut == "drain"
    assert kubernetes.cut == "SIGKILL"
    assert kubernetes.remedy == "--drain 18, or terminationGracePeriodSeconds: 32"
    assert docker.remedy == "docker stop --timeout 32"


def test_one_check_that_fails_hides_no_other() -> None:
    def broken() -> Finding:
        raise ValueError("no such file")

    def fine() -> Finding:
        return Finding("fine", "good", "is")

    first, second = examine((broken, fine))
    assert first.found == "could not be checked: ValueError('no such file')"
    assert second.topic == "fine"


def test_every_limit_that_costs_something_has_a_remedy() -> None:
    for found in examine():
        assert "could not be checked" not in found.found
        assert (found.level == "good") == (not found.consequence), found
        assert bool(found.consequence) == bool(found.remedy), found


def test_the_doctor_reads_a_ledger() -> None:
    fake = FakeNvml(FakeLedger(devices=2))
    assert gpu(NvmlLedger(fake)).level == "good"
    fake.fail["nvmlDeviceGetCount"] = fake.NVMLError("Driver Not Loaded")
    found = gpu(NvmlLedger(fake))
    assert (found.level, found.found) == ("warning", "NVML: Driver Not Loaded")


def test_nvml_counts_per_process_and_says_when_it_cannot() -> None:
    fake = FakeNvml(FakeLedger(devices=3))
    fake.ledger.hold(7, 2 * GIB, device=1)
    fake.ledger.hold(8, None, device=1)
    ledger = NvmlLedger(fake)
    assert ledger.claims() == [Claim(1, 7, 2 * GIB), Claim(1, 8, None)]
    assert ledger.devices()[1] == Device(1, "FAKE-1", "Fake device", 24 * GIB, 2 * GIB)
    fake.lost.add(0)
    assert [one.number for one in ledger.devices()] == [1, 2]
    fake.fail["nvmlDeviceGetComputeRunningProcesses"] = fake.NVMLError("Unknown Error")
    with pytest.raises(LedgerAbsent, match="Unknown Error"):
        ledger.claims()
    ledger.close()
    assert fake.open == 0


def test_no_driver_is_said_and_is_no_error_of_a_kind_nobody_catches() -> None:
    fake = FakeNvml(FakeLedger())
    fake.fail["nvmlInit"] = fake.NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    with pytest.raises(LedgerAbsent, match="Not Found"):
        NvmlLedger(fake)
