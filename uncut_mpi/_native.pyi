"""Inner loops of uncut_mpi: the schedulers, lowering, the simulator and the CUDA executor."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from uncut_mpi.device.interface import FlagTable, ProgressBoard
from uncut_mpi.planning.lower import OperationList
from uncut_mpi.planning.options import Blocking

# -- the schedulers ----------------------------------------------------------------------------

class TooManyTasksError(RuntimeError):
    """A schedule would have more than `most_tasks` tasks."""

class UncutInput:
    """What the scheduler of the Uncut-GEMMs paper works on; planning/uncut.py fills it."""

    m: int
    n: int
    k: int
    tile: int
    num_ranks: int
    most_tasks: int
    op_a: int
    op_b: int
    reads_c: bool
    dtypes: tuple[int, int, int]
    caching: bool
    overlap: bool
    batch: bool
    lazy: bool
    eta_order: bool
    routing: int
    finish_first: bool
    chunks: int
    chunks_per_hop: int
    serial_copies: bool
    compute_lanes: int
    min_chunk_columns: int
    min_chunk_bytes: int
    row_starts: Sequence[int]
    col_starts: Sequence[int]
    cell_rank: list[int]
    owned: list[list[int]]
    a_panel: list[int]
    b_panel: list[int]
    c_panel: list[int]
    c_staging: list[int]
    max_hops: int
    relay_gain: float
    first_cache: int
    cache_bytes: list[int]
    tile_shape: tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
    tile_bytes: tuple[int, ...]
    port_ps_per_byte: list[float]
    port_uses: list[tuple[int, int, int, float]]
    ps_per_byte: list[float]
    latency_ps: list[int]
    ps_per_flop: list[float]
    def __init__(self, like: UncutInput = ..., /) -> None: ...
    def set_pieces(self, locations: np.ndarray, buffers: np.ndarray, pieces: np.ndarray, /) -> None:
        """Those of A, B and C, as records, after extents and transposes; locations `with_ends`."""

def schedule_uncut(
    input: UncutInput,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int, int]], int]:
    """
    Return (tasks, operands, regions, awaits, lanes, caches, end in picoseconds).

    Tables are uint8 arrays, caches (rank, matrix, tiles). TooManyTasksError if there are more than `most_tasks`.
    """

class Meeting:
    """Records given to all ranks of a node through memory that they share; csrc/meeting.cpp."""

    def __init__(self, memory: np.ndarray, rank: int, size: int, record_bytes: int) -> None: ...
    @staticmethod
    def memory_bytes(size: int) -> int: ...
    def meet(self, mine: np.ndarray, everyone: np.ndarray, spin_s: float) -> int: ...
    def collect(self, everyone: np.ndarray, spin_s: float) -> int: ...
    def leave(self, reason: str) -> None: ...
    @property
    def left(self) -> list[tuple[int, str]]: ...
    @property
    def pending(self) -> bool: ...

def capsule(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    type: tuple[int, int],
    device: tuple[int, int],
    keep: Any,
) -> Any:
    """Return memory as a capsule of DLPack: strides in elements, the type's code and bits. It keeps `keep` alive."""

def look(capsule: object) -> tuple[int, int, int, list[int], list[int], int, int, int] | None:
    """
    Return what a capsule of DLPack shows; None if it is no new one.

    These are its major version (0 where it says none), flags, address, shape, strides in elements, and the type's code,
    bits and lanes. Of a version above 1 there is the version alone.
    """

class KBlocksProblem:
    """What all schedules of a problem on a machine have in common; planning/kblocks_request.py makes it."""

    def __init__(
        self,
        *,
        num_ranks: int,
        serial_copies: bool,
        op_a: int,
        op_b: int,
        reads_c: bool,
        dtypes: tuple[int, int, int],
        locations: np.ndarray,
        buffers: np.ndarray,
        pieces: np.ndarray,
        step: int,
        min_slice_bytes: int,
        relay_bytes: int,
        ways: object,
    ) -> None:
        """Buffers and pieces are those of A, B and C, locations `with_ends`, all as records."""

