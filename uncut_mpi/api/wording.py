"""Calls in words, short enough to stand in an error for each rank; ranks compare them."""

from __future__ import annotations

from collections.abc import Iterable

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import Number, shown, type_text
from uncut_mpi.planning.options import ScheduleOptions


def product_text(
    call: str, matrices: Iterable[Matrix], scalars: tuple[Number, Number], choices: tuple[str, str, ScheduleOptions]
) -> str:
    """Return a product's call with those of A, B and C that it has, and what else it was called with."""
    names = (f"{name}={matrix_text(matrix)}" for name, matrix in zip("abc", matrices, strict=False))
    (alpha, beta), (trans_a, trans_b, options) = scalars, choices
    fixed = None if options == ScheduleOptions() else options
    return f"{call}: {', '.join(names)}, alpha {alpha}, beta {beta}, {trans_a=}, {trans_b=}, options={fixed}"


def matrix_text(matrix: Matrix | None) -> str:
    """Return which of the session's matrices it is."""
    return "None" if matrix is None else str(matrix.info)


def value_text(what: object, value: object) -> str:
    """
    Return what a value is, and its repr.

    Raises
    ------
    ParamError
        If `what` is no text, or the value has no repr.
    """
    if not isinstance(what, str):
        raise ParamError(f"what = {shown(what)} is {type_text(what)}: pass what the value is, as a text")
    try:
        return f"{what} {value!r}"
    except Exception as error:  # whatever a caller's type raises
        raise ParamError(f"{what}, {type_text(value)}, cannot be compared: its repr raised {error!r}") from error
