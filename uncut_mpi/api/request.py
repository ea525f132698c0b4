"""What callers ask of a product, converted once and told in the same words on all ranks. Local."""

from __future__ import annotations

import collections
import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.api.bound_epilogue import BoundEpilogue
from uncut_mpi.api.matrix import Matrix, MatrixInfo
from uncut_mpi.api.wording import product_asked
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import Number, number, shown, type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import PLAIN, Forms
from uncut_mpi.model.part_of_c import OTHER, Triangle
from uncut_mpi.model.problem import transposition
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.units import name_ranks

Operands = tuple[Matrix, Matrix, Matrix]
"""A, B and C."""

Infos = tuple[MatrixInfo, MatrixInfo, MatrixInfo]
"""What ranks know of them."""

# Between them numbers are neither 0 nor infinite in float32: half its least one, and half a unit above its largest.
_LEAST_FLOAT32, _MOST_FLOAT32 = 2.0**-150, (2 - 2.0**-24) * 2.0**127
_DEFAULT_OPTIONS = ScheduleOptions()
_PLAIN = "N"
_pack = struct.Struct("<dd").pack


class Scalars(NamedTuple):
    """The factors of one product."""

    alpha: Number  # alpha, beta: C := alpha op(A) op(B) + beta C
    beta: Number

    @classmethod
    def of(cls, alpha: object, beta: object) -> Scalars:
        """Return a caller's scalars, or raise ParamError for what is no number."""
        # Mostly floats already, and this is part of every call.
        factor = alpha if type(alpha) is float else number("alpha", alpha)
        scale = beta if type(beta) is float else number("beta", beta)
        return tuple.__new__(cls, (factor, scale))  # half the time of its constructor

    def scaled(self, of_a: DType, scale_a: object, scale_b: object) -> Scalars:
        """Return them with the scales of A and B in alpha; ParamError for a type that needs some, or has none."""
        if scale_a is scale_b is None and not of_a.needs_scales:
            return self
        if not of_a.needs_scales:
            raise ParamError(f"scale_a and scale_b are for e4m3 and e5m2, and A is {of_a.name}: leave them out")
        if scale_a is None or scale_b is None:
            raise ParamError(
                f"A is {of_a.name}, but scale_a = {scale_a} and scale_b = {scale_b}: pass the numbers by which A and B "
                "are multiplied, 1.0 for what holds its values as they are"
            )
        scales = number("scale_a", scale_a) * number("scale_b", scale_b)
        return Scalars.of(self.alpha * scales, self.beta)

    def mixed_with(self, digest: int) -> bytes:
        """Return 16 bytes that differ for other scalars, and for other digests of what they scale."""
        alpha, beta = self
        if type(alpha) is type(beta) is float or alpha.imag == beta.imag == 0:
            packed = _pack(alpha.real, beta.real)
        else:
            parts = _pack(alpha.real, alpha.imag) + _pack(beta.real, beta.imag)
            packed = hashlib.blake2b(parts, digest_size=16).digest()
        return (digest ^ int.from_bytes(packed, "little")).to_bytes(16, "little")

    def check(self, dtype: DType) -> None:
        """Raise ParamError for a complex scalar of a real type, and one that the type that sums has not or as 0."""
        for name, value in zip(self._fields, self, strict=True):
            if type(value) is complex and not dtype.is_complex:
                raise ParamError(f"{name} = {value} is complex, and the matrices are {dtype.name}: pass a real number")
            if dtype.is_integer and not (float(value.real).is_integer() and -(2**31) <= value.real < 2**31):
                raise ParamError(f"{name} = {value} is no int32, in which products of this type are scaled")
            if dtype.is_integer or dtype.accumulator.real is DType.f64:
                continue
            for part in (value.real, value.imag):
                if part and not _LEAST_FLOAT32 < abs(part) < _MOST_FLOAT32 and math.isfinite(part):
                    becomes = "0" if abs(part) < 1 else "infinite"
                    raise ParamError(
                        f"{name} = {value} becomes {becomes} in float32, in which products of this type are scaled: "
                        "scale the matrices instead, or use float64"
                    )


