"""The static proof: right schedules pass, every planted fault is found, and nothing else is refused."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest

from tests.helpers import oracle
from tests.helpers.faults import (
    FAULTS,
    changed,
    places,
    set_rows,
    spoiled,
    with_fields,
    with_operations,
    with_program,
)
from tests.helpers.host_copies import joined_by_hosts, random_copies
from tests.helpers.schedules import SummaOptions, random_case, summa
from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location, host_index, location_index
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import CIn, GemmProblem, ResultPart
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import Code, OperationList, lower, tables_in_core
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import AWAIT_DTYPE, MAX_LANES, Factor, Kind, LaneKind, Matrix, Op, Role, Schedule
from uncut_mpi.planning.verify import Proof, follower_of, verify
from uncut_mpi.planning.verify_lists import verify_lists

SEEDS = range(60)
Case: TypeAlias = tuple[random.Random, Schedule, list[OperationList]]


def refusal(schedule: Schedule) -> str:
    """Return what `verify` says against a schedule, or an empty string."""
    try:
        verify(schedule)
    except ScheduleError as error:
        return str(error)
    return ""


# -- right schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize("first_seed", range(0, 300, 100))
def test_right_schedules_and_their_lists_are_proven(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        rng = random.Random(seed)
        schedule = random_case(rng, max_ranks=rng.choice((2, 4, 8, 64)))
        proof = verify(schedule, lower(schedule))
        writes = int((schedule.tasks["kind"] != Kind.JOIN).sum())
        assert (proof.tasks, proof.writes) == (len(schedule.tasks), writes)
        assert proof.reads == int(schedule.tasks["num_operands"].sum()) - writes


def test_a_proof_counts_what_it_checked() -> None:
    problem = GemmProblem(4, 6, 8, DType.f64)
    schedule = summa(problem, Placement.parse("1,1,0"), 2, options=SummaOptions(steps=2, c_mode="fetch"))
    # Two steps of two fetches and one GEMM, straight into C with beta in the first.
    assert verify(schedule, lower(schedule)) == Proof(tasks=6, reads=4 + 6, writes=6, waits=4)


# -- faults in schedules: each verdict is compared with the oracle's -------------------------------

LEAST_SPOILED = {"shift_region": 15, "skip_a_task": 50, "change_a_factor": 30}
"""How many of the random schedules a fault must at least spoil for the test to mean something; 20 where not named."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_verify_refuses_what_the_oracle_calls_wrong_and_nothing_else(fault) -> None:
    assert spoiled(fault, random_case, len(SEEDS)) >= LEAST_SPOILED.get(fault.__name__, 20)


# -- faults against single rules -------------------------------------------------------------------


def plain(placement: str = "1,0,0", ranks: int = 2, *, dtype: DType = DType.f64, **more: object) -> Schedule:
    """Return a small schedule on rank 0 alone; `more` holds fields of the problem and of SummaOptions."""
    names = {field.name for field in dataclasses.fields(SummaOptions)}
    options = SummaOptions(**{name: value for name, value in more.items() if name in names})
    about = {"m": 6, "n": 8, "k": 12, **{name: value for name, value in more.items() if name not in names}}
    return summa(GemmProblem(dtype=dtype, **about), Placement.parse(placement), ranks, options=options)


def tasks_of(schedule: Schedule, kind: Kind) -> list[int]:
    return np.flatnonzero(schedule.tasks["kind"] == kind).tolist()


def set_operand(schedule: Schedule, task: int, place: int, **fields: int) -> Schedule:
    return set_rows(schedule, "operands", schedule.tasks["first_operand"][task] + place, **fields)


def refused(schedule: Schedule, *words: str) -> None:
    message = refusal(schedule)
    assert message, "verify accepted it"
    for word in words:
        assert word in message


def test_an_unordered_read_names_both_tasks() -> None:
    schedule = plain()
    gemm = tasks_of(schedule, Kind.GEMM)[0]
    refused(
        set_rows(schedule, "tasks", gemm, num_awaits=0),
        f"task {gemm} (GEMM, rank 0, lane {schedule.tasks['lane'][gemm]}",
        "without awaiting what wrote it",
        "(COPY, rank 1, lane ",
        "PANEL of A, device of rank 0",
    )


def test_panels_overwritten_while_they_are_read_are_refused() -> None:
    schedule = plain(steps=3, places=1)
    late = tasks_of(schedule, Kind.COPY)[1]
    mutant = set_rows(schedule, "tasks", late, num_awaits=0)
    refused(mutant, f"task {late} (COPY", "without awaiting a task that reads it", "(GEMM")


def test_alpha_may_be_applied_to_the_finished_sum() -> None:
    schedule = plain(steps=2)
    for task in tasks_of(schedule, Kind.GEMM):
        schedule = set_operand(schedule, task, 1, factor=Factor.ONE)
    combine = tasks_of(schedule, Kind.COMBINE)[0]
    verify(set_operand(schedule, combine, 2, factor=Factor.ALPHA))


@pytest.mark.parametrize(
    ("kind", "number", "place", "fields", "words"),
    [
        (Kind.GEMM, 0, 1, {"factor": Factor.ONE}, "only some of its terms"),
        (Kind.GEMM, 0, 2, {"factor": Factor.ALPHA}, "op(B) by 1"),
        (Kind.GEMM, 1, 3, {"factor": Factor.BETA}, "beta is applied twice"),
        (Kind.COMBINE, 0, 2, {"factor": Factor.ALPHA}, "alpha is applied twice"),
        (Kind.COMBINE, 0, 2, {"factor": Factor.BETA}, "belongs to C_in alone"),
        (Kind.COPY, 0, 0, {"factor": Factor.ALPHA}, "the written operand has a factor or is transposed"),
        (Kind.COPY, 0, 0, {"op": Op.T}, "the written operand has a factor or is transposed"),
    ],
)
def test_a_factor_or_op_out_of_place_is_refused(
    kind: Kind, number: int, place: int, fields: dict[str, int], words: str
) -> None:
    schedule = plain(steps=2, c_mode="fetch" if place == 3 else "lazy")
    refused(set_operand(schedule, tasks_of(schedule, kind)[number], place, **fields), words)


