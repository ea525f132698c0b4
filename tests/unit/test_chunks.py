"""Into which blocks of C a product is cut whose schedule would be too large."""

from __future__ import annotations

import json

import pytest

from tests.helpers.planned import cut, expected_seconds, plan_several
from uncut_mpi.command.arguments import parse
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.plan import main
from uncut_mpi.planning import chunks
from uncut_mpi.planning.buffers import user_table
from uncut_mpi.planning.chunks import MOST_TASKS, buffers_of, chunk_of, chunks_of, tasks_of
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify

MIB = 1 << 20
LITTLE = ScheduleOptions(device_memory=2 * MIB)


def cut_of(problem, places, machine, options=LITTLE):
    placement = Places.parse(places).bind(problem, machine.num_ranks)
    return placement, cut(problem, placement, machine.num_ranks, machine, options)


@pytest.mark.parametrize("places", ["h,h,h", "rows@host,rows@host,rows@host", "cols,cols@host,cols@host", "h,0,h"])
@pytest.mark.parametrize("trans", ["TN", "NT"])
def test_chunks_cover_c_and_each_has_few_tasks_and_a_proof(monkeypatch, places, trans):
    monkeypatch.setattr(chunks, "MOST_TASKS", 3000)
    problem = GemmProblem(3000, 2600, 1700, DType.f64, *trans)
    machine = Machine.uniform(2)
    placement, found = cut_of(problem, places, machine)
    extent = (problem.m, problem.n)[found.axis]
    assert found.edges[0] == 0
    assert found.edges[-1] == extent
    assert all(first < last for first, last in found.extents)
    kinds = {chunk_of(problem, placement, found.axis, one) for one in found.extents}
    for part, place in kinds:
        schedule = plan(part, place, 2, machine, LITTLE).schedule
        verify(schedule)
        assert len(schedule.tasks) <= 2 * 3000
    assert (
        sum(
            (part.m, part.n)[found.axis]
            for part in (chunk_of(problem, placement, found.axis, one)[0] for one in found.extents)
        )
        == extent
    )


@pytest.mark.parametrize(("places", "axis"), [("h,h,h", 0), ("rows@host,h,rows@host", 1), ("h,cols@host,cols@host", 0)])
def test_chunks_are_cut_so_that_they_lie_alike(monkeypatch, places, axis):
    monkeypatch.setattr(chunks, "MOST_TASKS", 3000)
    problem = GemmProblem(4096, 2048, 1024, DType.f64)
    placement, found = cut_of(problem, places, Machine.uniform(2))
    assert found.axis == axis
    assert len({chunk_of(problem, placement, axis, one) for one in found.extents}) == 1


def test_only_what_has_too_many_tasks_is_cut():
    machine, problem = Machine.uniform(2), GemmProblem(3000, 2600, 1700, DType.f64)
    assert cut_of(problem, "h,h,h", machine)[1] is None  # in rings, and small enough
    large = GemmProblem(30000, 26000, 17000, DType.f64)
    assert cut_of(large, "h,h,h", machine)[1] is not None
    assert cut_of(large, "h,h,h", machine, ScheduleOptions())[1] is None  # all of it fits
    for scheduler in ("uncut", "parsec", "cyclic", "bands"):
        asked = ScheduleOptions(scheduler=scheduler, device_memory=2 * MIB)
        assert cut_of(large, "h,h,h", machine, asked)[1] is None
    copies = GemmProblem(30000, 26000, 0, DType.f64, reads_c=False, copies=True)
    assert cut_of(copies, "h,h,h", machine)[1] is None


def test_a_million_cubed_from_files_is_planned_by_one_schedule_of_a_chunk():
    machine, options = load_machine("karolina-8xa100"), ScheduleOptions(host_memory=1 << 36)
    problem = GemmProblem(10**6, 10**6, 10**6, DType.f64)
    placement = Places.parse("f,f,f").bind(problem, machine.num_ranks)
    files = tuple(range(3 * machine.num_ranks))
    found = cut(problem, placement, machine.num_ranks, machine, options, files, files)
    kinds = {chunk_of(problem, placement, found.axis, one) for one in found.extents}
    assert len(kinds) == 1
    (part, place), *_ = kinds
    best = plan_several(part, place, machine.num_ranks, machine, options, files, files)[0]
    assert len(best.schedule.tasks) <= MOST_TASKS
    # A disk of 2 GB/s reads A and B and reads and writes C once in 16,000 s; each A comes for a few blocks of C.
    assert 16_000 < best.predicted_s * len(found.extents) < 160_000


def test_the_plan_command_says_what_chunks_there_are(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = (
        "-m 40000 --place f,f,f --machine karolina-8xa100 --host-memory 64MiB --device-memory 20MB --scheduler kblocks"
    )
    assert main([*words.split(), "--json", str(out)]) == 0
    said, facts = capsys.readouterr().out, json.loads(out.read_text())
    edges = facts["chunks"]["edges"]
    assert f"{len(edges) - 1} of {edges[1]} rows of C, one after another" in said
    assert edges[-1] == 40000
    assert facts["predicted_s"] > 0
    assert facts["candidates"][0]["predicted_s"] < facts["predicted_s"]


def test_the_plan_command_refuses_what_no_memory_has_room_for(capsys):
    assert main(["-m", "1000000", "--machine", "karolina-8xa100"]) == 2
    assert "take 24.00 TB, and machine karolina-8xa100 has 1.100 TB of it (host_bytes)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--place f,h,h --metric edp", "--metric was given with matrices in files"),
        ("--place h,h,h --host-memory 1GB", "of which --place names none (f)"),
    ],
)
def test_flags_that_do_not_go_with_places_are_refused(capsys, words, said):
    assert main(words.split()) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_products_name_files_themselves():
    with pytest.raises(ParamError, match="name the files themselves"):
        parse(["-m", "64", "--place", "f,f,f"])


