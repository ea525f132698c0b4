"""
Lanes of the net: what a rank sends to ranks of other nodes, and receives, while its executor does the rest of a list.

They wait and tell by flags in host memory, as all lanes of the host. A message of device memory goes through an array
of the host. Whoever runs the list lets them get on in the thread that uses MPI, and never waits for one of them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from uncut_mpi.device.interface import Backend, FlagTable, Transport
from uncut_mpi.device.views import matrix_at
from uncut_mpi.errors import DeviceError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, LaneKind

_HALF, _MASK = 0x80000000, 0xFFFFFFFF
_BEATS = 8  # while others would take a rank for lost


class Message:
    """
    Half of a copy between nodes: a region that is sent to another rank, or received from one.

    Parameters
    ----------
    address, ld : int
        Of the region, column-major (elements).
    shape : (int, int)
        Its rows and columns.
    on_device : Backend or None
        Whose memory it is, if the host cannot read it.

    Attributes
    ----------
    rank, nbytes : int
        The other rank, and how many bytes go.
    """

    def __init__(
        self, rank: int, address: int, ld: int, shape: tuple[int, int], dtype: DType, on_device: Backend | None
    ) -> None:
        self.rank, self._address, self._ld, self._device = rank, address, ld, on_device
        if on_device is None:
            self._region = matrix_at(address, *shape, ld, dtype.numpy)
        self._shape, self._dtype = shape, dtype
        self.nbytes = shape[0] * shape[1] * dtype.itemsize

    def send(self, transport: Transport) -> Callable[[], bool]:
        """Begin to send it, and return what says whether that is over."""
        if self._device is None:
            data = np.asfortranarray(self._region)
        else:
            data = np.empty(self._shape, self._dtype.numpy, order="F")
            self._device.to_host(self._address, self._ld, data)
        return transport.send(data.reshape(-1, order="F").view(np.uint8), self.rank)

    def receive(self, transport: Transport) -> Callable[[], bool]:
        """Begin to receive it, and return what says whether it is there."""
        data = np.empty(self._shape, self._dtype.numpy, order="F")
        came = transport.receive(data.reshape(-1, order="F").view(np.uint8), self.rank)

        def placed() -> bool:
            if not came():
                return False
            if self._device is None:
                self._region[...] = data
            else:
                self._device.from_host(self._address, self._ld, data)
            return True

        return placed


class NetLanes:
    """
    The lanes of the net of one list, bound to addresses.

    Parameters
    ----------
    program, addresses, flags
        As for `Backend.executable`.
    transport : Transport or None
        What messages take.
    device : Backend, optional
        Whose device memory messages may lie in, if the host cannot read it.
    """

    def __init__(
        self,
        program: OperationList,
        addresses: np.ndarray,
        flags: FlagTable,
        transport: Transport | None,
        device: Backend | None = None,
    ) -> None:
        self.transport, of_host = transport, flags.host.reshape(-1).data
        of_net = np.flatnonzero(program.lanes["kind"] == LaneKind.NET)
        if len(of_net) and self.transport is None:
            raise DeviceError("an operation list has copies between nodes, and there is no transport to another one")
        self.queues: list[list[tuple[int, Message | memoryview, int]]] = []
        self.tasks: list[list[int]] = []  # of their steps
        self.rank = program.rank
        in_host = program.in_host()
        for lane in of_net.tolist():
            queue = list[tuple[int, Message | memoryview, int]]()
            self.tasks.append(program.operations["task"][program.operations["lane"] == lane].tolist())
            for operation in program.operations[program.operations["lane"] == lane].tolist():
                code, _, _, _, _, at, value, peer, first = operation
                if code in (Code.SEND, Code.RECV):
                    buffer, kind, _, _, _, offset, rows, cols, ld = program.operands[first].tolist()
                    there = None if in_host[buffer] else device
                    about = int(addresses[buffer]) + offset, ld, (rows, cols), DType(kind), there
                    queue.append((code, Message(peer, *about), 0))
                else:
                    at += (program.rank if code == Code.SIGNAL else peer) * MAX_LANES
                    queue.append((code, of_host[at : at + 1], value))
            self.queues.append(queue)

    def beat(self, timeout_s: float) -> None:
        """Tell ranks of other nodes often enough that this one gets on, if there are any."""
        if self.transport is not None:
            self.transport.beat(timeout_s / _BEATS)

    def start(self, epoch: int) -> NetRun:
        """Begin a run of the lanes at an epoch, as `Executable.start`."""
        return NetRun(self, epoch)


class NetRun:
    """
    One run of the lanes of the net.

    Attributes
    ----------
    tasks, copy_bytes : int
        Messages that are over, and their bytes.
    over : bool
        Whether all are.
    listens : bool
        Whether there are other nodes to hear.
    """

    def __init__(self, lanes: NetLanes, epoch: int) -> None:
        self._lanes, self._epoch = lanes, epoch
        self._at = [0] * len(lanes.queues)
        self._flying: dict[int, Callable[[], bool]] = {}
        self.tasks = self.copy_bytes = 0
        self.over = not any(lanes.queues)
        self.listens = lanes.transport is not None

    def advance(self) -> bool:
        """Get on without waiting, and return whether anything did."""
        moved = False
        if self._lanes.transport is not None:
            self._lanes.transport.listen()
        for lane, queue in enumerate(self._lanes.queues):
            while self._at[lane] < len(queue) and self._step(lane, *queue[self._at[lane]]):
                self._at[lane] += 1
                moved = True
        self.over = all(at == len(queue) for at, queue in zip(self._at, self._lanes.queues, strict=True))
        return moved

    def _step(self, lane: int, code: int, what: Message | memoryview, value: int) -> bool:
        """Make the next step of a lane, or get on with it; return whether it is over."""
        if isinstance(what, Message):
            if lane not in self._flying:
                self._flying[lane] = self._begin(code, what)
            if not self._flying[lane]():
                return False
            del self._flying[lane]
            self.tasks += 1
            self.copy_bytes += what.nbytes
        elif code == Code.WAIT_FLAG:
            return (what[0] - self._epoch - value) & _MASK < _HALF
        else:
            what[0] = (self._epoch + value) & _MASK
        return True

    def _begin(self, code: int, message: Message) -> Callable[[], bool]:
        transport = self._lanes.transport
        assert transport is not None
        return message.send(transport) if code == Code.SEND else message.receive(transport)

    def waits(self) -> list[str]:
        """Say which messages are awaited, and with whom."""
        lanes, found = self._lanes, list[str]()
        for lane in self._flying:
            code, message, _ = lanes.queues[lane][self._at[lane]]
            if isinstance(message, Message) and lanes.transport is not None:
                other, task = lanes.transport.name(message.rank), lanes.tasks[lane][self._at[lane]]
                does = f"sends task {task} to {other}" if code == Code.SEND else f"awaits task {task} from {other}"
                found.append(f"rank {lanes.rank} {does}")
        return found

    def finish(self, timeout_s: float) -> None:
        """Send and receive what is left after an error, whatever it is, and tell: nobody may wait for ever."""
        left = [*self._flying.values()]
        for lane, queue in enumerate(self._lanes.queues):
            rest = queue[self._at[lane] + (lane in self._flying) :]
            left += [self._begin(code, what) for code, what, _ in rest if isinstance(what, Message)]
        until_s = time.monotonic() + timeout_s
        while left and time.monotonic() < until_s:
            left = [is_over for is_over in left if not is_over()]
        for lane, queue in enumerate(self._lanes.queues):
            for code, what, value in queue[self._at[lane] :]:
                if code == Code.SIGNAL:
                    self._step(lane, code, what, value)
        self.over = True
