"""The bound of a process grid: against a table made independently, against hand-made cases and simple schedules."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uncut_mpi.errors import ParamError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.grid_bounds import best_grid_bound, grid_bound, grids
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, device_ports, duplex_ports
from uncut_mpi.model.problem import GemmProblem

EXPECTED = pathlib.Path(__file__).parent.parent / "data" / "limits_expected.csv"


@dataclasses.dataclass(frozen=True)
class Node:
    """Constants of tests/data/limits_expected.csv (see its README)."""

    gpus: int
    tflop_per_s: dict[str, float]
    port_gb_per_s: float
    pair_gb_per_s: float
    #: Sets of active GPUs, and (in, out, in both ways, out both ways) of the host for each (GB/s).
    active: list[list[int]]
    host: list[tuple[float, float, float, float]]
    #: In and out together at most, per set; what was ever observed.
    observed: list[float]

    def machine(self, observed: bool = False) -> Machine:
        host = self.gpus
        ports = device_ports(range(host), self.port_gb_per_s, self.port_gb_per_s)
        for ranks, (in_, out, both_in, both_out), total in zip(self.active, self.host, self.observed, strict=True):
            inward, outward = [(host, rank) for rank in ranks], [(rank, host) for rank in ranks]
            ports += duplex_ports(
                "host", inward, outward, in_gb_per_s=in_, out_gb_per_s=out, both_gb_per_s=(both_in, both_out)
            )
            if observed:
                ports.append(Port.of("host observed", total, [*inward, *outward]))
        # A host link alone is wider than any of these ports.
        uniform = Machine.uniform(
            host, link_gb_per_s=self.pair_gb_per_s, host_gb_per_s=1000.0, gemm_tflop_per_s=self.tflop_per_s
        )
        return dataclasses.replace(uniform, ports=tuple(ports))

    def devices(self, count: int) -> list[int]:
        return next(ranks for ranks in self.active if len(ranks) == count)


KAROLINA = Node(
    gpus=8,
    tflop_per_s={"f64": 17.2, "f32": 17.2},
    port_gb_per_s=281.0,
    pair_gb_per_s=150.0,
    active=[[0], [0, 2], [0, 1, 2], [0, 2, 4, 6], *(list(range(count)) for count in (5, 6, 7, 8))],
    host=[
        (22, 24, 19, 16),
        *[(36, 44, 32, 36)] * 2,
        *[(72, 88, 64, 72)] * 4,
        (88, 88, 72, 72),
    ],
    observed=[32.3, 62.5, 62.5, 85.1, 85.1, 85.1, 85.1, 97.3],
)
H200X4 = Node(
    gpus=4,
    tflop_per_s={"f64": 57.0, "f32": 51.0, "f16": 750.0},
    port_gb_per_s=400.0,
    pair_gb_per_s=396.0,
    active=[[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]],
    host=[(55, 55, 50, 50), (110, 105, 75, 75), (110, 105, 75, 75), (185, 147, 95, 95)],
    observed=[100.0, 150.0, 150.0, 190.0],
)
NODES = {"karolina": KAROLINA, "h200x4": H200X4}


def rows() -> list[dict[str, str]]:
    with EXPECTED.open(newline="") as file:
        return list(csv.DictReader(file))


def problem_of(row: dict[str, str]) -> GemmProblem:
    return GemmProblem(int(row["m"]), int(row["n"]), int(row["k"]), DType[row["dtype"]])


def grid_of(text: str) -> tuple[int, int, int]:
    r, c, s = (int(part) for part in text.split("x"))
    return r, c, s


def owners_compute(row: dict[str, str], devices: list[int]) -> bool:
    return all(part == "h" or int(part) in devices for part in row["placement"].split(","))


NAMES = {"p2p": "replication"}


@pytest.mark.parametrize("name", NODES)
def test_every_row_of_the_table_is_met(name: str) -> None:
    node = NODES[name]
    machine = node.machine()
    close = lambda value: pytest.approx(value, rel=1e-6)  # noqa: E731
    lower = 0
    for row in (row for row in rows() if row["node"] == name):
        devices = node.devices(int(row["gpus"]))
        found = grid_bound(
            problem_of(row),
            Placement.parse(row["placement"]),
            machine,
            grid=grid_of(row["grid"]),
            devices=devices,
            c_at_owner=False,
        )
        for term in ("compute", "host", "egress", "ingress"):
            assert found.terms[term] == close(float(row[f"{term}_s"])), (row, term)
        if owners_compute(row, devices):
            assert found.terms["replication"] == close(float(row["p2p_s"])), row
        else:
            # The table lets C's way out to a GPU that does not compute fill the ports of those that do,
            # and one GPU receive over one link alone, whatever the owners: more than has to be.
            assert found.terms["replication"] < float(row["p2p_s"])
            if row["limit"] == "p2p":
                lower += 1
                assert found.seconds < float(row["bound_s"])
                continue
        assert found.seconds == close(float(row["bound_s"])), row
        assert found.limited_by == NAMES.get(row["limit"], row["limit"]), row
    assert lower == (2 if name == "karolina" else 0)


@pytest.mark.parametrize("name", NODES)
def test_every_row_of_the_table_is_met_at_the_rates_ever_observed(name: str) -> None:
    node = NODES[name]
    machine = node.machine(observed=True)
    for row in (row for row in rows() if row["node"] == name):
        devices = node.devices(int(row["gpus"]))
        if not owners_compute(row, devices) and row["limit"] == "p2p":
            continue
        found = grid_bound(
            problem_of(row),
            Placement.parse(row["placement"]),
            machine,
            grid=grid_of(row["grid"]),
            devices=devices,
            c_at_owner=False,
        )
        assert found.seconds == pytest.approx(float(row["bound_observed_s"]), rel=1e-6), row


@pytest.mark.parametrize("name", NODES)
def test_the_best_of_all_grids_and_sets_is_that_of_the_table(name: str) -> None:
    node = NODES[name]
    machine = node.machine()
    for row in (row for row in rows() if row["node"] == name):
        found = best_grid_bound(problem_of(row), Placement.parse(row["placement"]), machine, subsets=node.active)
        assert found.seconds == pytest.approx(float(row["best_s"]), rel=1e-6), row
        assert (len(found.devices), found.grid) == (int(row["best_gpus"]), grid_of(row["best_grid"])), row


def cube(extent: int = 1000, **changes: object) -> GemmProblem:
    return dataclasses.replace(GemmProblem(extent, extent, extent, DType.f64), **changes)


def uniform(ranks: int, *, link: float = 100.0, host: float = 10.0, rate: float = 1.0) -> Machine:
    return Machine.uniform(ranks, link_gb_per_s=link, host_gb_per_s=host, gemm_tflop_per_s={"f64": rate})


def terms(machine: Machine, place: str, grid: tuple[int, int, int], **options: object) -> dict[str, float]:
    problem = options.pop("problem", cube())
    return dict(grid_bound(problem, Placement.parse(place), machine, grid=grid, **options).terms)


def test_a_grid_of_four_with_all_on_one_device() -> None:
    # 8 MB each. Half of A and of B are needed by 2 ranks, so all of both leaves rank 0, and 3/4 of C enters.
    found = terms(uniform(4), "0,0,0", (2, 2, 1))
    assert found["compute"] == pytest.approx(2e9 / 4e12)
    assert found["host"] == 0
    assert found["egress"] == pytest.approx(16e6 / 300e9)
    assert found["ingress"] == pytest.approx(6e6 / 300e9)
    # A and B twice, less the half of each that rank 0 has; 3/4 of C.
    assert found["replication"] == pytest.approx((2 * (16 - 4) + 6) * 1e6 / 1200e9)


def test_what_nobody_else_needs_does_not_leave() -> None:
    found = terms(uniform(4), "0,1,2", (4, 1, 1))
    assert found["egress"] == pytest.approx(max(6e6, 8e6) / 300e9)  # A less its first quarter; all of B
    assert found["replication"] == pytest.approx((6 + 3 * 8 + 6) * 1e6 / 1200e9)


def test_a_c_that_moves_leaves_its_owner_and_is_received() -> None:
    stays = terms(uniform(4), "h,h,2", (2, 2, 1))
    moves = terms(uniform(4), "h,h,2", (2, 2, 1), c_at_owner=False)
    assert stays["egress"] == 0
    assert moves["egress"] == pytest.approx(6e6 / 300e9)
    assert moves["ingress"] == stays["ingress"] == pytest.approx(6e6 / 300e9)
    assert moves["replication"] - stays["replication"] == pytest.approx(6e6 / 1200e9)
    unread = cube(reads_c=False)
    assert terms(uniform(4), "h,h,2", (2, 2, 1), c_at_owner=False, problem=unread) == stays


def test_a_split_of_k_adds_partial_results() -> None:
    found = terms(uniform(4), "h,h,0", (1, 2, 2))
    assert found["ingress"] == pytest.approx(8e6 / 300e9)  # rank 0 has a part of every element of C at best
    # A once more for the second column, one copy of partial results, and half of C to its owner.
    assert found["replication"] == pytest.approx((8 + 8 + 4) * 1e6 / 1200e9)


def test_equal_shares_wait_for_the_slowest_rank() -> None:
    uneven = dataclasses.replace(
        uniform(2), gemm_tflop_per_s={"f64": np.array([1.0, 3.0])}, typical_gemm_tflop_per_s={}
    )
    assert terms(uneven, "h,h,h", (1, 2, 1))["compute"] == pytest.approx(1e9 / 1e12)
    assert terms(uneven, "h,h,h", (1, 1, 1), devices=[1])["compute"] == pytest.approx(2e9 / 3e12)


def test_the_host_serves_the_ranks_that_compute() -> None:
    assert terms(uniform(4), "h,h,h", (1, 2, 1), devices=[1, 3])["host"] == pytest.approx(24e6 / 20e9)
    private = terms(uniform(4), "h3,h,h", (1, 2, 1), devices=[0, 1])
    assert private["host"] == pytest.approx(24e6 / 30e9)  # and 8 MB of it over the link of rank 3
    assert private["egress"] == pytest.approx(8e6 / 200e9)
    slow = np.array(uniform(4).bandwidth_gb_per_s)
    slow[4, 3] = 1.0
    slower = dataclasses.replace(uniform(4), bandwidth_gb_per_s=slow)
    assert terms(slower, "h3,h,h", (1, 2, 1), devices=[0, 1])["host"] == pytest.approx(8e6 / 1e9)


def test_a_c_on_the_host_enters_only_if_it_is_read() -> None:
    assert terms(uniform(2), "h,h,h", (1, 2, 1))["host"] == pytest.approx(24e6 / 20e9)
    assert terms(uniform(2), "h,h,h", (1, 2, 1), problem=cube(reads_c=False))["host"] == pytest.approx(16e6 / 20e9)


def test_an_owner_that_does_not_compute_keeps_nothing() -> None:
    found = terms(uniform(4), "3,h,3", (2, 1, 1), devices=[0, 1])
    assert found["egress"] == pytest.approx(8e6 / 200e9)
    assert found["ingress"] == pytest.approx(8e6 / 200e9)
    # A once, B once more than over the host links; C does not enter these two.
    assert found["replication"] == pytest.approx(16e6 / 400e9)


def test_one_rank_with_all_of_it_only_computes() -> None:
    found = grid_bound(cube(), Placement.parse("0,0,0"), uniform(1), grid=(1, 1, 1))
    assert (found.seconds, found.limited_by) == (pytest.approx(2e-3), "compute")
    assert [name for name, seconds in found.terms.items() if seconds] == ["compute"]


def test_without_a_product_only_c_on_the_host_moves() -> None:
    for problem in (cube(k=0), cube(scales_only=True)):
        found = terms(uniform(2), "0,0,h", (1, 2, 1), problem=problem)
        assert {name: seconds for name, seconds in found.items() if seconds} == {"host": pytest.approx(8e6 / 20e9)}
        assert not any(terms(uniform(2), "h,0,1", (1, 2, 1), problem=problem, c_at_owner=False).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grid": (2, 2, 1)}, "2x2x1 does not have as many places as there are devices, 3"),
        ({"grid": (3, -1, -1)}, "3x-1x-1"),
        ({"grid": (1, 1, 1), "devices": [3]}, "ranks 0 to 2"),
        ({"grid": (1, 1, 1), "devices": [-1]}, "ranks 0 to 2"),
        ({"grid": (1, 1, 1), "devices": []}, "at least one"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        grid_bound(cube(), Placement.parse("h,h,h"), uniform(3), **arguments)


def test_no_sets_are_no_choice() -> None:
    with pytest.raises(ParamError, match="give at least one"):
        best_grid_bound(cube(), Placement.parse("h,h,h"), uniform(3), subsets=[])


def test_grids_are_listed_square_first_and_splits_of_k_last() -> None:
    assert grids(4) == [(2, 2, 1), (1, 4, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)]
    assert grids(6, split_k=False) == [(2, 3, 1), (3, 2, 1), (1, 6, 1), (6, 1, 1)]
    assert all(math.prod(grid) == count for count in range(1, 33) for grid in grids(count))


def test_a_small_product_is_best_where_its_matrices_are() -> None:
    found = best_grid_bound(cube(64), Placement.parse("2,2,2"), uniform(4, link=1.0))
    assert (found.devices, found.grid) == ((2,), (1, 1, 1))


@st.composite
def cases(draw: st.DrawFn) -> tuple[GemmProblem, Placement, Machine]:
    ranks = draw(st.integers(1, 4))
    extent = st.integers(0, 4000)
    problem = GemmProblem(draw(extent), draw(extent), draw(extent), DType.f64, reads_c=draw(st.booleans()))
    location = st.sampled_from(["h", *(f"{kind}{rank}" for rank in range(ranks) for kind in ("", "h"))])
    placement = Placement.parse(",".join(draw(location) for _ in range(3)))
    speed = st.floats(0.5, 500.0)
    machine = uniform(ranks, link=draw(speed), host=draw(speed), rate=draw(speed))
    host_in, host_out = draw(speed), draw(speed)
    ports = [
        *device_ports(range(ranks), draw(speed), draw(speed)),
        *duplex_ports(
            "host",
            [(ranks, rank) for rank in range(ranks)],
            [(rank, ranks) for rank in range(ranks)],
            in_gb_per_s=host_in,
            out_gb_per_s=host_out,
            both_gb_per_s=(host_in * draw(st.floats(0.3, 1.0)), host_out * draw(st.floats(0.3, 1.0))),
        ),
    ]
    return problem, placement, dataclasses.replace(machine, ports=tuple(ports) if draw(st.booleans()) else ())


@settings(deadline=None, max_examples=60)
@given(cases(), st.booleans())
def test_the_best_is_the_least_of_all_and_never_below_the_bound_of_any_schedule(case, c_at_owner: bool) -> None:
    problem, placement, machine = case
    best = best_grid_bound(problem, placement, machine, c_at_owner=c_at_owner)
    every = [
        grid_bound(problem, placement, machine, grid=grid, devices=devices, c_at_owner=c_at_owner).seconds
        for count in range(1, machine.num_ranks + 1)
        for devices in itertools.combinations(range(machine.num_ranks), count)
        for grid in grids(count)
    ]
    assert best.seconds <= min(every) * (1 + 1e-8)
    assert best.seconds in every
    assert bound(problem, placement, machine).seconds <= best.seconds * (1 + 1e-8)
