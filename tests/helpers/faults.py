"""
Faults to plant in right schedules and in their lists. Each returns what it changed, or None where it cannot be planted.

A fault may happen to be harmless (a dropped await that others imply): `oracle.is_wrong` and `oracle.wrong_lists` tell.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tests.helpers import oracle
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.form import OP_BITS, Form
from uncut_mpi.planning.lower import Code, OperationList, lower
from uncut_mpi.planning.schedule import AWAIT_DTYPE, Factor, Kind, Op, Role, Schedule
from uncut_mpi.planning.verify import verify
from uncut_mpi.planning.verify_lists import verify_lists

Tables = TypeVar("Tables", Schedule, OperationList)
Lists: TypeAlias = list[OperationList]
Fault: TypeAlias = Callable[[Schedule, random.Random], "Schedule | None"]
ListFault: TypeAlias = Callable[[Lists, random.Random], "Lists | None"]


def changed(schedule: Schedule, **tables: np.ndarray) -> Schedule:
    """Return the schedule with some tables replaced."""
    return dataclasses.replace(schedule, **tables)


def set_rows(value: Tables, table: str, at: Any, /, **fields: Any) -> Tables:
    """Return a schedule, or a list of operations, with other values in some rows of a table."""
    rows = getattr(value, table).copy()
    for name, field in fields.items():
        rows[name][at] = field
    return dataclasses.replace(value, **{table: rows})


def drop_await(schedule: Schedule, rng: random.Random) -> Schedule | None:
    return drop_await_of(schedule, rng, np.flatnonzero(schedule.tasks["num_awaits"]))


def drop_await_of(schedule: Schedule, rng: random.Random, waiting: np.ndarray) -> Schedule | None:
    """Let one of some tasks, all of which await others, await one less."""
    tasks = schedule.tasks.copy()
    if not len(waiting):
        return None
    task = int(rng.choice(waiting))
    gone = int(tasks["first_await"][task]) + rng.randrange(int(tasks["num_awaits"][task]))
    tasks["num_awaits"][task] -= 1
    tasks["first_await"][task + 1 :] -= 1
    return changed(schedule, tasks=tasks, awaits=np.delete(schedule.awaits, gone))


def swap_in_lane(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Move a task to the place of its predecessor in the lane, which takes its place in turn."""
    lanes = [np.flatnonzero(schedule.tasks["lane"] == lane) for lane in range(len(schedule.lanes))]
    lanes = [lane for lane in lanes if len(lane) > 1]
    if not lanes:
        return None
    lane = rng.choice(lanes)
    at = rng.randrange(len(lane) - 1)
    first, second = int(lane[at]), int(lane[at + 1])
    order = np.arange(len(schedule.tasks))
    order[[first, second]] = [second, first]
    new_place = np.argsort(order)
    tasks = schedule.tasks[order].copy()
    awaits = [new_place[schedule.awaited(task)] for task in order]
    tasks["first_await"] = np.cumsum([0, *(len(part) for part in awaits[:-1])])
    return changed(schedule, tasks=tasks, awaits=np.concatenate(awaits).astype(AWAIT_DTYPE))


def with_region(schedule: Schedule, operand: int, **fields: int) -> Schedule:
    regions = np.concatenate((schedule.regions, schedule.regions[[schedule.operands["region"][operand]]]))
    with_copy = set_rows(schedule, "operands", operand, region=len(regions) - 1)
    return set_rows(changed(with_copy, regions=regions), "regions", -1, **fields)


def shift_region(schedule: Schedule, rng: random.Random) -> Schedule | None:
    operand = rng.randrange(len(schedule.operands))
    old = schedule.regions[schedule.operands["region"][operand]]
    buffer = schedule.buffers[old["buffer"]]
    choices = [
        {name: int(old[name]) + step}
        for name, extent in (("row", "rows"), ("col", "cols"))
        for step in (-1, 1)
        if 0 <= old[name] + step <= buffer[extent] - old[extent]
    ]
    return with_region(schedule, operand, **rng.choice(choices)) if choices else None


