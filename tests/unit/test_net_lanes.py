"""Lanes of the net between two ranks of one process: whatever fails, messages stay in order or are given up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from uncut_mpi.device import net_lanes
from uncut_mpi.device.interface import Columns
from uncut_mpi.device.net_lanes import NetLanes, NetRun, messages_left
from uncut_mpi.device.views import bytes_at
from uncut_mpi.planning.lower import Code

SHAPES = ((5, 3), (40, 7), (200, 4), (3, 1), (6, 2), (90, 9), (4, 4))
"""Bytes of a column and columns of each message; some go in several fragments, some together."""
PITCH = 256


class Wire:
    """Messages from rank 0 to rank 1, which are over some polls after they were received."""

    def __init__(self, polls: int = 1) -> None:
        self.sent: list[tuple[np.ndarray, list[bool]]] = []
        self.awaited: list[tuple[np.ndarray, list[bool]]] = []
        self.matched, self.polls, self.beats = 0, polls, 0
        self.on_listen: Callable[[], object] = lambda: None  # of who finishes: the other rank gets on meanwhile

    def listen(self) -> None:
        called, self.on_listen = self.on_listen, lambda: None
        called()
        self.on_listen = called

    def beat(self, interval_s: float) -> None:
        self.beats += 1

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def send(self, data: np.ndarray, rank: int, columns: Columns | None = None) -> Callable[[], bool]:
        return self._begin(self.sent, data, columns)

    def receive(self, data: np.ndarray, rank: int, columns: Columns | None = None) -> Callable[[], bool]:
        return self._begin(self.awaited, data, columns)

    def _begin(
        self, side: list[tuple[np.ndarray, list[bool]]], data: np.ndarray, columns: Columns | None
    ) -> Callable[[], bool]:
        if columns is not None:
            width, count, pitch = columns
            data = np.ndarray((count, width), np.uint8, data, strides=(pitch, 1))
        there, polls = [False], itertools.count()
        side.append((data, there))

        def is_over() -> bool:
            while self.matched < min(len(self.sent), len(self.awaited)):
                (what, gone), (where, come) = self.sent[self.matched], self.awaited[self.matched]
                found = what.reshape(-1)
                where.flat[: len(found)] = found
                gone[0] = come[0] = True
                self.matched += 1
            return there[0] and next(polls) >= self.polls

        return is_over


class Copies:
    """Copies between memory that counts as a device's and buffers; one of them fails, if so."""

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.count = fails, 0

    def __call__(self, inbound: bool, to: int, to_pitch: int, source: int, pitch: int, width: int, columns: int):
        self.count += 1
        if self.count - 1 == self.fails:
            raise OSError("made up")
        for column in range(columns):
            bytes_at(to + column * to_pitch, width)[...] = bytes_at(source + column * pitch, width)
        return net_lanes.at_once


class Ends:
    """A lane of each rank with the same messages, of host or device memory."""

    def __init__(self, *, wire: Wire, in_host: bool, copies: tuple[Copies, Copies]) -> None:
        self.memory = [np.zeros((len(SHAPES), PITCH * 10), np.uint8) for _ in range(2)]
        self.memory[0][...] = np.random.default_rng(3).integers(1, 256, self.memory[0].shape)
        self.flags = [np.zeros(len(SHAPES), np.uint32) for _ in range(2)]
        self.runs = [NetRun(self._lanes(rank, wire, in_host, copies[rank]), 0) for rank in range(2)]

    def _lanes(self, rank: int, wire: Wire, in_host: bool, copy: Copies) -> NetLanes:
        lane = net_lanes._NetLane(1 - rank, receives=rank == 1)
        code = Code.RECV if rank else Code.SEND
        for task, (width, columns) in enumerate(SHAPES):
            at = self.memory[rank][task].ctypes.data
            fragments = net_lanes._fragments(at, Columns(width, columns, PITCH), in_host=in_host)
            lane.steps += [(code, fragment, 0, task) for fragment in fragments]
            lane.steps.append((Code.SIGNAL, self.flags[rank].data[task : task + 1], 1, task))
        lane.buffers = [np.empty(net_lanes.FRAGMENT_BYTES, np.uint8) for _ in range(3)]
        made: NetLanes = object.__new__(NetLanes)
        made.rank, made.transport, made.copy, made.lanes = rank, wire, copy, [lane]
        return made

    def came(self) -> Iterator[bool]:
        for task, (width, columns) in enumerate(SHAPES):
            sent, found = (memory[task].reshape(10, PITCH)[:columns, :width] for memory in self.memory)
            yield np.array_equal(sent, found)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(net_lanes, "FRAGMENT_BYTES", 128)
    monkeypatch.setattr(net_lanes, "SMALL_BYTES", 24)
    monkeypatch.setattr(net_lanes, "_given_up", [])


