"""The arguments of calls by their names, short enough to stand in an error for each rank; ranks compare them."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import uuid
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from numbers import Number
from typing import Any

import numpy as np

from uncut_mpi.api.matrix import Matrix, MatrixInfo
from uncut_mpi.api.views import Several
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.spmd import agreement

_KINDS = (str, bytes, int, float, complex, list, tuple, dict, set, frozenset)
_CHARS = f"?efdFDSU{np.typecodes['AllInteger']}"  # of long doubles and records some bytes belong to no value
_BF16 = DType.bf16.numpy
_INSTEAD: dict[str, tuple[type, ...]] = {
    "bytes": (bytearray, memoryview),
    "list": (range,),
    "str": (Number, os.PathLike, enum.Enum, uuid.UUID, date, time, timedelta, np.dtype, np.datetime64, np.timedelta64),
}
"""By what some types of no encoding become one that has."""
_OPERANDS = {
    **dict.fromkeys(("gemm", "gemm_batch", "matmul"), ("a", "b", "out")),
    "gemm: residual": ("residual", "residual", "out"),
    "redistribute": ("matrix", "matrix", "out"),
}


def product_asked(call: str, matrices: Iterable[Matrix], *more: Mapping[str, object]) -> dict[str, object]:
    """Return those of A, B and C that a product has, and what else it was called with."""
    names = _OPERANDS.get(call, ("a", "b", "c"))
    asked = dict[str, object](zip(names, (_told(matrix.info) for matrix in matrices), strict=False))
    for one in more:
        asked.update(one)
    return asked


def _told(info: MatrixInfo) -> object:
    """Return a matrix as an error shows it: of a list each."""
    return info.view.members if isinstance(info.view, Several) and info.view.members else info


def value_digest(what: object, value: object) -> bytes:
    """
    Return 16 bytes that equal values share, and what they are called.

    Raise ParamError if `what` is no text, or it is not defined when such values are equal.
    """
    if not isinstance(what, str):
        raise ParamError(f"what = {shown(what)} is {type_text(what)}: pass what the value is, as a text")
    try:
        content = _encoded(value)
    except (_Unknown, RecursionError) as error:
        unknown = error if isinstance(error, _Unknown) else "values nested too deeply"
        raise ParamError(
            f"{what} has {unknown}, which agree does not compare: pass {getattr(error, 'instead', '')}numbers, texts, "
            "bytes, arrays of them, frozen dataclasses that are equal by value, or lists, tuples, sets, dicts of these"
        ) from None
    return hashlib.blake2b(_joined("agree", [what.encode("utf-8", "surrogatepass"), content]), digest_size=16).digest()


class _Unknown(Exception):
    """A value of a type that has no encoding; `instead` is what to pass of it."""

    def __init__(self, value: object, text: str) -> None:
        super().__init__(text)
        by = next((by for by, kinds in _INSTEAD.items() if isinstance(value, kinds)), None)
        self.instead = f"{by}(x) of it, or " if by else ""


def _encoded(value: Any) -> bytes:
    """Return bytes that equal values share, and no others."""
    if isinstance(value, np.generic | np.ndarray):
        other = isinstance(value, np.ndarray) and type(value).__eq__ is not np.ndarray.__eq__
        if other or not (value.dtype.char in _CHARS or value.dtype == _BF16):
            raise _Unknown(value, f"{type_text(value)} of {value.dtype}")
        if isinstance(value, np.ndarray) and value.ndim:
            plain = agreement.plain_array(value)
            return _joined("array", [f"{plain.dtype} {plain.shape}".encode(), plain.tobytes()])
        value = value.item()
    # What compares in a way of its own is none of these.
    kind = next((kind for kind in _KINDS if isinstance(value, kind) and type(value).__eq__ is kind.__eq__), None)
    if value is None or kind in (str, bytes):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value or b""
        return _joined(type(value).__name__ if kind is None else kind.__name__, [text])
    if kind in (int, float, complex):
        parts = [value.real, value.imag] if value.imag else [value.real]
        wholes = [isinstance(part, int) or part.is_integer() for part in parts]
        texts = (f"{int(part):x}" if whole else repr(part) for part, whole in zip(parts, wholes, strict=True))
        return _joined("number", [text.encode() for text in texts])
    if kind is dict:
        return _joined("dict", sorted(_joined("", map(_encoded, pair)) for pair in value.items()))
    if kind in (set, frozenset):
        return _joined("set", sorted(map(_encoded, value)))
    if kind in (list, tuple):
        return _joined(kind.__name__, map(_encoded, value))
    about = getattr(type(value), "__dataclass_params__", None)
    if about is not None and about.eq and about.frozen:
        fields = (getattr(value, field.name) for field in dataclasses.fields(value) if field.compare)
        return _joined(f"{type(value).__module__}.{type(value).__qualname__}", map(_encoded, fields))
    raise _Unknown(value, type_text(value))


def _joined(kind: str, parts: Iterable[bytes]) -> bytes:
    """Return parts in one, each with its length, so that no others are joined to the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in (kind.encode(), *parts))
