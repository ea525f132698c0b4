"""
COPY, GEMM and COMBINE in numpy, each bound once to the memory it works on.

All arrays are built at binding, so that a call only calls numpy. Sums are formed in the accumulator
type and rounded once to the type written; an operand whose factor is 0 is not read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.host.epilogue import RegionEpilogue
from uncut_mpi.device.views import Array, matrix_at
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.form import Form, op_alone
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import Factor, Op

# Columns are taken in blocks of about so many elements wherever a body needs an intermediate
# result: enough for BLAS to run at full rate, and little memory beside that of the schedule.
_BLOCK_ELEMENTS: Final = 1 << 20
_BLOCK_COLUMNS: Final = 64

# Longer copies show that a lane gets on.
_COPIED_AT_ONCE: Final = 16 << 20

# A product is made in parts of about so many operations, after each of which the ranks that wait can
# see that it gets on: a second or two of one busy core, and large enough for BLAS's full rate.
_PART_OPERATIONS: Final = 1 << 34


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BodyOperand:
    """One operand of a body: its array as used (transposed if it is), its factor, and its place, as no other has it."""

    array: Array
    dtype: DType
    factor: Factor
    place: tuple[int, ...]
    conjugated: bool = False
    # How what is written is: all of it, a triangle, or with an epilogue; and `BOUND_OPERAND_DTYPE`'s diagonal.
    ending: Op = Op.N
    diagonal: int = 0
    form: Form | None = None  # of what is multiplied, as it is used


class Scratch:
    """Intermediate results of the bodies of one executable; bodies run one at a time, so they share them."""

    def __init__(self) -> None:
        self._elements: dict[tuple[str, DType], int] = {}
        self._memory: dict[tuple[str, DType], Array] = {}

    def reserve(self, name: str, dtype: DType, elements: int) -> None:
        """Ask for so many elements of scratch `name`."""
        key = (name, dtype)
        self._elements[key] = max(elements, self._elements.get(key, 0))

    def allocate(self) -> None:
        """Make what was asked for."""
        self._memory = {key: np.empty(elements, key[1].numpy) for key, elements in self._elements.items()}

    def matrix(self, name: str, dtype: DType, rows: int, cols: int) -> Array:
        """Return scratch `name` as a contiguous column-major matrix; its contents are undefined."""
        matrix: Array = self._memory[name, dtype][: rows * cols].reshape((rows, cols), order="F")
        return matrix


class Body(abc.ABC):
    """
    What one task does, which writes one region; or several of a lane.

    Attributes
    ----------
    copy_bytes : int
        What it copies.
    behind : int
        How many bodies that follow it on its lane it has done as well.
    """

    copy_bytes = behind = 0

    def __init__(self, write: BodyOperand) -> None:
        self.write = write

    @abc.abstractmethod
    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """
        Do it.

        Parameters
        ----------
        scalars : list of float or complex
            The value of each `Factor`.
        advance : callable
            Called between the parts of a body that may take long, so that others see it get on.
        """


class Copy(Body):
    """Moves one region: every bit pattern passes unchanged, also where a type has no fast copy."""

    def __init__(
        self, write: BodyOperand, reads: list[BodyOperand], files: FileWindows, run: tuple[int, int] | None = None
    ) -> None:
        (source,), item = reads, write.dtype.itemsize
        if source.conjugated:
            raise ScheduleError("a COPY does not conjugate")
        super().__init__(write)
        count, cols = run or (1, write.place[2])  # of those whose columns follow one another at both ends
        turns = source.place[5] is not Op.N
        self._shape = write.place[1] * item, cols
        self.copy_bytes, self._files, self.behind = math.prod(self._shape), files, count - 1
        self._ends = write.place[0], write.place[3] * item, source.place[0], source.place[3] * item
        self._turned = item if turns else 0

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        self._files.copy(*self._ends, self._shape, self._turned)


class Summing(Body):
    """Writes a sum of products of a factor and an array, formed in the accumulator's type."""

    def __init__(
        self, write: BodyOperand, reads: list[BodyOperand], scratch: Scratch, epilogue: RegionEpilogue | None = None
    ) -> None:
        super().__init__(write)
        self._sum = max((one.dtype.accumulator for one in (write, *reads)), key=lambda kind: kind.itemsize)
        rows, cols = write.array.shape
        self._columns = max(1, min(cols, max(_BLOCK_COLUMNS, _BLOCK_ELEMENTS // max(1, rows))))
        self._scratch, self._epilogue = scratch, epilogue
        if epilogue is not None:
            for name in ("sum", "term"):
                scratch.reserve(name, self._sum, rows * self._columns)

    def _of(self, scalars: list[Number], factor: Factor) -> Number:
        """Return a factor as the type that sums takes it."""
        return int(scalars[factor].real) if self._sum.is_integer else scalars[factor]

    def _write(self, part: Array, terms: list[tuple[Array, Number]]) -> None:
        """Part := the sum of array × factor, of which the first array may be the part itself."""
        if not terms:
            part[...] = 0
            return
        (array, factor), *others = terms
        is_exact = part.dtype == self._sum.numpy
        if factor == 1.0 and not others:
            np.copyto(part, array, casting="unsafe")
            return
        total = part if is_exact else self._scratch.matrix("total", self._sum, *part.shape)
        if array is not total:
            np.copyto(total, array)
        if factor != 1.0:
            np.multiply(total, factor, out=total)
        for array, factor in others:
            if factor != 1.0 or array.dtype != total.dtype:
                term = self._scratch.matrix("term", self._sum, *total.shape)
                np.copyto(term, array)
                if factor != 1.0:
                    np.multiply(term, factor, out=term)
                array = term
            np.add(total, array, out=total)
        if not is_exact:
            np.copyto(part, total, casting="unsafe")

    def _end(self, columns: slice, summed: list[tuple[Array, Number]], kept: list[tuple[Array, Number]]) -> None:
        """Write in some columns what the epilogue makes of a sum and of what is kept of C."""
        part = self.write.array[:, columns]
        total, term = (self._scratch.matrix(name, self._sum, *part.shape) for name in ("sum", "term"))
        assert self._epilogue is not None
        with np.errstate(all="ignore"):
            self._write(total, summed)
            self._epilogue.scale_and_add(total, columns)
            self._write(total, [(total, 1.0), *kept])
            self._epilogue.activate(total, term)
            np.copyto(part, total, casting="unsafe")


class Gemm(Summing):
    """write := f_A op(A) op(B) + f_C C, or what an epilogue makes of it."""

    def __init__(
        self, write: BodyOperand, reads: list[BodyOperand], scratch: Scratch, epilogue: RegionEpilogue | None = None
    ) -> None:
        super().__init__(write, reads[:2], scratch, epilogue)
        (m, n), (a, b) = write.array.shape, reads[:2]
        k = a.array.shape[1]
        # BLAS has no integers; float64 has every sum of fewer than 2**39 products of int8.
        self._made_as = DType.f64 if self._sum.is_integer else self._sum
        self._a, self._b = a, b
        self._is_triangular = any(one.form is not None and one.form.is_triangular for one in (a, b))
        self._factor_a = a.factor
        self._factor_c = reads[2].factor if len(reads) == 3 else Factor.ZERO
        self._part_columns = max(1, min(n, _PART_OPERATIONS // max(1, (8 if self._sum.is_complex else 2) * m * k)))
        if b.form is not None:  # of a part of it there is no inverse
            self._part_columns = n
        self._columns = min(self._columns, self._part_columns)
        for name, operand in (("a", a), ("b", b)):
            if not self._is_ready(operand):
                scratch.reserve(name, self._made_as, operand.array.size)
        self._is_direct = write.dtype is self._made_as
        if self._factor_c != Factor.ZERO or not self._is_direct:
            for name, dtype in (("product", self._made_as), ("total", self._sum)):
                scratch.reserve(name, dtype, m * self._columns)

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        factor_a, factor_c = self._of(scalars, self._factor_a), self._of(scalars, self._factor_c)
        target = self.write.array
        multiplies = factor_a != 0.0
        if multiplies:
            a, b = self._ready("a", self._a), self._ready("b", self._b)
        elif factor_c == 1.0 and self._epilogue is None:
            return
        direct = multiplies and factor_c == 0.0 and self._is_direct
        columns = self._part_columns if direct else self._columns
        for start in range(0, target.shape[1], columns):
            if start:
                advance()
            part = target[:, start : start + columns]
            kept: list[tuple[Array, Number]] = [(part, factor_c)] if factor_c != 0.0 else []
            terms: list[tuple[Array, Number]] = []
            if multiplies:
                product = part if direct else self._scratch.matrix("product", self._made_as, *part.shape)
                if self._is_triangular:
                    self._with_triangle(a, b[:, start : start + columns], product)
                else:  # transposed, because numpy hands a row-major result straight to BLAS
                    np.matmul(b[:, start : start + columns].T, a.T, out=product.T)
                if self._sum.is_integer:  # modulo 2**32
                    product = product.astype(np.int64).astype(np.int32)
                if factor_a != 1.0:
                    np.multiply(product, factor_a, out=product)
                terms.append((product, 1.0))
            if self._epilogue is not None:
                self._end(slice(start, start + columns), terms, kept)
            elif not direct:
                self._write(part, kept + terms)

    def _with_triangle(self, a: Array, b: Array, product: Array) -> None:
        """Product := A B, where one of them is triangular, or stands for the inverse of such a matrix."""
        with np.errstate(all="ignore"):  # of a 0 on the diagonal nothing is said, as in BLAS
            if self._a.form is not None:
                np.copyto(product, b)
                multiply_by_halves(a, self._a.form, product)
            else:
                assert self._b.form is not None
                np.copyto(product, a)
                multiply_by_halves(b.T, self._b.form.transposed, product.T)

    def _is_ready(self, operand: BodyOperand) -> bool:
        """Whether BLAS can multiply it as it lies."""
        if operand.form is not None and not operand.form.is_triangular:
            return False
        return operand.dtype is self._made_as and operand.dtype is not DType.tf32 and not operand.conjugated

    def _ready(self, name: str, operand: BodyOperand) -> Array:
        """Return it as BLAS can multiply it: rounded, conjugated or widened."""
        if self._is_ready(operand):
            return operand.array
        ready = self._scratch.matrix(name, self._made_as, *operand.array.shape)
        if operand.dtype is DType.tf32:
            round_to_tf32(operand.array, ready)
        elif operand.conjugated:
            np.conjugate(operand.array, out=ready)
        else:
            np.copyto(ready, operand.array)
        if operand.form is not None and not operand.form.is_triangular:
            fill(ready, operand.form)
        return ready


def fill(square: Array, form: Form) -> None:
    """Make the rest of a symmetric or Hermitian matrix of which one triangle is given."""
    lower = np.tri(len(square), dtype=bool)
    beyond = ~(lower if form.triangle == "lower" else lower.T)
    np.copyto(square, square.T.conj() if form.kind == "hermitian" else square.T.copy(), where=beyond)
    if form.kind == "hermitian" and square.dtype.kind == "c":
        square.imag[np.diag_indices_from(square)] = 0


def multiply_by_halves(square: Array, form: Form, taken: Array) -> None:
    """Taken := a triangular matrix, or its inverse, times it; zeros multiply nothing, so NaN stays where it belongs."""
    extent = len(square)
    if extent <= 1:
        if extent and not form.unit:
            (np.divide if form.kind == "inverse" else np.multiply)(taken, square[0, 0], out=taken)
        return
    halves = [slice(0, extent // 2), slice(extent // 2, extent)]
    first, last = halves if form.triangle == "lower" else halves[::-1]
    if form.kind == "inverse":
        multiply_by_halves(square[first, first], form, taken[first])
        taken[last] -= square[last, first] @ taken[first]
        multiply_by_halves(square[last, last], form, taken[last])
    else:
        multiply_by_halves(square[last, last], form, taken[last])
        taken[last] += square[last, first] @ taken[first]
        multiply_by_halves(square[first, first], form, taken[first])


def round_to_tf32(array: Array, out: Array) -> None:
    """Round float32 to the nearest number of 10 bits behind the leading one, ties away from 0; NaN stays NaN."""
    bits = out.view(np.uint32)
    np.add(array.view(np.uint32), np.uint32(1 << 12), out=bits)
    np.bitwise_and(bits, np.uint32(0xFFFFFFFF << 13 & 0xFFFFFFFF), out=bits)
    not_numbers = np.isnan(array)
    if not_numbers.any():
        out[not_numbers] = np.nan


class Gemms(Body):
    """Products of one shape whose A, B and C follow one another at equal steps: each step of numpy's makes them all."""

    def __init__(self, first: Sequence[BodyOperand], steps: Sequence[int], count: int, scratch: Scratch) -> None:
        write, a, b, *_ = first
        super().__init__(write)
        self.behind = count - 1
        self._factor_a, self._factor_c = a.factor, first[3].factor if len(first) == 4 else Factor.ZERO
        # Transposed, because numpy hands row-major results straight to BLAS.
        self._c, self._a, self._b = (
            np.lib.stride_tricks.as_strided(
                one.array.T, (count, *one.array.shape[::-1]), (step, *one.array.strides[::-1])
            )
            for one, step in zip((write, a, b), steps, strict=True)
        )
        self._at_once = max(1, _BLOCK_ELEMENTS // write.array.size)
        self._scratch = scratch
        if self._factor_c != Factor.ZERO:
            scratch.reserve("product", write.dtype, min(count, self._at_once) * write.array.size)

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        factor_a, factor_c = scalars[self._factor_a], scalars[self._factor_c]
        for start in range(0, len(self._c), self._at_once):
            c, a, b = (one[start : start + self._at_once] for one in (self._c, self._a, self._b))
            if factor_c == 0.0:
                product = c
            else:
                np.multiply(c, factor_c, out=c)
                product = self._scratch.matrix("product", self.write.dtype, c.shape[2], c.shape[0] * c.shape[1])
                product = product.T.reshape(c.shape)
            if factor_a == 0.0:
                if factor_c == 0.0:
                    c[...] = 0
                continue
            np.matmul(b, a, out=product)
            if factor_a != 1.0:
                np.multiply(product, factor_a, out=product)
            if product is not c:
                np.add(c, product, out=c)


class Bundled(Body):
    """What an earlier body has done with its own."""

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""


class Combine(Summing):
    """Write := the sum of factor × region, or a triangle of it."""

    def __init__(self, write: BodyOperand, reads: list[BodyOperand], scratch: Scratch) -> None:
        super().__init__(write, reads, scratch)
        # The region written goes first, so that it is read before it is overwritten.
        self._reads = sorted(reads, key=lambda read: read.place != write.place)
        for name in ("total", "term"):
            scratch.reserve(name, self._sum, write.array.shape[0] * self._columns)
        if write.ending in _IS_TRIANGLE:
            scratch.reserve("triangle", write.dtype, write.array.shape[0] * self._columns)

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        target = self.write.array
        factors = [self._of(scalars, read.factor) for read in self._reads]
        terms = [(self._detached(read), one) for read, one in zip(self._reads, factors, strict=True) if one != 0]
        for start in range(0, target.shape[1], self._columns):
            columns = slice(start, start + self._columns)
            part = target[:, columns]
            here = [(part if one is target else one[:, columns], factor) for one, factor in terms]
            if self.write.ending is Op.N:
                self._write(part, here)
                continue
            whole = self._scratch.matrix("triangle", self.write.dtype, *part.shape)
            rows, cols = np.ogrid[: part.shape[0], start : start + part.shape[1]]
            below, op = rows - cols + self.write.diagonal, self.write.ending
            is_real = op in (Op.LOWER_REAL, Op.UPPER_REAL) and self.write.dtype.is_complex
            if is_real:  # an infinity there times 0 would be NaN
                part.imag[below == 0] = 0
            self._write(whole, here)
            if is_real:
                whole.imag[below == 0] = 0
            np.copyto(part, whole, where=below >= 0 if op in (Op.LOWER, Op.LOWER_REAL) else below <= 0)

    def _detached(self, read: BodyOperand) -> Array:
        """Return the array of a read: the written one, if that is read first, else a copy of what shares its memory."""
        target = self.write.array
        if read is self._reads[0] and read.place == self.write.place:
            return target
        return read.array.copy(order="F") if np.may_share_memory(read.array, target) else read.array


class CombineWithEpilogue(Summing):
    """Write := f(scale × (the sum of factor × region) + bias + beta C)."""

    def __init__(
        self, write: BodyOperand, reads: list[BodyOperand], scratch: Scratch, epilogue: RegionEpilogue
    ) -> None:
        super().__init__(write, reads, scratch, epilogue)
        self._reads = [read for read in reads if read.factor != Factor.BETA]
        self._kept = [read for read in reads if read.factor == Factor.BETA]

    def __call__(self, scalars: list[Number], advance: Callable[[], None]) -> None:
        """See `Body`."""
        for start in range(0, self.write.array.shape[1], self._columns):
            columns = slice(start, start + self._columns)
            summed, kept = (
                [(read.array[:, columns], scalars[read.factor]) for read in reads if scalars[read.factor] != 0]
                for reads in (self._reads, self._kept)
            )
            self._end(columns, summed, kept)


def bind_bodies(program: OperationList, addresses: Array, files: FileWindows) -> dict[int, Body]:
    """Return the bodies by operation: waits, records and signals have none. The list is checked (`check_program`)."""
    scratch, at = Scratch(), addresses.tolist()
    has_files = bool(files.table())  # of which bytes are not memory's
    runs = {} if program.same_sums else _runs_of_products(program, addresses)
    if not has_files:
        runs.update(_runs_of_copies(program, addresses))
    is_body = program.operations["code"] <= Code.COMBINE
    bodies: dict[int, Body] = dict.fromkeys(np.flatnonzero(is_body).tolist(), _BUNDLED)
    for indices, _ in runs.values():
        is_body[indices[1:]] = False
    for index in np.flatnonzero(is_body).tolist():
        code, _, count, _, _, _, _, _, first = program.operations[index].tolist()
        operands = [_operand(one, at) for one in program.operands[first : first + count].tolist()]
        run = runs.get(index)
        if code == Code.COPY:
            bodies[index] = Copy(operands[0], operands[1:], files, None if run is None else (len(run[0]), run[1][0]))
        elif run is not None:
            bodies[index] = Gemms(operands, run[1], len(run[0]), scratch)
        elif operands[0].ending in _IS_EPILOGUE:
            assert program.epilogue is not None
            to = operands[0]
            ending = RegionEpilogue(program.epilogue, program.vectors, to.diagonal, to.array.shape, to.dtype)
            bodies[index] = (Gemm if code == Code.GEMM else CombineWithEpilogue)(to, operands[1:], scratch, ending)
        else:
            bodies[index] = (Gemm if code == Code.GEMM else Combine)(operands[0], operands[1:], scratch)
    scratch.allocate()
    return bodies


_IS_TRIANGLE: Final = {Op.LOWER, Op.UPPER, Op.LOWER_REAL, Op.UPPER_REAL}
_IS_EPILOGUE: Final = {Op.EPILOGUE_ROWS, Op.EPILOGUE_COLS}

_BUNDLED: Final = Bundled(BodyOperand(np.empty((0, 0)), DType.f64, Factor.ONE, ()))

_Runs: TypeAlias = dict[int, tuple[Array, list[int]]]
"""Operations that follow one another on a lane and are one body, by the first, and what that has to know of them."""


def _of_kind(program: OperationList, code: Code) -> tuple[Array, Array]:
    """Return the operations of a kind, lane by lane, and of each whether the one before it stands next to it there."""
    lanes, codes = program.operations["lane"], program.operations["code"]
    order = np.argsort(lanes, kind="stable")
    is_one = codes[order] == code
    follows = np.append(False, is_one[1:] & is_one[:-1] & (np.diff(lanes[order]) == 0))
    return order[is_one], follows[is_one]


def _runs_of_copies(program: OperationList, addresses: Array) -> _Runs:
    """Return copies whose columns follow one another at both ends, and how many these are: short ones cost a call."""
    chosen, follows = _of_kind(program, Code.COPY)
    first = program.operations["first_operand"][chosen]
    to, source = (program.operands[first + number] for number in range(2))
    item, cols = ITEMSIZES[to["dtype"]], to["cols"]
    lds = np.stack([to["ld"] * item, source["ld"] * item])
    places = np.stack([addresses[one["buffer"]] + one["offset"] for one in (to, source)])
    alike = np.concatenate([lds, [to["rows"] * item, source["op"]]])
    follows[1:] &= (places[:, 1:] == places[:, :-1] + cols[:-1] * lds[:, :-1]).all(axis=0)
    follows[1:] &= (alike[:, 1:] == alike[:, :-1]).all(axis=0) & (source["op"][1:] == Op.N)
    most = np.minimum(_COPIED_AT_ONCE, np.abs(places[0] - places[1])) // lds.max(axis=0, initial=1)
    ends, found = np.cumsum(cols), _Runs()
    for start, stop in _segments(follows):
        while start < stop:
            before = int(ends[start] - cols[start])
            end = min(stop, max(start + 1, int(np.searchsorted(ends, before + most[start], side="right"))))
            if end > start + 1:
                found[int(chosen[start])] = chosen[start:end], [int(ends[end - 1]) - before]
            start = end
    return found


def _runs_of_products(program: OperationList, addresses: Array) -> _Runs:
    """Return products of one shape, each with a C of its own, and the steps (bytes) from C, A and B to the next."""
    chosen, follows = _of_kind(program, Code.GEMM)
    first, count = (program.operations[name][chosen] for name in ("first_operand", "num_operands"))
    operands = [program.operands[first + number] for number in range(3)]
    c, a, b = operands
    last = np.where(count == 4, program.operands["factor"][np.minimum(first + 3, len(program.operands) - 1)], 0)
    names = "rows", "cols", "ld", "dtype", "op", "factor"
    alike = np.stack([last, count, *(one[name] for one in operands for name in names)])
    places = np.stack([addresses[one["buffer"]] + one["offset"] for one in operands])
    steps = np.diff(places, axis=1, prepend=0)
    operations = 2 * c["rows"] * c["cols"] * np.where(a["op"] == Op.N, a["cols"], a["rows"])
    exact = np.array([dtype is dtype.accumulator and dtype is not DType.tf32 for dtype in DType])[c["dtype"]]
    for one in (a, b):
        exact &= (one["dtype"] == c["dtype"]) & (one["op"] <= Op.T)  # nor is there a form
    extent = (c["ld"] * (c["cols"] - 1) + c["rows"]) * ITEMSIZES[c["dtype"]]
    follows &= exact & (operations > 0) & (steps[0] >= extent)
    follows[1:] &= (alike[:, 1:] == alike[:, :-1]).all(axis=0)
    changes = np.append(False, (steps[:, 1:] != steps[:, :-1]).any(axis=0))
    found = _Runs()
    for start, stop in _segments(follows):
        edges = [*(start + np.flatnonzero(changes[start:stop])).tolist(), stop]
        while start + 1 < stop:
            while edges[0] <= start + 1:  # the step to the second is that of all
                edges.pop(0)
            end = min(edges[0], start + max(1, _PART_OPERATIONS // int(operations[start])))
            if end > start + 1:
                found[int(chosen[start])] = chosen[start:end], steps[:, start + 1].tolist()
            start = end
    return found


def _segments(follows: Array) -> Iterator[tuple[int, int]]:
    """Yield first and last of those that follow one another, of two or more."""
    starts = np.flatnonzero(~follows)
    stops = np.append(starts[1:], len(follows))
    several = stops - starts > 1
    yield from zip(starts[several].tolist(), stops[several].tolist(), strict=True)


_DTYPES, _OPS, _FACTORS = tuple(DType), tuple(Op), tuple(Factor)  # which are called as enumerations much more slowly


def _operand(record: tuple[int, ...], addresses: list[int]) -> BodyOperand:
    buffer, code, number, how, _, offset, rows, cols, ld, diagonal = record  # of BOUND_OPERAND_DTYPE
    dtype, op, address = _DTYPES[code], _OPS[op_alone(how)], addresses[buffer] + offset
    array = matrix_at(address, rows, cols, ld, dtype.numpy)
    if op > Op.C:
        place = address, rows, cols, ld, dtype, Op.N
        return BodyOperand(array, dtype, _FACTORS[number], place, ending=op, diagonal=diagonal)
    place, form = (address, rows, cols, ld, dtype, op), Form.of_code(how)
    if op is Op.N:
        return BodyOperand(array, dtype, _FACTORS[number], place, form=form)
    form = form and form.transposed
    return BodyOperand(array.T, dtype, _FACTORS[number], place, conjugated=op is Op.C, form=form)