def go_on(runs, times=400):
    for _ in range(times):
        for run in runs:
            run.advance()


@pytest.mark.parametrize("in_host", [False, True])
@pytest.mark.parametrize("polls", [1, 5])
def test_messages_come_in_their_order(in_host, polls):
    ends = Ends(wire=Wire(polls), in_host=in_host, copies=(Copies(), Copies()))
    go_on(ends.runs)
    assert all(run.over and run.tasks == len(SHAPES) for run in ends.runs)
    assert all(ends.came())
    assert all(flags.all() for flags in ends.flags)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fails", range(12))
def test_after_a_copy_that_fails_all_messages_end_on_both_ranks(rank, fails):
    copies = (Copies(fails), Copies()) if rank == 0 else (Copies(), Copies(fails))
    wire = Wire()
    ends = Ends(wire=wire, in_host=False, copies=copies)
    with pytest.raises(OSError, match="made up"):
        go_on(ends.runs)
    broken, other = ends.runs[rank], ends.runs[1 - rank]
    wire.on_listen = other.advance
    broken.finish(5.0)
    go_on([other])
    assert not broken.given_up
    assert broken.over
    assert other.over
    assert len(wire.sent) == len(wire.awaited) == wire.matched
    assert all(flags.all() for flags in ends.flags)


@pytest.mark.parametrize("name", ["send", "receive"])
@pytest.mark.parametrize("when", range(4))
def test_an_interrupt_within_gives_up_what_is_under_way_and_says_so(name, when):
    wire, calls = Wire(), itertools.count()
    begin = getattr(wire, name)

    def interrupted(*about):
        begun = begin(*about)
        if next(calls) == when:
            raise KeyboardInterrupt
        return begun

    setattr(wire, name, interrupted)
    ends = Ends(wire=wire, in_host=False, copies=(Copies(), Copies()))
    with pytest.raises(KeyboardInterrupt):
        go_on(ends.runs)
    run = ends.runs[name == "receive"]
    run.finish(5.0)
    assert run.over
    assert run.given_up
    assert net_lanes._given_up
    assert ends.flags[name == "receive"].all()


def test_after_an_error_messages_go_on_for_as_long_as_any_does(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(net_lanes.time, "monotonic", lambda: float(next(clock)))
    wire = Wire(polls=6)
    ends = Ends(wire=wire, in_host=False, copies=(Copies(), Copies()))
    sender, receiver = ends.runs
    wire.on_listen = receiver.advance
    sender.finish(12.0)
    assert sender.over
    assert not sender.given_up
    assert next(clock) > 24
    assert wire.beats > 0


def test_what_nobody_takes_is_given_up_with_its_memory(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(net_lanes.time, "monotonic", lambda: float(next(clock)))
    sender = Ends(wire=Wire(), in_host=False, copies=(Copies(), Copies())).runs[0]
    sender.finish(12.0)
    assert sender.over
    assert "sends task 0 to rank 1" in sender.given_up
    assert len(net_lanes._given_up) == 1


def test_what_ends_a_run_whose_messages_were_given_up_stays_what_it_was() -> None:
    assert str(messages_left(None, "task 3 waits")) == "another rank has failed; task 3 waits"
    assert str(messages_left(MemoryError(), "task 3 waits")) == "MemoryError; task 3 waits"
    interrupt = messages_left(KeyboardInterrupt(), "task 3 waits")
    assert isinstance(interrupt, KeyboardInterrupt)
    assert vars(interrupt) == {"fatal": True}
