"""What failures of CUDA's calls become."""

from __future__ import annotations

import pytest

from uncut_mpi import _native
from uncut_mpi.device.cuda.library import OUT_OF_MEMORY, device_errors
from uncut_mpi.errors import CapacityError, DeviceError


def test_memory_that_ran_out_says_what_to_do():
    with (
        pytest.raises(CapacityError, match="allocating: out of memory; free device memory"),
        device_errors("allocating"),
    ):
        raise _native.CudaError("out of memory", OUT_OF_MEMORY)
    told = pytest.raises(CapacityError, match=r"^using: out of memory; start fewer$")
    with told, device_errors("using", "start fewer"):
        raise _native.CudaError("out of memory", OUT_OF_MEMORY)


def test_any_other_failure_is_a_device_error():
    with pytest.raises(DeviceError, match=r"^copying: illegal address$"), device_errors("copying", "start fewer"):
        raise _native.CudaError("illegal address", 700)