def test_a_missing_k_block_is_named() -> None:
    schedule = plain(steps=3)
    without = set_rows(schedule, "tasks", tasks_of(schedule, Kind.GEMM)[1], kind=Kind.JOIN, num_operands=0)
    refused(without, "k [0, 4) and [8, 12)", "k is [0, 12)")


def test_a_k_block_summed_twice_is_named() -> None:
    schedule = plain(steps=3)
    gemm = tasks_of(schedule, Kind.GEMM)[1]
    tasks = np.insert(schedule.tasks, gemm + 1, schedule.tasks[gemm])
    awaits = schedule.awaits + (schedule.awaits > gemm).astype(AWAIT_DTYPE)
    refused(changed(schedule, tasks=tasks, awaits=awaits), "k [4, 8) is summed twice")


@pytest.mark.parametrize("mode", ["fetch", "lazy", "owner"])
def test_c_read_although_beta_is_zero_is_refused(mode: str) -> None:
    for placement in ("0,0,0", "0,1,h", "1,1,1"):
        schedule = plain(placement, c_mode=mode)
        problem = dataclasses.replace(schedule.problem, reads_c=False)
        refused(dataclasses.replace(schedule, problem=problem), "nothing that may be read")


def test_inputs_read_although_alpha_is_zero_are_refused() -> None:
    schedule = plain()
    problem = dataclasses.replace(schedule.problem, scales_only=True)
    refused(dataclasses.replace(schedule, problem=problem), "A and B of a problem without product")


@pytest.mark.parametrize("place", [1, 2])
def test_another_transposition_than_the_problem_s_is_refused(place: int) -> None:
    for trans in ("N", "T"):
        schedule = plain(m=4, n=4, k=4, steps=1, trans_a=trans, trans_b=trans)
        flipped = Op.T if trans == "N" else Op.N
        refused(set_operand(schedule, tasks_of(schedule, Kind.GEMM)[0], place, op=flipped), "the problem says")


def test_a_and_b_exchanged_are_refused() -> None:
    schedule = plain("0,0,0", m=4, n=4, k=4, steps=1)
    first = int(schedule.tasks["first_operand"][tasks_of(schedule, Kind.GEMM)[0]])
    b_and_a = schedule.operands["region"][[first + 2, first + 1]]
    refused(set_rows(schedule, "operands", [first + 1, first + 2], region=b_and_a), "op(A) reads a piece of B")


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16])
@pytest.mark.parametrize("mode", ["fetch", "lazy", "owner"])
def test_half_types_summed_in_half_are_refused(dtype: DType, mode: str) -> None:
    for steps in (1, 3):
        schedule = plain("0,0,1" if mode == "fetch" else "1,1,0", dtype=dtype, c_mode=mode, steps=steps)
        sums = (schedule.buffers["matrix"] == Matrix.C) & (schedule.buffers["dtype"] == DType.f32)
        assert sums.any()
        refused(set_rows(schedule, "buffers", sums, dtype=dtype), "half types round once" if mode != "fetch" else "")


def test_a_half_product_in_one_gemm_may_be_rounded_by_it() -> None:
    schedule = plain("0,0,1", dtype=DType.f16, c_mode="lazy", steps=1, reads_c=False)
    rounded = set_rows(schedule, "buffers", schedule.buffers["dtype"] == DType.f32, dtype=DType.f16)
    verify(set_rows(rounded, "tasks", tasks_of(schedule, Kind.COMBINE)[0], kind=Kind.COPY))


def test_sums_kept_in_a_foreign_type_are_refused() -> None:
    schedule = plain()
    partial = (schedule.buffers["matrix"] == Matrix.C) & (schedule.buffers["role"] == Role.PANEL)
    refused(set_rows(schedule, "buffers", np.argmax(partial), dtype=DType.f32), "kept as f32")


def test_inputs_of_a_foreign_type_are_refused() -> None:
    schedule = plain()
    panel = np.flatnonzero(schedule.buffers["matrix"] == Matrix.A)[-1]
    refused(set_rows(schedule, "buffers", panel, dtype=DType.f32), "does not convert types")


@pytest.mark.parametrize("placement", ["h1,0,0", "0,h1,0", "0,0,h1"])
def test_a_copy_issued_by_a_rank_that_cannot_reach_its_end_is_refused(placement: str) -> None:
    of_rank_0 = set_rows(set_rows(plain(placement, overlap=False), "tasks", ..., rank=0), "lanes", ..., rank=0)
    refused(of_rank_0, "rank 0 cannot reach", "rank 1 has to issue this copy")


@pytest.mark.parametrize("kind", [Kind.GEMM, Kind.COMBINE])
def test_computing_in_another_rank_s_memory_is_refused(kind: Kind) -> None:
    schedule = plain("0,0,0")
    lanes = np.concatenate((schedule.lanes, schedule.lanes[:1]))
    lanes["rank"][-1] = 1
    elsewhere = set_rows(schedule, "tasks", tasks_of(schedule, kind)[0], rank=1, lane=len(lanes) - 1)
    refused(changed(elsewhere, lanes=lanes), f"({kind.name}, rank 1", "rank 1 cannot compute on")


def test_writing_the_caller_s_inputs_is_refused() -> None:
    schedule = plain("0,0,0", m=4, n=4, k=4, steps=1, reads_c=False)
    gemm = schedule.operands_of(tasks_of(schedule, Kind.GEMM)[0])
    operands = np.concatenate((schedule.operands, gemm[[1, 0]]))  # A := C
    operands["factor"][-2:], operands["op"][-2:] = Factor.ONE, Op.N
    tasks = np.concatenate((schedule.tasks, schedule.tasks[-1:]))
    tasks["kind"][-1], tasks["num_operands"][-1], tasks["first_operand"][-1] = Kind.COPY, 2, len(operands) - 2
    refused(changed(schedule, tasks=tasks, operands=operands), "it writes the caller's buffer 0 (USER of A")


@pytest.mark.parametrize(
    ("kind", "count", "words"),
    [
        (Kind.COPY, 1, "a COPY reads one region"),
        (Kind.GEMM, 2, "a GEMM has 3 or 4 operands"),
        (Kind.COMBINE, 0, "it writes nothing"),
    ],
)
def test_a_wrong_number_of_operands_is_refused(kind: Kind, count: int, words: str) -> None:
    schedule = plain()
    refused(set_rows(schedule, "tasks", tasks_of(schedule, kind)[0], num_operands=count), words)


