"""
What a device backend offers; nothing here is collective and nothing here knows of MPI.

The façade carries handles (opaque bytes) between ranks and does every agreement; a backend works
for one rank and one device, and raises on its own. Addresses are plain integers in the address
space of this process: device pointers for `cuda`, host pointers for `host`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from uncut_mpi.device.checking import check_program
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.views import strided
from uncut_mpi.errors import ParamError, StallError
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import end_name
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, NO_SOURCE, LaneKind

_RANDOM_BYTES = 1 << 20
_WRITES_NO_FLAGS = 1 << 63  # in the abort word


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceIdentity:
    """
    What other ranks must know of this rank's device.

    Attributes
    ----------
    backend : str
        ``"cuda"`` or ``"host"``.
    uuid : str
        Identifies the physical device over all processes of the node; never an ordinal.
    name : str
        Product name.
    node : str
        Identifies the node (`segments.node_identity`).
    memory_bytes : int
        Device memory.
    multiprocessors : int
        Blocks of a product that the device runs at once.
    unreached : frozenset of str
        UUIDs of devices that its process sees and whose memory it cannot use (no peer access).
    """

    backend: str
    uuid: str
    name: str
    node: str
    memory_bytes: int
    multiprocessors: int = 1
    unreached: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of our own on the device: address, bytes, and the handle by which peers open it."""

    address: int
    nbytes: int
    handle: bytes


class Pin(enum.IntEnum):
    """What became of host memory that was to be registered; true if it is to be given back."""

    FOREIGN = 0
    """Nothing was to be done: the program has registered it, or it is managed memory, or the device is the host."""
    WRITEABLE = 1
    READABLE = 2
    """The device may read it, and no more: it lies in a file, or may not be written."""


@dataclasses.dataclass(frozen=True, slots=True)
class AdoptedArray:
    """
    A caller's device array, ready to be shared.

    Attributes
    ----------
    address : int
        Of element (0, 0).
    handle : bytes or None
        Handle of the whole allocation the array lies in; None if it cannot be exported.
    offset_bytes : int
        From that allocation's base to `address`.
    obstacle : str
        Why it cannot be exported, naming the kind of memory; empty if it can.
    keep : object
        Keeps the memory alive.
    """

    address: int
    handle: bytes | None
    offset_bytes: int
    obstacle: str
    keep: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlagTable:
    """
    Where flags lie: 32-bit words, each written by one lane.

    Attributes
    ----------
    own : int
        Address of this rank's flags, slot s at ``own + 4 s``, which lanes of other ranks write. Before them lies a word
        of each rank, the last one's at ``own - 4``: what a rank writes there behind a run of a chain (`Chain`).
    peers : ndarray of int64, shape (num_ranks,)
        Address, in this process, of every rank's flags (this rank's entry equals `own`).
    host : ndarray of uint32, shape (num_ranks, MAX_LANES)
        The flags in host memory, which every rank of the node reads: lane l of rank r writes word [r, l]. Without rows
        where no lane is of the host.
    """

    own: int
    peers: np.ndarray
    host: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, MAX_LANES), np.uint32))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ProgressBoard:
    """
    Words in host memory that every rank of the node can read: who gets on, and whether a call has failed.

    Attributes
    ----------
    words : ndarray of uint32, shape `shape(num_ranks)`
        Row r is written by rank r only, by its executor or its device's streams. For `host` word l counts the
        operations that lane l has finished, and the parts of a long one. For `cuda` it is the last wait reached: 2·i+1
        reached the wait that is operation i, 2·i+2 passed it. Of a lane of the host it is the turns of its worker. The
        counts restart at 0 with every call. The last row is for all ranks.
    rank : int
        Whose row is ours.
    on_fail : callable
        Given the epoch of a call that fails here, for those who do not see these words.
    """

    words: np.ndarray
    rank: int
    on_fail: Callable[[int], object] = lambda epoch: None

    def fail(self, epoch: int) -> None:
        """Have ranks leave out what they have not begun of the call with this epoch."""
        self.note_failure(epoch)
        self.on_fail(epoch)

    def note_failure(self, epoch: int) -> None:
        """Note that the call with this epoch fails; what is noted of it, or of a later one, stays as it is."""
        if int(self.abort[0]) & ~_WRITES_NO_FLAGS < epoch + 1:
            self.abort[0] = epoch + 1

    @staticmethod
    def shape(num_ranks: int) -> tuple[int, int]:
        """Return the shape of the words of so many ranks."""
        return num_ranks + 1, MAX_LANES

    @property
    def abort(self) -> np.ndarray:
        """
        The abort word, shape (1,), uint64: one more than the epoch of the latest call that failed.

        Its value tells calls apart, so nobody has to reset it between them. There a slow rank of one call and a fast
        one of the next would get in each other's way. Before epochs wrap round it is set to 0 with the flags. The
        highest bit says that the rank writes no flags, since its context is lost or its run could not begin: nobody
        waits for them then.
        """
        return self.words[-1, :2].view(np.uint64)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TaskTimes:
    """
    When the tasks of one rank ran in a traced run.

    Attributes
    ----------
    tasks : ndarray of int32, shape (bodies,)
        Index in the schedule's global order.
    start_s, end_s : ndarray of float64, shape (bodies,)
        On the node's monotonic clock, which all its processes share.
    """

    tasks: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray


