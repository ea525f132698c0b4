"""
Lanes of the net: what a rank sends to ranks of other nodes, and receives, while its executor does the rest of a list.

A message goes in fragments, several at a time. MPI takes large ones of host memory as they lie. All others go through
bounce buffers: host memory that is registered once. While one fragment is on its way, others are copied to buffers and
from them. All fragments from one rank to another go in one order, and buffers serve in that order. Each lane has its
own, so none waits for those of another. To receive into a buffer nothing is awaited: what comes may come before its
place is free.

Small fragments share a buffer, and go together: as many as were ready when the one before was sent.

Lanes wait and tell by flags in host memory, as all lanes of the host. Whoever runs the list lets them get on in the
thread that uses MPI, and never waits for one of them alone.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from uncut_mpi.device.interface import Columns, FlagTable, Transport
from uncut_mpi.device.views import bytes_at
from uncut_mpi.errors import DeviceError, StallError, reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, LaneKind

FRAGMENT_BYTES: Final = 1 << 20
"""Of a fragment, at most. All ranks cut a message alike."""

SMALL_BYTES: Final = 1 << 15
"""Of fragments that go together, at most."""

_HEADER = np.dtype(np.uint64)  # of small fragments that go together: how many they are
_MOST_BUFFERS, _LEAST_BUFFERS, _BUFFERS_OF_ALL = 8, 2, 128  # of a lane, and about of all of a rank
_HALF, _MASK = 0x80000000, 0xFFFFFFFF
_BEATS = 8  # while others would take a rank for lost

_given_up: list[object] = []
"""Lanes that have ended with messages under way, of which MPI may still read and write memory."""

Over = Callable[[], bool]
"""Says whether what has begun is over, and lets it get on."""

BeginCopy = Callable[[bool, int, int, int, int, int, int], Over]
"""
Begins a copy between device memory and a buffer: whether to the device, then as `Backend.copy_columns`. Copies in one
direction end in the order in which they began.
"""


def at_once() -> bool:
    """Say that something is over."""
    return True


class BounceBuffers:
    """
    Memory for fragments of messages, which lanes of all lists of one backend use, one list at a time.

    Parameters
    ----------
    make : callable, optional
        Returns so many bytes of host memory (uint8), registered for the device, if there is one.
    """

    def __init__(self, make: Callable[[int], np.ndarray] = lambda nbytes: np.empty(nbytes, np.uint8)) -> None:
        self._make, self._made = make, list[np.ndarray]()

    def first(self, count: int) -> list[np.ndarray]:
        """Return the first so many buffers, of `FRAGMENT_BYTES` each. Nothing may be in flight."""
        if (lacking := count - len(self._made)) > 0:
            self._made.extend(self._make(lacking * FRAGMENT_BYTES).reshape(lacking, FRAGMENT_BYTES))
        return self._made[:count]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fragment:
    """
    Columns of bytes, of host memory or a device's.

    Attributes
    ----------
    memory : ndarray of uint8 or None
        Where it is of host memory, from its first byte to its last one.
    ends : int
        The bytes of its message, if it is the last fragment.
    """

    columns: Columns
    address: int
    memory: np.ndarray | None
    ends: int

    @property
    def is_small(self) -> bool:
        """Whether it goes together with others. Both ranks find the same."""
        return self.columns.nbytes <= SMALL_BYTES

    @property
    def is_direct(self) -> bool:
        """Whether MPI takes it as it lies."""
        return self.memory is not None and not self.is_small


class _Parcel:
    """A fragment that goes alone, or small ones that go together; what one message of MPI carries."""

    def __init__(self, buffer: np.ndarray, header: int = 0) -> None:
        self.buffer, self.nbytes = buffer, header
        self.count = self.copied = self.ended = 0  # fragments in it
        self.posted: Over | None = None
        self.is_there = False

    def where(self, fragment: _Fragment) -> np.ndarray:
        """Return where the next fragment is in the buffer, or comes."""
        return self.buffer[self.nbytes : self.nbytes + fragment.columns.nbytes]

    def add(self, fragment: _Fragment) -> None:
        """Count it."""
        self.nbytes, self.count = self.nbytes + fragment.columns.nbytes, self.count + 1

    def is_over(self) -> bool:
        """Whether the message was posted, and has gone or come."""
        if not self.is_there and self.posted is not None:
            self.is_there = self.posted()
        return self.is_there

    @property
    def header(self) -> np.ndarray:
        """How many small fragments there are, shape (1,)."""
        return self.buffer[: _HEADER.itemsize].view(_HEADER)


def _fragments(address: int, all_of_it: Columns, *, in_host: bool) -> Iterator[_Fragment]:
    """Cut a message: columns that together, or parts of a column that alone, have `FRAGMENT_BYTES` at most."""
    width, columns, pitch = all_of_it
    at_a_time = max(1, FRAGMENT_BYTES // max(1, width))
    for column in range(0, columns, at_a_time):
        for row in range(0, width, FRAGMENT_BYTES):
            start, wide = address + column * pitch + row, min(FRAGMENT_BYTES, width - row)
            many = min(at_a_time, columns - column)
            memory = bytes_at(start, pitch * (many - 1) + wide) if in_host else None
            last = column + many == columns and row + wide == width
            yield _Fragment(Columns(wide, many, pitch), start, memory, width * columns if last else 0)


_Step = tuple[int, _Fragment | memoryview, int, int]
"""Code, what, its value, and the task that it is for."""


class _NetLane:
    """What one rank sends to another, or receives from it, in order."""

    def __init__(self, peer: int, *, receives: bool) -> None:
        self.peer, self.receives = peer, receives
        self.steps: list[_Step] = []
        self.buffers: list[np.ndarray] = []

    @property
    def is_ahead(self) -> bool:
        """Whether fragments may come before their places are free: all into buffers, since they come in one order."""
        return self.receives and not any(what.is_direct for _, what, _, _ in self.steps if isinstance(what, _Fragment))


class NetLanes:
    """
    The lanes of the net of one list, bound to addresses.

    Parameters
    ----------
    program, addresses, flags
        As for `Backend.executable`.
    transport : Transport or None
        What messages take.
    buffers : BounceBuffers
        Of the backend.
    copy : callable, optional
        How what lies in device memory gets to buffers and from them, if the host cannot read it.
    """

    def __init__(
        self,
        program: OperationList,
        addresses: np.ndarray,
        flags: FlagTable,
        transport: Transport | None,
        buffers: BounceBuffers,
        copy: BeginCopy | None = None,
    ) -> None:
        self.rank, self.transport, self.copy = program.rank, transport, copy
        of_net = np.flatnonzero(program.lanes["kind"] == LaneKind.NET)
        if len(of_net) and self.transport is None:
            raise DeviceError("an operation list has copies between nodes, and there is no transport to another one")
        of_host, in_host = flags.host.reshape(-1).data, program.in_host()
        self.lanes: list[_NetLane] = []
        for number in of_net.tolist():
            source, destination = (int(program.lanes[number][end]) for end in ("source", "destination"))
            receives = destination == self.rank
            lane = _NetLane(source if receives else destination, receives=receives)
            for operation in program.operations[program.operations["lane"] == number].tolist():
                code, _, _, _, task, at, value, peer, first = operation
                if code in (Code.SEND, Code.RECV):
                    buffer, kind, _, _, _, offset, rows, cols, ld, _ = program.operands[first].tolist()
                    size, start = DType(kind).itemsize, int(addresses[buffer]) + offset
                    there = copy is None or bool(in_host[buffer])
                    fragments = _fragments(start, Columns(rows * size, cols, ld * size), in_host=there)
                    lane.steps += [(code, fragment, 0, task) for fragment in fragments]
                else:
                    at += (self.rank if code == Code.SIGNAL else peer) * MAX_LANES
                    lane.steps.append((code, of_host[at : at + 1], value, task))
            self.lanes.append(lane)
        of_lane = max(_LEAST_BUFFERS, min(_MOST_BUFFERS, _BUFFERS_OF_ALL // max(1, len(self.lanes))))
        memory = buffers.first(of_lane * len(self.lanes))
        for number, lane in enumerate(self.lanes):
            lane.buffers = memory[number * of_lane : (number + 1) * of_lane]

    def beat(self, timeout_s: float) -> None:
        """Tell ranks of other nodes often enough that this one gets on, if there are any."""
        if self.transport is not None:
            self.transport.beat(timeout_s / _BEATS)


class NetRun:
    """
    One run of the lanes of the net, at an epoch as `Executable.start` has it.

    Attributes
    ----------
    tasks, copy_bytes : int
        Messages that are over, and their bytes.
    listens : bool
        Whether there are other nodes to hear.
    failed : bool
        Whether an error has ended the call: nothing is awaited or copied any more, and messages go on as they are.
    given_up : str
        Which messages have not ended after an error, so that no other run may follow; empty if all have.
    """

    def __init__(self, lanes: NetLanes, epoch: int) -> None:
        self._lanes, self.epoch = lanes, epoch
        self.tasks = self.copy_bytes = 0
        self.failed, self.given_up = False, ""
        self._in_order = True
        self._moving = [_NetLaneRun(self, lanes, lane) for lane in lanes.lanes if lane.steps]
        self.listens = lanes.transport is not None

    @property
    def over(self) -> bool:
        """Whether all are."""
        return not self._moving

    def advance(self, turns: int = 1) -> bool:
        """Get on without waiting, and return whether anything did. Some MPIs move a little in each turn."""
        if self._lanes.transport is not None:
            self._lanes.transport.listen()
        moved = False
        try:
            for _ in range(turns):
                for lane in self._moving:
                    moved |= lane.advance()
        except BaseException as error:
            # Lanes note what is done behind what may fail; an interrupt may come in between.
            self._in_order = isinstance(error, Exception)
            raise
        if moved:
            self._moving = [lane for lane in self._moving if not lane.over]
        return moved

    def waits(self) -> list[str]:
        """Say which messages are awaited, and with whom."""
        return [text for lane in self._moving if (text := lane.awaited())]

    def finish(self, timeout_s: float) -> None:
        """
        Send and receive what is left after an error, whatever it is, and tell: nobody may wait for ever.

        It is given up when nothing has got on for `timeout_s`. What is under way then keeps its memory.
        """
        self.failed, until_s = True, time.monotonic() + timeout_s
        with contextlib.suppress(BaseException):  # the error before it is told, and what is not over is given up
            while self._in_order and self._moving and time.monotonic() < until_s:
                if self.advance():
                    until_s = time.monotonic() + timeout_s
                    self._lanes.beat(timeout_s)
        if self._moving:
            self.given_up = f"messages did not end: {'; '.join(self.waits()) or 'of lanes that were interrupted'}"
            _given_up.append(self._moving)
        for lane in self._moving:
            lane.tell_all()
        self._moving = []


def messages_left(error: BaseException | None, given_up: str) -> BaseException:
    """
    Return what a run reports whose messages were given up after an error, None for another rank's: no run may follow.

    An interrupt stays one, and is fatal.
    """
    if error is None or isinstance(error, Exception):
        return StallError(f"{reason(error) if error else 'another rank has failed'}; {given_up}")
    error.fatal = True  # type: ignore[attr-defined]
    return error


class _NetLaneRun:
    """
    One run of a lane, whose steps pass three gates, each in order.

    A fragment that is sent is copied to its buffer when its flags allow; then it is posted; then it has gone. One that
    is received is posted when there is a buffer; when it has come and its flags allow, it is copied; then it is in its
    place.
    """

    def __init__(self, run: NetRun, lanes: NetLanes, lane: _NetLane) -> None:
        self._run, self._lanes, self._lane, self._steps = run, lanes, lane, lane.steps
        self._flags_gate = 1 if lane.is_ahead else 0
        self._passed = [0, 0, 0]  # steps, by each gate
        self._parcels: collections.deque[_Parcel] = collections.deque()  # that have buffers
        self._open: _Parcel | None = None  # which may have more small fragments
        self._begun: collections.deque[tuple[_Parcel, np.ndarray, Over]] = collections.deque()
        self._going: collections.deque[tuple[_Parcel, Over]] = collections.deque()
        self._count = 0  # of parcels so far

    @property
    def over(self) -> bool:
        """Whether all steps have passed all gates."""
        return self._passed[2] == len(self._steps)

    def advance(self) -> bool:
        """Get on without waiting, and return whether anything did."""
        passed, before = self._passed, sum(self._passed)
        for gate, may_pass in enumerate((self._begin, self._go_on, self._end)):
            ahead = passed[gate - 1] if gate else len(self._steps)
            while passed[gate] < ahead:
                code, what, value, _ = self._steps[passed[gate]]
                if isinstance(what, _Fragment):
                    if not may_pass(what):
                        break
                elif code == Code.WAIT_FLAG:
                    if gate == self._flags_gate and not self._is_there(what, value):
                        break
                elif gate == 2:
                    what[0] = (self._run.epoch + value) & _MASK
                passed[gate] += 1
        return sum(passed) > before

    def _is_there(self, flag: memoryview, value: int) -> bool:
        return self._run.failed or (flag[0] - self._run.epoch - value) & _MASK < _HALF

    def _begin(self, fragment: _Fragment) -> bool:
        lane, parcel = self._lane, self._open
        if parcel is not None:
            if lane.receives and fragment.is_small and not parcel.is_over():
                return False  # it may be in this one
            if not self._takes(parcel, fragment):
                parcel = None
        is_new = parcel is None
        if parcel is None:
            if len(self._parcels) == len(lane.buffers):
                return False
            buffer = lane.buffers[self._count % len(lane.buffers)]
            if fragment.is_small:
                parcel = _Parcel(buffer, _HEADER.itemsize)
            else:
                parcel = _Parcel(buffer if fragment.memory is None else fragment.memory)
            if lane.receives:
                self._post(parcel, fragment)
        where = parcel.where(fragment)
        is_over = parcel.is_over if lane.receives else self._copy(fragment, where)
        if is_new:
            self._parcels.append(parcel)
            self._count += 1
        self._open = parcel if fragment.is_small else None
        parcel.add(fragment)
        self._begun.append((parcel, where, is_over))
        return True

    def _takes(self, parcel: _Parcel, fragment: _Fragment) -> bool:
        """Return whether a fragment goes with the small ones of a parcel, or has come with them."""
        if self._lane.receives:
            return fragment.is_small and parcel.count < parcel.header[0]
        fits = parcel.nbytes + fragment.columns.nbytes <= len(parcel.buffer)
        return fragment.is_small and fits and parcel.posted is None

    def _go_on(self, fragment: _Fragment) -> bool:
        parcel, where, is_over = self._begun[0]
        if not is_over():
            return False
        if self._lane.receives:
            is_over = self._copy(fragment, where)
        else:
            if parcel.copied + 1 == parcel.count:  # what is ready was begun before
                self._post(parcel, fragment)
            parcel.copied += 1
            is_over = parcel.is_over
        self._begun.popleft()
        self._going.append((parcel, is_over))
        return True

    def _end(self, fragment: _Fragment) -> bool:
        parcel, is_over = self._going[0]
        if not is_over():
            return False
        self._going.popleft()
        parcel.ended += 1
        if parcel.ended == (parcel.header[0] if fragment.is_small else 1):
            self._parcels.popleft()
        if fragment.ends:
            self._run.tasks += 1
            self._run.copy_bytes += fragment.ends
        return True

    def _post(self, parcel: _Parcel, fragment: _Fragment) -> None:
        transport, lane = self._lanes.transport, self._lane
        assert transport is not None
        begin = transport.receive if lane.receives else transport.send
        if fragment.is_direct:
            parcel.posted = begin(parcel.buffer, lane.peer, fragment.columns)
        elif not fragment.is_small:
            parcel.posted = begin(parcel.buffer[: fragment.columns.nbytes], lane.peer)
        elif lane.receives:
            parcel.posted = begin(parcel.buffer, lane.peer)
        else:
            parcel.header[0] = parcel.count
            parcel.posted = begin(parcel.buffer[: parcel.nbytes], lane.peer)

    def _copy(self, fragment: _Fragment, where: np.ndarray) -> Over:
        inbound, copy = self._lane.receives, self._lanes.copy
        width, columns, pitch = fragment.columns
        if fragment.is_direct or self._run.failed:
            return at_once
        if fragment.memory is None:
            assert copy is not None
            ends = (fragment.address, pitch), (where.ctypes.data, width)
            return copy(inbound, *ends[not inbound], *ends[inbound], width, columns)
        there = np.ndarray((columns, width), np.uint8, fragment.memory, strides=(pitch, 1))
        here = where.reshape(columns, width)
        if inbound:
            there[...] = here
        else:
            here[...] = there
        return at_once

    def awaited(self) -> str:
        """Say which message is awaited, and with whom, if one is."""
        gate, transport = (1, self._begun) if self._lane.receives else (2, self._going), self._lanes.transport
        passed = self._passed[gate[0]]
        if not gate[1] or transport is None or not isinstance(self._steps[passed][1], _Fragment):
            return ""  # what it waits for is on its own node
        does, to = ("awaits", "from") if self._lane.receives else ("sends", "to")
        task = self._steps[passed][3]
        return f"rank {self._lanes.rank} {does} task {task} {to} {transport.name(self._lane.peer)}"

    def tell_all(self) -> None:
        """Write the flags of all steps that are left."""
        for code, what, value, _ in self._steps[self._passed[2] :]:
            if code == Code.SIGNAL and isinstance(what, memoryview):
                what[0] = (self._run.epoch + value) & _MASK
