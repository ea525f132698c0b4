"""
Sessions: a communicator with its devices, buffers and bounded plan cache.

Every method marked collective must be called by all ranks of the session, in the same order and
with the same arguments; where ranks differ in either, all of them raise the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import numpy as np

from uncut_mpi.api import lifetime
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.dealing import proposed
from uncut_mpi.api.exclusive import end_call, public_call
from uncut_mpi.api.gate import CLOSE
from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.holdings import HalfOpened, Holdings
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.measure import obtain_machine
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.plans import PlanKey
from uncut_mpi.api.request import Choices, Operands, Request, Scalars, infos_of
from uncut_mpi.api.start import BackendMaker, start_backend
from uncut_mpi.api.wanted import (
    NewMatrix,
    layout_of,
    new_matrix,
    new_result,
    out_layout_of,
    own_memory,
    parts_of,
    possible_results,
    rank_of,
    shape_of,
)
from uncut_mpi.api.wording import matrix_text, product_text, value_text
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import ParamError, UncutError, agreed, is_agreed
from uncut_mpi.model.arguments import BackendName, flag, real_number, shown, whole_number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Memory, memory_of
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.problem import Order, Trans
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import OPENING, Group
from uncut_mpi.spmd.runtime import is_fork

logger = logging.getLogger("uncut_mpi")
_T = TypeVar("_T")


class Session:
    """
    A communicator with its devices, buffers and bounded plan cache. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks that multiply together; duplicated, so that no message of the program is touched.
        All of them on one node.
    backend : str or callable, default "auto"
        ``"cuda"`` (one GPU per rank; never falls back), ``"host"`` (numpy), or ``"auto"``: cuda if
        every rank can have a GPU of its own or `devices` are named, else host; `backend_reason` says why. A callable
        ``(local rank, ranks) -> Backend`` gives one of the caller's own.
    devices : sequence of int, optional
        Device ordinal of each rank of `comm`. By default a process takes the only GPU that it sees or, of
        several, the i-th, if it is process i of the job on this node: the same GPU in every session,
        whatever its rank in `comm`.
    allow_shared_gpu : bool, default False
        Let several ranks use one GPU (slow; for tests).
    machine : Machine, optional
        Measured links and rates to plan with; by default those kept for this hardware, measured in
        under 3 s at the first session, and again as long as the machine was busy then.
    timeout_s : float, default 60
        A call fails when no task, nor a part of a long one, finishes anywhere for so long.
    arrival_timeout_s : float, optional
        A call, the opening of this session too, fails when a rank begins no call for so long after this one; by
        default ranks wait for each other as in any MPI call. `gather_values` and `together` wait for what ranks do on
        their own, and have no limit.
    max_plans : int, default 32
        Plans that one-shot calls keep; the least recently used goes first.
    verify : bool, default False
        Prove every schedule, and what was lowered from it, before its first use.
    tune_products : bool, default False
        Choose the kernels of products in f32, tf32, f16 and bf16 by timing what cuBLAS proposes for their shapes when a
        plan is made, some ms for each, in f32 up to 0.2 s. Two processes may choose differently, and results then
        differ in the last bits; without it cuBLAS chooses, by the shapes alone. Other types and the host backend have
        nothing to tune.
    check_peers : bool, default True
        Let every rank write a pattern into each other's device memory, and that rank look whether it has come, before
        anything else: some ms, once for these devices in these processes.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are.
    backend_name, backend_reason : str
        ``"cuda"`` or ``"host"``, and why.
    device_names : list of str
        Device of every rank.
    device_uuids : list of str
        What identifies each of them over all processes of the node.
    devices_shared : bool
        Whether ranks share a device.
    machine : Machine
        What plans are made with.
    counters : Counters
        What this rank has done so far.

    Raises
    ------
    ParamError, TopologyError
        On all ranks; see the parameters.
    StallError
        If another rank opens no session within `arrival_timeout_s`, where one was given.
    PeerFailedError
        If another rank was interrupted while the session opened; names it.
    """

    @public_call
    def __init__(
        self,
        comm: Any,
        *,
        backend: BackendName | BackendMaker = "auto",
        devices: Sequence[int] | None = None,
        allow_shared_gpu: bool = False,
        machine: Machine | None = None,
        timeout_s: float = 60.0,
        arrival_timeout_s: float | None = None,
        max_plans: int = 32,
        verify: bool = False,
        tune_products: bool = False,
        check_peers: bool = True,
    ) -> None:
        try:
            limit_s = None if arrival_timeout_s is None else _seconds("arrival_timeout_s", arrival_timeout_s)
        except ParamError:  # raised below, on all ranks
            limit_s = None
        self._group = Group(comm, limit_s)
        backend_made: Backend | None = None
        control: Control | None = None
        ticket: lifetime.Ticket | None = None
        calls: Calls | None = None
        try:
            control = Control(self._group)
            self._ticket = ticket = lifetime.enter(self._group)
            with agreement.collective(self._group, OPENING):
                if machine is not None and not isinstance(machine, Machine):
                    raise ParamError(
                        f"machine = {shown(machine)} is no Machine: pass load_machine(name or file), or leave it out"
                    )
                max_plans = whole_number("max_plans", max_plans)
                if max_plans < 1:
                    raise ParamError(f"max_plans = {max_plans} is below 1")
                timeout_s = _seconds("timeout_s", timeout_s)
                if arrival_timeout_s is not None:
                    limit_s = _seconds("arrival_timeout_s", arrival_timeout_s)
                verify, tune_products = flag("verify", verify), flag("tune_products", tune_products)
            settings = f"max_plans {max_plans}, verify {verify}, tune_products {tune_products}"
            agreement.agree(self._group, settings.encode(), lambda: settings)
            started = start_backend(
                self._group,
                backend=backend,
                devices=devices,
                allow_shared_gpu=allow_shared_gpu,
                check_peers=check_peers,
            )
            self._backend = backend_made = started.backend
            self.backend_name = started.backend.name
            self.backend_reason = started.reason
            self.device_names = [identity.name for identity in started.identities]
            self.device_uuids = [identity.uuid for identity in started.identities]
            self.devices_shared = started.shared
            if started.shared:
                logger.warning("ranks share a GPU, which is slow: start one rank per GPU")
            self.counters = Counters()
            self.machine = obtain_machine(self._group, self._backend, started.identities, machine)
            self._backend.tune_products(tune=tune_products)  # not in the measurement, which other sessions use too
            self._store = MatrixStore(self._group, self._backend, self.counters)
            self._maker = PlanMaker(self._group, self.counters, self.machine, verify=verify)
            self._calls = calls = Calls(
                self._group,
                self._backend,
                self._store,
                self.counters,
                self._maker,
                control=control,
                device_key=self.device_uuids[self.rank],
                timeout_s=timeout_s,
                arrival_timeout_s=limit_s,
            )
            self._gate = calls.gate
            self._plans = PlanCache(max_plans, calls.binder.drop)
            self._holdings = Holdings(self._group, self._backend, self._store, calls, self._plans)
            logger.info("rank %d of %d: %s backend (%s)", self.rank, self.size, self.backend_name, self.backend_reason)
            lifetime.keep(self, ticket, self._gate.leave, self._holdings)
        except BaseException as error:
            together = is_agreed(error) and not self._group.stalled
            if control is not None and not together:
                control.exchange.leave(type(error).__name__)
            if calls is not None:
                calls.let_go()
            elif control is not None:
                control.close()
            if together and backend_made is not None:
                backend_made.close()
            elif ticket is not None and not together:
                lifetime.keep_half_opened(ticket, HalfOpened(backend_made))
            self._group.free()
            raise

    # -- facts -------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of this process in the session's communicator."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def versions(self) -> dict[str, str]:
        """What computes on this rank: ``"blas"`` and, with cuda, ``"cupy"``, ``"cuda"`` and ``"driver"``."""
        return self._backend.versions()

    def energy_j(self) -> float | None:
        """Return what this rank's device has consumed since some moment (J), or None where unknown. Local."""
        return self._backend.energy_j()

    @property
    def broken(self) -> bool:
        """Whether no call is possible any more: one did not end on all ranks, or a rank has left the session."""
        return self._gate.broken or self._gate.left

    # -- matrices ----------------------------------------------------------------------------

    @public_call
    def empty_host(self, shape: Sequence[int], dtype: object = np.float64, *, order: Order = "C") -> Matrix:
        """
        Return an uninitialised host matrix that every rank of the node reads and writes. Collective.

        One segment per node, pinned for every rank's device; each rank's `Matrix.array` is a view of it.

        Parameters
        ----------
        shape : sequence of two int
            Rows and columns.
        dtype : numpy dtype or str
            float64, float32, float16 or ml_dtypes.bfloat16 (or f64, f32, f16, bf16; tf32, which is float32 in memory).
        order : {"C", "F"}
            Storage order.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        CapacityError
            If the node has too little memory for it; nothing is left behind.
        """
        with self._gate.exclusive():
            whole = Layout.whole(0)
            return self._store.empty(
                self._begin_converted("empty_host", lambda: new_matrix(shape, dtype, order, whole, "shared"))
            )

    @public_call
    def empty_device(
        self, shape: Sequence[int], dtype: object = np.float64, *, rank: int, order: Order = "C"
    ) -> Matrix:
        """
        Return an uninitialised matrix in the device memory of one rank. Collective.

        `Matrix.array` is a cupy array there (a numpy array with the host backend), None elsewhere.

        Parameters
        ----------
        shape, dtype, order
            As of `empty_host`.
        rank : int
            Whose device.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        CapacityError
            If that device has too little memory.
        """

        def convert() -> NewMatrix:
            return new_matrix(shape, dtype, order, Layout.whole(rank_of("rank", rank, self.size)), "device")

        with self._gate.exclusive():
            return self._store.empty(self._begin_converted("empty_device", convert))

    @public_call
    def empty(
        self,
        shape: Sequence[int],
        dtype: object,
        layout: Layout,
        *,
        order: Order = "C",
        memory: Memory = "device",
    ) -> Matrix:
        """
        Return an uninitialised matrix that is dealt to ranks. Collective.

        Parameters
        ----------
        shape, dtype, order
            As of `empty_host`.
        layout : Layout
            What each rank has; `Matrix.local` is that.
        memory : {"device", "host", "shared"}
            Where: in the memory of each rank's device, in host memory of each rank alone, or in one segment of host
            memory that every rank of the node reads and writes, of which each `Matrix.local` is a view.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks; if the layout does not fit the shape or the
            number of ranks.
        CapacityError
            If a rank has too little memory.
        """

        def convert() -> NewMatrix:
            wanted = new_matrix(shape, dtype, order, layout_of(layout), memory)
            wanted.layout.rectangles(wanted.shape, self.size)
            return wanted

        with self._gate.exclusive():
            return self._store.empty(self._begin_converted("empty", convert))

    @public_call
    def distribute(
        self, local: Any, layout: Layout, *, shape: Sequence[int] | None = None, dtype: object = None
    ) -> Matrix:
        """
        Make arrays of the ranks one matrix, of which each is a part, without a copy. Collective.

        Parameters
        ----------
        local : array or None
            This rank's part, as of `register`; None, or an array without elements, where it has none. Memory, order and
            leading dimension may differ between ranks.
        layout : Layout
            How the matrix is dealt to ranks. Of ``Layout.rows()`` and ``Layout.cols()`` without counts, the arrays say
            how many each rank has.
        shape : sequence of two int, optional
            Rows and columns of the matrix; needed where neither counts nor arrays say them.
        dtype : str or DType, optional
            As of `register`; needed where no rank has an array.

        Returns
        -------
        Matrix
            Its `Matrix.local` is the array that was given, which is kept alive; of a rank that gave None an array of
            the part's shape, without elements.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks, with rank: value. If arrays do not add up to the shape or are of different types; if ranks
            pass different layouts, shapes or types; as `register`.

        Notes
        -----
        What `register` says of memory holds for each part. Arrays of ``Layout.replicated()`` must be equal: one of them
        is read, and as C all are written.
        """

        def convert() -> tuple[Layout, tuple[int, int] | None, DType | None]:
            return (
                layout_of(layout),
                None if shape is None else shape_of(shape),
                None if dtype is None else DType.parse(dtype),
            )

        def text(asked: tuple[Layout, tuple[int, int] | None, DType | None]) -> str:
            return f"distribute(layout={asked[0]}, shape={asked[1]}, dtype={asked[2]!r})"

        with self._gate.exclusive():
            asked = self._begin_converted("distribute", convert, text)
            return self._store.distribute([] if local is None else [(local, (0, 0))], *asked)

    @public_call
    def distribute_parts(
        self, parts: Sequence[tuple[Any, tuple[int, int]]], *, shape: Sequence[int], dtype: object = None
    ) -> Matrix:
        """
        Make arrays of the ranks one matrix, each of which says where it is, without a copy. Collective.

        Parameters
        ----------
        parts : sequence of (array, (int, int))
            What this rank has: any number of arrays as of `distribute`, each with its first row and column.
        shape : sequence of two int
            Rows and columns of the matrix.
        dtype : str or DType, optional
            As of `distribute`.

        Returns
        -------
        Matrix
            Its `Matrix.local` is a tuple of the arrays.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks. If parts overlap, leave the matrix or leave an element of it out; as `distribute`. Parts of
            equal rows and columns on several ranks are replicas.
        """

        def convert() -> tuple[list[tuple[Any, tuple[int, int]]], tuple[int, int], DType | None]:
            return parts_of(parts), shape_of(shape), None if dtype is None else DType.parse(dtype)

        with self._gate.exclusive():
            given, extents, kind = self._begin_converted(
                "distribute_parts", convert, lambda asked: f"distribute_parts(shape={asked[1]}, dtype={asked[2]!r})"
            )
            return self._store.distribute(given, None, extents, kind)

    @public_call
    def register(self, array: Any, *, root: int, dtype: object = None) -> Matrix:
        """
        Make an existing array of one rank usable by all, without a copy. Collective.

        Parameters
        ----------
        array : array on rank `root`; ignored elsewhere (pass None)
            Two-dimensional, rows or columns contiguous (any leading dimension): of numpy or cupy, or anything that
            shows its memory by ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``, as tensors of
            torch and jax do. It lies in host memory or on the device of `root`. What its library has enqueued on its
            current stream so far is awaited.
        root : int
            The rank that has it; the same on all ranks.
        dtype : str or DType, optional
            What its products are computed in, the same on all ranks: ``"tf32"`` for a float32 array, to use TF32; else
            that of the array.

        Returns
        -------
        Matrix
            On `root` its `Matrix.array` is the array, or one of numpy or cupy over the same memory; what was
            registered is kept alive.

        Raises
        ------
        ParamError
            On all ranks: if it is not such an array, or means more than what lies in its memory (masked elements,
            units, a gradient); if ranks name different roots.

        Notes
        -----
        A view of a matrix of this session in shared host memory (`empty_host`) stays shared: all ranks read and write
        it, and `Matrix.array` is a view on each. All other host memory is private to `root`: only its link reaches
        it. What CUDA cannot page-lock of that, a thread of `root` copies to and from memory that is, during each call
        (`PlanSummary.staged`), which takes longer. Read-only arrays, and those of libraries whose arrays never change
        (jax), can be A or B, not C.

        What is the same memory is judged by the memory, not by its address: two maps of one file, a window of MPI,
        shared memory of other sessions and processes, managed memory seen from host and device are known. It cannot
        be known of device memory that the program itself has mapped from another process (CUDA IPC, virtual memory
        management) and of what drivers other than CUDA's map (XPMEM). C must not overlap A or B there either. It is
        looked up once: leave a registered mapping as it is, and a mapped file no shorter, until the release.
        """

        def convert() -> tuple[int, DType | None]:
            return rank_of("root", root, self.size), None if dtype is None else DType.parse(dtype)

        with self._gate.exclusive():
            # Roots are compared by the store, whose error says what a matrix is.
            place, kind = self._begin_converted("register", convert, lambda asked: f"register(dtype={asked[1]!r})")
            return self._store.register(array, place, kind)

    @public_call
    def barrier(self) -> None:
        """
        Wait until every rank is here. Collective.

        Raises
        ------
        StallError
            If they are not within `arrival_timeout_s`, where one was given.
        """
        with self._gate.exclusive():
            self._gate.begin("barrier", "barrier()")

    @public_call
    def agree(self, value: object, what: str) -> None:
        """
        Check that every rank passes an equal value. Collective.

        Parameters
        ----------
        value : object
            Compared by its ``repr``.
        what : str
            What it is, for the error.

        Raises
        ------
        RankMismatchError
            On all ranks, listing rank: value.
        """
        with self._gate.exclusive():
            self._begin_converted("agree", lambda: value_text(what, value))

    def together(self, what: str) -> AbstractContextManager[None]:
        """
        Return a context in which a rank may fail alone: its error leaves the block on every rank. Collective.

        The ranks meet when they leave it, and it must hold no collective call.

        Parameters
        ----------
        what : str
            What is being done, for the error; the same on all ranks.
        """
        return self._gate.together(what)

    @public_call
    def gather_values(self, value: Any) -> list[Any]:
        """Return a small picklable value of every rank, in rank order. Collective."""
        with self._gate.exclusive():
            self._gate.begin("gather_values", "gather_values()", waits_for_ever=True)
            return self._group.allgather_objects(value)

    @public_call
    def scatter(self, array: Any, layout: Layout, root: int = 0, *, memory: Memory = "device") -> Matrix:
        """
        Return a new matrix with the elements of an array of one rank, dealt to ranks. Collective.

        Parameters
        ----------
        array : array on rank `root`; ignored elsewhere (pass None)
            As of `register`.
        layout : Layout
            What each rank is to have.
        root : int, default 0
            The rank that has the array.
        memory : {"device", "host", "shared"}
            As of `empty`.

        Raises
        ------
        ParamError, CapacityError
            As `register` and `empty`.
        """

        def convert() -> tuple[int, Layout, Memory]:
            return rank_of("root", root, self.size), layout_of(layout), memory_of(memory)

        def text(asked: tuple[int, Layout, Memory]) -> str:
            return f"scatter(layout={asked[1]}, root={asked[0]}, memory={asked[2]!r})"

        with self._gate.exclusive():
            place, wanted, where = self._begin_converted("scatter", convert, text)
            source = self._store.register(array, place)
            made = self._store.empty(NewMatrix(source.shape, source.dtype, source.order, wanted, where))
            self._copy("scatter", source, made)
            self._store.release(source)
        return made

    @public_call
    def gather(self, matrix: Matrix, root: int = 0) -> np.ndarray | None:
        """
        Return all of a matrix as a new numpy array on one rank, None elsewhere. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any layout.
        root : int, default 0
            The rank that gets the array.

        Raises
        ------
        ParamError, CapacityError
            If the arguments are none of these, or the rank has too little memory.
        """

        def convert() -> tuple[Matrix, int]:
            return self._store.check("gather: matrix", matrix), rank_of("root", root, self.size)

        with self._gate.exclusive():
            source, place = self._begin_converted(
                "gather", convert, lambda asked: f"gather({matrix_text(asked[0])}, root={asked[1]})"
            )
            whole = NewMatrix(source.shape, source.dtype, source.order, Layout.whole(place), "host")
            made = self._store.empty(whole)
            self._copy("gather", source, made)
            array: np.ndarray | None = made.array
            self._store.release(made)
        return array

    @public_call
    def redistribute(
        self, matrix: Matrix, layout: Layout, *, out: Matrix | None = None, memory: Memory | None = None
    ) -> Matrix:
        """
        Copy a matrix into one that is dealt otherwise. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any layout.
        layout : Layout
            What each rank is to have.
        out : Matrix, optional
            Where it is copied to: a matrix of this layout, and of the same shape and type. By default a new one. Parts
            that are stored in another order are transposed on their way.
        memory : str, optional
            Of a new one, as of `empty`; by default each rank's is that of its part of `matrix`.

        Returns
        -------
        Matrix
            `out`, or the new one.

        Raises
        ------
        ParamError, CapacityError
            If arguments do not fit, or a rank has too little memory.
        """

        def convert() -> tuple[Matrix, Layout, Matrix | None, Memory | None]:
            source = self._store.check("redistribute: matrix", matrix)
            wanted = layout_of(layout)
            wanted.rectangles(source.shape, self.size)
            if out is None:
                return source, wanted, None, None if memory is None else memory_of(memory)
            target = self._store.check("redistribute: out", out)
            if memory is not None or target.layout != wanted.filled(source.shape, self.size):
                raise ParamError(
                    f"out is of layout {target.layout}, but layout {wanted} and memory {memory} were given: pass the "
                    "layout of out and no memory, or no out"
                )
            return source, wanted, target, None

        def text(asked: tuple[Matrix, Layout, Matrix | None, Memory | None]) -> str:
            return (
                f"redistribute({matrix_text(asked[0])}, {asked[1]}, out={matrix_text(asked[2])}, memory={asked[3]!r})"
            )

        with self._gate.exclusive():
            source, wanted, target, where = self._begin_converted("redistribute", convert, text)
            if target is None:
                about = source.shape, source.dtype, source.order
                target = self._store.empty(NewMatrix(*about, wanted, where or own_memory(source)))
            self._copy("redistribute", source, target)
        return target

    @public_call
    def poison_softbuf(self) -> None:
        """
        Fill every rank's SoftBuf with NaN, so that no call can profit from an earlier one's copies. Collective.

        For checks and for measurements that must not start with warm buffers.
        """
        with self._gate.exclusive():
            self._gate.begin("poison_softbuf", "poison_softbuf()")
            self._calls.binder.poison_softbuf()

    @public_call
    def download(self, matrix: Matrix) -> Matrix:
        """
        Return a host matrix that every rank reads with the elements of a matrix. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any location; one in shared host memory is returned as it is.
        """
        with self._gate.exclusive():
            self._begin_with("download", matrix=matrix)
            return self._store.download(matrix)

    @public_call
    def upload(self, source: Matrix, target: Matrix) -> None:
        """
        Copy a shared host matrix into a matrix of the same shape and type. Collective.

        Raises
        ------
        ParamError
            If shapes or types differ, or `source` is not in shared host memory.
        """
        with self._gate.exclusive():
            self._begin_with("upload", source=source, target=target)
            self._store.upload(source, target)

    @public_call
    def release(self, matrix: Matrix) -> None:
        """Give a matrix of this session back: unpin, unmap, free. Its views end with it. Collective."""

        def convert() -> Matrix:
            found = self._store.check("release: matrix", matrix)
            if found.info.view is not None:
                raise ParamError(f"{found.info} is a view and has no memory of its own: release the matrix")
            return found

        with self._gate.exclusive():
            found = self._begin_converted("release", convert, lambda found: f"release({matrix_text(found)})")
            self._store.release(found)

    # -- products ----------------------------------------------------------------------------

    def gemm(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        options: ScheduleOptions | None = None,
        out_layout: Layout | Literal["auto"] | None = None,
        stream: Any = None,
    ) -> Matrix:
        """
        Compute C := alpha op(A) op(B) + beta C. Collective.

        Parameters
        ----------
        a, b : Matrix
            op(A) is m×k, op(B) is k×n; same dtype.
        out : Matrix, optional
            C, m×n, overwritten. By default a new one in C order. Of two whole matrices (`register`, `empty_host`,
            `empty_device`, ``Layout.whole()``) it is a host matrix of all ranks (`empty_host`). Else it is dealt as
            op(A) if that leaves k whole, or as op(B) if that does, or by even rows; it lies in memory of the same kind
            as the operand that it follows, or A.
        alpha, beta : float
            Scalars. With beta = 0 C is not read, with alpha = 0 A and B are not.
        trans_a, trans_b : {"N", "T"}
            Whether op transposes.
        options : ScheduleOptions, optional
            What to fix about the schedule.
        out_layout : Layout or "auto", optional
            How a new C is dealt, also of two whole matrices, instead of by that rule; its memory is as by the rule for
            others. ``"auto"``: as op(A), as op(B), by even rows, columns or blocks, whichever is predicted to take the
            least time. The first such call plans for each of them.
        stream : optional
            Stream whose earlier work must be done first; the current one by default.

        Returns
        -------
        Matrix
            C.

        Raises
        ------
        ParamError
            If arguments do not fit or differ between ranks, C overlaps A or B in memory (as far as that can be
            known, see `register`), or beta is not 0 and there is no C. Nothing was computed.
        CapacityError
            If a device has too little memory for the SoftBuf.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        try:  # as `public_call` does, and quicker
            return self._gemm(a, b, out, alpha, beta, trans_a, trans_b, options, out_layout, stream)
        except BaseException as error:
            del self, a, b, out, stream
            end_call(error)
            raise

    @public_call
    def matmul(self, a: Matrix, b: Matrix) -> Matrix:
        """Return A B, a new matrix: `gemm` without anything else. Collective."""
        return self.gemm(a, b)

    @public_call
    def plan(
        self,
        a: Matrix,
        b: Matrix,
        c: Matrix,
        *,
        reads_c: bool = True,
        trans_a: Trans = "N",
        trans_b: Trans = "N",
        scales_only: bool = False,
        options: ScheduleOptions | None = None,
    ) -> GemmPlan:
        """
        Plan C := alpha op(A) op(B) + beta C once, for many executions. Collective.

        Parameters
        ----------
        a, b, c : Matrix
            As for `gemm`; others of the same shape, type, order, leading dimension and location
            may be given to `GemmPlan.execute`.
        reads_c : bool, default True
            False promises beta = 0 in every execution, and saves reading C.
        scales_only : bool, default False
            True promises alpha = 0 in every execution, and saves A and B: C is only scaled.

        Raises
        ------
        ParamError, PlanError, CapacityError
            On all ranks.
        """

        def convert() -> tuple[PlanKey, Operands, Choices]:
            operands, choices = self._store.operands(a, b, c), Choices.of(trans_a, trans_b, options)
            promises = {"reads_c": flag("reads_c", reads_c), "scales_only": flag("scales_only", scales_only)}
            return PlanKey.of(infos_of(operands), choices, **promises), operands, choices

        with self._gate.exclusive():
            key, operands, choices = self._begin_converted("plan", convert, lambda asked: repr(asked[0]))
            plan, _ = self._calls.prepare(key, operands)
        return GemmPlan(self, self._calls, plan, operands, choices)

    # -- life --------------------------------------------------------------------------------

    @public_call
    def close(self) -> None:
        """
        Release every plan, matrix and buffer. Collective; a second call does nothing.

        After ``MPI.Finalize()`` it frees what this rank holds; in a fork of the process it does nothing.

        Raises
        ------
        RankMismatchError
            If other ranks make another call. The session is closed all the same, on all ranks.
        PeerFailedError
            If a rank has left the session by an error; names it.
        """
        if self._gate.closed or is_fork[0]:
            return
        if self._group.is_gone():
            self._holdings.give_back_alone()
            lifetime.forget(self._ticket)
            return
        try:
            if not self.broken:
                with self._gate.exclusive():
                    self._gate.begin(CLOSE, "close()")
                self._holdings.give_back()
        finally:
            if self._holdings.released:
                lifetime.forget(self._ticket)
            elif self.broken:
                self._gate.closed = True
                if self._holdings.in_use:
                    self._calls.abandon()
                lifetime.end(self._ticket)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or is_agreed(error):
            self.close()
        elif not is_fork[0]:
            # The other ranks need not share this error: no collective call may follow it, but those who wait are told.
            self._gate.leave(f"{type(error).__name__}")
            lifetime.end(self._ticket)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Session belongs to its process and communicator, and cannot be copied or sent: open one where it is "
            "needed, um.Session(comm), on all ranks"
        )

    def __repr__(self) -> str:
        state = "closed" if self._gate.closed else "broken" if self.broken else self.device_names[self.rank]
        return f"<Session: rank {self.rank} of {self.size}, {self.backend_name} backend, {state}>"

    def _gemm(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None,
        alpha: float,
        beta: float,
        trans_a: Trans,
        trans_b: Trans,
        options: ScheduleOptions | None,
        out_layout: Layout | Literal["auto"] | None,
        stream: Any,
    ) -> Matrix:
        if out is None:
            out, out_layout = self._make_result(a, b, alpha, beta, trans_a, trans_b, options, out_layout), None
        with self._gate.exclusive():
            try:
                self._backend.mark_caller(stream)  # first: the device comes to it meanwhile
                if out_layout is not None:
                    raise ParamError("out and out_layout were given: pass out, which has a layout, or out_layout")
                scalars, choices = Scalars.of(alpha, beta), Choices.of(trans_a, trans_b, options)
                request = Request("gemm", self._store.operands(a, b, out), scalars, choices)
                plan = self._plans.find(request)
            except Exception as error:
                self._gate.fail("gemm", error)
            self._calls.run(request, plan, self._plans.keep)
        return out

    def _begin_converted(self, call: str, convert: Callable[[], _T], text: Callable[[_T], str] | None = None) -> _T:
        """Open a call with what its arguments are converted to, which ranks compare; return that."""
        try:
            asked = convert()
        except Exception as error:
            self._gate.fail(call, error)
        self._gate.open(call, f"{call}({asked})" if text is None else text(asked))
        return asked

    def _begin_with(self, call: str, **matrices: Matrix) -> None:
        def check() -> None:
            for name, matrix in matrices.items():
                self._store.check(f"{call}: {name}", matrix)

        self._gate.begin(call, f"{call}({', '.join(map(matrix_text, matrices.values()))})", check)

    def _copy(self, call: str, source: Matrix, target: Matrix) -> None:
        """Copy a matrix into another, as part of a call that has opened. Collective."""
        try:
            self._backend.mark_caller(None)
            request = Request(call, (source, source, target), Scalars(1.0, 0.0), Choices.of("N", "N", None))
            plan = self._plans.known(PlanKey.of_copy(infos_of(request.matrices), request.choices))
        except Exception as error:
            self._gate.fail(call, error)
        self._calls.run(request, plan, self._plans.keep)

    def _make_result(
        self,
        a: object,
        b: object,
        alpha: object,
        beta: object,
        trans_a: object,
        trans_b: object,
        options: object,
        out_layout: object,
    ) -> Matrix:
        """Return a new matrix for op(A) op(B). Collective."""

        def convert() -> tuple[tuple[Matrix, Matrix], Scalars, Choices, Layout | Literal["auto"] | None]:
            scalars, choices = Scalars.of(alpha, beta), Choices.of(trans_a, trans_b, options)
            if scalars.beta != 0:
                raise ParamError(f"beta = {scalars.beta}, but there is no C: pass out=, or beta=0")
            first, second = self._store.check("A", a), self._store.check("B", b)
            wanted = out_layout_of(out_layout)
            if isinstance(wanted, Layout):
                made = new_result(first, second, choices.trans_a, choices.trans_b, wanted)
                wanted.rectangles(made.shape, self.size)
            return (first, second), scalars, choices, wanted

        def text(asked: tuple[tuple[Matrix, Matrix], Scalars, Choices, object]) -> str:
            return f"{product_text('gemm', *asked[:3])}, out_layout={asked[3]}"

        with self._gate.exclusive():
            (first, second), scalars, choices, wanted = self._begin_converted("gemm", convert, text)
            if wanted == "auto":
                return self._store.empty(self._fastest_result(first, second, scalars, choices))
            return self._store.empty(new_result(first, second, choices.trans_a, choices.trans_b, wanted))

    def _fastest_result(self, a: Matrix, b: Matrix, scalars: Scalars, choices: Choices) -> NewMatrix:
        """Return the matrix for op(A) op(B) whose product is predicted to take the least time. Collective."""
        several = possible_results(a, b, choices.trans_a, choices.trans_b, self.size)
        memories = zip(*self._group.allgather_objects([one.memory for one in several]), strict=True)
        try:
            keys = [
                PlanKey.of(
                    (a.info, b.info, proposed(one, of_ranks)), choices, reads_c=False, scales_only=scalars.alpha == 0
                )
                for one, of_ranks in zip(several, memories, strict=True)
            ]
        except UncutError as wrong:  # of the same values on all ranks
            raise agreed(wrong) from None
        return several[self._maker.fastest(keys)]


def _seconds(name: str, value: object) -> float:
    seconds = real_number(name, value)
    if not seconds > 0:
        raise ParamError(f"{name} = {seconds}: use more than 0 (seconds)")
    return seconds
