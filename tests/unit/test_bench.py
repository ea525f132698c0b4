"""The bench command without ranks: its arguments, its problems, its summary, its picture."""

from __future__ import annotations

import dataclasses
import math

import pytest

from uncut_mpi.bench.arguments import STEPS, BenchArguments, ablation_options, cases_of, options_of, parse_bench
from uncut_mpi.bench.datasets import Case, layouts, paralia, uncut_irregular
from uncut_mpi.bench.measure import Entry, combined
from uncut_mpi.bench.rates import draw_rates
from uncut_mpi.bench.summary import (
    BEST,
    Totals,
    best_of,
    speedup,
    summary_text,
    totals,
)
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import Blocking, ScheduleOptions


def test_the_defaults_are_the_papers_method() -> None:
    given = parse_bench([])
    assert (given.warmup, given.repeat, given.dataset, given.check) == (10, 100, "uncut-regular", True)
    assert (given.methods, given.dtypes, given.compute) == (("auto", "uncut", "one"), (DType.f64,), None)


def test_every_flag_reaches_its_field() -> None:
    words = (
        "--dataset paralia --only square,devices --sample 7 --scale 0.5 --dtypes f32,bf16 --seed 3 "
        "--methods kblocks,parsec:64+3,one --compute 1,2 "
        "--backend cuda --devices 0,1 --allow-shared-gpu --warmup 0 --repeat 4 --rounds 2 --time-cap 0.5 --no-check "
        "--time-limit 90 --ranks-per-node 2 "
        "--device-memory 4GiB --tune-products --output o.jsonl --plot p.png"
    )
    assert parse_bench(words.split()) == BenchArguments(
        dataset="paralia", only=("square", "devices"), sample=7, scale=0.5,
        dtypes=(DType.f32, DType.bf16), seed=3, methods=("kblocks", "parsec:64+3", "one"),
        compute=(1, 2), backend="cuda", devices=(0, 1), allow_shared_gpu=True, ranks_per_node=2,
        warmup=0, repeat=4, rounds=2,
        time_cap_s=0.5, time_limit_s=90.0,
        device_memory=4 << 30,
        tune_products=True, check=False, output="o.jsonl", plot="p.png",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset other", "'other' does not exist: use one of uncut-regular, uncut-irregular, paralia"),
        (
            "--methods auto,magma",
            "'magma' does not exist: use one of auto, tuned, uncut, kblocks, cyclic, bands, parsec, cubes, one",
        ),
        ("--methods auto,auto", "names something twice"),
        ("--methods uncut:0", "'0' is not a whole number of at least 1"),
        ("--methods kblocks:64", "'kblocks:64' does not exist"),
        ("--methods cyclic:fast", "'fast' does not exist: use one of comm-opt, time, pdp, edp"),
        ("--methods kblocks+1", r"'kblocks\+1' does not exist"),
        ("--methods parsec+x", "'x' is not a whole number"),
        ("--compute 1,0", "'0' is not a whole number of at least 1"),
        ("--dtypes f64,f8", "'f8' does not exist"),
        ("--scale 0", "is not above 0"),
        ("--sample 0", "at least 1"),
        ("--rounds 0", "at least 1"),
        ("--only square,cubes", "'cubes' does not exist: use one of square, fat-thin, thin-fat, host, one-device"),
        ("--only host,host", "names something twice"),
        ("--only devices", "--only devices: the dataset uncut-regular has no such problem; ask for"),
        ("--plot rates.pdf", "does not end in .png"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        parse_bench(words.split())


def test_methods_are_schedules() -> None:
    assert options_of("auto", None) == ScheduleOptions()
    assert options_of("one", (2,)) == ScheduleOptions(devices=(2,))
    assert options_of("uncut:640", None) == ScheduleOptions(scheduler="uncut", tile=640)
    assert options_of("cyclic:64", None) == ScheduleOptions(scheduler="cyclic", tile=64)
    assert options_of("cyclic:1d-cyclic", None) == ScheduleOptions(scheduler="cyclic:1d-cyclic")
    assert options_of("parsec:64", None) == ScheduleOptions(scheduler="parsec", tile=64)
    ahead = ScheduleOptions(scheduler="parsec", tile=64, blocking=Blocking(slots=3))
    assert options_of("parsec:64+2", None) == ahead
    assert options_of("parsec+2", None) == dataclasses.replace(ahead, tile=0)
    assert options_of("bands:640", (1, 0)) == ScheduleOptions(scheduler="bands", tile=640, devices=(1, 0))
    assert options_of("kblocks", (0, 1)) == ScheduleOptions(scheduler="kblocks", devices=(0, 1))
    assert [*(options_of(step, None) for step in STEPS), options_of("uncut", None)] == ablation_options()


def test_bands_get_an_a_that_is_stored_transposed() -> None:
    stored = {name: Entry(Case(32, 48, 16, "h,h,h"), DType.f64, name, 2) for name in ("auto", "bands", "bands:16")}
    assert [one.problem.trans_a for one in stored.values()] == ["N", "T", "T"]
    assert [one.gemm_arguments(0, 2).trans_a for one in stored.values()] == ["N", "T", "T"]


WORK = Entry(Case(1000, 500, 100, "h,h,h"), DType.f64, "auto", 2)


def facts(samples_s: list[float], **other: object) -> dict:
    found = {"samples_s": samples_s, "joules": 2.0, "passed": True, "error": 1e-16, "tolerance": 1e-14, "how": "a"}
    return {**found, **other}


def test_rounds_are_one_result_of_all_their_samples() -> None:
    found = combined(WORK, [facts([1.0, 5.0]), facts([2.0], joules=None, how="b"), facts([], joules=3.0)])
    assert (found["median_s"], found["min_s"], found["max_s"], found["samples_s"]) == (2.0, 1.0, 5.0, [1.0, 5.0, 2.0])
    assert (found["joules"], found["how"]) == (3.0, "a")
    assert combined(WORK, [facts([1.0], joules=2.0), facts([1.0], joules=None)])["joules"] is None
    assert found["tflop_per_s"] == pytest.approx(5e-5, rel=1e-12)  # 2 x 1000 x 500 x 100 / 2 s


def test_the_worst_verdict_of_all_rounds_counts() -> None:
    worse = facts([1.0], error=3e-15)
    assert combined(WORK, [facts([1.0]), worse, facts([1.0])])["error"] == 3e-15
    wrong = facts([1.0], passed=False, error=2e-14, tolerance=1e-14)
    found = combined(WORK, [facts([1.0]), wrong, facts([1.0], error=1e-14, tolerance=1.0)])
    assert (found["passed"], found["error"], found["tolerance"]) == (False, 2e-14, 1e-14)
    unchecked = facts([1.0], passed=None, error=None, tolerance=None)
    assert combined(WORK, [unchecked, unchecked])["passed"] is None


def test_a_round_that_failed_stands_for_all() -> None:
    assert combined(WORK, [facts([1.0]), {"reason": "no memory"}]) == {"median_s": None, "reason": "no memory"}


def test_all_problems_of_a_dataset_are_those_of_the_paper() -> None:
    assert cases_of(parse_bench(["--dataset", "uncut-irregular"]), 8, 1.0) == uncut_irregular()


def test_a_subset_is_named_by_shapes_and_places() -> None:
    def chosen(only: str, *words: str) -> list[Case]:
        return cases_of(parse_bench(["--dataset", "paralia", "--only", only, *words]), 8, 1.0)

    thin = [case for case in paralia() if case.k > max(case.m, case.n)]
    assert chosen("thin-fat") == thin
    assert len(thin) == 210
    on_one = chosen("one-device,host")
    assert len(on_one) == 126
    assert {case.placement for case in on_one} == {"h,h,h", "0,0,0"}
    assert chosen("thin-fat,host") == [case for case in thin if case.placement == "h,h,h"]
    assert chosen("thin-fat,host", "--sample", "3") == chosen("thin-fat,host")[::7]


def test_dealt_matrices_fit_any_number_of_ranks() -> None:
    cases = cases_of(parse_bench(["--dataset", "layouts"]), 6, 1.0)
    assert cases == layouts()
    assert {case.dealt for case in cases} == {"slabs", "blocks", "cyclic", "uneven", "orders"}
    for case in cases:
        for ranks in (1, 2, 3, 4, 6, 8):
            problem = GemmProblem(*case[:3], DType.f32)
            bound = Places.parse(case.places(ranks)).bind(problem, ranks)
            for matrix in MATRICES:
                parts = bound.parts(matrix, problem.shape_of(matrix), problem.shape_of(matrix)[0])
                assert sum(math.prod(part.shape) for part in parts) == math.prod(problem.shape_of(matrix))
                owners = {part.location.rank for part in parts}
                assert len(owners) == ranks or "cyclic" in case.placement  # of which there may be few blocks
    case = Case(100, 60, 80, "uneven-rows,cyclic:32:16@C,blocks@host")
    wanted = "rows(16,34,50),block_cyclic(32,16;1,3)@C,blocks(100;20,20,20)@host"
    assert (case.places(3), case.dealt, case.data) == (wanted, "orders", "mixed")
    assert Case(8, 8, 8, "0,h,1").places(2) == "0,h,1"


def test_how_matrices_are_dealt_names_a_subset() -> None:
    def chosen(only: str) -> set[str]:
        return {case.placement for case in cases_of(parse_bench(["--dataset", "layouts", "--only", only]), 2, 1.0)}

    assert chosen("blocks") == {"blocks,blocks,blocks"}
    assert chosen("uneven,orders,square") == {
        *("uneven-rows,uneven-rows,uneven-rows", "rows@C,cols,rows", "cols@C,rows,cols", "rows,rows@C,rows"),
    }
    assert chosen("mixed") == {"rows,rows@host,rows"}
    both = cases_of(parse_bench(["--dataset", "layouts", "--only", "8192,4096x4096x65536,blocks"]), 2, 1.0)
    assert [case[:3] for case in both] == [(8192,) * 3, (4096, 4096, 65536)]
    for word in ("8192x8192", "x", "8192x"):
        with pytest.raises(ParamError, match="does not exist: use one of square"):
            parse_bench(["--dataset", "layouts", "--only", word])
    with pytest.raises(ParamError, match="--only whole: the dataset layouts has no such problem"):
        parse_bench(["--dataset", "layouts", "--only", "whole"])


def row(m: int, k: int, place: str, method: str, median_s: float | None, compute: int = 4, **other: object) -> dict:
    facts = {
        "m": m, "n": m, "k": k, "dtype": "f64", "place": place, "method": method, "compute": compute,
        "median_s": median_s, "tflop_per_s": 2e-12 * m * m * k / median_s if median_s else None, "joules": None,
        "passed": True, "error": 1e-16, "tolerance": 1e-13, "limited_by": "compute", "reason": "",
    }  # fmt: skip
    return {**facts, **other}


ROWS = [
    row(1000, 1000, "h,h,h", "auto", 1.0, limited_by="host to devices", joules=100.0),
    row(1000, 1000, "h,h,h", "uncut", 2.0, limited_by="host to devices"),
    row(1000, 1000, "h,h,h", "one", 4.0, compute=1),
    row(1000, 100, "0,0,0", "auto", 0.5, joules=10.0),
    row(1000, 100, "0,0,0", "uncut", 0.4),
    row(1000, 9000, "0,1,2", "auto", 3.0),
    row(1000, 9000, "0,1,2", "uncut", None, reason="rank 0 needs more"),
    row(1000, 1000, "0,h,2", "auto", 1.0, compute=2, passed=False),
]


def test_speedups_are_those_of_problems_that_both_have_done() -> None:
    found = speedup(ROWS, "auto", "uncut", 4)
    assert found is not None
    assert (found.problems, found.slower) == (2, 1)
    assert (found.mean, found.least, found.most) == pytest.approx((math.sqrt(1.6), 0.8, 2.0))
    assert (found.energy, found.edp) == (None, None)


def test_numbers_of_ranks_are_not_compared_with_each_other() -> None:
    rows = [
        *(row(64, 64, "0,0,0", "auto", seconds, compute) for seconds, compute in ((8.0, 1), (2.0, 4))),
        row(64, 64, "0,0,0", "uncut", 9.0, compute=1),
        row(64, 64, "0,0,0", "uncut", None, compute=4),
    ]
    assert speedup(rows, "auto", "uncut", 4) is None
    found = speedup(rows, "auto", "uncut", 1)
    assert found is not None
    assert (found.problems, found.mean) == (1, 9 / 8)
    text = summary_text(rows, ["auto", "uncut"])
    assert "auto against uncut, on 1 rank:" in text
    assert "on 4 ranks: time of" not in text


def test_other_libraries_are_compared_with_together_too() -> None:
    rows = [
        *(row(1000, k, "h,h,h", "auto", 2.0) for k in (100, 1000)),
        *(row(1000, k, "h,h,h", "jax", seconds) for k, seconds in ((100, 1.0), (1000, 9.0))),
        *(row(1000, k, "h,h,h", "cublas", seconds, compute=1) for k, seconds in ((100, 3.0), (1000, 5.0))),
        row(1000, 1000, "h,h,h", "torch", 1.5, compute=2),
    ]
    best = best_of(rows, ["jax", "cublas", "torch"], 4)
    assert [(one["k"], one["median_s"], one["method"], one["compute"]) for one in best] == [
        (100, 1.0, BEST, 4),
        (1000, 5.0, BEST, 4),
    ]
    text = summary_text(rows, ["auto", "jax", "cublas", "torch"])
    head = text.index("auto against the best other library, on 4 ranks")
    assert text[head:].splitlines()[2].split() == ["all", "2", "1.118", "0.500", "2.500", "1"]
    assert "the best other library" not in summary_text(rows, ["auto", "jax", "uncut"])
    assert "the best other library" not in summary_text(rows, ["jax", "torch"])


def test_every_problem_is_shown_beside_its_floor() -> None:
    slabs, blocks = "rows,rows,rows", "blocks,blocks,blocks"
    rows = [
        *(row(1000, 1000, slabs, name, s, 2) for name, s in (("auto", 1.5e-3), ("floor", 1e-3))),
        row(1000, 1000, slabs, "dtensor", 3e-3, 2, how="cols of C"),
        row(1000, 1000, blocks, "auto", 1.2e-3, 2, passed=False),
        row(1000, 1000, blocks, "floor", 1.1e-3, 2, passed=None),
        row(1000, 1000, blocks, "dtensor", 4.4e-3, 2, how="moved to cols of C"),
        row(1000, 1000, blocks, "cublasmp", None, 2, reason="nvmath-python is not installed"),
        row(1000, 1000, blocks, "scipy", 1.0, 1),
    ]
    text = summary_text(rows, ["auto", "dtensor", "cublasmp", "scipy", "floor"])
    found = [line.split() for line in text.splitlines()[:5]]
    assert found == [
        ["f64", "1000×1000×1000,", "2", "ranks", "floor,", "ms", "auto", "dtensor", "cublasmp", "scipy"],
        [slabs, "1", "1.5", "(1.50)", "3", "(3.00)", "-", "-"],
        [blocks, "1.1", "1.2", "(1.09)!", "4.4", "(4.00)*", "-", "1000", "(909.09)"],
        ["best", "1.2", "(1.09)!", "3", "(3.00)", "-", "1000", "(909.09)"],
        [],
    ]
    assert "8 results, 1 of them wrong, 0 not verified, 1 left out" in text
    assert "cublasmp on 2 ranks: nvmath-python is not installed" in text
    assert "floor / of auto" not in text
    assert "against the best other library, on 2 ranks" in text
    assert "In brackets" not in summary_text(rows, ["auto", "dtensor"])


def test_rates_are_sums_over_sums() -> None:
    both = 2e-12 * (1000**3 + 1000**2 * 100)
    assert totals(ROWS, "uncut", 4) == Totals(2, pytest.approx(both / 2.4), 0.0, 0.0, 4)
    assert totals(ROWS, "kblocks", 4) == Totals(0, 0.0, 0.0, 0.0, 4)
    # Energies are known of two problems of three.
    found = totals(ROWS, "auto", 4)
    assert (found.problems, found.gflop_per_j) == (3, pytest.approx(1e3 * both / 110))
    assert found.edp_i == pytest.approx(both / 110 * both / 1.5)  # (TFLOP/s)² / W


def test_the_summary_says_everything_once() -> None:
    text = summary_text(ROWS, ["auto", "uncut", "one"])
    lines = text.splitlines()
    assert "auto against uncut, on 4 ranks: time of uncut / of auto" in lines
    assert any(line.split() == ["all", "2", "1.265", "0.800", "2.000", "1"] for line in lines)
    assert any(line.startswith("data: one-device") and "0.800" in line for line in lines)
    assert any(line.startswith("place: 0,0,0") and "0.800" in line for line in lines)
    assert any(line.startswith("place: h,h,h") and "2.000" in line for line in lines)
    assert any(line.startswith("limit: transfers") and "2.000" in line for line in lines)
    assert any(line.startswith("size: small") and "0.800" in line for line in lines)
    assert any(line.startswith("size: large") and "2.000" in line for line in lines)
    assert "8 results, 1 of them wrong, 0 not verified, 1 left out" in lines
    assert "  wrong: f64 1000×1000×1000 at 0,h,2, auto on 2 ranks, error 1e-16 above 1e-13" in lines
    assert "  left out: f64 1000×1000×9000 at 0,1,2, uncut on 4 ranks: rank 0 needs more" in lines


def test_the_picture_is_a_png() -> None:
    pytest.importorskip("matplotlib")
    assert draw_rates(ROWS, ["auto", "uncut", "one"]).startswith(b"\x89PNG")
    assert draw_rates([], ["auto"]).startswith(b"\x89PNG")
