"""The same value or the same error on all ranks."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest

from tests.helpers.collective import allgather, carried
from tests.helpers.hostile import interrupt
from uncut_mpi.errors import CapacityError, ParamError, PeerFailedError, RankMismatchError, StallError
from uncut_mpi.spmd import agreement, exchange, meetings
from uncut_mpi.spmd.group import Group
from uncut_mpi.units import name_ranks


def raised(body):
    """Return (type name, message) of what `body` raises, or ("", "")."""
    try:
        body()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def call_exchange(group):
    """A `CallExchange` in memory of its own, which its arrays keep."""
    nbytes = meetings.memory_bytes(group)
    room = exchange.shared_segment(group, nbytes, "a test").array(np.uint8, nbytes)
    return meetings.CallExchange(group, room)


def same_everywhere(comm, agree_all, found, kind, *parts):
    agree_all(found[0] == kind.__name__ and all(part in found[1] for part in parts), found)
    agree_all(len(set(allgather(comm, found))) == 1, found)


@pytest.mark.mpi(min_size=3)
def test_a_mismatch_lists_every_rank_and_its_value_on_all_ranks(comm, agree_all, group):
    value = 7 if comm.rank == comm.size - 1 else 5
    found = raised(lambda: agreement.agree(group, bytes([value]), lambda: {"k": 3, "m": value}))
    last = comm.size - 1
    same_everywhere(comm, agree_all, found, RankMismatchError, f"values: m: 7 on rank {last}, 5 on the others;")


@pytest.mark.mpi(min_size=2)
def test_different_values_that_print_alike_are_told_apart(comm, agree_all, group):
    found = raised(lambda: agreement.agree(group, bytes([comm.rank % 2]), lambda: {"alpha": 1.0}))
    same_everywhere(comm, agree_all, found, RankMismatchError, "digest: ", " (alpha=1.0) on rank")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("there", [(77,), (4, 999)], ids=str)
def test_of_long_values_the_elements_that_differ_are_named(comm, agree_all, group, there):
    values = np.zeros((7, 1000)[2 - len(there) :], ">f4")
    if comm.rank == 1:
        values[there], values[-1] = 1.5, 9
    values[0] = -0.0 if comm.rank else 0.0
    found = raised(lambda: agreement.agree(group, bytes([comm.rank == 1]), lambda: {"x": {"y": values}}))
    where = ", ".join(map(str, there))
    parts = (f"values: x['y'][{where}]: ", "1.5 on rank 1", "0.0 on ")
    same_everywhere(comm, agree_all, found, RankMismatchError, *parts)
    found = raised(lambda: agreement.agree(group, bytes([comm.rank]), lambda: {"x": values[comm.rank :]}))
    same_everywhere(comm, agree_all, found, RankMismatchError, "x: float32 array of shape (")
    found = raised(lambda: agreement.agree(group, bytes([comm.rank]), lambda: {"x": [comm.rank] * 500}))
    same_everywhere(comm, agree_all, found, RankMismatchError, ": x[0]: 0 on rank 0, 1 on ", "; and 484 more; pass")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("here", "there", "where", "shown"),
    [
        (1, "1", "", ("1", "'1'")),
        (0.1, np.float32(0.1), "", ("0.1 (float)", "0.1 (float32)")),
        (10**5000, 10**5000 + 1, "", (f"{10**5000:#x}", f"{10**5000 + 1:#x}")),
        ({"a": 1, "b": {"c": [1, [2]]}}, {"a": 1, "b": {"c": [1, [3]]}}, "['b']['c'][1]", ("[2]", "[3]")),
        ({"a": [1, []]}, {"a": [1]}, "['a']", ("list of 2", "[1]")),
    ],
    ids=["texts", "types", "long numbers", "nested", "lengths"],
)
def test_what_differs_is_named_and_shown_as_different(comm, agree_all, group, here, there, where, shown):
    mine = there if comm.rank == 1 else here
    found = raised(lambda: agreement.agree(group, bytes([comm.rank == 1]), lambda: {"t": mine}))
    parts = (f"values: t{where}: ", f"{shown[0]} on ", f"{shown[1]} on rank 1")
    same_everywhere(comm, agree_all, found, RankMismatchError, *parts)


@pytest.mark.mpi(min_size=2)
def test_a_value_that_cannot_be_shown_still_gives_the_mismatch(comm, agree_all, group):
    def describe():
        if comm.rank == 0:
            raise ValueError("no text")
        return {"k": "fine"}

    found = raised(lambda: agreement.agree(group, bytes([comm.rank]), describe))
    same_everywhere(comm, agree_all, found, RankMismatchError, "cannot be shown: no text", "fine")


def test_the_error_of_one_rank_is_raised_on_all_and_names_it(comm, agree_all, group):
    for guilty in {0, comm.size - 1}:
        error = CapacityError("8 bytes needed, 4 available") if comm.rank == guilty else None
        found = raised(lambda error=error: agreement.collective_result(group, error, "a test"))
        wanted = f"rank {guilty}: 8 bytes" if comm.size > 1 else "8 bytes"
        same_everywhere(comm, agree_all, found, CapacityError, wanted)


def test_an_error_that_ranks_share_is_not_chained_to_itself(comm, agree_all, group):
    def fail():
        raise CapacityError("8 bytes needed, 4 available")

    def together(guilty):
        with agreement.collective(group, "a test"):
            if guilty in (comm.rank, None):
                fail()

    calls = [lambda: together(None), lambda: together(comm.size - 1), lambda: group.from_root(fail)]
    for call in calls:
        with pytest.raises(CapacityError) as found:
            call()
        error = found.value
        agree_all(error.__cause__ is None, repr(error.__cause__))
        agree_all(error.__context__ is None or error.__suppress_context__, repr(error.__context__))


def test_one_error_of_all_ranks_names_none(comm, agree_all, group):
    found = raised(lambda: agreement.collective_result(group, ParamError("k = -1"), "a test"))
    agree_all(found == ("ParamError", "k = -1"), found)


@pytest.mark.mpi(min_size=3)
def test_of_several_errors_the_lowest_rank_s_is_raised(comm, agree_all, group):
    error = {1: ParamError("one"), 2: CapacityError("two")}.get(comm.rank)
    found = raised(lambda: agreement.collective_result(group, error, "a test"))
    agree_all(found == ("ParamError", "rank 1: one"), found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_a_foreign_error_stays_itself_at_home_and_is_a_peer_s_failure_elsewhere(comm, agree_all, group, kind):
    def body():
        with agreement.collective(group, "a test"):
            if comm.rank == 1:
                raise kind("oh")

    found = raised(body)
    wanted = (kind.__name__, "oh") if comm.rank == 1 else ("PeerFailedError", f"rank 1 raised {kind.__name__}: oh")
    agree_all(found == wanted, found)


def test_an_agreed_error_passes_an_outer_block_unchanged(comm, agree_all, group):
    def body():
        with agreement.collective(group, "outside"), agreement.collective(group, "inside"):
            if comm.rank == 0:
                raise ParamError("once")

    found = raised(body)
    same_everywhere(comm, agree_all, found, ParamError, "once")
    agree_all(found[1].count("rank 0") == (1 if comm.size > 1 else 0), found)


@pytest.mark.mpi(min_size=2)
def test_a_stall_inside_a_block_is_not_followed_by_another_wait(comm, agree_all):
    from uncut_mpi.spmd.group import Group

    group = Group(comm)

    def body():
        with agreement.collective(group, "a test"):
            group.barrier(timeout_s=0.2)

    found = raised(body) if comm.rank else ("StallError", "")
    agree_all(found[0] == StallError.__name__, found)
    if comm.rank == 0:
        group.barrier()  # so that MPI can finalise; the others have given up
    agree_all(True)


def test_a_result_of_the_root_reaches_all(comm, agree_all, group):
    calls = []

    def function():
        calls.append(comm.rank)
        return b"of", 0

    agree_all(group.from_root(function) == (b"of", 0))
    agree_all(calls == ([0] if comm.rank == 0 else []), calls)


def test_an_error_of_the_root_is_raised_on_all(comm, agree_all, group):
    def function():
        raise ParamError("m = 0 rows × 10⁹")

    found = raised(lambda: group.from_root(function))
    agree_all(found == ("ParamError", "m = 0 rows × 10⁹"), found)


def test_a_foreign_error_of_the_root_names_it(comm, agree_all, group):
    found = raised(lambda: group.from_root(lambda: {}["key"]))
    wanted = "KeyError" if comm.rank == 0 else PeerFailedError.__name__
    agree_all(found[0] == wanted and "'key'" in found[1], found)


def test_a_call_s_record_has_64_bytes_and_reaches_all_on_kept_buffers(comm, agree_all, group):
    agree_all(meetings.RECORD.itemsize == 64, meetings.RECORD)
    calls = call_exchange(group)
    for call in range(3):
        calls.mine["digest"] = agreement.digest_of(b"arguments")
        calls.mine["call"], calls.mine["epoch"], calls.mine["status"] = b"gemm", call, -comm.rank
        records = calls.exchange("opening barrier")
        agree_all(records is calls.everyone)
        agree_all((records["digest"] == records["digest"][0]).all() and (records["epoch"] == call).all(), records)
        agree_all(np.array_equal(records["status"], -np.arange(comm.size)) and calls.all_same(), records)
    for field, odd in (("digest", 1), ("call", b"gemn"), ("epoch", 7)):
        calls.mine[field] = odd if comm.rank == comm.size - 1 else calls.mine[field]
        calls.exchange("opening barrier")
        agree_all(calls.all_same() == (comm.size == 1), f"{field}: {calls.everyone}")
        calls.mine[field] = calls.everyone[field][0]


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_for_a_record_lets_mpi_get_on(comm, agree_all, group, monkeypatch):
    """A message too large to be sent at once moves while its sender waits in an exchange."""
    calls = call_exchange(group)
    calls.fill("gemm", bytes(16), 5, flags=1, status=0)
    data = np.arange(1 << 20) if comm.rank == 0 else np.zeros(1 << 20, np.int64)
    request = None
    true_drive, driven = group.drive, []
    monkeypatch.setattr(group, "drive", lambda: driven.append(1) or true_drive())
    if comm.rank == 0:
        request = comm.Isend(data, dest=1, tag=77)
    elif comm.rank == 1:
        time.sleep(0.1)
        comm.Recv(data, source=0, tag=77)
    calls.exchange("opening barrier", 20)
    if request is not None:
        request.Wait()
    agree_all(comm.rank > 1 or np.array_equal(data, np.arange(1 << 20)))
    agree_all(comm.rank == 1 or len(driven) > 0, "MPI was not called")  # some libraries get on without


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_to_an_exchange_is_named(comm, agree_all, group):
    calls = call_exchange(group)
    calls.fill("gemm", bytes(16), 5, flags=1, status=0)
    found = ("StallError", "for rank 0;")
    if comm.rank > 0:
        found = raised(lambda: calls.exchange("opening barrier", 0.2, lambda: [0]))
    agree_all(found[0] == StallError.__name__ and "for rank 0;" in found[1], found)
    agree_all(group.stalled == (comm.rank > 0))


@pytest.mark.mpi(min_size=2)
def test_an_interrupted_wait_keeps_later_exchanges_in_step(comm, agree_all, group, monkeypatch):
    """Whoever comes late to the exchange that an interrupt ended elsewhere still finds all records of it."""
    calls = call_exchange(group)
    for number in range(2 if comm.rank == 0 else 0):  # the second one is interrupted before it begins
        calls.fill("gemm", bytes(16), number, flags=1, status=0)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(group, "drive", interrupt)
            calls.exchange("opening barrier", 20)
    comm.Barrier()
    numbers = range(0 if comm.rank else 1, 5)
    found, error = [], ""
    try:
        for number in numbers:
            calls.fill("gemm", bytes(16), number, flags=1, status=0)
            found.append(calls.exchange("opening barrier", 3)["epoch"].tolist())
    except StallError as stalled:
        error = str(stalled)
    agree_all(found == [[number] * comm.size for number in numbers], f"{found} {error}")


def test_a_record_written_at_once_is_the_one_written_field_by_field(comm, agree_all, group):
    calls = call_exchange(group)
    digest = agreement.digest_of(b"arguments")
    calls.fill("execute", digest.tobytes(), 2**32 - 1, flags=1, status=-3)
    one = calls.mine[0]
    agree_all((one["digest"] == digest).all() and one["call"] == b"execute", calls.mine)
    agree_all((one["epoch"], one["flags"], one["status"]) == (2**32 - 1, 1, -3), calls.mine)


def test_an_exchange_of_equal_records_is_unanimous_and_no_other(comm, agree_all, group):
    calls = call_exchange(group)
    calls.fill("gemm", bytes(16), 5, flags=1, status=0)
    calls.exchange("opening barrier")
    agree_all(calls.unanimous)
    for change in ({"digest": bytes(15) + b"x"}, {"epoch": 6}, {"flags": 0}, {"status": 1}):
        last = change if comm.rank == comm.size - 1 else {}
        fields = {"digest": bytes(16), "epoch": 5, "flags": 1, "status": 0, **last}
        calls.fill("gemm", fields["digest"], fields["epoch"], flags=fields["flags"], status=fields["status"])
        calls.exchange("opening barrier")
        agree_all(calls.unanimous == (comm.size == 1), f"{change}: {calls.everyone}")


def test_rank_numbers_are_named_in_runs(comm):
    with carried(comm):
        assert name_ranks([3]) == "rank 3"
        assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
        for values, said in (
            ("xyx", "y on rank 1, x on the others"),
            ("xy", "x on rank 0, y on rank 1"),
            ("xyxy", "x on ranks 0, 2, y on ranks 1, 3"),
            ("xxx", "x on ranks 0-2"),
            ("xyz", "x on rank 0, y on rank 1, z on rank 2"),
        ):
            assert agreement.by_rank(values) == said


@pytest.mark.mpi(min_size=2)
def test_a_node_that_does_not_come_back_is_waited_for_a_while(comm, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "SETTLING_S", 0.2)
    group, last, over = Group(comm, ranks_per_node=1), comm.rank == comm.size - 1, mpi_tmp_path / "over"
    said = ""
    try:
        with agreement.on_each_node(group, "measuring each node"):
            while last and not over.exists():
                time.sleep(0.01)
    except StallError as error:
        said = str(error)
    over.touch()
    comm.Barrier()
    group.free()
    assert last or "measuring each node" in said  # to the last one, all have come by then
