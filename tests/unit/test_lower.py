"""Lowering: awaits become events and flags, and nothing more than is needed."""

from __future__ import annotations

import random

import pytest

from tests.helpers import oracle
from tests.helpers.by_hand import ByHand
from tests.helpers.faults import set_rows
from tests.helpers.schedules import random_case
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList, lower
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.verify_lists import verify_lists


class Sketch:
    """A schedule of COPY and JOIN tasks on named lanes; only its synchronisation matters."""

    def __init__(self, num_ranks: int = 3) -> None:
        self.builder = ByHand(num_ranks, DType.f32)
        self.cells = self.builder.add(0, 100, 100, DType.f32, ld=110, offset=0)
        self.count = 0

    def copy(self, rank: int, lane: int, *awaits: int) -> int:
        self.count += 1
        target, source = (self.cells._replace(row=self.count, col=col, rows=1, cols=1) for col in (3, 4))
        return self.builder.copy(self.builder.compute_lane(rank, lane), target, source, awaits)

    def join(self, rank: int, lane: int, *awaits: int) -> int:
        return self.builder.task(Kind.JOIN, self.builder.compute_lane(rank, lane), awaits=awaits)

    def schedule(self) -> Schedule:
        return self.builder.done()


def ops(program: OperationList) -> list[tuple[str, int, int, int, int]]:
    """Return (code, task, slot, value, peer) of every operation."""
    return [
        (Code(op["code"]).name, *(int(op[n]) for n in ("task", "slot", "value", "peer"))) for op in program.operations
    ]


def proven_lists(schedule: Schedule) -> list[OperationList]:
    lowering = lower(schedule)
    lists = [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]
    verify_lists(schedule, lists)
    return lists


def test_an_await_in_the_same_lane_needs_no_operation() -> None:
    sketch = Sketch()
    sketch.copy(0, 0, sketch.copy(0, 0))
    assert ops(proven_lists(sketch.schedule())[0]) == [("COPY", 0, -1, 0, -1), ("COPY", 1, -1, 0, -1)]


def test_an_await_in_another_lane_of_the_rank_becomes_an_event() -> None:
    sketch = Sketch()
    sketch.copy(0, 1, sketch.copy(0, 0))
    program = proven_lists(sketch.schedule())[0]
    assert ops(program) == [
        ("COPY", 0, -1, 0, -1),
        ("RECORD", 0, 0, 1, -1),
        ("WAIT_EVENT", 1, 0, 1, 0),
        ("COPY", 1, -1, 0, -1),
    ]
    assert (program.num_events, program.num_flags) == (1, 0)


def test_an_await_of_another_rank_becomes_a_flag_in_the_waiter_s_memory() -> None:
    sketch = Sketch()
    sketch.copy(2, 0, sketch.copy(0, 0))
    producer, idle, waiter = proven_lists(sketch.schedule())
    assert ops(producer) == [("COPY", 0, -1, 0, -1), ("SIGNAL", 0, 0, 1, 2)]
    assert ops(waiter) == [("WAIT_FLAG", 1, 0, 1, 0), ("COPY", 1, -1, 0, -1)]
    assert ops(idle) == []
    assert (producer.num_flags, idle.num_flags, waiter.num_flags) == (0, 0, 1)
    assert waiter.flag_lanes.tolist() == [producer.lanes[0].item()]
    assert producer.span == idle.span == waiter.span == 1


