"""
What a search varies: each dimension yields changes of a candidate's options, in a fixed order.

What the caller fixed stays fixed. A dimension yields nothing for placements that it is not for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.model.placement import MATRICES, Matrix
from uncut_mpi.planning.blocking import HALVINGS, count_blocks, forms_sums
from uncut_mpi.planning.buffers import resident_bytes
from uncut_mpi.planning.candidates import Candidate, speeds_of
from uncut_mpi.planning.decomposition import candidate_tiles, fitting_tile
from uncut_mpi.planning.evaluation import Evaluation
from uncut_mpi.planning.grid import ProcessGrid, grids
from uncut_mpi.planning.options import BEGINS, BLOCK_ORDERS, COMBINES, DELIVERIES, ORDERS_BY_K, ScheduleOptions, changed
from uncut_mpi.planning.partition import sizes_of_columns
from uncut_mpi.planning.rank_sets import ALL_COUNTS, MOST_SIDE, SHARE_TOLERANCE, RankSets, in_columns, is_cut
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.shares import fit_shares
from uncut_mpi.planning.stationary import stationary_grids

OF_TILES: Final = ("tiles", "grids", "shares", "ranks")
"""What is varied of `uncut`."""

DIMENSIONS: Final = [
    "parts",
    "places",
    "orders",
    "columns",
    "grids",
    "k_blocks",
    "deliveries",
    "areas",
    "shares",
    "ranks",
    "arrangements",
]
"""What is varied, in this order: first what decides most."""

OUT_OF_CORE: Final = ("grids", "slots", "blocks_of_c", "columns", "ranks")
"""What is varied where a rank has not room for all it needs."""

OF_RANKS: Final = ("parts", "grids", "ranks")
"""Those that leave a candidate's kind, which later descents keep: its ranks and its grid."""

_COLUMNS: Final = (1, 2, 3, 4, 8, 16, 32, 64)
"""Numbers of column blocks; those above 8 for a C in host memory, each block of which crosses its link both ways."""

_ROWS: Final = 3
"""Row blocks at least when the order with row blocks is tried first: few columns may be many rows."""

_BLOCKS: Final = 4
"""Blocks of C, by columns or rows, where half types begin with all of k at once."""

_LEAST_EDGE: Final = 128
"""More than a few equal blocks have at least so many columns: products of 64 take a third longer than expected."""

_EDGES: Final = (2048, 4096, 8192, 16384, 32768)
"""Rows or columns of blocks of C that are tried, with as many of the other as fit."""

_TILES: Final = 6
_K_BLOCKS: Final = (1024, 2048, 4096, 8192)
_GROWTHS: Final = (2, 3, 4)
_TAILS: Final = (4, 8, 16)
_FIRST_BLOCKS: Final = (128, 256, 512, 1024, 2048)
_FAR_BEHIND: Final = 1.1
"""A grid whose best takes so many times as long is not tried with other blocks."""

_SHARE_STEPS: Final = 3
_EQUAL: Final = dict.fromkeys(("row_shares", "col_shares", "k_shares", "areas"))


