"""Operands of which one triangle is read: planned with all of them in each product, proved, and multiplied in place."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers import faults, interpret
from tests.helpers.layouts import user_parts
from uncut_mpi.errors import ParamError, ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import KINDS, OP_BITS, Form
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Matrix
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning import chunks
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import AWAIT_DTYPE, Kind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify

INVERSE = Form("inverse", "lower")
EVERY = [
    Form(kind, triangle, unit)
    for kind, triangle, unit in itertools.product(KINDS, ("lower", "upper"), (False, True))
    if not unit or kind in KINDS[2:]
]


def planned(problem, places, ranks, options=None):
    placement = Places.parse(places).bind(problem, ranks)
    return plan(problem, placement, ranks, Machine.uniform(ranks), options).schedule


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_form_is_in_a_code_and_a_header(form):
    assert Form.of_code(form.code) == Form.of_code(form.code | OP_BITS) == form
    assert form.transposed.transposed == form != form.transposed
    problem = GemmProblem(9, 20, 9, DType.f64, forms=(form, None), reads_c=False)
    schedule = planned(problem, "0,rows,h", 2)
    assert Schedule.decode(schedule.encode()).problem == problem
    assert Schedule.decode(schedule.encode()).problem != dataclasses.replace(problem, forms=(form.transposed, None))
    for rank, program in lower(schedule).lists.items():
        first = program.operations["first_operand"][program.operations["code"] == Code.GEMM]
        assert (program.operands["op"][first + 1] == form.code).all(), rank
        assert (program.operands["op"][first + 2] == 0).all(), rank


@pytest.mark.parametrize("places", ["1,0,0", "rows,rows,rows", "rows,cols,cols", "h,h,h", "cols,1,1", "h,rows,rows"])
@pytest.mark.parametrize("kind", ["triangular", "inverse"])
def test_what_a_triangular_matrix_is_multiplied_by_may_be_the_result(monkeypatch, places, kind):
    allocate = interpret._allocate

    def in_place(schedule, data):
        memory = allocate(schedule, data)
        for one, (c, _, _) in zip(*(user_parts(schedule, which, memory) for which in (own, Matrix.C)), strict=True):
            memory[c] = memory[one[0]]
        return memory

    monkeypatch.setattr(interpret, "_allocate", in_place)
    for ranks, right in itertools.product((2, 3, 5), (False, True)):
        own, form = Matrix.A if right else Matrix.B, Form(kind, "lower")
        (m, n), forms = ((26, 17), (None, form)) if right else ((17, 26), (form, None))
        words = places.split(",")
        problem = GemmProblem(m, n, 17, DType.f64, "N", "N", reads_c=False, forms=forms)
        schedule = planned(problem, ",".join([words[1], words[0], words[2]] if right else words), ranks)
        verify(schedule, lower(schedule))
        for seed in range(8):
            data = interpret.random_data(problem, seed)
            assert interpret.mismatch(schedule, data, interpret.random_order(schedule, seed)) == ""


def test_the_proof_refuses_a_product_with_a_part_of_a_form_and_a_list_that_has_another():
    plain = GemmProblem(16, 16, 16, DType.f64, reads_c=False)
    problem = dataclasses.replace(plain, forms=(INVERSE, None))
    split = planned(plain, "0,0,0", 2, ScheduleOptions("kblocks", grid=(2, 1)))
    with pytest.raises(ScheduleError, match=r"A is inverse, and task \d+ \(GEMM.* has a part of it"):
        verify(dataclasses.replace(split, problem=problem))
    schedule = planned(problem, "0,0,0", 2)
    lowered = lower(schedule)
    operands = lowered.lists[0].operands.copy()
    operands["op"] ^= np.where(operands["op"] > OP_BITS, 8, 0).astype(np.uint8)
    lowered.lists[0] = dataclasses.replace(lowered.lists[0], operands=operands)
    with pytest.raises(ScheduleError, match="has another op than the schedule says"):
        verify(schedule, lowered)


def test_the_proof_refuses_a_second_reading_of_what_may_be_the_result():
    schedule = planned(GemmProblem(16, 16, 16, DType.f64, reads_c=False, forms=(INVERSE, None)), "0,0,0", 2)
    found = set()
    for task in np.flatnonzero(schedule.tasks["kind"] == Kind.COPY).tolist():
        again = faults.changed(
            schedule,
            tasks=np.insert(schedule.tasks, task + 1, schedule.tasks[task]),
            awaits=schedule.awaits + (schedule.awaits > task).astype(AWAIT_DTYPE),
        )
        try:
            verify(again)
        except ScheduleError as error:
            found.add(str(error))
    assert any("so that B may be C, and some of it is read twice" in text for text in found), found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"forms": (INVERSE, INVERSE)}, "by one matrix without a form"),
        ({"m": 9}, "has to be square"),
        ({"dtype": DType.bf16}, "of f32, f64, c64 and c128"),
        ({"reads_c": True}, "beta has to be 0"),
        ({"trans_b": "T"}, "would be transposed"),
        ({"forms": (Form("symmetric", "lower"), None), "trans_a": "T"}, "would be transposed"),
    ],
)
def test_a_problem_that_no_product_of_a_form_has_is_refused(given, words):
    usual = {"m": 8, "n": 5, "k": 8, "dtype": DType.f64, "forms": (INVERSE, None), "reads_c": False}
    with pytest.raises(ParamError, match=words):
        GemmProblem(**usual | given)


@pytest.mark.parametrize(
    ("given", "words"), [(("odd", "lower"), "odd"), (("inverse", "up"), "up"), (("symmetric", "lower", True), "unit")]
)
def test_a_form_is_one_of_those_there_are(given, words):
    with pytest.raises(ParamError, match=words):
        Form(*given)


@pytest.mark.parametrize("orders", ["FF", "FC", "CF", "CC"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_caller_s_form_is_that_of_what_is_stored(orders, kind):
    of_a, of_c = orders
    if kind == "hermitian" and of_a != of_c:
        return  # which is read in C's order
    form = Form(kind, "lower")
    a, b = StoredMatrix(8, 8, of_a), StoredMatrix(8, 5, of_c)
    problem = GemmProblem.from_operands(a, b, b, dtype=DType.c128, forms=(form, None), reads_c=False)
    at = 0 if of_c == "F" else 1
    stored = problem.forms[at]
    assert stored == (form if of_a == "F" else form.transposed)
    assert problem.forms[1 - at] is None
    op = (problem.trans_a, problem.trans_b)[at]
    assert op == ("N" if of_a == of_c or kind == "symmetric" else "T")
    assert problem.flops == (2 if kind in KINDS[:2] else 1) * 8 * 8 * 5


def test_chunks_leave_a_form_whole(monkeypatch):
    monkeypatch.setattr(chunks, "tasks_of", lambda setting: setting.problem.m * setting.problem.n)
    monkeypatch.setattr(chunks, "MOST_TASKS", 1000)
    monkeypatch.setattr(chunks, "STEP", 8)
    for forms, (m, n), axis in (((INVERSE, None), (64, 40), 1), ((None, INVERSE), (40, 64), 0)):
        problem = GemmProblem(m, n, 64, DType.f64, forms=forms, reads_c=False)
        machine, placement = Machine.uniform(2), Places.parse("h,h,h").bind(problem, 2)
        setting = Setting.of(problem, placement, 2, machine, ScheduleOptions(device_memory=60_000))
        found = chunks.chunks_of(setting)
        assert found is not None
        assert found.axis == axis
        for extent in found.extents:
            part, where = chunks.chunk_of(problem, placement, axis, extent)
            assert part.forms == forms
            schedule = plan(part, where, 2, machine).schedule
            verify(schedule, lower(schedule))
