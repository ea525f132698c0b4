"""
What a search varies: each dimension yields changes of a candidate's options, in a fixed order.

What the caller fixed stays fixed. A dimension knows what was tried so far, and leaves out what cannot help.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from uncut_mpi.model.grid_bounds import grids
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import HALVINGS, count_blocks, forms_sums
from uncut_mpi.planning.buffers import room_for_panels
from uncut_mpi.planning.candidates import Candidate, speeds_of
from uncut_mpi.planning.decomposition import candidate_tiles, fitting_tile
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.options import (
    BEGINS,
    BLOCK_ORDERS,
    COMBINES,
    DELIVERIES,
    DISTRIBUTIONS,
    MOST_PRODUCT_LANES,
    ORDERS_BY_K,
    ScheduleOptions,
    changed,
)
from uncut_mpi.planning.partition import columns_of_ranks as sizes_of_columns
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.shares import arrange, fit_shares
from uncut_mpi.planning.stationary import stationary_grids
from uncut_mpi.planning.ways import ways_of

_TILES: Final = 6
_ALL_COUNTS: Final = 12
"""On up to so many ranks every number of them is tried; of more, eighths of them and halves of an eighth."""

_MOST_SIDE: Final = 64
"""
Ranks in a row or column of the grids of tiles that are tried: a fetch looks at its ranks in pairs. Above, the most
square grid alone is.
"""

_BLOCKS: Final = (1, 2, 3, 4, 8)
"""Numbers of column blocks and of row blocks."""

_MOST_BLOCKS: Final = 64
_LEAST_EDGE: Final = 128
"""More than a few equal blocks have at least so many columns: products of 64 take a third longer than expected."""

_MULTIPLES: Final = (1, 64, 256)
_K_BLOCKS: Final = (1024, 2048, 4096)
_LONG_FIRST_BLOCK: Final = 2048
_LONG_K_BLOCK: Final = 8192
_LONG_TAIL: Final = 8
_TAILS: Final = (4, _LONG_TAIL, 16)
_LONG: Final = 4
"""k is long if it is so many times the larger of m and n: from the host longer blocks and shorter ends are tried."""

_GROWTHS: Final = (2, 3, 4)
_FIRST_BLOCKS: Final = (128, 256, 512, 1024)
_FIRST_BLOCK_OF_HALVES: Final = 2048
_MOST_IN_COLUMNS: Final = 64
"""Ranks that are dealt to columns of ranks, which takes the cube of their number; of more, what is uneven evens out."""

_MOST_ARRANGEMENTS: Final = 24
"""Ways to place the owners of matrices of which all are tried; of more, those that move one of them."""

_FAR_BEHIND: Final = 1.1
"""A grid whose best takes so many times as long is not tried with other blocks."""

_SPLIT_BEHIND: Final = 1.5
"""Parts of k that are expected to take so many times as long as no parts are not tried."""

DIMENSIONS: Final = {
    "uncut": ("when_c", "orders", "process_grids", "tiles", "shares", "ranks", "rough", "shares"),
    "kblocks": (
        "begins",
        "places_of_sums",
        "block_orders",
        "column_blocks",
        "largest_blocks",
        "splits",
        "places_and_lanes",
        "row_blocks",
        "tails",
        "sums_away",
        "deliveries",
        "shares",
        "columns_of_ranks",
        "first_blocks",
        "growths",
        "arrangements",
        "fewer_ranks",
        "shares",
    ),
    "cyclic": ("edges", "distributions"),
    "bands": ("edges",),
}
"""What is varied, in this order: first what costs few tasks for what it brings."""

REFINEMENTS: Final = (
    "begins",
    "arrangements",
    "shares",
    "block_orders",
    "places_of_sums",
    "column_blocks",
    "row_blocks",
    "product_lanes",
    "sums_away",
    "largest_blocks",
    "first_blocks",
    "growths",
    "tails",
    "columns_of_ranks",
    "deliveries",
    "shares",
)
"""What is varied of the best on other numbers of ranks and other grids."""

_SHARE_STEPS: Final = 3
_SHARE_TOLERANCE: Final = 0.05


class Tried(Protocol):
    """What dimensions ask of a search."""

    tried: list[Candidate]

    def found(self, options: ScheduleOptions) -> Candidate | None:
        """Return the candidate of some options, None if there is none."""

    def bound_s(self, options: ScheduleOptions) -> float:
        """Return what no schedule on the ranks of some options can beat (s)."""


class Dimensions:
    """
    The dimensions of one search.

    Parameters
    ----------
    problem, placement, num_ranks, machine
        As for `uncut_mpi.planning.search.search`.
    tried : Tried
        The search.
    """

    def __init__(
        self, problem: GemmProblem, placement: Placement, num_ranks: int, machine: Machine, tried: Tried
    ) -> None:
        self._problem, self._placement, self._num_ranks, self._machine = problem, placement, num_ranks, machine
        self._tried = tried
        self._speeds: dict[Candidate, np.ndarray | None] = {}
        self._placed: dict[tuple[tuple[int, ...], tuple[int, int] | None], dict[str, Any]] = {}

    # -- dimensions: what to change about the best so far ------------------------------------

    def ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many ranks compute, those of most use first."""
        if asked.devices is not None or _is_cut(asked):
            return
        for count in self.counts:
            yield {"tile": asked.tile, "grid": None, **self.placed(tuple(sorted(self._order_of_ranks[:count])), None)}

    def process_grids(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """All grids of those ranks, none of them very long."""
        if _is_cut(asked):
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        square = ProcessGrid.most_square(len(ranks))
        for rows in range(1, len(ranks) + 1):
            grid = (rows, len(ranks) // rows)
            if len(ranks) % rows == 0 and max(grid) <= max(_MOST_SIDE, square.cols):
                changes = {"devices": ranks} if asked.devices is not None else self.placed(tuple(sorted(ranks)), grid)
                yield {"tile": asked.tile, "row_shares": None, "col_shares": None, **changes, "grid": grid}

    def rough(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Every rank fetches for itself, or batched fetches in two chunks or as many as are asked for."""
        if asked.batch and asked.caching:
            yield from ({"batch": False}, {"batch": True, "chunks": asked.chunks or 2})

    def fine(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Batched fetches in more chunks, unless a number is asked for."""
        if best.options.batch and best.options.caching and asked.chunks is None:
            yield from ({"chunks": chunks} for chunks in (asked.most_chunks, 4))

    def orders(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Which sub-problem comes next."""
        if asked.order == "eta":
            yield from ({"order": order} for order in ("finish", "eta"))

    def when_c(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """C fetched before its products or after them."""
        if asked.wr_lazy and self._problem.reads_c and self._placement.c_beside_inputs:
            yield from ({"wr_lazy": lazy} for lazy in (False, True))

    def tiles(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Tile edges near what the heuristic of section III-A likes."""
        if asked.tile:
            return
        grid = ProcessGrid(*best.grid)
        options = dataclasses.replace(best.options, tile=0)
        for tile in candidate_tiles(self._problem, grid, options, _TILES, bound_s=self._tried.bound_s(options)):
            yield {"tile": tile}

    def shares(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Blocks in proportion to what ranks got done, so that they end at one time."""
        if any(one is not None for one in (asked.row_shares, asked.col_shares, asked.areas)):
            return
        current = best
        for _ in range(_SHARE_STEPS if best.grid != (1, 1) else 0):
            speeds = self._speeds_of(current)
            if speeds is None or speeds.max() <= (1 + _SHARE_TOLERANCE) * speeds.min():
                return
            changes: dict[str, Any]
            if best.options.areas is not None:
                changes = {"areas": _in_columns(speeds, [len(column) for column in best.options.areas])}
            else:
                by_columns = self._problem.swapped  # so ranks fill the grid
                shares = fit_shares(speeds.reshape(best.grid, order="F" if by_columns else "C"))
                changes = {"row_shares": shares.rows, "col_shares": shares.cols}
            if best.options.scheduler == "uncut" and not asked.tile:
                shared = dataclasses.replace(best.options, **changes)
                tile = fitting_tile(self._problem, ProcessGrid(*best.grid), shared, best.tile)
                changes["tile"] = tile
            yield changes
            found = self._tried.found(changed(best.options, **changes))
            if found is None:
                return
            current = found

    def with_room(self, asked: ScheduleOptions) -> Iterator[ScheduleOptions]:
        """
        Return ways to begin where memory is short: other ranks, those with most room first, grids and places of sums.

        Columns of ranks come last: of a number of ranks that has few divisors they take less than any grid.
        """
        rooms = room_for_panels(self._num_ranks, self._problem, self._placement, self._machine)
        order = sorted(range(self._num_ranks), key=lambda rank: (-rooms[rank], rank))
        sets = [tuple(sorted(order[:count])) for count in self.counts] if asked.devices is None else [asked.devices]
        given = asked.blocking
        small: dict[str, Any] = {"columns": given.columns or 16}
        if not given.order and given.rows <= 1 and not given.tail:
            small["order"] = "columns"  # C enters a block at a time
        free = not given.combine and not given.away
        for ranks, combine in itertools.product(sets, COMBINES if free else (given.combine,)):
            cuts: list[dict[str, Any]] = [{}]
            if not _is_cut(asked):
                sizes = (sizes_of_columns([1.0] * len(ranks), columns) for columns in range(2, len(ranks)))
                cuts = [{"grid": grid[:2], "splits": grid[2]} for grid in grids(len(ranks))]
                cuts += [{"areas": _in_columns(np.ones(len(ranks)), each), "splits": 1} for each in sizes]
            for cut in cuts:
                splits = cut.pop("splits", given.splits)
                if given.splits in (0, splits):
                    where = {"devices": ranks} if asked.devices is not None else self._in_places(ranks)
                    yield changed(
                        asked, **where, **cut, blocking=changed(given, splits=splits, combine=combine, **small)
                    )

    # -- dimensions of kblocks -------------------------------------------------------------

    def stationary(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Grids on which a matrix in parts stays where it is."""
        if asked.devices is not None or _is_cut(asked):
            return
        for one in stationary_grids(self._problem, self._placement):
            if asked.blocking.splits in (0, one.splits):
                yield {**one.changes(), **_blocked(best, splits=one.splits)}

    def begins(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Where ranks begin along k, if a device holds a part of A or B and not all of it."""
        if not asked.blocking.begin and len(self._placement.devices(Matrix.A, Matrix.B)) > 1 and self.in_parts:
            yield from (_blocked(best, begin=begin) for begin in BEGINS)

    def corners(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """One row of ranks, one column of them, and all ranks sharing k."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        yield from self._on_grids(asked, best, [(1, len(ranks), 1), (len(ranks), 1, 1), (1, 1, len(ranks))])

    def splits(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """All grids of those ranks, k split over some of them too."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        most, longer = len(ranks), self._longer_split(len(ranks))
        chosen = [
            grid for grid in grids(most) if grid[2] == 1 or 1 + longer * (grid[2] - 1) / (most - 1) <= _SPLIT_BEHIND
        ]
        yield from self._on_grids(asked, best, chosen)

    def _longer_split(self, most: int) -> float:
        """
        Return by which part longer as many parts of k as there are ranks take than one; 0 if that is not known.

        What is sent and added up for them grows with the parts but one.
        """
        least: dict[int, float] = {}
        for one in self._tried.tried:
            if one.splits in (1, most) and one.options.scheduler == "kblocks" and self._count(one) == most:
                least[one.splits] = min(least.get(one.splits, np.inf), one.value)
        return least[most] / least[1] - 1 if len(least) == 2 else 0.0

    def _count(self, one: Candidate) -> int:
        """Return how many ranks compute."""
        return len(one.options.devices or range(self._num_ranks))

    def _on_grids(
        self, asked: ScheduleOptions, best: Candidate, chosen: Sequence[tuple[int, int, int]]
    ) -> Iterator[dict[str, Any]]:
        if _is_cut(asked):
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        for rows, cols, splits in chosen:
            if asked.blocking.splits in (0, splits) and not self._behind(best, (rows, cols), splits):
                changes = {"devices": ranks} if asked.devices is not None else self.placed(ranks, (rows, cols))
                shares = {"row_shares": None, "col_shares": None, "k_shares": None, "areas": None, **changes}
                yield {**shares, "grid": (rows, cols), **_blocked(best, splits=splits)}

    def _behind(self, best: Candidate, grid: tuple[int, int], splits: int) -> bool:
        """Whether all that was tried on a grid takes far longer than the best: other block sizes will not help."""
        shape = (*grid, splits)
        values = [one.value for one in self._tried.tried if one.shape == shape and one.options.scheduler == "kblocks"]
        return bool(values) and min(values) > _FAR_BEHIND * best.value

    def block_orders(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Column blocks one after the other, k-blocks over all of them, or row and column blocks as they arrive."""
        given, columns = asked.blocking, best.options.blocking.columns
        if not given.order and given.rows <= 1 and not given.tail:
            for order in BLOCK_ORDERS:
                if order in ORDERS_BY_K[1:]:
                    continue  # `tails`
                changes: dict[str, Any] = {"order": order, "rows": 1, "tail": 0}
                if order == "corner":
                    changes["rows"] = given.rows or columns
                    if self._problem.dtype.is_half and not given.first and not given.block:
                        # Sums of parts of k are what a half type takes this order to avoid.
                        changes["first"] = changes["block"] = self._inner(best)
                yield _blocked(best, **changes)

    def tails(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Whether the end of k arrives by column blocks, too, and how much of it does so.

        Products have nothing to do until all of A's part of the end is there: where A or B comes from the host and k is
        long, less than the usual part of it is tried, too.
        """
        given, now = asked.blocking, best.options.blocking.order
        if now not in ORDERS_BY_K:
            return
        orders = (given.order,) if given.order else ORDERS_BY_K
        yield from (_blocked(best, order=order, tail=given.tail) for order in orders)
        if not given.tail and self._long_from_host:
            yield from (_blocked(best, order=orders[-1], tail=tail) for tail in _TAILS)

    def column_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        In how many column blocks C is handed on, and as many row blocks where there are any.

        A C in host memory crosses the link both ways, each block's way in before its way out: the more blocks, the
        longer both go on at once (``docs/performance.md``, 2026-11-24). So twice as many are tried for as long as that
        is better.
        """
        if asked.blocking.columns:
            return
        blocking = best.options.blocking
        corner = blocking.order == "corner" and not asked.blocking.rows

        def blocked(count: int) -> dict[str, Any]:
            return _blocked(best, columns=count, **({"rows": count} if corner else {}))

        yield from (blocked(count) for count in _BLOCKS)
        if not self._placement.in_host(Matrix.C):
            return
        edge = min(self._problem.n // best.grid[1], self._problem.m // best.grid[0] if corner else self._problem.n)
        least, count = best.value, 2 * _BLOCKS[-1]
        while count <= min(_MOST_BLOCKS, edge // _LEAST_EDGE):
            if count > 2 * blocking.columns:
                found = self._tried.found(changed(best.options, **blocked(count // 2)))
                if found is None or found.value >= least:
                    return
                least = found.value
            yield blocked(count)
            count *= 2

    def row_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many row blocks there are for so many column blocks."""
        if not asked.blocking.rows and best.options.blocking.order == "corner":
            yield from (_blocked(best, rows=count) for count in _BLOCKS)

    def block_multiples(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Of how many elements row and column blocks begin at multiples."""
        blocking = best.options.blocking
        if not asked.blocking.multiple and max(blocking.columns, blocking.rows) > 1:
            yield from (_blocked(best, multiple=multiple) for multiple in _MULTIPLES)

    def deliveries(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How pieces on devices reach more than one other rank."""
        ranks = {*(best.options.devices or range(self._num_ranks))}
        owners = self._placement.devices(Matrix.A, Matrix.B)
        uneven = self._placement.in_host(Matrix.A, Matrix.B) and not ways_of(self._machine).even
        if not asked.blocking.delivery and (uneven or any(len(ranks - {owner}) > 1 for owner in owners)):
            yield from (_blocked(best, delivery=delivery) for delivery in DELIVERIES)

    def product_lanes(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many products a rank may have begun."""
        if not asked.blocking.lanes:
            yield from (_blocked(best, lanes=count) for count in range(1, MOST_PRODUCT_LANES + 1))

    def largest_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Elements of the largest k-block."""
        inner = self._inner(best)
        if not asked.blocking.block:
            first = best.options.blocking.first
            for block in (*_K_BLOCKS, *((_LONG_K_BLOCK,) if self._long_from_host else ()), inner):
                if block <= inner and (first <= block or not asked.blocking.first):
                    yield _blocked(best, block=block, first=min(first, block))

    def first_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Elements of the first k-block."""
        if not asked.blocking.first:
            inner = self._inner(best)
            most = min(best.options.blocking.block, inner)
            sizes = (*_FIRST_BLOCKS, _FIRST_BLOCK_OF_HALVES) if self._problem.dtype.is_half else _FIRST_BLOCKS
            yield from (_blocked(best, first=first) for first in sizes if first <= most)
            far_apart = self._problem.trans_a == "T" and self._placement.in_host(Matrix.A)
            half_there = self._problem.dtype.is_half and self._placement.on_device(Matrix.C)
            blocking = best.options.blocking
            written = half_there and blocking.splits == 1 and (inner <= _K_BLOCKS[-1] or blocking.order == "corner")
            if (far_apart or written) and not asked.blocking.block:
                # All of k at once: stored so, shorter blocks are rows far apart; a half C is written without a COMBINE.
                yield _blocked(best, first=inner, block=inner)

    def long_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Long k-blocks that grow fast, the end of k by column blocks, for a long k from the host.

        k is split as it is, and not, on what is best then. Such blocks are far from the usual ones, and a descent that
        begins with those does not come to these.
        """
        given = asked.blocking
        if not self._long_from_host or given.rows > 1 or given.order not in ("", ORDERS_BY_K[-1]):
            return
        block = given.block or max(_LONG_K_BLOCK, given.first)
        long = {
            "order": ORDERS_BY_K[-1],
            "rows": 1,
            "first": given.first or min(_LONG_FIRST_BLOCK, block),
            "block": block,
            "growth": given.growth or _GROWTHS[-1],
            "tail": given.tail or _LONG_TAIL,
        }
        yield _blocked(best, **long)
        if best.splits > 1 and not given.splits:
            ranks, tried = self._count(best), self._tried.tried
            of_kblocks = (one for one in tried if one.splits == 1 and one.options.scheduler == "kblocks")
            whole = [one for one in of_kblocks if self._count(one) == ranks]
            if whole:
                cut = min(whole, key=lambda one: one.value).options
                places = {name: getattr(cut, name) for name in ("grid", "devices", "row_shares", "col_shares", "areas")}
                yield {**places, "k_shares": None, **_blocked(best, **long, splits=1)}

    def growths(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How fast k-blocks grow."""
        if not asked.blocking.growth and best.options.blocking.first < self._inner(best):
            yield from (_blocked(best, growth=growth) for growth in _GROWTHS)

    @functools.cached_property
    def _long_from_host(self) -> bool:
        """Whether k is long, and A or B is in host memory: what comes from there takes longer than its products."""
        problem = self._problem
        return self._placement.in_host(Matrix.A, Matrix.B) and problem.k >= _LONG * max(problem.m, problem.n)

    def _inner(self, best: Candidate) -> int:
        """Return how many elements of k a rank sums."""
        return -(-self._problem.k // best.options.blocking.splits)

    def places_and_lanes(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Where C on a device meets the products, and how many of these a rank may have begun.

        Sums wait for products that were begun, so what is best of one depends on the other.
        """
        places = [changes["blocking"] for changes in self.places_of_sums(asked, best)]
        for blocking in places or [best.options.blocking]:
            for lanes in (asked.blocking.lanes,) if asked.blocking.lanes else range(MOST_PRODUCT_LANES, 0, -1):
                yield {"blocking": changed(blocking, lanes=lanes)}

    def places_of_sums(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Where C on a device meets the products."""
        if self._sums_travel(best) and not asked.blocking.combine and not asked.blocking.away:
            yield from (_blocked(best, combine=combine, away=0) for combine in COMBINES)
            blocking = best.options.blocking
            if count_blocks(blocking.columns) > HALVINGS + 1 and forms_sums(self._problem, blocking.splits):
                yield _blocked(best, combine="owner", away=HALVINGS + 1)

    def sums_away(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many of the last column blocks are combined where they are computed, the others at C's owner."""
        blocking = best.options.blocking
        combines = self._sums_travel(best) and forms_sums(self._problem, blocking.splits)
        if combines and not asked.blocking.combine and not asked.blocking.away:
            most = count_blocks(blocking.columns) - 1
            for count in sorted({1, HALVINGS + 1, most}):  # the last part, all parts of the halved block, all but one
                if count <= most:
                    yield _blocked(best, combine="owner", away=count)

    def _sums_travel(self, best: Candidate) -> bool:
        """Whether another rank than the owner of a C on a device computes."""
        owner = self._placement.device_of(Matrix.C)
        return owner is not None and (best.options.devices or tuple(range(self._num_ranks))) != (owner,)

    def fewer_ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many ranks compute, k not split, also in one row or column."""
        if asked.devices is not None or _is_cut(asked) or asked.blocking.splits > 1:
            return
        for count in self.counts:
            ranks = tuple(sorted(self._order_of_ranks[:count]))
            # Rows and columns of all ranks are among `corners`; those of many are too long.
            long = [(1, count), (count, 1)] if 1 < count < min(self._num_ranks, _ALL_COUNTS) else []
            for grid in (None, *long):
                whole = {"areas": None, "k_shares": None, **_blocked(best, splits=1)}
                yield {**whole, **self.placed(ranks, grid), "grid": grid}

    def alone(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """One owner of A, B or C by itself, all of k in one block: for what is too small to be shared."""
        if asked.devices is not None or _is_cut(asked) or asked.blocking.splits > 1 or self._num_ranks == 1:
            return
        given, inner = asked.blocking, self._problem.k
        block = given.block or max(inner, given.first, 1)
        whole = {"splits": 1, "block": block, "first": given.first or block, "columns": given.columns or 1}
        for owner in self._owners:
            anywhere = {"grid": None, "areas": None, "k_shares": None}
            yield {**anywhere, **self.placed((owner,), None), **_blocked(best, **whole)}

    def is_alone(self, one: Candidate) -> bool:
        """Whether a candidate of `kblocks` is one rank's, with all of k in one block."""
        alone = one.options.devices is not None and len(one.options.devices) == 1 < self._num_ranks
        return one.options.scheduler == "kblocks" and alone and one.options.blocking.first >= self._problem.k

    def arrangements(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Other places for the ranks that own A, B or C: which pieces come first, and who hands them on."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        owners = [rank for rank in self._owners if rank in ranks]
        if asked.devices is not None or not owners or len(ranks) == 1:
            return
        if math.perm(len(ranks), len(owners)) <= _MOST_ARRANGEMENTS:
            others = [rank for rank in ranks if rank not in owners]
            for places in itertools.permutations(range(len(ranks)), len(owners)):
                of_owners = dict(zip(places, owners, strict=True))
                left = iter(others)
                yield self._in_places(of_owners[at] if at in of_owners else next(left) for at in range(len(ranks)))
            return
        for owner in owners:
            for rank in ranks:
                if rank != owner:
                    swapped = {owner: rank, rank: owner}
                    yield self._in_places(swapped.get(one, one) for one in ranks)

    def columns_of_ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Columns of ranks that are each cut into rows of their own, faster ranks first.

        A rank that has A and B needs nothing of either: it gets a column for itself, whatever that does to edges.
        """
        if asked.devices is not None or _is_cut(asked) or asked.blocking.splits > 1 or best.splits > 1:
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        speeds = self._speeds_of(best)
        if not 3 <= len(ranks) <= _MOST_IN_COLUMNS or speeds is None or len(speeds) < len(ranks):
            return
        of = dict(zip(ranks, speeds.tolist(), strict=True))
        alone = [rank for rank in ranks if self._has_operands(rank)]
        order = sorted((rank for rank in ranks if rank not in alone), key=lambda rank: (-of[rank], rank))
        devices = (*alone, *order)
        areas = [of[rank] for rank in order]
        for columns in range(1, len(order) + 1):
            sizes = [1] * len(alone) + sizes_of_columns(areas, columns)
            equal = len(set(sizes)) == 1 and max(of.values()) <= (1 + _SHARE_TOLERANCE) * min(of.values())
            if not equal:  # else it is a grid
                arranged = _in_columns(np.array([of[rank] for rank in devices]), sizes)
                whole = {"grid": None, "row_shares": None, "col_shares": None, "areas": arranged}
                yield {**self._in_places(devices), **whole}

    def _speeds_of(self, one: Candidate) -> np.ndarray | None:
        """Return its ranks' speeds: several dimensions ask for those of the best, in every round."""
        if one not in self._speeds:
            self._speeds[one] = speeds_of(one)
        return self._speeds[one]

    def _has_operands(self, rank: int) -> bool:
        return self._placement.device_of(Matrix.A) == self._placement.device_of(Matrix.B) == rank

    # -- dimensions of cyclic and bands ------------------------------------------------------

    def edges(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Half and twice the tile."""
        if not asked.tile:
            yield from ({"tile": edge} for edge in (best.tile // 2, 2 * best.tile) if edge)

    def distributions(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How tiles of C are dealt out."""
        if "distribution" not in asked.given:
            yield from ({"distribution": distribution} for distribution in DISTRIBUTIONS)

    # -- what the dimensions need ------------------------------------------------------------

    @functools.cached_property
    def on_devices(self) -> bool:
        """Whether all of A, B and C is in memory of devices."""
        return not self._placement.in_host()

    @property
    def in_parts(self) -> bool:
        """Whether a matrix is in parts."""
        return self._placement.in_parts

    @functools.cached_property
    def _owners(self) -> list[int]:
        """The ranks on whose devices A, B or C is."""
        return sorted(self._placement.devices())

    @functools.cached_property
    def _order_of_ranks(self) -> list[int]:
        return ranks_by_use(self._problem, self._placement, self._machine)

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many ranks may compute."""
        most = self._num_ranks
        if most <= _ALL_COUNTS:
            return list(range(most, 0, -1))
        counts = [most * eighths // 8 for eighths in range(8, 0, -1)]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return [most, *dict.fromkeys(_no_long_grid(count) for count in counts[1:])]

    def _in_places(self, ranks: Iterable[int]) -> dict[str, Any]:
        """Return devices for ranks in the order in which they fill places, all in their own order under one name."""
        devices = tuple(ranks)
        return {"devices": None if devices == tuple(range(self._num_ranks)) else devices}

    def placed(self, ranks: tuple[int, ...], asked: tuple[int, int] | None) -> dict[str, Any]:
        """Return devices and shares for ranks on a grid: equal blocks unless their rates differ."""
        if (ranks, asked) not in self._placed:
            self._placed[ranks, asked] = self._place(ranks, asked)
        return self._placed[ranks, asked]

    def _place(self, ranks: tuple[int, ...], asked: tuple[int, int] | None) -> dict[str, Any]:
        if not self._problem.has_product:
            return {}
        rates = self._machine.typical_gemm_rate(self._problem.dtype)[list(ranks)]
        devices = self._in_places(ranks)
        transposed = self._problem.swapped
        grid = ProcessGrid.choose(math.prod(asked) if asked else len(ranks), asked, transposed=transposed)
        if rates.max() <= (1 + _SHARE_TOLERANCE) * rates.min() or grid.size != len(ranks):
            return {**devices, "row_shares": None, "col_shares": None, "areas": None}
        arranged, shares = arrange(ranks, rates.tolist(), grid)
        return {**self._in_places(arranged), "row_shares": shares.rows, "col_shares": shares.cols, "areas": None}


def _no_long_grid(count: int) -> int:
    """Return the next lower number of ranks whose most square grid is no more than `_MOST_SIDE` wide, or 2 to 1."""
    while (grid := ProcessGrid.most_square(count)).cols > max(_MOST_SIDE, 2 * grid.rows):
        count -= 1
    return count


def _is_cut(asked: ScheduleOptions) -> bool:
    """Whether the caller has said how C is cut: by a grid, by shares or by areas."""
    shares = asked.row_shares, asked.col_shares, asked.k_shares
    return any(one is not None for one in (asked.grid, *shares, asked.areas))


def _in_columns(speeds: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return areas in proportion to speeds, summing to 1, in columns of so many ranks."""
    each = iter((speeds / speeds.sum()).tolist())
    return tuple(tuple(itertools.islice(each, size)) for size in sizes)


def _blocked(best: Candidate, **changes: Any) -> dict[str, Any]:
    return {"blocking": changed(best.options.blocking, **changes)}
