"""Sessions as tests open them, of whichever backend their folder tests."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import os
import pathlib
import shutil
import tempfile

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from uncut_mpi.api.lifetime import RANKS_PER_NODE
from uncut_mpi.model.ports import Net


def ranks_per_node(size: int) -> int:
    """Return how many of so many ranks are on a node, as the environment has sessions take them."""
    return min(size, int(os.environ.get(RANKS_PER_NODE) or size))


def memories(size: int) -> tuple[str, str, str]:
    """Return three kinds of memory for parts of a matrix; on several nodes none is shared, and two are the same."""
    return "device", "host", "shared" if ranks_per_node(size) == size else "host"


SHARED = pytest.param("shared", marks=pytest.mark.one_node("no memory is shared by all ranks"))
"""One of the kinds of memory, for what is made by each of them in turn."""


def uniform_on_nodes(size, *, _uniform=um.Machine.uniform, **about):
    """Return a machine of equal links on nodes, as the environment has sessions take them."""
    each = ranks_per_node(size)
    if each == size:
        return _uniform(size, **about)
    node_of = [rank // each for rank in range(size)]
    nodes = [_uniform(node_of.count(node), **about) for node in range(node_of[-1] + 1)]
    return um.Machine.joined(nodes, node_of, Net(10.0, 5e-6))


@pytest.fixture(scope="session", autouse=True)
def on_nodes():
    """Have all machines of equal links on such nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(um.Machine, "uniform", uniform_on_nodes)
        yield


@pytest.fixture(scope="session")
def open_session(backend_name):
    """Opens a session of its folder's backend on a machine of equal links, unless told else: (comm, **options)."""

    def opened(comm, **options) -> um.Session:
        return um.Session(
            comm, **{"backend": backend_name, "machine": um.Machine.uniform(comm.size), "timeout_s": 20, **options}
        )

    return opened


@pytest.fixture(autouse=True)
def released(request):
    """Release what a test leaves in the session of its module, if it has one."""
    yield
    session = request.node.funcargs.get("session")
    if session is not None and not session._gate.over:
        session._store.close()


@pytest.fixture(scope="module")
def machine_cache(comm, backend_name):
    """
    A cache directory that keeps this machine as measured now, gone afterwards.

    It counts as steady, however busy the machine was: where ranks share cores it seldom is, and every session of a
    test would measure it anew.
    """
    base = comm.bcast(tempfile.mkdtemp(prefix="uncut_mpi_cache_") if comm.rank == 0 else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", base)
        um.Session(comm, backend=backend_name, timeout_s=30).close()
    files = [*pathlib.Path(base).rglob("*.json")]  # nodes of other devices have their own
    collective_assert(comm, bool(files), "no machine was kept")
    comm.Barrier()
    for file in files if comm.rank == 0 else ():
        file.write_text(dataclasses.replace(um.Machine.from_json(file.read_text()), steady=True).to_json())
    comm.Barrier()
    yield base
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(base)


def open_descriptors() -> int:
    """Return how many descriptors this process has open."""
    gc.collect()  # what a closed session still refers to in a cycle
    return len(os.listdir("/proc/self/fd"))


def left_behind() -> collections.Counter[str]:
    """Return what this process has of files in /dev/shm, open files and mappings of ours, by their names."""
    gc.collect()  # what a closed session still refers to in a cycle
    with open("/proc/self/maps") as lines:
        found = [line.split()[-2] for line in lines if "memfd:uncut" in line]
    found += [name for name in os.listdir("/dev/shm") if name.startswith(f"uncut_mpi-{os.getpid()}-")]
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself is closed
            found.append(os.readlink(f"/proc/self/fd/{number}").partition("[")[0].removesuffix(" (deleted)"))
    return collections.Counter(found)


def hide_arrays(session: um.Session, monkeypatch, hidden=lambda array: True) -> None:
    """Make the session's backend say of arrays that are `hidden` that no peer can open them."""
    backend = session._backend
    adopt = backend.adopt

    def adopt_hidden(array):
        adopted = adopt(array)
        return dataclasses.replace(adopted, handle=None, offset_bytes=0, obstacle="hidden on purpose")

    monkeypatch.setattr(backend, "adopt", lambda array: adopt_hidden(array) if hidden(array) else adopt(array))


def refuse_pins(session: um.Session, monkeypatch, refused=lambda array: True) -> None:
    """Make the session's backend page-lock no arrays of callers that are `refused`."""
    backend, store = session._backend, session._store
    describe = store._grips.of_array

    def refuse(address, nbytes):
        raise um.PinError(f"{nbytes} bytes refused on purpose")

    def describe_refused(array, *arguments, **named):
        with monkeypatch.context() as patch:
            if refused(array):
                patch.setattr(backend, "pin", refuse)
            return describe(array, *arguments, **named)

    monkeypatch.setattr(store._grips, "of_array", describe_refused)
