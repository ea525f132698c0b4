"""
The other products of level 3 of BLAS: those that write one triangle of C, and those that read one of A.

The former are `gemm` with a triangle. The latter are made of products by halves. Those of blocks beside the diagonal
are plain. A block on the diagonal is read in one triangle (`uncut_mpi.model.form`), and nothing beyond it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from uncut_mpi.api.flight import Handle
from uncut_mpi.api.gate import public_call
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.request import Scalars, check_written
from uncut_mpi.api.session_products import Multiplies
from uncut_mpi.api.wanted import new_results
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.arguments import Number, flag, real_number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import Form, Forms, Kind
from uncut_mpi.model.problem import Trans, transposition

LEAST_BLOCK: Final = 4096
"""Rows of blocks on the diagonal, of which there are at most `_MOST_BLOCKS`: each is a call, and is sent whole."""
_MOST_BLOCKS: Final = 8  # a session keeps the plans of a few calls
_STEP: Final = 256  # rows of them are a multiple of it

_OTHER: Final = {"symmetric": "T", "hermitian": "C"}


@dataclasses.dataclass(slots=True)
class _Sided:
    """What a call is about, how to take parts of its matrices, and the products that it has begun."""

    call: str
    told: Mapping[str, object]
    a: Matrix
    form: Form
    trans: str
    left: bool
    block: int = 0  # rows of the largest blocks on the diagonal
    begun: list[Handle[None]] = dataclasses.field(default_factory=list)

    def middle(self, start: int, stop: int) -> int:
        """Return where rows of A are halved, after whole blocks; where they end if they are one."""
        blocks = -(-(stop - start) // self.block)
        return stop if blocks <= 1 else start + self.block * (blocks // 2)

    def wait(self) -> None:
        """Wait for the products; the first error is raised, and another one by the next call of the session."""
        for handle in self.begun:
            handle.wait()

    def across(self, matrix: Matrix, start: int, stop: int) -> Matrix:
        """Return the rows of B or C that rows of A, on the left, have to do with; of one on the right the columns."""
        return matrix[start:stop, :] if self.left else matrix[:, start:stop]


class Level3(Multiplies):
    """Products that write or read one triangle of a matrix."""

    @public_call
    def syrk(
        self, a: Matrix, out: Matrix | None = None, *, lower: bool = True, alpha: Number = 1.0, beta: Number = 0.0
    ) -> Matrix:
        """
        Compute a triangle of C := alpha A Aᵀ + beta C. Collective.

        Parameters
        ----------
        a : Matrix
            n×k; for Aᵀ A pass ``a.T``. A complex one is transposed, and not conjugated.
        out : Matrix, optional
            C, n×n. By default a new one, whose other triangle is 0.
        lower : bool, default True
            Which triangle of C is written, with the diagonal; elements beyond it stay as they were.
        alpha, beta
            As of `gemm`.

        Raises
        ------
        ParamError, CapacityError, UncutError
            As `gemm`.
        """
        return self._of_factors("syrk", (a,), out, lower, (alpha, beta))

    @public_call
    def syr2k(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        lower: bool = True,
        alpha: Number = 1.0,
        beta: Number = 0.0,
    ) -> Matrix:
        """
        Compute a triangle of C := alpha (A Bᵀ + B Aᵀ) + beta C: two products, else as `syrk`. Collective.

        The first one's result is rounded to the type of C, also of half types.
        """
        return self._of_factors("syr2k", (a, b), out, lower, (alpha, beta))

    @public_call
    def herk(
        self, a: Matrix, out: Matrix | None = None, *, lower: bool = True, alpha: float = 1.0, beta: float = 0.0
    ) -> Matrix:
        """
        Compute a triangle of C := alpha A Aᴴ + beta C, Hermitian: of real types as `syrk`. Collective.

        Parameters
        ----------
        a : Matrix
            n×k; for Aᴴ A pass ``a.H``.
        out : Matrix, optional
            C, n×n, as of `syrk`. Imaginary parts of its diagonal count as 0, and are 0 afterwards.
        lower : bool, default True
            As of `syrk`.
        alpha, beta : float
            Real numbers.

        Raises
        ------
        ParamError, CapacityError, UncutError
            As `gemm`; also if alpha or beta is complex.
        """
        return self._of_factors("herk", (a,), out, lower, (alpha, beta), "C", ("alpha", "beta"))

    @public_call
    def her2k(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        lower: bool = True,
        alpha: Number = 1.0,
        beta: float = 0.0,
    ) -> Matrix:
        """
        Compute a triangle of C := alpha A Bᴴ + conj(alpha) B Aᴴ + beta C: two products, else as `herk`. Collective.

        Of complex types alpha may be complex. Roundings are as of `syr2k`.
        """
        return self._of_factors("her2k", (a, b), out, lower, (alpha, beta), "C", ("beta",))

    @public_call
    def symm(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        left: bool = True,
        lower: bool = True,
        alpha: Number = 1.0,
        beta: Number = 0.0,
    ) -> Matrix:
        """
        Compute C := alpha A B + beta C with a symmetric A. Collective.

        Parameters
        ----------
        a : Matrix
            Square, of f32, f64, c64 or c128. One triangle of it is read.
        b : Matrix
            Of the same type.
        out : Matrix, optional
            C, of B's shape. By default a new one, as `gemm` makes it.
        left : bool, default True
            False: compute C := alpha B A + beta C.
        lower : bool, default True
            Which triangle of A is read, with the diagonal; the other is its transpose, whatever memory holds.
        alpha, beta
            As of `gemm`.

        Raises
        ------
        ParamError, CapacityError, UncutError
            As `gemm`, on all ranks.
        """
        return self._with_mirrored("symm", "symmetric", (a, b, out), (left, lower), (alpha, beta))

    @public_call
    def hemm(
        self,
        a: Matrix,
        b: Matrix,
        out: Matrix | None = None,
        *,
        left: bool = True,
        lower: bool = True,
        alpha: Number = 1.0,
        beta: Number = 0.0,
    ) -> Matrix:
        """
        Compute C := alpha A B + beta C with a Hermitian A, else as `symm`. Collective.

        The imaginary parts of its diagonal are taken for 0.
        """
        return self._with_mirrored("hemm", "hermitian", (a, b, out), (left, lower), (alpha, beta))

    @public_call
    def trmm(
        self,
        a: Matrix,
        b: Matrix,
        *,
        left: bool = True,
        lower: bool = True,
        trans: Trans = "N",
        unit: bool = False,
        alpha: Number = 1.0,
    ) -> Matrix:
        """
        Compute B := alpha op(A) B with a triangular A, in place. Collective.

        Parameters
        ----------
        a : Matrix
            Square, of f32, f64, c64 or c128. One triangle of it is read.
        b : Matrix
            Of the same type, overwritten.
        left : bool, default True
            False: compute B := alpha B op(A).
        lower : bool, default True
            Which triangle of A is read; beyond it zeros are taken for what memory holds.
        trans : {"N", "T", "C"}
            Whether op transposes, or transposes and conjugates.
        unit : bool, default False
            Whether ones are taken for the diagonal.
        alpha : float or complex
            As of `gemm`.

        Returns
        -------
        Matrix
            `b`.

        Raises
        ------
        ParamError, CapacityError, UncutError
            As `gemm`, on all ranks.
        """
        return self._with_triangle("trmm", "triangular", (a, b), (left, lower, unit), trans, alpha)

    @public_call
    def trsm(
        self,
        a: Matrix,
        b: Matrix,
        *,
        left: bool = True,
        lower: bool = True,
        trans: Trans = "N",
        unit: bool = False,
        alpha: Number = 1.0,
    ) -> Matrix:
        """
        Solve op(A) X = alpha B with a triangular A, and write X over B. Collective.

        With ``left=False`` it is X op(A) = alpha B, else as `trmm`. Of a 0 on the diagonal nothing is said, as in BLAS:
        it divides, so that X has infinities and NaN.
        """
        return self._with_triangle("trsm", "inverse", (a, b), (left, lower, unit), trans, alpha)

    # -- how ---------------------------------------------------------------------------------

    def _of_factors(
        self,
        call: str,
        given: tuple[Matrix, ...],
        out: Matrix | None,
        lower: object,
        factors: tuple[object, object],
        op: Trans = "T",
        real: tuple[str, ...] = (),
    ) -> Matrix:
        """Compute a triangle of C, by one product or two; factors named in `real` have to be so. Collective."""
        with self._gate.call(call) as open_with:
            scalars, is_lower = Scalars.of(*factors), flag("lower", lower)
            for name in real:
                real_number(name, getattr(scalars, name))
            matrices = dict(zip("ab", given, strict=False)) | ({} if out is None else {"out": out})
            a, told = self._store.check("a", given[0]), dict[str, object]()
            if a.dtype.needs_scales or not a.dtype.results:
                raise ParamError(f"a is {a.dtype.name}: pass one of a type that is multiplied without scales")
            for name, one in matrices.items():
                told[name] = self._store.check(name, one).info
                _check_fits(
                    name, one, a, *((a.shape[:1] * 2, a.dtype.results) if one is out else (a.shape, (a.dtype,)))
                )
            if out is None and scalars.beta != 0:
                raise ParamError(f"beta = {scalars.beta}, but there is no out: pass out=, or beta=0")
            told |= {"lower": is_lower, **scalars._asdict()}
            b, c = given[-1], out
            if c is None:
                open_with(**told)
                c = self._new_result(a, b, op)
        if out is None:  # beyond the triangle it is 0
            self._product(call, (a, b, c), (0.0, 0.0), ("N", op, None), told=told)
        chosen = "N", op, None, f"{'lower' if is_lower else 'upper'}{'_real' if op == 'C' else ''}"
        self._product(call, (a, b, c), scalars, chosen, told=told)
        if len(given) > 1:
            other = scalars.alpha.conjugate() if op == "C" else scalars.alpha
            self._product(call, (b, a, c), (other, 1.0), chosen, told=told)
        return c

    def _asked(
        self,
        call: str,
        kind: Kind,
        given: tuple[Any, ...],
        flags: tuple[object, ...],
        trans: object,
        factors: tuple[object, object],
    ) -> tuple[_Sided, Matrix, Matrix, Scalars]:
        """Return what all ranks ask, with B and C, or raise what is wrong with it on all of them. Collective."""
        with self._gate.call(call) as open_with:
            how = {name: flag(name, one) for name, one in zip(("left", "lower", "unit"), flags, strict=False)}
            left, lower, *unit = how.values()
            form, op = Form(kind, "lower" if lower else "upper", *unit), transposition("trans", trans)
            scalars, names = Scalars.of(*factors), ("a", "b", "out")[: len(given)]
            a, b, *c = (self._store.check(name, one) for name, one in zip(names, given, strict=True))
            told: dict[str, Any] = {name: one.info for name, one in zip(names, given, strict=True)}
            if form.kind == "hermitian" and a.info.conjugated:  # of which the other triangle is read
                a, form = a.H, form.transposed
            extent, dtype = b.shape[0 if left else 1], a.info.dtype
            if dtype not in (DType.f32, DType.f64, DType.c64, DType.c128):
                raise ParamError(f"a is {dtype.name}: pass matrices of f32, f64, c64 or c128")
            if a.shape != (extent, extent):
                found = "a is {}×{} and b {}×{}".format(*a.shape, *b.shape)
                raise ParamError(f"{found}: with left={left} a has to be {extent}×{extent}")
            for name, one in zip(names, (a, b, *c), strict=True):
                if one.info.conjugated and not (one is a and form.is_triangular):
                    raise ParamError(f"{name} is a conjugated view: pass the matrix itself, and trans='C' for its op")
                if one is not a:
                    _check_fits(name, one, a, b.shape, (dtype,))
            if c or form.is_triangular:
                check_written(names[-1], told[names[-1]], **{name: told[name] for name in names[:-1]})
            elif scalars.beta != 0:
                raise ParamError(f"beta = {scalars.beta}, but there is no out: pass out=, or beta=0")
            scalars.check(dtype)
            told |= how | ({"trans": op, "alpha": scalars.alpha} if form.is_triangular else scalars._asdict())
            # Before all products, so that `_of_form` takes no earlier call's error for theirs, and none is in flight.
            open_with(**told)
            if not c:
                c = [b if form.is_triangular else self._new_result(*((a, b) if left else (b, a)))]
        block = max(LEAST_BLOCK, -(-extent // (_MOST_BLOCKS * _STEP)) * _STEP)
        return _Sided(call, told, a, form, op, left, block), b, c[0], scalars

    def _new_result(self, a: Matrix, b: Matrix, trans_b: str = "N") -> Matrix:
        """Return a new matrix for A op(B), as `gemm` makes it, in a call that has opened. Collective."""
        made: Any = self._made_of(self._apart(*new_results(a, b, "N", trans_b, None, self.size)), a, b)
        return cast(Matrix, made)

    def _with_mirrored(
        self,
        call: str,
        kind: Kind,
        given: tuple[Matrix, Matrix, Matrix | None],
        flags: tuple[bool, bool],
        factors: tuple[Number, Number],
    ) -> Matrix:
        there = tuple(one for at, one in enumerate(given) if at < 2 or one is not None)
        asked, b, c, scalars = self._asked(call, kind, there, flags, "N", factors)

        def made(start: int, stop: int) -> None:
            middle = asked.middle(start, stop)
            if middle == stop:
                if self._of_form(asked, start, stop, (b, c), scalars):
                    return
                middle = asked.middle(start, stop)
            made(start, middle)
            made(middle, stop)
            halves = slice(start, middle), slice(middle, stop)
            for mine, other in (halves, halves[::-1]):
                # The block of A in these rows and those columns: as it is stored, or from beyond the diagonal.
                is_stored = (mine.start > other.start) == (asked.form.triangle == "lower")
                if asked.left:
                    at, trans = (asked.a[mine, other], "N") if is_stored else (asked.a[other, mine], _OTHER[kind])
                else:
                    at, trans = (asked.a[mine, other], _OTHER[kind]) if is_stored else (asked.a[other, mine], "N")
                source, target = (asked.across(one, part.start, part.stop) for one, part in ((b, other), (c, mine)))
                self._multiply(asked, at, source, target, Scalars(scalars.alpha, 1.0), trans=trans)

        made(0, asked.a.shape[0])
        asked.wait()
        return c

    def _with_triangle(
        self,
        call: str,
        kind: Kind,
        given: tuple[Matrix, Matrix],
        flags: tuple[bool, bool, bool],
        trans: Trans,
        alpha: Number,
    ) -> Matrix:
        asked, b, _, scalars = self._asked(call, kind, given, flags, trans, (alpha, 0.0))
        extent, solves = asked.a.shape[0], kind == "inverse"
        is_lower = (asked.form.triangle == "lower") == (asked.trans == "N")  # op(A)
        down = is_lower == asked.left  # whether the end of B depends on its beginning

        def made(start: int, stop: int, factor: Number) -> None:
            middle = asked.middle(start, stop)
            if middle == stop:
                if self._of_form(asked, start, stop, (b, b), Scalars(factor, 0.0)):
                    return
                middle = asked.middle(start, stop)
            halves = slice(start, middle), slice(middle, stop)
            source, target = halves if down else halves[::-1]
            rows, cols = (target, source) if asked.left else (source, target)
            at = asked.a[rows, cols] if asked.trans == "N" else asked.a[cols, rows]
            other, out = (asked.across(b, part.start, part.stop) for part in (source, target))
            if factor == 0:  # neither A nor B is read
                made(start, middle, factor)
                made(middle, stop, factor)
            elif solves:
                made(source.start, source.stop, factor)
                self._multiply(asked, at, other, out, Scalars(-1.0, factor), trans=asked.trans)
                made(target.start, target.stop, 1.0)
            else:
                made(target.start, target.stop, factor)
                self._multiply(asked, at, other, out, Scalars(factor, 1.0), trans=asked.trans)
                made(source.start, source.stop, factor)

        made(0, extent, scalars.alpha)
        asked.wait()
        return b

    def _of_form(self, asked: _Sided, start: int, stop: int, ends: tuple[Matrix, Matrix], scalars: Scalars) -> bool:
        """Multiply by a block on the diagonal; where there is no room for it, let blocks be smaller. Collective."""
        own, (other, out) = asked.a[start:stop, start:stop], (asked.across(one, start, stop) for one in ends)
        try:
            self._multiply(asked, own, other, out, scalars, trans=asked.trans, form=True)
        except CapacityError:
            if stop - start <= _STEP:
                raise
            asked.block = -(-(stop - start) // (2 * _STEP)) * _STEP
            return False
        return True

    def _multiply(
        self,
        asked: _Sided,
        own: Matrix,
        other: Matrix,
        out: Matrix,
        scalars: Scalars,
        *,
        trans: str = "N",
        form: bool = False,
    ) -> None:
        """Multiply a part of A by another matrix, on its side. Collective."""
        forms: Forms = (asked.form if form else None, None)
        given, ops = (own, other), (trans, "N")
        if not asked.left:
            given, ops, forms = given[::-1], ops[::-1], forms[::-1]
        # Of several one follows another without the host, on the GPUs of a node.
        wait = True if self._group.num_nodes > 1 or own.shape == asked.a.shape else None
        begun = self._product(asked.call, (*given, out), scalars, (*ops, None), forms=forms, told=asked.told, wait=wait)
        if begun is not None:
            asked.begun.append(Handle(self, self._calls.flight, begun, lambda _: None))


def _check_fits(name: str, one: Matrix, a: Matrix, shape: tuple[int, ...], dtypes: Sequence[DType]) -> None:
    """Raise ParamError for a matrix of another shape or type than goes with A."""
    if one.shape != shape or one.dtype not in dtypes:
        of_a, found = ("{}×{} {}".format(*it.shape, it.dtype.name) for it in (a, one))
        types = " or ".join(it.name for it in dtypes)
        raise ParamError(f"a is {of_a}, so {name} has to be {shape[0]}×{shape[1]} {types}, and is {found}")