class KBlocking:
    """How a rank's part of a product is cut, and in which order it is taken; planning/blocking.py makes it."""

    def __init__(
        self,
        how: Blocking,
        *,
        order: int,
        earliest: bool,
        tail_parts: int,
        far_apart: bool,
        from_held: bool,
        returns: bool,
        at_owner: bool,
    ) -> None: ...
    def count_k_blocks(self, extent: int, /) -> int:
        """Return how many k-blocks there are of so many elements of k, give or take one, without making them."""

    def steps(self, extent: int, /) -> list[tuple[int, int, int, int, int, int, int, bool]]:
        """Return (step, k start, k stop, first, last, top, bottom, early) of each step."""

class KBlocksPlaces:
    """How C is cut, as planning.partition.Partition has it: rows and columns of the block of each place."""

    def __init__(self, blocks: Sequence[tuple[tuple[int, int], tuple[int, int]]], /) -> None: ...

class KBlocksRequest:
    """What is asked of the scheduler of few large products; ValueError if it does not fit together."""

    def __init__(
        self,
        *,
        problem: KBlocksProblem,
        how: KBlocking,
        k_starts: Sequence[int],
        devices: Sequence[int],
        rounds: Sequence[KBlocksPlaces],
        aligns_for: SimulatedMachine | None = None,
    ) -> None:
        """
        Part s of k of place p goes to number s * places + p of `devices`; ranks take one round after the other.

        Products are aligned where that pays on the machine, if one is named.
        """

    @property
    def aligned(self) -> list[tuple[bool, bool, bool, int]]:
        """(copies A, copies B, sums apart, k step) of each block of C that has elements, and each part of k."""

    @property
    def tasks_at_most(self) -> int:
        """More than there are tasks, found without looking at any, so that nobody counts where this is few."""

    @property
    def steps_digest(self) -> int:
        """The same for the same steps, and for others in one of 2**64 cases."""