def test_a_join_with_operands_is_refused() -> None:
    refused(set_rows(plain(), "tasks", -1, kind=Kind.JOIN), "a JOIN has no operands")


class Hand:
    """A schedule written by hand: 4×4×4 on rank 0, where A, B, C (buffers 0 to 2) and four panels 3 to 6 lie."""

    def __init__(self, dtype: DType = DType.f64, problem: type[GemmProblem] = GemmProblem) -> None:
        self.builder = ScheduleBuilder(1, problem(4, 4, 4, dtype), Placement.parse("0,0,0"))
        for at in range(7):
            role = {"role": Role.USER, "matrix": Matrix(at)} if at < 3 else {"role": Role.STAGING, "offset": at * 256}
            self.builder.buffer(at=0, rows=4, cols=4, dtype=dtype, **role)

    def task(self, kind: Kind, write: RegionRef | int, *reads: tuple[RegionRef | int, Factor], lane: int = 0) -> Hand:
        """Append a task that awaits nothing; an integer stands for the whole buffer."""
        whole = [(whole_of(region), factor, Op.N) for region, factor in reads]
        self.builder.task(kind, self.builder.compute_lane(0, lane), whole_of(write), whole)
        return self

    def done(self) -> Schedule:
        return self.builder.build(scheduler="uncut", grid=(1, 1), tile=0)


def whole_of(region: RegionRef | int) -> RegionRef:
    return RegionRef(region, 0, 0, 4, 4) if isinstance(region, int) else region


ONE, ALPHA, BETA, ZERO = Factor.ONE, Factor.ALPHA, Factor.BETA, Factor.ZERO


def test_two_writes_without_order_are_refused_though_nothing_reads_them() -> None:
    hand = Hand().task(Kind.GEMM, 2, (0, ALPHA), (1, ONE), (2, BETA)).task(Kind.COPY, 3, (0, ONE))
    verify(hand.done())
    hand.task(Kind.COPY, 3, (0, ONE), lane=1)
    refused(hand.done(), "task 2 (COPY", "without awaiting the task that wrote it, task 1 (COPY")


@pytest.mark.parametrize("part", [(0, 0, 4, 2), (0, 2, 4, 2), (0, 0, 2, 4), (2, 0, 2, 4), (1, 1, 2, 2)])
def test_a_part_of_what_is_read_is_not_overwritten_without_order(part: tuple[int, int, int, int]) -> None:
    hand = Hand().task(Kind.COPY, 3, (2, ONE), lane=1)
    refused(hand.task(Kind.COMBINE, RegionRef(2, *part)).done(), "without awaiting a task that reads it, task 0 (COPY")


SHORT, PART = RegionRef(3, 0, 0, 3, 4), RegionRef(3, 0, 0, 4, 3)
PRODUCT = (Kind.GEMM, 3, (0, ALPHA), (1, ONE))
COPIES = [(Kind.COPY, 3, (0, ONE)), (Kind.COPY, 4, (1, ONE)), (Kind.COPY, 5, (2, ONE))]


def columns(buffer: int, first: int) -> RegionRef:
    """Return two columns of a buffer."""
    return RegionRef(buffer, 0, first, 4, 2)


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        ("a piece of A cannot be a term of C", [(Kind.COMBINE, 2, (0, ONE), (2, BETA))]),
        ("alpha is applied to C_in", [(Kind.COMBINE, 3, (2, ALPHA))]),
        ("C_in is summed twice: beta is applied twice", [COPIES[2], (Kind.COMBINE, 2, (2, BETA), (5, BETA))]),
        ("C_in is summed without beta", [PRODUCT, (Kind.COMBINE, 2, (2, ONE), (3, ONE))]),
        ("C_in is summed without beta", [(Kind.GEMM, 2, (0, ALPHA), (1, ONE), (2, ONE))]),
        ("accumulates onto the region that it", [COPIES[2], (Kind.GEMM, 2, (0, ALPHA), (1, ONE), (5, BETA))]),
        (
            "do not belong side by side",
            [COPIES[0], (Kind.COPY, columns(3, 2), (columns(0, 0), ONE)), (Kind.GEMM, 4, (3, ALPHA), (1, ONE))],
        ),
        (
            "terms of different elements of C are summed",
            [
                (Kind.COPY, PART, (RegionRef(2, 0, 1, 4, 3), ONE)),
                (Kind.GEMM, PART, (0, ALPHA), (RegionRef(1, 0, 0, 4, 3), ONE), (PART, BETA)),
            ],
        ),
        (
            "C [0:4, 2:4] ends with the sum over k [0, 4) plus beta C_in (alpha is never applied)",
            [
                (Kind.GEMM, columns(4, 0), (0, ALPHA), (columns(1, 0), ONE)),
                (Kind.GEMM, columns(4, 2), (0, ONE), (columns(1, 2), ONE)),
                (Kind.COMBINE, 2, (4, ONE), (2, BETA)),
            ],
        ),
        (  # reading halves of C cuts it: the first of wrong parts is named
            "C [0:4, 0:2] ends with C_in (k is [0, 4); beta is never applied); it is never written",
            [(Kind.COPY, columns(3, col), (columns(2, col), ONE)) for col in (2, 0)],
        ),
        (
            "holds nothing that may be read",
            [(Kind.COPY, SHORT, (RegionRef(0, 0, 0, 3, 4), ONE)), (Kind.GEMM, 4, (3, ALPHA), (1, ONE))],
        ),
        ("holds nothing that may be read", [(Kind.COPY, 4, (3, ONE))]),
        ("holds nothing that may be read", [(Kind.COMBINE, 2, (3, ONE), (2, BETA))]),
        ("holds nothing that may be read", [(*PRODUCT, (3, ONE))]),
        ("different shapes", [(Kind.COPY, SHORT, (0, ONE))]),
        ("regions of the shape that it writes", [(Kind.COMBINE, SHORT, (2, BETA))]),
        ("differ in shape", [(Kind.GEMM, SHORT, (0, ALPHA), (1, ONE))]),
        ("op(A) holds k [0, 3) and op(B)", [(Kind.GEMM, 3, (RegionRef(0, 0, 0, 4, 3), ALPHA), (1, ONE))]),
        ("op(A) is empty", [(Kind.GEMM, 3, (RegionRef(0, 0, 0, 4, 0), ALPHA), (1, ONE))]),
        *(
            ("overlaps one that the same task reads", [*COPIES, overlapping])
            for overlapping in (
                (Kind.COPY, RegionRef(3, 0, 1, 4, 3), (PART, ONE)),
                (Kind.GEMM, 3, (3, ALPHA), (1, ONE)),
                (Kind.GEMM, 4, (0, ALPHA), (4, ONE)),
                (Kind.COMBINE, RegionRef(5, 0, 1, 4, 3), (RegionRef(5, 0, 0, 4, 3), BETA)),
            )
        ),
    ],
)
def test_what_is_no_right_task_is_refused(words: str, tasks: list[tuple[Any, ...]]) -> None:
    hand = Hand()
    for task in tasks:
        hand.task(*task)
    refused(hand.done(), words)


