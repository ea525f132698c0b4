"""
Sessions: a communicator with its devices, buffers and bounded plan cache.

Every method marked collective must be called by all ranks of the session, in the same order and with the same
arguments. Where ranks differ in either, all of them raise the same error. Those that make matrices are in
`session_matrices`. Those that multiply and copy are in `session_products`, and may use these.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uncut_mpi.api import lifetime, watchdog
from uncut_mpi.api.gate import CLOSE, public_call
from uncut_mpi.api.gradients import PLAIN, Way, recorded_of, recorded_product, without_gradient
from uncut_mpi.api.lifetime import Settings, complete, opening, patience_of, ranks_per_node_of, seconds_of
from uncut_mpi.api.session_level3 import Level3
from uncut_mpi.api.start import BackendMaker, start_backend
from uncut_mpi.api.typed import overload
from uncut_mpi.api.wording import value_digest
from uncut_mpi.errors import ParamError, agreed, is_agreed
from uncut_mpi.instead import absent
from uncut_mpi.model.arguments import BackendName, shown
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.machine import Machine
from uncut_mpi.spmd import agreement, meetings
from uncut_mpi.spmd.attributes import attach, attached, detach
from uncut_mpi.spmd.group import OPENING
from uncut_mpi.spmd.runtime import is_fork

logger = logging.getLogger("uncut_mpi")


class Session(Level3):
    """
    A communicator with its devices, buffers and bounded plan cache. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks that multiply together, on one node or several; duplicated, so that no message of the program is
        touched.
    backend : str or callable, default "auto"
        ``"cuda"`` (one GPU per rank; never falls back), ``"host"`` (numpy), or ``"auto"``. That is cuda if every rank
        can have a GPU of its own or `devices` are named, else host; `backend_reason` says why. A callable ``(local
        rank, ranks) -> Backend`` gives one of the caller's own.
    devices : sequence of int, optional
        Device ordinal of each rank of `comm`. By default a process takes the only GPU that it sees or, of several, the
        i-th, if it is process i of the job on this node. It is the same GPU in every session, whatever the process's
        rank in `comm`.
    allow_shared_gpu : bool, default False
        Let several ranks use one GPU (slow; for tests).
    machine : Machine, optional
        Measured links and rates to plan with; by default those kept for this hardware. They are measured in under 3 s
        at the first session, and again as long as the machine was busy then.
    timeout_s : float, default 60
        A call fails when no task, nor a part of a long one, finishes anywhere for so long and the time that its longest
        task is expected to take.
    arrival_timeout_s : float, optional
        A call, the opening of this session too, fails when a rank begins no call for so long after this one. By default
        ranks wait for each other as in any MPI call. `gather_values` and `together` wait for what ranks do on their
        own, and have no limit. Inside a call it ends a wait for a rank of this machine whose process is stopped, or
        gone.
    max_plans : int, default 32
        Plans that one-shot calls keep; the least recently used goes first.
    verify : bool, default False
        Prove every schedule, and what was lowered from it, before its first use.
    tune_products : bool, default False
        Choose the kernels of products in f32, tf32, f16 and bf16 by timing what cuBLAS proposes for their shapes. This
        is done when a plan is made: some ms for each, in f32 up to 0.2 s. Two processes may choose differently, and
        results then differ in the last bits; without it cuBLAS chooses, by the shapes alone. Other types and the host
        backend have nothing to tune.
    device_memory : int or str, optional
        Bytes of its device's memory that a plan may use on each rank, beside the matrices there; also ``"4GiB"``. A
        product that does not fit is computed one block of C after the other. By default four fifths of what is free
        when the plan is made, on the rank with the least; it is rounded down to a sixteenth of the device's memory.
    host_memory : int or str, optional
        Bytes of host memory that a plan may use on each rank for copies of matrices that no device reaches: those in
        files, and private memory that cannot be page-locked. By default a rank's share of half of what is free when
        the plan is made, rounded down to a power of two.
    check_peers : bool, default True
        Before anything else, let every rank write a pattern into each other's device memory, and that rank look whether
        it has come. It takes some ms, once for these devices in these processes. GPUs that CUDA says have no peer
        access are taken for nodes of their own; what goes between them goes through the host.
    ranks_per_node : int, optional
        Take so many ranks of a node, in their order, for a node of their own. It shares nothing with the others, so
        this tries what a program does on several nodes. By default what ``UNCUT_MPI_RANKS_PER_NODE`` says.

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
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        with opening(comm, arrival_timeout_s, ranks_per_node) as held:
            group = held.group
            with agreement.collective(group, OPENING):
                each = ranks_per_node_of(ranks_per_node)
                if machine is not None and not isinstance(machine, Machine):
                    raise ParamError(
                        f"machine = {shown(machine)} is no Machine: pass load_machine(name or file), or leave it out"
                    )
                settings = Settings.of(max_plans, verify, tune_products, device_memory, host_memory)
                times = seconds_of("timeout_s", timeout_s), patience_of(arrival_timeout_s)
            asked = settings._asdict() | {"ranks_per_node": each}
            agreement.agree(group, str(asked).encode(), lambda: asked)
            started = start_backend(
                group,
                backend=backend,
                devices=devices,
                allow_shared_gpu=allow_shared_gpu,
                check_peers=check_peers,
                divide=held.divide,
            )
            held.backend = started.backend
            if started.shared:
                logger.warning("ranks share a GPU, which is slow: start one rank per GPU")
            calls = complete(held, started, machine, settings, times, weakref.ref(self))
            self._holdings, self._group, self._backend, self._store = held, group, calls.backend, calls.store
            self._calls, self._gate = calls, calls.gate
            self.counters, self.machine = calls.counters, calls.maker.machine
            self.backend_name, self.backend_reason = started.backend.name, started.reason
            self.device_names = [identity.name for identity in started.identities]
            self.device_uuids = [identity.uuid for identity in started.identities]
            self.devices_shared = started.shared
            logger.info("rank %d of %d: %s backend (%s)", self.rank, self.size, self.backend_name, self.backend_reason)
            lifetime.keep(held, self)
            watchdog.listen()

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

    # -- ranks together ----------------------------------------------------------------------

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
            self._gate.open("barrier")

    @public_call
    def agree(self, value: object, what: str) -> None:
        """
        Check that every rank passes an equal value. Collective.

        Parameters
        ----------
        value : object
            Compared by value: None, numbers, texts, bytes, arrays of numbers or texts, frozen dataclasses such as
            `Layout`, and lists, tuples, sets and dicts of these. Numbers of any type are equal as in Python (1, 1.0 and
            True; -0.0 and 0), and NaN equals NaN. Of arrays type and shape count too, not the order of bytes. A list
            equals no tuple.
        what : str
            What it is, for the error.

        Raises
        ------
        RankMismatchError
            On all ranks, saying who has which.
        ParamError
            On all ranks, if it is not defined when such values are equal.
        """
        with self._gate.exclusive():
            try:
                digest = value_digest(what, value)
            except Exception as error:
                self._gate.fail("agree", error)
            self._gate.open("agree", lambda: {what: value}, digest)

    @public_call
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
        """
        Return a small value of every rank, in rank order. Collective.

        None, numbers, texts, bytes, arrays, values of this package, and lists, tuples, sets and dicts of these: no
        objects of other classes, whose code would run on other ranks.
        """
        with self._gate.exclusive():
            self._gate.open("gather_values", waits_for_ever=True)
            return self._group.allgather_objects(value)

    @public_call
    def poison_softbuf(self) -> None:
        """
        Fill every rank's SoftBuf with NaN, so that no call can profit from an earlier one's copies. Collective.

        For checks and for measurements that must not start with warm buffers.
        """
        with self._gate.exclusive():
            self._gate.open("poison_softbuf")
            self._calls.binder.poison_softbuf()

    # -- life --------------------------------------------------------------------------------

    @public_call
    def close(self) -> None:
        """
        Release every plan, matrix and buffer. Collective; a second call does nothing.

        Files of `create_file` that calls have written get their names, as by `commit`; others are removed. So are all
        that have no name yet where a ``with`` block is left by an error.

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
            lifetime.forget(self._holdings)
            return
        try:
            if not self.broken:
                flight = self._calls.flight
                with self._gate.exclusive():
                    flight.drain()
                    heard = self._gate.open(CLOSE, flags=0 if flight.unheard else meetings.READY)
                    self._holdings.give_back()
                if not heard:
                    raise agreed(flight.failure)
        finally:
            if self._holdings.released:
                lifetime.forget(self._holdings)
            elif self.broken:
                self._store.drop_files()
                self._gate.closed = True
                if self._holdings.in_use:
                    self._calls.abandon()
                self._holdings.over = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not is_fork[0]:
            self._store.drop_files()
        if error is None or is_agreed(error):
            self.close()
        elif not is_fork[0]:
            # The other ranks need not share this error: no collective call may follow it, but those who wait are told.
            self._gate.leave(type(error).__name__)
            self._holdings.over = True

    if not TYPE_CHECKING:
        __getattr__ = absent

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Session belongs to its process and communicator, and cannot be copied or sent: open one where it is "
            "needed, um.Session(comm), on all ranks"
        )

    def __repr__(self) -> str:
        state = "closed" if self._gate.closed else "broken" if self.broken else self.device_names[self.rank]
        return f"<Session: rank {self.rank} of {self.size}, {self.backend_name} backend, {state}>"


_MOST_KEPT: Final = 256 << 20


@overload
def matmul(comm: Any, a_local: np.ndarray, b_local: np.ndarray) -> np.ndarray: ...
@overload
def matmul(comm: Any, a_local: Any, b_local: Any) -> Any: ...
@public_call
def matmul(comm: Any, a_local: Any, b_local: Any) -> Any:
    """
    Return this rank's rows of A B, where each rank has some rows of A and of B. Collective.

    Of three dimensions each rank has some whole matrices, as of `Session.distribute`, and gets their products.

    The session of the first call is kept for the communicator, with its plans, until the communicator is freed or the
    program ends. It is closed at once where its buffers take more than 256 MiB of a rank's memory. Matrices that stay
    where they are belong in a `Session` of one's own, which is as short (`Session.matmul`).

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks, as of `Session`.
    a_local, b_local : array or None
        This rank's rows of A and of B, from rank 0 on, as of `Session.distribute`; None where it has none. Tensors of
        torch that require a gradient do so on all ranks: then all of them call ``backward``, which is two products.

    Returns
    -------
    array
        As many rows as `a_local` has (or matrices, as that of both which is of several), in memory of the same kind and
        of the same library (`Matrix.local`).

    Raises
    ------
    ParamError, RankMismatchError, UncutError
        As `Session`, `Session.distribute` and `Session.gemm`; if a gradient is recorded on some ranks alone.
    """
    with _kept_session(comm) as session:
        with session._gate.call("matmul") as open_with:
            recorded, plain = recorded_of(a_local, b_local), [without_gradient(one) for one in (a_local, b_local)]
            open_with(gradients=recorded)
        if recorded == "none":
            return _product(session, *plain)[0]

    def multiply(a: Any, b: Any, way: Way, layout: Layout | None) -> tuple[Any, list[Layout]]:
        with _kept_session(comm) as session:
            return _product(session, a, b, way, layout)

    return recorded_product(multiply, a_local, b_local)


@contextlib.contextmanager
def _kept_session(comm: Any) -> Iterator[Session]:
    """Lend the session that is kept for a communicator, or a new one; it is closed by an error, or if it holds much."""
    with contextlib.ExitStack() as closing:
        kept: Session | None = attached(comm)
        closing.callback(detach, comm)
        session = closing.enter_context(Session(comm) if kept is None or kept.broken else kept)
        yield session
        binder = session._calls.binder
        if max(binder.softbuf.sizes.max(), binder.host_softbuf.sizes.max()) <= _MOST_KEPT:  # the same on all ranks
            closing.pop_all()
            if session is not kept:
                attach(comm, session)


def _product(
    session: Session, a: Any, b: Any, way: Way = PLAIN, layout: Layout | None = None
) -> tuple[Any, list[Layout]]:
    """See `Multiply`."""
    first, second = (session.distribute(local, Layout.rows()) for local in (a, b))
    result: Any = session.gemm(first, second, trans_a=way[0], trans_b=way[1], out_layout=layout)
    found = result.local, [first.layout, second.layout]
    for matrix in (first, second, result):
        session.release(matrix)
    return found
