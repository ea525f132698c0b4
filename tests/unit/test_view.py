"""Pictures of a schedule's run: what they say is what the schedule and the times say."""

from __future__ import annotations

import builtins
import dataclasses
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.by_hand import ByHand
from tests.helpers.schedules import random_case
from tests.helpers.timelines import check_trace, invented_times
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, Op
from uncut_mpi.view import Activity, Timeline, check_drawable, draw_transfers, render, to_perfetto, to_text, traffic
from uncut_mpi.view.figure import draw_timelines

NODE_SEVEN = dataclasses.replace(Machine.uniform(4), name="node seven")


def make(place="h,h,h", m=3000, n=2600, k=2000, ranks=4, swapped=False, trans="NN", **options):
    problem = GemmProblem(m, n, k, DType.f64, *trans, reads_c=True)
    if swapped:
        problem = dataclasses.replace(problem, swapped=True)
    settings = ScheduleOptions(scheduler="uncut", tile=640, chunks=2, **options)
    return plan(problem, Placement.parse(place), ranks, Machine.uniform(ranks), settings).schedule


def timeline(schedule, name="predicted", seed=0):
    return Timeline.of(schedule, *invented_times(schedule, seed), name)


def with_joins():
    rng = random.Random(1)
    return next(s for s in iter(lambda: random_case(rng, max_ranks=4, max_extent=30), None) if joins_matter(s))


def joins_matter(schedule):
    """Whether a task awaits several tasks of another lane through a JOIN."""
    kinds, lanes = schedule.tasks["kind"], schedule.tasks["lane"]
    for join in np.flatnonzero(kinds == Kind.JOIN):
        waiters = [task for task in range(join, len(kinds)) if join in schedule.awaited(task)]
        awaited = schedule.awaited(join)
        if len(awaited) > 1 and any((lanes[task] != lanes[awaited]).all() for task in waiters):
            return True
    return False


def by_hand(lengths):
    """Rank 0 copies and multiplies on two lanes, `lengths` = (lane, start, end) per task; rank 1 does nothing."""
    build = ByHand(2)
    to, of = (build.add(0, 4, 4) for _ in range(2))
    lanes = (build.compute_lane(0, 0), build.compute_lane(0, 1), build.copy_lane(0, 0, 0))
    for lane, _, _ in lengths:
        build.task(Kind.COPY if lane == 2 else Kind.COMBINE, lanes[lane], to, [(of, Factor.ONE, Op.N)])
    schedule = build.done()
    return Timeline.of(schedule, *(np.array(column, float) for column in list(zip(*lengths, strict=True))[1:]), "x")


# -- the value -------------------------------------------------------------------------------------


def test_a_timeline_has_every_task_but_joins_with_its_own_times_rank_lane_group_and_bytes():
    schedule = with_joins()
    start, end = invented_times(schedule)
    shown = Timeline.of(schedule, start, end, "predicted")
    bodies = np.flatnonzero(schedule.tasks["kind"] != Kind.JOIN)
    assert len(bodies) < len(schedule.tasks)
    assert (shown.task == bodies).all()
    assert (shown.start_s == start[bodies]).all()
    assert (shown.end_s == end[bodies]).all()
    for name in ("rank", "lane", "group"):
        assert (getattr(shown, name) == schedule.tasks[name][bodies]).all()
    assert shown.nbytes.sum() == sum(schedule.bytes_by_link().values())
    assert shown.seconds == end[bodies].max()
    assert shown.labels == tuple(label for label in shown.labels if label)


def test_activities_tell_the_links_apart():
    schedule = make()
    shown = timeline(schedule)
    links = schedule.bytes_by_link()
    for activity, link in (
        (Activity.HOST_IN, "host_to_device"),
        (Activity.HOST_OUT, "device_to_host"),
        (Activity.PEER, "device_to_device"),
    ):
        assert shown.nbytes[shown.activity == activity].sum() == links[link] > 0


