"""
What products of several matrices multiply: three operands, as any other product has.

The products of a batch are one product of matrices that have the single ones as blocks on their diagonal, and nothing
beside these (`GemmProblem.batch`). With one A for all of them it is one product of a wider B and C, with one B of a
longer A and C.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.matrix import HeldPart, Home, LocalParts, Matrix, MatrixInfo, Name, concerns
from uncut_mpi.api.views import Several, piece_of
from uncut_mpi.errors import ParamError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Order, Part, Rectangle
from uncut_mpi.model.problem import conjugated, is_conjugated_alone

Along: TypeAlias = Literal["diagonal", "rows", "cols"]
"""How matrices are put together: as blocks on the diagonal, their rows one after another, or their columns."""

_MOST_OPERANDS: Final = 64
"""Batches, and lists, that are kept put together."""

_EMPTY: Final = MatrixInfo(0, BoundLayout((0, 0), ()), DType.c128, ())
"""What is known of no matrices: the type that has all scalars."""

_Check: TypeAlias = Callable[[str, object], "Matrix | Batch"]

_Run: TypeAlias = tuple[tuple[int, int], int, Sequence[tuple[HeldPart, tuple[int, int, int]]]]

NOTHING: Final = LocalParts((), (), {}, "host", lambda rows, cols: None)


def operand_of(batch: Batch, along: Along, *, alone: bool = False) -> Matrix:
    """Return the matrices of a batch put together as one; `alone`: each a part, as copies transpose them. Local."""
    known = batch.operands.get((batch.seen, along, alone))
    if known is not None and not known.closed:
        return known
    base, seen, stacks = batch.base, batch.seen, batch.stacks
    if base.closed:
        raise ParamError(f"{batch} was released, or its session was closed: there is nothing to multiply")
    if len(batch) == 1:
        made = batch[0]
    else:
        numbers, shapes = frozenset({base.info.number}), Alike([(batch.shape[1:], len(batch))])
        token = f"{seen}{along}{' alone' * alone}"
        about = Several(token, numbers, str(batch), shapes, conjugated=seen.conjugated)
        if along == batch.along and (one := stacks.in_one(seen.first, seen.stop)):
            whole = base._view(batch._turned(one)).info
            origins = tuple(whole.origin(part) for part in range(len(whole.parts)))
            info = dataclasses.replace(whole, view=about, origins=origins)
        else:
            in_runs = along == "diagonal" and not alone
            info = put_together([*_runs_of(batch, in_runs=in_runs)], along, about, base.info)
        made = Matrix(info, array=None, local=base._local, home=base.home, whole=base)
        base._views[about] = made  # and so it ends with the matrix
    if len(batch.operands) >= _MOST_OPERANDS:
        batch.operands.clear()
    batch.operands[seen, along, alone] = made
    return made


def in_one(one: Matrix | Batch) -> Matrix:
    """Return a matrix, or a batch as one: a view, where its matrices lie without gaps. Local."""
    if isinstance(one, Matrix):
        return one
    view = one.stacks.in_one(one.seen.first, one.seen.stop)
    return operand_of(one, one.along) if view is None else one.base._view(one._turned(view))


def _runs_of(batch: Batch, *, in_runs: bool) -> Iterator[_Run]:
    """Yield shapes and parts of matrices, of many that follow one another without gaps at once if `in_runs`."""
    base, stacks, seen = batch.base.info, batch.stacks, batch.seen
    axis, (rows, cols), item = stacks.axis, stacks.shape, batch.dtype.itemsize
    order: Order = "C" if axis == 0 else "F"
    number = seen.first
    if number == seen.stop:
        yield batch.shape[1:], 0, []
    while number < seen.stop:
        (top, _), (left, _) = view = stacks.view(number)[:2]
        numbers = [at for at, held in enumerate(base.parts) if _has(held.part, view)]
        held_in = [base.parts[at].part for at in numbers]
        count = stacks.left_of_run(number, seen.stop) if in_runs else 1
        for part in held_in:
            there = (part.cols if axis else part.rows)[1] - view[axis][0]
            count = min(count, there // stacks.shape[axis]) if part.order == order else 1
        pieces = []
        for at, part in zip(numbers, held_in, strict=True):
            extents = (0, rows * count), (0, cols * count)
            its = Part(*extents, part.location, part.order, part.ld, count)
            held, start = piece_of(base.parts[at], its, top - part.rows[0], left - part.cols[0], item)
            if seen.turned:
                held = dataclasses.replace(held, part=its.transposed)
            pieces.append((held, (base.number, at, start)))
        yield batch.shape[1:], count, pieces
        number += count


class Listed(NamedTuple):
    """Matrices that a caller lists, as an operand of `Session.gemm_batch`; or one that stands there several times."""

    matrices: Sequence[Any]
    times: int = 1


def put_together(
    runs: Sequence[_Run],
    along: Along,
    about: Several,
    usual: MatrixInfo,
    read_only: tuple[int, ...] | None = None,
) -> MatrixInfo:
    """
    Return what ranks know of several matrices as one.

    Parameters
    ----------
    runs : sequence of ((int, int), int, sequence of (HeldPart, (int, int, int)))
        Shape of some of them, how many, and the parts of all of these; of a part its matrix, its number there and how
        many bytes are ahead of it.
    usual : MatrixInfo
        Has their type and, unless others are said, the ranks whose parts may not be written.
    """
    parts, origins, top, left = list[HeldPart](), list[tuple[int, int, int]](), 0, 0
    for (rows, cols), count, pieces in runs:
        for held, origin in pieces:
            its = held.part.moved(top, left)
            about_it = held.stretches, held.handle, held.offset_bytes, held.obstacle, held.in_file
            parts.append(HeldPart(its, held.holder, *about_it))
            origins.append(origin)
        top, left = top + count * rows * (along != "cols"), left + count * cols * (along != "rows")
    blocks = about.shapes if along == "diagonal" else ()
    if runs and not blocks:
        top, left = (top, runs[0][0][1]) if along == "rows" else (runs[0][0][0], left)
    layout = BoundLayout((top, left), tuple(held.part for held in parts), "batch", blocks=blocks)
    if not parts and not blocks:  # one without elements
        parts, origins = [HeldPart(Part((0, top), (0, left), Location.host(0)), 0, ())], [(usual.number, 0, 0)]
    read_only = usual.read_only if read_only is None else read_only
    return MatrixInfo(usual.number, layout, usual.dtype, tuple(parts), None, read_only, about, origins=tuple(origins))


def _checked(infos: Sequence[MatrixInfo], along: Along) -> Iterator[_Run]:
    """Yield shape and parts of matrices that a caller lists, or raise ParamError for those that do not go together."""
    first = infos[0]
    for at, given in enumerate(infos):
        info = given.in_orders((None, None))
        if (info.dtype, info.conjugated) != (first.dtype, first.conjugated):
            found, wanted = (f"{one.dtype.name}{' and conjugated' * one.conjugated}" for one in (info, first))
            raise ParamError(
                f"number {at} of a list ({info}) is {found}, number 0 is {wanted}: pass matrices of one kind"
            )
        apart = 1 if along == "rows" else 0
        if along != "diagonal" and info.layout.shape[apart] != first.layout.shape[apart]:
            found, wanted = ("{}×{}".format(*one.layout.shape) for one in (info, first))
            raise ParamError(
                f"number {at} of a list ({info}) is {found}, number 0 is {wanted}: both cannot fit one matrix"
            )
        pieces = [(held, info.origin(number)) for number, held in enumerate(info.parts) if info.layout.parts]
        yield info.layout.shape, 1, pieces


def _has(part: Part, view: Rectangle) -> bool:
    """Return whether a part has elements where a view begins."""
    return all(first <= start < stop for (first, stop), (start, _) in zip((part.rows, part.cols), view, strict=True))


def _is_copied(one: Any, trans: str, c: Matrix | Batch) -> bool:
    """Return whether copies transpose an operand, since it would be conjugated and not transposed."""
    if not isinstance(one, Batch) or not one.dtype.is_complex:
        return False
    return is_conjugated_alone(conjugated(trans) if one.seen.conjugated else trans, one.order, c.order)


def _plain(one: Matrix | Batch, along: Along) -> Matrix | None:
    """Return what all matrices are as a view of the one that they lie in, where they lie so; None elsewhere."""
    if isinstance(one, Matrix):
        return one
    if len(one) == 1:
        return one[0]
    return in_one(one) if along == one.along and one.stacks.in_one(one.seen.first, one.seen.stop) else None


def _is_beside(single: Matrix | Batch, c: Matrix | Batch) -> bool:
    """Return whether a matrix lies on every device that has some of C, so that products use it without a copy."""
    lies, wanted = (
        {held.part.location for held in (one if isinstance(one, Matrix) else one.base).info.parts}
        for one in (single, c)
    )
    return all(one.space == "device" for one in wanted) and wanted <= lies


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
            copied_a, copied_b = (_is_copied(one, op, c) for one, op in zip((a, b), trans, strict=True))
            inputs = operand_of(a, "diagonal", alone=copied_a), operand_of(b, "diagonal", alone=copied_b)
            return *inputs, operand_of(c, "diagonal")
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
        if way[2] != "diagonal" and not any(isinstance(one, Listed) for one in (a, b, c)):
            views = [_plain(one, along) for one, along in zip((a, b, c), way, strict=True)]
            if None not in views:  # one product as any other
                return cast(tuple[Matrix, Matrix, Matrix], tuple(views))
            if _is_beside(a if count_a in (None, 1) else b, c):
                a, b = (
                    Listed((one if isinstance(one, Matrix) else one[0],), count) if its in (None, 1) else one
                    for one, its in ((a, count_a), (b, count_b))
                )
                way = "diagonal", "diagonal", "diagonal"
        result = self._one(c, way[2], written=True)
        first, second = (
            self._one(one, along, alone=_is_copied(one, op, result))
            for one, along, op in zip((a, b), way, trans, strict=False)
        )
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

    def _one(self, one: Any, along: Along, *, alone: bool = False, written: bool = False) -> Matrix:
        """Return an operand that is all of its matrices, of just one that."""
        if isinstance(one, Batch):
            return operand_of(one, along, alone=alone)
        if isinstance(one, Matrix):
            return one
        if len(one.matrices) == one.times == 1:
            return cast(Matrix, one.matrices[0])
        infos = [matrix.info for matrix in one.matrices] * one.times
        names = one.times, *[matrix.info.name for matrix in one.matrices]
        known = self._lists.get((names, along))
        if known is None:
            token = hashlib.blake2b(repr((names, along)).encode(), digest_size=16).hexdigest()
            numbers = frozenset(info.number for info in infos)
            usual, shapes = infos[0] if infos else _EMPTY, Alike.of(info.layout.shape for info in infos)
            text, members = ("a list", tuple(map(str, infos))) if one.times == 1 else (str(usual), ())
            about = Several(token, numbers, text, shapes, members, usual.conjugated)
            matrices = [*_checked(infos, along)] if infos else []
            read_only = tuple(sorted({rank for info in infos for rank in info.read_only}))
            file = next((info.file for info in infos if info.file), "")
            if written and file:
                raise ParamError(
                    f"out has a matrix in the file {file}: pass matrices in memory, and copy them afterwards"
                )
            put = dataclasses.replace(put_together(matrices, along, about, usual, read_only), file=file)
            known = Matrix(put, array=None, local=NOTHING, home=self._home)
            if len(self._lists) >= _MOST_OPERANDS:
                self._lists.clear()
            self._lists[names, along] = known
        return known
