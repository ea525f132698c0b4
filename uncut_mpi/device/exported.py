"""
Memory that arrays of other libraries show: `__dlpack__`, `__cuda_array_interface__`, `__array_interface__`.

DLPack is read here, not by numpy or cupy: numpy takes no bfloat16 and before 2.1 nothing that can be written, and
nobody takes both versions. The core looks at its structures, of versions 0.x and 1.x.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError, UncutError, named
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType

HOST: Final = "host"
CUDA: Final = "CUDA device"
_PLACES = {
    1: HOST,
    2: CUDA,
    3: HOST,  # pinned by CUDA
    4: "OpenCL device",
    7: "Vulkan device",
    8: "Metal device",
    10: "ROCm device",
    13: CUDA,  # managed
    14: "oneAPI device",
    15: "WebGPU device",
}
_READ_ONLY, _IS_COPIED = 1, 2
_OLDEST_VERSION_ASKED = (1, 0)
# By code of a type; of any width that numpy has.
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}
_NAMED = {(4, 16): DType.bf16.numpy, (10, 8): DType.e4m3.numpy, (12, 8): DType.e5m2.numpy}
# Their arrays never change, and DLPack before version 1 cannot say so.
_UNCHANGING = {"jax", "jaxlib", "tensorflow"}
# By the package that an array's type is of: the module that makes others of that type.
_LIBRARIES = {"torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}
# Subclasses of torch's tensor that mean what lies in their memory; masked ones, say, do not.
_PLAIN_TENSORS = {"Tensor", "Parameter", "Buffer"}


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """
    Memory that an object shows, as an array.

    Attributes
    ----------
    address : int
        Of the first element.
    shape : tuple of int
        Extents.
    strides : tuple of int
        Bytes from one element to the next along each.
    dtype : numpy dtype
        Type of the elements.
    writeable : bool
        Whether it may be written.
    keep : object
        Keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    writeable: bool
    keep: Any

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the array, which lies in host memory; it keeps the memory alive through any chain of views."""
        if 0 in self.shape:
            array: np.ndarray[Any, Any] = np.empty(self.shape, self.dtype)
            array.flags.writeable = self.writeable
            return array
        interface = {
            "data": (self.address, not self.writeable),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.dtype.itemsize}",
            "version": 3,
        }
        shown: Any = types.SimpleNamespace(__array_interface__=interface, keep=self.keep)
        return np.asarray(shown).view(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """
    An array of numpy or cupy, shown by DLPack whatever its elements are: numpy shows no bfloat16.

    Attributes
    ----------
    array : numpy.ndarray or cupy.ndarray
        Whose memory it is, kept alive by all that is made of it. Nobody is at work on it, so no stream has to wait.
    strides : tuple of int
        Elements from one to the next along each dimension.
    """

    array: Any
    strides: tuple[int, ...]

    @property
    def address(self) -> int:
        """Of the first element."""
        words = getattr(self.array, "__cuda_array_interface__", None) or self.array.__array_interface__
        return int(words["data"][0])

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.array.__dlpack_device__()
        return int(kind), int(index)

    def __dlpack__(self, **words: object) -> Any:
        dtype = self.array.dtype
        named = (code for (code, _), one in _NAMED.items() if one == dtype)
        code = next(named, None) or next(at for at, kind in _KINDS.items() if kind == dtype.kind)
        return _native.capsule(
            self.address, self.array.shape, self.strides, (code, 8 * dtype.itemsize), self.__dlpack_device__(), self
        )


@contextlib.contextmanager
def translated(given: Any) -> Iterator[None]:
    """Turn whatever an object of another library raises within the block into a ParamError."""
    try:
        yield
    except UncutError:
        raise
    except Exception as error:
        raise ParamError(
            f"{type_text(given)} cannot show its memory ({named(error)}): "
            "pass a dense array in the memory of this rank's device or of the host"
        ) from error


# -- DLPack --------------------------------------------------------------------------------------


def place_of(given: Any) -> tuple[str, int]:
    """Return the kind of device that an object with `__dlpack__` lies on, and its index."""
    with translated(given):
        kind, index = (int(word) for word in given.__dlpack_device__())
    return _PLACES.get(kind, f"device of DLPack's type {kind}"), index


def from_dlpack(given: Any, stream: int | None = None) -> Exported:
    """
    Return the memory that an object shows by `__dlpack__`.

    Parameters
    ----------
    given : object
        It and what it gives are kept alive by the result.
    stream : int, optional
        A CUDA stream; what the producer has enqueued so far is done before what it is given next.

    Raises
    ------
    ParamError
        If the object's elements are not what lies in its memory, or it cannot show them; says why.
    """
    with translated(given):
        _refuse_pending(given)
        capsule = _capsule_of(given, {} if stream is None else {"stream": stream})
    seen = _native.look(capsule)  # never renamed, so that its own end gives the memory back
    if seen is None:
        raise ParamError(f"__dlpack__ of {type_text(given)} returned {type_text(capsule)}, not a new capsule of DLPack")
    version, flags, address, shape, strides, code, bits, lanes = seen
    if version > 1:
        raise ParamError(f"{type_text(given)} shows its memory by DLPack {version}: this reads versions 0 and 1")
    if flags & _IS_COPIED:
        raise ParamError(f"{type_text(given)} shows a copy of its memory: pass an array that is the memory itself")
    unchanging = {base.__module__.partition(".")[0] for base in type(given).__mro__} & _UNCHANGING
    dtype = _dtype_of(code, bits, lanes, given)
    if not address and 0 not in shape:  # which numpy 1 took for a number
        raise ParamError(f"{type_text(given)} shows no memory: its address is 0")
    return Exported(
        address,
        tuple(shape),
        tuple(stride * dtype.itemsize for stride in strides),
        dtype,
        not (flags & _READ_ONLY or unchanging),
        (capsule, given),
    )


def _refuse_pending(given: Any) -> None:
    """Refuse tensors that are more than their memory, as far as they can be asked."""
    name = type_text(given)
    kind = type(given)
    if any(library_of(base) == "torch" and base.__name__ == "Tensor" for base in kind.__mro__) and not (
        library_of(kind) == "torch" and kind.__name__ in _PLAIN_TENSORS
    ):
        mend = "use session.from_dtensor" if type(given).__name__ == "DTensor" else "pass a plain tensor"
        raise ParamError(
            f"{name} was given, a kind of torch.Tensor that may mean more than what lies in its memory: {mend}"
        )
    if getattr(given, "requires_grad", False) is True:
        raise ParamError(
            f"{name} that requires a gradient was given, of which nothing is recorded: pass x.detach(), or call "
            "uncut_mpi.matmul(comm, a, b), which records it"
        )
    for what, mend in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
        ask = getattr(given, what, None)
        if callable(ask) and ask() is True:
            raise ParamError(f"{name} whose sign is not in its memory yet was given: pass x.{mend}()")


def library_of(kind: type) -> str:
    """Return the module whose `from_dlpack` makes arrays of a type; empty for numpy's, cupy's and unknown ones."""
    return _LIBRARIES.get(kind.__module__.partition(".")[0], "")


def _capsule_of(given: Any, stream: dict[str, Any]) -> Any:
    refused: TypeError | None = None
    for words in ({"max_version": _OLDEST_VERSION_ASKED, "copy": False}, {"max_version": _OLDEST_VERSION_ASKED}, {}):
        try:
            return given.__dlpack__(**stream, **words)
        except TypeError as error:  # exporters of before these words
            refused = error
    assert refused is not None
    raise refused


def _dtype_of(code: int, bits: int, count: int, given: Any) -> np.dtype[Any]:
    if count == 1 and bits % 8 == 0:
        if (code, bits) in _NAMED:
            return _NAMED[code, bits]
        if code in _KINDS:
            with contextlib.suppress(TypeError):
                dtype: np.dtype[Any] = np.dtype(f"{_KINDS[code]}{bits // 8}")
                return dtype
    lanes = f" and {count} lanes" if count != 1 else ""
    raise ParamError(
        f"{type_text(given)} has elements of a type that is not supported (DLPack's code {code} of {bits} bits{lanes})"
        ": use float64, float32, float16, bfloat16, complex64, complex128, int8, float8_e4m3fn or float8_e5m2"
    )


# -- array interfaces ----------------------------------------------------------------------------


def from_array_interface(given: Any) -> np.ndarray[Any, Any]:
    """
    Return the array that an object shows by `__array_interface__`, in place.

    Raises
    ------
    ParamError
        If it shows a copy, or some of its elements are masked.
    """
    with translated(given):
        words = given.__array_interface__
        refuse_mask(given, words)
        if not isinstance(words.get("data"), tuple | None):
            raise ParamError(f"{type_text(given)} shows a copy of its memory: pass numpy.asarray(x)")
        array: np.ndarray[Any, Any] = np.asarray(given)
        if words.get("data") is not None and array.size and array.__array_interface__["data"][0] != words["data"][0]:
            raise ParamError(f"{type_text(given)} gives numpy other memory than it shows: pass numpy.asarray(x)")
    return array


def refuse_mask(given: Any, words: dict[str, Any]) -> None:
    """Raise ParamError if an array interface says that elements are masked."""
    if words.get("mask") is not None:
        raise ParamError(f"{type_text(given)} has a mask, which a product would not heed: pass an array without one")