def test_a_task_without_times_is_left_out_and_so_are_its_arrows():
    schedule = make()
    start, end = invented_times(schedule)
    whole = Timeline.of(schedule, start, end, "x")
    lost = int(whole.task[whole.awaits[0, 0]])
    end[lost] = np.nan
    shown = Timeline.of(schedule, start, end, "x")
    assert lost not in shown.task
    assert len(shown.task) == len(whole.task) - 1
    assert 0 <= shown.awaits.min() <= shown.awaits.max() < len(shown.task)


def test_times_of_another_shape_or_backwards_are_refused():
    schedule = make()
    start, end = invented_times(schedule)
    with pytest.raises(ParamError, match="give one per task"):
        Timeline.of(schedule, start[1:], end, "x")
    last = int(np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)[-1])
    end[last] = start[last] - 1
    with pytest.raises(ParamError, match=f"task {last} ends before it starts"):
        Timeline.of(schedule, start, end, "x")


def test_labels_name_the_tiles_of_the_callers_matrices():
    labels = set(timeline(make(place="0,0,0")).labels)
    # 3000 x 2600 x 2000 in tiles of 640 on a 2 x 2 grid: halves of 1500 and 1300 in 3 tiles each, k in 4.
    products = {label for label in labels if "+=" in label}
    assert products == {f"C({i},{j}) += A({i},{p}) B({p},{j})" for i in range(6) for j in range(6) for p in range(4)}
    assert any(re.fullmatch(r"A\(\d,\d\)\.\d 0->[123]", label) for label in labels)
    assert any(re.fullmatch(r"C\(\d,\d\) [123]->0", label) for label in labels)


@pytest.mark.parametrize("make_schedule", [make, with_joins])
def test_an_arrow_leads_from_a_task_of_another_lane_that_ends_before(make_schedule):
    shown = timeline(make_schedule())
    assert len(shown.awaits) > 2
    for awaited, waiting in shown.awaits.tolist():
        assert shown.end_s[awaited] <= shown.start_s[waiting]
        assert shown.lane[awaited] != shown.lane[waiting]


def test_an_arrow_through_a_join_leads_from_what_it_waited_for_longest():
    schedule = with_joins()
    start, end = invented_times(schedule)
    shown = Timeline.of(schedule, start, end, "x")
    kinds, lanes = schedule.tasks["kind"], schedule.tasks["lane"]
    row = {task: at for at, task in enumerate(shown.task.tolist())}
    found = 0
    for join in np.flatnonzero(kinds == Kind.JOIN).tolist():
        awaited = schedule.awaited(join)
        if (kinds[awaited] == Kind.JOIN).any():
            continue
        last = int(awaited[np.argmax(end[awaited])])
        for task in range(join, len(kinds)):
            if (
                join in schedule.awaited(task)
                and lanes[task] not in lanes[[*awaited, join]]
                and kinds[task] != Kind.JOIN
            ):
                found += [row[last], row[task]] in shown.awaits.tolist()
                others = [row[int(a)] for a in awaited if a != last and a not in schedule.awaited(task)]
                assert not any([other, row[task]] in shown.awaits.tolist() for other in others)
    assert found


def test_idle_is_when_no_compute_lane_of_a_rank_is_busy():
    shown = by_hand([(0, 0.0, 2.0), (1, 1.0, 3.0), (0, 6.0, 7.0), (2, 0.0, 10.0)])
    np.testing.assert_allclose(shown.idle_share, [0.6, 1.0])
    assert shown.covered_s((shown.rank == 0) & (shown.activity <= Activity.COMBINE)) == 4.0


def test_random_schedules_have_a_timeline_and_a_valid_trace():
    rng = random.Random(3)
    for _ in range(40):
        shown = timeline(random_case(rng, max_ranks=5, max_extent=30))
        check_trace(json.loads(to_perfetto([shown])))
        assert len(to_text([shown], 100).splitlines()) > shown.num_ranks


# -- text ------------------------------------------------------------------------------------------


