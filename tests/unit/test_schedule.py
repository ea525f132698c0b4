"""The schedule's own rules: encoding, structure, summaries."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.faults import set_rows
from tests.helpers.schedules import SummaOptions, random_case, summa
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import host_index
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import (
    MAX_SUMMANDS,
    TASK_DTYPE,
    Factor,
    Kind,
    Op,
    Role,
    Schedule,
    buffer_bytes,
    expand_ranges,
)

TABLES = ("tasks", "operands", "regions", "awaits", "buffers", "lanes", "locations", "pieces")


def small() -> Schedule:
    problem = GemmProblem(6, 8, 12, DType.f64, trans_a="T", lda=20)
    return summa(problem, Placement.parse("1,h,0"), 3, grid=(1, 2), options=SummaOptions(chunks=2, compute_lanes=2))


def edited(table: str, field: str, index: int, value: int) -> Schedule:
    if field:
        return set_rows(small(), table, index, **{field: value})
    awaits = small().awaits.copy()
    awaits[index] = value
    return dataclasses.replace(small(), awaits=awaits)


# -- encoding --------------------------------------------------------------------------------------


def test_decoding_gives_back_every_field_and_table() -> None:
    for seed in range(30):
        schedule = random_case(random.Random(seed))
        back = Schedule.decode(schedule.encode())
        for field in dataclasses.fields(Schedule):
            mine, other = getattr(schedule, field.name), getattr(back, field.name)
            assert np.array_equal(mine, other) if field.name in TABLES else mine == other, field.name


def test_equal_schedules_have_equal_bytes_and_digests() -> None:
    assert small().encode() == small().encode()
    assert small().digest() == Schedule.decode(memoryview(small().encode())).digest()


def test_what_a_schedule_is_of_is_taken_as_it_is_where_it_is_known():
    schedule = small()
    expected = schedule.problem, schedule.placement
    back = Schedule.decode(schedule.encode(), expected)
    assert (back.problem, back.placement) == expected
    assert back.problem is expected[0]
    assert back.placement is expected[1]
    other = dataclasses.replace(schedule.problem, scales_only=True), Placement.parse("1,1,1")
    assert Schedule.decode(schedule.encode(), other).digest() == schedule.digest()
    assert len(small().digest()) == 32


@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_part_of_the_digest(table: str) -> None:
    schedule = small()
    records = getattr(schedule, table).copy()
    records[:1].view(np.uint8)[-1:] ^= 1
    assert dataclasses.replace(schedule, **{table: records}).digest() != schedule.digest()


@pytest.mark.parametrize(
    "change", [{"num_ranks": 4}, {"grid": (2, 1)}, {"tile": 3}, {"scheduler": "other"}, {"placement": "1,h,2"}]
)
def test_every_description_is_part_of_the_digest(change: dict[str, object]) -> None:
    if "placement" in change:
        change = {"placement": Placement.parse(str(change["placement"]))}
    assert dataclasses.replace(small(), **change).digest() != small().digest()


def test_bytes_cut_short_anywhere_are_refused() -> None:
    data = small().encode()
    for length in (*range(200), *range(200, len(data), 37), len(data) - 1):
        with pytest.raises(ScheduleError, match="bytes"):
            Schedule.decode(data[:length])


@pytest.mark.parametrize(
    ("offset", "number", "words"),
    [
        (0, 0, r"says \d+ bytes, \d+ were given"),
        (8, 77, "format 77 was found, this version reads 7"),
        (12, 9, "not an uncut_mpi schedule"),
    ],
)
def test_bytes_too_many_and_other_headers_are_refused(offset: int, number: int, words: str) -> None:
    data = bytearray(small().encode())
    if offset:
        struct.pack_into("<I", data, offset, number)
    else:
        data += bytes(8)
    with pytest.raises(ScheduleError, match=words):
        Schedule.decode(bytes(data))


@pytest.mark.parametrize("data", [b"", b"UNCUTSCH", bytes(200), b"\x93NUMPY" + bytes(200)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ScheduleError, match=r"too few|not an uncut_mpi schedule"):
        Schedule.decode(data)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"num_ranks"', b'"num_rankz"', "description cannot be read"),
        (b'"dtypes":["f64",', b'"dtypes":["f32",', "description cannot be read"),
        (b'"trans_a":"T"', b'"trans_a":"X"', "description cannot be read"),
        (b'"placement":"1,h,0"', b'"placement":"1,h;0"', "description cannot be read"),
        (b'"grid":[1,2]', b'"grid":[1.2]', "description cannot be read"),
        (b"{", b"[", "description cannot be read"),
        (b'"m":6', b'"m":\xff', "description cannot be read"),
        # What it holds for later.
        (b'"dtype":"f64"', b'"dtype":"f63"', "so far it is {"),
        (b'"offsets":[[0,0],', b'"offsets":[[0,1],', r"so far it is \["),
        (b'"scalars":"real"', b'"scalars":"cplx"', "so far it is real"),
    ],
)
def test_a_damaged_description_is_refused(old: bytes, new: bytes, words: str) -> None:
    data = small().encode()
    assert data.count(old) >= 1
    with pytest.raises(ScheduleError, match=words):
        Schedule.decode(data.replace(old, new, 1))


def test_a_sum_of_more_regions_than_an_executor_adds_is_refused() -> None:
    build = ScheduleBuilder(1, GemmProblem(4, 4, 4, DType.f64), Placement.parse("0,0,0"))
    at = [
        RegionRef(build.buffer(at=0, rows=4, cols=4, dtype=DType.f64, role=Role.PANEL, offset=256 * place), 0, 0, 4, 4)
        for place in range(MAX_SUMMANDS + 2)
    ]
    for count in (MAX_SUMMANDS, MAX_SUMMANDS + 1):
        build.task(Kind.COMBINE, build.compute_lane(0), at[0], [(one, Factor.ONE, Op.N) for one in at[1 : count + 1]])
        if count == MAX_SUMMANDS:
            build.build(scheduler="test", grid=(1, 1), tile=0)
    with pytest.raises(ScheduleError, match="a COMBINE reads more than 8 regions"):
        build.build(scheduler="test", grid=(1, 1), tile=0)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, len(small().encode()) - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_raises_nothing_but_schedule_errors(at: int, flip: int) -> None:
    damaged = bytearray(small().encode())
    damaged[at] ^= flip
    with contextlib.suppress(ScheduleError):
        Schedule.decode(bytes(damaged)).softbuf_bytes()


# -- structure -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "field", "index", "value", "words"),
    [
        ("awaits", "", 0, 10**6, "not earlier in the global order"),
        ("awaits", "", 0, -1, "not earlier in the global order"),
        ("tasks", "num_awaits", 0, -1, "awaits outside their table"),
        ("tasks", "first_await", 1, -1, "awaits outside their table"),
        ("tasks", "num_awaits", -1, 10**6, "awaits outside their table"),
        ("tasks", "first_operand", -1, 10**6, "operands outside their table"),
        ("tasks", "first_operand", 0, -1, "operands outside their table"),
        ("tasks", "lane", 0, 1000, "lane does not exist"),
        ("tasks", "lane", 0, -1, "lane does not exist"),
        ("tasks", "kind", 0, 4, "kind does not exist"),
        ("tasks", "rank", 0, 2, "lane is on another rank"),
        ("lanes", "rank", 0, 3, "on another rank"),
        ("operands", "region", 0, 1000, "region does not exist"),
        ("operands", "region", 0, -1, "region does not exist"),
        ("operands", "factor", 0, 4, "factor or op is unknown"),
        ("operands", "op", 0, 2, "factor or op is unknown"),
        ("regions", "buffer", 0, 1000, "buffer does not exist"),
        ("regions", "buffer", 0, -1, "buffer does not exist"),
        ("regions", "row", 0, -1, "leaves its buffer"),
        ("regions", "col", 0, -1, "leaves its buffer"),
        ("regions", "rows", 0, -1, "leaves its buffer"),
        ("regions", "cols", 0, -1, "leaves its buffer"),
        ("regions", "row", 0, 21, "leaves its buffer"),
        ("regions", "col", 0, 21, "leaves its buffer"),
        ("regions", "rows", 0, 2**62, "leaves its buffer"),
        ("regions", "cols", 0, 2**63 - 1, "leaves its buffer"),
        ("tasks", "kind", 0, 7, "does not exist"),
        ("operands", "op", 1, 2, "conjugates what is real"),
        ("buffers", "location", 0, 7, "location does not exist"),
        ("buffers", "location", 0, -1, "location does not exist"),
        ("locations", "node", 1, 1, "is not that of 3 ranks on some nodes"),
        ("locations", "node", 1, 1 << 30, "is not that of 3 ranks on some nodes"),  # of which no table is made
        ("locations", "rank", 3, 0, "is not that of 3 ranks on some nodes"),
        ("buffers", "ld", 0, 11, "leading dimension is below its rows"),
        ("buffers", "dtype", 0, len(DType), "is unknown"),
        ("buffers", "role", 0, 4, "is unknown"),
        ("buffers", "matrix", 0, 3, "is unknown"),
        ("pieces", "buffer", 0, 1000, "a piece's buffer does not exist"),
        ("pieces", "row", 0, -1, "a piece leaves its buffer"),
        ("pieces", "cols", 0, 2**62, "a piece leaves its buffer"),
        ("pieces", "turned", 0, 2, "a piece is neither turned nor not"),
    ],
)
def test_what_points_outside_is_refused_and_named(table: str, field: str, index: int, value: int, words: str) -> None:
    schedule = edited(table, field, index, value)
    with pytest.raises(ScheduleError, match=words):
        schedule.check()
    with pytest.raises(ScheduleError, match=words):
        Schedule.decode(schedule.encode())


def test_a_task_may_not_await_itself() -> None:
    schedule = small()
    task = int(np.flatnonzero(schedule.tasks["num_awaits"])[0])
    with pytest.raises(ScheduleError, match="not earlier in the global order"):
        edited("awaits", "", int(schedule.tasks["first_await"][task]), task).check()


def test_a_lane_of_a_missing_rank_is_refused_without_tasks() -> None:
    schedule = set_rows(small(), "lanes", 0, rank=7)
    with pytest.raises(ScheduleError, match="lane's rank does not exist"):
        dataclasses.replace(schedule, tasks=schedule.tasks[:0].copy()).check()


def test_negative_extents_of_an_unused_buffer_are_refused() -> None:
    schedule = small()
    buffers = np.concatenate((schedule.buffers, schedule.buffers[:1]))
    buffers["cols"][-1] = -1
    with pytest.raises(ScheduleError, match="extent is negative"):
        dataclasses.replace(schedule, buffers=buffers).check()


def test_tables_of_another_dtype_are_refused() -> None:
    schedule = small()
    with pytest.raises(ScheduleError, match="table awaits has dtype int64"):
        dataclasses.replace(schedule, awaits=schedule.awaits.astype(np.int64))
    with pytest.raises(ScheduleError, match="table tasks"):
        dataclasses.replace(schedule, tasks=np.zeros((2, 2), TASK_DTYPE))


def test_tables_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        small().tasks["kind"] = 0


# -- summaries -------------------------------------------------------------------------------------


def test_copies_and_bytes_are_counted_per_kind_of_link() -> None:
    # A (8×4 doubles) on rank 1, B (4×2) on the host, C (8×2) on rank 0, all computed by rank 0 in one step.
    schedule = summa(
        GemmProblem(8, 2, 4, DType.f64), Placement.parse("1,h,0"), 2, options=SummaOptions(steps=1, c_mode="lazy")
    )
    copies = schedule.copies()
    assert copies[:, 1:].tolist() == [[1, 0, 8 * 4 * 8], [host_index(schedule.num_ranks), 0, 4 * 2 * 8]]
    assert (schedule.tasks["kind"][copies[:, 0]] == Kind.COPY).all()
    assert schedule.bytes_by_link() == {
        "host_to_device": 64,
        "device_to_host": 0,
        "device_to_device": 256,
        "local": 0,
    }


def test_copies_home_to_the_host_count_as_device_to_host() -> None:
    schedule = summa(GemmProblem(8, 2, 4, DType.f32), Placement.parse("0,0,h0"), 1, options=SummaOptions(steps=1))
    assert schedule.bytes_by_link()["device_to_host"] == 8 * 2 * 4
    assert schedule.bytes_by_link()["host_to_device"] == 8 * 2 * 4


def test_buffer_bytes_spans_first_to_last_element() -> None:
    schedule = small()
    buffers = schedule.buffers[:4].copy()
    buffers["rows"], buffers["cols"], buffers["ld"] = [3, 3, 0, 3], [4, 1, 4, 0], [5, 5, 1, 5]
    buffers["dtype"] = [DType.f64, DType.f16, DType.f64, DType.f64]
    assert buffer_bytes(buffers).tolist() == [(5 * 3 + 3) * 8, 3 * 2, 0, 0]


def test_expand_ranges_lists_every_range_in_order() -> None:
    first, count = np.array([5, 0, 9, 2]), np.array([2, 0, 1, 3])
    assert expand_ranges(first, count).tolist() == [5, 6, 9, 2, 3, 4]
    assert expand_ranges(first[:0], count[:0]).tolist() == []


def test_the_builder_merges_equal_regions_lanes_and_awaits() -> None:
    schedule = small()
    assert len(np.unique(schedule.regions)) == len(schedule.regions)
    assert len(np.unique(schedule.lanes)) == len(schedule.lanes)
    user = schedule.buffers[schedule.buffers["role"] == Role.USER]
    assert user["ld"].tolist() == [20, 12, 6]
    assert schedule.in_host()[:3].tolist() == [False, True, False]
    for task in range(len(schedule.tasks)):
        awaited = schedule.awaited(task).tolist()
        assert awaited == sorted(set(awaited))


def test_the_description_is_json_behind_the_header() -> None:
    data = small().encode()
    start = data.index(b"{")
    about = json.loads(data[start : data.index(b"}", data.index(b'"tile"')) + 1])
    assert (about["grid"], about["placement"], about["problem"]["dtype"]) == ([1, 2], "1,h,0", "f64")