def test_copies_move_what_they_copy() -> None:
    """Two halves of C travel through exchanged places and come home."""
    left, right = (RegionRef(2, 0, col, 4, 2) for col in (0, 2))
    hand = Hand().task(Kind.GEMM, 2, (0, ALPHA), (1, ONE), (2, BETA))
    hand.task(Kind.COPY, RegionRef(3, 0, 2, 4, 2), (left, ONE)).task(Kind.COPY, RegionRef(3, 0, 0, 4, 2), (right, ONE))
    hand.task(Kind.COPY, 4, (3, ONE))  # both halves in one copy
    verify(hand.task(Kind.COPY, left, (RegionRef(4, 0, 2, 4, 2), ONE)).done())
    refused(hand.task(Kind.COPY, left, (RegionRef(4, 0, 0, 4, 2), ONE)).done(), "displaced by 0 rows and 2 columns")


def test_parts_of_c_may_differ_on_the_way_to_the_same_result() -> None:
    top, low = (RegionRef(3, row, 0, 2, 4) for row in (0, 2))
    upper, lower_half = (RegionRef(0, row, 0, 2, 4) for row in (0, 2))
    hand = Hand().task(Kind.COMBINE, low, (RegionRef(2, 2, 0, 2, 4), BETA))
    hand.task(Kind.GEMM, top, (upper, ALPHA), (1, ONE)).task(Kind.GEMM, low, (lower_half, ALPHA), (1, ONE), (low, ONE))
    hand.task(Kind.COPY, 4, (3, ONE))  # what the halves hold differs, and stays so
    hand.task(Kind.COPY, 5, (2, ONE)).task(Kind.COPY, RegionRef(5, 2, 0, 2, 4), (RegionRef(4, 2, 0, 2, 4), ONE))
    hand.task(Kind.COMBINE, RegionRef(2, 0, 0, 2, 4), (RegionRef(4, 0, 0, 2, 4), ONE), (RegionRef(5, 0, 0, 2, 4), BETA))
    verify(hand.task(Kind.COPY, RegionRef(2, 2, 0, 2, 4), (RegionRef(5, 2, 0, 2, 4), ONE)).done())


def test_sums_of_differently_cut_regions_are_followed_part_by_part() -> None:
    left, right = (RegionRef(4, 0, col, 4, 2) for col in (0, 2))
    b_left, b_right = (RegionRef(1, 0, col, 4, 2) for col in (0, 2))
    hand = Hand().task(Kind.COMBINE, 3, (2, BETA))  # beta C_in
    hand.task(Kind.GEMM, left, (0, ALPHA), (b_left, ONE)).task(Kind.GEMM, right, (0, ONE), (b_right, ONE))
    hand.task(Kind.COMBINE, right, (right, ALPHA))
    verify(hand.task(Kind.COMBINE, 2, (4, ONE), (3, ONE)).done())


def test_zeros_add_nothing() -> None:
    hand = Hand().task(Kind.COMBINE, 3).task(Kind.GEMM, 3, (0, ALPHA), (1, ONE), (3, ONE))
    hand.task(Kind.COMBINE, 4).task(Kind.COPY, 5, (4, ONE))
    verify(hand.task(Kind.COMBINE, 2, (5, ONE), (3, ONE), (2, BETA), (6, ZERO)).done())


def test_a_combine_may_not_keep_a_rounded_value() -> None:
    hand = Hand(DType.f16).task(Kind.GEMM, 3, (0, ALPHA), (1, ONE))
    refused(hand.task(Kind.COMBINE, 2, (3, ONE), (2, BETA)).done(), "half types round once")


# -- other results ---------------------------------------------------------------------------------


class LeftHalf(GemmProblem):
    """The product in columns 0 and 1 of C alone, of k 1 to 3 and without alpha; the others stay as they are."""

    parts: ClassVar = (
        ResultPart((0, 4), (0, 2), ((1, 4),), alpha=False, c_in=CIn.SCALED),
        ResultPart((0, 4), (2, 4), (), alpha=False, c_in=CIn.RAW),
    )

    @property
    def result(self) -> tuple[ResultPart, ...]:
        return self.parts


LEFT, RIGHT, ALL = RegionRef(2, 0, 0, 4, 2), RegionRef(2, 0, 2, 4, 2), RegionRef(2, 0, 0, 4, 4)
LAST_A, LAST_B = RegionRef(0, 0, 1, 4, 3), RegionRef(1, 1, 0, 3, 2)


def left_half(problem: type[GemmProblem] = LeftHalf) -> Hand:
    return Hand(problem=problem).task(Kind.GEMM, LEFT, (LAST_A, ONE), (LAST_B, ONE), (LEFT, BETA))


def test_a_result_of_two_parts_is_proven() -> None:
    verify(left_half().done())
    # What must stay may be read, travel, and come back.
    hand = left_half().task(Kind.COPY, RegionRef(3, 0, 0, 4, 2), (RIGHT, ONE))
    verify(hand.task(Kind.COMBINE, RIGHT, (RegionRef(3, 0, 0, 4, 2), ONE)).done())