def test_text_shows_when_lanes_are_busy_to_the_width_given():
    shown = by_hand([(0, 0.0, 2.0), (1, 1.0, 4.0), (2, 5.0, 10.0)])
    lines = to_text([shown], 80).splitlines()
    assert lines[0].startswith("x, 1e+04 ms")
    assert lines[0].endswith("; idle: the device runs nothing")
    assert all(len(line) <= 80 for line in lines)
    assert max(map(len, lines)) > 75
    first = lines[1]
    assert first.startswith("rank 0 compute")
    assert first.endswith(" 40.0 %, idle 60.0 %")
    bar = re.search(r"compute\s{3}(.*?)  40\.0 %", first)[1]
    assert bar.count("█") == round(0.4 * len(bar))
    assert bar.strip(" ").startswith("█")
    assert lines[2].strip().startswith("copies")
    assert lines[2].endswith(" 50.0 %")
    assert lines[3].startswith("rank 1 compute")
    assert lines[3].endswith("idle 100.0 %")


def test_two_timelines_share_one_scale():
    short, long = by_hand([(0, 0.0, 1.0)]), by_hand([(0, 0.0, 4.0)])
    first, second = (line for line in to_text([short, long], 100).splitlines() if line.startswith("rank 0"))
    assert second.count("█") == pytest.approx(4 * first.count("█"), abs=4)


# -- traces ----------------------------------------------------------------------------------------


def test_a_trace_keeps_the_formats_rules_and_says_what_ran():
    schedule = make()
    shown = timeline(schedule)
    trace = json.loads(to_perfetto([shown]))
    check_trace(trace)
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(shown.task)
    for event in complete:
        row = int(np.flatnonzero(shown.task == event["args"]["task"])[0])
        assert event["pid"] == shown.rank[row]
        assert event["ts"] == pytest.approx(shown.start_s[row] * 1e6, abs=1e-3)
        assert event["dur"] == pytest.approx((shown.end_s[row] - shown.start_s[row]) * 1e6, abs=2e-3)
        assert event["name"] == shown.labels[row]
        assert event["args"].get("bytes", 0) == shown.nbytes[row]
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == len(shown.awaits)


def test_predicted_and_measured_are_processes_of_their_own():
    schedule = make()
    trace = json.loads(to_perfetto([timeline(schedule), timeline(schedule, "measured", 1)]))
    check_trace(trace)
    names = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert len(names) == len(set(names.values())) == 8
    assert names["rank 3 predicted"] < names["rank 0 measured"]


def test_clocks_that_disagree_leave_no_arrow_back_in_time():
    schedule = make()
    start, end = invented_times(schedule)
    late = schedule.tasks["rank"] == 0
    check_trace(json.loads(to_perfetto([Timeline.of(schedule, start + 5e-4 * late, end + 5e-4 * late, "x")])))


# -- figures ---------------------------------------------------------------------------------------


def test_figures_are_png_and_the_same_for_the_same_input():
    pytest.importorskip("matplotlib")
    schedule = make(m=700, n=700, k=700, ranks=2)  # to draw each task takes a hundredth of a second
    both = [timeline(schedule), timeline(schedule, "measured", 1)]
    one, two = render("a.png", both[:1]), render("a.png", both)
    for data in (one, two):
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(two[20:24], "big") > 1.5 * int.from_bytes(one[20:24], "big")  # height
    assert render("b.png", both) == two


@pytest.fixture
def kept(monkeypatch):
    """Return the figures that are drawn, instead of pictures of them."""
    pytest.importorskip("matplotlib")
    from uncut_mpi.view import figure, heatmap

    figures = []
    for module in (figure, heatmap):
        monkeypatch.setattr(module, "to_png", lambda drawn: figures.append(drawn) or b"png")
    return figures


