"""
Batches: matrices of one shape in one memory, or dealt to ranks, and what products of several matrices multiply.

The products of a batch are one product of matrices that have the single ones as blocks on their diagonal, and nothing
beside these (`GemmProblem.batch`). With one A for all of them it is one product of a wider B and C, with one B of a
longer A and C. So a batch becomes three operands as any other product has (`operands_of`).
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast, overload

import numpy as np

from uncut_mpi.api.matrix import HeldPart, Home, LocalParts, Matrix, MatrixInfo, Name, concerns
from uncut_mpi.api.views import Several, View, piece_of
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import absent
from uncut_mpi.model.arguments import counted, shown
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import BoundLayout, Extent, Part
from uncut_mpi.model.problem import Order

Along: TypeAlias = Literal["diagonal", "rows", "cols"]
"""How matrices are put together: as blocks on the diagonal, their rows one after another, or their columns."""

_MOST_OPERANDS: Final = 64
"""Batches, and lists, that are kept put together."""

_EMPTY: Final = MatrixInfo(0, BoundLayout((0, 0), ()), DType.c128, ())
"""What is known of no matrices: the type that has all scalars."""

_Check: TypeAlias = Callable[[str, object], "Matrix | Batch"]

_Piece: TypeAlias = tuple[HeldPart, tuple[int, int, int]]
_first = operator.itemgetter(0)


class _Seen(NamedTuple):
    """Which matrices of a batch are seen, and whether transposed and conjugated."""

    first: int
    stop: int
    turned: bool = False
    conjugated: bool = False

    def __str__(self) -> str:
        return str(View((self.first, self.stop), (0, 0), self.turned, self.conjugated)).replace(", 0:0", "")


_NOTHING: Final = LocalParts((), (), {}, "host", lambda rows, cols: None)


@dataclasses.dataclass(frozen=True, slots=True)
class Stacks:
    """
    Where the matrices of a batch lie in the one matrix that they are.

    Attributes
    ----------
    count : int
        How many there are.
    shape : (int, int)
        Rows and columns of each.
    axis : int
        0 where rows of that matrix are theirs, one after another; 1 where columns are.
    dealt : Layout
        How they are dealt to ranks: its rows are their numbers.
    runs : tuple of (int, int, int)
        Of those that lie at equal distances: the number of the first, the row (column) at which it begins, and how many
        there are from one to the next.
    """

    count: int
    shape: tuple[int, int]
    axis: int
    dealt: Layout
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

    def _run(self, number: int) -> tuple[int, int, int]:
        return self.runs[bisect.bisect_right(self.runs, number, key=_first) - 1]

    def view(self, number: int) -> View:
        """Return what is seen of a matrix."""
        extents = (0, self.shape[0]), (0, self.shape[1])
        return View(*((self.extent(number), extents[1]) if self.axis == 0 else (extents[0], self.extent(number))))

    def in_one(self, first: int, stop: int) -> View | None:
        """Return what is seen of some that lie one after another without gaps, None if there are some."""
        begin, end, extent = self.extent(first)[0], self.extent(stop - 1)[1], self.shape[self.axis]
        if end - begin != (stop - first) * extent:
            return None
        return View((begin, end), (0, self.shape[1])) if self.axis == 0 else View((0, self.shape[0]), (begin, end))


class Batch:
    """
    Matrices of one shape, in one memory or dealt to ranks: a sequence of them.

    `Session.register`, `distribute`, `empty` and those beside them make one of an array or a shape of three dimensions.
    ``batch[i]`` is a `Matrix`, a view, and ``batch[i:j]`` a batch of some. Any rank may make either, at any time.
    `Session.gemm` multiplies batches by the rules of ``numpy.matmul``; ``a @ b`` is ``session.gemm(a, b)``.
    """

    def __init__(
        self,
        base: Matrix,
        stacks: Stacks,
        own: Extent,
        array: Any = None,
        *,
        seen: _Seen | None = None,
        operands: dict[tuple[_Seen, Along], Matrix] | None = None,
    ) -> None:
        self._base, self._stacks, self._own, self._given = base, stacks, own, array
        self._seen = seen or _Seen(0, stacks.count)
        # Of this batch and all its views: to put a batch together takes longer than a small product of it.
        self._operands: dict[tuple[_Seen, Along], Matrix] = {} if operands is None else operands

    # -- what it is --------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._seen.stop - self._seen.first

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many matrices there are, their rows and their columns."""
        rows, cols = self._stacks.shape
        return (len(self), cols, rows) if self._seen.turned else (len(self), rows, cols)

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self._base.dtype

    @property
    def order(self) -> Order:
        """``"F"`` or ``"C"``: how each matrix is stored."""
        return "C" if (self._stacks.axis == 0) != self._seen.turned else "F"

    @property
    def layout(self) -> Layout:
        """How the matrices are dealt to ranks: what a layout says of rows is true of their numbers."""
        return self._stacks.dealt.sliced((self._stacks.count, 1), (self._seen.first, self._seen.stop), (0, 1))

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
        All of it as this rank sees it: an array of numpy or cupy, of three dimensions; else as `Matrix.array`.

        Raises
        ------
        ParamError
            If this rank does not see all of it, as of one that is dealt to several.
        """
        return self._picked(self._base.array, (0, self._stacks.count))

    @property
    def local(self) -> Any:
        """Those matrices that this rank has, an array of three dimensions: the one that was given, if all of it."""
        return self._picked(self._base.local, self._own)

    def _picked(self, lines: Any, there: Extent) -> Any:
        """Return what this is of an array of all lines of some of the matrices."""
        (first, stop), (rows, cols), axis = there, self._stacks.shape, self._stacks.axis
        if self._given is not None and there == self._own:
            array = self._given
        elif isinstance(lines, np.ndarray):
            apart = self._stacks.step(first) * lines.strides[axis]
            array = np.lib.stride_tricks.as_strided(lines, (stop - first, rows, cols), (apart, *lines.strides))
        elif axis == 0:  # new ones, without gaps
            array = lines.reshape(stop - first, rows, cols)
        else:
            array = lines.T.reshape(stop - first, cols, rows).swapaxes(1, 2)
        seen = self._seen
        if (first, stop) != (seen.first, seen.stop):
            begin = max(first, seen.first)
            array = array[begin - first : max(begin, min(stop, seen.stop)) - first]
        if seen.turned:
            array = array.swapaxes(1, 2)
        return array.conj() if seen.conjugated else array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return `array`, for numpy; errors as of `Matrix`."""
        if self.closed or not isinstance(self._base._array, np.ndarray):
            self._base.__array__()  # which says why there is none
        return np.array(self.array, dtype, copy=bool(copy)) if copy or dtype is not None else np.asarray(self.array)

    def __repr__(self) -> str:
        count, rows, cols = self.shape
        where = f"in parts ({self.layout})" if self._base.info.in_parts else f"at {self.location}"
        return f"<{str(self).capitalize()}: {count}×{rows}×{cols} {self.dtype.name} {self.order}-order {where}>"

    def __str__(self) -> str:
        return f"batch {self._base.info.number}{'' if self.is_whole else self._seen}"

    @property
    def is_whole(self) -> bool:
        """Whether it is all that was made, and not a view."""
        return self._seen == (0, self._stacks.count, False, False)

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
            begin = self._seen.first
            return self._view(self._seen._replace(first=begin + first, stop=begin + max(first, stop)))
        try:
            number = range(self._seen.first, self._seen.stop)[operator.index(key)]
        except IndexError:
            raise IndexError(f"{self} has {counted(len(self), 'product')}, and no number {key}") from None
        except TypeError:
            raise TypeError(
                f"a Batch has matrices by one number, batch[i], or slice: {shown(key)} is neither"
            ) from None
        return self._base._view(self._turned(self._stacks.view(number)))

    def __iter__(self) -> Iterator[Matrix]:
        return map(self.__getitem__, range(len(self)))

    @property
    def T(self) -> Batch:
        """Each matrix transposed, in the same memory."""
        return self._view(self._seen._replace(turned=not self._seen.turned))

    mT = T

    @property
    def H(self) -> Batch:
        """The conjugate transpose of each, in the same memory; of real ones `T`. It can be A or B."""
        conjugated = self.dtype.is_complex and not self._seen.conjugated
        return self._view(self._seen._replace(turned=not self._seen.turned, conjugated=conjugated))

    def _view(self, seen: _Seen) -> Batch:
        return Batch(self._base, self._stacks, self._own, self._given, seen=seen, operands=self._operands)

    def _turned(self, view: View) -> View:
        return view._replace(turned=self._seen.turned, conjugated=self._seen.conjugated)

    def operand(self, along: Along) -> Matrix:
        """Return its matrices put together as one. Local."""
        known = self._operands.get((self._seen, along))
        if known is not None and not known.closed:
            return known
        base, seen, stacks = self._base, self._seen, self._stacks
        if base.closed:
            raise ParamError(f"{self} was released, or its session was closed: there is nothing to multiply")
        if len(self) == 1:
            made = self[0]
        else:
            numbers, shapes = frozenset({base.info.number}), (self.shape[1:],) * len(self)
            about = Several(f"{seen}{along}", numbers, str(self), shapes, conjugated=seen.conjugated)
            if along == ("rows", "cols")[stacks.axis != seen.turned] and (one := stacks.in_one(seen.first, seen.stop)):
                whole = base._view(self._turned(one)).info
                origins = tuple(whole.origin(part) for part in range(len(whole.parts)))
                info = dataclasses.replace(whole, view=about, origins=origins)
            else:
                info = put_together([*zip(shapes, self._pieces(), strict=True)], along, about, base.info)
            made = Matrix(info, array=None, local=base._local, home=base.home, whole=base)
            made.of_torch = base.of_torch
            base._views[about] = made  # and so it ends with the matrix
        if len(self._operands) >= _MOST_OPERANDS:
            self._operands.clear()
        self._operands[seen, along] = made
        return made

    def _pieces(self) -> Iterator[list[_Piece]]:
        """Yield the parts of each matrix, in as many memories as it lies in."""
        base, stacks, seen = self._base.info, self._stacks, self._seen
        axis, item = stacks.axis, self.dtype.itemsize
        numbers: tuple[int, ...] = ()
        within = 0, 0
        for number in range(seen.first, seen.stop):
            (top, _), (left, _) = view = stacks.view(number)[:2]
            if not within[0] <= view[axis][0] < within[1]:  # those of a rank lie in one part, in each replica
                numbers = tuple(at for at, held in enumerate(base.parts) if _has(held.part, view))
                within = _extent(base.parts[numbers[0]].part, axis) if numbers else (0, 0)
            pieces = []
            for at in numbers:
                part = base.parts[at].part
                its = Part((0, stacks.shape[0]), (0, stacks.shape[1]), part.location, part.order, part.ld)
                held, start = piece_of(base.parts[at], its, top - part.rows[0], left - part.cols[0], item)
                if seen.turned:
                    held = dataclasses.replace(held, part=its.transposed)
                pieces.append((held, (base.number, at, start)))
            yield pieces

    def __matmul__(self, other: object) -> Any:
        """Return the products A[i] B[i], a new batch, as ``session.gemm(a, b)`` does. Collective."""
        if hasattr(other, "__array_ufunc__"):
            return NotImplemented
        return self._base._session("multiply").gemm(self, other)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self} belongs to its session and process, and cannot be copied or sent: use its .array")

    if not TYPE_CHECKING:  # who checks types is to see what there is
        __getattr__ = absent


