"""Half types: what schedules add to the rounding error of one product that is summed in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, Operands, as_numpy, expected, make_operands, release
from uncut_mpi.bench.baselines.cublas_calls import BlasLibrary
from uncut_mpi.device.cuda.library import load_blas
from uncut_mpi.model.dtypes import DType

# Root mean square of the error over that of one call: the project's limit for half types.
MOST = 1.1

_BLOCKING = um.Blocking(first=128, block=512)
SCHEDULES = {
    "auto": um.ScheduleOptions(),
    "uncut": um.ScheduleOptions(scheduler="uncut", tile=256),
    "k-blocks": um.ScheduleOptions(scheduler="kblocks", blocking=_BLOCKING),
    "combined at the owner": um.ScheduleOptions(
        scheduler="kblocks", blocking=dataclasses.replace(_BLOCKING, combine="owner")
    ),
    "parts of k": um.ScheduleOptions(scheduler="kblocks", blocking=_BLOCKING),  # as many as ranks
    "cyclic": um.ScheduleOptions(scheduler="cyclic", tile=256),
    "bands": um.ScheduleOptions(scheduler="bands", tile=256),
}


def one_call(case: Case, operands: Operands) -> np.ndarray:
    """Return C after one cuBLAS product with all its sums in float32."""
    import cupy

    library = BlasLibrary(load_blas().path)
    # Column-major: the arrays of the transposes.
    a, b, c = (cupy.asarray(np.ascontiguousarray(x.T)) for x in (operands.a_MK, operands.b_KN, operands.c_MN))
    handle = library.handle()
    extents, addresses = (case.m, case.n, case.k), (a.data.ptr, b.data.ptr, c.data.ptr)
    library.gemm(handle, DType[case.dtype], extents, (case.alpha, case.beta), addresses)
    cupy.cuda.runtime.deviceSynchronize()
    library.call("cublasDestroy_v2", handle)
    return c.get().T


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rms_error_is_that_of_one_call(session, comm, dtype, name):
    last = str(session.size - 1)
    options = SCHEDULES[name]
    if name == "parts of k":
        options = dataclasses.replace(options, blocking=dataclasses.replace(options.blocking, splits=session.size))
    for place in (("0", "0", "0"), ("0", last, "0"), ("h", "h", "h"), ("0", last, "h")):
        if name == "bands" and "h" in place:
            continue
        case = Case(520, 392, 2048, place=place, dtype=dtype, seed=5)
        operands = make_operands(session, case)
        session.poison_softbuf()
        session.gemm(*operands.abc, alpha=case.alpha, beta=case.beta, options=options)
        found, ratio = as_numpy(operands.c), 0.0
        if found is not None:
            exact, _ = expected(case, operands)
            least = rms(one_call(case, operands).astype(np.float64) - exact)
            ratio = rms(found.astype(np.float64) - exact) / least
        collective_assert(comm, ratio <= MOST, f"{case} by {name}: {ratio:.3f} of the error of one call")  # NaN fails
        release(session, operands)
