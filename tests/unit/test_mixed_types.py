"""What a product of A and B of one type and C of another would take: nothing looks at one type for all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.checks import make
from uncut_mpi.command import check
from uncut_mpi.errors import ParamError
from uncut_mpi.model import problem as problems
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType, Dtypes
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Role, Schedule
from uncut_mpi.planning.verify import verify
from uncut_mpi.view.traffic import traffic

WIDER, NARROWER = (DType.f16, DType.f16, DType.f32), (DType.f32, DType.f32, DType.f16)


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be products of any types: what A is says the arithmetic."""
    for module in (problems, check):
        monkeypatch.setattr(module, "arithmetic_of", lambda dtypes: dtypes[0])


def test_there_is_no_product_of_types_that_differ() -> None:
    with pytest.raises(ParamError, match="A is f32, B is f32, C is f16; let C be f32"):
        GemmProblem(8, 8, 8, NARROWER)
    assert GemmProblem(8, 8, 8, (DType.f16,) * 3) == GemmProblem(8, 8, 8, DType.f16)


def test_types_change_places_where_a_and_b_do(mixed: None) -> None:
    a, b, c = (StoredMatrix(8, 8, order) for order in ("F", "F", "C"))
    made = GemmProblem.from_operands(a, b, c, dtype=(DType.f16, DType.bf16, DType.f32))
    assert made.swapped
    assert made.dtypes == (DType.bf16, DType.f16, DType.f32)


@pytest.mark.parametrize("dtypes", [WIDER, NARROWER])
@pytest.mark.parametrize("place", ["h,h,h", "0,1,h", "0,0,0"])
@pytest.mark.parametrize("scheduler", ["kblocks", "uncut"])
def test_every_buffer_and_copy_is_of_its_matrix_type(mixed: None, scheduler: str, place: str, dtypes: Dtypes) -> None:
    problem, placement = GemmProblem(700, 600, 500, dtypes, reads_c=False), Placement.parse(place)
    machine = Machine.uniform(2)
    rings = {"device_memory": 1 << 20} if scheduler == "kblocks" else {}
    options = ScheduleOptions(scheduler=scheduler, **rings)
    verify(plan(dataclasses.replace(problem, reads_c=True), placement, 2, machine, options).schedule)
    made = plan(problem, placement, 2, machine, options).schedule
    verify(made)
    assert Schedule.decode(made.encode()).problem == problem
    buffers = made.buffers
    for matrix in MATRICES:
        found = {DType(code) for code in buffers["dtype"][buffers["matrix"] == matrix]}
        users = buffers["dtype"][(buffers["matrix"] == matrix) & (buffers["role"] == Role.USER)]
        assert {*users} == {problem.dtypes[matrix]}
        assert found <= {problem.dtypes[matrix], *([problem.accumulator] if matrix is Matrix.C else [])}
    to_host = {one.link: one for one in traffic(made).links}["device_to_host"]
    if place[-1] == "h":
        assert (to_host.nbytes, to_host.least_bytes) == (problem.bytes_of(Matrix.C),) * 2
        rate = float(machine.bandwidth_gb_per_s[0, machine.host]) * 1e9
        terms = bound(problem, placement, machine).terms
        assert np.isclose(terms["devices to host"], problem.bytes_of(Matrix.C) / (2 * rate))


def test_a_result_is_checked_by_the_type_that_it_has(mixed: None) -> None:
    case = make(40, 30, 50, DType.f16, alpha=1.0, beta=0.0)
    exact = case.a.astype(np.float64) @ case.b.astype(np.float64)
    for c_out, passed in ((exact.astype(np.float32), True), (exact.astype(np.float16).astype(np.float32), False)):
        assert case.check("full", c_out=c_out, dtype=WIDER).passed == passed
    assert case.check("full", c_out=exact.astype(np.float16)).passed


def test_float8_sums_may_be_off_by_what_tensor_cores_drop_and_no_more() -> None:
    case = make(40, 30, 512, DType.e4m3, alpha=1.0, beta=0.0)
    a, b = case.a.astype(np.float64), case.b.astype(np.float64)
    magnitude, types = np.abs(a) @ np.abs(b), (DType.e4m3, DType.e4m3, DType.f32)
    for dropped, passed in ((0.0, True), (2.0**-12, True), (2.0**-5, False)):
        c_out = (a @ b + dropped * magnitude).astype(np.float32)
        assert case.check("full", c_out=c_out, dtype=types).passed == passed
