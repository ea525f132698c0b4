"""
What ranks send each other: values, of which nothing runs where they are made again.

They travel as pickles of few classes: Python's and numpy's plain ones, and values of this package. So a rank makes no
object and calls no function that another one names, beside these.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import ParamError, reason

_BUILTINS: Final = {"builtins": ("bytearray", "complex", "frozenset", "range", "set", "slice")}
_PACKAGES: Final = "numpy", __name__.partition(".")[0]

# As numpy names them itself, which its versions do differently: arrays that are one piece, others, and scalars.
_OF_NUMPY: Final = [
    np.ndarray,
    np.dtype,
    *(one.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[0] for one in (np.zeros(2), np.zeros(4)[::2], np.float64())),
]


def encoded(value: object) -> bytes:
    """Return a value as bytes; an error of any type says that it is none."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def decoded(data: bytes | memoryview[Any]) -> Any:
    """Return the value that bytes of `encoded` hold, or raise ParamError if anything in them is none."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except ParamError:
        raise
    except Exception as error:
        raise ParamError(f"{len(data)} bytes that hold no value: {type(error).__name__}: {reason(error)}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a class by its name, or a function of numpy's that makes an array."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module.partition(".")[0] in _PACKAGES or name in _BUILTINS.get(module, ()):
            found = super().find_class(module, name)
            if module in _BUILTINS or _is_value(found):
                return found
        raise ParamError(
            f"{module}.{name} is not sent from rank to rank: send None, numbers, texts, bytes, arrays, or lists, "
            "tuples, sets and dicts of these"
        )


def _member(kind: object, name: str) -> Any:
    """Return a member of an enumeration, which Python 3.11 took from its class by `getattr` at first."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise ParamError(f"{name} of {kind!r} is not sent from rank to rank: send the value itself")
    return kind[name]


def _is_value(found: object) -> bool:
    if any(found is one for one in _OF_NUMPY):
        return True
    if not isinstance(found, type):
        return False
    is_ours = found.__module__.partition(".")[0] == _PACKAGES[1]
    plain = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or hasattr(found, "_fields")
    return issubclass(found, np.generic) or (is_ours and plain)