class Dimensions:
    """
    The dimensions of one search.

    Parameters
    ----------
    setting : Setting
        As for `uncut_mpi.planning.search.search`.
    evaluation : Evaluation
        The search.
    sets : RankSets
        Its sets of ranks.
    """

    def __init__(self, setting: Setting, evaluation: Evaluation, sets: RankSets) -> None:
        self._problem, self._placement, self._num_ranks = setting.problem, setting.placement, setting.num_ranks
        self._on_nodes = setting.machine.ranks
        self._evaluation, self._sets = evaluation, sets
        self._speeds: dict[Candidate, np.ndarray | None] = {}

    def vary(self, name: str, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Return what a dimension makes of a candidate, as changes of its options."""
        return getattr(self, f"_{name}")(asked, best)  # type: ignore[no-any-return]

    # -- who computes ------------------------------------------------------------------------

    def _parts(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Grids on which a matrix in parts stays where it is, and whether ranks begin with what they hold."""
        if not self._placement.in_parts:
            return
        cuts = self._stays(asked)
        held = len(self._placement.devices(Matrix.A, Matrix.B)) > 1 and not asked.blocking.begin
        for cut, splits in [({}, best.options.blocking.splits), *cuts]:
            for begin in BEGINS if held else (best.options.blocking.begin,):
                yield {**cut, **_blocked(best, splits=splits, begin=begin)}

    def _stays(self, asked: ScheduleOptions) -> list[tuple[dict[str, Any], int]]:
        """Return changes that make grids on which a matrix in parts stays where it is, and how many ranks share k."""
        whole = asked.devices is not None or is_cut(asked)
        stays = [] if whole else stationary_grids(self._problem, self._placement)
        return [(one.changes, one.splits) for one in stays if asked.blocking.splits in (0, one.splits)]

    def _grids(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """All grids of those ranks, k split over some of them too."""
        if is_cut(asked):
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        square = ProcessGrid.most_square(len(ranks))
        for rows, cols, splits in grids(len(ranks), split_k=best.options.scheduler == "kblocks"):
            fits = asked.blocking.splits in (0, splits) and max(rows, cols) <= max(MOST_SIDE, square.cols)
            if fits and not self._is_behind(best, (rows, cols, splits)):
                where = (
                    {"devices": ranks}
                    if asked.devices is not None
                    else self._sets.devices_and_shares(ranks, (rows, cols))
                )
                cut = {**_EQUAL, **where, "grid": (rows, cols), "tile": asked.tile}
                yield {**cut, **_recut(asked, best, splits=splits)}

    def _is_behind(self, best: Candidate, shape: tuple[int, ...]) -> bool:
        """Whether all that was tried on a grid takes far longer than the best: other blocks will not help."""
        alike = (best.options.scheduler, shape)
        values = [one.value for one in self._evaluation.tried if (one.options.scheduler, one.shape) == alike]
        return bool(values) and min(values) > _FAR_BEHIND * best.value

    def _ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How many ranks compute, those of most use first: on the most square grid, in a row, in a column, along k."""
        if asked.devices is not None or is_cut(asked):
            return
        for count in self._sets.counts:
            ranks = tuple(sorted(self._sets.by_use[:count]))
            long = [(1, count, 1), (count, 1, 1), (1, 1, count)] if 1 < count < min(self._num_ranks, ALL_COUNTS) else []
            for grid in (None, *long):
                splits = grid[2] if grid else 1
                if asked.blocking.splits in (0, splits):
                    cut = {"areas": None, "k_shares": None, **self._sets.devices_and_shares(ranks, grid and grid[:2])}
                    yield {**cut, "grid": grid and grid[:2], **_recut(asked, best, splits=splits)}

    def whole(self, asked: ScheduleOptions, best: Candidate, *, by_rule: bool = False) -> Iterator[dict[str, Any]]:
        """All of C and k in one block, for what is too small to be cut; also by owners of A, B or C alone."""
        given = asked.blocking
        if not (given.block and given.first and given.columns):
            yield _in_one_block(best, asked, self._inner(best))
        for one in self.alone(asked, by_rule=by_rule):
            whole = _in_one_block(best, asked, self._problem.k, splits=1)
            yield {**_EQUAL, "devices": one.devices, "grid": None, **whole}

    def stays(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """All of each rank's C and k in one block, on grids on which a matrix in parts stays where it is."""
        how = {"begin": asked.blocking.begin or BEGINS[0]}
        for cut, splits in self._stays(asked) if self._placement.in_parts else []:
            depth = self._deepest(splits, cut["k_shares"])
            yield {**cut, **_in_one_block(best, asked, depth, splits=splits, **how)}

    def at_once(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        All of k at once by blocks of C: products are few and deep, and half types need no sums.

        Each rank first multiplies the columns of B that its device holds, and the other columns arrive meanwhile. If A
        is dealt by rows, the same is done with rows of A. With half types, all ranks may also begin with the same block
        of C.
        """
        given, now = asked.blocking, best.options.blocking
        if given.begin or given.order or given.first or given.block or given.columns or given.rows or given.tail:
            return
        ways: list[tuple[dict[str, Any], int, dict[str, Any]]] = []
        if self._problem.rounds_c and now.begin == "held":
            ways += [({}, now.splits, {"begin": "first", "order": "columns", "rows": 1, "columns": _BLOCKS})]
            ways += [({}, now.splits, {"begin": "first", "order": "corner", "rows": _BLOCKS, "columns": 1})]
        stays = stationary_grids(self._problem, self._placement)
        with_all_of_k = (one for one in stays if one.splits == 1)
        num_parts = {one.matrix: math.prod(one.changes["grid"]) for one in with_all_of_k}
        for cut, splits in [({}, now.splits), *self._stays(asked)]:
            rows, cols = cut.get("grid", best.grid)
            if rows > 1 and Matrix.B in num_parts:
                held = {"begin": "held", "order": "columns", "rows": 1, "columns": num_parts[Matrix.B]}
                ways.append((cut, splits, held))
            if cols > 1 and Matrix.A in num_parts:
                held = {"begin": "held", "order": "corner", "rows": num_parts[Matrix.A], "columns": 1}
                ways.append((cut, splits, held))
        for cut, splits, way in ways:
            inner = self._deepest(splits, cut.get("k_shares", best.options.k_shares))
            yield {**cut, **_blocked(best, splits=splits, first=inner, block=inner, **way)}

    def alone(self, asked: ScheduleOptions, *, by_rule: bool = False) -> Iterator[ScheduleOptions]:
        """Return what each owner of A, B or C does by itself; by a rule, of many, who holds most: they are alike."""
        if not (asked.devices is not None or is_cut(asked) or asked.blocking.splits > 1 or self._num_ranks == 1):
            owners = sorted(self._placement.devices())
            if by_rule and len(owners) > len(MATRICES):
                owners = [max(owners, key=resident_bytes(self._on_nodes, self._problem, self._placement).__getitem__)]
            for owner in owners:
                yield changed(asked, devices=(owner,))

    def _arrangements(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Other places for the ranks that own A, B or C: which pieces come first, and who hands them on."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        owners = [rank for rank in sorted(self._placement.devices()) if rank in ranks]
        if asked.devices is not None or not owners or len(ranks) == 1:
            return
        for owner, rank in itertools.product(owners, ranks):
            if rank != owner:
                swapped = {owner: rank, rank: owner}
                yield self._sets.in_order(swapped.get(one, one) for one in ranks)

    def _areas(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Columns of ranks that are each cut into rows of their own, faster ranks first.

        A rank that has A and B needs nothing of either: it gets a column for itself, whatever that does to edges.
        """
        ranks = best.options.devices or tuple(range(self._num_ranks))
        if asked.devices is not None or is_cut(asked) or asked.blocking.splits > 1 or best.splits > 1:
            return
        speeds = self._speeds_of(best)
        if not 3 <= len(ranks) <= MOST_SIDE or speeds is None or len(speeds) < len(ranks):
            return
        of = dict(zip(ranks, speeds.tolist(), strict=True))
        device_of = self._placement.device_of
        alone = [rank for rank in ranks if device_of(Matrix.A) == device_of(Matrix.B) == rank]
        order = sorted((rank for rank in ranks if rank not in alone), key=lambda rank: (-of[rank], rank))
        devices = (*alone, *order)
        areas = [of[rank] for rank in order]
        for columns in range(1, len(order) + 1):
            sizes = [1] * len(alone) + sizes_of_columns(areas, columns)
            equal = len(set(sizes)) == 1 and max(of.values()) <= (1 + SHARE_TOLERANCE) * min(of.values())
            if not equal:  # else it is a grid
                arranged = in_columns(np.array([of[rank] for rank in devices]), sizes)
                whole = {"grid": None, "row_shares": None, "col_shares": None, "areas": arranged}
                yield {**self._sets.in_order(devices), **whole}

    def _shares(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Blocks in proportion to what ranks got done, so that they end at one time."""
        if any(one is not None for one in (asked.row_shares, asked.col_shares, asked.areas)):
            return
        current = best
        for _ in range(_SHARE_STEPS if best.grid != (1, 1) else 0):
            speeds = self._speeds_of(current)
            if speeds is None or speeds.max() <= (1 + SHARE_TOLERANCE) * speeds.min():
                return
            changes: dict[str, Any]
            if best.options.areas is not None:
                changes = {"areas": in_columns(speeds, [len(column) for column in best.options.areas])}
            else:
                by_columns = self._problem.swapped  # so ranks fill the grid
                shares = fit_shares(speeds.reshape(best.grid, order="F" if by_columns else "C"))
                changes = {"row_shares": shares.rows, "col_shares": shares.cols}
            if best.options.scheduler == "uncut" and not asked.tile:
                shared = changed(best.options, **changes)
                changes["tile"] = fitting_tile(self._problem, ProcessGrid(*best.grid), shared, best.tile)
            yield changes
            found = self._evaluation.found(changed(best.options, **changes))
            if found is None:
                return
            current = found

    # -- what they compute one after the other -------------------------------------------------

    def _orders(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Column blocks one after the other, k-blocks over all of them, or row and column blocks as they arrive."""
        given, columns = asked.blocking, best.options.blocking.columns
        if given.order or given.rows > 1 or given.tail:
            return
        for order in BLOCK_ORDERS:
            for rows in sorted({columns, max(columns, _ROWS)}) if order == "corner" else (1,):
                changes: dict[str, Any] = {"order": order, "rows": given.rows or rows}
                if order == "corner" and self._problem.rounds_c and not given.first and not given.block:
                    # Sums of parts of k are what a C that is rounded takes this order to avoid.
                    changes["first"] = changes["block"] = self._inner(best)
                yield _blocked(best, **changes)

    def _columns(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """In how many column blocks C is handed on, and as many row blocks where there are any."""
        if asked.blocking.columns:
            return
        corner = best.options.blocking.order == "corner" and not asked.blocking.rows
        edge = min(self._problem.n // best.grid[1], self._problem.m // best.grid[0] if corner else self._problem.n)
        least = np.inf
        for count in _COLUMNS:
            many = count > 8
            if many and (not self._placement.in_host(Matrix.C) or count * _LEAST_EDGE > edge):
                return
            changes = _blocked(best, columns=count, **({"rows": count} if corner else {}))
            yield changes
            if count >= 8:
                found = self._evaluation.found(changed(best.options, **changes))
                if found is None or found.value > least:
                    return
                least = found.value

    def _k_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Elements of the largest k-block and of the first, how fast they grow, and what part of k goes by columns."""
        given, now, inner = asked.blocking, best.options.blocking, self._inner(best)
        if not given.block:
            for block in (*(one for one in _K_BLOCKS if one < inner), inner):
                if now.first <= block or not given.first:
                    yield _blocked(best, block=block, first=min(now.first, block))
        firsts = (given.first,) if given.first else (one for one in _FIRST_BLOCKS if one <= min(now.block, inner))
        growths = (given.growth,) if given.growth else _GROWTHS
        yield from (_blocked(best, first=first, growth=growth) for first in firsts for growth in growths)
        if not given.first and not given.block:
            yield _blocked(best, first=inner, block=inner)
        if not given.tail and now.order in ORDERS_BY_K:
            yield from (_blocked(best, tail=tail) for tail in _TAILS)

    def _slots(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """For how many k-blocks and blocks of C there is room, how deep those are; blocks of C fit beside."""
        given, now = asked.blocking, best.options.blocking
        open_ = {"c_rows": given.c_rows, "c_cols": given.c_cols}
        depths = (given.block,) if given.block else sorted({max(1, now.block // 2), now.block, 2 * now.block})
        slots = (given.slots,) if given.slots else [one for one in (now.slots - 1, now.slots, now.slots + 1) if one > 0]
        c_slots = (given.c_slots,) if given.c_slots else (1, 2)
        for block, count, of_c in itertools.product(depths, slots, c_slots):
            first = given.first or min(now.first, block)
            yield _blocked(best, **open_, block=block, first=first, slots=count, c_slots=of_c)

    def _blocks_of_c(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """One block of C more or less, down and along; or so many rows or columns that links are fast with."""
        given, now = asked.blocking, best.options.blocking
        rows, cols = -(-self._problem.m // best.grid[0]), -(-self._problem.n // best.grid[1])
        down, along = -(-rows // (now.c_rows or rows)), -(-cols // (now.c_cols or cols))
        for more_down, more_along in itertools.product((-1, 0, 1), repeat=2):
            if (more_down and given.c_rows) or (more_along and given.c_cols):
                continue
            counts = down + more_down, along + more_along
            if min(counts) > 0:
                yield _blocked(best, c_rows=-(-rows // counts[0]), c_cols=-(-cols // counts[1]))
        if not given.c_rows and not given.c_cols:
            yield from (_blocked(best, c_rows=edge, c_cols=0) for edge in _EDGES if edge <= rows)
            yield from (_blocked(best, c_rows=0, c_cols=edge) for edge in _EDGES if edge <= cols)

    def _places(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Where C on a device meets the products: at its owner, where they are computed, or some blocks at each."""
        owner, blocking = self._placement.device_of(Matrix.C), best.options.blocking
        ranks = best.options.devices or tuple(range(self._num_ranks))
        if owner is None or ranks == (owner,) or asked.blocking.combine or asked.blocking.away:
            return
        yield from (_blocked(best, combine=combine, away=0) for combine in COMBINES)
        if forms_sums(self._problem, blocking.splits):
            most = count_blocks(blocking.columns) - 1
            for count in sorted({1, HALVINGS + 1, most}):  # the last part, all parts of the halved block, all but one
                if 0 < count <= most:
                    yield _blocked(best, combine="owner", away=count)

    def _deliveries(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """How pieces on devices reach more than one other rank."""
        ranks = {*(best.options.devices or range(self._num_ranks))}
        owners = self._placement.devices(Matrix.A, Matrix.B)
        uneven = self._placement.in_host(Matrix.A, Matrix.B) and not self._sets.even
        if not asked.blocking.delivery and (uneven or any(len(ranks - {owner}) > 1 for owner in owners)):
            yield from (_blocked(best, delivery=delivery) for delivery in DELIVERIES)

    def _tiles(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Tile edges near what the heuristic of section III-A likes, and how tiles are fetched (`uncut`)."""
        if not asked.tile:
            options = changed(best.options, tile=0)
            bound_s = self._evaluation.bound_s(options)
            for tile in candidate_tiles(self._problem, ProcessGrid(*best.grid), options, _TILES, bound_s=bound_s):
                yield {"tile": tile}
        if asked.batch and asked.caching:
            yield {"batch": False}
            yield from ({"batch": True, "chunks": chunks} for chunks in ((asked.chunks,) if asked.chunks else (2, 4)))
        if asked.order == "eta":
            yield {"order": "finish"}
        if asked.wr_lazy and self._problem.reads_c and self._placement.c_beside_inputs:
            yield {"wr_lazy": not best.options.wr_lazy}

    # -- what the dimensions need ------------------------------------------------------------

    def _inner(self, best: Candidate) -> int:
        """Return how many elements of k the rank with most of them sums."""
        return self._deepest(best.options.blocking.splits, best.options.k_shares)

    def _deepest(self, splits: int, k_shares: Sequence[float] | None) -> int:
        shares = k_shares or (1,) * splits
        return int(-(-self._problem.k * max(shares) // sum(shares)))

    def _speeds_of(self, one: Candidate) -> np.ndarray | None:
        """Return its ranks' speeds: several dimensions ask for those of the best, in every pass."""
        if one not in self._speeds:
            self._speeds[one] = speeds_of(one)
        return self._speeds[one]


def _recut(asked: ScheduleOptions, best: Candidate, **changes: Any) -> dict[str, Any]:
    """Return changes of how ranks are dealt a product, with what then has to fit their memory left open again."""
    if not best.options.blocking.slots:
        return _blocked(best, **changes)
    names = ("c_slots", "c_rows", "c_cols", "block", "first")
    return _blocked(best, **{name: getattr(asked.blocking, name) for name in names}, **changes)


def _in_one_block(best: Candidate, asked: ScheduleOptions, depth: int, **changes: Any) -> dict[str, Any]:
    """Return changes to all of C and so many elements of k in one block, but for what is fixed."""
    given = asked.blocking
    block = given.block or max(depth, given.first, 1)
    return _blocked(best, first=given.first or block, block=block, columns=given.columns or 1, **changes)


def _blocked(best: Candidate, **changes: Any) -> dict[str, Any]:
    return {"blocking": changed(best.options.blocking, **changes)}