def test_nothing_is_cut_where_no_chunk_is_small_enough(monkeypatch):
    monkeypatch.setattr(chunks, "MOST_TASKS", 1)
    problem = GemmProblem(3000, 2600, 1700, DType.f64)
    placement = Places.parse("h,h,h").bind(problem, 2)
    assert chunks_of(Setting.of(problem, placement, 2, Machine.uniform(2), LITTLE)) is None


@pytest.mark.parametrize(
    ("shape", "places", "axis"),
    [((250, 1_000_000, 20_000), "cols@host,cols@host,cols@host", 1), ((500_000, 250, 20_000), "rows,rows,rows", 0)],
)
def test_where_chunks_that_lie_alike_are_too_few_the_other_extent_is_cut(shape, places, axis):
    places = places if "@" in places else ",".join(f"{one}@host" for one in places.split(","))
    asked = ScheduleOptions(device_memory=64 * MIB)
    placement, found = cut_of(GemmProblem(*shape, DType.f64), places, Machine.uniform(4), asked)
    assert found.axis == axis
    assert placement.in_parts


def test_a_few_bytes_of_host_memory_are_too_few_in_words(capsys):
    assert main(["-m", "30", "--place", "f,f,f", "--host-memory", "8"]) == 2
    assert "copies of matrices in files" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("place", ["f,h,h", "h,h,f", "f,0,h", "f,f,f"])
def test_no_plan_is_expected_faster_than_its_bound(tmp_path, place):
    out = tmp_path / "plan.json"
    assert main(f"-m 6000 --place {place} --json {out}".split()) == 0
    facts = json.loads(out.read_text())
    assert facts["bound_s"] <= facts["predicted_s"]
    assert ("reading files" in facts["bound_terms"]) == (place[0] == "f" or place[-1] == "f")


def test_layouts_are_compared_by_what_all_chunks_take(monkeypatch):
    problem, machine = GemmProblem(3000, 2600, 1700, DType.f64), Machine.uniform(2)
    placement = Places.parse("h,h,h").bind(problem, 2)
    monkeypatch.setattr(chunks, "MOST_TASKS", 3000)
    found = cut(problem, placement, 2, machine, LITTLE)
    each = [
        plan(*chunk_of(problem, placement, found.axis, one), 2, machine, LITTLE).predicted_s for one in found.extents
    ]
    assert expected_seconds(problem, placement, 2, machine, LITTLE) == pytest.approx(sum(each), rel=1e-12)
    assert len(each) > 1


def test_buffers_keep_their_numbers_of_those_that_are_in_a_chunk():
    problem, ranks = GemmProblem(400, 300, 200, DType.f64), 3
    placement = Places.parse("rows@host,h,rows@host").bind(problem, ranks)  # 3 parts, 1 and 3
    assert buffers_of(problem, placement, 0, (0, 100), range(7)) == (0, 1, 2)
    assert buffers_of(problem, placement, 0, (100, 300), (1, 3, 5, 6)) == (1, 3, 5, 6)
    assert buffers_of(problem, placement, 1, (100, 300), (2, 3)) == (2, 3)


def test_little_host_memory_asks_for_smaller_blocks_until_there_are_too_many(capsys):
    words = ["-m", "300", "-n", "200", "-k", "100", "--ranks", "2", "--place", "f,f,f"]
    assert main([*words, "--host-memory", "6kB"]) == 0
    assert "of 6.000 kB allowed" in capsys.readouterr().out
    assert main(["-m", "4000", "--ranks", "1", "--place", "f,f,f", "--host-memory", "6kB"]) == 2
    assert "500000 are the most" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("places", "ranks", "device", "host"), [("f,f,f", 1, 64, 32), ("f,h,f", 1, 128, 64), ("f,0,h", 2, 128, 32)]
)
def test_copies_through_host_memory_are_counted_as_they_are_staged(places, ranks, device, host):
    problem, machine = GemmProblem(5000, 7000, 6000, DType.f64), Machine.uniform(ranks)
    named = Places.parse(places)
    placement = named.bind(problem, ranks)
    matrices = user_table(ranks, problem, placement)["matrix"].tolist()
    files = [user for user, matrix in enumerate(matrices) if named.in_files[matrix]]
    asked = ScheduleOptions(scheduler="kblocks", device_memory=device * MIB, host_memory=host * MIB)
    planned = plan_several(problem, placement, ranks, machine, asked, files, files)[0]
    counted = tasks_of(Setting.of(problem, placement.straight(range(ranks)), ranks, machine, planned.options, files))
    assert counted == pytest.approx(len(planned.schedule.tasks), rel=0.1)
