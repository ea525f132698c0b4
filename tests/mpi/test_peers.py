"""When a session opens, ranks check that they reach each other's memory: what goes astray is found and named."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from uncut_mpi.api import start
from uncut_mpi.device.host import HostBackend
from uncut_mpi.device.interface import Allocation, DeviceIdentity
from uncut_mpi.device.views import bytes_at
from uncut_mpi.errors import DeviceError

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.one_node("memory of peers")]


class Astray(HostBackend):
    """Copies to or from peers may go wrong, and are counted; new memory has what the first one freed had."""

    copies, left = 0, b""

    def __init__(self, rank: int, size: int, fault: str = "") -> None:
        super().__init__(rank, size)
        self._fault, self._mirrors = fault, {}

    def allocate(self, nbytes: int) -> Allocation:
        made = super().allocate(nbytes)
        bytes_at(made.address, nbytes)[: len(Astray.left)] = memoryview(Astray.left)[:nbytes]
        return made

    def free(self, allocation: Allocation) -> None:
        Astray.left = Astray.left or bytes_at(allocation.address, allocation.nbytes).tobytes()
        super().free(allocation)

    def open(self, handle: bytes) -> int:
        mapped = super().open(handle)
        if self._fault != "private mirror":
            return mapped
        mirror = self.allocate(self._peers[mapped].nbytes).address
        self._mirrors[mirror] = mapped
        return mirror

    def close_peer(self, address: int) -> None:
        super().close_peer(self._mirrors.pop(address, address))

    def copy_matrix(self, destination, source, width_bytes, columns, pitch_bytes) -> None:
        Astray.copies += 1
        opened = list(self._peers.values())
        pushes = any(one.address <= destination < one.address + one.nbytes for one in opened)
        if self._fault == ("lost write" if pushes else "lost read"):
            return
        if pushes and self._fault == "a word further":
            destination, width_bytes = destination + 8, width_bytes - 8
        if pushes and self._fault == "to another rank":
            turned = {one.address: other.address for one, other in zip(opened, opened[1:] + opened[:1], strict=True)}
            base = max(address for address in turned if address <= destination)
            destination += turned[base] - base
        if self._fault == "raises":
            raise um.DeviceError("refused on purpose")
        super().copy_matrix(destination, source, width_bytes, columns, pitch_bytes)
        if pushes and self._fault == "a bit turned":
            bytes_at(destination, width_bytes)[-1] ^= 128


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Nothing has been checked yet, and nothing that a test checks counts afterwards."""
    monkeypatch.setattr(start, "_reached", {})
    Astray.copies, Astray.left = 0, b""


def opened(comm, fault: str = "", **options) -> um.Session:
    """Return a session in which the last rank's copies go wrong in some way."""
    guilty = comm.rank == comm.size - 1

    def make(rank, size):
        return Astray(rank, size, fault if guilty else "")

    return um.Session(comm, **{"backend": make, "machine": um.Machine.uniform(comm.size), **options})


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("lost write", r"(\d+) of \1 words that rank {guilty} wrote to rank 0 "),
        ("lost read", r"(\d+) of \1 words that rank {guilty} read from rank 0 "),
        ("private mirror", r"words that rank {guilty} wrote to rank 0 .* words that rank {guilty} read from rank 0 "),
        ("a word further", r"(\d+) of \1 words that rank {guilty} wrote to rank 0 "),
        ("a bit turned", r"were 1 of \d+ words that rank {guilty} wrote to rank 0 "),
        ("to another rank", r"(\d+) of \1 words that rank {guilty} wrote to rank 0 "),
    ],
)
def test_copies_that_go_astray_are_one_error_that_names_the_ranks(comm, fault, wrong):
    if fault == "to another rank" and comm.size == 2:
        pytest.skip("there is no other one")
    guilty = comm.size - 1
    with opened(comm):
        pass
    start._reached.clear()  # as in a process that is new, on memory of this one
    expect(comm, um.TopologyError, ["IOMMU", "ACS", "NCCL", "--devices"], lambda: opened(comm, fault))
    with pytest.raises(um.TopologyError) as caught:  # what failed is not taken for good
        opened(comm, fault)
    found = str(caught.value)
    collective_assert(comm, re.search(wrong.format(guilty=guilty), found), found)
    others = re.findall(r"rank (\d+) (?:wrote to|read from)", found)
    collective_assert(comm, set(others) == {str(guilty)}, found)
    with opened(comm, fault, check_peers=False):
        pass
    with opened(comm):
        pass