def test_a_part_that_is_not_as_the_problem_says_is_refused() -> None:
    refused(Hand(problem=LeftHalf).done(), "C [0:4, 0:2] ends with C_in (k is [1, 4); beta is never applied)")
    refused(
        left_half().task(Kind.COMBINE, RIGHT, (RIGHT, BETA)).done(),
        "C [0:4, 2:4] ends with beta C_in (which is not the result asked for); it is written last by task 1 (COMBINE",
    )
    refused(
        left_half().task(Kind.COPY, RIGHT, (LEFT, ONE)).done(), "C [0:4, 2:4] ends with the values of elements displ"
    )
    hand = Hand(problem=LeftHalf).task(Kind.GEMM, LEFT, (LAST_A, ALPHA), (LAST_B, ONE), (LEFT, BETA))
    refused(hand.done(), "C [0:4, 0:2] ends with alpha times the sum over k [1, 4) plus beta C_in (")
    hand = Hand(problem=LeftHalf).task(Kind.GEMM, ALL, (LAST_A, ONE), (RegionRef(1, 1, 0, 3, 4), ONE), (ALL, BETA))
    refused(hand.done(), "C [0:4, 2:4] ends with the sum over k [1, 4) plus beta C_in (which is not")


def test_a_part_that_does_not_read_c_starts_with_nothing_that_may_be_read() -> None:
    class Fresh(LeftHalf):
        parts = (dataclasses.replace(LeftHalf.parts[0], c_in=CIn.ABSENT), LeftHalf.parts[1])

    refused(left_half(Fresh).done(), "which holds nothing that may be read")
    verify(Hand(problem=Fresh).task(Kind.GEMM, LEFT, (LAST_A, ONE), (LAST_B, ONE)).done())


@pytest.mark.parametrize(
    ("cols", "words"),
    [
        ((0, 3), "what buffer 2 (USER of C, device of rank 0) [0:4, 2:4] is to hold is said twice"),
        ((0, 1), "of some elements of buffer 2 (USER of C, device of rank 0) nothing says what they are to hold"),
        ((-1, 2), "C [0:4, -1:2] is to hold something, but is not all there"),
    ],
)
def test_a_result_that_does_not_speak_of_each_element_once_is_refused(cols: tuple[int, int], words: str) -> None:
    class Wrong(LeftHalf):
        parts = (dataclasses.replace(LeftHalf.parts[0], cols=cols), LeftHalf.parts[1])

    refused(Hand(problem=Wrong).done(), words)


# -- memory ----------------------------------------------------------------------------------------


def test_overlapping_buffers_are_refused() -> None:
    found = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        schedule = random_case(rng)
        own = np.flatnonzero(schedule.buffers["offset"] > 0).tolist()
        if own:
            at = rng.choice(own)
            back = -(-int(schedule.buffers["offset"][at]) // 2 // 8) * 8 if rng.random() < 0.5 else 0
            moved = set_rows(schedule, "buffers", at, offset=back)
            others = schedule.buffers[(schedule.buffers["location"] == schedule.buffers["location"][at])]
            others = others[(others["offset"] >= 0) & (others["offset"] != schedule.buffers["offset"][at])]
            spans = [(int(o["offset"]), int(o["offset"] + span(o))) for o in others]
            stop = back + span(schedule.buffers[at])
            if any(max(back, a) < min(stop, b) for a, b in spans):
                found += 1
                refused(moved, f"overlap in the SoftBuf of rank {schedule.buffers['location'][at]}")
            else:
                verify(moved)
    assert found >= 20


def span(buffer: np.void) -> int:
    """Return the bytes from the first to the last element of a buffer."""
    return (int(buffer["ld"]) * (int(buffer["cols"]) - 1) + int(buffer["rows"])) * DType(buffer["dtype"]).itemsize


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"location": 0}, "does not lie at 1"),
        ({"location": host_index(2)}, "does not lie at 1"),
        ({"rows": 7, "ld": 7}, "has shape 7×12"),
        ({"ld": 9}, "leading dimension 9"),
        ({"dtype": DType.f32}, "type f32"),
        ({"offset": 0}, "offset in a SoftBuf"),
        ({"matrix": Matrix.NONE}, "belongs to no matrix"),
    ],
)
def test_a_caller_s_matrix_described_wrongly_is_refused(fields: dict[str, int], words: str) -> None:
    refused(set_rows(plain(), "buffers", 0, **fields), words)


def test_two_buffers_for_one_of_the_caller_s_matrices_are_refused() -> None:
    schedule = plain()
    twice = np.concatenate((schedule.buffers, schedule.buffers[1:2]))
    refused(changed(schedule, buffers=twice), f"buffers 1 and {len(twice) - 1} are both the caller's B")


def test_a_schedule_without_the_caller_s_c_is_refused() -> None:
    cache = {"role": Role.CACHE, "offset": 4096, "location": 0}
    refused(set_rows(plain(), "buffers", 2, **cache), "no buffer is the caller's C")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"offset": -1}, "has no place in a SoftBuf"),
        ({"offset": 100004}, "multiple of its element size"),
        ({"location": host_index(2)}, "not in a device's SoftBuf"),
        ({"location": location_index(Location.host(0), 2)}, "not in a device's SoftBuf"),
        ({"location": host_index(2), "role": Role.STAGING}, "nor is it staging in a rank's private host memory"),
    ],
)
def test_a_buffer_outside_every_softbuf_is_refused(fields: dict[str, int], words: str) -> None:
    refused(set_rows(plain(), "buffers", 3, **fields), "buffer 3", words)


# -- faults in lowered lists -----------------------------------------------------------------------


def lists_of(schedule: Schedule) -> list[OperationList]:
    lowering = lower(schedule)
    return [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]


def list_refusal(schedule: Schedule, lists: list[OperationList]) -> str:
    try:
        verify_lists(schedule, lists)
    except ScheduleError as error:
        return str(error)
    return ""


