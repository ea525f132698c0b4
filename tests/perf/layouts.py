"""
Products of matrices in parts on devices, beside the compute floor of the run and what the plan expects.

    mpiexec -n 2 python3 -m mpi4py tests/perf/layouts.py OUT.json SECONDS "f64 8192 rows,rows,rows" ... [-- OPTIONS ...]

A problem is TYPE, SIZE (N or MxNxK) and how A, B and C are dealt: rows, cols, or board, as many blocks each way as
there are ranks, dealt so that each rank has one in every row and every column of blocks; or a rank that has all of it;
or a layout in words, as cyclic(64,64;1x2).
The floor is one product of every rank at once with its share of the operations, cuBLAS called directly. It takes turns
with the default schedule and those after ``--``, as in sweep.py, for a second or so: clocks sink with load, and dip
when it has lasted a second. Every result is checked: C x beside alpha A (B x) + beta C x with a random vector. When
SECONDS have passed no more problems begin.
"""

import json
import re
import statistics
import sys
import time

import cupy
import numpy as np
from floors import CUDA_TYPES, REPEAT, WARMUP, Floor, shares
from mpi4py import MPI
from sweep import options_of
from turns import in_turns

import uncut_mpi as um
from uncut_mpi.model.dtypes import DType

ALPHA, BETA = 1.2345, 0.1154
LONG_S, MOST_ROUNDS = 1.5, 200


def even(extent, count):
    """Return where equal parts begin, and the extent."""
    return [extent * part // count for part in range(count + 1)]


def rectangles(shape, kind, ranks):
    """Return (rank, rows, cols) of all parts."""
    if kind.isdigit():
        return [(int(kind), slice(0, shape[0]), slice(0, shape[1]))]
    down, along = {"rows": (ranks, 1), "cols": (1, ranks), "board": (ranks, ranks)}[kind]
    rows, cols = even(shape[0], down), even(shape[1], along)
    return [
        ((i + j) % ranks, slice(rows[i], rows[i + 1]), slice(cols[j], cols[j + 1]))
        for i in range(down)
        for j in range(along)
    ]


class Dealt:
    """A matrix in parts with random values of a pool."""

    def __init__(self, session, shape, kind, dtype, values):
        self.shape, self.dtype, self.parts = shape, dtype, []
        storage = np.uint16 if dtype in ("f16", "bf16") else DType[dtype].numpy
        pool = values[dtype].view(storage)
        layout = um.Layout.parse(kind) if "(" in kind else None
        if layout:
            mine = [tuple(map(np.asarray, layout.indices(shape, session.rank)))]
        else:
            parts = rectangles(shape, kind, session.size)
            mine = [(np.r_[rows], np.r_[cols]) for rank, rows, cols in parts if rank == session.rank]
        for rows, cols in mine:
            height, width = len(rows), len(cols)
            flat = cupy.empty(height * width, storage)
            for at in range(0, len(flat), len(pool)):
                flat[at : at + len(pool)] = pool[: len(flat) - at]
            flat = flat.view(np.float16) if dtype == "f16" else flat
            self.parts.append((flat.reshape((height, width), order="F"), rows, cols))
        if layout:
            self.matrix = session.distribute(as_typed(self.parts[0][0], dtype), layout, shape=shape)
            return
        given = [(as_typed(array, dtype), (int(rows[0]), int(cols[0]))) for array, rows, cols in self.parts]
        self.matrix = session.distribute_parts(given, shape=shape, dtype=dtype)

    def times(self, vector):
        """Return the product with a vector in float64, on all ranks."""
        out = np.zeros(self.shape[0])
        for array, rows, cols in self.parts:
            x = cupy.asarray(vector[cols])
            for first in range(0, array.shape[1], 1024):
                part = array[:, first : first + 1024]
                if self.dtype == "bf16":
                    part = (part.astype(np.uint32) << 16).view(np.float32)
                out[rows] += cupy.asnumpy(part.astype(np.float64) @ x[first : first + 1024])
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, out)
        return out


def as_typed(array, dtype):
    """Return an array that says that it is of bf16: cupy itself has no such type."""
    if dtype != "bf16":
        return array
    import ml_dtypes

    return array.view(ml_dtypes.bfloat16)


def timed(floor, works, seconds):
    """Return the slowest rank's seconds of each work, sample by sample; the first ones only warm up."""
    samples = [[] for _ in works]
    rounds = min(MOST_ROUNDS, max(REPEAT, round(LONG_S / seconds / len(works))))
    for at in in_turns(len(works), WARMUP + rounds):
        samples[at] += floor.slowest(works[at], 1)
    return [times[WARMUP:] for times in samples]


