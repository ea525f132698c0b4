"""Plans bound to matrices: memory is reserved for them, addresses are put in, and the device prepares what it needs."""

from __future__ import annotations

import dataclasses
import functools
import weakref

import numpy as np

from uncut_mpi.api.bound_epilogue import BoundEpilogue
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.keys import PlanKey, in_schedule_order, infos_in
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import Name, concerns
from uncut_mpi.api.memory import Arena, Flags, HostArena
from uncut_mpi.api.plans import AnyPlan, Plan
from uncut_mpi.api.request import Operands, Scalars, infos_of
from uncut_mpi.api.watchdog import explain
from uncut_mpi.device.interface import Backend, Executable
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.schedule import Role, Schedule
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group

# Sets of matrices that one plan stays bound to, as many as have so many operations in all, between these limits.
_MOST_OPERATIONS = 1 << 18
_LEAST_SETS, _MOST_SETS = 8, 256

_Names = tuple[Name | None, ...]  # those of A, B and C; with an epilogue those of its scale and its bias, too


@dataclasses.dataclass(slots=True, eq=False)
class Binding:
    """A plan bound to one set of matrices."""

    executable: Executable  # this rank's operations with addresses
    staged: bool  # whether the plan stages a matrix (`PlanSummary.staged`)
    digest: int  # see `digest_of`
    with_files: bool  # whether a matrix is a file
    schedule: Schedule  # of the plan
    alpha: Number | None = None  # alpha, beta: the scalars of the last call
    beta: Number | None = None
    mixed: bytes = b""  # the digest with these (`Scalars.mixed_with`)

    def take(self, scalars: Scalars, dtype: DType) -> bytes:
        """Return the digest with scalars of a call, or raise ParamError if the type has not got them. Local."""
        alpha, beta = scalars
        if alpha is not self.alpha or beta is not self.beta:  # mostly those of the last call
            scalars.check(dtype)
            self.alpha, self.beta, self.mixed = alpha, beta, scalars.mixed_with(self.digest)
        return self.mixed


