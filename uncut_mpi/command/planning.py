"""The plan command: from a command line to a chosen schedule, its prediction and its pictures."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.command.arguments import check_different, complete, filled
from uncut_mpi.command.artifacts import check_paths, write_file, written_by
from uncut_mpi.command.entry import Say
from uncut_mpi.command.flags import join_negative_values, make_plan_parser
from uncut_mpi.command.plan_report import PlanFacts, to_json, to_text
from uncut_mpi.errors import CapacityError, ParamError, UncutError, reason
from uncut_mpi.free_memory import usual_room
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.bounds import Bound, bound, bound_of_files, least_bytes_of_a_node
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import user_table
from uncut_mpi.planning.candidates import Candidate, Simulated
from uncut_mpi.planning.chunks import Chunks, of_each
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.planner import Planned, expected_seconds, in_chunks, plan_several
from uncut_mpi.planning.search import SearchResult, search
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import held_by_operands
from uncut_mpi.units import bytes_text, time_text
from uncut_mpi.view.explain import explain, listed
from uncut_mpi.view.figure import import_figure
from uncut_mpi.view.heatmap import draw_transfers
from uncut_mpi.view.render import check_drawable, render
from uncut_mpi.view.timeline import Timeline
from uncut_mpi.view.traffic import traffic

_EDGE: Final = 8192
_RANKS: Final = 4
_PLACES: Final = (
    "h,h,h", "h,h,0", "0,0,0", "h,h,rows", "rows,h,rows", "h,cols,cols", "rows,rows,rows", "cols,cols,cols",
    "rows,cols,rows", "rows,replicated,rows",
)  # fmt: skip
"""What is compared, and what is dealt by blocks to a grid: from all in host memory to all on devices."""
_BLOCK: Final = 1024
_LEAST_BLOCK: Final = 64
_WIDEST: Final = 500  # of a timeline in characters, whatever COLUMNS says

UNIFORM: Final = "uniform"
"""Name of the machine of equal links and devices, of any number of ranks."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """
    What one run of the plan command was asked to do, as the help of its flags says.

    The problem has every matrix column-major. Of the scalars only 0 matters to a plan.
    """

    problem: GemmProblem
    alpha: Number
    beta: Number
    place: Places
    machine: str
    ranks: int | None
    devices: tuple[int, ...] | None
    nodes: int | None
    net: Net | None
    options: ScheduleOptions
    timeline: str | None
    transfers: str | None
    json: str | None
    compare_places: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What was found."""

    result: SearchResult  # the schedules tried, the best first; of the first chunk
    bound: Bound  # what no schedule of the whole product can beat
    least_of_a_node: int  # bytes into and out of one of several nodes, in any schedule of the whole product
    predicted_s: float  # what the whole product is expected to take
    chunks: Chunks | None  # blocks of C, one after another; None: one schedule does all
    machine: Machine  # with the memory that a plan may take of each device


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """What a product is expected to take with its matrices in some places; why there is no plan, if there is none."""

    place: str  # of A, B and C, as --place takes it
    predicted_s: float = math.inf
    bound_s: float = math.inf
    limited_by: str = ""  # the resource that sets the bound
    busiest: str = ""  # which is busy longest in the simulation, of the first chunk, and for which part of it
    busy_share: float = 0.0
    error: str = ""

    @classmethod
    def of(cls, place: Places, found: Found) -> Compared:
        """Return it of what was found for some places."""
        limit, run = found.bound, explain(found.result.best.simulation)
        return cls(str(place), found.predicted_s, limit.seconds, limit.limited_by, run.busiest, run.busy_share)


def parse(argv: Sequence[str]) -> PlanArguments:
    """Return what the command line asks for; errors as of `uncut_mpi.command.arguments.parse`."""
    given = make_plan_parser().parse_args(join_negative_values(argv))
    check_different(written_by(given))
    if given.transfers is not None and not given.transfers.endswith(".png"):
        raise ParamError(f"--transfers {given.transfers} is drawn as a PNG: let the name end in .png")
    complete(given)
    m, n, k = (_EDGE if extent is None else extent for extent in (given.m, given.n, given.k))
    if given.options.tune:
        raise ParamError("tune in --options: it tries schedules in calls, and a plan makes none; leave it out")
    if given.compare_places and given.alpha == 0:
        raise ParamError("--compare-places is for products, and alpha is 0: leave it out")
    if any(given.place.in_files):
        if given.options.metric != "time":
            raise ParamError(
                "--metric was given with matrices in files (f in --place), of which it knows nothing: leave it out"
            )
    elif given.options.host_memory:
        raise ParamError(
            "--host-memory is for copies of matrices in files, of which --place names none (f): leave it out"
        )
    if (given.nodes is None) != (given.net is None):
        one, other = ("--nodes", "--net") if given.net is None else ("--net", "--nodes")
        raise ParamError(
            f"{one} was given without {other}: say how many nodes there are and what joins them, "
            "as --nodes 4 --net 12.5:2:2"
        )
    shape = m, n, k, given.dtype or DType.f64, given.trans_a, given.trans_b
    given.problem = GemmProblem(*shape, reads_c=given.beta != 0, scales_only=given.alpha == 0)
    return filled(PlanArguments, given)


