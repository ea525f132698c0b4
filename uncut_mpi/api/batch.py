"""Batches, as callers hold them: matrices of one shape in one memory, or dealt to ranks."""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from uncut_mpi.api.matrix import Matrix, ShowsMemory
from uncut_mpi.api.stored import in_library
from uncut_mpi.api.views import View
from uncut_mpi.device.views import strided
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import absent
from uncut_mpi.model.arguments import counted, shown
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import Extent
from uncut_mpi.model.problem import Order

_first = operator.itemgetter(0)


class Seen(NamedTuple):
    """Which matrices of a batch are seen, and whether transposed and conjugated."""

    first: int
    stop: int
    turned: bool = False
    conjugated: bool = False

    def __str__(self) -> str:
        return str(View((self.first, self.stop), (0, 0), self.turned, self.conjugated)).replace(", 0:0", "")


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """Where the matrices of a batch lie in the one matrix that they are."""

    count: int  # how many there are
    shape: tuple[int, int]  # rows and columns of each
    axis: int  # 0 where rows of that matrix are theirs, one after another; 1 where columns are
    dealt: Layout  # how they are dealt to ranks: its rows are their numbers
    # Of those that lie at equal distances: the number of the first, the row (column) at which it begins, and how many
    # there are from one to the next.
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def dense(cls, count: int, shape: tuple[int, int], order: Order, dealt: Layout) -> Stacks:
        """Return those without gaps, each stored in an order."""
        axis = 0 if order == "C" else 1
        return cls(count, shape, axis, dealt, ((0, 0, shape[axis]),))

    def extent(self, number: int) -> Extent:
        """Return the rows (columns) of a matrix."""
        first, start, step = self._run(number)
        begin = start + (number - first) * step
        return begin, begin + self.shape[self.axis]

    def step(self, number: int) -> int:
        """Return how many rows (columns) there are from a matrix to the next."""
        return self._run(number)[2]

    def left_of_run(self, number: int, stop: int) -> int:
        """Return how many matrices from one on, before another, lie one after another without gaps."""
        at = bisect.bisect_right(self.runs, number, key=_first)
        end = min(stop, self.runs[at][0]) if at < len(self.runs) else stop
        return end - number if self.runs[at - 1][2] == self.shape[self.axis] else 1

    def _run(self, number: int) -> tuple[int, int, int]:
        return self.runs[bisect.bisect_right(self.runs, number, key=_first) - 1]

    def view(self, number: int) -> View:
        """Return what is seen of a matrix."""
        extents = (0, self.shape[0]), (0, self.shape[1])
        return View(*((self.extent(number), extents[1]) if self.axis == 0 else (extents[0], self.extent(number))))

    def in_one(self, first: int, stop: int) -> View | None:
        """Return what is seen of some that lie one after another without gaps, None if there are some."""
        if first == stop:
            return View((0, 0), (0, self.shape[1])) if self.axis == 0 else View((0, self.shape[0]), (0, 0))
        begin, end, extent = self.extent(first)[0], self.extent(stop - 1)[1], self.shape[self.axis]
        if end - begin != (stop - first) * extent:
            return None
        return View((begin, end), (0, self.shape[1])) if self.axis == 0 else View((0, self.shape[0]), (begin, end))


