"""Probes: schedules that move what they say, on lanes of their own, within the memory that is there."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi.calibration import probes
from uncut_mpi.calibration.effort import EFFORTS
from uncut_mpi.calibration.litmus import Exchange
from uncut_mpi.calibration.probes import Areas, Transfers
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.schedule import Kind

AREAS = Areas(4, 1 << 20)


def spans(probe, num_ranks):
    """(location, first byte, last byte, task, whether it is written) of every region."""
    schedule, found = probe.schedule, []
    for index, task in enumerate(schedule.tasks):
        for place in range(int(task["num_operands"])):
            operand = schedule.operands[int(task["first_operand"]) + place]
            region = schedule.regions[operand["region"]]
            buffer = schedule.buffers[region["buffer"]]
            where, offset = probe.windows[int(region["buffer"])]
            assert (where == num_ranks) == (int(buffer["location"]) == num_ranks)
            size = DType(int(buffer["dtype"])).itemsize
            last = offset + (int(buffer["ld"]) * (int(region["cols"]) - 1) + int(region["rows"])) * size
            found.append((where, offset, last, index, place == 0))
    return found


def test_transfers_at_once_move_their_bytes_on_lanes_of_their_own():
    at_once = [Transfers((0, 1), 3, 1 << 20), Transfers((4, 2), 2, 4096), Transfers((2, 4), 1, 8192, 512)]
    probe = probes.transfers(AREAS, at_once)
    schedule = probe.schedule
    assert len(schedule.lanes) == 3
    assert [int(rank) for rank in np.unique(schedule.tasks["rank"])] == [0, 2]
    for rank, expected in ((0, [1 << 20] * 3), (1, []), (2, [4096, 4096, 8192])):
        program = lower(schedule).rank_list(rank)
        assert (program.operations["code"] == Code.COPY).all()
        moved = [program.operands[at] for at in program.operations["first_operand"]]
        assert sorted(int(one["rows"] * one["cols"]) * 8 for one in moved) == expected


@pytest.mark.parametrize("link", [(0, 1), (2, 2), (4, 3), (3, 4)])
@pytest.mark.parametrize("width", [0, 512])
def test_transfers_stay_within_the_areas(link, width):
    nbytes = AREAS.nbytes // probes.row_distance(width) * width if width else AREAS.nbytes
    for where, first, last, _, _ in spans(probes.transfers(AREAS, [Transfers(link, 3, nbytes, width)]), 4):
        assert 0 <= first < last <= (AREAS.host_bytes if where == 4 else AREAS.device_bytes)


def test_transfers_of_all_links_at_once_write_nothing_twice_and_nothing_that_is_read():
    links = [(s, d) for s in range(5) for d in range(5) if (s, d) != (4, 4)]
    found = spans(probes.transfers(AREAS, [Transfers(link, 1, AREAS.nbytes) for link in links]), 4)
    for where, first, last, task, written in found:
        for other_where, other_first, other_last, other_task, _ in found:
            if written and where == other_where and task != other_task:
                assert last <= other_first or other_last <= first


@pytest.mark.parametrize(("link", "strided"), [((0, 1), 1), ((AREAS.num_ranks, 0), 1), ((0, AREAS.num_ranks), 0)])
def test_rows_of_strided_copies_lie_far_apart_in_the_host_or_at_the_source(link, strided):
    probe = probes.transfers(AREAS, [Transfers(link, 1, 16 * 512, 512)])
    ends = lower(probe.schedule).rank_list(0).operands
    assert [(int(end["rows"]), int(end["cols"])) for end in ends] == [(64, 16)] * 2
    assert [int(end["ld"]) for end in ends] == [8192 if at == strided else 64 for at in (0, 1)]
    assert probes.row_distance(1 << 17) == 1 << 18


def test_a_load_multiplies_on_the_devices_of_the_link_only():
    host = AREAS.num_ranks
    for link, ranks in (((0, 1), [0, 1]), ((host, 1), [1]), ((1, host), [1]), ((2, 2), [2])):
        load = probes.Load((64, 48, 32), 3, 1 << 20, DType.f16)
        schedule = probes.transfers(AREAS, [Transfers(link, 2, 1 << 12)], load).schedule
        tasks = schedule.tasks
        products = tasks[tasks["kind"] == Kind.GEMM]
        assert products["rank"].tolist() == [rank for rank in ranks for _ in range(3)]
        assert (tasks["kind"] == Kind.COPY).sum() == 2
        operands = schedule.operands[products["first_operand"] + 1]
        assert (schedule.buffers[schedule.regions[operands["region"]]["buffer"]]["dtype"] == DType.f16).all()


def test_hops_await_one_another():
    for ranks, code in (([0], Code.WAIT_EVENT), ([0, 1], Code.WAIT_FLAG)):
        lowering = lower(probes.hops(AREAS, ranks, 10).schedule)
        waits = sum(int((lowering.rank_list(rank).operations["code"] == code).sum()) for rank in ranks)
        assert waits == 9


@pytest.mark.parametrize(("copies", "waits", "lanes"), [(False, 6, 2), (True, 13, 2)])
def test_sums_in_turns_await_one_another_or_the_copy_between_them(copies, waits, lanes):
    schedule = probes.turns(AREAS, 16, 7, 1 << 20, copies=copies).schedule
    operations = lower(schedule).rank_list(0).operations
    assert int((operations["code"] == Code.WAIT_EVENT).sum()) == waits
    assert len(schedule.lanes) == lanes
    kinds = schedule.tasks["kind"]
    assert (int((kinds == Kind.COMBINE).sum()), int((kinds == Kind.COPY).sum())) == (7, 7 if copies else 0)


def test_every_signalled_copy_has_a_flag_and_a_wait():
    lowering = lower(probes.signalled(AREAS, 7).schedule)
    codes = [lowering.rank_list(rank).operations["code"] for rank in (0, 1)]
    assert [int((codes[0] == code).sum()) for code in (Code.COPY, Code.SIGNAL)] == [7, 7]
    assert [int((codes[1] == code).sum()) for code in (Code.COPY, Code.WAIT_FLAG)] == [7, 7]


def test_small_copies_beside_large_ones_are_on_other_lanes_and_touch_nothing_of_theirs():
    probe = probes.beside(AREAS, 3, 5)
    tasks, lanes = probe.schedule.tasks, probe.schedule.lanes
    assert len(lanes) == 3
    large = tasks["lane"] == 0
    assert (int(large.sum()), int((~large).sum())) == (3, 10)
    assert (
        sum(int((lower(probe.schedule).rank_list(rank).operations["code"] == Code.WAIT_FLAG).sum()) for rank in (0, 1))
        == 9
    )
    found = spans(probe, 4)
    for where, first, last, task, written in found:
        assert 0 <= first < last <= AREAS.device_bytes
        for other_where, other_first, other_last, other, _ in found:
            apart = where != other_where or last <= other_first or other_last <= first
            assert apart or not written or bool(large[task]) == bool(large[other])


def test_waits_for_flags_that_are_set_are_all_that_two_probes_differ_by():
    lists = [lower(probes.waiting(AREAS, 7, waits=waits).schedule) for waits in (True, False)]
    for code, of_rank, counts in ((Code.WAIT_FLAG, 1, (7, 0)), (Code.SIGNAL, 0, (7, 0)), (Code.COPY, 0, (7, 7))):
        assert tuple(int((one.rank_list(of_rank).operations["code"] == code).sum()) for one in lists) == counts
    copies = [int((one.rank_list(1).operations["code"] == Code.COPY).sum()) for one in lists]
    assert copies[0] == copies[1] > 7


@pytest.mark.parametrize("dtype", list(DType))
def test_products_lie_in_the_memory_of_their_effort(dtype):
    for effort in EFFORTS.values():
        for product in effort.products:
            probe = probes.products(2, product, dtype, 4, effort.compute_bytes)
            lds = probe.schedule.buffers["ld"][3:] * dtype.itemsize
            assert (product.aligned or dtype.itemsize % 16 == 0) == (lds % 16 == 0).all()
            assert len(probe.schedule.lanes) == 2 * product.lanes
            assert (probe.schedule.tasks["kind"] == Kind.GEMM).all()
            assert max(last for _, _, last, _, _ in spans(probe, 2)) <= 2 * effort.compute_bytes
        combined = spans(probes.combines(2, *effort.combine, DType.f64, 1, effort.compute_bytes), 2)
        assert max(last for _, _, last, _, _ in combined) <= 2 * effort.compute_bytes


def test_held_products_come_after_what_holds_them_on_each_lane():
    effort = EFFORTS["cuda"]
    for lanes in (1, 2):
        product, hold = probes.Product((512, 256, 4096), lanes=lanes), probes.Hold(*effort.combine, 3)
        probe = probes.products(2, product, DType.f16, 4, effort.compute_bytes, hold)
        tasks = probe.schedule.tasks
        for lane in range(2 * lanes):
            kinds = tasks["kind"][tasks["lane"] == lane].tolist()
            assert kinds == [Kind.COMBINE] * 3 + [Kind.GEMM] * (4 // lanes)
        assert max(last for _, _, last, _, _ in spans(probe, 2)) <= 2 * effort.compute_bytes


def test_the_litmus_reads_every_pushed_block_twice_and_lies_apart():
    case = Exchange(3, 512, 2, 0)
    probe = case.probe()
    kinds = probe.schedule.tasks["kind"].tolist()
    assert kinds.count(Kind.COMBINE) == 3 * 2 * 2
    assert kinds.count(Kind.COPY) == 2 * 3 * 2 * 2 + 3
    written = [(where, first, last) for where, first, last, _, is_written in spans(probe, 3) if is_written]
    for at, (where, first, last) in enumerate(written):
        for other_where, other_first, other_last in written[at + 1 :]:
            assert where != other_where or last <= other_first or other_last <= first


def test_no_word_of_the_litmus_is_sent_twice():
    words = [
        Exchange(3, 64, 2, series).sent(rank, run).ravel() for series in (0, 1) for rank in range(3) for run in range(4)
    ]
    together = np.concatenate(words)
    assert len(np.unique(together)) == len(together)
