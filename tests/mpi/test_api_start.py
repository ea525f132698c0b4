"""The start of a session: backend "cuda" never falls back, "auto" says why it did, and failures are everybody's."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from uncut_mpi.api import start
from uncut_mpi.device.host import HostBackend
from uncut_mpi.model.arguments import counted


class Pretended(HostBackend):
    """Stands for a GPU: a host backend that remembers its ordinal and whether it was closed."""

    made: list[Pretended] = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, ordinal: int) -> None:
        super().__init__(0, 1)
        self.ordinal, self.closed = ordinal, False
        self.made.append(self)

    def close(self) -> None:
        super().close()
        self.closed = True


@pytest.fixture
def gpus(monkeypatch, comm):
    """Pretend that this rank sees these GPUs."""
    Pretended.made.clear()

    def see(uuids, why=""):
        monkeypatch.setattr(start, "visible_gpus", lambda: (uuids, why))
        monkeypatch.setattr(start, "make_cuda", Pretended)

    return see


def attempt(comm, **options):
    """Return (backend kind, reason) of a session, or (error type, message), the same on all ranks or fail."""
    machine = um.Machine.uniform(comm.size)
    try:
        with um.Session(comm, machine=machine, **options) as session:
            found = (session.backend_name, session.backend_reason)
    except um.UncutError as error:
        found = (type(error).__name__, str(error))
    collective_assert(comm, len(set(comm.allgather(found))) == 1, f"ranks differ; here {found}")
    return found


@pytest.mark.mpi(min_size=2)
def test_backend_cuda_never_falls_back_for_one_rank_without_gpu(comm, gpus):
    if comm.rank == comm.size - 1:
        gpus([], "hidden from this rank")
    else:
        gpus([f"GPU-{comm.rank}"])
    kind, message = attempt(comm, backend="cuda")
    wanted = f"rank {comm.size - 1} sees no GPU (hidden from this rank)"
    collective_assert(comm, kind == "TopologyError" and wanted in message and not Pretended.made, message)


def test_auto_says_why_it_fell_back(comm, gpus):
    gpus([], "no CUDA driver is installed")
    kind, reason = attempt(comm, backend="auto")
    collective_assert(comm, kind == "host" and "rank 0 sees no GPU (no CUDA driver is installed)" in reason, reason)


def test_on_this_machine_auto_takes_what_visible_gpus_allows(comm):
    seen = comm.allgather(start.visible_gpus())
    kind, reason = attempt(comm, backend="auto")
    if not all(uuids for uuids, _ in seen):
        first = next(rank for rank, (uuids, _) in enumerate(seen) if not uuids)
        collective_assert(comm, kind == "host" and f"rank {first} sees no GPU" in reason, f"{kind}: {reason}")
        kind, message = attempt(comm, backend="cuda")
        collective_assert(comm, kind == "TopologyError" and f"rank {first}" in message, f"{kind}: {message}")


def test_auto_takes_the_gpus_when_every_rank_has_one(comm, gpus):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])
    _, reason = attempt(comm, backend="auto")
    ordinals = [made.ordinal for made in Pretended.made]
    collective_assert(comm, "GPU of its own" in reason and ordinals == [comm.rank], f"{reason}, {ordinals}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("split", ["halves", "alternating", "alone", "reversed"])
def test_a_process_has_its_gpu_in_every_session(comm, gpus, split):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])
    colour = {"halves": comm.rank * 2 // comm.size, "alternating": comm.rank % 2, "alone": comm.rank, "reversed": 0}
    part = comm.Split(colour[split], key=-comm.rank)
    for communicator in (part, comm):
        machine = um.Machine.uniform(communicator.size)
        with um.Session(communicator, backend="cuda", machine=machine):
            ordinals = comm.allgather(Pretended.made[-1].ordinal)
            collective_assert(comm, ordinals == list(range(comm.size)), f"devices of all ranks: {ordinals}")
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_named_devices_are_those_of_the_session_s_ranks(comm, gpus):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])
    part = comm.Split(0, key=-comm.rank)
    with um.Session(part, backend="cuda", machine=um.Machine.uniform(comm.size), devices=range(comm.size)) as session:
        found = Pretended.made[-1].ordinal
        collective_assert(comm, found == session.rank == comm.size - 1 - comm.rank, f"device {found}")
    part.Free()


@pytest.mark.mpi(min_size=2)
def test_auto_falls_back_and_cuda_refuses_when_ranks_outnumber_gpus(comm, gpus):
    gpus([f"GPU-{rank}" for rank in range(comm.size - 1)])
    if comm.size == 2:
        parts = ["ranks 0 and 1", "GPU-0"]  # the one visible device of both
    else:
        parts = [f"rank {comm.size - 1}", f"sees {comm.size - 1}"]
    kind, message = attempt(comm, backend="cuda")
    collective_assert(comm, kind == "TopologyError" and all(part in message for part in parts), f"{kind}: {message}")
    kind, reason = attempt(comm, backend="auto")
    collective_assert(comm, kind == "host" and all(part in reason for part in parts), f"{kind}: {reason}")
    collective_assert(comm, not Pretended.made, "a GPU was opened")


def test_auto_refuses_named_devices_that_there_are_not(comm, gpus):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])
    kind, message = attempt(comm, backend="auto", devices=[*range(comm.size - 1), comm.size])
    good = kind == "TopologyError" and f"would need GPU {comm.size}" in message and "leave devices" in message
    collective_assert(comm, good, f"{kind}: {message}")
    collective_assert(comm, not Pretended.made, "a GPU was opened")


@pytest.mark.mpi(min_size=2)
def test_ranks_share_a_gpu_only_when_allowed(comm, gpus):
    gpus(["GPU-0"])
    kind, message = attempt(comm, backend="cuda")
    good = kind == "TopologyError" and "ranks 0 and 1" in message and "allow_shared_gpu" in message
    collective_assert(comm, good, f"{kind}: {message}")
    attempt(comm, backend="cuda", allow_shared_gpu=True)
    collective_assert(comm, [made.ordinal for made in Pretended.made] == [0], str(Pretended.made))


@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_too_few_named_devices_are_refused_by_every_backend_that_uses_them(comm, gpus, backend):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])
    kind, message = attempt(comm, backend=backend, devices=range(comm.size - 1))
    wanted = f"names {counted(comm.size - 1, 'device')} for {counted(comm.size, 'rank')}: name one for every rank"
    good = kind == "ParamError" and wanted in message
    collective_assert(comm, good, f"{kind}: {message}")


def test_an_unknown_backend_is_refused_with_those_there_are(comm):
    kind, message = attempt(comm, backend="opencl")
    good = kind == "ParamError" and all(name in message for name in ("'opencl'", "auto", "cuda", "host"))
    collective_assert(comm, good, f"{kind}: {message}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "common", "odd"),
    [
        ("backend", "host", "auto"),
        ("backend", "host", lambda rank, ranks: HostBackend(rank, ranks)),
        ("devices", None, [3, 2, 1, 0]),
        ("allow_shared_gpu", False, True),
    ],
    ids=["backend", "own backend", "devices", "allow_shared_gpu"],
)
def test_ranks_that_ask_for_different_devices_get_one_error(comm, name, common, odd):
    mine = odd if comm.rank == comm.size - 1 else common
    kind, message = attempt(comm, **{"backend": "host", name: mine})
    collective_assert(comm, kind == "RankMismatchError" and f"rank {comm.size - 1}" in message, f"{kind}: {message}")


def test_a_device_that_cannot_be_opened_on_one_rank_is_everybodys_error_and_closes_the_others(comm, gpus, monkeypatch):
    gpus([f"GPU-{rank}" for rank in range(comm.size)])

    def fail_on_last(ordinal):
        if ordinal == comm.size - 1:
            raise um.DeviceError("this device is broken on purpose")
        return Pretended(ordinal)

    monkeypatch.setattr(start, "make_cuda", fail_on_last)
    kind, message = attempt(comm, backend="cuda")
    collective_assert(comm, kind == "DeviceError" and "on purpose" in message, f"{kind}: {message}")
    closed = [made.closed for made in Pretended.made]
    collective_assert(comm, closed == [True] * (comm.rank < comm.size - 1), f"closed {closed}")


def test_a_device_that_cannot_be_identified_on_one_rank_is_everybodys_error(comm):
    class Anonymous(Pretended):
        def identity(self):
            if comm.rank == comm.size - 1:
                raise um.DeviceError("no identity on purpose")
            return super().identity()

    Pretended.made.clear()
    kind, message = attempt(comm, backend=lambda rank, _: Anonymous(rank))
    collective_assert(comm, kind == "DeviceError" and "on purpose" in message, f"{kind}: {message}")
    collective_assert(comm, [one.closed for one in Pretended.made] == [True], "the device was left open")