@dataclasses.dataclass(slots=True)
class ExecutionReport:
    """
    What one run of an operation list did on this rank.

    Attributes
    ----------
    tasks : int
        Bodies (COPY, GEMM, COMBINE) executed.
    copy_bytes : int
        Bytes that the COPY tasks of this rank moved.
    issue_s, drain_s : float
        Host time to issue everything; time from then until everything had finished.
    error : BaseException or None
        What went wrong on this rank; the remaining flags were written all the same, so that no peer
        waits for ever.
    aborted : bool
        Whether tasks of this rank were left out because another one failed, whose report says why.
    times : TaskTimes or None
        When each body ran, after a traced run without an error.
    """

    tasks: int = 0
    copy_bytes: int = 0
    issue_s: float = 0.0
    drain_s: float = 0.0
    error: BaseException | None = None
    aborted: bool = False
    times: TaskTimes | None = None

    @property
    def figures(self) -> tuple[int, int, float, float]:
        """The first four."""
        return self.tasks, self.copy_bytes, self.issue_s, self.drain_s

    @property
    def went_well(self) -> bool:
        """Whether all of this rank's tasks were done."""
        return self.error is None and not self.aborted


class Outcome(Protocol):
    """What a run did, before it is known in words."""

    @property
    def figures(self) -> tuple[int, int, float, float]:
        """As of `ExecutionReport`."""

    @property
    def went_well(self) -> bool:
        """As of `ExecutionReport`."""


class Columns(NamedTuple):
    """How bytes lie: columns of `width` bytes, one every `pitch` bytes."""

    width: int
    columns: int
    pitch: int

    @property
    def nbytes(self) -> int:
        """Of all columns."""
        return self.width * self.columns


class Transport(Protocol):
    """
    Carries bytes between this rank and those of other nodes; see `uncut_mpi.spmd.transport.MpiTransport`.

    What `send` and `receive` return says whether the message that they began is over, and lets it get on.
    """

    def beat(self, interval_s: float, /) -> None:
        """Tell ranks of other nodes that this one gets on, unless it has within such a time."""

    def listen(self) -> None:
        """Hear which of them get on, whose rows of the progress board change then."""

    def name(self, rank: int, /) -> str:
        """Return a rank with its node, as an error names it."""

    def send(self, data: np.ndarray, rank: int, columns: Columns | None = None, /) -> Callable[[], bool]:
        """Begin to send host memory (uint8), or columns in it, which are to stay as they are until that is over."""

    def receive(self, data: np.ndarray, rank: int, columns: Columns | None = None, /) -> Callable[[], bool]:
        """Begin to receive into host memory (uint8), or columns in it, as many bytes as are sent."""


