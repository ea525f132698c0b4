"""From samples to a `Machine`. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from uncut_mpi.calibration.fitting import fit_gemm_shape, fit_idle_use, fit_row_shares
from uncut_mpi.calibration.peaks import peak_bandwidth, peak_ports
from uncut_mpi.calibration.ports import HostTotals, host_ports, pair_ports, star_ports
from uncut_mpi.calibration.samples import Link, ProductSample, Samples, TransferSample
from uncut_mpi.model.costs import HELD, GemmShape, IssueCosts, RowRates
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.evened import evened
from uncut_mpi.model.locations import host_index, num_ends
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import Port

ROW_WAYS = ("device", "host_in", "host_out", "local")
_TO_ITS_END = 0.7
"""Part of a product for which sums wait if it keeps its multiprocessors."""


def assemble(
    samples: Samples, *, name: str, key: str, memory_bytes: Sequence[int], models: Sequence[str], provenance: str
) -> Machine:
    """
    Return the machine that samples describe.

    Parameters
    ----------
    samples : Samples
        Every link alone and with few bytes, and the products of every type; what else is missing stays at the
        defaults of `Machine`.
    name, key, provenance : str
        As for `Machine`.
    memory_bytes : sequence of int
        Device memory of each rank.
    models : sequence of str
        Name of each rank's device. Those of one name have equal rates, unless these differ beyond their intervals.
    """
    bandwidth, latency = link_tables(samples)
    rates, shapes, _ = fit_products(samples)
    best = best_rates(samples)
    for dtype in rates:
        interval = _interval(samples, dtype)
        rates[dtype] = evened(rates[dtype], models, within=interval)
        best[dtype] = evened(best[dtype], models, np.max, within=interval)
    return Machine(
        name=name,
        key=key,
        bandwidth_gb_per_s=peak_bandwidth(bandwidth, samples.transfers),
        latency_s=latency,
        gemm_tflop_per_s={dtype: np.maximum(rate, best[dtype]) for dtype, rate in rates.items()},
        typical_gemm_tflop_per_s=rates,
        memory_bytes=np.array(memory_bytes, np.int64),
        ports=peak_ports(fit_ports(samples, bandwidth, latency), samples.transfers),
        gemm_shape=shapes,
        multiprocessors=np.array(samples.multiprocessors, np.int64),
        row_rates=fit_rows(samples, latency),
        combine_gb_per_s=np.array(samples.combine_gb_per_s, np.float64),
        half_combine_gb_per_s=np.array(samples.half_combine_gb_per_s, np.float64),
        costs=IssueCosts(**samples.costs),
        serial_copies=samples.serial_copies,
        idle_watts=np.array(samples.watts.get("idle", ()), np.float64),
        active_watts=np.array(samples.watts.get("active", ()), np.float64),
        busy_watts=np.array(samples.watts.get("busy", ()), np.float64),
        provenance=provenance + ("" if samples.steady else "; the machine was busy, and its figures are not steady"),
        steady=samples.steady,
        whole=samples.steady,
    )


def _interval(samples: Samples, dtype: str) -> float:
    """Return by what part of the larger two devices' rates may differ by chance; by any part on a busy machine."""
    times = [one.time for one in samples.products if one.dtype == dtype]
    width = float(np.median([one.half_width_s / one.mean_s for one in times]))
    return min(1.0, 2.0 * width) if samples.steady else 1.0