def test_lists_of_more_lanes_than_executors_take_are_refused() -> None:
    for count in (MAX_LANES, MAX_LANES + 1):
        build = ScheduleBuilder(2, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
        for number in range(count):
            build.task(Kind.JOIN, build.compute_lane(1, number))
        schedule = build.build(scheduler="test", grid=(1, 1), tile=0)
        said = list_refusal(schedule, lists_of(schedule))
        assert said == ("" if count == MAX_LANES else "rank 1 has 257 lanes, executors take 256: use fewer ranks")


def busy_case(seed: int) -> Case:
    """Return a random schedule with flags and events, and its lists."""
    rng = random.Random(seed)
    while True:
        schedule = random_case(rng, max_ranks=6)
        lists = lists_of(schedule)
        if places(lists, Code.WAIT_FLAG) and places(lists, Code.WAIT_EVENT):
            return rng, schedule, lists


@pytest.mark.parametrize("said", "TC")
def test_a_conjugated_factor_is_not_a_transposed_one(said: str) -> None:
    problem = GemmProblem(37, 29, 41, DType.c64, said, "C")
    right = summa(problem, Placement.parse("0,0,0"), 2, grid=(1, 2))
    assert not refusal(right)
    first = np.argmax(right.operands["op"] == Op[said])
    refused(set_rows(right, "operands", first, op=Op.C if said == "T" else Op.T), f"the problem says {said}")


def test_a_flag_slot_used_twice_is_always_refused() -> None:
    tried = 0
    for seed in SEEDS:
        rng, schedule, lists = busy_case(seed)
        ranks = [program.rank for program in lists if program.num_flags > 1]
        if not ranks:
            continue
        rank = rng.choice(ranks)
        first, second = rng.sample(range(lists[rank].num_flags), 2)
        mutant = lists
        for program in lists:  # whoever signals or awaits flag `second` of `rank` uses `first` instead
            operations = program.operations
            signals = (operations["code"] == Code.SIGNAL) & (operations["peer"] == rank)
            waits = (operations["code"] == Code.WAIT_FLAG) & (program.rank == rank)
            mutant = with_fields(mutant, program.rank, (signals | waits) & (operations["slot"] == second), slot=first)
        assert list_refusal(schedule, mutant), seed
        flag_lanes = mutant[rank].flag_lanes.copy()
        flag_lanes[first] = flag_lanes[second]
        mutant[rank] = dataclasses.replace(mutant[rank], flag_lanes=flag_lanes)
        assert list_refusal(schedule, mutant), seed
        tried += 1
    assert tried >= 15


@pytest.mark.parametrize("field", ["code", "lane", "task", "slot", "value", "peer", "num_operands", "first_operand"])
def test_any_changed_field_of_an_operation_is_refused(field: str) -> None:
    unused = {"slot": [Code.COPY, Code.GEMM, Code.COMBINE], "peer": [Code.COPY, Code.GEMM, Code.COMBINE, Code.RECORD]}
    unused["value"] = unused["slot"]
    for seed in SEEDS:
        rng, schedule, lists = busy_case(seed)
        bodies = [Code.COPY, Code.GEMM, Code.COMBINE]
        if field in ("num_operands", "first_operand"):
            candidates = places(lists, *bodies)
        else:
            candidates = places(lists, *(code for code in Code if code not in unused.get(field, [])))
        rank, at = rng.choice(candidates)
        old = int(lists[rank].operations[field][at])
        mutant = with_fields(lists, rank, at, **{field: old + (rng.choice((1, -1)) if old > 0 else 1)})
        if not list_refusal(schedule, mutant):
            # Another wait can be as good as the one it replaces, and so can a record in the name of a JOIN next to it.
            code = mutant[rank].operations["code"][at]
            assert code in (Code.WAIT_EVENT, Code.WAIT_FLAG) or (field == "task" and code == Code.RECORD), seed
            assert not oracle.lists_lose_order(schedule, mutant), seed


@pytest.mark.parametrize("field", ["buffer", "dtype", "factor", "op", "offset", "rows", "cols", "ld"])
def test_any_changed_field_of_a_bound_operand_is_refused(field: str) -> None:
    for seed in SEEDS:
        rng, schedule, lists = busy_case(seed)
        rank = rng.choice([program.rank for program in lists if len(program.operands)])
        at = rng.randrange(len(lists[rank].operands))
        mutant = set_rows(lists[rank], "operands", at, **{field: lists[rank].operands[field][at] + 1})
        assert f"another {field} than the schedule says" in list_refusal(schedule, with_program(lists, mutant))


def test_waits_after_their_body_and_tasks_out_of_order_are_refused() -> None:
    for seed in SEEDS:
        rng, schedule, lists = busy_case(seed)
        rank = rng.choice([program.rank for program in lists if len(program.operations) > 1])
        operations = lists[rank].operations.copy()
        at = rng.randrange(len(operations) - 1)
        left, right = operations[at], operations[at + 1]
        same_phase = left["task"] == right["task"] and {int(left["code"]), int(right["code"])} in (
            {Code.WAIT_EVENT},
            {Code.WAIT_FLAG},
            {Code.WAIT_EVENT, Code.WAIT_FLAG},
            {Code.RECORD, Code.SIGNAL},
            {Code.SIGNAL},
        )
        operations[[at, at + 1]] = operations[[at + 1, at]]
        said = list_refusal(schedule, with_operations(lists, rank, operations))
        assert bool(said) != same_phase, f"seed {seed}: {said!r}"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("rank", "says it is of rank"),
        ("num_ranks", "says it is of rank"),
        ("num_events", "an event that does not exist"),
        ("flag_lanes", "does not exist"),
        ("span", "spans that differ"),
        ("lanes", "other lanes, buffers or locations"),
        ("buffers", "other lanes, buffers or locations"),
        ("locations", "other lanes, buffers or locations"),
    ],
)
def test_a_list_that_describes_itself_wrongly_is_refused(field: str, words: str) -> None:
    schedule = summa(
        GemmProblem(8, 8, 8, DType.f64), Placement.parse("0,h,1"), 2, grid=(1, 2), options=SummaOptions(compute_lanes=2)
    )
    lists = lists_of(schedule)
    verify_lists(schedule, lists)
    value = getattr(lists[1], field)
    assert lists[1].num_events > 0
    assert lists[1].num_flags > 0
    lists[1] = dataclasses.replace(lists[1], **{field: value[:-1] if isinstance(value, np.ndarray) else value - 1})
    assert words in list_refusal(schedule, lists)


