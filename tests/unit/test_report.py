"""The report: every fact is in the text and in the JSON, with its unit and its verdict."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.command.check import CheckResult
from uncut_mpi.command.nonfinite import NonFinite
from uncut_mpi.command.product import Timing
from uncut_mpi.command.report import (
    Asked,
    Circumstances,
    Facts,
    text,
    to_json,
)
from uncut_mpi.model.bounds import Bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.units import bytes_text, time_text
from uncut_mpi.view.explain import Explanation

ABOUT = Circumstances(
    version="1.2.3",
    command_line="python -m uncut_mpi.gemm -m 1000",
    date="2026-01-02T03:04:05+00:00",
    hosts=("node7",),
    devices=("Model X", "Model X", "Model Y"),
    cores=6,
    mpi="MPICH 5.0.2",
    versions={
        "python": "3.12.1",
        "numpy": "2.1.0",
        "mpi4py": "4.1.2",
        "blas": "cuBLAS 13.1.0",
        "cupy": "14.0.1",
        "cuda": "13.1",
        "driver": "580.95.05 (CUDA 13.0)",
    },
    ranks=3,
    nodes=1,
    backend="cuda",
    backend_reason="every rank has a GPU",
    machine="measured",
)
ASKED = Asked(1000, 2000, 3000, DType.f64, "T", "N", 1.5, 0.25, "h,0,2", "time")
PLAN = PlanSummary(
    scheduler="uncut",
    digest="0123456789abcdef0123456789abcdef",
    softbuf_bytes=[3 * 10**9, 4 * 10**9],
    device_memory=5 * 10**9,
    grid=(3, 1),
    splits=1,
    tile=512,
    how="grid 3x1, tile 512",
    tasks=77,
    bytes_by_link={"host_to_device": 48_000_000, "device_to_host": 0, "device_to_device": 1500, "local": 12},
    plan_s=0.0123,
    predicted_s=0.0005,
)
TIMING = Timing(0.3, 1.25, 1.5, [0.0025, 0.0009, 0.001, 0.00095, 0.0011])
BOUND = Bound(0.0004, "compute", "2·1000·2000·3000 operations / 30 TFLOP/s", {}, "by measured rates")
CHECK = CheckResult(True, 1e-15, 2e-13, True, 3e-16, "all 2000000 elements against a float64 product")
FACTS = Facts(ABOUT, ASKED, PLAN, TIMING, BOUND, CHECK)
OF = {"about": ABOUT, "asked": ASKED, "summary": PLAN, "timing": TIMING, "bound": BOUND, "check": CHECK}


def with_(**changes):
    """Return the facts with changes of their own, or of one of their parts."""
    for name, part in {"": FACTS, **OF}.items():
        names = part._fields if isinstance(part, Asked) else [field.name for field in dataclasses.fields(part)]
        if {*names} >= {*changes}:
            made = part._replace(**changes) if isinstance(part, Asked) else dataclasses.replace(part, **changes)
            return dataclasses.replace(FACTS, **{name: made}) if name else made
    raise AssertionError(changes)


KEYS = (
    "m n k dtype trans_a trans_b alpha beta place backend ranks nodes scheduler grid tile tasks plan_s first_call_s "
    "median_s min_s max_s tflop_per_s bound_s predicted_s bytes error tolerance passed device version "
    "rms_error relative samples_s digest memory splits how tried chunks metric machine trace "
    "bound_formula command_line date backend_reason cores mpi python numpy mpi4py blas cupy cuda driver staged "
    "explanation warning nonfinite_inputs check_detail"
)


def test_figures_of_the_check_that_are_absolute_are_said_to_be():
    facts = with_(error=5e-324, tolerance=2e-320, relative=False)
    assert "check       error 4.94e-324, tolerance 2e-320 (absolute)" in text(facts).splitlines()
    assert json.loads(to_json(facts))["relative"] is False
    assert json.loads(to_json(FACTS))["relative"] is True
    assert json.loads(to_json(with_(chunks=3)))["chunks"] == 3
    assert json.loads(to_json(with_(check=None)))["relative"] is None


def test_the_text_says_what_was_run_on_what_and_how_it_went():
    lines = text(FACTS).splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert lines[: len(header)] == header
    assert lines[len(header) :] == [
        "problem     C := 1.5 Aᵀ B + 0.25 C, m×n×k = 1000×2000×3000, f64, A, B, C at h,0,2",
        "plan        uncut, grid 3x1, tile 512, 77 tasks, 48.00 MB host to device, 1.500 kB device to device, "
        "12 B within a memory moved, planned in 12.30 ms, digest 0123456789abcdef",
        "memory      3.000 GB | 4.000 GB of each device, of 5.000 GB allowed",
        "first call  1.500 s",
        "calls       median 1.000 ms, min 900.0 µs, max 2.500 ms of 5 (slowest rank)",
        "rate        12 TFLOP/s (2mnk / median)",
        "predicted   500.0 µs (by arrival times and compute), 50.0% of the median",
        "bound       400.0 µs (2·1000·2000·3000 operations / 30 TFLOP/s), 40.0% of the median",
        "check       error 1e-15, tolerance 2e-13 of the largest value; RMS 3e-16 of the RMS of C",
        "            all 2000000 elements against a float64 product",
        "PASS",
    ]
    assert header == [
        "# version   uncut_mpi 1.2.3",
        "# command   python -m uncut_mpi.gemm -m 1000",
        "# date      2026-01-02T03:04:05+00:00",
        "# host      node7",
        "# devices   2 × Model X, 1 × Model Y",
        "# MPI       MPICH 5.0.2; 3 ranks on 1 node",
        "# backend   cuda: every rank has a GPU",
        "# software  Python 3.12.1, numpy 2.1.0, cuBLAS 13.1.0, cupy 14.0.1, CUDA 13.1, driver 580.95.05 (CUDA 13.0)",
        "# machine   measured",
    ]


def test_ranks_of_the_host_backend_are_not_called_devices():
    host = dataclasses.replace(ABOUT, backend="host", devices=("EPYC",) * 3, cores=1)
    assert host.device == "host backend, 3 ranks on 1 node, EPYC, 1 core"
    on_two = dataclasses.replace(FACTS, about=dataclasses.replace(ABOUT, nodes=2, hosts=("a", "b")))
    assert [json.loads(to_json(facts))["nodes"] for facts in (FACTS, on_two)] == [1, 2]
    lines = text(on_two).splitlines()
    assert "# hosts     a, b" in lines
    assert "# MPI       MPICH 5.0.2; 3 ranks on 2 nodes" in lines
    assert f"# devices   {host.device}\n" in text(dataclasses.replace(FACTS, about=host))


def test_inputs_that_are_not_finite_are_named_in_the_text_and_in_the_json():
    found = NonFinite("B", "B.npy", 2, 1, (4, 5))
    facts = with_(nonfinite=(found,))
    line = "input       B.npy (B) holds 2 NaN and 1 infinite elements, the first at row 4, column 5 (from 0); "
    assert any(one.startswith(line) for one in text(facts).splitlines())
    assert json.loads(to_json(facts))["nonfinite_inputs"] == [
        {"matrix": "B", "path": "B.npy", "nan": 2, "infinite": 1, "first": [4, 5]}
    ]


def test_matrices_that_are_staged_are_named_with_the_reason():
    facts = with_(staged=["A: no room", "C: too far"])
    lines = text(facts).splitlines()
    assert [line for line in lines if "staged" in line] == ["staged      A: no room", "staged      C: too far"]
    assert json.loads(to_json(facts))["staged"] == ["A: no room", "C: too far"]


@pytest.mark.parametrize(("passed", "word"), [(True, "PASS"), (False, "FAIL"), (None, "UNCHECKED")])
def test_the_last_line_is_the_verdict(passed, word):
    facts = with_(check=None) if passed is None else with_(passed=passed)
    assert text(facts).endswith(f"\n{word}\n")


def test_without_beta_no_c_is_added():
    problem = text(with_(beta=0.0))
    assert "C := 1.5 Aᵀ B, m×n×k" in problem


def test_a_product_of_nothing_is_reported():
    of_nothing = {"asked": ASKED._replace(k=0), "summary": dataclasses.replace(PLAN, bytes_by_link={})}
    empty = with_(**of_nothing, bound=dataclasses.replace(BOUND, seconds=0.0), timing=Timing(0.0, 0.0, 0.0, [0.0]))
    assert "no bytes moved" in text(empty)
    assert "rate        0 TFLOP/s" in text(empty)


def test_memory_is_said_by_rank_and_of_many_as_a_range():
    of_files = with_(host_bytes=[2000, 2000], host_memory=3000)
    assert "memory      2.000 kB of host memory for copies, of 3.000 kB allowed" in text(of_files)
    assert json.loads(to_json(of_files))["memory"] == {
        "softbuf_bytes": [3 * 10**9, 4 * 10**9],
        "device_memory": 5 * 10**9,
        "host_bytes": [2000, 2000],
        "host_memory": 3000,
    }
    many = with_(softbuf_bytes=[*range(1000, 10_000, 1000)])
    assert "memory      1.000 kB to 9.000 kB of each device, of 5.000 GB allowed" in text(many)


def test_one_product_says_what_it_took_and_claims_no_measurement():
    once = with_(samples_s=[])
    lines = [line for line in text(once).splitlines() if not line.startswith("#")]
    assert lines[2:] == [
        "memory      3.000 GB | 4.000 GB of each device, of 5.000 GB allowed",
        "took        1.500 s: planned and reserved in 300.0 ms, multiplied in 1.250 s (slowest rank; one call, "
        "--repeat N measures)",
        *text(FACTS).splitlines()[-3:],
    ]
    value = json.loads(to_json(once))
    assert list(value) == KEYS.split()
    assert (value["first_call_s"], value["samples_s"], value["predicted_s"]) == (1.5, [], 0.0005)
    assert [value[name] for name in ("median_s", "min_s", "max_s", "tflop_per_s")] == [None] * 4


def test_why_nothing_was_checked_is_said():
    nothing = dataclasses.replace(with_(check=None), asked=ASKED._replace(m=0))
    said = "nothing to check: C is 0×2000 and has no elements"
    assert f"check       {said}\nUNCHECKED\n" in text(nothing)
    assert json.loads(to_json(nothing))["check_detail"] == said
    assert "check       none\nUNCHECKED\n" in text(with_(check=None))


def test_what_a_search_minimised_is_said_if_it_is_not_the_time():
    assert "for the least" not in text(FACTS)
    facts = dataclasses.replace(with_(scheduler="auto (uncut)"), asked=ASKED._replace(metric="edp"))
    assert "auto (uncut) for the least edp, " in text(facts)
    assert json.loads(to_json(facts))["metric"] == "edp"


def test_the_json_has_exactly_the_documented_keys():
    value = json.loads(to_json(FACTS))
    assert list(value) == KEYS.split()
    assert value["tflop_per_s"] == pytest.approx(12.0)
    assert value["grid"] == "3x1"
    assert (value["machine"], value["trace"]) == (ABOUT.machine, None)
    assert json.loads(to_json(with_(trace="as was")))["trace"] == "as was"
    assert value["bytes"]["host_to_device"] == 48_000_000
    assert (value["passed"], value["device"], value["version"]) == (True, "2 × Model X, 1 × Model Y", "1.2.3")
    assert (value["median_s"], value["predicted_s"], value["bound_s"]) == (0.001, 0.0005, 0.0004)


def test_the_json_stays_json_where_the_result_is_not_finite():
    failed = with_(error=math.inf, tolerance=math.nan, passed=False)
    value = json.loads(to_json(failed), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (value["error"], value["tolerance"], value["passed"]) == (None, None, False)


def test_an_unchecked_run_says_so_in_json():
    value = json.loads(to_json(with_(check=None)))
    assert (value["error"], value["tolerance"], value["passed"]) == (None, None, None)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 µs"),
        (2.5e-6, "2.500 µs"),
        (0.000999, "999.0 µs"),
        (0.001, "1.000 ms"),
        (0.25, "250.0 ms"),
        (0.99996, "1.000 s"),
        (12.3456, "12.35 s"),
        (98765.0, "98765 s"),
    ],
)
def test_times_have_four_digits_and_a_unit(seconds, expected):
    assert time_text(seconds) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.500 kB"),
        (999_960, "1.000 MB"),
        (2_147_483_648, "2.147 GB"),
        (3 * 10**12, "3.000 TB"),
    ],
)
def test_bytes_are_given_in_powers_of_1000(size, expected):
    assert bytes_text(size) == expected


def test_a_trace_has_its_line_and_none_has_none():
    traced = text(with_(trace="t.json: predicted 1 ms"))
    assert re.search(r"^trace +t\.json: predicted 1 ms$", traced, re.MULTILINE)
    assert "trace" not in text(FACTS)


def test_what_a_plan_does_is_said_before_what_it_took_with_a_warning_of_a_place():
    moved = {"A": {}, "B": {"host_to_device": 2 * 10**9, "device_to_device": 10**6}, "C": {}}
    explanation = Explanation(moved=moved, reduced_over=2, busiest="link host->1", busy_share=0.93, seconds=1e-3)
    facts = with_(explanation=explanation, warning="B at h costs 60 % of the time")
    lines = text(facts).splitlines()
    at = lines.index(
        "in short    A and C stay in place; B moves 2.000 GB from the host and 1.000 MB between devices; "
        "k is reduced over 2 ranks"
    )
    assert lines[at + 1] == "            limited by link host->1, expected to be busy for 93 % of the time"
    assert lines[at + 2] == "warning     B at h costs 60 % of the time"
    assert lines[at + 3].startswith("first call")
    value = json.loads(to_json(facts))
    assert value["explanation"]["moved"] == moved
    assert value["warning"] == "B at h costs 60 % of the time"
    waiting = dataclasses.replace(explanation, busy_share=0.4)
    assert waiting.lines[1] == (
        "limited by the order of the work: nothing is expected to be busy longer than link host->1, for 40 % of the "
        "time"
    )


def test_a_bound_that_a_call_beats_is_none():
    beaten = with_(bound=Bound(2 * FACTS.min_s, "compute", "1 / 2", {"compute": 1.0}, "what nothing could beat"))
    (line,) = [one for one in text(beaten).splitlines() if one.startswith("bound")]
    assert "(1 / 2, beaten: its rates were measured too low)" in line
    (line,) = [one for one in text(FACTS).splitlines() if one.startswith("bound")]
    assert BOUND.words in line