class Choices(NamedTuple):
    """What a product is besides its matrices and scalars."""

    trans_a: str  # trans_a, trans_b: "N", "T" or "C"
    trans_b: str
    options: ScheduleOptions  # what is fixed about the schedule
    triangle: Triangle = ""  # of C that is written
    forms: Forms = PLAIN  # of A and B of which one triangle is read
    epilogue: BoundEpilogue | None = None  # what is done with C once it is summed

    @classmethod
    def of(
        cls,
        trans_a: object,
        trans_b: object,
        options: object,
        triangle: object = "",
        epilogue: BoundEpilogue | None = None,
    ) -> Choices:
        """Return a caller's choices, or raise ParamError for what is none of those above."""
        if options is None:
            if (
                trans_a is trans_b is _PLAIN and triangle == "" and epilogue is None
            ):  # as mostly, and this is part of every call
                return _USUAL
            options = _DEFAULT_OPTIONS
        elif not isinstance(options, ScheduleOptions):
            raise ParamError(f"options is {type_text(options)}: pass a ScheduleOptions")
        for name, value in (("trans_a", trans_a), ("trans_b", trans_b)):
            transposition(name, value)
        if not isinstance(triangle, str) or triangle not in OTHER:
            raise ParamError(f"triangle is {shown(triangle)}: pass 'lower', 'upper', 'lower_real', 'upper_real' or ''")
        return tuple.__new__(cls, (str(trans_a), str(trans_b), options, str(triangle), PLAIN, epilogue))

    def asked(self) -> dict[str, object]:
        """Return what callers pass of it by their names; forms are told by calls of their own."""
        asked: dict[str, object] = dict(zip(self._fields[:-2], self[:-2], strict=True))
        return asked if self.epilogue is None else asked | self.epilogue.asked()


_USUAL = Choices(_PLAIN, _PLAIN, _DEFAULT_OPTIONS)


class Request(NamedTuple):
    """A product that a caller asks for."""

    call: str  # name of the call
    matrices: Operands  # A, B and C, alive and of this session
    scalars: Scalars  # alpha and beta
    choices: Choices  # of this call, or of the plan that it uses
    told: Mapping[str, object] | None = None  # what the caller passed, where it is not these

    def asked(self) -> Mapping[str, object]:
        """Return what the caller passed, by its names."""
        return self.told or product_asked(self.call, self.matrices, self.scalars._asdict(), self.choices.asked())


def infos_of(matrices: Operands) -> Infos:
    """Return what ranks know of A, B and C."""
    a, b, c = matrices
    return a.info, b.info, c.info


def check_written(name: str, written: MatrixInfo, **read: MatrixInfo) -> None:
    """
    Raise ParamError if a matrix cannot be written, or a part of it shares memory with another or with what is read.

    Every call that writes a caller's memory makes this check.

    Parameters
    ----------
    name : str
        What the caller calls it.
    **read : MatrixInfo
        What the call reads, by the caller's names.
    """
    written.check_in_memory()
    if written.read_only:
        raise ParamError(f"{name} {written.read_only_text}")
    for other, info in read.items():
        ranks = overlapping(info, written)
        if ranks:
            where = f" ({name_ranks(ranks)})" if written.in_parts else ""
            raise ParamError(f"{name} overlaps {other} in memory{where}: pass another matrix for the result")
    ranks = overlapping_itself(written)
    if ranks:
        raise ParamError(f"parts of {name} overlap in memory ({name_ranks(ranks)}): pass another matrix for the result")


def check_copy(read: tuple[str, MatrixInfo], written: tuple[str, MatrixInfo]) -> None:
    """Raise ParamError if a matrix cannot be copied into another; with what the caller calls them."""
    (source_name, source), (name, target) = read, written
    source.check_in_memory()
    if source.layout.shape != target.layout.shape or source.dtype is not target.dtype:
        found, wanted = ("{}×{} and type {}".format(*one.layout.shape, one.dtype.name) for one in (target, source))
        raise ParamError(f"{name} is of shape {found}, {source_name} of {wanted}: shapes and types must be equal")
    check_written(name, target, **{source_name: source})


