"""
What is measured, in which order: links, products, issuing, power. Collective.

Transfers are sized to take `Effort.target_s` alone, so that those at once last equally long.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from uncut_mpi.calibration import power, probes
from uncut_mpi.calibration.assemble import link_tables
from uncut_mpi.calibration.effort import Effort
from uncut_mpi.calibration.issuing import Issuing
from uncut_mpi.calibration.litmus import run_litmus
from uncut_mpi.calibration.probes import SMALL_BYTES, GemmProbe, Transfers
from uncut_mpi.calibration.samples import Link, ProductSample, Samples, TransferSample, link_text
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.calibration.workbench import Timed, Workbench
from uncut_mpi.device.interface import Backend, DeviceIdentity
from uncut_mpi.model.dtypes import PROBED, DType
from uncut_mpi.model.locations import host_index
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.spmd.group import Group

Progress = Callable[[int, int, str], None]
"""Told how many probes are done, of how many, and what comes next."""

_SMALL_COPIES: Final = 64
_MAX_COPIES: Final = 128
_MAX_PRODUCTS: Final = 32
_HELD_S: Final = 5e-4
"""How long products are held back until all are issued, at about 10 us each."""
_MOST_SUMS: Final = 64
_TELLING: Final = 0.2
"""Where products take a smaller part of a hold, it is timed again, since its error is theirs."""
_PANEL_WIDTH: Final = 32768
"""Bytes of the rows of copies within a device: those of a panel of 4096 elements of k in f64."""

_LOAD: Final = 4.0
"""Times as long as copies take at full rate that products run beside them."""
_SUMS: Final = 4
_FEW: Final = 5
_AT_ONCE_S: Final = 0.02
_REST_S: Final = 0.3
_LONG_S: Final = 0.7
"""How long products go on until their clocks have sunk; a device that has rested for a shorter time has its clocks."""
_TURNS: Final = 15
"""Runs of products alone and of those beside copies, in turns: clocks change by more than what copies take of them."""


def measure_all(
    group: Group,
    backend: Backend,
    identities: Sequence[DeviceIdentity],
    effort: Effort,
    *,
    time_limit_s: float,
    progress: Progress,
) -> Samples:
    """
    Measure everything that a `Machine` holds. Collective.

    Parameters
    ----------
    group, backend, identities
        Of the session.
    effort : Effort
        Sizes of the probes.
    time_limit_s : float
        Afterwards every probe still to come gets few samples, and pairs of links are left out.
    progress : callable
        Called on every rank.

    Raises
    ------
    UncutError
        On all ranks, what went wrong on one.
    """
    deadline_s = time.perf_counter() + time_limit_s
    samples = Samples(group.size, [one.multiprocessors for one in identities])
    samples.watts["idle"] = power.at_rest(group, backend)
    bench = Workbench(
        group, backend, area_bytes=effort.area_bytes, compute_bytes=effort.compute_bytes, deadline_s=deadline_s
    )
    try:
        _Measurement(bench, effort, samples, progress).all()
        bench.close()
    except BaseException:
        bench.abandon()
        raise
    return samples


class _Measurement:
    """One calibration under way."""

    def __init__(self, bench: Workbench, effort: Effort, samples: Samples, progress: Progress) -> None:
        self.bench, self.effort, self.samples, self._progress = bench, effort, samples, progress
        self.size, self.host = samples.num_ranks, host_index(samples.num_ranks)
        self._bandwidth = np.zeros(0)
        self._holds: dict[int, Timed] = {}
        self._done, self._total = 0, self._count()

    def all(self) -> None:
        """
        Take all samples, in the one order in which each step finds what it is sized by.

        Transfers are sized by the links alone. What runs beside products (`_rows`, `_within`) and `_power` take the
        times of `_products`, and `_at_length` that of `_beside_sums`. Pairs of links are last: they may be left out.
        """
        self._alone()
        self._bandwidth, self._latency = link_tables(self.samples)
        self._shared()
        self._products()
        self._rows()
        self._within()
        self._beside_sums()
        self._at_length()
        self._combine()
        Issuing(self.bench, self.samples, self._bandwidth, self._latency).measure(
            self._step("issue costs and latencies"), asynchronous=self.effort.asynchronous
        )
        if self.size > 1:
            self._step("litmus of flags and copies")
            self.samples.litmus = run_litmus(self.bench, self.effort.litmus_bytes)
        self._power()
        self._pairs()
        self._progress(self._total, self._total, "done")

    # -- links -------------------------------------------------------------------------------

    def links(self) -> list[Link]:
        """Return every link: between devices, within each, and from and to the host."""
        return [
            (source, destination)
            for source in range(self.size + 1)
            for destination in range(self.size + 1)
            if (source, destination) != (self.host, self.host)
        ]

    def together(self) -> Iterator[tuple[str, list[Link]]]:
        """Yield (kind, links) of the transfers at once, pairs of links apart."""
        ranks = range(self.size)
        for pair in itertools.combinations(ranks, 2):
            yield "both ways", [pair, pair[::-1]]
        if self.size > 2:
            for rank in ranks:
                others = [other for other in ranks if other != rank]
                yield "egress", [(rank, other) for other in others]
                yield "ingress", [(other, rank) for other in others]
        sets: set[tuple[int, ...]] = {(rank,) for rank in ranks} | set(itertools.combinations(ranks, 2))
        sets |= {tuple(range(count)) for count in range(3, self.size + 1)}
        for chosen in sorted(sets, key=lambda one: (len(one), one)):
            inward, outward = [(self.host, rank) for rank in chosen], [(rank, self.host) for rank in chosen]
            for links in (inward, outward, inward + outward):
                yield "host", links

    def pairs(self) -> list[tuple[Link, Link]]:
        """Return the pairs of links that no other measurement has put together."""
        links = [link for link in self.links() if link[0] != link[1]]
        known = {frozenset(links) for _, links in self.together()}
        return [pair for pair in itertools.combinations(links, 2) if frozenset(pair) not in known]

    def _count(self) -> int:
        links, together = len(self.links()), sum(1 for _ in self.together())
        rows = sum(1 + len(self._widths(link)) for link in self._row_links())
        products = len(PROBED) * (len(self.effort.products) + 3 * self.effort.asynchronous)
        return 2 * links + together + rows + products + 3 + self.size + len(self.pairs())

    def _step(self, what: str) -> str:
        self._progress(self._done, self._total, what)
        self._done += 1
        return what

    def _alone(self) -> None:
        for link in self.links():
            small = Transfers(link, _SMALL_COPIES, SMALL_BYTES)
            self._transfers("small", [small])
            whole = Transfers(link, 1, self.effort.area_bytes)
            pilot = self.bench.time(probes.transfers(self.bench.areas, [whole]), self._name([link]), samples=1)
            self._transfers("alone", [self._sized(link, self.effort.area_bytes / pilot.together.min_s)])

    def _shared(self) -> None:
        for kind, links in self.together():
            self._transfers(kind, [self._sized(link, self._rate(link)) for link in links])

    def _pairs(self) -> None:
        pairs = self.pairs()
        for number, pair in enumerate(pairs):
            if self.bench.late:
                self.samples.left_out.append(f"{len(pairs) - number} of {len(pairs)} pairs of links")
                return
            self._transfers("pair", [self._sized(link, self._rate(link)) for link in pair])

    def _row_links(self) -> list[Link]:
        """Return one link of each way that rows go."""
        return [(0, 0), *([(0, 1)] if self.size > 1 else []), (self.host, 0), (0, self.host)]

    def _widths(self, link: Link) -> list[int]:
        more = () if self.host in link else self.effort.device_widths_bytes
        return sorted((*self.effort.widths_bytes, *more))

    def _rows(self) -> None:
        """
        Measure copies by the width of their rows, those from and to the host while the device multiplies.

        On a GPU that works at its power limit they are slower by a third than on an idle one: what handles rows
        has the processors' clock.
        """
        self.bench.fill(DType.f64)
        for link in self._row_links():
            for width in (0, *self._widths(link)):
                load = None
                if self.effort.asynchronous and self.host in link:
                    enough = _LOAD * self.effort.target_s
                    load = self._load(enough, enough)
                self._transfers("rows", [self._in_rows(link, width)], load)

    def _in_rows(self, link: Link, width: int) -> Transfers:
        """Return copies in rows of a width, or contiguous ones, that take about the target time."""
        each = self.effort.area_bytes
        if width:
            each = each // probes.row_distance(width) * width
        count = min(_MAX_COPIES, max(1, round(self.effort.target_s * self._rate(link) / each)))
        return Transfers(link, count, each, width)

    def _load(self, each_s: float, all_s: float, dtype: DType = DType.f64) -> probes.Load:
        """Return products of about a time each that last for a time or longer."""
        shape, seconds = self._product_of(each_s, dtype)
        return GemmProbe(shape), dtype, max(1, math.ceil(all_s / seconds))

    def _rate(self, link: Link) -> float:
        return float(self._bandwidth[link]) * 1e9

    def _sized(self, link: Link, bytes_per_s: float) -> Transfers:
        """Return transfers on a link that take the target time at a rate."""
        nbytes = max(SMALL_BYTES, self.effort.target_s * bytes_per_s)
        count = min(_MAX_COPIES, max(1, math.ceil(nbytes / self.effort.area_bytes)))
        each = min(self.effort.area_bytes, int(nbytes / count) // SMALL_BYTES * SMALL_BYTES)
        return Transfers(link, count, max(SMALL_BYTES, each))

    def _transfers(self, kind: str, at_once: Sequence[Transfers], load: probes.Load | None = None) -> None:
        """Time transfers at once; with a load, while the devices multiply for longer."""
        links = tuple(one.link for one in at_once)
        what = self._step(f"{kind}: {self._name(links)}")
        probe, timed = probes.transfers(self.bench.areas, at_once, load), None if load is None else Kind.COPY
        time = self.bench.time(probe, what, kind=timed).together
        self.samples.transfers.append(
            TransferSample(
                kind,
                links,
                tuple(one.count for one in at_once),
                tuple(one.count * one.nbytes for one in at_once),
                at_once[0].width_bytes,
                time,
            )
        )

    def _name(self, links: Sequence[Link]) -> str:
        return ", ".join(link_text(link, self.host) for link in links)

    # -- products ----------------------------------------------------------------------------

    def _products(self) -> None:
        for dtype in PROBED:
            self.bench.fill(dtype)
            for product in self.effort.products:
                what = self._step(f"{dtype.name} product of {product}")
                pilot = self.bench.time(self._product(product, dtype, 1), what, samples=1)
                count = min(_MAX_PRODUCTS, max(1, math.ceil(self.effort.target_s / pilot.together.min_s)))
                count = -(-count // product.lanes) * product.lanes
                timed = self._held if self.effort.asynchronous else self._unheld
                seconds, time = timed(product, dtype, count, what)
                self.samples.products.append(ProductSample(dtype.name, product, tuple(seconds.tolist()), time))

    def _held(self, product: GemmProbe, dtype: DType, count: int, what: str) -> tuple[np.ndarray, Summary]:
        """
        Return every rank's time of a product, and that of all of them, without what it takes to issue them.

        They are issued while something else holds their lanes, since one of few elements is over before the next is
        issued; what that takes by itself is subtracted.
        """
        alone = self._holds.get(product.lanes) or self._hold_alone(product.lanes, what)
        while True:
            held = self._product(product, dtype, count, self._hold)
            timed = self.bench.time(held, what, known_s=alone.together.mean_s)
            if float((timed.by_rank_s - alone.by_rank_s).min()) < _TELLING * alone.together.median_s:
                alone = self._hold_alone(product.lanes, what)  # it may have been slow, or be faster by now
            fits = float(timed.issue_s.max()) <= float(alone.by_rank_s.min())
            if fits or count <= product.lanes:
                break
            count = max(product.lanes, count // 2 // product.lanes * product.lanes)
        seconds = timed.by_rank_s - alone.by_rank_s
        if float(seconds.min()) <= 0.0 or timed.together.min_s <= alone.together.min_s:
            return self._unheld(product, dtype, count, what)
        return seconds / count, _scaled(_difference(timed.together, alone.together), 1.0 / count)

    def _unheld(self, product: GemmProbe, dtype: DType, count: int, what: str) -> tuple[np.ndarray, Summary]:
        timed = self.bench.time(self._product(product, dtype, count), what)
        return timed.by_rank_s / count, _scaled(timed.together, 1.0 / count)

    @functools.cached_property
    def _hold(self) -> probes.Hold:
        rows, cols = self.effort.combine
        few, many = (
            self.bench.time(self._combines(rows, cols, count), "COMBINE").together.median_s for count in (1, 9)
        )
        return probes.Hold(rows, cols, min(_MOST_SUMS, max(1, math.ceil(_HELD_S / max((many - few) / 8, 1e-7)))))

    def _hold_alone(self, lanes: int, what: str) -> Timed:
        """Return what the hold takes on so many lanes, from now on."""
        probe = self._product(GemmProbe((1, 1, 1), lanes=lanes), DType.f64, 0, self._hold)
        self._holds[lanes] = self.bench.time(probe, what)
        return self._holds[lanes]

    def _product(self, product: GemmProbe, dtype: DType, count: int, hold: probes.Hold | None = None) -> probes.Probe:
        return probes.products(self.bench.areas, product, dtype, count, hold)

    def _combine(self) -> None:
        what, count = self._step("COMBINE"), 8
        rows, cols = self.effort.combine
        found = []
        for dtype in (DType.f64, DType.f16):
            self.bench.fill(dtype)
            timed = self.bench.time(self._combines(rows, cols, count, dtype), what)
            each = 2 * dtype.itemsize + dtype.accumulator.itemsize  # C and C' are read, C is written
            found.append((each * rows * cols * count / timed.by_rank_s / 1e9).tolist())
        self.samples.combine_gb_per_s, self.samples.half_combine_gb_per_s = found

    def _combines(self, rows: int, cols: int, count: int, dtype: DType = DType.f64) -> probes.Probe:
        return probes.combines(self.bench.areas, rows, cols, dtype, count)

    def _within(self) -> None:
        """
        Time copies within rank 0's device beside products, where issuing is no part of the time.

        The products last longer than the copies, so that no copy is left at their end.
        """
        if not self.effort.asynchronous:
            return
        at_once = [self._in_rows((0, 0), _PANEL_WIDTH)]
        copies = self.bench.time(probes.transfers(self.bench.areas, at_once), "copies within a device")
        for dtype in PROBED:
            what = self._step(f"{dtype.name} products beside copies within the device")
            self.bench.fill(dtype)
            load = self._load(self.effort.target_s, _LOAD * float(copies.by_rank_s[0]), dtype)
            both = self._product(*load), probes.transfers(self.bench.areas, at_once, load)
            products, together = self.bench.time_in_turns(both, what, samples=_TURNS)
            timed = {"products": products, "copies": copies, "together": together}
            self.samples.within[dtype.name] = {name: float(case.by_rank_s[0]) for name, case in timed.items()}

    def _beside_sums(self) -> None:
        """Time sums beside a long product on rank 0's device, which wait for multiprocessors, and what is alone."""
        areas, (rows, cols) = self.bench.areas, self.effort.combine
        for dtype in PROBED if self.effort.asynchronous else ():
            what = self._step(f"sums beside a {dtype.name} product")
            self.bench.fill(dtype)
            both = (probes.sums(areas, rows, cols, _SUMS, one, dtype) for one in (None, self._largest))
            alone, beside = (
                self.bench.time(one, what, samples=_FEW, kind=Kind.COMBINE).together.median_s for one in both
            )
            product = self.bench.time(self._product(self._largest, dtype, 1), what, samples=_FEW)
            self.samples.sums[dtype.name] = {
                "waits": beside - alone,
                "count": float(_SUMS),
                "product": float(product.by_rank_s[0]),
                "k": float(self._largest.shape[2]),
            }

    def _at_length(self) -> None:
        """Time products on all devices after a rest, and after they have gone on for a while."""
        for dtype in PROBED if self.effort.asynchronous else ():
            what = self._step(f"{dtype.name} products at length")
            self.bench.fill(dtype)
            count = max(1, round(_AT_ONCE_S / self.samples.sums[dtype.name]["product"]))
            runs = self.bench.run_often(self._product(self._largest, dtype, count), what, _REST_S, _LONG_S)
            self.samples.at_length[dtype.name] = float(np.median(np.median(runs[-len(runs) // 4 :], axis=0) / runs[0]))

    @functools.cached_property
    def _largest(self) -> GemmProbe:
        return GemmProbe(max(self.effort.shapes, key=math.prod))

    # -- power -------------------------------------------------------------------------------

    def _power(self) -> None:
        bench, watts = self.bench, self.samples.watts
        what = self._step("power under load")
        if not power.is_known(bench.group, bench.backend):
            watts["busy"] = watts["active"] = [0.0] * self.size
            return
        watts["busy"] = power.under_load(bench, self._product(self._largest, DType.f64, 4), what)
        shape, seconds = self._product_of(self.effort.target_s)
        probe = self._product(GemmProbe(shape), DType.f64, 1)
        watts["active"] = power.between_runs(bench, probe, seconds, what, idle=watts["idle"], busy=watts["busy"])

    def _product_of(self, seconds: float, dtype: DType = DType.f64) -> tuple[tuple[int, int, int], float]:
        """Return the measured product of a type that takes nearest to a time on all devices: its shape and time."""
        products = [
            (one.product.shape, max(one.seconds))
            for one in self.samples.products
            if one.dtype == dtype.name and one.product.is_plain
        ]
        return min(products, key=lambda pair: (abs(math.log(pair[1] / seconds)), pair[1]))


def _scaled(summary: Summary, factor: float) -> Summary:
    fields = {name: value * factor for name, value in dataclasses.asdict(summary).items() if name != "count"}
    return Summary(**fields, count=summary.count)


def _difference(whole: Summary, part: Summary) -> Summary:
    """Return what is left of some times without a part that was timed by itself."""
    mean, median, least, most = (
        getattr(whole, name) - getattr(part, name) for name in ("mean_s", "median_s", "min_s", "max_s")
    )
    # Independent errors of a difference add up as squares do.
    half_width = math.hypot(whole.half_width_s, part.half_width_s)
    return Summary(mean, max(median, least), least, max(most, median, least), half_width, whole.count)