class Batch(ShowsMemory):
    """
    Matrices of one shape, in one memory or dealt to ranks: a sequence of them.

    `Session.register`, `distribute`, `empty` and those beside them make one of an array or a shape of three dimensions.
    ``batch[i]`` is a `Matrix`, a view, and ``batch[i:j]`` a batch of some. Any rank may make either, at any time.
    `Session.gemm` multiplies batches by the rules of ``numpy.matmul``; ``a @ b`` is ``session.matmul(a, b)``.

    Attributes
    ----------
    stacks, seen, operands
        For the library: where the matrices lie, which of them this is, and what they are put together (`operand_of`).
    """

    def __init__(
        self,
        base: Matrix,
        stacks: Stacks,
        own: Extent,
        array: Any = None,
        *,
        seen: Seen | None = None,
        operands: dict[tuple[Seen, str, bool], Matrix] | None = None,
    ) -> None:
        self._base, self.stacks, self._own, self._given = base, stacks, own, array
        self.seen = seen or Seen(0, stacks.count)
        # Of this batch and all its views: to put a batch together takes longer than a small product of it.
        self.operands: dict[tuple[Seen, str, bool], Matrix] = {} if operands is None else operands

    # -- what it is --------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.seen.stop - self.seen.first

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many matrices there are, their rows and their columns."""
        rows, cols = self.stacks.shape
        return (len(self), cols, rows) if self.seen.turned else (len(self), rows, cols)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._base.dtype

    @property
    def order(self) -> Order:
        """``"F"`` or ``"C"``: how each matrix is stored."""
        return "C" if (self.stacks.axis == 0) != self.seen.turned else "F"

    @property
    def layout(self) -> Layout:
        """How the matrices are dealt to ranks: what a layout says of rows is true of their numbers."""
        return self.stacks.dealt.sliced((self.stacks.count, 1), (self.seen.first, self.seen.stop), (0, 1))

    @property
    def location(self) -> Location | None:
        """Where all of it lives; None if it is dealt to several ranks."""
        return self._base.location

    @property
    def memory(self) -> Memory:
        """Where `local` lies: ``"device"``, ``"host"`` (private to this rank) or ``"shared"``."""
        return self._base.memory

    @property
    def closed(self) -> bool:
        """Whether it was released, or its session has ended."""
        return self._base.closed

    @property
    def base(self) -> Matrix:
        """The one matrix that all of these are, with what is between them."""
        return self._base

    @property
    def array(self) -> Any:
        """
        All of it as this rank sees it: an array of three dimensions, of a library as `Matrix.array` is.

        Raises
        ------
        ParamError
            If this rank does not see all of it, as of one that is dealt to several.
        """
        base = self._base
        return self._picked(np.asarray(base) if base._array is None else base._array, (0, self.stacks.count))

    @property
    def local(self) -> Any:
        """
        Those matrices that this rank has, an array of three dimensions: the one that was given, if all of it.

        It is of a library as `Matrix.local` is.
        """
        return self._picked(self._base.arrays_here()[0], self._own)

    def _picked(self, lines: Any, there: Extent, *, plain: bool = False) -> Any:
        """
        Return what this is of an array of all lines of some of the matrices.

        It is of the library that the batch is of; `plain`, of numpy where it lies on the host.
        """
        (first, stop), (rows, cols), axis = there, self.stacks.shape, self.stacks.axis
        if self._given is not None and there == self._own and not (plain and isinstance(lines, np.ndarray)):
            array = self._given
        elif isinstance(lines, np.ndarray):
            apart = self.stacks.step(first) * lines.strides[axis]
            array = strided(lines, (stop - first, rows, cols), (apart, *lines.strides))
        elif axis == 0:  # new ones, without gaps
            array = lines.reshape(stop - first, rows, cols)
        else:
            array = lines.T.reshape(stop - first, cols, rows).swapaxes(1, 2)
        seen = self.seen
        if (first, stop) != (seen.first, seen.stop):
            begin = max(first, seen.first)
            array = array[begin - first : max(begin, min(stop, seen.stop)) - first]
        if seen.turned:
            array = array.swapaxes(1, 2)
        array = array.conj() if seen.conjugated else array
        return array if plain else in_library(array, self._base.library)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return `array`, for numpy; errors as of `Matrix`."""
        if self.closed or not isinstance(self._base._array, np.ndarray):
            self._base.__array__()  # which says why there is none
        array = self._picked(self._base._array, (0, self.stacks.count), plain=True)
        return np.array(array, dtype, copy=bool(copy)) if copy or dtype is not None else np.asarray(array)

    def _to_show(self) -> tuple[Matrix, Any]:
        if self.seen.conjugated:
            raise ParamError(f"{self} is conjugated, which products alone do: pass the batch, or its .T, instead")
        array = self._picked(self._base.arrays_here()[0], self._own, plain=True)
        if 0 in array.shape and self._base._array is not None:
            array = self._picked(self._base._array, (0, self.stacks.count), plain=True)
        return self._base, array

    def __repr__(self) -> str:
        count, rows, cols = self.shape
        where = f"in parts ({self.layout})" if self._base.info.in_parts else f"at {self.location}"
        return f"<{str(self).capitalize()}: {count}×{rows}×{cols} {self.dtype.name} {self.order}-order {where}>"

    def __str__(self) -> str:
        return f"batch {self._base.info.number}{'' if self.is_whole else self.seen}"

    @property
    def is_whole(self) -> bool:
        """Whether it is all that was made, and not a view."""
        return self.seen == (0, self.stacks.count, False, False)

    # -- its matrices ------------------------------------------------------------------------

    @overload
    def __getitem__(self, key: int) -> Matrix: ...
    @overload
    def __getitem__(self, key: slice) -> Batch: ...
    def __getitem__(self, key: int | slice) -> Matrix | Batch:
        """
        Return one as a matrix, or some as a batch, in the same memory. Local.

        Raises
        ------
        IndexError, TypeError, ParamError
            For a number that there is not, what is neither a number nor a slice, and a slice with a step.
        """
        if isinstance(key, slice):
            first, stop, step = key.indices(len(self))
            if step != 1:
                raise ParamError(
                    f"a slice has step {step}, and a batch has its matrices in a row: slice without a step"
                )
            begin = self.seen.first
            return self._view(self.seen._replace(first=begin + first, stop=begin + max(first, stop)))
        try:
            number = range(self.seen.first, self.seen.stop)[operator.index(key)]
        except IndexError:
            raise IndexError(f"{self} has {counted(len(self), 'product')}, and no number {key}") from None
        except TypeError:
            raise TypeError(
                f"a Batch has matrices by one number, batch[i], or slice: {shown(key)} is neither"
            ) from None
        return self._base._view(self._turned(self.stacks.view(number)))

    def __iter__(self) -> Iterator[Matrix]:
        return map(self.__getitem__, range(len(self)))

    @property
    def T(self) -> Batch:
        """Each matrix transposed, in the same memory."""
        return self._view(self.seen._replace(turned=not self.seen.turned))

    mT = T

    @property
    def H(self) -> Batch:
        """The conjugate transpose of each, in the same memory; of real ones `T`. It can be A or B."""
        conjugated = self.dtype.is_complex and not self.seen.conjugated
        return self._view(self.seen._replace(turned=not self.seen.turned, conjugated=conjugated))

    def _view(self, seen: Seen) -> Batch:
        return Batch(self._base, self.stacks, self._own, self._given, seen=seen, operands=self.operands)

    @property
    def along(self) -> Literal["rows", "cols"]:
        """Which of theirs follow one another in memory."""
        return "cols" if self.order == "F" else "rows"

    def _turned(self, view: View) -> View:
        """Return what is seen of the one matrix, as this batch sees it."""
        return view._replace(turned=self.seen.turned, conjugated=self.seen.conjugated)

    def __matmul__(self, other: object) -> Any:
        """Return the products A[i] B[i], a new batch, as ``session.matmul(a, b)`` does. Collective."""
        if hasattr(other, "__array_ufunc__"):
            return NotImplemented
        return self._base._session("multiply").matmul(self, other)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self} belongs to its session and process, and cannot be copied or sent: use its .array")

    if not TYPE_CHECKING:  # who checks types is to see what there is
        __getattr__ = absent
