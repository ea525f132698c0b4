"""The rehearsal of a calibration: whole products by each scheduler, with the machine that the probes describe."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.session import Session
from uncut_mpi.calibration.refine import Observation
from uncut_mpi.command.product import Source, placed, slowest, timed_call
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.options import Blocking, ScheduleOptions

_WARMUP: Final = 2
_WARM_S: Final = {"cuda": 0.4, "host": 0.0}
"""
Calls go on for so long before they are timed, at least twice: predictions are of products in loops.

At the power limit clocks sink meanwhile, which `GemmShape.sustained` tells apart from rates. On an H100 most of 40
shapes in f64 ran at 0.89 of the rate that nine calls had told, a few at 0.83; f32 ran as told
(``docs/performance.md``, 2026-11-27).
"""
_CALLS: Final = 7
_ALPHA, _BETA = 1.2345, 1.1154
_SCHEDULERS: Final = ("uncut", "kblocks")
_TINY: Final = 128
_POOL: Final = 1 << 20

# Edges of squares per type; thin products are made of the last two.
_EDGES: Final = {
    "cuda": {
        DType.f64: (2048, 4096, 6144, 8192),
        DType.f32: (4096, 8192),
        DType.f16: (4096, 8192),
        DType.tf32: (4096, 8192),
    },
    "host": {DType.f64: (256, 512, 768, 1024), DType.f32: (512, 1024), DType.f16: (256, 512)},
}


class RehearsedProduct(NamedTuple):
    """One product of the rehearsal: extents (elements), type, placement."""

    m: int
    n: int
    k: int
    dtype: DType
    placement: str


def products_of(backend: str, num_ranks: int) -> list[RehearsedProduct]:
    """Return the products of a rehearsal: squares, fat, thin and tiny ones, several placements."""
    one, two = min(1, num_ranks - 1), min(2, num_ranks - 1)
    usual, spread = ("h,h,h", "0,0,0"), (f"0,{one},{two}", "h,h,0")
    products = []
    for dtype, edges in _EDGES[backend].items():
        for edge in edges:
            placements = usual + (spread if dtype is DType.f64 and edge in edges[1::2] else ())
            products += [RehearsedProduct(edge, edge, edge, dtype, placement) for placement in placements]
    _, small, _, large = _EDGES[backend][DType.f64]
    # A tiny one is nothing but what a call costs.
    for m, k in ((large, large // 8), (small // 2, 2 * large), (large // 64, large // 64)):
        products += [RehearsedProduct(m, m, k, DType.f64, placement) for placement in usual]
    # What host memory can do shows where it has both ways to itself for long: bounds take the best that was seen.
    products.append(RehearsedProduct(2 * large, 2 * large, large // 8, DType.f64, "h,h,h"))
    return products


def rehearse(session: Session, progress: Callable[[int, int, str], None]) -> list[Observation]:
    """Measure the products; the same on every rank. Collective."""
    observations = []
    products = products_of(session.backend_name, session.size)
    pools = {dtype: _pool(dtype) for dtype in _EDGES[session.backend_name]}
    for done, product in enumerate(products):
        what = f"{product.dtype.name} {product.m}×{product.n}×{product.k} at {product.placement}"
        progress(done, len(products), what)
        place = Placement.parse(product.placement)
        shapes = ((product.m, product.k), (product.k, product.n), (product.m, product.n))
        a, b, c = (
            _operand(session, shape, location, product.dtype, pools[product.dtype])
            for shape, location in zip(shapes, place.whole(), strict=True)
        )
        for options in options_for(product):
            with session.plan(a, b, c, reads_c=True, options=options) as plan:
                warm = _calls(session, plan, _WARMUP)
                trace = plan.trace(_ALPHA, _BETA)  # before clocks sink: how far they do is known apart from rates
                _calls(session, plan, int(_WARM_S[session.backend_name] / warm[-1]))
                found = _calls(session, plan, _CALLS)
                task_s = trace.end_s - trace.start_s
                observations.append(Observation(plan.schedule, statistics.median(found), task_s, min(found)))
        for matrix in (a, b, c):
            session.release(matrix)
    progress(len(products), len(products), "done")
    return observations


def _calls(session: Session, plan: GemmPlan, count: int) -> list[float]:
    """Return what the slowest rank takes for each of so many calls. Collective."""
    return slowest(session, [timed_call(session, plan, _ALPHA, _BETA) for _ in range(count)])


def options_for(product: RehearsedProduct) -> list[ScheduleOptions]:
    """Return with which options a product is rehearsed."""
    # Rates come from traced products, and one that begins beside another takes longer than it does alone.
    alone = Blocking(lanes=1)
    several = [
        ScheduleOptions(scheduler=one, blocking=alone if one == "kblocks" else Blocking()) for one in _SCHEDULERS
    ]
    if max(product.m, product.n, product.k) > _TINY or product.placement != "0,0,0":
        return several
    # On one device nothing waits for another: what such a call takes is the call.
    return [*several, ScheduleOptions(scheduler="kblocks", devices=(0,), blocking=alone)]


def _pool(dtype: DType) -> np.ndarray:
    """Return random values with every bit of the mantissa in use."""
    return (np.random.default_rng(3).random(_POOL) - 0.5).astype(dtype.numpy)


def _operand(session: Session, shape: tuple[int, int], location: Location, dtype: DType, pool: np.ndarray) -> Matrix:
    """Return a matrix whose columns are some of the pool, in column-major order. Collective."""
    rows, columns = shape

    def fill(out: np.ndarray, _: slice, some: slice) -> None:
        for at, column in enumerate(range(*some.indices(columns))):
            start = column * 7919 % (_POOL - rows)
            out[:, at] = pool[start : start + rows]

    matrix, host = placed(session, Source(rows, columns, "F", fill), dtype, location)
    if host is not matrix:
        session.release(host)
    return matrix