def overlapping(x: MatrixInfo, written: MatrixInfo) -> tuple[int, ...]:
    """
    Return ranks whose part of `written` overlaps `x`.

    Exact for parts of one leading dimension and type; otherwise true whenever they share a byte between their first
    and last ones.
    """
    return tuple(sorted({written.parts[other].holder for _, other in _meeting(x, written)}))


def overlapping_itself(written: MatrixInfo) -> tuple[int, ...]:
    """Return the ranks of two parts of which writing one changes an element of the other; none if there are none."""
    pairs = _meeting(written, None) if len(written.parts) > 1 else iter(())
    found = next((pair for pair in pairs if pair[0] != pair[1]), ())
    return tuple(sorted({written.parts[number].holder for number in found}))


def _meeting(x: MatrixInfo, written: MatrixInfo | None) -> Iterator[tuple[int, int]]:
    """
    Yield the numbers of two parts that share bytes of an element, of which writing the second one changes some.

    Without another matrix these are parts of the same one.
    """
    lies = _by_memory(x)
    changed, dtype = (lies, x.dtype) if written is None else (_by_memory(written), written.dtype)
    for memory in sorted(lies.keys() & changed.keys()):  # so that all ranks name the same parts
        if written is None and len(lies[memory]) == 1:  # which meets itself alone
            continue
        one, other = np.array(lies[memory], np.int64), np.array(changed[memory], np.int64)
        # Of those in the order in which they begin, some in a row may meet each.
        other = other[np.argsort(other[:, _START], kind="stable")]
        stop = np.searchsorted(other[:, _START], one[:, _STOP])
        first = np.searchsorted(np.maximum.accumulate(other[:, _STOP]), one[:, _START], side="right")
        counts = np.maximum(stop - first, 0)
        ends = np.cumsum(counts)
        for begin in range(0, int(ends[-1]), _PAIRS):
            pairs = np.arange(begin, min(begin + _PAIRS, ends[-1]))
            at = np.searchsorted(ends, pairs, side="right")
            left, right = one[at], other[pairs - (ends - counts)[at] + first[at]]
            meet = _meet(left, x.dtype, right, dtype)
            yield from zip(left[meet, _NUMBER].tolist(), right[meet, _NUMBER].tolist(), strict=True)


def _by_memory(info: MatrixInfo) -> dict[str, list[tuple[int, ...]]]:
    """Return the stretches of parts that have elements, by the memory that they lie in."""
    found: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
    for at, held in enumerate(info.parts):
        part = held.part
        rows, cols = part.stored_shape
        for one in held.stretches if rows and cols else ():
            where = one.start, one.start + one.nbytes, one.start - one.offset, one.written
            found[one.memory].append((*where, rows, cols, part.ld, at))
    return found


_PAIRS: Final = 1 << 18
"""Parts that are compared at once."""

_START, _STOP, _FIRST, _WRITTEN, _ROWS, _COLS, _LD, _NUMBER = range(8)


def _meet(x: np.ndarray, x_type: DType, y: np.ndarray, y_type: DType) -> np.ndarray:
    """Return of pairs of stretches in one memory whether their parts share an element's bytes, and y is written."""
    meet: np.ndarray = (x[:, _START] < y[:, _STOP]) & (y[:, _START] < x[:, _STOP]) & (y[:, _WRITTEN] > 0)
    if x_type is not y_type:
        return meet
    # Rectangles of one array of leading dimension ld, both read column-major. y starts `col` columns
    # and `row` rows after x; a negative row offset appears as ld − |row| in the column before.
    ld = x[:, _LD]
    distance, rest = np.divmod(y[:, _FIRST] - x[:, _FIRST], x_type.itemsize)
    col, row = np.divmod(distance, ld)
    shared = np.zeros_like(meet)
    for down, along in ((row, col), (row - ld, col + 1)):
        shared |= (-y[:, _ROWS] < down) & (down < x[:, _ROWS]) & (-y[:, _COLS] < along) & (along < x[:, _COLS])
    meet &= shared | (ld != y[:, _LD]) | (rest != 0)
    return meet
