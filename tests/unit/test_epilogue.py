"""What is done with C once it is summed: planned, proved and computed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings

from tests.helpers import fuzz, oracle
from tests.helpers.faults import set_rows
from uncut_mpi.errors import ParamError, PlanError, ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import EPILOGUES, Kind, Op
from uncut_mpi.planning.verify import verify


@settings(fuzz.SETTINGS, max_examples=60)
@given(fuzz.cases("epilogue", 4, 40))
def test_an_epilogue_comes_once_and_after_all_sums(case):
    fuzz.check(case)


@pytest.mark.parametrize("scales_only", [False, True])
@pytest.mark.parametrize("along", ["rows", "cols"])
def test_an_epilogue_that_is_missing_twice_or_elsewhere_is_refused(along, scales_only):
    problem = GemmProblem(24, 20, 300, DType.f64, scales_only=scales_only, epilogue=Epilogue("relu", along, bias=True))
    options = ScheduleOptions("kblocks", blocking=Blocking(splits=2))
    schedule = plan(problem, Places.parse("rows,cols,rows").bind(problem, 2), 2, Machine.uniform(2), options).schedule
    verify(schedule)
    written = np.flatnonzero(schedule.operands["op"] == EPILOGUES[along])
    assert len(written) > 1
    other = EPILOGUES["cols" if along == "rows" else "rows"]
    faults = {
        "what has not had its epilogue": {"op": Op.N},
        "begins with another element of its vectors|what has not had": {"op": other},
        "begins with another element": {"diagonal": schedule.operands["diagonal"][written[-1]] + 1},
    }
    for said, values in faults.items():
        faulty = set_rows(schedule, "operands", written[-1], **values)
        with pytest.raises(ScheduleError, match=said):
            verify(faulty)
        assert oracle.wrong_result(faulty)
    plain = dataclasses.replace(schedule, problem=dataclasses.replace(problem, epilogue=None))
    with pytest.raises(ScheduleError, match="what has had an epilogue"):
        verify(plain)


def fused(problem, place, ranks=2):
    """Return how many products write C with an epilogue, and how many sums do."""
    schedule = plan(problem, Places.parse(place).bind(problem, ranks), ranks, Machine.uniform(ranks)).schedule
    verify(schedule)
    first = schedule.tasks["first_operand"]
    ends = np.isin(schedule.operands["op"][first], [*EPILOGUES.values()])
    return tuple(int((ends & (schedule.tasks["kind"] == kind)).sum()) for kind in (Kind.GEMM, Kind.COMBINE))


@pytest.mark.parametrize("place", ["0,0,0", "rows,cols,rows", "0,1,0"])
@pytest.mark.parametrize("reads_c", [False, True])
def test_a_product_of_halves_writes_c_with_an_epilogue_that_the_library_has(place, reads_c):
    some = {"m": 128, "n": 64, "k": 96, "dtype": DType.bf16, "reads_c": reads_c}
    one = Epilogue("gelu", "rows", bias=True)
    for epilogue in (one, Epilogue("relu", "cols"), Epilogue("", "rows", bias=True)):
        gemms, sums = fused(GemmProblem(**some, epilogue=epilogue), place)
        assert gemms > 0
        assert sums == 0
    others = [
        {"epilogue": dataclasses.replace(one, along="cols")},
        {"epilogue": dataclasses.replace(one, scale=True)},
        {"dtype": DType.f32},
        {"dtype": (DType.bf16, DType.bf16, DType.f32)},
        {"m": 124},
        {"n": 60},
        {"k": 100},
    ]
    for changes in others:
        gemms, sums = fused(GemmProblem(**(some | {"epilogue": one} | changes)), place)
        assert gemms == 0
        assert sums > 0
    assert fused(GemmProblem(**some, epilogue=one), "cols,rows,cols")[0] == 0  # k comes in blocks


def test_a_product_that_writes_an_epilogue_of_its_own_is_refused():
    problem = GemmProblem(64, 64, 64, DType.bf16, epilogue=Epilogue("gelu", "rows", bias=True))
    schedule = plan(problem, Places.parse("0,0,0").bind(problem, 1), 1, Machine.uniform(1)).schedule
    (at,) = schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.GEMM]
    for said, values in {
        "what has not had its epilogue": {"op": Op.N},
        "begins with another element of its vectors": {"diagonal": 1},
        "op is unknown": {"op": Op.LOWER},
    }.items():
        with pytest.raises(ScheduleError, match=said):
            verify(set_rows(schedule, "operands", at, **values))
    wider = dataclasses.replace(schedule, problem=dataclasses.replace(problem, epilogue=Epilogue("gelu", scale=True)))
    with pytest.raises(ScheduleError, match="op is unknown"):
        verify(wider)


def test_a_row_major_c_has_its_vectors_along_the_other_extent():
    a, b = StoredMatrix(6, 4), StoredMatrix(4, 5)
    by_order = {
        order: GemmProblem.from_operands(
            a, b, StoredMatrix(6, 5, order), dtype=DType.f64, epilogue=Epilogue("gelu", "cols", bias=True)
        ).epilogue
        for order in "FC"
    }
    assert (by_order["F"].along, by_order["C"].along) == ("cols", "rows")
    assert by_order["C"].transposed == by_order["F"]


def test_what_no_epilogue_is_for_is_an_error():
    with pytest.raises(ParamError, match="activation is 'tanh'"):
        Epilogue("tanh")
    with pytest.raises(ParamError, match="along 'k'"):
        Epilogue(along="k")
    for dtype in (DType.c64, DType.i8):
        with pytest.raises(ParamError, match="for real types"):
            GemmProblem(3, 3, 3, dtype, epilogue=Epilogue())
    with pytest.raises(ParamError, match="no batch"):
        GemmProblem(2, 2, 2, DType.f64, batch=((1, 1, 1), (1, 1, 1)), epilogue=Epilogue())
    problem = GemmProblem(8, 8, 8, DType.f64, epilogue=Epilogue("relu"))
    with pytest.raises(PlanError, match="ask for kblocks or auto"):
        plan(problem, Places.parse("0,0,0").bind(problem, 1), 1, Machine.uniform(1), ScheduleOptions("uncut"))