def test_a_copy_that_fails_is_everybody_s_error(comm):
    expect(comm, um.DeviceError, [f"rank {comm.size - 1}: refused on purpose"], lambda: opened(comm, "raises"))


def test_devices_are_checked_once_in_these_processes(comm):
    with opened(comm):
        first = Astray.copies
    with opened(comm), opened(comm, check_peers=False):
        again = Astray.copies
    collective_assert(comm, (first, again) == (2 * comm.size - 2,) * 2, f"{first} copies, then {again}")


def test_ranks_of_which_one_has_not_checked_before_check_again(comm):
    half = comm.Split(comm.rank == 0)
    with opened(half):
        pass
    alone = Astray.copies
    with opened(comm):
        together = Astray.copies - alone
    with opened(half):
        again = Astray.copies - alone - together
    half.Free()
    wanted = 2 * (half_size(comm) - 1), 2 * comm.size - 2, 0
    collective_assert(comm, (alone, together, again) == wanted, f"{alone}, {together}, {again} copies")
    if comm.rank == 0:
        start._reached.clear()  # as in a process that is new
    with opened(comm):
        pass
    collective_assert(comm, Astray.copies == alone + 2 * together, f"{Astray.copies} copies")


def half_size(comm) -> int:
    return 1 if comm.rank == 0 else comm.size - 1


def test_ranks_agree_on_whether_to_check(comm):
    expect(
        comm, um.RankMismatchError, ["check_peers: False on rank 0"], lambda: opened(comm, check_peers=comm.rank != 0)
    )
    expect(comm, um.ParamError, ["check_peers"], lambda: opened(comm, check_peers="yes"))


class Apart(HostBackend):
    """A device whose neighbours, by number, say that they cannot use each other's memory; it may fail."""

    fails = False

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._number = rank

    def identity(self) -> DeviceIdentity:
        others = frozenset(f"device {self._number + step}" for step in (-1, 1))
        return dataclasses.replace(super().identity(), uuid=f"device {self._number}", unreached=others)

    def open(self, handle: bytes) -> int:
        if Apart.fails:
            raise DeviceError("memory of a peer was opened")
        return super().open(handle)


def test_devices_without_peer_access_are_taken_for_nodes_and_products_are_right(comm, monkeypatch, caplog):
    monkeypatch.setattr(Apart, "fails", comm.size == 2)
    with um.Session(comm, backend=Apart) as session:
        wanted = [rank % 2 for rank in range(comm.size)]
        rows, cols = um.Layout.rows(), um.Layout.cols()
        a, b, c = (session.empty((60, 60), "f64", layout) for layout in (rows, cols, rows))
        rng = np.random.default_rng(3)
        values = [rng.random((60, 60)) for _ in range(2)]
        for matrix, value in zip((a, b), values, strict=True):
            here = np.ix_(*matrix.layout.indices(matrix.shape, session.rank, num_ranks=session.size))
            matrix.local[...] = value[here]
        session.gemm(a, b, c)
        here = np.ix_(*rows.indices((60, 60), session.rank, num_ranks=session.size))
        good = np.allclose(c.local, (values[0] @ values[1])[here], rtol=1e-13)
        good &= session.machine.node_of.tolist() == wanted
        good &= (comm.rank > 0) ^ ("no peer access" in caplog.text)
    collective_assert(comm, bool(good), f"{session.machine.node_of} {caplog.text}")
