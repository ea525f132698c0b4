"""The arguments of calls by their names, short enough to stand in an error for each rank; ranks compare them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

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


def value_digest(what: object, value: object) -> bytes:
    """
    Return 16 bytes that equal values share, and what they are called.

    Raises
    ------
    ParamError
        If `what` is no text, or it is not defined when such values are equal.
    """
    if not isinstance(what, str):
        raise ParamError(f"what = {shown(what)} is {type_text(what)}: pass what the value is, as a text")
    try:
        content = _encoded(value)
    except _Unknown as unknown:
        raise ParamError(
            f"{what} has {unknown}, which cannot be compared: pass numbers, texts, bytes, arrays of numbers, frozen "
            "dataclasses, or lists, tuples, sets and dicts of them"
        ) from None
    return hashlib.blake2b(_joined("agree", [what.encode("utf-8", "surrogatepass"), content]), digest_size=16).digest()


class _Unknown(Exception):
    """A value of a type that has no encoding."""


def _encoded(value: object) -> bytes:
    """Return bytes that equal values share, and no others."""
    if value is None or isinstance(value, str | bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value or b""
        return _joined("None" if value is None else "str" if isinstance(value, str) else "bytes", [text])
    if isinstance(value, np.ndarray) and value.ndim and not value.dtype.hasobject:
        plain = np.ascontiguousarray(value + 0 if value.dtype.kind in "fc" else value)  # no zero has a sign
        return _joined("array", [f"{value.dtype} {value.shape}".encode(), plain.tobytes()])
    if isinstance(value, np.generic | np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, int | float | complex):
        if isinstance(value, complex) and not value.imag:
            value = value.real
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return _joined("number", [f"{int(value):x}".encode() if whole else repr(value).encode()])  # type: ignore[arg-type]
    if isinstance(value, dict):
        return _joined("dict", sorted(_joined("", map(_encoded, pair)) for pair in value.items()))
    if isinstance(value, set | frozenset):
        return _joined("set", sorted(map(_encoded, value)))
    if isinstance(value, list | tuple):
        return _joined("list" if isinstance(value, list) else "tuple", map(_encoded, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)
        return _joined(type(value).__qualname__, map(_encoded, fields))
    raise _Unknown(type_text(value))


def _joined(kind: str, parts: Iterable[bytes]) -> bytes:
    """Return parts in one, each with its length, so that no others are joined to the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in (kind.encode(), *parts))
