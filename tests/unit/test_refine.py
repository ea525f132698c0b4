"""The last step of a calibration: hidden numbers come back from simulated products, bounds stay where they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from uncut_mpi.calibration.refine import STEPS, Observation, adjusted, refine
from uncut_mpi.calibration.report import refinement_text
from uncut_mpi.command.rehearsal import options_for, pieces_of
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import simulate

NOTHING = {name: start for name, (start, *_) in STEPS.items()}


def observations(truth: Machine, machine: Machine, noise: float = 0.0) -> list[Observation]:
    """Products of a rehearsal, planned with one machine and timed on another."""
    rng = np.random.default_rng(2)
    found = []
    for piece in pieces_of("cuda", 4):
        problem = GemmProblem(piece.m, piece.n, piece.k, piece.dtype, "N", "N")
        for options in options_for(piece):
            schedule = plan(problem, Placement.parse(piece.placement), 4, machine, options).schedule
            found.append(Observation(schedule, simulate(schedule, truth).seconds * (1 + noise * rng.uniform(-1, 1))))
    return found


def probed() -> Machine:
    machine = load_machine("h200-4x")
    ports = tuple(dataclasses.replace(port, typical_gb_per_s=0.0) for port in machine.ports)
    return dataclasses.replace(machine, ports=ports)


def test_products_of_a_slower_machine_are_explained() -> None:
    # Rates and overheads explain each other; what they add up to comes back.
    machine = probed()
    hidden = {**NOTHING, "device latency": 12e-6, "host ports": 0.84, "call": 8e-5, "rate f64": 0.9, "rate f32": 0.96}
    result, found = refine(machine, observations(adjusted(machine, hidden), machine))
    assert found.median_error < 0.01
    assert found.worst_error < 0.05
    assert found.parameters["host ports"] == pytest.approx(0.84, abs=0.04)
    assert len(found.errors) == 2 * len(pieces_of("cuda", 4)) + 1
    rates = result.typical_gemm_tflop_per_s
    assert rates["bf16"] == pytest.approx(machine.typical_gemm_tflop_per_s["bf16"] * found.parameters["rate f16"])


def test_rates_are_those_of_traced_products() -> None:
    machine = probed()
    truth = adjusted(machine, {**NOTHING, "rate f64": 0.8, "rate f16": 0.9, "call": 8e-5})
    traced = []
    for one in observations(truth, machine):
        run = simulate(one.schedule, truth)
        traced.append(Observation(one.schedule, run.seconds, run.end_s - run.start_s))
    _, found = refine(machine, traced)
    assert found.parameters["rate f64"] == pytest.approx(0.8, rel=0.02)
    assert found.parameters["rate f16"] == pytest.approx(0.9, rel=0.03)
    assert found.parameters["rate f32"] == pytest.approx(1.0, rel=0.01)
    assert found.median_error < 0.01


def test_what_two_events_add_to_traced_products_is_no_overhead_of_theirs() -> None:
    machine = probed()
    truth = adjusted(machine, {**NOTHING, "rate f64": 0.9})
    traced = []
    for one in observations(truth, machine):
        run = simulate(one.schedule, truth)
        traced.append(Observation(one.schedule, run.seconds, run.end_s - run.start_s + 8e-6))
    _, found = refine(machine, traced)
    assert found.parameters["kernel overhead"] == pytest.approx(0.0, abs=1e-6)
    assert found.median_error < 0.01


def test_what_every_product_takes_besides_is_an_overhead() -> None:
    machine = probed()
    truth = adjusted(machine, {**NOTHING, "kernel overhead": 2e-5, "rate f64": 0.9})
    traced = []
    for one in observations(truth, machine):
        run = simulate(one.schedule, truth)
        traced.append(Observation(one.schedule, run.seconds, run.end_s - run.start_s))
    _, found = refine(machine, traced)
    assert found.parameters["kernel overhead"] == pytest.approx(2e-5, abs=4e-6)
    assert found.median_error < 0.01


def test_c_is_written_as_fast_by_a_slower_product() -> None:
    machine = probed()
    slower = adjusted(machine, {**NOTHING, "rate f16": 0.5})
    fast, slow = (one.gemm_shape["f16"] for one in (machine, slower))
    rates = [float(one.typical_gemm_tflop_per_s["f16"][0]) * 1e12 for one in (machine, slower)]
    # Twice the time for the arithmetic of a step of k, the same for what comes besides.
    short, deep = (
        [shape.seconds(4096, 4096, k, 132, rate) for shape, rate in zip((fast, slow), rates, strict=True)]
        for k in (1024, 2048)
    )
    assert deep[1] - short[1] == pytest.approx(2 * (deep[0] - short[0]))
    assert 2 * short[1] - deep[1] == pytest.approx(2 * short[0] - deep[0])


def test_noise_is_not_fitted_away_and_does_no_harm() -> None:
    machine = probed()
    hidden = {**NOTHING, "device latency": 12e-6, "host ports": 0.84}
    _, found = refine(machine, observations(adjusted(machine, hidden), machine, noise=0.05)[::2])
    assert found.median_error < 0.04


def test_what_is_possible_stays() -> None:
    machine = probed()
    worse = {**NOTHING, "host ports": 0.5, "device ports": 0.6, "rate f64": 0.7, "call": 1e-3}
    moved = adjusted(machine, worse)
    problem = GemmProblem(4096, 4096, 4096, next(iter(pieces_of("cuda", 4))).dtype, "N", "N")
    for place in ("h,h,h", "0,0,0"):
        assert bound(problem, Placement.parse(place), moved) == bound(problem, Placement.parse(place), machine)
        schedule = plan(problem, Placement.parse(place), 4, machine).schedule
        assert simulate(schedule, moved).seconds > simulate(schedule, machine).seconds + 1e-3
    assert Machine.from_json(moved.to_json()).to_json() == moved.to_json()


def test_a_port_expects_no_more_than_it_can() -> None:
    with pytest.raises(ValueError, match=r"it has to be 0 to 10"):
        Port("p", 10.0, ((0, 1),), (1.0,), 11.0)
    assert Port("p", 10.0, ((0, 1),), (1.0,)).expected_gb_per_s == 10.0
    assert Port("p", 10.0, ((0, 1),), (1.0,), 4.0).expected_gb_per_s == 4.0


def test_the_report_names_what_moved() -> None:
    machine = probed()
    _, found = refine(machine, observations(machine, machine)[:4])
    text = refinement_text(found)
    assert "rehearsal: 4 products" in text
    assert "host ports x 1.00" in text
    assert f"at worst ({found.worst_product}), with" in text
    assert "call + 0.0 us" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_a_rehearsal_fits_any_number_of_ranks(backend: str, ranks: int) -> None:
    for piece in pieces_of(backend, ranks):
        Placement.parse(piece.placement).check_ranks(ranks)