@pytest.mark.parametrize(("code", "words"), [(Code.RECORD, "records a task twice"), (Code.SIGNAL, " twice")])
def test_telling_twice_is_refused(code: Code, words: str) -> None:
    _, schedule, lists = busy_case(1)
    rank, at = places(lists, code)[0]
    operations = np.insert(lists[rank].operations, at, lists[rank].operations[at])
    assert words in list_refusal(schedule, with_operations(lists, rank, operations))


def test_an_event_recorded_again_before_all_waits_for_it_is_refused() -> None:
    tried = 0
    for seed in SEEDS:
        _, schedule, lists = busy_case(seed)
        for rank, at in places(lists, Code.RECORD):
            operations = lists[rank].operations.copy()
            code, slot = operations["code"], operations["slot"]
            # What is awaited later in another event, and recorded before.
            later = np.flatnonzero((code[at:] == Code.WAIT_EVENT) & (slot[at:] != slot[at])) + at
            earlier = set(slot[:at][code[:at] == Code.RECORD].tolist())
            other = [index for index in later if slot[index] in earlier]
            other = [i for i in other if not ((code[at:i] == Code.RECORD) & (slot[at:i] == slot[i])).any()]
            if not other:
                continue
            waits = (code == Code.WAIT_EVENT) & (operations["peer"] == operations["lane"][at])
            waits &= operations["value"] == operations["value"][at]
            slot[waits] = slot[at] = slot[other[0]]
            said = list_refusal(schedule, with_operations(lists, rank, operations))
            assert "holds no record" in said, f"seed {seed}: {said!r}"
            tried += 1
            break
    assert tried >= 15


def test_a_flag_said_to_be_another_lane_s_is_refused() -> None:
    _, schedule, lists = busy_case(1)
    rank = next(program.rank for program in lists if program.num_flags)
    lanes = lists[rank].flag_lanes["destination"] + 1
    mutant = with_program(lists, set_rows(lists[rank], "flag_lanes", ..., destination=lanes))
    assert "whose list says that another lane does" in list_refusal(schedule, mutant)


def test_a_span_below_a_value_is_refused_on_every_rank() -> None:
    for seed in SEEDS:
        _, schedule, lists = busy_case(seed)
        lists = [dataclasses.replace(program, span=program.span - 1) for program in lists]
        words = "beyond the span" if lists[0].span else "not positive"
        assert words in list_refusal(schedule, lists), seed


def test_a_wait_for_a_flag_as_if_another_rank_signalled_it_is_refused() -> None:
    _, schedule, lists = busy_case(1)
    rank, at = places(lists, Code.WAIT_FLAG)[0]
    mutant = with_fields(lists, rank, at, peer=lists[rank].operations["peer"][at] + 1)
    assert "as if rank" in list_refusal(schedule, mutant)


def test_a_message_to_another_rank_than_the_schedule_says_is_refused() -> None:
    _, schedule, lists = net_case(1)
    for code in _NET:
        rank, at = places(lists, code)[0]
        mutant = with_fields(lists, rank, at, peer=rank ^ 1)
        assert "is to another rank than the schedule says" in list_refusal(schedule, mutant)


def test_a_wait_for_a_flag_that_comes_later_is_refused() -> None:
    tried = 0
    for seed in SEEDS:
        _, schedule, lists = busy_case(seed)
        for rank, at in places(lists, Code.WAIT_FLAG):
            wait = lists[rank].operations[at]
            signals = lists[wait["peer"]].operations
            signals = signals[(signals["code"] == Code.SIGNAL) & (signals["peer"] == rank)]
            later = signals[(signals["task"] >= wait["task"]) & (signals["slot"] == wait["slot"])]
            if len(later):
                said = list_refusal(schedule, with_fields(lists, rank, at, value=later["value"][0]))
                assert "not earlier in the global order" in said
                tried += 1
                break
    assert tried >= 15


# -- lanes of the host -----------------------------------------------------------------------------


def host_case(seed: int) -> Case:
    """Return random copies on streams and lanes of the host, and their lists."""
    rng = random.Random(seed)
    schedule = random_copies(rng, rng.randint(1, 3), 40)
    lists = lists_of(schedule)
    verify_lists(schedule, lists)
    assert not oracle.lists_lose_order(schedule, lists)
    return rng, schedule, lists


def host_flags(lists: list[OperationList], code: Code) -> list[tuple[int, int]]:
    return [(rank, at) for rank, at in places(lists, code) if lists[rank].operations["in_host"][at]]


def net_case(seed: int) -> Case:
    """Return a schedule of two nodes, and its lists."""
    rng, machine = random.Random(seed), Machine.cluster(Machine.uniform(2), 2, Net(10.0, 5e-6))
    problem = GemmProblem(*(rng.randint(20, 60) for _ in range(3)), DType.f64, reads_c=True)
    schedule = plan(problem, Placement.parse("h,h,h"), 4, machine, ScheduleOptions(scheduler="kblocks")).schedule
    return rng, schedule, lists_of(schedule)


_NET = Code.SEND, Code.RECV


@pytest.mark.parametrize(
    ("make", "code"),
    [
        *((busy_case, code) for code in Code if code not in _NET),
        (host_case, Code.WAIT_FLAG),
        (host_case, Code.SIGNAL),
        *((net_case, code) for code in _NET),
    ],
)
def test_a_dropped_operation_is_refused_unless_another_implies_it(make: Callable[[int], Case], code: Code) -> None:
    lost = 0
    for seed in SEEDS:
        rng, schedule, lists = make(seed)
        candidates = host_flags(lists, code) if make is host_case else places(lists, code)
        if not candidates:
            continue
        rank, at = rng.choice(candidates)
        mutant = with_operations(lists, rank, np.delete(lists[rank].operations, at))
        said = list_refusal(schedule, mutant)
        if code in (Code.WAIT_EVENT, Code.WAIT_FLAG):
            wrong = oracle.lists_lose_order(schedule, mutant)
            assert bool(wrong) == bool(said), f"seed {seed}: the oracle says {wrong!r}, verify says {said!r}"
        else:
            assert said or (code is Code.SIGNAL and not oracle.lists_lose_order(schedule, mutant)), seed
        lost += bool(said)
    assert lost >= 15


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("make", [busy_case, host_case])
def test_a_wait_for_less_than_one_task_is_refused(make: Callable[[int], Case], value: int) -> None:
    _, schedule, lists = make(1)
    rank, at = (host_flags(lists, Code.WAIT_FLAG) or places(lists, Code.WAIT_FLAG))[0]
    assert "which is signalled not earlier" in list_refusal(schedule, with_fields(lists, rank, at, value=value))