class Chain(enum.IntEnum):
    """How a run is issued beside others of its device."""

    ALONE = 0
    FIRST = 1
    """The next one may be issued behind it (`Run.may_be_followed`)."""
    NEXT = 2
    """
    The same, and it begins on the device when the run before has ended on all ranks, whether that is known here or not.
    The epoch goes on by that one's span, and that one is finished first.
    """


ALONE: Final = Chain.ALONE


class Run(abc.ABC):
    """One run of an operation list, from its start to its report. One thread at a time uses it."""

    @abc.abstractmethod
    def poll(self, spin_s: float = 0.0) -> bool:
        """
        Get on with the run without waiting, for about 100 µs or `spin_s`, and return whether it is over.

        On the host backend a poll computes: it takes as long as the body that it runs.
        """

    @property
    def may_be_followed(self) -> bool:
        """Whether the next run of a chain may begin before this one is over."""
        return False

    def precede(self, streams: list[int]) -> None:
        """Let streams wait, from now on, for the end of this run on all ranks, if it may be followed; return soon."""

    @abc.abstractmethod
    def finish(self) -> ExecutionReport:
        """Wait until the run is over and return what it did."""


class Executable(abc.ABC):
    """
    An operation list bound to addresses, with its streams, events and workspaces; runs many times.

    Attributes
    ----------
    span : int
        How far a run takes the epoch: the next one begins at epoch + span, modulo 2³². The same on all ranks.
    longest_s : float
        What the longest task of any rank is expected to take (s); the same on all ranks.
    board : ProgressBoard
        On which a run says how far its lanes are.
    milestones : ndarray of float64, shape (2, number of lanes)
        What each lane's word of the board is when the lane is through, and its part of the work; parts sum to 1.
    running : context manager
        Turns what a run may raise into errors of ours.
    explain : callable
        Takes the words of the board and says in lines what ranks wait for; set by who knows the schedule.
    runner : callable
        Takes the parameters of `run`, all by their places, and returns an outcome that `report_of` understands: what
        `run` does, without words.
    """

    running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    explain: Callable[[np.ndarray], Iterable[str]] = staticmethod(lambda words: ())
    runner: Callable[[Number, Number, int, float, bool], Outcome]

    def __init__(
        self, program: OperationList, addresses: np.ndarray, board: ProgressBoard, through: np.ndarray
    ) -> None:
        check_program(program, addresses)
        self._program, self.board = program, board
        self.span, self.longest_s = program.span, program.longest_s
        self.milestones = np.array([through, _parts_of_lanes(program)])

    def progress(self) -> float:
        """Return what part of a run in flight is done on this rank, about, from 0 to 1. Any thread may ask."""
        through, parts = self.milestones
        words = self.board.words[self.board.rank][: len(parts)]
        return min(1.0, float(np.minimum(words / np.maximum(through, 1), 1.0) @ parts))

    @abc.abstractmethod
    def start(
        self, *, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool = False, chain: Chain = ALONE
    ) -> Run:
        """
        Begin a run and return soon; one run of the list at a time, and finish it.

        First it sets this rank's words of the progress board to 0; then it issues what it can without waiting.
        Called between the opening and the closing barrier. Never raises for a failure of an
        operation: the report carries it, after every remaining flag has been written (poison). The abort
        word tells the other ranks: they leave out the tasks that they have not begun, and write their flags
        too. A stall does not set it: every rank finds it by itself and says what it waits for.

        Parameters
        ----------
        alpha, beta : float or complex
            Values of the symbols; an operand whose factor is 0 is not read.
        epoch : int
            What no flag is ahead of when the run begins. A signal writes epoch + value; a wait is over when
            (flag − (epoch + value)) mod 2³² is below 2³¹.
        timeout_s : float
            A `StallError` goes into the report when no word of the progress board, of any rank, has
            changed for so long while this rank still waits. It names the awaited task and rank.
        traced : bool, default False
            Take the time of every body; `prepare_trace` comes first.
        chain : Chain, default ALONE
            Whether runs follow one another; the same on all ranks, but for `FIRST` and `NEXT`.
        """

    def run(
        self, *, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool = False
    ) -> ExecutionReport:
        """Issue every operation in order and wait until all have finished; see `start`."""
        with self.running:
            done = self.runner(alpha, beta, epoch & 0xFFFFFFFF, timeout_s, traced)
        return self.report_of(done, timeout_s, traced=traced)

    @abc.abstractmethod
    def report_of(self, outcome: Any, timeout_s: float, *, traced: bool) -> ExecutionReport:
        """Return what a run did, in words where it failed."""

    def prepare_trace(self) -> None:
        """
        Make what a traced run needs, so that the run itself creates nothing. Nothing may be in flight.

        Raises
        ------
        DeviceError
            If it cannot be made.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release streams, events and workspaces. Nothing may be in flight."""


