"""
What products of several matrices multiply: three operands, as any other product has.

The products of a batch are one product of matrices that have the single ones as blocks on their diagonal, and nothing
beside these (`GemmProblem.batch`). With one A for all of them it is one product of a wider B and C, with one B of a
longer A and C.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.matrix import HeldPart, Home, LocalParts, Matrix, MatrixInfo, Name, concerns
from uncut_mpi.api.views import Several, piece_of
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Extent, Part

Along: TypeAlias = Literal["diagonal", "rows", "cols"]
"""How matrices are put together: as blocks on the diagonal, their rows one after another, or their columns."""

_MOST_OPERANDS: Final = 64
"""Batches, and lists, that are kept put together."""

_EMPTY: Final = MatrixInfo(0, BoundLayout((0, 0), ()), DType.c128, ())
"""What is known of no matrices: the type that has all scalars."""

_Check: TypeAlias = Callable[[str, object], "Matrix | Batch"]

_Piece: TypeAlias = tuple[HeldPart, tuple[int, int, int]]

_NOTHING: Final = LocalParts((), (), {}, "host", lambda rows, cols: None)


def operand_of(batch: Batch, along: Along) -> Matrix:
    """Return the matrices of a batch put together as one. Local."""
    known = batch.operands.get((batch.seen, along))
    if known is not None and not known.closed:
        return known
    base, seen, stacks = batch.base, batch.seen, batch.stacks
    if base.closed:
        raise ParamError(f"{batch} was released, or its session was closed: there is nothing to multiply")
    if len(batch) == 1:
        made = batch[0]
    else:
        numbers, shapes = frozenset({base.info.number}), (batch.shape[1:],) * len(batch)
        about = Several(f"{seen}{along}", numbers, str(batch), shapes, conjugated=seen.conjugated)
        if along == ("rows", "cols")[stacks.axis != seen.turned] and (one := stacks.in_one(seen.first, seen.stop)):
            whole = base._view(batch.turned(one)).info
            origins = tuple(whole.origin(part) for part in range(len(whole.parts)))
            info = dataclasses.replace(whole, view=about, origins=origins)
        else:
            info = put_together([*zip(shapes, _pieces_of(batch), strict=True)], along, about, base.info)
        made = Matrix(info, array=None, local=base._local, home=base.home, whole=base)
        made.of_torch = base.of_torch
        base._views[about] = made  # and so it ends with the matrix
    if len(batch.operands) >= _MOST_OPERANDS:
        batch.operands.clear()
    batch.operands[seen, along] = made
    return made


def _pieces_of(batch: Batch) -> Iterator[list[_Piece]]:
    """Yield the parts of each matrix, in as many memories as it lies in."""
    base, stacks, seen = batch.base.info, batch.stacks, batch.seen
    axis, item = stacks.axis, batch.dtype.itemsize
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
            return operand_of(a, "diagonal"), operand_of(b, "diagonal"), operand_of(c, "diagonal")
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
            return operand_of(one, along)
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