class Binder:
    """
    Binds plans to matrices; owns their SoftBufs and the flags.

    Attributes
    ----------
    softbuf : Arena
        Memory for the panels of schedules.
    host_softbuf : HostArena
        Host memory for what is staged there.
    flags : Flags
        Of all calls.
    """

    def __init__(
        self, group: Group, backend: Backend, store: MatrixStore, counters: Counters, control: Control
    ) -> None:
        self._group, self._backend, self._store, self._control = group, backend, store, control
        self.softbuf = Arena(group, backend, store.mappings, counters, "SoftBuf")
        self.host_softbuf = HostArena(
            group, backend, store.mappings, counters, "page-locked host memory to stage matrices in"
        )
        self.flags = Flags(group, backend, store.mappings, counters, control)
        self._arenas = self.softbuf, self.host_softbuf, self.flags
        self._bound: dict[int, dict[_Names, Binding]] = {}  # by the identity of a plan, as long as it lives
        store.on_release.append(self._forget_matrix)

    @property
    def held_bytes(self) -> tuple[int, int]:
        """Bytes of this rank's SoftBufs on its device and in host memory."""
        rank = self._group.rank
        return int(self.softbuf.sizes[rank]), int(self.host_softbuf.sizes[rank])

    def fits(self, plan: Plan) -> bool:
        """Return whether there is memory for a plan on all ranks as it is. Local; the same on all ranks."""
        sizes = plan.softbuf_bytes, plan.host_softbuf_bytes, plan.flag_bytes
        return all(arena.fits(needed) for arena, needed in zip(self._arenas, sizes, strict=True))

    def find(
        self, plan: AnyPlan | PlanKey | None, matrices: Operands, epilogue: BoundEpilogue | None
    ) -> Binding | None:
        """Return what binds a plan to matrices, and an epilogue's, if it is bound. Local."""
        a, b, c = matrices  # spelled out: this is part of every call
        bound = self._bound.get(id(plan))
        if not bound:
            return None
        names = a.info.name, b.info.name, c.info.name
        return bound.get(names if epilogue is None else (*names, *epilogue.names))

    def bind(self, plan: Plan, matrices: Operands, epilogue: BoundEpilogue | None) -> Binding:
        """Reserve memory and bind a plan to matrices, where it is not yet; errors are on all ranks. Collective."""
        sizes = plan.softbuf_bytes, plan.host_softbuf_bytes, plan.flag_bytes
        for arena, needed in zip(self._arenas, sizes, strict=True):
            if not arena.fits(needed):
                self.drop_all()  # all addresses change, also where growing fails
                arena.ensure(needed)
        with agreement.collective(self._group, "binding the plan"):
            binding = self.find(plan, matrices, epilogue)
            if binding is None:
                bound = self._bindings_of(plan)
                most = min(_MOST_SETS, _MOST_OPERATIONS // max(1, len(plan.program.operations)))
                while len(bound) >= max(_LEAST_SETS, most):
                    bound.pop(next(iter(bound))).executable.close()
                program = plan.program
                if epilogue is not None:
                    program = dataclasses.replace(program, vectors=self._vectors(epilogue))
                executable = self._backend.executable(
                    program, self._addresses(plan, matrices), self.flags.table(), self._control.board
                )
                by_host = self._backend.takes_host_memory
                executable.explain = functools.partial(explain, plan.schedule, self._group.here, by_host)
                with_files = any(one.info.file for one in matrices)
                binding = Binding(
                    executable,
                    bool(plan.summary.staged),
                    digest_of(plan, matrices, epilogue),
                    with_files,
                    plan.schedule,
                )
                bound[_names(matrices, epilogue)] = binding
        return binding

    def hand_over(self, plan: Plan, successor: Plan) -> None:
        """Give what is bound to a plan to another of the same schedule. Local."""
        self._bindings_of(successor).update(self._bindings_of(plan))
        self._bindings_of(plan).clear()

    def poison_softbuf(self) -> None:
        """Fill this session's SoftBuf with all-one bits, a NaN in every type. Collective."""
        with agreement.collective(self._group, "poisoning the SoftBuf"):
            self.softbuf.poison()
            self.host_softbuf.poison()

    # -- releasing ---------------------------------------------------------------------------

    def drop(self, plan: AnyPlan) -> None:
        """Release what is bound to a plan; it may be bound again. Local."""
        for one in plan.plans:
            self._end(self._bound.get(id(one), {}))

    def drop_all(self) -> None:
        """Release what is bound to any plan. Local."""
        for bound in list(self._bound.values()):
            self._end(bound)

    def _end(self, bound: dict[_Names, Binding]) -> None:
        while bound:
            bound.popitem()[1].executable.close()

    def _bindings_of(self, plan: Plan) -> dict[_Names, Binding]:
        if id(plan) not in self._bound:
            self._bound[id(plan)] = {}
            weakref.finalize(plan, self._bound.pop, id(plan)).atexit = False
        return self._bound[id(plan)]

    def _forget_matrix(self, number: int) -> None:
        for bound in list(self._bound.values()):  # plans may go meanwhile, when the collector runs
            for names in [
                names for names in bound if any(name is not None and concerns(name, number) for name in names)
            ]:
                bound.pop(names).executable.close()

    def close(self) -> None:
        """Release SoftBufs and flags, once nothing is bound. Collective."""
        self._store.on_release.clear()  # they refer to this
        for arena in self._arenas:
            arena.close()

    def abandon(self) -> None:
        """Let go of SoftBufs and flags without collective calls, after a call that did not end."""
        self._store.on_release.clear()
        for arena in self._arenas:
            arena.abandon()

    def _vectors(self, epilogue: BoundEpilogue) -> tuple[int, int]:
        """Return where this rank has an epilogue's scale and bias."""
        scale, bias = (0 if one is None else self._store.own_address(one.info) for one in epilogue.vectors)
        return scale, bias

    def _addresses(self, plan: Plan, matrices: Operands) -> np.ndarray:
        infos = in_schedule_order(plan.key.problem, infos_in(infos_of(matrices), plan.key.orders))
        buffers, owners, in_host = plan.schedule.buffers, plan.schedule.owners(), plan.schedule.in_host()
        bases = np.where(in_host, self.host_softbuf.addresses[owners], self.softbuf.addresses[owners])
        addresses: np.ndarray = bases + buffers["offset"]
        used, users = plan.program.buffers_used(), buffers["role"] == Role.USER
        of_users: np.ndarray = buffers["matrix"][users]  # they come first, in the order of the matrices and their parts
        addresses[users] = 0
        of_used = used[users[used]]
        matrix = of_users[of_used]
        part = of_used - np.searchsorted(of_users, matrix)
        for at, which, number in zip(of_used.tolist(), matrix.tolist(), part.tolist(), strict=True):
            addresses[at] = self._store.address(infos[which], number)
        return addresses


def digest_of(plan: AnyPlan | PlanKey, matrices: Operands, epilogue: BoundEpilogue | None) -> int:
    """Return 128 bits that only the same plan with the same matrices has, the same on all ranks."""
    digest = agreement.digest_of(plan.digest + repr(_names(matrices, epilogue)).encode())
    return int.from_bytes(digest.tobytes(), "little")


def _names(matrices: Operands, epilogue: BoundEpilogue | None) -> _Names:
    a, b, c = matrices
    return a.info.name, b.info.name, c.info.name, *(() if epilogue is None else epilogue.names)
