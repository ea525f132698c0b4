"""
The problem of one call, in column-major form.

C := alpha op(A) op(B) + beta C, op(A) m×k, op(B) k×n, C m×n, every matrix stored column-major. A C-order (row-major)
array is its own transpose stored column-major. So an input of that order becomes a column-major matrix with its
transposition flipped. A C-order result is computed as Cᵀ = op(B)ᵀ op(A)ᵀ, for which the caller's A and B change places
(`GemmProblem.swapped`).

A complex operand may be conjugated too. Of an operand in C's order that changes nothing: op C stays C, since Bᴴ
transposed is conj(B), and B's memory read by columns is Bᵀ. In another order than C's it would be conjugated and not
transposed, which no BLAS does. Such an operand is read in C's order, and copies transpose it (`planning.staging`).

A batch of products is one product of block-diagonal matrices, of which only the blocks on the diagonal exist
(`GemmProblem.batch`). An element of C has a sum over the k of its own block.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from uncut_mpi.errors import ParamError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.arguments import count, flag, shown, type_text
from uncut_mpi.model.dtypes import DType, Dtypes, arithmetic_of, three_of
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.form import PLAIN, Forms
from uncut_mpi.model.part_of_c import PartOfC, Triangle
from uncut_mpi.model.parts import Extent, Rectangle, common, elements_of
from uncut_mpi.model.parts import Order as Order
from uncut_mpi.model.placement import Matrix

Trans: TypeAlias = Literal["N", "T", "C"]
"""Whether op leaves a matrix as it is, transposes it, or conjugates it too; of real types C is T."""

_TRANSPOSED: Final = {"N": "T", "T": "N", "C": "R", "R": "C"}
"""The op of the transposed matrix; R conjugates without transposing."""
OP_MARKS: Final = {"N": "", "T": "ᵀ", "C": "ᴴ"}
"""How an op is written behind the name of a matrix."""

_REAL: Final = {"N": "N", "T": "T", "C": "T", "R": "N"}
"""What an op is for real types."""

MOST_BYTES: Final = 1 << 62
"""No matrix is as large: offsets, and sums of a few of them, fit 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredMatrix:
    """
    How a caller's matrix is stored.

    Attributes
    ----------
    rows, cols : int
        Shape as the caller sees it (elements).
    order : str
        ``"F"`` (column-major) or ``"C"`` (row-major).
    ld : int
        Leading dimension in elements: distance between columns (F) or rows (C).
    """

    rows: int
    cols: int
    order: Order = "F"
    ld: int = 0

    def __post_init__(self) -> None:
        order = self.order
        if not isinstance(order, str) or order not in ("F", "C"):
            raise ParamError(f"order {shown(order)}: use 'F' (column-major) or 'C' (row-major)")
        object.__setattr__(self, "order", str.__str__(order))
        for name in ("rows", "cols", "ld"):
            object.__setattr__(self, name, count(name, getattr(self, name)))
        if self.rows < 0 or self.cols < 0:
            raise ParamError(f"shape {self.rows}×{self.cols} has a negative extent")
        least = max(1, self.rows if self.order == "F" else self.cols)
        if self.ld == 0:
            object.__setattr__(self, "ld", least)
        elif self.ld < least:
            raise ParamError(
                f"leading dimension {self.ld} of a matrix of {self.rows}×{self.cols} in order {self.order} "
                f"is below {least}"
            )

    @property
    def column_major_shape(self) -> tuple[int, int]:
        """Rows and columns of the same memory read as a column-major matrix."""
        return (self.rows, self.cols) if self.order == "F" else (self.cols, self.rows)


