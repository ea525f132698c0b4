"""Level 3 of BLAS by numpy: what is too small for devices, or has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.blas.routines import Letters, Routine
from uncut_mpi.device.host.bodies import fill, multiply_by_halves
from uncut_mpi.model.form import Form, Kind

Array: TypeAlias = Any


def compute_by_numpy(routine: Routine, by: Letters, operands: Sequence[Array], alpha: Any, beta: Any) -> None:
    """Write the last operand. With alpha = 0 the others are not read, with beta = 0 it is not."""
    with np.errstate(all="ignore"):  # as BLAS, which says nothing
        _compute(routine, by, operands, alpha, beta)


def _compute(routine: Routine, by: Letters, operands: Sequence[Array], alpha: Any, beta: Any) -> None:
    out, inside = operands[-1], np.ones((1, 1), bool)
    if "side" not in by and "uplo" in by:
        lower = np.tri(len(out), dtype=bool)
        inside = lower if by["uplo"] == "L" else lower.T
    if routine.is_triangular:
        out[...] = _with_triangle(routine, by, operands[0], out, alpha) if alpha else 0
        return
    is_hermitian = routine.is_hermitian and "side" not in by
    if is_hermitian:  # whatever the imaginary parts were
        out.imag[np.diag_indices_from(out)] = 0
    if beta != 1:
        np.copyto(out, beta * out if beta else 0, where=inside)
    if alpha:
        np.add(out, _product(routine, by, operands, alpha), out=out, where=inside)
    if is_hermitian:
        out.imag[np.diag_indices_from(out)] = 0


def _applied(array: Array, op: str) -> Array:
    return array if op == "N" else array.T if op == "T" else array.conj().T


def _product(routine: Routine, by: Letters, operands: Sequence[Array], alpha: Any) -> Array:
    a, b, other = operands[0], operands[-2], "C" if routine.is_hermitian else "T"
    if routine.name == "gemm":
        return alpha * (_applied(a, by["trans_a"]) @ _applied(b, by["trans_b"]))
    if "side" in by:
        kind: Kind = "hermitian" if routine.is_hermitian else "symmetric"
        whole = _filled(a, Form(kind, "lower" if by["uplo"] == "L" else "upper"))
        return alpha * (whole @ b if by["side"] == "L" else b @ whole)
    first, second = (one if by["trans"] == "N" else _applied(one, other) for one in (a, b))
    product = alpha * (first @ _applied(second, other))
    return product + _applied(product, other) if routine.name.endswith("2k") else product


def _with_triangle(routine: Routine, by: Letters, a: Array, b: Array, alpha: Any) -> Array:
    """Return alpha op(A) B, or B op(A), or that with the inverse."""
    is_left = by["side"] == "L"
    kind: Kind = "triangular" if routine.name == "trmm" else "inverse"
    form = Form(kind, "lower" if by["uplo"] == "L" else "upper", by["diag"] == "U")
    taken, found = _applied(a, by["trans"]), np.array(alpha * b, order="F")
    form = form if by["trans"] == "N" else form.transposed
    multiply_by_halves(*((taken, form, found) if is_left else (taken.T, form.transposed, found.T)))
    return found


def _filled(square: Array, form: Form) -> Array:
    made = square.copy()
    fill(made, form)
    return made