class Listed(NamedTuple):
    """Matrices that a caller lists, as an operand of `Session.gemm_batch`."""

    matrices: Sequence[Any]


def put_together(
    matrices: Sequence[tuple[tuple[int, int], Sequence[_Piece]]],
    along: Along,
    about: Several,
    usual: MatrixInfo,
    read_only: tuple[int, ...] | None = None,
) -> MatrixInfo:
    """
    Return what ranks know of several matrices as one.

    Parameters
    ----------
    matrices : sequence of ((int, int), sequence of (HeldPart, (int, int, int)))
        Shape and parts of each; of a part its matrix, its number there and how many bytes are ahead of it.
    usual : MatrixInfo
        Has their type and, unless others are said, the ranks whose parts may not be written.
    """
    parts, origins, top, left = list[HeldPart](), list[tuple[int, int, int]](), 0, 0
    for (rows, cols), pieces in matrices:
        for held, origin in pieces:
            part = held.part
            (above, below), (before, behind) = part.rows, part.cols
            its = Part((above + top, below + top), (before + left, behind + left), part.location, part.order, part.ld)
            parts.append(HeldPart(its, held.holder, held.stretches, held.handle, held.offset_bytes, held.obstacle))
            origins.append(origin)
        top, left = top + rows * (along != "cols"), left + cols * (along != "rows")
    blocks = tuple(shape for shape, _ in matrices) if along == "diagonal" else ()
    if matrices and not blocks:
        top, left = (top, matrices[0][0][1]) if along == "rows" else (matrices[0][0][0], left)
    layout = BoundLayout((top, left), tuple(held.part for held in parts), "batch", blocks=blocks)
    if not parts and not blocks:  # one without elements
        parts, origins = [HeldPart(Part((0, top), (0, left), Location.host(0)), 0, ())], [(usual.number, 0, 0)]
    read_only = usual.read_only if read_only is None else read_only
    return MatrixInfo(usual.number, layout, usual.dtype, tuple(parts), None, read_only, about, origins=tuple(origins))


