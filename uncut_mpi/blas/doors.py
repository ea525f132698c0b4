"""Calls with arrays that a session knows by their addresses alone: planned once for what is the same on all ranks."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from uncut_mpi.api.grips import Lent
from uncut_mpi.blas.routines import Letters, Routine
from uncut_mpi.device.views import matrix_at
from uncut_mpi.errors import CapacityError, ParamError, PlanError, RankMismatchError, UncutError
from uncut_mpi.model.cyclic import numroc
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.planning.options import ScheduleOptions

if TYPE_CHECKING:
    from uncut_mpi.api.gemm_plan import GemmPlan
    from uncut_mpi.api.matrix import Matrix
    from uncut_mpi.api.session import Session
    from uncut_mpi.spmd.blacs import BlacsGrid

Where: TypeAlias = tuple[int, int, int, int, int, int]
"""Addresses of this rank's arrays, and their leading dimensions."""

_MOST_KEPT: Final = 64
"""Products that a door keeps a plan of, or knows to be better done elsewhere."""

_CALLS_BEFORE_SEARCH: Final = 2
"""Calls by a plan by rule, before a search that may take seconds: most shapes of a factorisation come once."""

_AS_PLANNED: Final = (None,) * 3, (None,) * 2, None, True
"""Of an execution: its matrices, scales, stream and whether it is waited for."""


class LeadingDimensionError(UncutError, ValueError):
    """An array whose columns overlap: of this rank alone, whose own library can tell."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """
    An operand of a product as its caller has it.

    Attributes
    ----------
    shape : (int, int)
        Of the matrix.
    layout : Layout
        How it is dealt to ranks.
    extents : (int, int)
        Rows and columns of this rank's part.
    offset : (int, int), default (0, 0)
        From which row and column of this rank's array on.
    least_ld : int
        How many rows that array has.
    """

    shape: tuple[int, int]
    layout: Layout
    extents: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    least_ld: int = 1

    def array(self, address: int, ld: int, dtype: DType) -> Lent:
        """Return this rank's part, of a column-major array at an address with a leading dimension (elements)."""
        (rows, cols), (down, across) = self.extents, self.offset
        if ld < max(1, self.least_ld):
            raise LeadingDimensionError(f"a leading dimension of {ld}, for an array of {self.least_ld} rows")
        start = address + (down + ld * across) * dtype.itemsize
        return matrix_at(start, rows, cols, ld, dtype.numpy).view(Lent)


@dataclasses.dataclass(frozen=True, slots=True)
class CallersProduct:
    """A call: its routine, what its letters are, its element type, and its matrices in their order."""

    routine: Routine
    by: Letters
    dtype: DType
    given: Sequence[Given]

    def arrays(self, where: Where) -> Sequence[Lent]:
        """Return this rank's parts."""
        return [
            one.array(address, ld, self.dtype) for one, address, ld in zip(self.given, where, where[3:], strict=False)
        ]

    @property
    def flop(self) -> float:
        """Operations that it takes, of complex types four times as many."""
        operations = self.routine.operations(self.by, [one.shape for one in self.given])
        return (4.0 if self.dtype.is_complex else 1.0) * operations


@dataclasses.dataclass(slots=True)
class _Kept:
    """A product that is computed here, and what it last multiplied."""

    product: CallersProduct
    plan: GemmPlan | None  # of gemm
    where: Where
    scalars: tuple[Any, Any]
    matrices: Sequence[Matrix] = ()  # of other routines, once there are some
    calls: int = 0

    def close(self) -> None:
        """Release what there is of its plan. Local."""
        if self.plan is not None:
            self.plan.close()


Asked: TypeAlias = tuple[Hashable, Where, tuple[Any, Any], Callable[[], CallersProduct | None], Callable[[], float]]
"""What `Door.multiply` is asked."""


