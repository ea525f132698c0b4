"""Other libraries' products on real GPUs, each in its process, wherever the matrices are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.baselines import check_every_setting, dealt_tasks, expected, make_task, wide
from uncut_mpi.bench.processes import BaselineError, BaselineProcess
from uncut_mpi.device.cuda import visible_devices
from uncut_mpi.model.dtypes import MEASURED, DType


@pytest.fixture(scope="module")
def process(request):
    """A library's process with all GPUs, and how many these are."""
    uuids, reason = visible_devices()
    assert uuids, reason
    started = BaselineProcess(request.param, "cuda", uuids)
    yield started, len(uuids)
    started.close()


@pytest.mark.parametrize("process", ["cublas", "cublasxt", "jax", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", MEASURED, ids=lambda one: one.name)
@pytest.mark.parametrize("place", ["h,h,h", "0,0,0", "last,h,0", "h,last,h"])
def test_a_library_multiplies_what_is_where_it_is(process, place, dtype):
    library, devices = process
    where = tuple({"h": None, "0": 0, "last": devices - 1}[word] for word in place.split(","))
    m, n, k = 768, 512, 640
    with make_task(m, n, k, dtype, where, tuple(range(devices))) as (task, matrices):
        try:
            begun = library.ask({"do": "begin", "task": task.to_json()})
        except BaselineError as error:
            if library.alive and ("is not installed" in str(error) or "has no product" in str(error)):
                pytest.skip(str(error))
            raise
        assert begun["call_s"] > 0
        assert begun["setting"] in begun["settings"]
        assert not begun["failed"], begun["failed"]
        assert len(library.ask({"do": "time", "count": 4})["samples_s"]) == 4
        library.ask({"do": "end"})
        found, wanted = wide(matrices.out), expected(task, matrices)
        scale = abs(task.alpha) * np.abs(wide(matrices.a)) @ np.abs(wide(matrices.b)) + 2
        # γ_{k+3} of the accumulator, twice for tensor cores' truncation; roundings of operands and of the result.
        relative = 2 * (k + 3) * dtype.accumulator.unit_roundoff + 2.01 * dtype.operand_roundoff
        bound = relative * scale + 2 * dtype.unit_roundoff * np.abs(wanted)
        assert (np.abs(found - wanted) <= bound).all(), float((np.abs(found - wanted) / bound).max())


@pytest.mark.parametrize("process", ["cublasmp", "dtensor", "jax"], indirect=True)
@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.f16, DType.bf16, DType.c128], ids=lambda one: one.name)
def test_a_library_multiplies_what_is_dealt_to_its_gpus(process, dtype):
    library, devices = process
    for placement, task, matrices in dealt_tasks(dtype, devices):
        try:
            check_every_setting(library.ask, task, matrices, placement)
        except BaselineError as error:
            if library.alive and "is not installed" in str(error):
                pytest.skip(str(error))
            raise


def test_the_floor_is_timed_on_all_gpus():
    uuids, _ = visible_devices()
    every = tuple(range(len(uuids)))
    started = BaselineProcess("floor", "cuda", uuids)
    for place in (("rows", "cols", "rows"), (None, None, None)):
        with make_task(768, 512, 640, DType.f32, place, every) as (task, _):
            begun = started.ask({"do": "begin", "task": task.to_json()})
            assert begun["library"].startswith("cuBLAS")
            assert min(started.ask({"do": "time", "count": 3})["samples_s"]) > 0
            started.ask({"do": "end"})
    started.close()