def run(arguments: PlanArguments, say: Say) -> None:
    """Choose, say and write; raise what the machine, the problem or a file does not allow."""
    check_paths(written_by(arguments), [arguments.machine])
    if arguments.timeline is not None:
        check_drawable(arguments.timeline)
    if arguments.transfers is not None:
        import_figure()
    machine = find_machine(arguments.machine, arguments.ranks, arguments.devices)
    if arguments.nodes is not None and arguments.net is not None:
        if machine.num_nodes > 1:
            raise ParamError(
                f"--nodes {arguments.nodes} was given, machine {machine.name} has {machine.num_nodes} nodes already: "
                "leave --nodes and --net out, or name a machine of one node"
            )
        machine = Machine.cluster(machine, arguments.nodes, arguments.net)
    started = time.perf_counter()
    found = _find(arguments, machine)
    search_s = time.perf_counter() - started
    compared = _compare(arguments, machine, found) if arguments.compare_places else None
    machine = found.machine
    simulation = found.result.best.simulation
    schedule = simulation.schedule
    held = held_by_operands(schedule)
    timeline = Timeline.of(schedule, simulation.start_s, simulation.end_s, "predicted", machine)
    if (power_s := simulation.seconds - timeline.seconds) > 0.001 * timeline.seconds:
        # What lack of power takes counts at the end, and is of no task.
        timeline = dataclasses.replace(timeline, name=f"predicted, without {time_text(power_s)} for lack of power")
    facts = PlanFacts(
        machine=machine,
        asked=arguments,
        found=found,
        search_s=search_s,
        simulation=simulation,
        traffic=traffic(schedule, held),
        timeline=timeline,
        explanation=explain(simulation, held),
        warning=costly_place(arguments.problem, arguments.place, found.predicted_s, machine),
        compared=compared,
    )
    say(to_text(facts, min(shutil.get_terminal_size().columns, _WIDEST)))
    if arguments.timeline is not None:
        write_file("--timeline", arguments.timeline, render(arguments.timeline, [timeline]))
    if arguments.transfers is not None:
        write_file("--transfers", arguments.transfers, draw_transfers(schedule, machine))
    if arguments.json is not None:
        write_file("--json", arguments.json, to_json(facts).encode())


def _find(arguments: PlanArguments, machine: Machine) -> Found:
    """
    Return schedules for a problem; raise what the machine has no room for.

    Of one scheduler alone, without a product, of matrices in files, or with parts stored the other way round, there is
    no search whose candidates could be shown.
    """
    problem, in_files = arguments.problem, arguments.place.in_files
    arguments.place.check_ranks(machine.num_ranks)
    placement = arguments.place.bind(problem, machine.num_ranks, in_order=arguments.options.same_sums)
    there = Setting.of(problem, placement, machine.num_ranks, machine, arguments.options)
    machine = dataclasses.replace(machine, memory_bytes=there.memory_bytes)
    _check_host(arguments, placement, machine)
    options, of_each_rank = arguments.options, machine.host_bytes // np.bincount(machine.node_of)
    if any(in_files) and not options.host_memory and of_each_rank.all():
        options = changed(options, host_memory=usual_room(int(of_each_rank.min())))

    def result_of(setting: Setting) -> SearchResult:
        searched = problem.has_product and setting.options.scheduler == "auto" and not any(in_files)
        if searched and setting.placement == setting.straight.placement:
            return search(setting)
        several = plan_several(setting)
        candidates = [_candidate(one, machine, in_files, options.metric) for one in several]
        return SearchResult(candidates, 0, sum(len(one.schedule.tasks) for one in several), options.metric)

    users = user_table(machine.ranks, problem, placement)["matrix"].tolist()
    files = tuple(at for at, matrix in enumerate(users) if in_files[matrix])
    setting = Setting.of(problem, placement, machine.num_ranks, machine, options, files, files)
    chunks = in_chunks(setting)
    results = of_each(setting, chunks, result_of)
    limit = bound_of_files(problem, placement, machine, in_files)
    least = least_bytes_of_a_node(problem, placement, machine)
    return Found(results[0], limit, least, sum(one.best.predicted_s for one in results), chunks, machine)