class CIn(enum.IntEnum):
    """How an element of the caller's C takes part in the result: not at all, as it was, or times beta."""

    ABSENT = 0
    RAW = 1
    SCALED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class ResultPart:
    """
    What each element of a rectangle of C must hold at the end.

    Attributes
    ----------
    rows, cols : (int, int)
        The rectangle: its first row or column, and the one after its last.
    summed : tuple of (int, int)
        Of which k the products are summed, [first, stop) each, ascending and apart; none: no product.
    alpha : bool
        Whether the sum is multiplied by alpha.
    c_in : CIn
        How the same element of C, as the caller gave it, is added; ABSENT: it is not read.
    copied : bool
        Whether it is the same element of A, and no sum.
    triangle : {"", "lower", "upper", "lower_real", "upper_real"}
        Of C, beyond which each element is as it was (`PartOfC`).
    """

    rows: tuple[int, int]
    cols: tuple[int, int]
    summed: tuple[tuple[int, int], ...]
    alpha: bool
    c_in: CIn
    copied: bool = False
    triangle: Triangle = ""


@dataclasses.dataclass(frozen=True, slots=True)
class GemmProblem:
    """
    C := alpha op(A) op(B) + beta C with every matrix stored column-major.

    Attributes
    ----------
    m, n, k : int
        Rows of op(A) and C; columns of op(B) and C; shared extent (elements, 0 allowed).
    dtype : DType or three of them
        Type of A and B with the usual C, or of each (`dtypes`). Half types accumulate in float32 and are rounded once.
    trans_a, trans_b : str
        ``"N"``, ``"T"`` or ``"C"``: whether op transposes the stored matrix, and conjugates it; of real types never C.
    lda, ldb, ldc : int
        Leading dimensions of the stored column-major matrices (elements).
    reads_c : bool
        Whether beta may be other than 0. False: C is never read, so NaN in it does not matter. True of a triangle, and
        of an epilogue without a product.
    scales_only : bool
        True when alpha is 0: A and B are never read. Implied by an extent of 0 (see `has_product`).
    swapped : bool
        True when A here is the caller's B and B the caller's A (C-order result, see module).
    copies : bool
        True for C := A, where A is m×n as C is, and B and k are nothing: matrices that change their layout.
    part : PartOfC or None
        Which part of C is computed, or scaled; None: all.
    batch : Alike of (int, int, int)
        (m, n, k) of each of several products, the blocks on the diagonal one after another; m, n and k are their sums,
        and nothing exists beside the blocks. Empty: one product.
    forms : (Form or None, Form or None)
        Which elements of A and of B there are, where that is one triangle of a square matrix. Each product is with all
        of such a matrix.
    epilogue : Epilogue or None
        What is done with each element of C once it is summed.
    sums : (int, int, int) or None
        Rows and columns of the tiles of C, and length of the k-blocks, of which each product is, whatever the plan.
    """

    m: int
    n: int
    k: int
    dtype: DType | Dtypes
    trans_a: str = "N"
    trans_b: str = "N"
    lda: int = 0
    ldb: int = 0
    ldc: int = 0
    reads_c: bool = True
    scales_only: bool = False
    swapped: bool = False
    copies: bool = False
    part: PartOfC | None = None
    batch: Sequence[tuple[int, int, int]] = ()
    forms: Forms = PLAIN
    epilogue: Epilogue | None = None
    sums: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        dtypes = three_of(self.dtype)
        arithmetic = dtypes[0] if self.copies else arithmetic_of(dtypes)
        if dtypes == three_of(arithmetic):
            object.__setattr__(self, "dtype", arithmetic)
        for name in ("m", "n", "k", "lda", "ldb", "ldc"):
            object.__setattr__(self, name, count(name, getattr(self, name)))
        for name in ("reads_c", "scales_only", "swapped", "copies"):
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ParamError(f"{name} = {getattr(self, name)} is negative")
        if self.copies and (self.k, self.reads_c) != (0, False):
            raise ParamError(f"C := A has no k and does not read C, but k = {self.k} and reads_c = {self.reads_c}")
        if self.part is not None and self.copies:
            raise ParamError("C := A has all of C: copy a view of it instead")
        if self.triangle:  # whose rest stays as it was
            object.__setattr__(self, "reads_c", True)
        if not isinstance(self.batch, Alike):
            if type(self.batch) is not tuple or not all(map(_is_shape, self.batch)):
                raise ParamError(f"batch = {shown(self.batch)}: pass a tuple with (m, n, k) of each product")
            object.__setattr__(self, "batch", Alike.of(self.batch))
        if self.batch:
            self._check_batch()
        for down, along in self.part.rectangles if self.part is not None else ():
            if down[1] > self.m or along[1] > self.n:
                raise ParamError(f"rows {down} and columns {along} are not all in a C of {self.m}×{self.n}")
        for name in ("trans_a", "trans_b"):
            trans = transposition(name, getattr(self, name))
            object.__setattr__(self, name, "T" if trans == "C" and not arithmetic.is_complex else trans)
        if self.forms != PLAIN:
            self._check_forms(arithmetic)
        if self.epilogue is not None:
            self._check_epilogue(arithmetic)
        for name, rows in (("lda", self.a_shape[0]), ("ldb", self.b_shape[0]), ("ldc", self.m)):
            if getattr(self, name) == 0:
                object.__setattr__(self, name, max(1, rows))
            elif getattr(self, name) < max(1, rows):
                raise ParamError(f"{name} = {getattr(self, name)} is below the {rows} stored rows")
        for name, ld, cols, dtype in (
            ("A", self.lda, self.a_shape[1], dtypes[0]),
            ("B", self.ldb, self.b_shape[1], dtypes[1]),
            ("C", self.ldc, self.n, dtypes[2]),
        ):
            if ld * cols * dtype.itemsize >= MOST_BYTES:
                raise ParamError(
                    f"{name} has {ld}×{cols} elements of {dtype.itemsize} bytes, more than can be addressed "
                    f"({MOST_BYTES} bytes): use smaller extents"
                )

    def _check_forms(self, arithmetic: DType) -> None:
        (at, form), *others = [(at, one) for at, one in enumerate(self.forms) if one is not None]
        name, is_read = f"{'AB'[at]} is {form.kind}", (self.trans_a, self.trans_b)
        if others or self.copies or self.batch or self.part is not None:
            raise ParamError(f"{name}: it is multiplied by one matrix without a form, for all of C")
        if (self.m, self.n)[at] != self.k:
            raise ParamError(f"{name}, and has to be square: it is {self.shape_of(Matrix(at))}")
        if arithmetic not in (DType.f32, DType.f64, DType.c64, DType.c128) or self.rounds_c:
            raise ParamError(f"{name}: such products are of f32, f64, c64 and c128, not of {arithmetic.name}")
        if form.is_triangular and self.reads_c:
            raise ParamError(f"{name}: C is overwritten, so beta has to be 0")
        if is_read[1 - at] != "N" or not (form.is_triangular or is_read[at] == "N"):
            raise ParamError(f"{name}, and an operand would be transposed: read it in the other order")

    def _check_epilogue(self, arithmetic: DType) -> None:
        if self.copies or self.batch or self.part is not None or self.forms != PLAIN:
            raise ParamError(
                "an epilogue is for all of one product: it goes with no copy, no batch, no part of C and no matrix of "
                "which one triangle is read"
            )
        if arithmetic.is_complex or arithmetic.is_integer:
            raise ParamError(f"an epilogue is for real types, and A is {arithmetic.name}")
        if not self.has_product:  # so that it is known which element is which
            object.__setattr__(self, "reads_c", True)

    def _check_batch(self) -> None:
        if self.copies or self.part is not None:
            raise ParamError("a batch is multiplied, and all of it: it has no part, nor is it copied")
        runs = Alike.of(self.batch).runs
        if not all(_is_shape(shape) for shape, _ in runs):
            raise ParamError("a batch has something else than (m, n, k) of a product")
        sums = tuple(sum(shape[at] * times for shape, times in runs) for at in range(3))
        if sums != (self.m, self.n, self.k) or min(min(shape) for shape, _ in runs) < 0:
            raise ParamError(
                f"the products of a batch have {shown(sums)} as sums of m, n, k, and not {self.m, self.n, self.k}"
            )

    @property
    def a_shape(self) -> tuple[int, int]:
        """Stored rows and columns of A: m×k, or k×m when trans_a is not N; m×n if it is copied."""
        if self.copies:
            return self.m, self.n
        return (self.m, self.k) if self.trans_a == "N" else (self.k, self.m)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Stored rows and columns of B: k×n, or n×k when trans_b is not N."""
        return (self.k, self.n) if self.trans_b == "N" else (self.n, self.k)

    def shape_of(self, matrix: Matrix) -> tuple[int, int]:
        """Return the stored rows and columns of a matrix."""
        return (self.a_shape, self.b_shape, (self.m, self.n))[matrix]

    def ld_of(self, matrix: Matrix) -> int:
        """Return the leading dimension of a matrix (elements)."""
        return (self.lda, self.ldb, self.ldc)[matrix]

    @property
    def dtypes(self) -> Dtypes:
        """Types of A, B and C."""
        return three_of(self.dtype)

    def bytes_of(self, matrix: Matrix) -> int:
        """Return the bytes of a matrix's elements."""
        first, second = {Matrix.A: (0, 2), Matrix.B: (2, 1)}.get(matrix, (0, 1))
        of_batch = sum(one[first] * one[second] * times for one, times in Alike.of(self.batch).runs)
        return (of_batch if self.batch else math.prod(self.shape_of(matrix))) * self.dtypes[matrix].itemsize

    def elements_used(self, matrix: Matrix, rows: Extent, cols: Extent) -> int:
        """Return how many elements of some rows and columns of a matrix, as it is stored, take part."""
        if self.part is None:  # of a batch too, whose parts lie in blocks
            return elements_of((rows, cols))
        if matrix is Matrix.C:
            shared = (common(one, (rows, cols)) for one in self.rectangles)
            return sum(elements_of(one) for one in shared if one is not None)
        is_a = matrix is Matrix.A
        by_rows = is_a == ((self.trans_a if is_a else self.trans_b) == "N")
        (start, stop), along = (rows, cols) if by_rows else (cols, rows)
        used, done = 0, start
        for first, last in sorted(one[0 if is_a else 1] for one in self.rectangles):
            used += max(0, min(last, stop) - max(first, done))
            done = max(done, min(last, stop))
        return used * (along[1] - along[0])

    @property
    def arithmetic(self) -> DType:
        """Type as which elements of A and B are multiplied: rates of products are known by it."""
        return self.dtypes[0]

    @property
    def accumulator(self) -> DType:
        """Type in which products are summed."""
        return self.arithmetic.accumulator

    @property
    def rounds_c(self) -> bool:
        """Whether C is of another type than the sums, which are rounded to it once, when they are whole."""
        return self.dtypes[Matrix.C] is not self.accumulator

    @property
    def triangle(self) -> Triangle:
        """Which triangle of C is computed; empty: all of it, or rectangles."""
        return "" if self.part is None else self.part.triangle

    @property
    def diagonal(self) -> int:
        """How many rows below the diagonal of a triangle the first element of C is."""
        return 0 if self.part is None else self.part.diagonal

    @property
    def sums_apart(self) -> bool:
        """Whether sums are formed apart from C, which is written when they are whole."""
        return self.rounds_c or bool(self.triangle) or self.epilogue is not None

    @property
    def fuses_epilogue(self) -> bool:
        """
        Whether a product may write C with its epilogue: one that cuBLASLt has, where C is of a half type.

        Its bias is along the columns of memory. Where extents are no multiples of 16 bytes, the library may round the
        sum to the type before (docs/performance.md, 2026-11-30).
        """
        one = self.epilogue
        is_fused = one is not None and not one.scale and not (one.bias and one.along == "cols")
        is_fused = is_fused and all(extent % 8 == 0 for extent in (self.m, self.n, self.k))
        return is_fused and self.sums is None and set(self.dtypes) in ({DType.f16}, {DType.bf16})

    @property
    def has_product(self) -> bool:
        """Whether A and B are read at all (no extent is 0, nor alpha)."""
        return self.flops > 0 and not self.scales_only

    @property
    def result(self) -> tuple[ResultPart, ...]:
        """What C must hold at the end: parts that together are all of it, each element once."""
        product = self.has_product
        summed = ((0, self.k),) if product else ()
        c_in = CIn.SCALED if self.reads_c else CIn.ABSENT
        if self.batch:
            ends = itertools.pairwise(itertools.accumulate((k for _, _, k in self.batch), initial=0))
            ranges = ((k,) if product and k[0] < k[1] else () for k in ends)
            return tuple(ResultPart(*one, k, bool(k), c_in) for one, k in zip(self.rectangles, ranges, strict=True))
        computed = [ResultPart(*one, summed, product, c_in, self.copies, self.triangle) for one in self.rectangles]
        beside = () if self.part is None else self.part.beside(self.m, self.n)
        return (*computed, *(ResultPart(*one, (), False, CIn.RAW) for one in beside))

    @property
    def rectangles(self) -> tuple[Rectangle, ...]:
        """Rows and columns of C that are computed: of all of it, of each rectangle of `part`, or each of `batch`."""
        if self.part is not None:
            return self.part.rectangles
        if not self.batch:
            return (((0, self.m), (0, self.n)),)
        m, n, _ = (itertools.pairwise(itertools.accumulate(one, initial=0)) for one in zip(*self.batch, strict=True))
        return tuple(zip(m, n, strict=True))

    @property
    def flops(self) -> int:
        """
        Operations counted the usual way, 2mnk for all of C (the beta term is ignored); with a triangular matrix half.

        Those of complex types are complex: each is as much work as four real ones, and rates are counted alike.
        """
        if self.batch:
            return 2 * sum(m * n * k * times for (m, n, k), times in Alike.of(self.batch).runs)
        whole = 2 * sum(map(elements_of, self.rectangles)) * self.k
        return whole // 2 if any(form is not None and form.is_triangular for form in self.forms) else whole

    @property
    def callers_shape(self) -> tuple[int, int, int]:
        """(m, n, k) as the caller wrote them: m and n change places where A and B do."""
        return (self.n, self.m, self.k) if self.swapped else (self.m, self.n, self.k)

    @property
    def shape_text(self) -> str:
        """The same as ``m×n×k``; of a batch how many products, and the shape of the first."""
        if not self.batch:
            return "×".join(map(str, self.callers_shape))
        m, n, k = self.batch[0]
        alike = len(Alike.of(self.batch).runs) == 1
        first = f"{n}×{m}×{k}" if self.swapped else f"{m}×{n}×{k}"
        return f"{len(self.batch)} of {first}{'' if alike else ' and others'}"

    @classmethod
    def from_operands(
        cls,
        a: StoredMatrix,
        b: StoredMatrix,
        c: StoredMatrix,
        *,
        dtype: DType | Dtypes,
        trans_a: str = "N",
        trans_b: str = "N",
        reads_c: bool = True,
        alpha_is_zero: bool = False,
        batch: Sequence[tuple[int, int, int]] = (),
        triangle: Triangle = "",
        forms: Forms = PLAIN,
        epilogue: Epilogue | None = None,
    ) -> GemmProblem:
        """
        Return the column-major problem for the caller's matrices.

        Here ``trans_a`` and ``trans_b`` may be ``"R"`` too: conjugated, not transposed. The products of a batch have
        their m, n and k as the caller writes them. A triangle is that of the caller's C, in blocks. Forms are those of
        the caller's A and B, an epilogue of the caller's C.

        Raises
        ------
        ParamError
            If a shape does not fit the others; the message gives all three. If an operand would be conjugated and not
            transposed (see module). If a triangle is asked for of a C that is not square, or of a batch.
        """
        for name, matrix in (("A", a), ("B", b), ("C", c)):
            if not isinstance(matrix, StoredMatrix):
                raise ParamError(f"{name} = {shown(matrix)} is {type_text(matrix)}: pass a StoredMatrix")
        of_a, of_b, of_c = dtypes = three_of(dtype)
        arithmetic = arithmetic_of(dtypes)
        for name, trans in (("trans_a", trans_a), ("trans_b", trans_b)):
            if trans != "R":
                transposition(name, trans)
        m, k = (a.rows, a.cols) if trans_a in "NR" else (a.cols, a.rows)
        k_b, n = (b.rows, b.cols) if trans_b in "NR" else (b.cols, b.rows)
        op_a, op_b = ("A" if trans_a in "NR" else "op(A)"), ("B" if trans_b in "NR" else "op(B)")
        if k != k_b:
            raise ParamError(
                f"shapes do not fit: {op_a} is {m}×{k} and {op_b} is {k_b}×{n}; the columns of {op_a} must equal the "
                f"rows of {op_b}"
            )
        if (c.rows, c.cols) != (m, n):
            raise ParamError(
                f"shapes do not fit: {op_a} is {m}×{k} and {op_b} is {k_b}×{n}, so C must be {m}×{n}, and is "
                f"{c.rows}×{c.cols}"
            )
        if triangle and (m != n or batch):
            found = "a batch" if batch else f"a C of {m}×{n}"
            raise ParamError(f"the {triangle} triangle of {found} was asked for: a square C has one")
        part = None
        if triangle:
            lower = PartOfC.lower(m, triangle="lower_real" if triangle.endswith("real") else "lower")
            part = lower if triangle.startswith("lower") == (c.order == "F") else lower.transposed
        if not arithmetic.is_complex:
            trans_a, trans_b = _REAL[trans_a], _REAL[trans_b]
        flip = _TRANSPOSED
        if forms != PLAIN:
            own_a, own_b = (
                form and (form if one.order == "F" else form.transposed)
                for form, one in zip(forms, (a, b), strict=True)
            )
            forms = own_a, own_b
            # What is symmetric is read as it lies.
            trans_a, trans_b = (
                flip[trans] if form is not None and form.kind == "symmetric" and one.order != c.order else trans
                for form, one, trans in zip(forms, (a, b), (trans_a, trans_b), strict=True)
            )
        stored_a = (trans_a if a.order == "F" else flip[trans_a], a.ld)
        stored_b = (trans_b if b.order == "F" else flip[trans_b], b.ld)
        if c.order == "F":
            first, second, rows, cols = stored_a, stored_b, m, n
        else:
            first, second, rows, cols = (flip[stored_b[0]], stored_b[1]), (flip[stored_a[0]], stored_a[1]), n, m
        if "R" in (first[0], second[0]):
            raise ParamError("an operand would be conjugated and not transposed: read it in the other order")
        return cls(
            m=rows,
            n=cols,
            k=k,
            dtype=(of_a, of_b, of_c) if c.order == "F" else (of_b, of_a, of_c),
            trans_a=first[0],
            trans_b=second[0],
            lda=first[1],
            ldb=second[1],
            ldc=c.ld,
            reads_c=reads_c,
            scales_only=alpha_is_zero,
            swapped=c.order == "C",
            part=part,
            batch=Alike(
                ((m, n, k) if c.order == "F" else (n, m, k), times) for (m, n, k), times in Alike.of(batch).runs
            ),
            forms=forms if c.order == "F" else forms[::-1],
            epilogue=epilogue and (epilogue if c.order == "F" else epilogue.transposed),
        )


def conjugated(trans: str) -> str:
    """Return the op that conjugates besides; of one that conjugates already the op that does not."""
    return {"N": "R", "T": "C", "C": "T", "R": "N"}[trans]


def is_conjugated_alone(trans: str, order: Order, order_of_c: Order) -> bool:
    """Return whether a complex operand of an order would be conjugated and not transposed (see module)."""
    return trans in ("C", "R") and (order == order_of_c) != (trans == "C")


def _is_shape(value: object) -> bool:
    return type(value) is tuple and len(value) == 3 and all(type(extent) is int for extent in value)


def transposition(name: str, value: object) -> str:
    """Return a caller's op, or raise ParamError for what is none."""
    if not isinstance(value, str) or value not in ("N", "T", "C"):
        raise ParamError(f"{name} = {shown(value)}: use 'N', 'T' or 'C' (conjugate transpose)")
    return str.__str__(value)