class Door:
    """
    The products of a session, or of one grid of a program.

    Parameters
    ----------
    session : Session
        It is closed with this.
    grid : BlacsGrid, optional
        The grid of processes.
    """

    def __init__(self, session: Session, grid: BlacsGrid | None = None) -> None:
        self.session, self.grid = session, grid
        self._kept: OrderedDict[Hashable, _Kept | None] = OrderedDict()
        self._done: tuple[object, _Kept | None] = None, None  # the last call, and what did it
        self._busy = threading.Lock()
        self.plain_rates: dict[DType, float] = {}  # of the program's own library, once they are measured
        self.ranks: list[int] | None = None
        if grid is not None:
            places = session.gather_values(grid.place)
            ranks = [places.index((row, col)) for row in range(grid.shape[0]) for col in range(grid.shape[1])]
            self.ranks = None if ranks == [*range(len(ranks))] else ranks
        self._compares = not os.environ.get("UNCUT_MPI_BLAS_MIN_GFLOP")

    def part(
        self,
        shape: tuple[int, int],
        first: tuple[int, int],
        extents: tuple[int, int],
        first_blocks: tuple[int, int],
        block: tuple[int, int],
        source: tuple[int, int],
    ) -> Given | None:
        """
        Return a part of a matrix in cyclic blocks; None for a matrix that `Layout` does not have. Local.

        Parameters
        ----------
        shape, first : (int, int)
            Rows and columns of the part, and its first row and column, from 0.
        extents, first_blocks, block, source : (int, int)
            Rows and columns of the matrix, of its first blocks, and of others; the place in the grid of the first.
        """
        assert self.grid is not None
        grid, place, skip, offset = self.grid.shape, self.grid.place, [], []
        fits = all(
            0 < begun <= whole and 0 <= at < count and start >= 0 and start + edge <= extent
            for begun, whole, at, count, start, edge, extent in zip(
                first_blocks, block, source, grid, first, shape, extents, strict=True
            )
        )
        if not fits:
            return None
        # A first block that is smaller is the rest of one, of a matrix that begins earlier.
        for axis in (0, 1):
            skip.append(block[axis] - first_blocks[axis])
            before = numroc(skip[axis] + first[axis], block[axis], place[axis], source[axis], grid[axis])
            offset.append(before - (skip[axis] if place[axis] == source[axis] else 0))
        whole = Layout.block_cyclic(*block, grid, source=source, ranks=self.ranks)
        rows, cols = ((lack + start, lack + start + edge) for lack, start, edge in zip(skip, first, shape, strict=True))
        of, size = (skip[0] + extents[0], skip[1] + extents[1]), self.session.size
        layout = whole.sliced(of, rows, cols)
        owned = layout.local_shape(shape, self.session.rank, num_ranks=size)
        held = [
            edge - (lack if at == first else 0)
            for edge, lack, at, first in zip(
                whole.local_shape(of, self.session.rank, num_ranks=size), skip, place, source, strict=True
            )
        ]
        return Given(shape, layout, owned, (offset[0], offset[1]), held[0] if held[1] else 1)

    def multiply(
        self,
        key: Hashable,
        where: Where,
        scalars: tuple[Any, Any],
        describe: Callable[[], CallersProduct | None],
        plain_rate: Callable[[], float],
        call: object = None,
    ) -> bool:
        """
        Make a call, if it is worth it here; return whether. Collective.

        Parameters
        ----------
        key : hashable
            What all ranks pass alike, of which the product follows.
        where : tuple of int
            Addresses of this rank's arrays, and their leading dimensions.
        scalars : (float or complex, float or complex)
            Alpha and beta.
        describe : callable
            Returns the product, None for one that cannot be had here.
        plain_rate : callable
            Returns how many operations a second the program's own library does. Collective.
        call : object, optional
            By which `repeats` knows the next one to be equal.

        Raises
        ------
        LeadingDimensionError
            On this rank alone, before it does anything with others.
        RankMismatchError
            If ranks pass different keys or scalars.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        reads_c = scalars[1] != 0
        name = key, reads_c
        if name not in self._kept:
            self._kept[name] = self._new(describe(), where, scalars, plain_rate)
            while len(self._kept) > _MOST_KEPT:
                _, old = self._kept.popitem(last=False)
                if old is not None:
                    old.close()
        self._kept.move_to_end(name)
        kept = self._kept[name]
        if kept is None:
            return False
        product, arrays = kept.product, None
        if where != kept.where:
            kept.where, arrays = where, product.arrays(where)
        if scalars != kept.scalars:  # else the same objects, of which what follows is known
            kept.scalars = scalars
        kept.calls += 1
        if kept.plan is not None and kept.calls == _CALLS_BEFORE_SEARCH + 1:
            self._plan_again(kept, "full")  # or the plan that there is goes on
        self._done, done = (None, None), False
        try:
            done = self._execute(kept, arrays)
        finally:
            if done:
                self._done = call, kept
            else:
                del self._kept[name]  # which says what was to be multiplied, and may not be
        return done

    def alone(self, call: object, asked: Callable[[], Asked]) -> bool:
        """Do as `multiply`, of a door of one process; return False while another thread is in a call. Local."""
        if not self._busy.acquire(False):
            return False
        try:
            return self.repeats(call) or self.multiply(*asked(), call)
        finally:
            self._busy.release()

    def repeats(self, call: object) -> bool:
        """Compute what the last call did, if this one is equal; else return False. Collective, as `multiply`."""
        done, kept = self._done
        if call is None or call != done or kept is None or kept.calls <= _CALLS_BEFORE_SEARCH:
            return False
        return self._execute(kept, None)

    def _execute(self, kept: _Kept, arrays: Sequence[Lent] | None) -> bool:
        """Return whether the product is done; else it cannot be, on no rank, and nothing was."""
        if kept.plan is None:
            return self._compute(kept, arrays)
        try:
            if arrays is not None:
                self._lend(kept.plan._operands, arrays, "execute")
            kept.plan._execute(kept.scalars, *_AS_PLANNED)
        except RankMismatchError:
            raise
        except ParamError:  # on all ranks, and nothing is computed: the leading dimension of one is another now
            if not self._plan_again(kept, "rule"):
                return False
            kept.plan._execute(kept.scalars, *_AS_PLANNED)
        return True

    def _compute(self, kept: _Kept, arrays: Sequence[Lent] | None) -> bool:
        """Do as `_execute`, by a call of the session; its matrices are made anew where they do not fit. Collective."""
        session, product, known = self.session, kept.product, kept.matrices
        flags = session._calls.binder.flags
        before = flags.epoch
        try:
            if not known:
                kept.matrices = self._matrices(product, product.arrays(kept.where))
            elif arrays is not None:
                self._lend(known, arrays, product.routine.name)
            product.routine.compute(session, product.by, kept.matrices, *kept.scalars)
        except RankMismatchError:
            raise
        except (ParamError, PlanError, CapacityError):  # on all ranks
            if flags.epoch != before:  # a part may be written
                raise
            kept.matrices = ()
            return bool(known) and self._compute(kept, None)
        return True

    def _lend(self, matrices: Sequence[Matrix], arrays: Sequence[Lent], call: str) -> None:
        """Have matrices lie in other arrays; where they cannot, all ranks raise a ParamError in the call. Local."""
        store, gate = self.session._store, self.session._gate
        with gate.exclusive():
            try:
                store.lend(matrices, arrays)
            except ParamError as error:
                gate.fail(call, error)

    def _matrices(self, product: CallersProduct, arrays: Sequence[Lent]) -> list[Matrix]:
        """Return the ranks' arrays as matrices. Collective."""
        return [
            self.session.distribute(array, one.layout, shape=one.shape, dtype=product.dtype)
            for one, array in zip(product.given, arrays, strict=True)
        ]

    def drop(self) -> None:
        """Leave the session unclosed: its ranks do not come here together. Local."""
        self._kept.clear()
        self._done = None, None
        del self.session

    def close(self) -> None:
        """Close the session. Collective."""
        self._kept.clear()
        self._done = None, None
        self.session.close()

    def _new(
        self,
        product: CallersProduct | None,
        where: Where,
        scalars: tuple[Any, Any],
        plain_rate: Callable[[], float],
    ) -> _Kept | None:
        """Return a product that is asked for the first time; None if it is not to be computed here. Collective."""
        if product is None:
            return None
        plan, routine = self._plan(product, where, scalars[1] != 0, "rule"), product.routine
        if plan is None:
            return None
        summary, rate = plan.summary, plain_rate() if self._compares else 0.0
        is_slower = (routine.num_parts * summary.predicted_s + summary.plan_s) * rate > product.flop
        if is_slower or routine.name != "gemm":
            plan.close()
        return None if is_slower else _Kept(product, plan if routine.name == "gemm" else None, where, scalars)

    def _plan_again(self, kept: _Kept, search: Literal["rule", "full"]) -> bool:
        """Give a product another plan; return whether there is one. Collective."""
        plan = self._plan(kept.product, kept.where, kept.scalars[1] != 0, search)
        if plan is not None:
            kept.close()
            kept.plan = plan
        return plan is not None

    def _plan(
        self, product: CallersProduct, where: Where, reads_c: bool, search: Literal["rule", "full"]
    ) -> GemmPlan | None:
        """Return `Routine.plan` of a product; None where there can be none. Collective."""
        arrays, options = product.arrays(where), ScheduleOptions(search=search)
        try:
            matrices = self._matrices(product, arrays)
            return product.routine.plan(self.session, product.by, matrices, reads_c=reads_c, options=options)
        except RankMismatchError:
            raise
        except (ParamError, PlanError, CapacityError):  # on all ranks, and nothing is computed
            return None