def take_another_tile(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Point an operand at another region of the same shape in memory of the same kind and owner."""
    operand = rng.randrange(len(schedule.operands))
    old = schedule.regions[schedule.operands["region"][operand]]
    kind = ["location", "dtype"]
    like = schedule.buffers[kind][schedule.regions["buffer"]] == schedule.buffers[kind][old["buffer"]]
    like &= (schedule.regions["rows"] == old["rows"]) & (schedule.regions["cols"] == old["cols"])
    others = np.flatnonzero(like & (schedule.regions != old))
    if not len(others):
        return None
    return set_rows(schedule, "operands", operand, region=rng.choice(others))


def take_another_triangle(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """
    Write the other triangle of C, all of it, one with the next diagonal, or one whose diagonal is real or not.

    Or leave out an epilogue, take the next element of its vectors first, or those of columns for rows.
    """
    sums = schedule.tasks["first_operand"][np.isin(schedule.tasks["kind"], (Kind.COMBINE, Kind.GEMM))]
    written = sums[schedule.operands["op"][sums] >= Op.LOWER]
    if not len(written):
        return None
    at = rng.choice(written.tolist())
    old, below = (schedule.operands[name][at] for name in ("op", "diagonal"))
    others = [op for op in Op if op >= Op.LOWER and op != old]
    changes = [*({"op": op} for op in (*others, Op.N)), {"diagonal": below - 1}, {"diagonal": below + 1}]
    return set_rows(schedule, "operands", at, **rng.choice(changes))


def reuse_a_buffer_early(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Let two buffers of one rank be one, so that the second use may overtake the first."""
    buffers = schedule.buffers
    pairs = [
        (keep, gone)
        for keep in range(len(buffers))
        for gone in range(len(buffers))
        if keep != gone
        and buffers["role"][keep] != Role.USER
        and buffers["role"][gone] != Role.USER
        and all(buffers[name][keep] == buffers[name][gone] for name in ("location", "dtype"))
        and all(buffers[name][keep] >= buffers[name][gone] for name in ("rows", "cols"))
    ]
    if not pairs:
        return None
    keep, gone = rng.choice(pairs)
    return set_rows(schedule, "regions", schedule.regions["buffer"] == gone, buffer=keep)


def reuse_a_slot_early(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Let what comes into memory of ours no longer await those who use what was there before."""
    region = schedule.regions[schedule.operands["region"]]
    ours = schedule.buffers["role"][region["buffer"]] != Role.USER
    used: set[int] = set()
    again = []
    for task, record in enumerate(schedule.tasks):
        first, count = int(record["first_operand"]), int(record["num_operands"])
        if record["kind"] in (Kind.COPY, Kind.RECV) and record["num_awaits"] and region["buffer"][first] in used:
            again.append(task)
        used.update(region["buffer"][first : first + count][ours[first : first + count]].tolist())
    return drop_await_of(schedule, rng, np.array(again, np.int64))


def take_another_piece(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Use another piece of a matrix of the caller's, which may be dealt or whole, of the same shape."""
    region = schedule.regions[schedule.operands["region"]]
    users = np.flatnonzero(schedule.buffers["role"][region["buffer"]] == Role.USER)
    if not len(users):
        return None
    operand = rng.choice(users)
    old = region[operand]
    buffers = schedule.buffers
    like = [
        (at, row, col)
        for at in np.flatnonzero(
            (buffers["role"] == Role.USER) & (buffers["location"] == buffers["location"][old["buffer"]])
        ).tolist()
        for row in {0, int(old["row"]), int(buffers["rows"][at] - old["rows"])}
        for col in {0, int(old["col"]), int(buffers["cols"][at] - old["cols"])}
        if 0 <= row <= buffers["rows"][at] - old["rows"]
        and 0 <= col <= buffers["cols"][at] - old["cols"]
        and (at, row, col) != (old["buffer"], old["row"], old["col"])
    ]
    if not like:
        return None
    at, row, col = rng.choice(sorted(like))
    return with_region(schedule, operand, buffer=at, row=row, col=col)


def sends_of(schedule: Schedule) -> np.ndarray:
    return np.flatnonzero(schedule.tasks["kind"] == Kind.SEND)


def lose_a_message(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Neither of two halves does anything."""
    sends = sends_of(schedule)
    if not len(sends):
        return None
    send = int(rng.choice(sends))
    return set_rows(schedule, "tasks", slice(send, send + 2), kind=Kind.JOIN, num_operands=0)


def double_a_message(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Send and receive something twice, the second time at the end of all."""
    sends = sends_of(schedule)
    if not len(sends):
        return None
    send, count = int(rng.choice(sends)), len(schedule.tasks)
    again = schedule.tasks[send : send + 2].copy()
    again["first_await"], again["num_awaits"] = len(schedule.awaits), (0, 1)
    awaits = np.append(schedule.awaits, np.array([count], AWAIT_DTYPE))
    return changed(schedule, tasks=np.concatenate((schedule.tasks, again)), awaits=awaits)


def cross_two_messages(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Let two messages of one rank, to the same one or not, carry what the other should."""
    sends = sends_of(schedule)
    pairs = [
        (one, other)
        for one in sends
        for other in sends
        if one < other and schedule.tasks["rank"][one] == schedule.tasks["rank"][other]
    ]
    if not pairs:
        return None
    first = schedule.tasks["first_operand"][[*rng.choice(pairs)]]
    return set_rows(schedule, "operands", first, region=schedule.operands["region"][first[::-1]])


def change_a_factor(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """alpha or beta applied twice, never, or to something else."""
    places = []
    for task, record in enumerate(schedule.tasks):
        first = int(record["first_operand"])
        if record["kind"] == Kind.GEMM:
            places += [first + 1, *([first + 3] if record["num_operands"] == 4 else [])]
        elif record["kind"] == Kind.COMBINE:
            places += range(first + 1, first + len(schedule.operands_of(task)))
    if not places:
        return None
    at = rng.choice(places)
    others = [factor for factor in Factor if factor != schedule.operands["factor"][at]]
    return set_rows(schedule, "operands", at, factor=rng.choice(others))


def skip_a_task(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A copy, a k block or a combination is missing."""
    bodies = np.flatnonzero(schedule.tasks["kind"] != Kind.JOIN)
    return set_rows(schedule, "tasks", rng.choice(bodies), kind=Kind.JOIN, num_operands=0)


def repeat_a_task(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A k block is summed twice, or C_in fetched again after it was changed."""
    task = rng.randrange(len(schedule.tasks))
    tasks = np.insert(schedule.tasks, task + 1, schedule.tasks[task])
    awaits = schedule.awaits + (schedule.awaits > task).astype(AWAIT_DTYPE)
    return changed(schedule, tasks=tasks, awaits=awaits)


def multiply_another_k_block(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Give a GEMM the inputs of another GEMM of the same rank."""
    gemms = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    if len(gemms) < 2:
        return None
    task = rng.choice(gemms)
    rank = schedule.tasks["rank"]
    others = [other for other in gemms if other != task and rank[other] == rank[task]]
    if not others:
        return None
    mine, theirs = schedule.tasks["first_operand"][[task, rng.choice(others)]].tolist()
    inputs = schedule.operands["region"][theirs + 1 : theirs + 3]
    return set_rows(schedule, "operands", slice(mine + 1, mine + 3), region=inputs)


def take_an_operand_the_other_way_round(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Use what a GEMM multiplies, or a COPY transposes, by another op; of more than a row or column."""
    large = (schedule.regions["rows"] > 1) & (schedule.regions["cols"] > 1)
    places = []
    for record in schedule.tasks:
        read = int(record["first_operand"]) + 1
        if record["kind"] == Kind.GEMM:
            places += [read, read + 1]
        elif record["kind"] == Kind.COPY and schedule.operands["op"][read] == Op.T:
            places.append(read)
    places = [place for place in places if large[schedule.operands["region"][place]]]
    if not places:
        return None
    place = rng.choice(places)
    return set_rows(schedule, "operands", place, op=Op.N if schedule.operands["op"][place] == Op.T else Op.T)


FAULTS: tuple[Fault, ...] = (
    drop_await,
    swap_in_lane,
    shift_region,
    take_another_tile,
    reuse_a_buffer_early,
    change_a_factor,
    skip_a_task,
    repeat_a_task,
    multiply_another_k_block,
)
MORE_FAULTS: tuple[Fault, ...] = (
    take_another_piece,
    reuse_a_slot_early,
    take_an_operand_the_other_way_round,
    take_another_triangle,
    lose_a_message,
    double_a_message,
    cross_two_messages,
)
"""Such as need slots that are used again, matrices in parts, or several nodes."""


# -- faults in lists -------------------------------------------------------------------------------


def with_program(lists: Lists, program: OperationList) -> Lists:
    return [program if one.rank == program.rank else one for one in lists]


def with_operations(lists: Lists, rank: int, operations: np.ndarray) -> Lists:
    return with_program(lists, dataclasses.replace(lists[rank], operations=operations))


def with_fields(lists: Lists, rank: int, at: Any, **fields: Any) -> Lists:
    """Return the lists with other values in an operation of a rank."""
    return with_program(lists, set_rows(lists[rank], "operations", at, **fields))


def places(lists: Lists, *codes: Code) -> list[tuple[int, int]]:
    """Return (rank, operation) of every operation with one of the codes."""
    return [
        (program.rank, at)
        for program in lists
        for at in np.flatnonzero(np.isin(program.operations["code"], codes)).tolist()
    ]


BODIES = Code.COPY, Code.GEMM, Code.COMBINE, Code.SEND, Code.RECV


def without_one(*codes: Code) -> ListFault:
    def plant(lists: Lists, rng: random.Random) -> Lists | None:
        found = places(lists, *codes)
        if not found:
            return None
        rank, at = rng.choice(found)
        return with_operations(lists, rank, np.delete(lists[rank].operations, at))

    return plant


def one_twice(*codes: Code) -> ListFault:
    """Once more at its place, or at the end of the lane."""

    def plant(lists: Lists, rng: random.Random) -> Lists | None:
        found = places(lists, *codes)
        if not found:
            return None
        rank, at = rng.choice(found)
        operations = lists[rank].operations
        to = rng.choice((at, len(operations)))
        return with_operations(lists, rank, np.insert(operations, to, operations[at]))

    return plant


def two_exchanged(*codes: Code) -> ListFault:
    """Two neighbours of a lane, each at the other's place."""

    def plant(lists: Lists, rng: random.Random) -> Lists | None:
        found = places(lists, *codes)
        pairs = []
        for rank, at in found:
            lane = lists[rank].operations["lane"]
            later = np.flatnonzero(lane[at + 1 :] == lane[at]) + at + 1
            pairs += [(rank, at, int(other)) for other in later[:1]]
        if not pairs:
            return None
        rank, at, other = rng.choice(pairs)
        operations = lists[rank].operations.copy()
        operations[[at, other]] = operations[[other, at]]
        return with_operations(lists, rank, operations)

    return plant


def wait_for_an_earlier_task(lists: Lists, rng: random.Random) -> Lists | None:
    """Take a flag for told that says what another task did before, or the call before."""
    found = places(lists, Code.WAIT_FLAG)
    if not found:
        return None
    rank, at = rng.choice(found)
    return with_fields(lists, rank, at, value=rng.randrange(int(lists[rank].operations["value"][at])))


def begin_the_next_epoch_early(lists: Lists, rng: random.Random) -> Lists | None:
    """Let flags of a call say what the next one awaits."""
    span = lists[0].span
    return [dataclasses.replace(one, span=rng.randrange(1, span)) for one in lists] if span > 1 else None


def share_a_flag(lists: Lists, rng: random.Random) -> Lists | None:
    """Let two lanes write one flag."""
    ranks = [program.rank for program in lists if program.num_flags > 1]
    if not ranks:
        return None
    owner = rng.choice(ranks)
    keep, gone = rng.sample(range(lists[owner].num_flags), 2)
    for program in lists:
        operations = program.operations
        its = (operations["code"] == Code.SIGNAL) & (operations["peer"] == owner)
        its |= (operations["code"] == Code.WAIT_FLAG) & (program.rank == owner)
        its &= (operations["in_host"] == 0) & (operations["slot"] == gone)
        lists = with_fields(lists, program.rank, its, slot=keep)
    return lists


def reuse_an_event(lists: Lists, rng: random.Random) -> Lists | None:
    """Record what is awaited in an event that holds something else."""
    found = [(rank, at) for rank, at in places(lists, Code.RECORD) if lists[rank].num_events > 1]
    if not found:
        return None
    rank, at = rng.choice(found)
    operations = lists[rank].operations
    slot = rng.choice([one for one in range(lists[rank].num_events) if one != operations["slot"][at]])
    its = (operations["code"] == Code.WAIT_EVENT) & (operations["peer"] == operations["lane"][at])
    its &= operations["value"] == operations["value"][at]
    its[at] = True
    return with_fields(lists, rank, its, slot=slot)


def message_of_another_rank(lists: Lists, rng: random.Random) -> Lists | None:
    """Send to another rank, or receive from one."""
    found = places(lists, Code.SEND, Code.RECV)
    if not found:
        return None
    rank, at = rng.choice(found)
    others = [one.rank for one in lists if one.rank not in (rank, lists[rank].operations["peer"][at])]
    return with_fields(lists, rank, at, peer=rng.choice(others)) if others else None


def operand_of_another_form(lists: Lists, rng: random.Random) -> Lists | None:
    """Read the other triangle of an operand that has a form."""
    found = [(one.rank, at) for one in lists for at in np.flatnonzero(one.operands["op"] > max(Op)).tolist()]
    if not found:
        return None
    rank, at = rng.choice(found)
    op = Form.of_code(int(lists[rank].operands["op"][at])).transposed.code | lists[rank].operands["op"][at] & OP_BITS
    return with_program(lists, set_rows(lists[rank], "operands", at, op=op))


def operand_of_another(lists: Lists, rng: random.Random) -> Lists | None:
    """Let an operand lie where another one of the same shape and type lies."""
    ranks = [program.rank for program in lists if len(program.operands) > 1]
    if not ranks:
        return None
    rank = rng.choice(ranks)
    operands = lists[rank].operands
    at = rng.randrange(len(operands))
    place, shape = ["buffer", "offset"], ["dtype", "rows", "cols", "ld"]
    others = np.flatnonzero((operands[shape] == operands[shape][at]) & (operands[place] != operands[place][at]))
    if not len(others):
        return None
    other = operands[rng.choice(others)]
    return with_program(lists, set_rows(lists[rank], "operands", at, buffer=other["buffer"], offset=other["offset"]))


LIST_FAULTS: dict[str, ListFault] = {
    "drop_a_wait": without_one(Code.WAIT_EVENT, Code.WAIT_FLAG),
    "drop_a_signal": without_one(Code.SIGNAL, Code.RECORD),
    "swap_operations": two_exchanged(*Code),
    "operand_of_another": operand_of_another,
    "skip_a_body": without_one(Code.COPY, Code.GEMM, Code.COMBINE),
    "repeat_a_body": one_twice(Code.COPY, Code.GEMM, Code.COMBINE),
    "wait_for_an_earlier_task": wait_for_an_earlier_task,
    "begin_the_next_epoch_early": begin_the_next_epoch_early,
    "share_a_flag": share_a_flag,
    "reuse_an_event": reuse_an_event,
    "lose_half_a_message": without_one(Code.SEND, Code.RECV),
    "double_half_a_message": one_twice(Code.SEND, Code.RECV),
    "swap_messages": two_exchanged(Code.SEND, Code.RECV),
    "message_of_another_rank": message_of_another_rank,
    "operand_of_another_form": operand_of_another_form,
}
CLASSES = {
    "dropped wait": (drop_await, "drop_a_wait", "drop_a_signal"),
    "swapped order": (swap_in_lane, "swap_operations"),
    "wrong region": (
        shift_region,
        take_another_tile,
        take_another_triangle,
        multiply_another_k_block,
        "operand_of_another",
        "operand_of_another_form",
    ),
    "wrong piece": (take_another_piece, take_an_operand_the_other_way_round),
    "early reuse of a slot": (reuse_a_buffer_early, reuse_a_slot_early, "reuse_an_event"),
    "reused flag": ("wait_for_an_earlier_task", "begin_the_next_epoch_early", "share_a_flag"),
    "lost message": (lose_a_message, "lose_half_a_message"),
    "doubled message": (double_a_message, "double_half_a_message"),
    "message matched wrongly": (cross_two_messages, "swap_messages", "message_of_another_rank"),
    "k, alpha or beta lost or doubled": (change_a_factor, skip_a_task, repeat_a_task, "skip_a_body", "repeat_a_body"),
}
"""All faults, those of lists by their names, by what goes wrong."""


@dataclasses.dataclass
class Tally:
    """How often a fault was planted and did harm, and of what did the proof refused how much."""

    planted: int = 0
    harmful: int = 0
    caught: int = 0


def plant_all(schedule: Schedule, seed: int, tallies: dict[str, Tally]) -> None:
    """Plant every fault in a schedule of some tasks and in its lists, each by itself, and count what came of it."""
    if not len(schedule.operands):
        return
    for fault in (*FAULTS, *MORE_FAULTS):
        mutant = fault(schedule, random.Random(seed))
        if mutant is not None:
            wrong = oracle.is_wrong(mutant)
            count(tallies, fault.__name__, wrong, lambda made=mutant: verify(made))
    lowering = lower(schedule)
    lists = [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]
    for name, list_fault in LIST_FAULTS.items():
        others = list_fault(lists, random.Random(seed))
        if others is not None:
            wrong = oracle.wrong_lists(schedule, others)
            count(tallies, name, wrong, lambda made=others: verify_lists(schedule, made))


def count(tallies: dict[str, Tally], name: str, wrong: str, prove: Callable[[], object]) -> None:
    tally = tallies.setdefault(name, Tally())
    tally.planted += 1
    tally.harmful += bool(wrong)
    if wrong:
        try:
            prove()
        except ScheduleError:
            tally.caught += 1


def spoiled(fault: Fault, make: Callable[[random.Random], Schedule], seeds: int) -> int:
    """
    Plant a fault in random schedules and return in how many it did harm.

    The proof has to find it there, and to find nothing in the others; the oracle knows which are which.
    """
    harmful = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        mutant = fault(make(rng), rng)
        if mutant is None:
            continue
        wrong, said = oracle.is_wrong(mutant), ""
        try:
            verify(mutant)
        except ScheduleError as error:
            said = str(error)
        assert bool(wrong) == bool(said), f"seed {seed}: the oracle says {wrong!r}, verify says {said!r}"
        harmful += bool(wrong)
    return harmful
