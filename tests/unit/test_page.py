"""Timelines as a page: it has what schedule and times say, needs nothing else, and shows it in a browser."""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import numpy as np
import pytest

from tests.helpers import browser
from tests.helpers.timelines import invented_times
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import end_name
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.view import Activity, Timeline, render

NODES = Machine.cluster(Machine.uniform(2), 2, Net(10.0))


@functools.lru_cache
def made(machine=NODES, place="h,0,h"):
    problem = GemmProblem(900, 800, 700, DType.f64, "T", "N", reads_c=True)
    placement, options = Places.parse(place).bind(problem, 4), ScheduleOptions(scheduler="kblocks")
    return plan(problem, placement, 4, machine, options).schedule


def shown(schedule, name="predicted", seed=0, machine=NODES):
    return Timeline.of(schedule, *invented_times(schedule, seed), name, machine)


def data_of(timelines):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page_of(timelines), re.DOTALL)
    return json.loads(found)


def page_of(timelines):
    return render("page.html", timelines).decode()


def test_a_page_has_a_column_for_all_that_is_known_of_tasks():
    schedule = made()
    both = [shown(schedule), shown(schedule, "measured", 1)]
    data = data_of(both)
    first, tasks = both[0], data["tasks"]
    assert tasks["task"] == first.task.tolist()
    assert data["labels"] == list(first.labels)
    assert tasks["kind"] == first.activity.tolist()
    assert [name for name, _ in data["kinds"]] == [one.label for one in Activity]
    lanes = [[first.lanes[lane].rank, first.lanes[lane].name] for lane in first.lane.tolist()]
    assert [data["lanes"][at] for at in tasks["lane"]] == lanes
    assert data["names"] == ["predicted", "measured"]
    for one, times in zip(both, data["times"], strict=True):
        assert np.allclose(np.array(times["start"]) * 1e-9, one.start_s, rtol=0, atol=1e-9)
        assert np.allclose(np.array(times["length"]) * 1e-9, one.end_s - one.start_s, rtol=0, atol=2e-9)


def test_amounts_are_operations_of_products_and_bytes_of_all_else():
    schedule = made()
    data = data_of([shown(schedule)])
    task, amount = np.array(data["tasks"]["task"]), np.array(data["tasks"]["amount"])
    kind = schedule.tasks["kind"][task]
    assert amount[kind == Kind.GEMM].sum() == schedule.problem.flops
    copies = schedule.copies()
    np.testing.assert_array_equal(amount[np.isin(task, copies[:, 0])], copies[:, 3])
    sends, receives = (amount[kind == one] for one in (Kind.SEND, Kind.RECV))
    assert len(sends)
    np.testing.assert_array_equal(receives, sends)
    for at in np.flatnonzero(kind == Kind.COMBINE):
        regions = schedule.regions[schedule.operands_of(task[at])["region"]]
        assert amount[at] == 8 * (regions["rows"] * regions["cols"]).sum()


@pytest.mark.parametrize(
    ("machine", "place"), [(NODES, "h,0,h"), (load_machine("karolina-8xa100").subset(range(4)), "h,rows@C,h")]
)
def test_every_copy_between_memories_counts_for_its_link_and_the_ports_of_that_once(machine, place):
    schedule = made(machine, place)
    assert (machine is NODES) != (schedule.bytes_by_link()["local"] > 0)
    data = data_of([shown(schedule, machine=machine)])
    links, amounts = np.array(data["tasks"]["link"]), np.array(data["tasks"]["amount"])
    moved, rates = {}, {}
    for name, rate, weights in data["charts"]:
        moved[name] = sum(weight * amounts[links == link].sum() for link, weight in weights)
        rates[name] = rate
    expected, known = {}, {}
    for _, source, destination, nbytes in schedule.copies().tolist():
        ends = [end_name(schedule.locations, end) for end in (source, destination)]
        shared = [(f"port {port.name}", port.expected_gb_per_s, port) for port in machine.ports]
        for name, rate, port in [("->".join(ends), machine.bandwidth_gb_per_s[source, destination], None), *shared]:
            weights = {(source, destination): 1} if port is None else dict(zip(port.links, port.weights, strict=True))
            if source != destination and (source, destination) in weights:
                expected[name] = expected.get(name, 0) + nbytes * weights[source, destination]
                known[name] = rate
    assert moved == pytest.approx(expected)
    assert rates == pytest.approx(known)
    order = [(not name.startswith("port "), -moved[name] / rates[name]) for name in moved]
    assert order == sorted(order)
    assert data_of([shown(schedule, machine=None)])["charts"] == []


def test_a_task_that_one_run_has_no_time_of_is_there_without():
    schedule = made()
    start, end = invented_times(schedule)
    lost = int(shown(schedule).task[5])
    end[lost] = np.nan
    data = data_of([shown(schedule), Timeline.of(schedule, start, end, "measured", NODES)])
    at = data["tasks"]["task"].index(lost)
    assert [times["length"][at] >= 0 for times in data["times"]] == [True, False]


def test_timelines_of_different_schedules_are_no_page():
    with pytest.raises(ParamError, match="of one schedule"):
        render("page.html", [shown(made()), shown(made(place="0,0,0"))])


