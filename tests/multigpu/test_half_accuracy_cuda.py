"""Half types: what schedules add to the rounding error of one product that is summed in float32."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, Operands, as_numpy, expected, make_operands, release
from uncut_mpi.model.dtypes import DType

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.multigpu(num=1)]

# Root mean square of the error over that of one call: the project's limit for half types.
MOST = 1.1
_KINDS = {"f16": 2, "bf16": 14}  # CUDA_R_16F, CUDA_R_16BF
_COMPUTE_32F = 68
_SUMS_IN_FLOAT32 = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION

SCHEDULES = {
    "auto": {"scheduler": "auto"},
    "uncut": {"scheduler": "uncut", "tile": 256},
    "k-blocks": {"scheduler": "kblocks", "blocking": um.Blocking(first=128, block=512)},
    "combined at the owner": {
        "scheduler": "kblocks",
        "blocking": um.Blocking(first=128, block=512, combine="owner"),
    },
    "parts of k": {"scheduler": "kblocks", "blocking": um.Blocking(first=128, block=512, splits=2)},
    "cyclic": {"scheduler": "cyclic", "tile": 256},
    "bands": {"scheduler": "bands", "tile": 256},
}


def one_call(case: Case, operands: Operands) -> np.ndarray:
    """Return C after one cuBLAS product with all its sums in float32."""
    import cupy

    # Column-major: the arrays of the transposes.
    a, b, c = (cupy.asarray(np.ascontiguousarray(x.T)) for x in (operands.a_MK, operands.b_KN, operands.c_MN))
    alpha, beta = np.array(case.alpha, np.float32), np.array(case.beta, np.float32)
    handle, kind = cupy.cuda.device.get_cublas_handle(), _KINDS[case.dtype]
    before = cupy.cuda.cublas.getMathMode(handle)
    cupy.cuda.cublas.setMathMode(handle, _SUMS_IN_FLOAT32)
    try:
        cupy.cuda.cublas.gemmEx(
            handle, 0, 0, case.m, case.n, case.k, alpha.ctypes.data, a.data.ptr, kind, case.m, b.data.ptr, kind, case.k,
            beta.ctypes.data, c.data.ptr, kind, case.m, _COMPUTE_32F, -1,
        )  # fmt: skip
    finally:
        cupy.cuda.cublas.setMathMode(handle, before)
    return c.get().T


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rms_error_is_that_of_one_call(session, comm, dtype, name):
    if name == "parts of k" and session.size % 2:
        pytest.skip("parts of k want an even number of ranks")
    assert DType[dtype].is_half
    last = str(session.size - 1)
    for place in (("0", "0", "0"), ("0", last, "0"), ("h", "h", "h"), ("0", last, "h")):
        if name == "bands" and "h" in place:
            continue
        case = Case(520, 392, 2048, place=place, dtype=dtype, seed=5)
        operands = make_operands(session, case)
        session.poison_softbuf()
        options = um.ScheduleOptions(**SCHEDULES[name])
        session.gemm(operands.a, operands.b, operands.c, alpha=case.alpha, beta=case.beta, options=options)
        found, ratio = as_numpy(operands.c), 0.0
        if found is not None:
            exact, _ = expected(case, operands)
            least = rms(one_call(case, operands).astype(np.float64) - exact)
            ratio = rms(found.astype(np.float64) - exact) / least
        collective_assert(comm, ratio <= MOST, f"{case} by {name}: {ratio:.3f} of the error of one call")  # NaN fails
        release(session, operands)
