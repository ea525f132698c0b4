"""What labels, transfers and explanations say of a schedule is what its tasks do, followed element by element."""

from __future__ import annotations

import bisect
import collections
import random
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.helpers import fuzz
from tests.helpers.clusters import random_schedule
from tests.helpers.layouts import random_layout, user_parts
from uncut_mpi.command import planning
from uncut_mpi.errors import CapacityError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Space, with_ends
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Schedule
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import held_by_operands
from uncut_mpi.view.explain import explain
from uncut_mpi.view.parts import make_labels
from uncut_mpi.view.traffic import traffic

MOST_TASKS = 200
WIDE = 1 << 20  # more than any extent
LINKS = ("host_to_device", "device_to_host", "device_to_device")

Elements = frozenset[int]


def elements(view: np.ndarray) -> Elements:
    return frozenset(view[view >= 0].tolist())


def numbers(matrix: Matrix, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return a number for each element of some rows and columns of a matrix; no two elements have the same."""
    return (int(matrix) * WIDE + rows[:, None]) * WIDE + cols[None, :]


class Followed:
    """
    A schedule followed by numbers of elements: -1 is an element of nothing.

    `held` are the elements of each operand of each task, the written one's after it; `copied` the copies with both ends
    and bytes; `used` is what each rank's products read and write, `makers` the ranks by that.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.memory = [np.full((row["rows"], row["cols"]), -1) for row in schedule.buffers]
        self.own: dict[int, np.ndarray] = {}  # of the caller's C
        for matrix in MATRICES:
            for at, part, (rows, cols) in user_parts(schedule, matrix, self.memory):
                part[...] = numbers(matrix, np.arange(rows.start, rows.stop), np.arange(cols.start, cols.stop))
                if matrix is Matrix.C:
                    self.own[at] = self.memory[at].copy()
        self.at_first = [memory.copy() for memory in self.memory]
        self.held: dict[tuple[int, int], Elements] = {}
        self.used: dict[int, set[int]] = collections.defaultdict(set)
        self.copied: list[tuple[int, int, int, int]] = []
        for task, record in enumerate(schedule.tasks):
            if record["kind"] not in (Kind.JOIN, Kind.RECV):  # which is run with its SEND
                self.run(task, Kind(record["kind"]), int(record["rank"]))
        self.makers: dict[int, set[int]] = collections.defaultdict(set)
        for rank, used in self.used.items():
            for one in used:
                self.makers[one].add(rank)

    def run(self, task: int, kind: Kind, rank: int) -> None:
        operands = self.schedule.operands_of(task)
        if kind == Kind.SEND:
            operands = np.concatenate([self.schedule.operands_of(task + 1), operands])
        regions = self.schedule.regions[operands["region"]]
        views = [
            self.memory[of["buffer"]][of["row"] : of["row"] + of["rows"], of["col"] : of["col"] + of["cols"]]
            for of in regions
        ]
        for number, view in enumerate(views[1:], 1):
            self.held[task, number] = elements(view)
        turned = [view.T if operand["op"] != Op.N else view for view, operand in zip(views, operands, strict=True)]
        if kind in (Kind.COPY, Kind.SEND):
            views[0][...] = turned[1].copy()
        elif kind == Kind.GEMM:
            # Of op(A) the first column says which rows of C are written, of op(B) the first row which columns.
            problem, a, b = self.schedule.problem, turned[1][:, 0], turned[2][0]
            rows = a % WIDE if problem.trans_a != "N" else a // WIDE % WIDE
            cols = b // WIDE % WIDE if problem.trans_b != "N" else b % WIDE
            views[0][...] = numbers(Matrix.C, rows, cols)
            self.used[rank] |= self.held[task, 1] | self.held[task, 2] | elements(views[0])
        else:
            used = operands["factor"][1:] != Factor.ZERO
            terms = [one for one, needed in zip(turned[1:], used, strict=True) if needed]
            views[0][...] = np.max([np.full(views[0].shape, -1), *terms], axis=0)
        at = int(regions["buffer"][0])
        if at in self.own:  # zeros there are of C
            self.memory[at][...] = np.where(self.memory[at] < 0, self.own[at], self.memory[at])
        if kind == Kind.SEND:
            del self.held[task, 1]
        self.held[task + (kind == Kind.SEND), 0] = elements(views[0])
        if kind in (Kind.COPY, Kind.SEND):
            size = views[0].size * DType(int(self.schedule.buffers["dtype"][at])).itemsize
            self.copied.append((task, self.end(regions["buffer"][1]), self.end(at), size))

    def end(self, buffer: int) -> int:
        """Return the rank whose device a buffer is in; of host memory the number of ranks, and its node's on top."""
        at = self.schedule.locations[self.schedule.buffers["location"][buffer]]
        return int(self.schedule.num_ranks + at["node"] if at["space"] == Space.HOST else at["rank"])

    def holders(self, matrix: Matrix) -> dict[int, list[int]]:
        """Return where each element of a matrix is at first, as of `end`."""
        found: dict[int, list[int]] = {}
        for at, _, _ in user_parts(self.schedule, matrix, self.memory):
            for one in elements(self.at_first[at]):
                found.setdefault(one, []).append(self.end(at))
        return found


def check_held(schedule: Schedule, followed: Followed) -> None:
    found: dict[tuple[int, int], list[np.ndarray]] = collections.defaultdict(list)
    for task, operand, matrix, row, col, rows, cols in held_by_operands(schedule).tolist():
        found[task, operand].append(numbers(Matrix(matrix), np.arange(row, row + rows), np.arange(col, col + cols)))
    for (task, operand), expected in followed.held.items():
        if operand == 0 or schedule.operands_of(task)[operand]["factor"] != Factor.ZERO:
            assert frozenset(np.concatenate([one.ravel() for one in found[task, operand]] or [[]])) == expected, task


def check_labels(schedule: Schedule, followed: Followed) -> None:
    """A label has the tiles that its operands' elements are in, as the caller counts them; copies have their ends."""
    problem = schedule.problem
    letters = dict(zip(MATRICES, "BAC" if problem.swapped else "ABC", strict=True))
    turned = {letters[Matrix.A]: problem.trans_a != "N", letters[Matrix.B]: problem.trans_b != "N", "C": False}

    def spans(task: int, operand: int) -> tuple[str, list[tuple[int, int]]]:
        ids = np.array(sorted(followed.held[task, operand]))
        letter = letters[Matrix(int(ids[0]) // WIDE**2)]
        axes = [(int(axis.min()), int(axis.max())) for axis in (ids // WIDE % WIDE, ids % WIDE)]
        return letter, axes[::-1] if turned[letter] != problem.swapped else axes

    kinds = schedule.tasks["kind"]
    begins: dict[tuple[str, int], set[int]] = collections.defaultdict(set)
    for task in np.flatnonzero(kinds == Kind.GEMM).tolist():
        for letter, axes in (spans(task, operand) for operand in range(3)):
            for axis, (first, _) in enumerate(axes):
                begins[letter, axis].add(first)

    def name(task: int, operand: int) -> str:
        if not followed.held[task, operand]:
            return "C"
        letter, axes = spans(task, operand)
        tiles = [[bisect.bisect_right(sorted(begins[letter, n]), at) - 1 for at in axes[n]] for n in (0, 1)]
        return letter + "({},{})".format(*(f"{one}-{last}" if last > one else str(one) for one, last in tiles))

    labels = make_labels(schedule)
    ends = [*map(str, range(schedule.num_ranks)), *hosts_of(schedule)]
    for task, source, destination, _ in followed.copied:
        what, between = labels[task].split(" ")
        if schedule.tasks["kind"][task] == Kind.SEND:
            assert labels[task + 1] == labels[task]
            assert re.sub(r"\.\d+$", "", what) == name(task + 1, 0)
            continue
        assert between == f"{ends[source]}->{ends[destination]}"
        assert "+" in what or re.sub(r"\.\d+$", "", what) == name(task, 1)
    for task in np.flatnonzero(kinds == Kind.GEMM).tolist():
        factors = (2, 1) if problem.swapped else (1, 2)
        assert labels[task] == f"{name(task, 0)} += {name(task, factors[0])} {name(task, factors[1])}"


def hosts_of(schedule: Schedule) -> list[str]:
    """Return what the hosts of all nodes are called."""
    num_nodes = int(schedule.locations["node"].max()) + 1
    return [f"host.{node}" for node in range(num_nodes)] if num_nodes > 1 else ["host"]


def check_bytes(schedule: Schedule, followed: Followed) -> None:
    """Bytes of links, ports and nodes are those of the copies, and the least what no copies can do without."""
    problem, ranks, host = schedule.problem, range(schedule.num_ranks), schedule.num_ranks
    node_of = [int(node) for node in schedule.locations["node"][:host]]
    nodes = [{rank for rank in ranks if node_of[rank] == node} for node in range(max(node_of) + 1)]
    moved = np.zeros((host + len(nodes),) * 2, np.int64)
    for _, source, destination, size in followed.copied:
        moved[source, destination] += size
    np.fill_diagonal(moved, 0)
    least = dict.fromkeys(LINKS, 0)
    into, out_of, into_node = np.zeros(host, np.int64), np.zeros(host, np.int64), np.zeros(len(nodes), np.int64)
    for matrix in (Matrix.A, Matrix.B) if problem.has_product else ():
        for element, where in followed.holders(matrix).items():
            foreign = followed.makers[element] - {*where}
            for node, own in enumerate(nodes):
                least["device_to_device"] += len(foreign & own)
                if followed.makers[element] & own and not own & {*where}:  # it comes once
                    least["device_to_device"] -= 1
                    least["host_to_device"] += host + node in where
                    into_node[node] += host + node not in where
            into[[*foreign]] += 1
            if len(where) == 1 and where[0] < host:
                out_of[where[0]] += bool(foreign)
    for element, where in followed.holders(Matrix.C).items():
        makers, devices = followed.makers[element], {one for one in where if one < host}
        for node, own in enumerate(nodes):
            worked = bool(makers & own) or not problem.has_product
            if host + node in where:
                least["device_to_host"] += worked
                least["host_to_device"] += worked and problem.reads_c and not devices & own
            elif not problem.has_product:
                least["device_to_device"] += max(0, len(devices & own) - 1)
            elif not devices & own:  # summed before it leaves
                least["device_to_device"] += max(0, len(makers & own) - 1)
            elif len(devices & own) == 1:
                least["device_to_device"] += len(makers & own - devices)
            else:
                least["device_to_device"] += sum(bool(makers & own - {one}) for one in devices & own)
            into_node[node] += bool((host + node in where or devices & own) and makers - own)
        for one in devices:
            into[one] += bool(makers - {one})
        for one in makers:
            out_of[one] += bool({*where} - {one})
    told, item = traffic(schedule), problem.dtypes[Matrix.C].itemsize
    over_net = np.array([*node_of, *range(len(nodes))])
    within = np.where(over_net[:, None] == over_net, moved, 0)
    between = moved - within
    by_link = dict(zip(LINKS, (within[host:].sum(), within[:, host:].sum(), within[:host, :host].sum()), strict=True))
    if len(nodes) > 1:
        by_link["node_to_node"], least["node_to_node"] = between.sum(), into_node.sum()
        for node, one in enumerate(told.nodes):
            mine = over_net == node
            assert (one.into_bytes, one.out_of_bytes) == (between[:, mine].sum(), between[mine].sum())
            assert one.least_into_bytes == into_node[node] * item
    assert {one.link: one.nbytes for one in told.links} == by_link
    assert {one.link: one.least_bytes for one in told.links} == {link: size * item for link, size in least.items()}
    for rank, port in zip(ranks, told.ports, strict=True):
        assert (port.into_bytes, port.out_of_bytes) == (moved[:, rank].sum(), moved[rank].sum())
        if problem.has_product and not any(max(where) >= host for where in followed.holders(Matrix.C).values()):
            assert (port.least_into_bytes, port.least_out_of_bytes) == (into[rank] * item, out_of[rank] * item)


def check_explanation(schedule: Schedule, machine: Machine, followed: Followed) -> None:
    found = explain(simulate(schedule, machine))
    names = "BAC" if schedule.problem.swapped else "ABC"
    node_of = np.unique(with_ends(schedule.locations)[["end", "node"]])["node"]
    host, moved = schedule.num_ranks, {name: collections.Counter() for name in found.moved}
    for task, source, destination, size in followed.copied:
        if source != destination:
            read = (task + 1, 0) if schedule.tasks["kind"][task] == Kind.SEND else (task, 1)
            of = next((one // WIDE**2 for one in followed.held[read]), Matrix.C)
            link = LINKS[0] if source >= host else LINKS[1] if destination >= host else LINKS[2]
            link = "node_to_node" if node_of[source] != node_of[destination] else link
            moved[names[of]][link] += size
    assert found.moved == {name: {link: size for link, size in of.items() if size} for name, of in moved.items()}
    made = [len(followed.makers[element]) for element in followed.holders(Matrix.C)]
    assert found.reduced_over == max(made, default=0)


def check(schedule: Schedule, machine: Machine) -> None:
    followed = Followed(schedule)
    check_held(schedule, followed)
    if schedule.problem.has_product:
        check_labels(schedule, followed)
    check_bytes(schedule, followed)
    check_explanation(schedule, machine, followed)


@settings(fuzz.SETTINGS, max_examples=100)
@given(st.one_of(fuzz.cases("product", 8, 24), fuzz.cases("scales", 8, 16), fuzz.cases("copies", 8, 16)))
def test_what_is_told_of_a_schedule_is_what_its_tasks_do(case: fuzz.Case) -> None:
    assume(len({one.itemsize for one in case.problem.dtypes}) == 1)  # elements are counted here, of all matrices alike
    try:
        plans = case.plans()
    except CapacityError:  # what is told of no plan the other tests look at
        assert case.may_lack_room
        return
    for _, schedule in plans:
        if len(schedule.tasks) <= MOST_TASKS:
            check(schedule, case.machine)


def test_what_is_told_of_replicas_is_so_too() -> None:
    # Those in devices alone are rare: the last one of what is only scaled has them.
    for schedule in map(random_scaled, range(50, 60)):
        if len(schedule.tasks) <= MOST_TASKS:
            check(schedule, Machine.uniform(schedule.num_ranks))


@pytest.mark.parametrize("seed", range(25))
def test_what_is_told_of_several_nodes_is_so_too(seed: int) -> None:
    schedule, machine = random_schedule(seed, most=24)
    check(schedule, machine)


def random_scaled(seed: int) -> Schedule:
    rng = random.Random(seed)
    ranks, (m, n) = rng.choice((1, 2, 3, 4, 6)), (rng.randint(1, 40), rng.randint(1, 40))
    without = rng.choice(({"k": 0}, {"k": 5, "scales_only": True}))
    problem = GemmProblem(m, n, dtype=rng.choice((DType.f64, DType.bf16)), reads_c=rng.random() < 0.7, **without)
    layouts = [random_layout(rng, shape, ranks, "FC") for shape in (problem.a_shape, problem.b_shape, (m, n))]
    return plan(problem, Placement(*layouts), ranks, Machine.uniform(ranks)).schedule


# -- explanations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "movement", "limit", "warning"),
    [
        (
            "-m 4096 --place rows,rows,rows",
            "A and C stay in place; B moves [^;]* between devices; k is not",
            "computing",
            "",
        ),
        (
            "-m 4096 --place cols,cols,cols",
            "B and C stay in place; A moves [^;]* between devices; k is not",
            "computing",
            "",
        ),
        ("-m 4096 --place rows,replicated,rows", "A, B and C stay in place; k is not split", "computing", ""),
        ("-m 512 --alpha 0 --place rows,rows,cols", "C stays in place", "computing", ""),
        ("-m 4096 --alpha 0", "C moves [^;]* from the host and [^;]* to the host", "link 0->host", "C at h costs"),
        ("-m 512 -n 512 -k 99999 --place 0,0,0", ".*; k is reduced over 4 ranks", "link 0->1", ""),
        (
            "-m 2048 --beta 0",
            "A moves 33.55 MB from the host.*; C moves 33.55 MB to the host; k is not split",
            "link host->0",
            r"A, B and C at h cost \d\d % of the time; --place rows,rows,rows would take [\d.]+ µs",
        ),
        (
            "-m 65536 -n 1024 -k 512 --place 0,0,0",
            "A moves [^;]* between devices; B moves",
            "computing on device 0",
            "",
        ),
        # Ranks take turns at the disk: each of them is there for part of the time, and all together for all of it.
        (
            "-m 20000 --place f,f,f --host-memory 8GB",
            "A moves 3.200 GB from the host and .*; B moves 3.200 GB from the host",
            "reading files",
            "",
        ),
    ],
)
def test_a_plan_says_what_stays_what_moves_what_limits_it_and_what_its_place_costs(
    words: str, movement: str, limit: str, warning: str
) -> None:
    said: list[str] = []
    planning.run(planning.parse(words.split()), said.append)
    lines = "".join(said).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("in short"))
    assert re.match(rf"in short    {movement}", lines[first])
    assert re.match(rf" {{12}}limited by {limit}, expected to be busy for ", lines[first + 1])
    found = [line.removeprefix("warning     ") for line in lines if line.startswith("warning")]
    assert len(found) == bool(warning)
    assert re.match(warning, "".join(found))