def _parts_of_lanes(program: OperationList) -> np.ndarray:
    """Return each lane's part of the work, shape (number of lanes,): of products, or where there are none of copies."""
    operations = program.operations
    for code in (Code.GEMM, Code.COPY):
        counts = np.bincount(operations["lane"][operations["code"] == code], minlength=len(program.lanes))
        if counts.any():
            break
    parts: np.ndarray = counts / max(1, counts.sum())
    return parts


def stall_error(timeout_s: float, waits: Iterable[str]) -> StallError:
    """Return the error of a run in which nothing has finished for `timeout_s`, and what is waited for."""
    return StallError(
        ": ".join(filter(None, (f"no task finished on any rank for {timeout_s:.4g} s", "; ".join(waits))))
    )


def lane_name(program: OperationList, record: np.void) -> str:
    """Return a lane in words, as ``copy lane 0→host``; those that compute have a number in the place of ends."""
    name = f"{LaneKind(record['kind']).name.lower()} lane"
    if record["source"] == NO_SOURCE:
        return f"{name} {record['destination']}"
    ends = (end_name(program.locations, int(record[end])) for end in ("source", "destination"))
    return f"{name} {'→'.join(ends)}"


class Timeable:
    """
    Work that is prepared, so that it can be timed on all ranks at once. Not collective.

    Parameters
    ----------
    within : callable
        Returns a context in which the work may be done.
    work : callable
        Does it `times` times over and returns what that took in seconds.
    times : int, optional
        How often.
    close : callable, optional
        Frees what it needs; closes this.
    """

    def __init__(
        self,
        within: Callable[[], contextlib.AbstractContextManager[object]],
        work: Callable[[], float],
        times: int = 1,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._within, self._work, self._times, self.close = within, work, times, close
        try:
            self.mean_seconds(0.0)  # so that no first use of a kernel, and no first touch of memory, is timed
        except BaseException:
            close()
            raise

    def mean_seconds(self, least_s: float) -> float:
        """Do the work over and over for at least `least_s`, and return the mean time of once in seconds."""
        total_s, count = 0.0, 0
        with self._within():
            while count == 0 or total_s < least_s:
                total_s += self._work()
                count += self._times
        return max(total_s / count, 1e-9)  # a clock's resolution, never zero


class Backend(abc.ABC):
    """
    One rank's device. Every method raises `DeviceError` when a call into the system fails.

    What is not abstract is right for a device that is the host: nothing is to be registered, awaited or chosen there.

    Attributes
    ----------
    name : str
        ``"cuda"`` or ``"host"``.
    files : FileWindows
        Files whose bytes have addresses, for lanes of the host of executables that are made while they do.
    takes_host_memory : bool
        Whether the device's memory is that of the host.
    transport : Transport or None
        To ranks of other nodes, if there are any; set before executables are made.
    """

    name: str
    files: FileWindows
    takes_host_memory = False
    transport: Transport | None = None

    @abc.abstractmethod
    def identity(self) -> DeviceIdentity:
        """Return what other ranks must know of this device."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Return name and version of what computes: ``"blas"`` and, for cuda, ``"cupy"``, ``"cuda"``, ``"driver"``."""

    @abc.abstractmethod
    def allocate(self, nbytes: int) -> Allocation:
        """
        Allocate device memory that peers can open.

        Raises
        ------
        CapacityError
            With bytes needed, bytes available and what to change.
        """

    @abc.abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Free what `allocate` gave, after every peer has closed it."""

    @abc.abstractmethod
    def open(self, handle: bytes) -> int:
        """
        Map a peer's allocation and return its base address here.

        Raises
        ------
        TopologyError
            If there is no peer access, or the handle is from another node.
        """

    @abc.abstractmethod
    def close_peer(self, address: int) -> None:
        """Unmap what `open` gave. The exporter may free it after a barrier."""

    @abc.abstractmethod
    def owns(self, array: object) -> bool:
        """Whether `array` is a device array of this backend (cuda: a cupy array; host: made by `empty`, or a view)."""

    @abc.abstractmethod
    def wrap(self, given: Any) -> tuple[Any, bool]:
        """
        Return an array that `owns` is true of over another library's memory on this device, without a copy.

        What its producer has enqueued so far is done before it returns.

        Parameters
        ----------
        given : object
            Shows its memory by ``__dlpack__`` or ``__cuda_array_interface__``; the array keeps it alive.

        Returns
        -------
        array : object
            The array.
        writeable : bool
            Whether it may be written.

        Raises
        ------
        ParamError
            If it lies elsewhere, or cannot be shown.
        """

    @abc.abstractmethod
    def adopt(self, array: Any) -> AdoptedArray:
        """Return how a caller's device array (see `owns`) can be shared; ParamError if it lies elsewhere."""

    def pin(self, address: int, nbytes: int) -> Pin:
        """
        Register host memory with the device, so that its copies need no thread of the host.

        Raises
        ------
        PinError
            If that cannot be done for all of it.
        """
        return Pin.FOREIGN

    def unpin(self, address: int) -> None:
        """Undo a `pin` that returned something true."""

    @abc.abstractmethod
    def empty(self, rows: int, cols: int, dtype: DType, order: str = "F") -> Any:
        """Return a new exportable device array (cupy for cuda; a numpy view of an allocation for host)."""

    def strided(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Return an array of another shape and strides (bytes) over the memory of one of the host."""
        return strided(array, shape, strides)

    @abc.abstractmethod
    def copy_columns(
        self, destination: int, destination_pitch: int, source: int, source_pitch: int, width_bytes: int, columns: int
    ) -> None:
        """Copy columns of `width_bytes` between memories of any kind, each with its own pitch (bytes); synchronous."""

    def to_host(self, address: int, ld: int, out: np.ndarray) -> None:
        """Copy a column-major device matrix (leading dimension `ld`, elements) into F-ordered `out`; synchronous."""
        width = out.shape[0] * out.itemsize
        self.copy_columns(out.ctypes.data, _pitch(out), address, ld * out.itemsize, width, out.shape[1])

    def from_host(self, address: int, ld: int, data: np.ndarray) -> None:
        """Copy the F-ordered array `data` into a column-major device matrix; synchronous."""
        width = data.shape[0] * data.itemsize
        self.copy_columns(address, ld * data.itemsize, data.ctypes.data, _pitch(data), width, data.shape[1])

    def copy_matrix(self, destination: int, source: int, width_bytes: int, columns: int, pitch_bytes: int) -> None:
        """Copy columns of `width_bytes`, `pitch_bytes` apart on both sides, between devices or in one; synchronous."""
        self.copy_columns(destination, pitch_bytes, source, pitch_bytes, width_bytes, columns)

    @abc.abstractmethod
    def fill_words(self, address: int, count: int, value: int) -> None:
        """Set `count` 32-bit words; synchronous. For flags, before any use of them."""

    def streams_of(self, stream: Any = None) -> list[int]:
        """
        Return the handles of what a caller names as its stream.

        Parameters
        ----------
        stream : object, optional
            One of cupy, of torch, of anything with ``__cuda_stream__``, or an integer handle. By default the current
            ones, cupy's and, where torch is loaded, torch's.
        """
        return []

    def mark_caller(self, stream: Any = None) -> None:
        """Note what work the caller has given this device so far, for `await_caller`; as for `streams_of`."""

    def await_caller(self) -> None:
        """Return once the work that `mark_caller` noted last is done."""

    def let_follow(self, stream: int) -> None:
        """Let a stream wait for what the caller's current ones hold."""

    @abc.abstractmethod
    def executable(
        self, program: OperationList, addresses: np.ndarray, flags: FlagTable, board: ProgressBoard
    ) -> Executable:
        """
        Bind an operation list and prepare everything it needs (streams, events, workspaces, warm-up).

        Parameters
        ----------
        addresses : ndarray of int64, shape (number of buffers,)
            Address of element (0, 0) of each buffer in this process; anything for buffers the list
            does not touch.

        Raises
        ------
        DeviceError
            If the list holds something that this device cannot run.
        CapacityError
            If device memory for workspaces or for the warm-up is lacking.
        """

    def copy_seconds(self, destination: int, source: int, nbytes: int, repeats: int) -> float:
        """Return the best time in seconds of `repeats` contiguous copies between two addresses."""
        with contextlib.closing(self.copy_probe(destination, source, nbytes, 1)) as probe:
            return min(probe.mean_seconds(0.0) for _ in range(repeats))

    @abc.abstractmethod
    def copy_probe(self, destination: int, source: int, nbytes: int, at_once: int = 4) -> Timeable:
        """Return a probe of one contiguous copy between two addresses, of which so many are issued at once."""

    @abc.abstractmethod
    def gemm_probe(self, size: int, dtype: DType) -> Timeable:
        """Return a probe of a size×size×size product of full-mantissa random data."""

    def tune_products(self, *, tune: bool) -> None:
        """
        Choose kernels of products by their time in executables made from now on, or leave it to the library.

        Where it is done an executable takes tens of milliseconds longer to make. What it computes may differ in the
        last bits from what another process computes with the same schedule. A backend begins without.
        """

    def fill_random(self, address: int, nbytes: int, dtype: DType) -> None:
        """Fill device memory with full-mantissa random values of a type in [0, 1), a block over and over."""
        block = np.random.default_rng(0).random(_RANDOM_BYTES // dtype.itemsize).astype(dtype.numpy)
        filled = min(nbytes, _RANDOM_BYTES)
        self.from_host(address, filled // dtype.itemsize, block[: filled // dtype.itemsize, None])
        while filled < nbytes:
            step = min(filled, nbytes - filled)
            self.copy_matrix(address + filled, address, step, 1, step)
            filled += step

    def energy_j(self) -> float | None:
        """Return what the device has consumed since some fixed moment, in joules; None if unknown. Never raises."""
        return None

    @abc.abstractmethod
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of device memory now."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything this backend still holds."""


def _pitch(array: np.ndarray) -> int:
    rows, cols = array.shape
    if rows > 1 and array.size and array.strides[0] != array.itemsize:
        raise ParamError(f"an array with strides {array.strides} is not F-ordered")
    return int(array.strides[1]) if cols > 1 and rows else max(rows, 1) * array.itemsize
