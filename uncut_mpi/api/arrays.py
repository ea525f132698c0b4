"""What callers register, as an array of numpy or of the device over the same memory, or an error with the mend."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.device import exported
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import BATCH
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType

# Subclasses of numpy's array that mean what lies in their buffer.
_PLAIN = (np.ndarray, np.memmap, np.matrix)


@dataclasses.dataclass(frozen=True, slots=True)
class TakenArray:
    """
    A caller's array.

    Attributes
    ----------
    array : numpy.ndarray or device array
        Over the caller's memory, which it keeps alive.
    on_device : bool
        Whether it lies on this rank's device.
    writeable : bool
        Whether it may be written.
    """

    array: Any
    on_device: bool
    writeable: bool = True


def take(given: Any, backend: Backend) -> TakenArray:
    """
    Return what a caller registers as an array, without a copy. Local.

    Raises
    ------
    ParamError
        If it is no array, lies on another device, or means something else than what lies in its memory.
    """
    if isinstance(given, np.ndarray):
        array = _plain(given)
    elif backend.owns(given):
        return TakenArray(given, True)
    elif isinstance(given, Matrix):
        raise ParamError(f"{given} was given as an array: it is a matrix of a session already, use it as it is")
    elif shows(given, "__dlpack__"):
        if exported.place_of(given)[0] != exported.HOST:
            array, writeable = backend.wrap(given)
            return TakenArray(array, True, writeable)
        with exported.translated(given):
            array = exported.from_dlpack(given).as_numpy()
    elif shows(given, "__cuda_array_interface__"):
        array, writeable = backend.wrap(given)
        return TakenArray(array, True, writeable)
    elif shows(given, "__array_interface__") and not isinstance(given, np.generic):
        array = exported.from_array_interface(given)
    else:
        raise ParamError(f"{'None' if given is None else type_text(given)} was given: {_mend(given)}")
    return TakenArray(array, backend.owns(array), array.flags.writeable)


def element_type(array: Any, kind: DType | None) -> DType:
    """
    Return the type in which the products of an array are computed: `kind` if given, else its own.

    Raises
    ------
    ParamError
        If that is none of the types there are, or `kind` is another in memory.
    """
    if not array.dtype.isnative:
        raise ParamError(
            f"an array of dtype {array.dtype} was given, which is of the other byte order: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )
    found = DType.parse(array.dtype)
    if kind is None:
        return found
    if found.numpy != kind.numpy:
        raise ParamError(f"an array of {found.name} was given as {kind.name}, which is {kind.numpy} in memory")
    return kind


def _plain(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of numpy's own types, or raise for one that means more than what lies in its buffer."""
    if isinstance(given, np.ma.MaskedArray):
        hidden = int(np.count_nonzero(np.ma.getmaskarray(given)))
        if hidden:
            raise ParamError(
                f"an array with {hidden} masked element{'s' if hidden > 1 else ''} was given, which a product "
                "would take for values: pass x.filled(value)"
            )
        given = np.ma.getdata(given)
    if type(given) not in _PLAIN:
        raise ParamError(
            f"{type_text(given)} was given, a kind of numpy array that may mean more than what lies in its "
            "memory: pass numpy.asarray(x)"
        )
    return given


def is_array(given: Any) -> bool:
    """Return whether what a caller gave shows its memory, as arrays and tensors do, or fails when it is to."""
    protocols = "__dlpack__", "__cuda_array_interface__", "__array_interface__"
    return not isinstance(given, np.generic) and any(shows(given, protocol) for protocol in protocols)


def is_batch(given: Any) -> bool:
    """Return whether a caller gave a list of arrays, or of matrices."""
    return isinstance(given, list | tuple) and len(given) > 0 and (isinstance(given[0], Matrix) or is_array(given[0]))


def has_elements(given: Any) -> bool:
    """Return whether what a caller gave as an array is none that is empty."""
    try:
        return 0 not in given.shape
    except Exception:  # it is no array, which is told where it is taken
        return True


def shows(given: Any, protocol: str) -> bool:
    """Return whether what a caller gave has an attribute, or fails when it is asked for that."""
    try:
        return hasattr(given, protocol)
    except Exception:  # of a property that fails: it is there, and is asked again where its error is told
        return True


def _mend(given: Any) -> str:
    if is_batch(given):
        return BATCH
    if given is None:
        return "the rank that has the array passes it, the others may pass None"
    if hasattr(type(given), "toarray"):
        return "pass x.toarray(), a dense array"
    return "pass numpy.asarray(x), or another array that shows its memory (a tensor)"
