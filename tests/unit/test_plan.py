"""The plan command: without MPI and GPU it chooses, predicts, explains and draws."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import types

import numpy as np
import pytest

from tests.helpers.hostile import interrupt
from tests.helpers.timelines import check_trace
from uncut_mpi.command import plan_report, planning
from uncut_mpi.command.planning import find_machine, parse
from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.costs import IssueCosts
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.plan import main
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import Simulation, simulate
from uncut_mpi.units import bytes_text, time_text

SMALL = "-m 3000 -n 2600 -k 2000 --place 0,h,h --trans-b T --metric pdp"


@dataclasses.dataclass
class Tried:
    options: ScheduleOptions
    schedule: object
    simulation: Simulation
    predicted_s: float
    bound_s: float
    energy_j: float
    shape: tuple[int, ...] = (2, 2, 1)

    def bound(self) -> float:
        return self.bound_s


@pytest.fixture
def asked(monkeypatch):
    """The calls of a search that tries three tiles, put in the place of the real one."""
    calls = []

    def search(setting):
        calls.append(setting)
        problem, placement, machine = setting.problem, setting.placement, setting.machine
        metric, options = setting.options.metric, dataclasses.replace(setting.options, scheduler="uncut", metric="time")
        tried = []
        for tile in (1024, 640, 512):
            schedule = plan(
                problem, placement, machine.num_ranks, machine, dataclasses.replace(options, tile=tile)
            ).schedule
            run, limit = simulate(schedule, machine), bound(problem, placement, machine).seconds
            tried.append(Tried(dataclasses.replace(options, tile=tile), schedule, run, run.seconds, limit, 250.0))
        tried.sort(key=lambda one: one.predicted_s)
        return types.SimpleNamespace(candidates=tried, best=tried[0], tasks_simulated=1234, metric=metric)

    monkeypatch.setattr(planning, "search", search)
    monkeypatch.setattr(planning, "costly_place", lambda *_: "")
    return calls


# -- arguments -------------------------------------------------------------------------------------


def test_the_gemm_commands_flags_mean_the_same():
    words = "-m 100 -k 7 --dtype f32 --trans-a T --beta 0 --place 3,h,5 --grid 2x1 --compute-ranks 2,0"
    given = parse([*words.split(), "--options", '{"tile": 64}'])
    problem = given.problem
    assert (problem.m, problem.n, problem.k, problem.dtype.name) == (100, 100, 7, "f32")
    assert (problem.trans_a, problem.trans_b, problem.reads_c, problem.scales_only) == ("T", "N", False, False)
    assert str(given.place) == "3,h,5"
    assert given.options == ScheduleOptions(scheduler="auto", tile=64, grid=(2, 1), devices=(2, 0))


def test_a_plan_tries_nothing():
    with pytest.raises(ParamError, match="tune in --options"):
        parse(["--options", '{"tune": 3}'])


def test_a_plan_knows_memory_for_copies_of_files_alone(capsys):
    with pytest.raises(ParamError, match="--host-memory is for copies"):
        parse(["--options", '{"host_memory": 3000}'])
    assert main(["--host-memory", "3MB"]) == 2
    assert "--host-memory" in capsys.readouterr().err
    assert parse(["--place", "f,h,h", "--host-memory", "3MB"]).options.host_memory == 3_000_000


def test_nothing_given_plans_something_sensible():
    given = parse([])
    assert (given.problem.m, given.problem.n, given.problem.k) == (8192, 8192, 8192)
    assert given.problem.reads_c
    assert (given.machine, given.ranks, given.options.metric) == ("uniform", None, "time")


def test_alpha_of_zero_is_a_plan_without_a_product():
    assert not parse(["--alpha", "0"]).problem.has_product


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--timeline t.pdf", "does not say which picture"),
        ("--transfers t.json", r"let the name end in \.png"),
        ("--timeline x.json --json x.json", "--timeline and --json both name x.json"),
        ("--compare-places --alpha 0", "is for products, and alpha is 0"),
        ("--ranks 0", "at least 1"),
        ("-n 5", "without -m"),
        ("A.npy B.npy", "unrecognized arguments"),
        ("--trace t.json", "unrecognized arguments"),
        ("--allow-shared-gpu", "unrecognized arguments"),  # GPUs of ranks, which only jobs have
        ("--metric joy", "'joy' does not exist: use one of time, pdp, edp"),
        ("--metric pdp --scheduler uncut", "--metric with --scheduler uncut"),
        ("--nodes 2", "--nodes was given without --net: say how many nodes there are and what joins them"),
        ("--net 12.5", "--net was given without --nodes"),
        ("--nodes 0 --net 12.5", "at least 1"),
        ("--nodes 2 --net 1:2:3:4", "is no net: write GB/s of an adapter, µs and adapters, 12.5:2:2"),
        ("--nodes 2 --net fast", "is no net: write GB/s of an adapter, µs and adapters, 12.5:2:2"),
        ("--nodes 2 --net 0", "is not above 0"),
        ("--nodes 2 --net 5:-1", "latencies are not negative"),
        ("--nodes 2 --net 5:1:0", "at least 1"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(words, message):
    with pytest.raises(ParamError, match=message):
        parse(words.split())


def test_a_machine_is_uniform_shipped_or_a_file_and_may_be_used_in_part(tmp_path):
    assert find_machine("uniform", None).num_ranks == 4
    assert find_machine("uniform", 7).num_ranks == 7
    path = tmp_path / "mine.json"
    path.write_text(dataclasses.replace(Machine.uniform(3), name="mine").to_json())
    assert find_machine(str(path), None).name == "mine"
    assert find_machine(str(path), 2).num_ranks == 2
    with pytest.raises(ParamError, match="--ranks 4 was given, machine mine has 3"):
        find_machine(str(path), 4)
    with pytest.raises(ParamError, match="nowhere"):
        find_machine("nowhere", None)


def test_ranks_may_have_some_of_a_machines_devices():
    whole = find_machine("karolina-8xa100", None)
    some = find_machine("karolina-8xa100", None, (0, 2, 4, 6))
    assert some.num_ranks == 4
    assert some.to_json() == whole.subset((0, 2, 4, 6)).to_json()
    assert find_machine("karolina-8xa100", 2, (6, 1)).name == "karolina-8xa100[6,1]"
    for name, ranks, devices, said in (
        ("karolina-8xa100", 3, (0, 2), "--ranks 3 was given, and --devices 0,2, which are 2"),
        ("karolina-8xa100", None, (0, 2, 0), "machine karolina-8xa100 were asked for: name some of 0 to 7, each once"),
        ("karolina-8xa100", None, (0, 8), "machine karolina-8xa100 were asked for: name some of 0 to 7, each once"),
        ("uniform", None, (0, 2), "--devices 0,2 was given, those of machine uniform are all alike: give --ranks"),
    ):
        with pytest.raises(ParamError, match=said):
            find_machine(name, ranks, devices)
    assert parse(["--machine", "karolina-8xa100", "--devices", "0,2,4,6", "-m", "4096"]).devices == (0, 2, 4, 6)


def test_nodes_are_machines_that_a_net_joins(tmp_path, capsys):
    given = parse(["--nodes", "3", "--net", "12.5:2:2", "--ranks", "4"])
    assert (given.nodes, given.net, given.ranks) == (3, Net(12.5, 2e-6, 2), 4)
    assert parse(["--nodes", "1", "--net", "9"]).net == Net(9.0)
    words = [
        "-m",
        "900",
        "-n",
        "800",
        "-k",
        "700",
        "--place",
        "rows,cols@host,rows",
        "--ranks",
        "2",
        "--scheduler",
        "kblocks",
    ]
    found = tmp_path / "found.json"
    assert main([*words, "--nodes", "2", "--net", "10", "--json", str(found)]) == 0
    said, facts = capsys.readouterr().out, json.loads(found.read_text())
    assert facts["ranks"] == 4
    moved, into, out_of = (
        facts["bytes"]["node_to_node"],
        *([one[name] for one in facts["nodes"]] for name in ("into_bytes", "out_of_bytes")),
    )
    assert moved == sum(into) == sum(out_of) >= facts["least_bytes"]["node_to_node"] > 0
    assert re.search(rf"\n +node to node: {re.escape(bytes_text(moved))}, at least", said)
    assert re.search(rf"\nnodes +most into one: {re.escape(bytes_text(max(into)))}, node", said)
    most = max(map(sum, zip(into, out_of, strict=True)))
    assert 0 < facts["least_bytes_of_a_node"] <= most
    least = bytes_text(facts["least_bytes_of_a_node"])
    assert f"into and out of one: {bytes_text(most)}; in any schedule one has at least {least}" in said
    saved = tmp_path / "cluster.json"
    saved.write_text(Machine.cluster(Machine.uniform(2), 2, Net(10.0)).to_json())
    again = tmp_path / "again.json"
    words[words.index("--ranks") : words.index("--scheduler")] = ["--machine", str(saved)]
    assert main([*words, "--json", str(again)]) == 0
    assert json.loads(again.read_text())["digest"] == facts["digest"]
    capsys.readouterr()
    assert main([*words, "--nodes", "2", "--net", "10"]) == 2
    assert "2 × uniform has 2 nodes already: leave --nodes and --net out" in " ".join(capsys.readouterr().err.split())
    assert main(["--nodes", "4096", "--net", "10"]) == 2
    assert "a cluster has 1 to 4096 ranks" in " ".join(capsys.readouterr().err.split())


def test_the_best_schedule_on_several_nodes_is_the_one_that_calls_have(tmp_path, capsys):
    found = tmp_path / "found.json"
    words = "-m 900 -n 800 -k 700 --place rows,cols,rows --ranks 2 --nodes 2 --net 10 --json"
    assert main([*words.split(), str(found)]) == 0
    machine, problem = Machine.cluster(Machine.uniform(2), 2, Net(10.0)), GemmProblem(900, 800, 700, DType.f64)
    planned = plan(
        dataclasses.replace(problem, reads_c=True), Places.parse("rows,cols,rows").bind(problem, 4), 4, machine
    )
    facts = json.loads(found.read_text())
    assert (facts["digest"], facts["predicted_s"]) == (planned.schedule.digest(), planned.predicted_s)


def test_each_node_has_room_for_what_lies_in_its_memory(capsys, tmp_path):
    node, path = dataclasses.replace(Machine.uniform(2), host_bytes=np.array([20_000_000])), tmp_path / "node.json"
    path.write_text(node.to_json())
    words = f"-m 1000 --scheduler kblocks --machine {path} --nodes 2 --net 10 --place".split()
    assert main([*words, "rows@host,rows@host,rows@host"]) == 0  # 12 MB on each
    assert main([*words, "h,h1,rows@host"]) == 0  # 20 MB on the first one
    assert main([*words, "h,h1,h0"]) == 2
    assert "take 24.00 MB, and node 0 of machine 2 × uniform has 20.00 MB" in " ".join(capsys.readouterr().err.split())


# -- the command -----------------------------------------------------------------------------------


def test_the_search_gets_what_was_asked_and_the_best_is_reported(asked, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "facts.json"
    assert main([*SMALL.split(), "--ranks", "4", "--json", str(path)]) == 0
    problem, placement, machine = asked[0].problem, asked[0].placement, asked[0].machine
    assert (problem.m, problem.n, problem.k, problem.trans_b) == (3000, 2600, 2000, "T")
    assert (str(placement), machine.num_ranks) == ("0,h,h", 4)
    assert asked[0].options == ScheduleOptions(metric="pdp")
    facts = json.loads(path.read_text())
    limit = bound(problem, placement, machine)
    assert facts["bound_s"] == limit.seconds
    assert facts["limited_by"] == limit.limited_by
    tried = [one["predicted_s"] for one in facts["candidates"]]
    assert facts["predicted_s"] == tried[0] == min(tried)
    assert len(tried) == 3
    assert (facts["ranks"], facts["metric"], facts["energy_j"]) == (4, "pdp", 250.0)
    best = plan(problem, placement, 4, machine, ScheduleOptions(scheduler="uncut", tile=facts["tile"])).schedule
    assert facts["digest"] == best.digest()
    a_on_rank_0 = np.array([3000 * 2000 * 8, 0, 0, 0])
    assert facts["memory_bytes"] == (best.softbuf_bytes() + a_on_rank_0).tolist()
    assert facts["device_memory"] == machine.memory_bytes.tolist()
    assert (facts["host_bytes"], facts["host_memory"]) == ([0, 0, 0, 0], 0)
    table = np.array(facts["transferred_bytes"])
    assert table.shape == (5, 5)
    assert table[4].sum() == facts["bytes"]["host_to_device"] >= facts["least_bytes"]["host_to_device"] > 0
    assert table[:, 4].sum() == facts["bytes"]["device_to_host"]
    np.fill_diagonal(table, 0)
    assert [one["into_bytes"] for one in facts["ports"]] == table[:, :4].sum(axis=0).tolist()
    assert [one["out_of_bytes"] for one in facts["ports"]] == table[:4].sum(axis=1).tolist()
    out = capsys.readouterr().out
    for label in [
        "machine",
        "problem",
        "search",
        "plan",
        "predicted",
        "bound",
        "runners-up",
        "bytes",
        "ports",
        "memory",
    ]:
        assert re.search(rf"^{label} +\S", out, re.MULTILINE), label
    assert "A Bᵀ" in out
    assert f"limited by {limit.limited_by}: {limit.formula}" in out
    assert f"tile {facts['tile']}" in out
    others = {one["options"]["tile"] for one in facts["candidates"][1:]}
    assert all(re.search(rf"s, 250 J: tile {tile}$", out, re.MULTILINE) for tile in others)
    assert "host to device: " in out
    assert "250 J without power at rest, which is not known here" in out
    assert re.search(r"^(memory| ) +ranks? .*3: .* of 140\.0 GB$", out, re.MULTILINE)
    assert out.count("idle ") == 4
    assert max(map(len, out.split("\n\n")[1].splitlines())) <= 100


def test_pictures_are_written_where_asked(asked, capsys, tmp_path):
    timeline, transfers = tmp_path / "t.json", tmp_path / "t.png"
    words = [*SMALL.split(), "--timeline", str(timeline)]
    try:
        import matplotlib  # noqa: F401  for the figure alone
    except ImportError:
        pass
    else:
        words += ["--transfers", str(transfers)]
    assert main(words) == 0
    check_trace(json.loads(timeline.read_text()))
    if "--transfers" in words:
        assert transfers.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_said_before_the_search(asked, capsys, tmp_path):
    assert main([*SMALL.split(), "--json", str(tmp_path / "missing" / "x.json")]) == 2
    assert not asked
    assert "no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", ["rows@C,rows@C,rows@C", "h,rows@C,h", "rows@host@C,h,h", "block_cyclic(64,64;2,1)@C,cols,rows@C"]
)
def test_parts_stored_the_other_way_round_are_planned_as_sessions_plan_them(place, capsys, tmp_path):
    path = tmp_path / "facts.json"
    words = ["-m", "1000", "--ranks", "2", "--machine", "h200-4x", "--place", place, "--json", str(path)]
    assert main(words) == 0
    assert not capsys.readouterr().err
    facts = json.loads(path.read_text())
    assert facts["predicted_s"] > 0
    assert all(8e6 < nbytes < 64e6 for nbytes in facts["memory_bytes"])


def test_a_part_that_is_cut_along_its_columns_takes_no_more_memory_than_it_has():
    # A piece of 32 rows spans all columns of its part.
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    place = Places.parse("block_cyclic(32,32;2,1),cols,rows").bind(problem, 2)
    whole = 3 * 4096 * 4096 // 2 * 8
    machine = dataclasses.replace(Machine.uniform(2), memory_bytes=np.full(2, 2 * whole))
    made = plan(problem, place, 2, machine).schedule
    assert max(made.softbuf_bytes()) <= whole


def test_a_placement_on_ranks_that_there_are_not_is_an_error(asked, capsys):
    assert main(["--ranks", "2", "--place", "3,h,h"]) == 2
    assert not asked
    assert capsys.readouterr().err.startswith("uncut_mpi.plan: ParamError: ")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PlanError("no schedule: take a smaller tile"), 2, "PlanError: no schedule: take a smaller tile"),
        (
            MemoryError("Unable to allocate 745 GiB"),
            2,
            "CapacityError: the memory of this host is too small: Unable to",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_ends_a_search_is_one_line_and_the_exit_status(error, status, said, capsys, monkeypatch):
    def search(*unused, **named):
        raise error

    monkeypatch.setattr(planning, "search", search)
    assert main(["-m", "64"]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith(f"uncut_mpi.plan: {said}")
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_where_nothing_has_to_move_nothing_is_said_to_limit(capsys):
    assert main(["-m", "64", "--alpha", "0", "--beta", "2", "--place", "rows,rows,rows"]) == 0
    assert "0 µs: nothing is multiplied, and nothing has to leave its memory\n" in capsys.readouterr().out


def test_ctrl_c_while_a_file_is_written_leaves_none(asked, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "fsync", interrupt)
    assert main([*SMALL.split(), "--json", str(tmp_path / "facts.json")]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "uncut_mpi.plan: interrupted\n")
    assert os.listdir(tmp_path) == []


def test_nothing_that_is_read_is_replaced(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(load_machine("h200-4x").to_json())
    before = path.read_bytes()
    assert main(["-m", "256", "--machine", str(path), "--json", str(path)]) == 2
    assert "which is read" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.parametrize("scheduler", ["uncut", "kblocks", "cyclic", "parsec"])
@pytest.mark.parametrize("slow", [1.0, 0.6], ids=["alike", "one slower"])
def test_one_scheduler_alone_is_planned_as_the_gemm_command_runs_it(scheduler, slow, tmp_path, capsys):
    path, file = tmp_path / "facts.json", tmp_path / "machine.json"
    rates = {"f64": np.array([5.0, 5.0, slow * 5.0, 5.0])}
    same = {"gemm_tflop_per_s": rates, "typical_gemm_tflop_per_s": rates}
    machine = dataclasses.replace(Machine.uniform(4), **same, costs=IssueCosts(copy_s=1e-4, gemm_s=1e-4))
    file.write_text(machine.to_json())
    words = ["-m", "3000", "--scheduler", scheduler, "--machine", str(file)]
    assert main([*words, "--json", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert len(facts["candidates"]) == 1
    problem = GemmProblem(3000, 3000, 3000, DType.f64, reads_c=True)
    options = ScheduleOptions(scheduler=scheduler)
    made = plan(problem, Placement.parse("h,h,h"), 4, machine, options).schedule
    assert facts["digest"] == made.digest()


def test_runners_up_say_what_they_do_otherwise(capsys):
    # Both schedulers are tried, and unequal shares.
    machine = "h200-4x"
    assert main(["-m", "3000", "--ranks", "2", "--place", "0,0,0", "--machine", machine]) == 0
    out = capsys.readouterr().out
    lines = out[out.index("runners-up") : out.index("\nbytes")].splitlines()
    assert len(lines) == 5
    for line in lines:
        assert re.search(r"s, .* J: (\w+, grid \d+x\d+|[a-z ]+ [\w.:,]+)", line), line
    assert "Blocking(" not in out
    assert "None" not in out


def test_the_best_of_every_other_scheduler_and_of_another_grid_is_told(capsys, tmp_path):
    words = ["-m", "4096", "--place", "0,0,0", "--machine", "h200-4x", "--json", str(tmp_path / "plan.json")]
    assert main(words) == 0
    out = capsys.readouterr().out
    told = [line[12:] for line in out[out.index("\nothers") + 1 : out.index("\nrunners-up")].splitlines()]
    tried = json.loads((tmp_path / "plan.json").read_text())["candidates"]
    others = {one["options"]["scheduler"]: one["predicted_s"] for one in reversed(tried)}
    best = tried[0]["options"]["scheduler"]
    times = {line.split(": ")[1].split(",")[0]: float(line.split(" ")[0]) for line in told[::-1]}
    assert {*others} == {"uncut", "kblocks"}
    for scheduler, seconds in others.items():
        if scheduler != best:
            assert times[scheduler] == pytest.approx(1e3 * seconds, rel=1e-3)
    assert times[best] > 1e3 * others[best]
    assert len(told) == 2


def test_runners_up_are_other_schedules_in_the_order_of_what_was_minimised(capsys, tmp_path):
    words = ["-m", "3000", "--place", "0,0,0", "--machine", "h200-4x", "--metric", "edp"]
    assert main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    lines = out[out.index("\npredicted") : out.index("\nbytes")].splitlines()
    values = [float(found[1]) for line in lines if (found := re.search(r" J, edp ([\d.e-]+) J s", line))]
    best = json.loads((tmp_path / "plan.json").read_text())
    assert values[0] == pytest.approx(best["predicted_s"] * best["energy_j"], rel=1e-3)
    assert len(values) == 6
    assert values == sorted(values)
    # On the one GPU that is best most options make no difference.
    assert "wr lazy off\n" not in out
    assert "order finish\n" not in out


def test_areas_and_all_devices_are_said_in_few_words(capsys, tmp_path):
    words = ["-m", "3072", "--place", "0,0,0", "--machine", "h200-4x", "--json", str(tmp_path / "plan.json")]
    assert main([*words, "--options", '{"blocking": {"combine": "owner"}}']) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("plan"))
    assert re.search(r"columns of ranks 0\.\d{3} \| 0\.\d{3}:", line), line
    runners_up = out[out.index("runners-up") : out.index("\nbytes")]
    assert re.search(r"areas 0\.\d{3} \| 0\.\d{3}", runners_up), runners_up
    assert not re.search(r"\d\.\d{7}|\(|chosen", line + runners_up)
    # All that there is to know is in the file.
    assert json.loads((tmp_path / "plan.json").read_text())["options"]["areas"] is not None


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x", "99999999999"])
def test_any_width_of_a_terminal_will_do(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["-m", "64"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 600


def test_a_timeline_says_what_it_leaves_out_of_the_predicted_time(capsys) -> None:
    words = ["-m", "8192", "--machine", "h200-4x", "--ranks", "2", "--scheduler", "kblocks"]
    assert main([*words, "--place", "rows,cols,rows"]) == 0
    busy = capsys.readouterr().out
    assert main(["-m", "512", *words[2:]]) == 0
    short = capsys.readouterr().out
    assert re.search(r"^predicted, without [\d.]+ .s for lack of power, ", busy, re.MULTILINE)
    assert "lack of power" not in short


def test_of_many_ranks_one_line_says_what_holds_for_several_and_the_file_has_the_rest() -> None:
    assert plan_report._of_ranks(enumerate("abab")) == ["ranks 0, 2: a", "ranks 1, 3: b"]
    lines = plan_report._of_ranks(enumerate("abcdefghij" + "a" * 100))
    assert lines == ["ranks 0, 10-109: a", *(f"rank {at}: {text}" for at, text in enumerate("bcdefgh", 1)), lines[-1]]
    assert lines[-1] == "2 more ranks: --json has them"


def compare(words, tmp_path):
    path = tmp_path / "facts.json"
    assert main([*words.split(), "--compare-places", "--scheduler", "kblocks", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["places"]
    assert len({one["place"] for one in found}) == len(found)
    return found


def test_places_are_compared_by_what_is_planned_for_each(capsys, tmp_path) -> None:
    words, ranks, machine = "-m 3000 -n 2000 -k 1000 --trans-b T --beta 0 --ranks 4", 4, Machine.uniform(4)
    found = compare(f"{words} --place 0,h,1", tmp_path)
    said = capsys.readouterr().out
    table = said[said.index("\nplaces") + 1 : said.index("\n\n")].splitlines()
    assert len(table) == len(found) + 1 <= 13
    assert [one["predicted_s"] for one in found] == sorted(one["predicted_s"] for one in found)
    problem = GemmProblem(3000, 2000, 1000, DType.f64, "N", "T", reads_c=False)
    options = ScheduleOptions(scheduler="kblocks")
    for line, one in zip(table[1:], found, strict=True):
        placement = Places.parse(one["place"]).bind(problem, ranks)
        assert one["predicted_s"] == plan(problem, placement, ranks, machine, options).predicted_s
        limit = bound(problem, placement, machine)
        assert (one["bound_s"], one["limited_by"]) == (limit.seconds, limit.limited_by)
        cells = re.split(r" {3,}", line.removeprefix("places").strip())
        busy = f"{one['busiest']}, {one['busy_share']:.0%}".replace("%", " %")
        place = one["place"] + " (as asked)" * (one["place"] == "0,h,1")
        assert cells == [time_text(one["predicted_s"]), time_text(limit.seconds), limit.limited_by, busy, place]
    assert {"h,h,h", "0,0,0", "rows,rows,rows", "0,h,1"} < {one["place"] for one in found}


@pytest.mark.parametrize(
    ("ranks", "m", "block"), [(2, 3000, 0), (4, 3000, 1024), (6, 3000, 1000), (4, 100, 0), (4, 128, 64)]
)
def test_blocks_are_dealt_to_grids_of_rows_and_columns_with_a_block_for_each(ranks, m, block, tmp_path) -> None:
    found = compare(f"-m {m} --ranks {ranks}", tmp_path)
    dealt = [one["place"] for one in found if "cyclic" in one["place"]]
    layout = f"block_cyclic({block},{block};2,{ranks // 2})"
    assert dealt == ([",".join([layout] * 3)] if block else [])


def test_a_place_without_room_stands_last_and_says_why(capsys, tmp_path) -> None:
    small = dataclasses.replace(Machine.uniform(2), memory_bytes=np.full(2, 20_000_000))
    path = tmp_path / "small.json"
    path.write_text(small.to_json())
    found = compare(f"-m 1000 --machine {path}", tmp_path)
    assert [one["place"] for one in found if one["error"]] == ["0,0,0"]
    assert found[-1]["predicted_s"] is None
    assert "needs" in found[-1]["error"]
    assert re.search(r"^ +none +0,0,0: rank 0 needs", capsys.readouterr().out, re.MULTILINE)
