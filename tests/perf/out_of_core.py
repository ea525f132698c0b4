"""
Products that do not fit a budget of device memory, beside the same with all memory: ways to do it take turns.

    mpiexec -n 2 python3 -m mpi4py tests/perf/out_of_core.py OUT.json SECONDS "f64 32768 h,h,h 4GiB" \
        "f64 131072x131072x4096 h,h,h 16GiB =" ... [-- "scheduler=parsec" ...]

A problem is TYPE, SIZE (N or MxNxK), places and the budget of each rank; a fifth word ``=`` says that C is not read,
and ``!`` that the product with all memory is left out. The schedules after ``--``, ``name=value`` words, have the same
budget; ``cubes`` are those of section III-C1 of Uncut-GEMMs. Every result is checked. Of each schedule one call is
traced, too: how long each device computes nothing. When SECONDS have passed no more problems begin.
"""

import contextlib
import json
import statistics
import sys
import time

from common import in_turns, options_of, pool, say, source
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.bench.cubes import CubesPlan
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.flag_values import bytes_of
from uncut_mpi.command.product import (
    make_product,
    release_product,
    reset_result,
    slowest,
    timed_call,
    verify_product,
)
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import changed
from uncut_mpi.view.timeline import Timeline

ROUNDS, ROUNDS_S = 7, 12.0


def measure(session, text, variants):
    """Return what one problem took with each schedule."""
    dtype, size, place, budget, *marks = text.split()
    m, n, k = map(int, size.split("x")) if "x" in size else (int(size),) * 3
    reads_c = "=" not in marks
    arguments = parse(
        [*f"-m {m} -n {n} -k {k} --place {place} --dtype {dtype}".split(), *([] if reads_c else ["--beta", "0"])]
    )
    scalars = arguments.alpha, arguments.beta
    values = pool(DType[dtype])
    sources = source(m, k, values), source(k, n, values), source(m, n, values) if reads_c else None
    began = time.monotonic()
    product = make_product(session, arguments, (m, n, k), DType[dtype], sources, "F")
    say(session, f"{text}: matrices after {time.monotonic() - began:.0f} s")
    wanted = [] if "!" in marks else [("all memory", um.ScheduleOptions())]
    for words in ("", *variants):
        options = options_of("" if words == "cubes" else words)
        wanted.append((f"{budget} {words}".strip(), changed(options, device_memory=bytes_of(budget))))
    cases = []
    with contextlib.ExitStack() as plans:
        for name, options in wanted:
            start = time.perf_counter()
            try:
                of_three = product.a, product.b, product.c
                if name.endswith("cubes"):
                    problem = GemmProblem(m, n, k, DType[dtype], reads_c=reads_c)
                    placement = arguments.place.bind(problem, session.size)
                    plan = CubesPlan(session, of_three, problem, placement, "N", options)
                else:
                    plan = session.plan(*of_three, reads_c=reads_c, options=options)
                plans.enter_context(plan)
            except um.UncutError as error:
                say(session, f"{text} {name}: {error}")
                continue
            plan_s = time.perf_counter() - start
            reset_result(session, product)
            timed_call(session, plan, *scalars)
            check = verify_product(session, product, arguments)
            about = plan.summary
            cases.append(
                {
                    "problem": text, "way": name, "how": f"{about.scheduler} {about.how}", "tasks": about.tasks,
                    "plan_s": plan_s, "predicted_s": about.predicted_s, "bytes": about.bytes_by_link,
                    "softbuf_bytes": about.softbuf_bytes, "error": check.error, "tolerance": check.tolerance,
                    "passed": check.passed, "plan": plan, "samples_s": [],
                }
            )  # fmt: skip
        expected = sum(case["predicted_s"] for case in cases)
        for at in in_turns(len(cases), max(2, min(ROUNDS, int(ROUNDS_S / expected)))):
            cases[at]["samples_s"] += slowest(session, [timed_call(session, cases[at]["plan"], *scalars)])
        for case in cases:
            plan = case.pop("plan")
            if isinstance(plan, CubesPlan):
                case |= {"traced_s": None, "idle_share": []}
            else:
                traced = plan.trace(arguments.alpha, arguments.beta)
                run = Timeline.of(plan.schedule, traced.start_s, traced.end_s, "measured")
                case |= {"traced_s": run.seconds, "idle_share": run.idle_share.tolist()}
            case["median_s"] = statistics.median(case["samples_s"])
            say(session, line(case))
    release_product(session, product)
    return cases


def line(case):
    """Return what is printed of one schedule."""
    median, links = case["median_s"], {name: round(nbytes / 1e9, 1) for name, nbytes in case["bytes"].items()}
    return (
        f"{case['problem']:30} {case['way']:24} {1e3 * median:8.1f} ms "
        f"[{1e3 * min(case['samples_s']):.1f}, {1e3 * max(case['samples_s']):.1f}] "
        f"predicted {1e3 * case['predicted_s']:8.1f} ({case['predicted_s'] / median - 1:+.1%}) "
        f"idle {' '.join(f'{one:.0%}' for one in case['idle_share'])} {'' if case['passed'] else 'WRONG '}"
        f"{max(case['softbuf_bytes']) >> 20} MiB, plan {case['plan_s']:.1f} s, GB {links} | {case['how']}"
    )


def main():
    """Measure every problem and print its schedules beside each other."""
    out, limit, *texts = sys.argv[1:]
    texts, variants = (texts[: texts.index("--")], texts[texts.index("--") + 1 :]) if "--" in texts else (texts, [])
    began, cases, missing = time.monotonic(), [], []
    with um.Session(MPI.COMM_WORLD, timeout_s=300) as session:
        for text in texts:
            if max(session.gather_values(time.monotonic() - began)) > float(limit):
                missing.append(text)
                continue
            cases += measure(session, text, variants)
            if session.rank == 0:
                facts = {"devices": session.device_names, "date": time.strftime("%Y-%m-%d"), "cases": cases}
                with open(out, "w", encoding="utf-8") as file:
                    json.dump(facts, file, indent=1)
        say(session, f"{sum(not one['passed'] for one in cases)} of {len(cases)} wrong; missing: {missing or 'none'}")


if __name__ == "__main__":
    main()