class KBlocksLayout:
    """Who forms which blocks of C, and where what they need lies."""

    def __init__(self, request: KBlocksRequest) -> None: ...
    @property
    def rank_bytes(self) -> list[int]:
        """What the buffers of each rank take."""

    def count(self, most_tasks: int) -> int:
        """Return how many tasks there are, or one more than so many."""

    def tables(self, most_tasks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return (tasks, operands, regions, awaits, lanes, buffers) as uint8 arrays; or TooManyTasksError."""

class KBlocksRun:
    """
    A schedule of `kblocks` and its simulated run, by `make` or `Simulations.begin_kblocks`; read it when that ended.

    Buffers have so many bytes of each rank, and a schedule of more tasks is given up.
    """

    def __init__(self, request: KBlocksRequest, room: Sequence[int], most_tasks: int, keeps: bool = False) -> None: ...
    @property
    def fits(self) -> bool:
        """Whether buffers have the room; there is nothing else if not."""

    @property
    def num_tasks(self) -> int:
        """How many tasks there are, or one more than there may be."""

    @property
    def num_products(self) -> int:
        """How many of the tasks are products."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of copies from one memory to another."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers of all ranks."""

    @property
    def seconds(self) -> float:
        """End of the last task."""

    @property
    def keeps(self) -> bool:
        """Whether tables and times are kept."""

    def make(self, machine: SimulatedMachine, /) -> None:
        """Make it here, at once; ValueError if it was begun before."""

    def tables(self) -> tuple[np.ndarray, ...]:
        """Return what `KBlocksLayout.tables` returns; ValueError if it is not kept."""

    def times(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what `simulate` returns; ValueError if it is not kept."""

    def progress(self) -> tuple[list[float], list[int]]:
        """Return the end of each rank's last product (s, 0 without any), and how many numbers its products multiply."""

def block_edges(extent: int, blocks: int, step: int) -> list[int]:
    """
    Return where blocks of rows or columns start, and the extent at the end.

    Of several equal blocks the last one is halved as planning.blocking.HALVINGS says. Blocks start at multiples of 256
    elements, which a library's kernels compute at a time, if equal blocks have four times as many. Else at multiples of
    128, and so on, of `step` where that leaves none empty. Calls with other blocks took 1 to 23 % longer
    (``docs/performance.md``, 2026-11-26, blocks at multiples of 256).
    """

# -- the contract ------------------------------------------------------------------------------

def contract() -> dict[str, Any]:
    """Return records (bytes, (field, offset, bytes) of each), enumerations, element types and limits."""

# -- the tables of a schedule -----------------------------------------------------------------

class ScheduleTables:
    """The tables of a schedule, contiguous, where they are; ValueError if one ends inside a record."""

    def __init__(
        self,
        tasks: np.ndarray,
        operands: np.ndarray,
        regions: np.ndarray,
        awaits: np.ndarray,
        buffers: np.ndarray,
        lanes: np.ndarray,
        locations: np.ndarray,
        /,
    ) -> None: ...

# -- staging -----------------------------------------------------------------------------------

_LaneFields: TypeAlias = tuple[int, int, int, int]
"""Rank, kind, source and destination."""

class Staging:
    """
    A schedule in which some of the caller's buffers get stand-ins, which all but some owners use in their place.

    Parameters
    ----------
    tables : ScheduleTables
        Of the schedule.
    turned : ndarray of uint8
        Of each buffer whether it is stored the other way round than the schedule has it.
    reads_c : bool
        Whether C is read.

    Attributes
    ----------
    used_by_others : list of int
        Of each buffer whether anybody cannot use it where it is.
    rows, cols : list of int
        Of each buffer the most rows and columns that a task uses.
    """

    used_by_others: list[int]
    rows: list[int]
    cols: list[int]

    def __init__(self, tables: ScheduleTables, turned: np.ndarray, reads_c: bool, /) -> None: ...
    def divide(self, most_elements: list[int], /) -> int:
        """
        Have copies from and to buffers made in pieces of so many elements at most (0: as they are).

        Returns how many tasks there are then.
        """

    def run(
        self, num_ranks: int, stand_ins: list[tuple[int, int, int, _LaneFields, _LaneFields]], /
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """
        Return (tasks, operands, regions, awaits, lanes) as uint8 arrays; once.

        A stand-in is (the caller's buffer, the one in its place, columns of a ring or 0, lane in, lane out).
        """

# -- lowering ----------------------------------------------------------------------------------

def lower(
    tables: ScheduleTables, num_ranks: int, rank: int
) -> tuple[list[tuple[np.ndarray, np.ndarray, int, np.ndarray]], np.ndarray, int]:
    """
    Return lists of operations, waits and the span; with `rank` below 0 lists of all ranks are made, else others empty.

    A list has operations and bound operands (uint8), the number of events, and the lane that writes each flag in its
    rank's memory (int32), made of all ranks. Waits are the waiting and the awaited task of each, in turns (int32).
    """

def prove_lists(tables: ScheduleTables, lists: list[tuple[np.ndarray, np.ndarray, int]], span: int) -> int:
    """
    Return how many awaits between lanes the lists of all ranks, (operations, lanes of flags, events), imply.

    Their operations stand in the places of their tasks, on their lanes. ValueError: what is wrong.
    """

# -- shares of a grid --------------------------------------------------------------------------

def fit_shares(speeds: list[float], rows: int) -> tuple[list[float], list[float], float]:
    """Return (rows, columns, their products' sum) with the product at each place at most its speed."""

# -- the follower ------------------------------------------------------------------------------

class RuleBroken(Exception):
    """A rule of schedules is broken; in the text ``<task 3>`` and ``<buffer 3>`` stand for their descriptions."""

class Follower:
    """
    What memory holds while tasks run, derived from them alone, and whether each task is ordered after what it needs.

    It keeps about 250 bytes for each rectangle of memory with a writer or content of its own, 12 for every task, and a
    clock of 4 bytes per lane for each lane and for each task that a later one still awaits.

    Parameters
    ----------
    tables : ScheduleTables
        Of which buffers, lanes and locations are looked at.
    op_a, op_b : int
    dtypes : tuple of int
        The problem's.
    """

    def __init__(self, tables: ScheduleTables, op_a: int, op_b: int, dtypes: tuple[int, int, int], /) -> None: ...
    def give(
        self,
        buffer: int,
        rows: tuple[int, int],
        cols: tuple[int, int],
        by: tuple[int, int],
        turned: bool,
        matrix: int,
    ) -> None:
        """
        Say that a rectangle of a buffer is the caller's A or B and only read; −1: holds nothing that may be.

        Its elements are those of the matrix `by` so many rows and columns further on; if it is `turned`, with row and
        column exchanged before that.
        """

    def expect(
        self,
        buffer: int,
        rows: tuple[int, int],
        cols: tuple[int, int],
        by: tuple[int, int],
        turned: bool,
        summed: Sequence[tuple[int, int]],
        alpha: bool,
        c_in: int,
        copied: bool,
    ) -> None:
        """
        Say what a rectangle of the caller's C must hold: a `ResultPart` of `model.problem`, the others as of `give`.

        C_in is there at first, if it takes part. RuleBroken if some of it has been said before or is no part of C.
        """

    def keep_held(self) -> None:
        """Keep from now on what every operand holds, written ones after their tasks."""

    def take_held(self) -> np.ndarray:
        """Return what was kept since the last time, as the bytes of `planning.verify.HELD_DTYPE`."""

    def follow(self, tables: ScheduleTables, /) -> None:
        """Follow all tasks, once. ValueError if a table points outside of another."""

    def finish(self) -> None:
        """Check that all that was expected is there, and that all of the caller's C was spoken of."""

    @property
    def reads(self) -> int:
        """Operands read."""

    @property
    def writes(self) -> int:
        """Operands written so far."""

# -- the simulator -----------------------------------------------------------------------------

class ProductCost:
    """GemmShape of model/costs.py, with its fields in order."""

    def __init__(
        self,
        block_rows: float,
        block_cols: float,
        half_depth: float,
        overhead_s: float,
        tail_elements: float,
        c_s_per_byte: float,
        uneven: float,
        misaligned: float,
        idle_use: float,
        waves: bool,
        c_half_depth: float,
        copy_share: float,
        sum_wait: float,
        sustained: float,
        /,
    ) -> None: ...
    def work(self, m: int, n: int, k: int, multiprocessors: int, aligned: bool, /) -> tuple[float, float]:
        """Return (operations, occupancy)."""

    def moving_s(self, extra_bytes: float, k: int, /) -> float: ...
    def block_s(self, k: int, multiprocessors: int, flop_per_s: float, /) -> float: ...
    def seconds(self, operations: float, flop_per_s: float, extra_bytes: float, k: int, /) -> float: ...

def is_uneven(m: int, n: int, /) -> bool:
    """Return whether C has rows or columns above 256 that are no multiple of it."""

def row_share(table: list[tuple[float, float]], width: float, /) -> float:
    """Return what a copy of rows so many bytes wide gets of the bandwidth."""

def host_row_share(table: list[tuple[float, float]], width: int, distance: int, offset: int, /) -> float:
    """Return the same of rows in host memory so far apart, the first so many bytes behind a line; -1: anywhere."""

class SimulatedMachine:
    """A machine as the simulator takes it; bytes and seconds; planning/simulate.py fills it."""

    num_ranks: int
    num_ends: int
    bandwidth: list[float]
    latency: list[float]
    port_capacity: list[float]
    port_uses: list[tuple[int, int, float]]
    gemm_rate: list[float]
    products: list[ProductCost]
    multiprocessors: list[int]
    combine_rate: list[float]
    half_combine_rate: list[float]
    combine_start_s: float
    rest_gain: float
    row_device: list[tuple[float, float]]
    row_local: list[tuple[float, float]]
    row_in: list[tuple[float, float]]
    row_out: list[tuple[float, float]]
    copy_s: float
    gemm_s: float
    combine_s: float
    wait_s: float
    signal_s: float
    event_s: float
    event_latency_s: float
    engine_latency_s: float
    kernel_latency_s: float
    flag_latency_s: float
    wait_lane_s: float
    signal_lane_s: float
    host_copy_rate: float
    file_read_rate: float
    file_write_rate: float
    file_call_s: float
    on_disk: bool
    host_transposed_rate: float
    transposing_share: float
    call_s: float
    issuing_threads: int
    serial_copies: bool
    def __init__(self) -> None: ...

def simulate(machine: SimulatedMachine, tables: ScheduleTables, /) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (start, end) of every task, and by rank what products take longer at the power limit, in seconds."""

class Simulations:
    """Simulations on a thread of their own, begun in order; whoever waits for one makes those that it has not begun."""

    def __init__(self, machine: SimulatedMachine, /) -> None: ...
    def begin(self, tables: ScheduleTables, /) -> int:
        """Return a ticket for `wait`; IndexError after `close`."""

    def begin_kblocks(self, run: KBlocksRun, /) -> int:
        """Return the same for a schedule that is to be made first; there is nothing then that `wait` returns."""

    def wait(self, ticket: int, /) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what `simulate` returns, once for each ticket; IndexError else."""

    def close(self) -> None:
        """End the thread; what was not waited for is dropped."""

# -- the CUDA executor -------------------------------------------------------------------------

class CudaError(RuntimeError):
    """A CUDA or cuBLAS call failed; args are (message, code), code −1 where the system gave none."""

class CudaDriver:
    def __init__(self, library: str = "libcuda.so.1") -> None: ...
    def uuid(self, ordinal: int) -> bytes: ...

class CudaBlas:
    def __init__(self, library: str = "") -> None: ...
    path: Final[str]

class CudaDevice:
    def __init__(self, driver: CudaDriver, blas: CudaBlas, ordinal: int) -> None: ...
    @property
    def abandoned(self) -> bool: ...
    def reserve(self, compute_lanes: int, copy_lanes: int, events: int) -> None: ...
    def compute_stream(self, number: int) -> int: ...
    def mark_streams(self, streams: list[int]) -> None: ...
    def await_marks(self) -> None: ...
    def run_on_nothing(self, kernel: int) -> None: ...
    def fill_words(self, address: int, count: int, value: int) -> None: ...
    def tune_products(self, least_operations: float, timing: bool, most: int = 1024) -> None: ...
    def tuned_products(self) -> list[tuple[list[int], float, float]]: ...
    def pointer_attribute(self, attribute: int, address: int) -> int: ...
    def close(self) -> None: ...

class CudaRunResult:
    tasks: Final[int]
    copy_bytes: Final[int]
    issue_s: Final[float]
    drain_s: Final[float]
    error: Final[str]
    operation: Final[int]
    file_error: Final[int]
    descriptor: Final[int]
    fatal: Final[bool]
    stalled: Final[bool]
    aborted: Final[bool]
    stuck: Final[list[tuple[int, int]]]
    times_s: Final[list[float]]
    host_times: Final[list[tuple[int, float, float]]]

class CudaRun:
    def __init__(
        self, executor: CudaExecutor, alpha: complex, beta: complex, epoch: int, timeout_s: float, traced: bool, /
    ) -> None: ...
    def poll(self) -> bool: ...
    def finish(self) -> CudaRunResult: ...

class CudaExecutor:
    def __init__(
        self,
        device: CudaDevice,
        operations: OperationList,
        addresses: np.ndarray,
        flags: FlagTable,
        board: ProgressBoard,
        kernel: Callable[[int], int],
        files: Sequence[HostFile],
        /,
    ) -> None: ...
    def run(self, alpha: complex, beta: complex, epoch: int, timeout_s: float, traced: bool, /) -> CudaRunResult: ...
    def prepare_trace(self) -> None: ...

class HostFile:
    """A file whose first byte an address stands for."""

    def __init__(self, begin: int, bytes: int, descriptor: int) -> None: ...

def copy_with_files(
    files: Sequence[HostFile],
    to: tuple[int, int],
    source: tuple[int, int],
    width: int,
    columns: int,
    transposed_bytes: int,
) -> tuple[int, int]:
    """
    Copy columns of so many bytes (`width`), one end or both in files.

    An end is an address and the bytes from one column to the next. Elements of `transposed_bytes` are transposed, if
    not 0: then columns are rows of the source. Returns 0, an error number of the system, or −1 if the file ends before,
    and the descriptor of the file.
    """