def measure(session, floor, values, text, variants):
    """Return what one problem took by each variant of options, its floor, and what was expected."""
    dtype, size, kinds = text.split()
    m, n, k = map(int, size.split("x")) if "x" in size else (int(size),) * 3
    kinds = re.split(r",(?![^(]*\))", kinds)
    share, _ = shares(m, n, k, session.size)
    a, b, c = (Dealt(session, s, kind, dtype, values) for s, kind in zip(((m, k), (k, n), (m, n)), kinds, strict=True))
    x = np.random.default_rng(5).random(n) - 0.5
    inner = a.times(b.times(x))
    unit = {"f64": 2**-53, "f32": 2**-24, "tf32": 2**-11, "f16": 2**-11, "bf16": 2**-8}[dtype]
    plans, cases = [], []
    for options in variants:
        started = time.perf_counter()
        plans.append(plan := session.plan(a.matrix, b.matrix, c.matrix, options=options_of(options)))
        plan_s = time.perf_counter() - started
        before = c.times(x)
        plan.execute(ALPHA, BETA)
        wanted = ALPHA * inner + BETA * before
        error = np.linalg.norm(c.times(x) - wanted) / np.linalg.norm(wanted)
        cases.append(
            {
                "problem": text,
                "options": options,
                "predicted_s": plan.summary.predicted_s,
                "plan_s": plan_s,
                "how": f"{plan.summary.scheduler} {plan.summary.how}",
                "bytes": plan.summary.bytes_by_link,
                "softbuf_bytes": max(plan.summary.softbuf_bytes),
                "error": error,
                # Sums of k terms in random order grow by the root of k; 16 is room for the norm of a vector.
                "good": bool(error < 16 * unit * max(1.0, k**0.5 if dtype in ("f64", "f32") else 1.0)),
            }
        )
    works = [floor.product(*share, dtype, values), *(lambda plan=plan: plan.execute(ALPHA, BETA) for plan in plans)]
    floors, *samples = timed(floor, works, cases[0]["predicted_s"])
    for case, plan, times in zip(cases, plans, samples, strict=True):
        case |= {"seconds": statistics.median(times), "spread_s": [min(times), max(times)], "samples": len(times)}
        case |= {"floor_s": statistics.median(floors), "floors_s": [min(floors), max(floors)]}
        plan.close()
    for one in (a, b, c):
        session.release(one.matrix)
    return cases


def main():
    """Measure every problem and print them beside each other."""
    out, limit, *texts = sys.argv[1:]
    texts, variants = (texts[: texts.index("--")], texts[texts.index("--") + 1 :]) if "--" in texts else (texts, [])
    began, cases = time.monotonic(), []
    with um.Session(MPI.COMM_WORLD, timeout_s=20) as session:
        cupy.cuda.Device(session.rank).use()
        random = np.random.default_rng(3)
        values = {name: (random.random(1 << 22) - 0.5).astype(DType[name].numpy) for name in CUDA_TYPES}
        values = {name: cupy.asarray(one.view(np.uint8)) for name, one in values.items()}
        floor = Floor(session)
        for text in texts:
            if session.gather_values(time.monotonic() - began)[0] > float(limit):
                break
            cases += (found := measure(session, floor, values, text, ("", *variants)))
            for case in found if session.rank == 0 else ():
                print(
                    f"{text:32} {1e3 * case['seconds']:8.2f} ms, floor {1e3 * case['floor_s']:8.2f} "
                    f"({case['floor_s'] / case['seconds']:.3f}), predicted {1e3 * case['predicted_s']:8.2f} "
                    f"({case['predicted_s'] / case['seconds'] - 1:+.1%}), plan {1e3 * case['plan_s']:.0f} ms, "
                    f"error {case['error']:.1e} {'' if case['good'] else 'WRONG '}| {case['options']} {case['how']}",
                    flush=True,
                )
        facts = {"device": session.device_names[0], "ranks": session.size, "cases": cases}
        if session.rank == 0:
            with open(out, "w") as file:
                json.dump(facts, file, indent=1)
            print(
                f"{len(cases)} of {len(texts) * (1 + len(variants))} problems, "
                f"{sum(not one['good'] for one in cases)} wrong",
                flush=True,
            )


if __name__ == "__main__":
    main()
