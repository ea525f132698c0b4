"""Arrays that are not numpy's: classes that show memory by the protocols, and odd ones whose meaning lies elsewhere."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from uncut_mpi.device.views import BufferExtent

CPU, CUDA, CUDA_HOST = 1, 2, 3
BFLOAT16 = (4, 16)


class Units(np.ndarray):
    """As quantities are: the unit is not in the buffer."""

    unit = "cm"


class ArrayInterface:
    """Shows the memory of a numpy array by `__array_interface__`, with other words added or changed."""

    def __init__(self, array: np.ndarray, **words: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **words}


class CudaInterface:
    """Says that it lies on a CUDA device."""

    def __init__(self, array: np.ndarray, **words: Any) -> None:
        self.__cuda_array_interface__ = {**array.__array_interface__, **words}


class OnlyArray:
    """As a data frame: it makes an array, and shows no memory."""

    def __array__(self, dtype=None, copy=None):
        return np.eye(3)


class Sparse:
    """As scipy's matrices."""

    shape, dtype = (3, 3), np.dtype(np.float64)

    def toarray(self):
        return np.eye(3)


class Broken:
    """Has the protocol, and fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __dlpack__(self, **words):
        raise self.error

    def __dlpack_device__(self):
        return CPU, 0


# -- DLPack --------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Tensor:
    """
    Shows the memory of a numpy array by DLPack, as other libraries' tensors do.

    Parameters
    ----------
    array : ndarray
        What it is a tensor of.
    kind : tuple of int, optional
        Its type's code and bits; by default those of the array.
    versioned : bool
        Whether it knows DLPack 1, which says whether memory is read only.
    flags : int
        1 where it is read only, 2 where it is a copy.
    strides : bool
        False leaves them out, as was allowed for rows without gaps.
    byte_offset : int
        Bytes between what it calls its data and its first element.
    device : tuple of int
        Where it says it lies.
    words : str
        Attributes that it has besides, such as ``requires_grad=True``.
    """

    def __init__(
        self, array, kind=None, *, versioned=True, flags=0, strides=True, byte_offset=0, device=(CPU, 0), **words
    ):
        self.array, self.versioned, self.device, self.flags = array, versioned, device, flags
        self.asked: list[dict[str, Any]] = []
        code, bits = kind or ({"f": 2, "i": 0, "u": 1, "c": 5, "b": 6}[array.dtype.kind], 8 * array.itemsize)
        extents = ctypes.c_int64 * array.ndim
        self._keep = shape, steps = extents(*array.shape), extents(*(step // array.itemsize for step in array.strides))
        tensor = _Tensor(
            array.ctypes.data - byte_offset, device, array.ndim, code, bits, 1, shape,
            steps if strides else ctypes.POINTER(ctypes.c_int64)(), byte_offset,
        )  # fmt: skip
        self._managed = _Versioned(version=(1, 0), flags=flags, tensor=tensor) if versioned else _Managed(tensor=tensor)
        for name, value in words.items():
            setattr(self, name, value)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **words):
        self.asked.append({"stream": stream, **words})
        if not self.versioned and words:
            raise TypeError(f"unexpected keyword argument {next(iter(words))!r}")
        return _new(ctypes.addressof(self._managed), b"dltensor_versioned" if self.versioned else b"dltensor", None)


def of_torch(name: str) -> type:
    """A class of that name below a class that stands for torch's tensor."""
    base = type("Tensor", (Tensor,), {"__module__": "torch"})
    return type(name, (base,), {"__module__": "torch.masked"})


class Consumed(Tensor):
    """Gives a capsule that somebody has taken already."""

    def __dlpack__(self, **words):
        return _new(ctypes.addressof(self._managed), b"used_dltensor", None)


def stretched(array: np.ndarray, **fields: int) -> Tensor:
    """A tensor whose description is wrong: `rows` of it, or the address of its `data`."""
    given = Tensor(array)
    if "rows" in fields:
        given._keep[0][0] = fields["rows"]
    if "data" in fields:
        given._managed.tensor.data = fields["data"]
    return given


# -- odd arrays of numpy -------------------------------------------------------------------------


def misaligned() -> np.ndarray:
    """Elements of 8 bytes at an odd address."""
    return np.frombuffer(bytearray(3 * 3 * 8 + 1), np.uint8)[1:].view(np.float64).reshape(3, 3)


def cut_file(folder) -> np.ndarray:
    """A view of a file that has been cut short since: to touch it is a bus error."""
    path = os.path.join(folder, "cut")
    with open(path, "wb") as file:
        file.write(bytes(2 * mmap.PAGESIZE))
    array = np.memmap(path, np.float64, "r+", shape=(mmap.PAGESIZE // 64, 16))
    os.truncate(path, mmap.PAGESIZE)
    return array


def closed_pages() -> np.ndarray:
    """An array that says it can be written, of pages that the system keeps from it."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ)
    return np.asarray(BufferExtent(address, 3 * 3 * 8, memory)).view(np.float64).reshape(3, 3)
