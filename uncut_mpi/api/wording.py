"""The arguments of calls by their names, short enough to stand in an error for each rank; ranks compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, type_text

_OPERANDS = {"gemm": ("a", "b", "out"), "redistribute": ("matrix", "matrix", "out")}


def product_asked(call: str, matrices: Iterable[Matrix], *more: Mapping[str, object]) -> dict[str, object]:
    """Return those of A, B and C that a product has, and what else it was called with."""
    names = _OPERANDS.get(call, ("a", "b", "c"))
    asked: dict[str, object] = {name: matrix.info for name, matrix in zip(names, matrices, strict=False)}
    for one in more:
        asked.update(one)
    return asked


def named(*names: str) -> Callable[[tuple[object, ...]], dict[str, object]]:
    """Return what gives arguments, converted, their names; of matrices which of the session's they are."""

    def asked(values: tuple[object, ...]) -> dict[str, object]:
        texts = (value.info if isinstance(value, Matrix) else value for value in values)
        return dict(zip(names, texts, strict=True))

    return asked


def value_text(what: object, value: object) -> str:
    """
    Return the repr of a value.

    Raises
    ------
    ParamError
        If `what` is no text, or the value has no repr.
    """
    if not isinstance(what, str):
        raise ParamError(f"what = {shown(what)} is {type_text(what)}: pass what the value is, as a text")
    try:
        return repr(value)
    except Exception as error:  # whatever a caller's type raises
        raise ParamError(f"{what}, {type_text(value)}, cannot be compared: its repr raised {error!r}") from error