@pytest.mark.parametrize("field", ["in_host", "slot", "value", "peer"])
@pytest.mark.parametrize("code", [Code.WAIT_FLAG, Code.SIGNAL])
def test_any_changed_field_of_a_flag_in_host_memory_is_refused(code: Code, field: str) -> None:
    refusals = 0
    for seed in SEEDS:
        rng, schedule, lists = host_case(seed)
        rank, at = rng.choice(host_flags(lists, code))
        changed_to = lists[rank].operations[field][at] + rng.choice((1, -1)) if field != "in_host" else 0
        mutant = with_fields(lists, rank, at, **{field: changed_to})
        said = list_refusal(schedule, mutant)
        refusals += bool(said)
        if not said:  # another wait can be as good as the one it replaces
            assert code is Code.WAIT_FLAG
            assert not oracle.lists_lose_order(schedule, mutant), seed
    assert refusals >= 15


def test_products_whose_tasks_await_lanes_of_the_host_are_proven_and_events_are_left_to_others() -> None:
    for seed in SEEDS:
        schedule = joined_by_hosts(random_case(random.Random(seed)), random.Random(seed))
        lowering = lower(schedule)
        verify(schedule, lowering)
        assert not places(list(lowering.lists.values()), Code.RECORD, Code.WAIT_EVENT)


@pytest.mark.parametrize("host_waits", [True, False])
def test_an_await_of_or_by_a_lane_of_the_host_is_no_event(host_waits: bool) -> None:
    tried = 0
    for seed in SEEDS:
        _, schedule, lists = host_case(seed)
        for rank, at in host_flags(lists, Code.WAIT_FLAG):
            program = lists[rank]
            wait = program.operations[at].copy()
            of_host = program.lanes["kind"] == LaneKind.HOST
            if wait["peer"] != rank or of_host[wait["lane"]] != host_waits or of_host[wait["slot"]] == host_waits:
                continue
            # The same order, kept by an event: nobody but a device can wait for one, or record it.
            signals = (program.operations["code"] == Code.SIGNAL) & (program.operations["value"] == wait["value"])
            told = int(np.flatnonzero(signals & (program.operations["lane"] == wait["slot"]))[0])
            others = program.operations["task"][:told] == program.operations["task"][told]
            if Code.RECORD in program.operations["code"][:told][others]:
                continue
            operations = program.operations.copy()
            operations["in_host"][[told, at]] = 0
            operations["code"][[told, at]] = Code.RECORD, Code.WAIT_EVENT
            operations["peer"][at] = wait["slot"]
            operations["slot"][[told, at]] = program.num_events
            mutant = with_operations(lists, rank, operations)
            mutant[rank] = dataclasses.replace(mutant[rank], num_events=program.num_events + 1)
            said = list_refusal(schedule, mutant)
            if at > told and "not earlier in the global order" in said:  # others wait for the signal too
                continue
            assert "on a lane of the host, which waits and tells by flags in host memory" in said
            tried += 1
            break
    assert tried >= 15


@pytest.mark.parametrize(
    ("source", "goal", "on_host", "kind", "words"),
    [
        ("h", "h0", True, Kind.COPY, ""),
        ("h", "h0", False, Kind.COPY, "keeps the thread that issues it"),
        ("h", "0", True, Kind.COPY, "copies within host memory, and no other tasks"),
        ("0", "0", True, Kind.COPY, "copies within host memory, and no other tasks"),
        ("h", "h", True, Kind.COMBINE, "copies within host memory, and no other tasks"),
        ("h", "h1", True, Kind.COPY, "rank 0 cannot reach"),
    ],
)
def test_a_lane_of_the_host_copies_within_host_memory_and_no_other_does(
    source: str, goal: str, on_host: bool, kind: Kind, words: str
) -> None:
    problem = GemmProblem(2, 2, 2, DType.f64, reads_c=False, scales_only=True)
    build = ScheduleBuilder(2, problem, Placement.parse("0,0,0"))
    c = RegionRef(build.buffer(at=0, rows=2, cols=2, dtype=DType.f64, role=Role.USER, matrix=Matrix.C), 0, 0, 2, 2)
    first, second = (
        c._replace(buffer=build.buffer(at=Location.parse(at), rows=2, cols=2, dtype=DType.f64, role=Role.STAGING))
        for at in (source, goal)
    )
    zeros = build.task(Kind.COMBINE, build.compute_lane(0), c)
    moved = build.task(Kind.COPY, build.copy_lane(0, 0, build.host), first, [(c, Factor.ONE, Op.N)], [zeros])
    lane = build.host_lane(0) if on_host else build.copy_lane(0, build.host, build.host)
    build.task(kind, lane, second, [(first, Factor.ONE, Op.N)], [moved])
    schedule = build.build(scheduler="test", grid=(1, 1), tile=0)
    if words:
        with pytest.raises(_native.RuleBroken, match=words):
            follow(schedule)
    else:
        follow(schedule)


def follow(schedule: Schedule) -> None:
    follower_of(schedule).follow(tables_in_core(schedule))


def test_operations_on_another_rank_s_tasks_are_refused() -> None:
    _, schedule, lists = busy_case(1)
    rank, place = places(lists, Code.COPY, Code.GEMM, Code.COMBINE)[0]
    mutant = with_fields(lists, rank, place, task=np.flatnonzero(schedule.tasks["rank"] != rank)[0])
    assert "is not on the lane of its task" in list_refusal(schedule, mutant)


def test_too_few_lists_are_refused() -> None:
    schedule = plain()
    assert "1 lists for 2 ranks" in list_refusal(schedule, lists_of(schedule)[:1])