@pytest.mark.parametrize("host_waits", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_await_with_a_lane_of_the_host_becomes_a_flag_in_host_memory(host_waits: bool, rank: int) -> None:
    sketch = Sketch()
    sketch.join(0, 3)
    lanes = [sketch.builder.host_lane(0), sketch.builder.compute_lane(rank, 1)]
    first, second = lanes[::-1] if host_waits else lanes
    told = [sketch.builder.task(Kind.JOIN, first) for _ in range(2)]
    for _ in range(2):  # one lane of the waiting rank waits, once
        sketch.builder.task(Kind.JOIN, second, awaits=told)
    lists = proven_lists(sketch.schedule())
    producer, waiter = (rank, 0) if host_waits else (0, rank)
    slot = int(lists[producer].operations["lane"][lists[producer].operations["code"] == Code.SIGNAL][0])
    found = {at: ops(lists[at]) for at in {producer, waiter}}
    assert found[producer][0] == ("SIGNAL", 2, slot, 2, -1)
    assert found[waiter][-1] == ("WAIT_FLAG", 3, slot, 2, producer)
    assert sum(map(len, found.values())) == 2
    assert all(program.operations["in_host"].all() for program in lists)
    assert lists[0].num_events == 0
    assert {program.num_flags for program in lists} == {0}
    assert lists[0].span == 2


def test_a_join_has_waits_and_signals_but_no_body() -> None:
    sketch = Sketch()
    join = sketch.join(0, 2, sketch.copy(0, 0), sketch.copy(0, 1))
    sketch.copy(1, 0, join)
    producer, waiter, _ = proven_lists(sketch.schedule())
    assert ops(producer)[-3:] == [("WAIT_EVENT", 2, 0, 1, 0), ("WAIT_EVENT", 2, 1, 1, 1), ("SIGNAL", 2, 0, 1, 1)]
    assert ops(waiter) == [("WAIT_FLAG", 3, 0, 1, 0), ("COPY", 3, -1, 0, -1)]


def test_a_flag_awaited_by_two_lanes_of_a_rank_is_signalled_once() -> None:
    sketch = Sketch()
    first = sketch.copy(0, 0)
    sketch.copy(1, 0, first)
    sketch.copy(1, 1, first)
    producer, waiter, _ = proven_lists(sketch.schedule())
    assert ops(producer) == [("COPY", 0, -1, 0, -1), ("SIGNAL", 0, 0, 1, 1)]
    assert ops(waiter) == [
        ("WAIT_FLAG", 1, 0, 1, 0),
        ("COPY", 1, -1, 0, -1),
        ("WAIT_FLAG", 2, 0, 1, 0),
        ("COPY", 2, -1, 0, -1),
    ]


def test_every_waiting_rank_has_a_flag_of_its_own() -> None:
    sketch = Sketch()
    first = sketch.copy(0, 0)
    sketch.copy(1, 0, first)
    sketch.copy(2, 0, first)
    producer, *waiters = proven_lists(sketch.schedule())
    assert ops(producer)[1:] == [("SIGNAL", 0, 0, 1, 1), ("SIGNAL", 0, 0, 1, 2)]
    assert [program.num_flags for program in waiters] == [1, 1]


def test_a_lane_has_one_flag_in_each_waiting_rank_and_counts_all_its_tasks_there() -> None:
    sketch = Sketch()
    tasks = [sketch.copy(0, 0) for _ in range(4)]
    other = sketch.copy(0, 1)
    sketch.copy(1, 0, tasks[1])
    sketch.copy(1, 1, other)
    sketch.copy(1, 0, tasks[3])
    producer, waiter, _ = proven_lists(sketch.schedule())
    assert [op for op in ops(producer) if op[0] == "SIGNAL"] == [
        ("SIGNAL", 1, 0, 2, 1),
        ("SIGNAL", 3, 0, 4, 1),
        ("SIGNAL", 4, 1, 1, 1),
    ]
    assert [op for op in ops(waiter) if op[0] == "WAIT_FLAG"] == [
        ("WAIT_FLAG", 5, 0, 2, 0),
        ("WAIT_FLAG", 6, 1, 1, 0),
        ("WAIT_FLAG", 7, 0, 4, 0),
    ]
    assert waiter.flag_lanes.tolist() == producer.lanes.tolist()
    assert producer.span == waiter.span == 4


def test_an_event_is_recorded_again_once_all_waits_for_it_stand_before() -> None:
    sketch = Sketch()
    first = sketch.copy(0, 0)
    sketch.copy(0, 1, first)
    second = sketch.copy(0, 0)  # the first is still to be awaited
    sketch.copy(0, 2, first)
    third = sketch.copy(0, 2)
    sketch.copy(0, 1, second, third)
    program = proven_lists(sketch.schedule())[0]
    assert [op for op in ops(program) if op[0] != "COPY"] == [
        ("RECORD", 0, 0, 1, -1),
        ("WAIT_EVENT", 1, 0, 1, 0),
        ("RECORD", 2, 1, 2, -1),
        ("WAIT_EVENT", 3, 0, 1, 0),
        ("RECORD", 4, 0, 2, -1),
        ("WAIT_EVENT", 5, 1, 2, 0),
        ("WAIT_EVENT", 5, 0, 2, 2),
    ]


def events_in_use(program: OperationList) -> int:
    """Return how many records are at most still awaited at a time, one that is made included."""
    waits = program.operations[program.operations["code"] == Code.WAIT_EVENT]
    most, left, waiting = 0, {}, set()
    for op in waits:
        key = (int(op["peer"]), int(op["value"]))
        left[key] = left.get(key, 0) + 1
    for op in program.operations:
        if op["code"] == Code.RECORD:
            waiting.add((int(op["lane"]), int(op["value"])))
            most = max(most, len(waiting))
        elif op["code"] == Code.WAIT_EVENT:
            key = (int(op["peer"]), int(op["value"]))
            left[key] -= 1
            if not left[key]:
                waiting.remove(key)
    return most


def test_there_are_as_many_events_as_are_in_use_at_a_time() -> None:
    fewer = 0
    for seed in range(40):
        for program in proven_lists(random_case(random.Random(seed))):
            assert program.num_events == events_in_use(program), seed
            fewer += program.num_events < (program.operations["code"] == Code.RECORD).sum()
    assert fewer > 20


def test_operands_carry_byte_offsets_leading_dimension_and_extents() -> None:
    sketch = Sketch()
    sketch.copy(0, 0)
    program = proven_lists(sketch.schedule())[0]
    written, read = program.operands
    assert (written["offset"], read["offset"]) == ((3 * 110 + 1) * 4, (4 * 110 + 1) * 4)
    assert (written["ld"], written["rows"], written["cols"], written["dtype"]) == (110, 1, 1, DType.f32)
    assert program.buffers_used().tolist() == [sketch.cells.buffer]


def test_an_empty_schedule_lowers_to_empty_lists() -> None:
    for program in proven_lists(Sketch().schedule()):
        assert len(program.operations) == len(program.operands) == len(program.flag_lanes) == 0
        assert program.num_events == program.num_flags == 0
        assert program.span == 1  # each call has an epoch of its own


def test_lists_are_read_only() -> None:
    sketch = Sketch()
    sketch.copy(0, 0)
    program = proven_lists(sketch.schedule())[0]
    with pytest.raises(ValueError, match="read-only"):
        program.operations["slot"] = 0


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_random_awaits_are_kept_with_no_wait_that_an_earlier_one_of_its_lane_implies(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        rng = random.Random(seed)
        ranks, lanes, count = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 40)
        sketch = Sketch(ranks)
        for task in range(count):
            awaits = rng.sample(range(task), min(task, rng.randint(0, 4)))
            make = sketch.join if rng.random() < 0.2 else sketch.copy
            make(rng.randrange(ranks), rng.randrange(lanes), *awaits)
        schedule = sketch.schedule()
        lists = proven_lists(schedule)
        assert oracle.lists_lose_order(schedule, lists) == "", seed
        lane = schedule.tasks["lane"]
        reach: dict[tuple[int, int], int] = {}
        lowering = lower(schedule)
        for waiter, awaited in lowering.waits.tolist():
            pair = (int(lane[waiter]), int(lane[awaited]))
            assert reach.get(pair, -1) < awaited, f"seed {seed}: task {waiter} waits for {awaited} without need"
            reach[pair] = awaited


def test_the_proof_refuses_a_flag_of_two_lanes_also_if_they_are_described_alike() -> None:
    sketch = Sketch(2)
    first, _, third = sketch.copy(0, 0), sketch.copy(0, 1), sketch.copy(0, 1)
    sketch.copy(1, 0, first)
    sketch.copy(1, 1, third)
    schedule = set_rows(sketch.schedule(), "lanes", ..., destination=0)
    lists = [
        set_rows(program, "operations", program.operations["code"] == code, slot=0)
        for program, code in zip(proven_lists(schedule), (Code.SIGNAL, Code.WAIT_FLAG), strict=True)
    ]
    with pytest.raises(ScheduleError, match="which lane 0 signals too"):
        verify_lists(schedule, lists)


def test_num_flags_agrees_with_the_lists() -> None:
    for seed in range(40):
        schedule = random_case(random.Random(seed))
        lowering = lower(schedule)
        counts = lowering.num_flags.tolist()
        assert counts == [lowering.rank_list(rank).num_flags for rank in range(schedule.num_ranks)]