def test_a_figure_of_timelines_has_a_bar_for_every_task_and_a_legend_of_what_occurs(kept):
    shown = timeline(make())
    draw_timelines([shown, shown])
    (drawn,) = kept
    for axis in drawn.axes:
        assert sum(len(bars.get_paths()) for bars in axis.collections) == len(shown.task)
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == [Activity(one).label for one in np.unique(shown.activity)]


def texts_of(drawn):
    """All that a figure says, and the sizes of its letters in points."""
    from matplotlib.text import Text

    found = [text for text in drawn.findobj(Text) if text.get_text().strip() and text.get_visible()]
    return [text.get_text() for text in found], [text.get_fontsize() for text in found]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_figure_of_timelines_says_what_of_which_problem_it_shows(kept, swapped):
    schedule = make("h,2,0", swapped=swapped)
    shown = Timeline.of(schedule, *invented_times(schedule), "predicted", NODE_SEVEN)
    draw_timelines([shown])
    words, sizes = texts_of(kept[0])
    problem = "2600×3000×2000, f64, A, B, C at 2,h,0" if swapped else "3000×2600×2000, f64, A, B, C at h,2,0"
    assert f"m×n×k = {problem}; scheduler uncut; machine node seven" in words
    for rank, share in enumerate(shown.idle_share):
        assert f"device {rank} idle {share:.1%}".replace("%", " %") in words
    assert any("idle: the share of the time in which a device runs no product and no sum" in text for text in words)
    assert min(sizes) >= 8


def test_the_heat_map_has_bytes_in_its_cells_and_the_host_last_and_says_what_is_what(kept):
    machine = Machine.uniform(3)
    schedule = make("h,2,0", ranks=3)
    assert draw_transfers(schedule, machine) == b"png"
    moved = np.zeros((4, 4), np.int64)
    for _, source, destination, size in schedule.copies().tolist():
        moved[source, destination] += size  # the host is −1, the last
    axis = kept[0].axes[0]
    cells = {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in axis.texts}
    for place, size in np.ndenumerate(moved):
        if place[0] != place[1] or size:
            number, unit = cells[place].split()
            assert float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit] == pytest.approx(size, rel=5e-3)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "1", "2", "host"]
    colours = axis.images[0].get_array()
    assert colours[0, 3] == machine.bandwidth_gb_per_s[0, 3]
    words, sizes = texts_of(kept[0])
    said = " ".join(words)
    assert "m×n×k = 3000×2600×2000, f64, A, B, C at h,2,0" in said
    assert f"machine {machine.name}" in said
    assert "numbers: bytes moved" in said
    assert "colour: bandwidth of the link, GB/s" in said
    assert min(sizes) >= 8
    with pytest.raises(ParamError, match="3 ranks"):
        draw_transfers(schedule, Machine.uniform(4))


def test_without_matplotlib_a_png_is_an_error_that_says_what_to_install_and_the_rest_works(monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest, **named):
        if name.split(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)
    shown = timeline(make())
    with pytest.raises(ParamError, match=r"needs matplotlib.*pip install matplotlib, or write text \(\.txt\)"):
        check_drawable("x.png")
    with pytest.raises(ParamError, match=r"needs matplotlib.*pip install matplotlib$"):  # of transfers there is no text
        draw_transfers(make(), Machine.uniform(4))
    assert render("x.txt", [shown])
    assert render("x.json", [shown])


def test_files_of_every_kind_say_which_problem_they_show():
    schedule = make("h,2,0")
    shown = Timeline.of(schedule, *invented_times(schedule), "predicted", NODE_SEVEN)
    title = "m×n×k = 3000×2600×2000, f64, A, B, C at h,2,0; scheduler uncut; machine node seven"
    assert render("x.txt", [shown]).decode().splitlines()[0] == title
    assert json.loads(render("x.json", [shown]))["otherData"]["title"] == title


def test_importing_the_room_does_not_load_matplotlib():
    code = "import uncut_mpi.view, sys; assert not [m for m in sys.modules if m.startswith(('matplotlib', 'mpi4py'))]"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_a_name_that_says_no_kind_of_picture_is_refused():
    with pytest.raises(ParamError, match=r"x\.pdf does not say.*\.json.*\.png or \.txt"):
        render("x.pdf", [timeline(make())])