def link_tables(samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return bandwidth (GB/s) and latency (s) of every link by itself, both (num_ranks+1, num_ranks+1)."""
    size, host = num_ends(samples.num_ranks), host_index(samples.num_ranks)
    bandwidth, latency = np.zeros((size, size)), np.zeros((size, size))
    for one in samples.of_kind("small"):
        latency[one.links[0]] = one.seconds / one.counts[0]
    for one in samples.of_kind("alone"):
        bandwidth[one.links[0]] = one.nbytes[0] / _moving_s(one, latency) / 1e9
    bandwidth[host, host] = bandwidth.max()
    return bandwidth, latency


def fit_products(samples: Samples) -> tuple[dict[str, np.ndarray], dict[str, GemmShape], dict[str, float]]:
    """
    Return by type the rate to expect of every rank (TFLOP/s), the shape, and the error of the fit.

    The shape is that of rank 0; another rank's rate is lower by the median of its times over rank 0's.
    """
    rates, shapes, errors = {}, {}, {}
    by_type: dict[str, list[ProductSample]] = {}
    for one in samples.products:
        by_type.setdefault(one.dtype, []).append(one)
    for dtype, all_products in by_type.items():
        products = [one for one in all_products if one.product.aligned and one.product.lanes == 1]
        seconds = np.array([one.seconds for one in products])
        extents = [one.product.shape for one in products]
        c_bytes = DType[dtype].accumulator.itemsize
        extra = [float(c_bytes * math.prod(one.product.shape[:2]) * one.product.adds) for one in products]
        of_rank_0 = seconds[:, 0].tolist()
        shape, rate, errors[dtype] = fit_gemm_shape(extents, of_rank_0, samples.multiprocessors[0], extra)
        misaligned = [one for one in all_products if not one.product.aligned]
        longer = [_misaligned(shape, one, samples.multiprocessors[0], rate) for one in misaligned]
        shapes[dtype] = dataclasses.replace(
            shape,
            misaligned=max(0.0, float(np.median(longer))) if longer else shape.misaligned,
            idle_use=_idle_use(shape, all_products, samples),
            copy_share=_copy_share(samples.within.get(dtype)),
            sum_wait=_sum_wait(shape, samples.sums.get(dtype), samples.multiprocessors[0], rate),
            sustained=max(1.0, samples.at_length.get(dtype, 1.0)),
        )
        rates[dtype] = rate / np.median(seconds / seconds[:, :1], axis=0)
    return rates, shapes, errors


def _misaligned(shape: GemmShape, one: ProductSample, multiprocessors: int, tflop_per_s: float) -> float:
    """Return what the arithmetic of a product whose columns are not aligned took longer on rank 0, of its time."""
    extents = one.product.shape
    expected = shape.seconds(*extents, multiprocessors, tflop_per_s * 1e12)
    twice = dataclasses.replace(shape, misaligned=1.0)
    arithmetic = twice.seconds(*extents, multiprocessors, tflop_per_s * 1e12, aligned=False) - expected
    return (one.seconds[0] - expected) / arithmetic


def _idle_use(shape: GemmShape, products: Sequence[ProductSample], samples: Samples) -> float:
    """Return `GemmShape.idle_use` of rank 0, of products timed alone and two at a time."""
    alone = {one.product.shape: one.seconds[0] for one in products if one.product.is_plain}
    idle, gained = [], []
    for one in products:
        extents = one.product.shape
        if one.product.lanes == 2 and extents in alone:
            idle.append(1.0 - shape.work(*extents, samples.multiprocessors[0])[1])
            gained.append(1.0 - one.seconds[0] / alone[extents])
    return fit_idle_use(idle, gained) if idle and max(idle) > 0 else GemmShape().idle_use


def _copy_share(within: Mapping[str, float] | None) -> float:
    """Return `GemmShape.copy_share`: what products took longer beside copies within the device, of the copies' time."""
    if within is None:
        return GemmShape().copy_share
    return min(1.0, max(0.0, (within["together"] - within["products"]) / within["copies"]))


def _sum_wait(shape: GemmShape, sums: Mapping[str, float] | None, multiprocessors: int, tflop_per_s: float) -> float:
    """Return `GemmShape.sum_wait`; of a product that sums waited for to its end, `HELD`."""
    if sums is None:
        return GemmShape().sum_wait
    if sums["waits"] > _TO_ITS_END * sums["product"]:
        return HELD
    block_s = shape.native().block_s(int(sums["k"]), multiprocessors, tflop_per_s * 1e12)
    return max(0.0, sums["waits"] / sums["count"] / block_s)


def best_rates(samples: Samples) -> dict[str, np.ndarray]:
    """
    Return by type the best rate of any product on each rank (TFLOP/s).

    The shortest time is that of all ranks together, from the first one's start to the last one's end.
    """
    best: dict[str, np.ndarray] = {}
    for one in samples.products:
        rate = 2e-12 * math.prod(one.product.shape) / np.minimum(one.seconds, one.time.min_s)
        best[one.dtype] = np.maximum(best.get(one.dtype, 0.0), rate)
    return best


def fit_rows(samples: Samples, latency_s: np.ndarray) -> RowRates:
    """Return what narrow rows leave of a copy's rate; a way that was not measured costs nothing."""
    host = host_index(samples.num_ranks)
    found: dict[str, list[tuple[int, float]]] = {way: [] for way in ROW_WAYS}
    for one in samples.of_kind("rows"):
        source, destination = one.links[0]
        between = "local" if source == destination else "device"
        way = "host_in" if source == host else "host_out" if destination == host else between
        found[way].append((one.width_bytes, _moving_s(one, latency_s) / one.nbytes[0]))
    fits = {way: fit_row_shares(*zip(*rows, strict=True)) for way, rows in found.items() if len(rows) > 1}
    return RowRates(**fits)


def fit_ports(samples: Samples, bandwidth: np.ndarray, latency_s: np.ndarray) -> tuple[Port, ...]:
    """Return what transfers share; what was too unsteady to tell counts as nothing shared."""
    host = host_index(samples.num_ranks)
    stars = [*samples.of_kind("egress", telling=True), *samples.of_kind("ingress", telling=True)]
    ports = [*star_ports(bandwidth, stars), *host_ports(bandwidth, host_totals(samples), host)]
    # Both ways of a pair of devices are a pair of links as any other.
    return (*ports, *pair_ports(bandwidth, slowdowns(samples, bandwidth, latency_s), ports, host))


def host_totals(samples: Samples) -> list[HostTotals]:
    """Return what sets of ranks get together from and to the host."""
    host = host_index(samples.num_ranks)
    ways: dict[tuple[int, ...], dict[str, tuple[float, float]]] = {}
    for one in samples.of_kind("host", telling=True):
        pairs = list(zip(one.links, one.rates_gb_per_s, strict=True))
        inward = sum(rate for link, rate in pairs if link[0] == host)
        outward = sum(rate for link, rate in pairs if link[1] == host)
        ranks = tuple(sorted({end for link in one.links for end in link if end != host}))
        way = "both" if inward and outward else "in" if inward else "out"
        ways.setdefault(ranks, {})[way] = (inward, outward)
    return [
        HostTotals(ranks, found["in"][0], found["out"][1], found["both"])
        for ranks, found in ways.items()
        if len(found) == 3
    ]


def slowdowns(samples: Samples, bandwidth: np.ndarray, latency_s: np.ndarray) -> dict[tuple[Link, Link], float]:
    """Return the time of two transfers at once over the longer of their times alone."""
    found = {}
    for one in samples.of_kind("both ways", "pair", telling=True):
        alone = [
            nbytes / (float(bandwidth[link]) * 1e9) + count * float(latency_s[link])
            for nbytes, count, link in zip(one.nbytes, one.counts, one.links, strict=True)
        ]
        found[one.links[0], one.links[1]] = one.seconds / max(alone)
    return found


def _moving_s(one: TransferSample, latency_s: np.ndarray) -> float:
    """Return the time less what the copies' latencies take, of which no more than half is believed."""
    return max(one.seconds - one.counts[0] * float(latency_s[one.links[0]]), 0.5 * one.seconds)
