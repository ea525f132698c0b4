"""Random odd arrays given to `register`: each is an UncutError, or a matrix whose array is the input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import uncut_mpi as um
from tests.helpers.foreign import BFLOAT16, ArrayInterface, CudaInterface, Tensor, Units

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.host_backend]
GOOD_TYPES = ["f8", "f4", "f2", ml_dtypes.bfloat16]
TYPES = [
    "f8", "f4", "f2", ">f8", "<f4", ">f2", "i8", "i4", "u1", "?", "c8", "c16", "g", "O", "S3", "U2", "M8[s]", "f8,i4",
]  # fmt: skip
LAYOUTS = [
    "C", "F", "transposed", "part", "step", "backwards", "broadcast", "windows", "misaligned", "diagonal", "swapped",
]  # fmt: skip
WRAPS = [
    "none", "none", "none", "masked", "unmasked", "units", "matrix", "record", "memoryview", "list", "interface",
    "interface with mask", "interface of bytes", "cuda", "tensor", "old tensor", "read-only tensor", "tensor elsewhere",
    "bfloat16 tensor", "packed tensor", "read-only",
]  # fmt: skip
EXTENTS = st.one_of(st.integers(0, 4), st.sampled_from([0, 1, 5, 17]))


def base_array(draw, shape):
    kind = draw(st.sampled_from([*GOOD_TYPES * 6, *TYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]))
    count = int(np.prod(shape))
    return (np.arange(count) % 50).reshape(shape).astype(kind)


def laid_out(draw, shape):
    layout = draw(st.sampled_from(LAYOUTS))
    if layout == "part" and len(shape) == 2:
        return base_array(draw, (shape[0] + 2, shape[1] + 3))[1 : 1 + shape[0], 2 : 2 + shape[1]]
    array = base_array(draw, shape)
    if layout == "F":
        return np.asfortranarray(array)
    if layout == "transposed":
        return array.T
    if layout == "step" and array.ndim:
        return np.repeat(np.repeat(array, 2, 0), 3, -1)[::2, ..., ::3] if array.ndim > 1 else array[..., :1]
    if layout == "backwards" and array.ndim:
        return array[::-1]
    if layout == "broadcast":
        return np.broadcast_to(array, (3, *shape))
    if layout == "windows" and array.size > 1:
        return np.lib.stride_tricks.sliding_window_view(array.reshape(-1), 2)
    if layout == "misaligned" and array.size and not array.dtype.hasobject:
        raw = np.zeros(array.nbytes + 1, np.uint8)
        odd = np.ndarray(array.shape, array.dtype, raw[1:])
        odd[...] = array
        return odd
    if layout == "diagonal" and array.ndim == 2:
        return np.lib.stride_tricks.as_strided(array, (min(shape), 1), (sum(array.strides), 0))
    if layout == "swapped":
        return array.byteswap().view(array.dtype.newbyteorder()) if array.dtype.kind in "fiuc" else array
    return array


def wrapped(draw, array):
    """What is registered, and the array that it stands for."""
    wrap = draw(st.sampled_from(WRAPS))
    plain = array.dtype.kind in "fiuc" and array.dtype.isnative and array.dtype.itemsize <= 8
    aligned = plain and not any(step % array.itemsize for step in array.strides)
    if wrap in ("masked", "unmasked"):
        mask = draw(st.booleans()) if wrap == "masked" else False
        return np.ma.masked_array(array, mask=np.full(array.shape, mask)) if array.dtype.names is None else array
    if wrap == "units":
        return array.view(Units)
    if wrap == "matrix" and array.ndim == 2:
        return array.view(np.matrix)
    if wrap == "record":
        return array.view(np.recarray)
    if wrap == "list":
        return array.tolist()
    if wrap == "memoryview" and plain and array.dtype.kind != "c":
        return memoryview(array)
    if wrap == "interface":
        return ArrayInterface(array)
    if wrap == "interface with mask":
        return ArrayInterface(array, mask=ArrayInterface(np.zeros(array.shape, bool)))
    if wrap == "interface of bytes":
        return ArrayInterface(array, data=b"x" * array.nbytes)
    if wrap == "cuda":
        return CudaInterface(array)
    if wrap == "bfloat16 tensor" and array.dtype == ml_dtypes.bfloat16:
        return Tensor(array, BFLOAT16)
    if aligned and array.dtype.kind in "fiuc":
        if wrap == "tensor":
            return Tensor(array)
        if wrap == "old tensor":
            return Tensor(array, versioned=False)
        if wrap == "read-only tensor":
            return Tensor(array, flags=1)
        if wrap == "tensor elsewhere":
            return Tensor(array, device=(draw(st.integers(0, 20)), draw(st.integers(-1, 3))))
        if wrap == "packed tensor" and array.flags.c_contiguous:
            return Tensor(array, strides=False)
    if wrap == "read-only":
        array = array.view()
        array.flags.writeable = False
    return array


@st.composite
def odd_arrays(draw):
    shape = draw(
        st.one_of(st.tuples(EXTENTS, EXTENTS), st.tuples(EXTENTS, EXTENTS), st.lists(EXTENTS, max_size=4).map(tuple))
    )
    array = laid_out(draw, shape)
    return wrapped(draw, array), array


@settings(max_examples=1200, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(odd_arrays())
def check(session, seen, case):
    odd, array = case
    try:
        matrix = session.register(odd, root=0)
    except um.UncutError:
        seen["refused"] += 1
        return
    seen["taken"] += 1
    assert matrix.shape == array.shape
    assert matrix.array.dtype == array.dtype
    assert matrix.array.tobytes() == array.tobytes()
    assert np.shares_memory(matrix.array, array) or not array.size
    says_so = not isinstance(odd, Tensor)  # of which only the read-only kind does
    assert (not matrix.info.read_only) <= (array.flags.writeable if says_so else not odd.flags)
    stored = matrix.info.stored
    flat = matrix.address + array.itemsize * (1 if stored.order == "F" else stored.ld) * max(0, stored.rows - 1)
    assert not array.size or flat == array[-1:, :1].ctypes.data
    session.release(matrix)


def test_any_array_is_refused_or_read_as_it_is(comm, session):
    if comm.size > 1:
        pytest.skip("what a rank describes is the same on one")
    seen = {"refused": 0, "taken": 0}
    check(session, seen)
    assert min(seen.values()) > 150, seen
