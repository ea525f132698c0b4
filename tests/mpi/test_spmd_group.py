"""Groups: their own communicator, typed collectives, waits that end."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest

from tests.helpers.collective import allgather, carried, expect
from uncut_mpi.errors import ParamError, PeerFailedError, StallError, TopologyError
from uncut_mpi.spmd import runtime
from uncut_mpi.spmd.group import _EACH_BYTES, _FIRST_BYTES, Group, _forget_ended


def test_a_group_knows_its_ranks_and_nodes(comm, agree_all, group):
    agree_all((group.rank, group.size) == (comm.rank, comm.size), (group.rank, group.size))
    agree_all(group.node_of[group.rank] == group.node and group.num_nodes == max(group.node_of) + 1, group.node_of)
    agree_all(group.node_of.count(group.node) == group.local_size > group.local_rank, group.node_of)


def test_the_program_s_own_messages_are_untouched(comm, agree_all, group):
    from mpi4py import MPI

    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    request = comm.isend(comm.rank, right, tag=0)
    for _ in range(3):
        group.barrier()
    agree_all(group.allgather_objects(group.rank) == list(range(group.size)))
    received = comm.recv(source=left, tag=0, status=MPI.Status())
    request.wait()
    agree_all(received == left, received)


def test_what_is_no_intracommunicator_is_refused(agree_all):
    from mpi4py import MPI

    found = []
    for wrong in (None, 3, MPI.COMM_NULL):
        with pytest.raises(ParamError) as error:
            Group(wrong)
        found.append(str(error.value))
    agree_all("NoneType" in found[0] and "COMM_NULL" in found[2], found)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, *range(_FIRST_BYTES - 40, _FIRST_BYTES), 3_000_001])
def test_bytes_are_broadcast_and_counted(comm, agree_all, group, nbytes):
    data = np.random.default_rng(nbytes).bytes(nbytes)
    before = group.bytes_broadcast
    received = group.from_root(lambda: data)
    agree_all(received == data and type(received) is bytes)
    agree_all(nbytes < group.bytes_broadcast - before < nbytes + 100, group.bytes_broadcast)


def test_arrays_of_one_shape_are_gathered(comm, agree_all, group):
    mine = np.random.default_rng(comm.rank).uniform(size=(3, 2))
    everyone = group.allgather_bytes(mine[:, ::-1])
    wanted = [np.random.default_rng(rank).uniform(size=(3, 2))[:, ::-1] for rank in range(comm.size)]
    agree_all(np.array_equal(everyone, wanted), everyone)


@pytest.mark.parametrize("length", [lambda rank: 0, lambda rank: rank * 37, lambda rank: 100_000 if rank == 0 else 0])
def test_byte_strings_of_different_lengths_are_gathered(comm, agree_all, group, length):
    wanted = [np.random.default_rng(rank).bytes(length(rank)) for rank in range(comm.size)]
    agree_all(group.allgather_objects(wanted[comm.rank]) == wanted)


def test_so_are_those_that_just_fit_the_first_message(comm, agree_all, group):
    for nbytes in range(_EACH_BYTES - 40, _EACH_BYTES + 1):
        wanted = [np.random.default_rng(rank).bytes(nbytes - (rank > 0)) for rank in range(comm.size)]
        agree_all(group.allgather_objects(wanted[comm.rank]) == wanted)


def test_an_object_that_cannot_be_sent_is_an_error_on_all_ranks(comm, agree_all, group):
    call = functools.partial(group.allgather_objects, lambda: 1 if comm.rank == comm.size - 1 else 2)
    expect(comm, PeerFailedError, ["rank 0 could not send"], call)
    agree_all(group.allgather_objects(comm.rank) == list(range(comm.size)))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_ends_the_wait_and_is_named(comm, agree_all):
    group = Group(comm)
    late = comm.size - 1
    found, refused = "", ""
    if comm.rank != late:
        started = time.monotonic()
        try:
            group.barrier("opening barrier", timeout_s=0.3)
        except StallError as error:
            found = str(error)
        assert time.monotonic() - started >= 0.3
        try:
            group.barrier()
        except StallError as error:
            refused = str(error)
    wanted = f"opening barrier: rank {comm.rank} of {comm.size} waited 0.3 s for other ranks;"
    agree_all(comm.rank == late or found.startswith(wanted), found)
    agree_all(comm.rank == late or (group.stalled and "never ended" in refused), refused)
    if comm.rank == late:
        group.barrier()  # so that MPI can finalise; the others have given up
    agree_all(True)
    if comm.rank != late:
        group.free()
        group.free()


def test_what_a_thread_waits_for_no_other_one_ends(comm, agree_all, group, monkeypatch):
    """Another thread that opens a group looks after operations that nobody waits for any more."""
    usual, last = Group.watch, comm.size - 1

    def late(own, done, *about, **named):
        allgather(comm, None)  # so that by now the operation can end
        time.sleep(0.05)
        _forget_ended()
        return usual(own, done, *about, **named)

    class Slow:
        """A request that is not done at first."""

        def __init__(self, request):
            self.request, self.asked = request, 0

        def Test(self):
            self.asked += 1
            return self.asked > 1 and self.request.Test()

    monkeypatch.setattr(Group, "watch", late)
    number, everyone = np.array([comm.rank]), np.empty(comm.size, np.int64)
    asked = []

    def begin():
        asked.append(Slow(comm.Iallgather(number, everyone)))
        return asked[-1]

    found = ""
    try:
        group.wait(begin, "a test", 20, (number, everyone))
    except KeyError as error:
        found = repr(error)
    agree_all(not found and everyone[last] == last and asked[0].asked >= 2, f"{found} {everyone}")


def test_a_freed_group_says_so(comm, agree_all):
    group = Group(comm)
    group.free()
    with carried(comm), pytest.raises(ParamError, match="freed"):
        group.barrier()


def test_a_second_thread_needs_an_mpi_for_threads(comm, agree_all, group, monkeypatch):
    class SingleThreaded:
        def __getattr__(self, name):
            return getattr(runtime.MPI, name)

    pretended = SingleThreaded()
    pretended.Query_thread = lambda: runtime.MPI.THREAD_FUNNELED
    found = []

    def body():
        try:
            group.barrier()
        except TopologyError as error:
            found.append(str(error))

    real = runtime.MPI
    with monkeypatch.context() as patch:
        SingleThreaded.__getattr__ = lambda self, name: getattr(real, name)
        patch.setattr(runtime, "MPI", pretended)
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(20)
    agree_all(len(found) == 1 and "'funneled'" in found[0] and "thread_level" in found[0], found)
    group.barrier()


def test_a_wait_hands_the_core_over(comm, agree_all, group):
    # A waiting rank must use little of a core once the others take long: that is what lets them work.
    group.barrier()
    if comm.rank == 0:
        time.sleep(1.0)
    used = time.process_time()
    group.barrier()
    used = time.process_time() - used
    slept = allgather(comm, used)
    agree_all(all(one < 0.15 for one in slept[1:]), slept)


def test_the_number_on_the_node_is_that_of_this_job(comm, agree_all, group):
    mine = runtime.node_rank()
    numbers = [theirs for node, theirs in allgather(comm, (group.node, mine)) if node == group.node]
    agree_all(sorted(numbers) == list(range(group.local_size)), numbers)
