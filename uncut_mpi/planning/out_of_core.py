"""
How C and k are cut where a rank has not room for all it needs: b×c blocks of C, k-blocks of depth d, slots for them.

A rank forms one block of C after the other. Of A and B it has a few k-blocks at a time, each in a slot; the next ones
arrive while one is multiplied. With room for two blocks of C the next one begins while one leaves. The PaRSEC paper
takes the largest block of C for three quarters of the memory, then the deepest k-blocks (Herault et al., 2019, III-B).
Here the largest blocks that fit are found for each depth and number of slots, long ones and wide ones, and a short
formula says which take least time. A search then tries what is near.

The formula has what decides. Of a k-block's product, its way over the host link and its way on to other ranks the
longest counts, or all in turn where slots are few. Short rows of host memory are slow, so k-blocks of few steps are.
While a block of C leaves and the next one comes, the link is busy both ways. What of that no products hide is added.
Two blocks in a row share rows or columns, so that what is there of these need not enter again. On several nodes what is
within a few per cent of the fastest is as good, if less enters a node.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix
from uncut_mpi.model.ports import fair_rates
from uncut_mpi.planning.buffers import elements_aligned
from uncut_mpi.planning.kblocks_defaults import in_rings
from uncut_mpi.planning.kblocks_request import DealtPanels
from uncut_mpi.planning.limits import MAX_STEPS
from uncut_mpi.planning.options import MOST_C_SLOTS, Blocking, changed

_SLOTS: Final = (1, 2, 3)
"""Numbers of k-blocks of each matrix that are looked at."""

_LEAST_DEPTH: Final = 256
"""K-blocks are looked at that are each half as long as the one before, until they are no longer than this."""

_LONGER: Final = (1, 1.5, 2)
"""Blocks so many times as long, or as wide, are looked at where all of k stays: what they share enters once."""

_TRIED: Final = 12
"""Ways to cut whose panels are looked at, those that take least time first, before the smallest blocks are taken."""

_AS_FAST: Final = 1.1
"""On several nodes the cut of which least enters a node, of those that take up to so many times as long as the best."""

_GROWTHS: Final = 24
"""How often more blocks are tried, where alignment takes more than was thought."""


def cut_to_fit(dealt: DealtPanels, how: Blocking, asked: Blocking) -> Blocking:
    """
    Return how a rank's part is cut so that it fits its memory, or as small as can be if that does not either.

    Pure and deterministic.

    Parameters
    ----------
    dealt : DealtPanels
        What is multiplied where.
    how : Blocking
        With everything set that it has where all fits.
    asked : Blocking
        What the caller fixed of it.
    """
    room = dealt.setting.room
    model = _Model(dealt, how)

    @functools.cache  # ways that begin apart grow into the same blocks
    def fits(one: Blocking) -> bool:
        taken = _native.KBlocksLayout(dealt.request(one, aligns=False)).rank_bytes
        return all(map(operator.le, taken, room))

    best, least = None, math.inf
    found = {one: model.seconds(one) for one in {*_candidates(model, asked)} if model.steps(one) <= MAX_STEPS}
    if model.several_nodes and found:
        near = [one for one, seconds in found.items() if seconds <= _AS_FAST * min(found.values())]
        few = min(map(model.enters, near))
        found = {one: found[one] for one in near if model.enters(one) == few}
    for seconds, one in sorted((seconds, one) for one, seconds in found.items())[:_TRIED]:
        made = _made(model, how, asked, one, fits) if seconds < least else None
        if made is not None and (seconds := model.seconds(made[0])) < least:
            best, least = made[1], seconds
    return best or _smallest(model, how, asked)


def _smallest(model: _Model, how: Blocking, asked: Blocking) -> Blocking:
    """Return the cut that needs the least memory: with one slot, and blocks as small as a schedule may have them."""
    most = int((MAX_STEPS / 2) ** (1 / 3))
    rows, cols, k = (max(model.step, -(-one // most)) for one in (model.rows, model.cols, model.k))
    block = asked.block or k
    edges = {"c_rows": asked.c_rows or rows, "c_cols": asked.c_cols or cols}
    slots = {name: getattr(asked, name) or 1 for name in ("slots", "c_slots", "columns")}
    return in_rings(changed(how, block=block, first=min(how.first, block), **edges, **slots))


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class _Sizes:
    """Blocks of C down and along, the depth of k-blocks, and for how many of each there is room."""

    down: int
    along: int
    depth: int
    slots: int
    c_slots: int


class _Model:
    """
    What a cut takes of memory and time of the rank with the largest part of C.

    Attributes
    ----------
    rows, cols, k : int
        Of its part of C, and what it sums (elements).
    room : int
        For its panels (bytes).
    step : int
        What depths are multiples of (elements).
    several_nodes : bool
        Whether its ranks are on several nodes.
    """

    def __init__(self, dealt: DealtPanels, how: Blocking) -> None:
        problem, ranks = dealt.problem, list(dealt.devices)
        placement, machine = dealt.setting.placement, dealt.setting.machine
        (self.rows, self.cols), self.k = dealt.largest, problem.k
        self.several_nodes = len({*machine.node_of[ranks].tolist()}) > 1
        # Ranks that share its columns of B, and its rows of A; those of its node each fetch a part, and hand it on.
        self._ranks_down, self._ranks_along = dealt.grid
        self._sharing_down, self._sharing_along = dealt.ranks_that_share
        self.room = min(dealt.setting.room[rank] for rank in ranks)
        self._problem, self._b_slots, self._columns = problem, how.b_slots, how.columns
        self.step = elements_aligned(problem)
        self._rate = float(machine.typical_gemm_rate(problem.arithmetic)[ranks].min())
        self._product = machine.product_shape(problem.arithmetic).native()
        self._multiprocessors = int(machine.multiprocessors[ranks].min())
        self._items, self._sum = tuple(one.itemsize for one in problem.dtypes), problem.accumulator.itemsize
        # What a column of a region takes of the disk besides, which is a run in a file; all ranks take turns there.
        self._call_s = len(ranks) * machine.disk.call_s if machine.on_disk else 0.0
        hosts = machine.host_of[list(ranks)]
        self._copy_s = float(machine.latency_s[hosts, ranks].max())
        self._copy_s += machine.costs.signal_lane_s + machine.costs.wait_lane_s
        # From the host and to it: of one rank, and of all, while nothing goes the other way and while all do.
        links = machine.bandwidth_gb_per_s
        one = links[hosts, ranks], links[ranks, hosts]
        alone = machine.host_rates(ranks)[0], machine.host_rates(ranks, inward=False, outward=True)[1]
        both = machine.host_rates(ranks, outward=True)
        self._host = [[float(rates.min()) * 1e9 for rates in way] for way in zip(one, alone, both, strict=True)]
        rows = (machine.row_rates.host_in, machine.row_rates.host_out)
        self._rows = [[] if machine.on_disk else [*table] for table in rows]
        beside = [rank for rank in ranks if machine.node_of[rank] == machine.node_of[ranks[0]]]
        self._peer = float(links[np.ix_(beside, beside)].min()) * 1e9
        owners = [() if placement.in_host(one) else placement.devices(one) for one in MATRICES]
        self._from_devices = [_sent_by(of_one, ranks, machine) for of_one in owners]

    def steps(self, cut: _Sizes) -> int:
        """Return how many k-blocks and column blocks a rank takes, in all blocks of C."""
        return cut.down * cut.along * (math.ceil(self.k / cut.depth) + 1)

    def enters(self, cut: _Sizes) -> int:
        """Return what comes of A and B for all blocks of C (bytes): A for those along, B for those down."""
        item_a, item_b, _ = self._items
        return self.k * (cut.along * self.rows * item_a + cut.down * self.cols * item_b)

    def bytes_of(self, depth: int, slots: int, c_slots: int) -> tuple[int, int, int]:
        """Return what an element of a block of C takes, a row of the k-blocks of A, and a column of those of B."""
        item_a, item_b, item_c = self._items
        of_c = self._sum + (item_c if self._problem.sums_apart else 0)
        return c_slots * of_c, slots * depth * item_a, (self._b_slots or slots) * depth * item_b

    def largest(self, panels: tuple[int, int, int]) -> tuple[float, float]:
        """Return rows and columns of the largest blocks of C that fit: of those whose A and B enter as often."""
        of_c, of_a, of_b = self.bytes_of(*panels)
        # A enters once for each block's columns, B for its rows: least for blocks of one size with rows over columns
        ratio = self._ranks_along / self._ranks_down  # so that both enter as often.
        # of_c·ratio·cols² + (of_a·ratio + of_b)·cols = room
        half = (of_a * ratio + of_b) / (2 * of_c * ratio)
        cols = math.sqrt(half * half + self.room / (of_c * ratio)) - half
        return ratio * cols, cols

    def fewest(self, panels: tuple[int, int, int], *, down: int = 0, along: int = 0) -> int:
        """Return into how few blocks the other way so many down, or along, can be cut; 0 where they do not fit."""
        of_c, of_a, of_b = self.bytes_of(*panels)
        if down:
            own, of_own, of_other, other = -(-self.rows // down), of_a, of_b, self.cols
        else:
            own, of_own, of_other, other = -(-self.cols // along), of_b, of_a, self.rows
        most = (self.room - of_own * own) / (of_c * own + of_other)
        return math.ceil(other / most) if most >= 1 else 0

    def deepest(self, slots: int, c_slots: int) -> list[int]:
        """Return the depth of the deepest k-blocks beside all of C; none where C does not fit."""
        of_c, of_a, of_b = self.bytes_of(1, slots, c_slots)
        left = self.room - of_c * self.rows * self.cols
        depth = int(left / (of_a * self.rows + of_b * self.cols)) // self.step * self.step
        return [] if depth < self.step else [min(depth, self.k)]

    def seconds(self, cut: _Sizes) -> float:
        """Return what a cut takes on the rank with the most to do."""
        rows, cols, depth = math.ceil(self.rows / cut.down), math.ceil(self.cols / cut.along), cut.depth
        k_blocks = math.ceil(self.k / depth)
        # So many k-blocks of the next block of C come while one leaves. By column blocks where that awaits the room.
        meanwhile = k_blocks if cut.c_slots > 1 else min(cut.slots, k_blocks)
        by_columns = (1 if cut.c_slots > 1 else meanwhile) / k_blocks
        product = (1 - by_columns) * self._product_s(rows, cols, depth)
        product += by_columns * self._columns * self._product_s(rows, -(-cols // self._columns), depth)
        there = min(1.0, cut.slots * depth / self.k)  # of the next block's k-blocks, where it shares them
        keeps_columns = cols * self._ranks_along >= rows * self._ranks_down
        # What of a k-block and of C crosses the link, and what is handed on.
        part_a, part_b = 1 / self._sharing_along, 1 / self._sharing_down
        of_a = (rows, depth * part_a) if self._problem.trans_a == "N" else (depth, rows * part_a)
        of_b = (depth, cols * part_b) if self._problem.trans_b == "N" else (cols, depth * part_b)
        a, b = self._crossing(Matrix.A, *of_a), self._crossing(Matrix.B, *of_b)
        near, far, kept, other = (cut.down, cut.along, b, a) if keeps_columns else (cut.along, cut.down, a, b)
        c_in = self._crossing(Matrix.C, rows, cols) if self._problem.reads_c else (0.0, 0.0)
        c_out = self._crossing(Matrix.C, rows, cols, outward=True)
        item_a, item_b, _ = self._items
        handed = depth * (rows * item_a * (1 - part_a) + cols * item_b * (1 - part_b))
        hands_on = (self._sharing_down + self._sharing_along - 2) * self._copy_s + handed / self._peer
        total = min(product, a[0] + b[0])  # at one of the ends
        # The first block of C, those that have what is kept in common with the one before it, and those the other: how
        # many k-blocks come while C does, what leaves meanwhile, and what comes of each k-block.
        first = 1, 1, (0.0, 0.0), 1.0, 1.0
        others = (far * (near - 1), meanwhile, c_out, 1 - there, 1.0), (far - 1, meanwhile, c_out, 1.0, 1 - there)
        for count, several, leaves, of_kept, of_other in (first, *others):
            enters, slowly = (of_kept * one + of_other * two for one, two in zip(kept, other, strict=True))
            each = max(product, enters, hands_on, (product + enters + hands_on) / cut.slots)
            # As much goes both ways at once as there is of both.
            comes, comes_slowly = c_in[0] + several * enters, c_in[1] + several * slowly
            together = min(comes_slowly, leaves[1])
            exchange = comes + leaves[0] + together * (1 - comes / (comes_slowly or 1) - leaves[0] / (leaves[1] or 1))
            total += count * (k_blocks * each + max(0.0, exchange - several * each))
        return total + max(c_out[0] / self._columns, c_out[0] - min(cut.slots, k_blocks) * each)

    def _product_s(self, rows: int, cols: int, depth: int) -> float:
        """Return what a product takes, which adds to C if there are others."""
        work = self._product.work(rows, cols, depth, self._multiprocessors, True)[0]
        return self._product.seconds(work, self._rate, rows * cols * self._sum if depth < self.k else 0.0, depth)

    def _crossing(self, of: Matrix, rows: int, cols: float, *, outward: bool = False) -> tuple[float, float]:
        """Return what a region of a matrix takes to cross, while nothing goes the other way and while as much does."""
        item, apart = self._items[of], self._problem.ld_of(of)
        size = rows * cols * item
        if self._from_devices[of] > 0:
            return (self._copy_s + size / self._from_devices[of],) * 2
        runs, share = 1.0, 1.0
        if rows < apart:
            runs, share = cols, _native.host_row_share(self._rows[outward], rows * item, apart * item, 0)
        one, alone, both = self._host[outward]
        takes = self._copy_s + runs * self._call_s
        return takes + size / min(one * share, alone), takes + size / min(one * share, both)


def _sent_by(owners: Collection[int], ranks: list[int], machine: Machine) -> float:
    """
    Return at which rate each rank gets what devices send to all others; 0 where there are none.

    On several nodes what each gets of it from another node, which is the slowest part of its way.
    """
    nodes = machine.node_of[ranks]
    here = [rank for rank, node in zip(ranks, nodes.tolist(), strict=True) if node == nodes[0]]
    there = [rank for rank in ranks if rank not in here]
    if there and owners:
        ranks, links = here, [(there[at % len(there)], rank) for at, rank in enumerate(here)]
    else:
        links = [(owner, rank) for owner in owners for rank in ranks if owner != rank]
    rates = fair_rates(links, [float(machine.bandwidth_gb_per_s[link]) for link in links], machine.ports)
    return float(rates.sum()) * 1e9 / len(ranks) if links else math.inf if owners else 0.0


def _candidates(model: _Model, asked: Blocking) -> Iterator[_Sizes]:
    """Return cuts with large blocks for each depth, number of slots and of blocks of C."""
    depths = [asked.block or model.k]
    while not asked.block and depths[-1] > max(model.step, _LEAST_DEPTH):
        depths.append(max(model.step, depths[-1] // 2 // model.step * model.step))
    for slots in (asked.slots,) if asked.slots else _SLOTS:
        for c_slots in (asked.c_slots,) if asked.c_slots else range(1, MOST_C_SLOTS + 1):
            deepest = model.deepest(slots, c_slots) if asked.c_rows and asked.c_cols and not asked.block else []
            for depth in [*depths, *deepest]:
                if (slots - 1) * depth < model.k or asked.slots:
                    yield from _cuts_of(model, asked, (depth, slots, c_slots))


def _cuts_of(model: _Model, asked: Blocking, panels: tuple[int, int, int]) -> Iterator[_Sizes]:
    """Return cuts with the largest blocks that fit, near the shape of `largest`: longer ones and wider ones."""
    rows, cols = model.largest(panels)
    if min(rows, cols) < 1:
        return
    times = _LONGER if panels[0] * panels[1] >= model.k else _LONGER[:1]
    near = [
        [max(1, to(count / one)) for one in times for to in (int, round)]
        for count in (model.rows / rows, model.cols / cols)
    ]
    downs = [-(-model.rows // asked.c_rows)] if asked.c_rows else near[0]
    alongs = [-(-model.cols // asked.c_cols)] if asked.c_cols else near[1]
    counts = [] if asked.c_cols else [(down, model.fewest(panels, down=down)) for down in {*downs}]
    counts += [] if asked.c_rows else [(model.fewest(panels, along=along), along) for along in {*alongs}]
    for down, along in counts or [(downs[0], alongs[0])]:
        if down * along > 1 or (down * along == 1 and (panels[2] == 1 or asked.c_slots)):
            yield _Sizes(down, along, *panels)


def _made(
    model: _Model, how: Blocking, asked: Blocking, cut: _Sizes, fits: Callable[[Blocking], bool]
) -> tuple[_Sizes, Blocking] | None:
    """Return a cut as options, with more blocks if these do not fit by a little: the way that takes less time."""
    for _ in range(_GROWTHS):
        if model.steps(cut) > MAX_STEPS:
            return None
        rows, cols = asked.c_rows or -(-model.rows // cut.down), asked.c_cols or -(-model.cols // cut.along)
        k_blocks = {"block": cut.depth, "first": min(how.first, cut.depth), "slots": cut.slots}
        made = in_rings(changed(how, c_rows=rows, c_cols=cols, c_slots=cut.c_slots, **k_blocks))
        if fits(made):
            return cut, made
        more = [] if asked.c_rows else [dataclasses.replace(cut, down=cut.down + 1 + cut.down // 32)]
        more += [] if asked.c_cols else [dataclasses.replace(cut, along=cut.along + 1 + cut.along // 32)]
        if not more:
            return None
        cut = min(more, key=model.seconds)
    return None