def _checked(infos: Sequence[MatrixInfo], along: Along) -> Iterator[tuple[tuple[int, int], list[_Piece]]]:
    """Yield shape and parts of matrices that a caller lists, or raise ParamError for those that do not go together."""
    first = infos[0]
    for at, given in enumerate(infos):
        info = given.in_orders((None, None))
        if (info.dtype, info.conjugated) != (first.dtype, first.conjugated):
            found, wanted = (f"{one.dtype.name}{' and conjugated' * one.conjugated}" for one in (info, first))
            raise ParamError(
                f"number {at} of a list ({info}) is {found}, number 0 is {wanted}: pass matrices of one kind"
            )
        if info.file:
            raise ParamError(f"number {at} of a list is in the file {info.file}: pass matrices in memory (download)")
        apart = 1 if along == "rows" else 0
        if along != "diagonal" and info.layout.shape[apart] != first.layout.shape[apart]:
            found, wanted = ("{}×{}".format(*one.layout.shape) for one in (info, first))
            raise ParamError(
                f"number {at} of a list ({info}) is {found}, number 0 is {wanted}: both cannot fit one matrix"
            )
        pieces = [(held, info.origin(number)) for number, held in enumerate(info.parts) if info.layout.parts]
        yield info.layout.shape, pieces