def _compare(arguments: PlanArguments, machine: Machine, asked: Found) -> list[Compared]:
    """Return what the product takes with its matrices in other places, the fastest first, and where it cannot be."""
    places = [Places.parse(text) for text in _PLACES]
    grid = ProcessGrid.most_square(machine.num_ranks)
    block = min(_BLOCK, min(arguments.problem.callers_shape) // max(grid.rows, grid.cols))
    if min(grid.rows, grid.cols) > 1 and block >= _LEAST_BLOCK:  # else it is rows or columns, or of tiny products
        places.append(Places(*[Dealt(Layout.block_cyclic(block, block, (grid.rows, grid.cols)), "device")] * 3))
    compared = [Compared.of(arguments.place, asked)]
    for place in places:
        if str(place) == str(arguments.place):
            continue
        try:
            compared.append(Compared.of(place, _find(dataclasses.replace(arguments, place=place), machine)))
        except UncutError as error:
            compared.append(Compared(str(place), error=reason(error)))
    return sorted(compared, key=lambda one: one.predicted_s)


def _candidate(planned: Planned, machine: Machine, in_files: tuple[bool, bool, bool], metric: str) -> Candidate:
    schedule, options = planned.schedule, planned.options
    run, seconds = planned.simulation or simulate(schedule, machine), planned.predicted_s
    limit = bound_of_files(schedule.problem, schedule.placement, machine, in_files)
    value = metric_of(metric, machine).value(run) if metric != "time" else seconds
    made_with = (options, schedule.callers_grid, schedule.splits, schedule.tile, seconds)
    return Candidate(*made_with, lambda: limit.seconds, value, Simulated(run, schedule))


def _check_host(arguments: PlanArguments, placement: Placement, machine: Machine) -> None:
    """Refuse matrices in host memory that a node has no room for, where it is known how much there is."""
    problem, needed = arguments.problem, np.zeros(machine.num_nodes, np.int64)
    for matrix, in_file in zip(MATRICES, arguments.place.in_files, strict=True):
        for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
            if part.location.space == "host" and not in_file:
                # Memory of all ranks is that of the first node.
                needed[machine.node_of[part.location.rank or 0]] += part.elements * problem.dtypes[matrix].itemsize
    for node, (size, there) in enumerate(zip(needed.tolist(), machine.host_bytes.tolist(), strict=True)):
        if size > there > 0:
            of = f"node {node} of machine" if machine.num_nodes > 1 else "machine"
            raise CapacityError(
                f"the matrices in host memory take {bytes_text(size)}, and {of} {machine.name} has "
                f"{bytes_text(there)} of it (host_bytes): let them lie in files (f in --place), or on devices"
            )


def costly_place(problem: GemmProblem, places: Places, seconds: float, machine: Machine) -> str:
    """
    Return a warning of a place that costs more than half of the time, with one that does not; empty if none does.

    Matrices that are whole in one memory are dealt to all ranks instead, by rows or by columns. They are multiplied on
    a grid of one column or one row, as `kblocks` does it by its own rules. So a better place may be missed.

    Parameters
    ----------
    problem : GemmProblem
        As the caller wrote it.
    places : Places
        Of its matrices.
    seconds : float
        What a schedule for them is expected to take.
    machine : Machine
        What it is planned for.
    """
    least, warning = 0.5 * seconds, ""
    if any(places.in_files):
        return ""  # what lies in files is not placed elsewhere
    where = {name: getattr(places, name) for name in ("abc" if problem.has_product else "c")}
    for place in dict.fromkeys(one for one in where.values() if isinstance(one, Location)):
        names = [name for name, one in where.items() if one == place]
        for way, grid in (("rows", (machine.num_ranks, 1)), ("cols", (1, machine.num_ranks))):
            tried = dataclasses.replace(places, **dict.fromkeys(names, Dealt.parse(way)))
            try:
                placement = tried.bind(problem, machine.num_ranks)
                if bound(problem, placement, machine).seconds >= least:
                    continue
                options = ScheduleOptions(scheduler="kblocks", grid=grid)
                found = expected_seconds(Setting.of(problem, placement, machine.num_ranks, machine, options))
            except UncutError:
                continue  # a place that is not to be had
            if found < least:
                least, share = found, f"{1 - found / seconds:.0%}".replace("%", " %")
                there = f"{listed([name.upper() for name in names])} at {place} {'cost' if names[1:] else 'costs'}"
                warning = f"{there} {share} of the time; --place {tried} would take {time_text(found)}"
    return warning


def find_machine(name: str, ranks: int | None, devices: tuple[int, ...] | None = None) -> Machine:
    """
    Return the machine to plan for, or as many of its ranks as are asked for, or those with some of its devices.

    Raise ParamError if there is none of that name, or it has not got so many ranks, or these devices.
    """
    listed = ",".join(map(str, devices or ()))
    if devices is not None and ranks not in (None, len(devices)):
        raise ParamError(
            f"--ranks {ranks} was given, and --devices {listed}, which are {len(devices)}: "
            "name one device for each rank, or leave --ranks out"
        )
    if name == UNIFORM:
        if devices is not None:
            raise ParamError(f"--devices {listed} was given, those of machine uniform are all alike: give --ranks")
        return Machine.uniform(ranks or _RANKS)
    machine = load_machine(name)
    if devices is not None:
        return machine.subset(devices)
    if ranks is None or ranks == machine.num_ranks:
        return machine
    if ranks > machine.num_ranks:
        raise ParamError(
            f"--ranks {ranks} was given, machine {machine.name} has {machine.num_ranks}: ask for no more, "
            "or name another machine"
        )
    return machine.subset(range(ranks))
