"""Calls in words, short enough to stand in an error for each rank; ranks compare them."""

from __future__ import annotations

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import real_number, shown, type_text
from uncut_mpi.planning.options import ScheduleOptions


def product_text(call: str, a: object, b: object, c: object, alpha: object, beta: object) -> str:
    """Return a product's call with its matrices and scalars."""
    names = (f"{name}={matrix_text(matrix)}" for name, matrix in (("a", a), ("b", b), ("c", c)))
    return f"{call}: {', '.join(names)}, alpha {_scalar_text(alpha)}, beta {_scalar_text(beta)}"


def how_text(trans_a: object, trans_b: object, options: object) -> str:
    """Return what else a one-shot product is called with."""
    fixed = str(options) if isinstance(options, ScheduleOptions) else shown(options)
    return f"trans_a={_trans_text(trans_a)}, trans_b={_trans_text(trans_b)}, options={fixed}"


def matrix_text(matrix: object) -> str:
    """Return which of the session's matrices it is; of anything else its type."""
    return f"matrix {matrix.info.number}" if isinstance(matrix, Matrix) else type(matrix).__name__


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


def _scalar_text(value: object) -> str:
    """Return a scalar as text, the same for all types that have its value."""
    try:
        return repr(real_number("a scalar", value))
    except ParamError:
        return shown(value)


def _trans_text(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else shown(value)