# -- traffic ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trans", ["NN", "TT"])
@pytest.mark.parametrize(("order", "splits", "reads_c"), [("k", 1, True), ("columns", 1, True), ("k", 2, False)])
def test_the_least_of_ports_with_the_host_follows_from_where_products_are_made(trans, order, splits, reads_c):
    m, n, k = 8 * 3000, 8 * 2600, 2000
    for place in ("h,h,h", "h,0,h"):
        schedule = make_blocks(place, trans, order, splits, reads_c)
        found = traffic(schedule).ports
        for one in found:
            assert one.into_bytes >= one.least_into_bytes >= 0
            assert one.out_of_bytes >= one.least_out_of_bytes >= 0
        rows, cols = schedule.grid  # a rank multiplies m / rows of A and n / cols of B, of k / splits
        a, b, c = m * k // rows // splits, n * k // cols // splits, m * n // (8 * rows * cols)
        if place == "h,h,h":  # with k split, one of those who compute a part of C adds to it
            read = [one.least_into_bytes - a - b for one in found]
            assert sum(read) == (m * n // 8 if reads_c else 0)
            assert set(read) <= {0, c}
            assert [one.least_out_of_bytes for one in found] == [c] * 4


def test_ports_of_a_matrix_that_is_only_scaled_move_it_once_each_way():
    problem = GemmProblem(2000, 2600, 3000, DType.f64, scales_only=True)
    schedule = plan(problem, Placement.parse("h,h,h"), 4, Machine.uniform(4), ScheduleOptions()).schedule
    found = traffic(schedule).ports
    assert sum(one.least_into_bytes for one in found) == 2000 * 2600 * 8
    assert all(one.into_bytes == one.least_into_bytes for one in found)
    assert all(one.out_of_bytes == one.least_out_of_bytes == one.into_bytes for one in found)


def make_blocks(place, trans, order, splits, reads_c):
    """A product of 3000 x 2600 x 2000 by `kblocks` on four ranks."""
    problem = GemmProblem(3000, 2600, 2000, DType.f64, *trans, reads_c=reads_c)
    blocking = Blocking(splits=splits, first=256, block=512, columns=3, order=order)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2 // splits), blocking=blocking)
    return plan(problem, Placement.parse(place), 4, Machine.uniform(4), options).schedule


def test_what_moves_while_products_run_is_counted_at_both_ends() -> None:
    rng = np.random.default_rng(4)
    for place, ranks in (("0,0,0", 2), ("h,h,h", 3), ("0,1,2", 3)):
        problem, options = GemmProblem(600, 500, 400, DType.f64), ScheduleOptions(scheduler="kblocks")
        schedule = plan(problem, Placement.parse(place), ranks, Machine.uniform(ranks), options).schedule
        start = rng.random(len(schedule.tasks))
        end = start + 0.3 * rng.random(len(schedule.tasks))
        found = Timeline.of(schedule, start, end, "random").moved
        # Second by second, in steps of a thousandth.
        steps = np.arange(0.0, 1.4, 1e-3) + 5e-4
        runs = (start[:, np.newaxis] <= steps) & (steps < end[:, np.newaxis])
        products = schedule.tasks["kind"] == Kind.GEMM
        busy = [runs[products & (schedule.tasks["rank"] == rank)].any(axis=0) for rank in range(ranks)]
        total, hidden = 0, 0.0
        for task, source, destination, nbytes in schedule.copies().tolist():
            if source == destination:
                continue
            total += nbytes
            shares = [busy[one][runs[task]].mean() for one in (source, destination) if one < ranks and runs[task].any()]
            hidden += nbytes * min(shares, default=0.0)
        assert found[0] == total > 0
        assert found[1] == pytest.approx(hidden, abs=0.02 * total)
        assert 0 < found[1] < total