def test_a_page_is_one_file_of_few_bytes_for_a_task_and_ends_where_it_should():
    schedule = made()
    named = dataclasses.replace(NODES, name="</script><b>x")
    both = [shown(schedule, machine=named), shown(schedule, "measured", 1, named)]
    page = page_of(both)
    assert page.count("</script>") == 2
    assert data_of(both)["title"].endswith("machine </script><b>x")
    assert "default-src 'none'" in page  # so a browser loads nothing else
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(|\bimport\b|fetch\(", page)
    # 20,000 tasks in less than 4 MB.
    assert len(json.dumps(data_of(both), separators=(",", ":"))) < 200 * len(both[0].task)


@pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_task_pointed_at_and_zooms(tmp_path, scheme):
    schedule, path = made(), tmp_path / "page.html"
    both = [shown(schedule), shown(schedule, "measured", 1)]
    path.write_bytes(render(str(path), both))
    first, second = both
    row = int(np.flatnonzero(first.activity == Activity.GEMM)[0])
    with browser.page(path, scheme=scheme) as page:

        def text(name):
            return page.value(f"get('{name}').textContent")

        def span():
            return page.value("[from, to]")

        def colour(x, y):  # of the canvas
            return page.value(f"[...pen.getImageData({x} * devicePixelRatio, {y} * devicePixelRatio, 1, 1).data]")

        assert text("title") == data_of(both)["title"]
        assert all(Activity(one).label in text("legend") for one in np.unique(first.activity))
        whole = span()
        assert whole == [0, pytest.approx(1e9 * max(one.seconds for one in both), abs=2)]
        # The middle of a product, in the upper line of its lane: what was expected.
        place = page.value("(({left, top}) => [left, top])(canvas.getBoundingClientRect())")
        start, length = (page.value(f"times[0].{name}[{row}]") for name in ("start", "length"))
        x = round(page.value(f"xOf({start + length / 2})"))  # whole, as those of the mouse are
        y = page.value(f"rows[tasks.lane[{row}]].top + 3")
        ground, box = colour(2, 2), colour(x, y)
        assert (sum(ground[:3]) < 200) == (scheme == "dark")  # behind the times
        assert box != ground
        page.mouse("Moved", place[0] + x, place[1] + y)
        said = text("hover").split("\n")
        assert said[0] == first.labels[row]
        assert said[1].startswith(f"product, task {first.task[row]}, rank {first.rank[row]} compute 0, ")
        lengths = [float(one.end_s[row] - one.start_s[row]) for one in both]
        for one, line, seconds in zip(both, said[2:], lengths, strict=True):
            begins, unit, takes = re.match(rf"{one.name}: begins at (\S+) (\w+), takes (\S+) µs, ", line).groups()
            assert float(begins) * {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit] == pytest.approx(one.start_s[row])
            assert float(takes) == pytest.approx(seconds * 1e6, rel=1e-3)
            assert "FLOP/s" in line
        assert float(re.search(r"; (\S+) × predicted$", said[3])[1]) == pytest.approx(lengths[1] / lengths[0], rel=1e-3)
        # The wheel keeps in its place what is pointed at, and does not go beyond the ends.
        under = page.value(f"nsOf({x})")
        page.mouse("Wheel", place[0] + x, place[1] + y, deltaX=0, deltaY=-400)
        closer = span()
        assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) * np.exp(-0.8))
        assert page.value(f"nsOf({x})") == pytest.approx(under)
        assert text("span") != f"{whole[0]} to {whole[1]}"
        page.mouse("Wheel", place[0] + x, place[1] + y, deltaX=0, deltaY=4000)
        assert span() == whole
        # A drag zooms to what it covers, the key 0 leads back, others zoom, move and go on.
        ends = [page.value(f"nsOf({at})") for at in (300, 500)]
        page.mouse("Pressed", place[0] + 300, place[1] + y, button="left", buttons=1, clickCount=1)
        page.mouse("Moved", place[0] + 500, place[1] + y, button="left", buttons=1)
        page.mouse("Released", place[0] + 500, place[1] + y, button="left", clickCount=1)
        assert span() == pytest.approx(ends, rel=1e-6)
        page.key("0")
        assert span() == whole
        page.key("+")
        half = span()
        assert half[1] - half[0] == pytest.approx((whole[1] - whole[0]) / 2)
        page.key("ArrowRight")
        assert span()[0] == pytest.approx(half[0] + 0.2 * (half[1] - half[0]))
        page.value("get('reset').click()")
        assert span() == whole
        page.key("Escape")
        assert text("hover") == ""
        page.key(".")
        on_lane = second.lane == data_lane(both, 0)
        earliest = np.flatnonzero(on_lane)[np.argmin(second.start_s[on_lane])]
        assert text("hover").split("\n")[0] == second.labels[earliest]
        # A chart says how much of its link is used; where nothing is copied that is nothing.
        link = page.value("rows.findIndex((row) => row.chart?.[2].length === 1)")
        page.value(f"view.scrollTop = rows[{link}].top")
        y = page.value(f"rows[{link}].top - view.scrollTop + 5")
        one = page.value(f"rows[{link}].ordered[1][0]")
        x = page.value(f"xOf(times[1].start[{one}] + times[1].length[{one}] / 2)")
        page.mouse("Moved", place[0] + x, place[1] + y)
        name, bandwidth = page.value(f"rows[{link}].chart.slice(0, 2)")
        used = page.value(f"tasks.amount[{one}] / times[1].length[{one}]") / bandwidth
        said = text("hover").split("\n")
        assert said[0] == f"{name}, {bandwidth:g} GB/s"
        assert re.match(rf"measured: {100 * used:.1f} % used at ", said[2])


def data_lane(timelines, row):
    """Return the number in the schedule of the lane that stands in a row."""
    return timelines[0].used_lanes[row]