def _has(part: Part, view: tuple[Extent, Extent]) -> bool:
    """Return whether a part has elements where a view begins."""
    return all(first <= start < stop for (first, stop), (start, _) in zip((part.rows, part.cols), view, strict=True))


def _extent(part: Part, axis: int) -> Extent:
    return part.rows if axis == 0 else part.cols


class Batches:
    """
    Makes three operands of what a caller multiplies, where that is more than three matrices. Local.

    Parameters
    ----------
    home : Home
        The session.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lists: dict[tuple[tuple[Name, ...], Along], Matrix] = {}

    def operands(
        self, check: _Check, given: tuple[Any, Any, Any], trans: tuple[str, str]
    ) -> tuple[Matrix, Matrix, Matrix]:
        """
        Return A, B and C of one product for all products of a batch, for a plain one just its matrices.

        Parameters
        ----------
        check : callable
            Returns a live matrix or batch of the session that is called by a name, or raises ParamError.

        Raises
        ------
        ParamError
            If their numbers differ, or one of them is no live matrix, or batch, of the session.
        """
        a, b, c = given
        are_batches = type(a) is type(b) is type(c) is Batch
        if are_batches and a.base.home is b.base.home is c.base.home is self._home and len(a) == len(b) == len(c) > 0:
            # Asked at once, since mostly it is so and this is part of every call.
            return a.operand("diagonal"), b.operand("diagonal"), c.operand("diagonal")
        count_a, count_b, count = (self._count(check, *one) for one in zip("ABC", given, strict=True))
        if count_a is count_b is count is None:
            return a, b, c
        several = max(count_a or 0, count_b or 0) if 0 not in (count_a, count_b) else 0
        if count is None or several != count or {count_a, count_b} - {None, 1, count}:
            numbers = ", ".join(
                f"{name} {'is one matrix' if one is None else 'has ' + counted(one, 'product')}"
                for name, one in zip("ABC", (count_a, count_b, count), strict=True)
            )
            raise ParamError(
                f"the numbers of products do not fit: {numbers}; C has as many as A and B, of which one may be "
                "a single matrix"
            )
        way: tuple[Along, Along, Along] = ("diagonal", "diagonal", "diagonal")
        if count == 0:
            a = b = c = Listed(())
        elif count > 1 and count_a in (None, 1):
            way = "diagonal", "cols" if trans[1] == "N" else "rows", "cols"
        elif count > 1 and count_b in (None, 1):
            way = "rows" if trans[0] == "N" else "cols", "diagonal", "rows"
        first, second, result = itertools.starmap(self._one, zip((a, b, c), way, strict=True))
        return first, second, result

    def forget(self, number: int) -> None:
        """Forget the lists in which a matrix is that was released. Local."""
        for key, made in [*self._lists.items()]:
            if concerns(made.info.name, number):
                made.closed, made.home = True, None
                del self._lists[key]

    def _count(self, check: _Check, name: str, one: object) -> int | None:
        if isinstance(one, Listed):
            for at, matrix in enumerate(one.matrices):
                is_plain = type(matrix) is Matrix and matrix.home is self._home  # as mostly
                if not is_plain and isinstance(check(f"{name}[{at}]", matrix), Batch):
                    raise ParamError(f"{name}[{at}] is a Batch: list its matrices, [*batch], or pass it alone")
            return len(one.matrices)
        found = check(name, one)
        return len(found) if isinstance(found, Batch) else None

    def _one(self, one: Any, along: Along) -> Matrix:
        """Return an operand that is all of its matrices, of just one that."""
        if isinstance(one, Batch):
            return one.operand(along)
        if isinstance(one, Matrix):
            return one
        if len(one.matrices) == 1:
            return cast(Matrix, one.matrices[0])
        infos = [matrix.info for matrix in one.matrices]
        names = tuple([info.name for info in infos])
        known = self._lists.get((names, along))
        if known is None:
            token = hashlib.blake2b(repr((names, along)).encode(), digest_size=16).hexdigest()
            numbers = frozenset(info.number for info in infos)
            usual, shapes = infos[0] if infos else _EMPTY, tuple(info.layout.shape for info in infos)
            about = Several(token, numbers, "a list", shapes, tuple(map(str, infos)), usual.conjugated)
            matrices = [*_checked(infos, along)] if infos else []
            read_only = tuple(sorted({rank for info in infos for rank in info.read_only}))
            put = put_together(matrices, along, about, usual, read_only)
            known = Matrix(put, array=None, local=_NOTHING, home=self._home)
            if len(self._lists) >= _MOST_OPERANDS:
                self._lists.clear()
            self._lists[names, along] = known
        return known
