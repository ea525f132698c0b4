"""
How C and k are cut where a rank has not room for all it needs: b×c blocks of C, k-blocks of depth d, slots for them.

A rank forms one block of C after the other. Of A and B it has a few k-blocks at a time, each in a slot; the next ones
arrive while one is multiplied. With room for two blocks of C the next one begins while one leaves. The PaRSEC paper
takes the largest block of C for three quarters of the memory, then the deepest k-blocks (Herault et al., 2019, III-B).
Here the largest blocks that fit are found for each depth and number of slots, and a short formula says which take least
time. A search then tries what is near.

The formula has what decides: products of such blocks, what enters and leaves over each rank's host link, and what of
both nothing hides. Two blocks in a row share rows or columns, so that what is there of these need not enter again.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import Final

from uncut_mpi import _native
from uncut_mpi.model.placement import Matrix
from uncut_mpi.planning.buffers import elements_aligned
from uncut_mpi.planning.kblocks_defaults import in_rings
from uncut_mpi.planning.kblocks_request import DealtPanels
from uncut_mpi.planning.limits import MAX_STEPS
from uncut_mpi.planning.options import MOST_C_SLOTS, Blocking, changed

_SLOTS: Final = (1, 2, 3, 4, 6)
"""Numbers of k-blocks of each matrix that are looked at."""

_TRIED: Final = 12
"""Ways to cut whose panels are looked at, those that take least time first, before the smallest blocks are taken."""

_SHRINK: Final = 0.97
_SHRINKINGS: Final = 24
"""How much smaller blocks are tried, and how often, where alignment takes more than was thought."""


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
    model = _Model(dealt, asked.b_slots)

    def fits(one: Blocking) -> bool:
        taken = _native.KBlocksLayout(dealt.request(one, aligns=False)).rank_bytes
        return all(map(operator.le, taken, room))

    found = [one for one in _candidates(model, how, asked) if model.steps(one) <= MAX_STEPS]
    for one in sorted(found, key=model.seconds)[:_TRIED]:
        made = _made(model, how, asked, one, fits)
        if made is not None:
            return made
    return _smallest(model, how, asked)


def _smallest(model: _Model, how: Blocking, asked: Blocking) -> Blocking:
    """Return the cut that needs the least memory: with one slot, and blocks as small as a schedule may have them."""
    most = int((MAX_STEPS / 2) ** (1 / 3))
    rows, cols, k = (max(model.step, -(-one // most)) for one in (model.rows, model.cols, model.k))
    block = asked.block or k
    edges = {"c_rows": asked.c_rows or rows, "c_cols": asked.c_cols or cols}
    slots = {name: getattr(asked, name) or 1 for name in ("slots", "c_slots", "columns")}
    return in_rings(changed(how, block=block, first=min(how.first, block), **edges, **slots))


@dataclasses.dataclass(frozen=True, slots=True)
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
    on_disk : bool
        Whether matrices lie in files.
    """

    def __init__(self, dealt: DealtPanels, b_slots: int) -> None:
        problem, ranks = dealt.problem, dealt.devices
        placement, machine = dealt.setting.placement, dealt.setting.machine
        (self.rows, self.cols), self.k = dealt.cut.largest, problem.k
        # Ranks that share its columns of B, and its rows of A.
        self._ranks_down, self._ranks_along = dealt.cut.grid
        self.room = min(dealt.setting.room[rank] for rank in ranks)
        self._problem, self._b_slots = problem, b_slots
        self.step = elements_aligned(problem)
        self._in, self._out = (float(rates.min()) * 1e9 for rates in machine.host_rates(ranks, outward=True))
        self._rate = float(machine.typical_gemm_rate(problem.arithmetic)[list(ranks)].min())
        self._shape = machine.gemm_shape.get(problem.arithmetic.name)
        self._multiprocessors = int(machine.multiprocessors[list(ranks)].min())
        self._items, self._sum = tuple(one.itemsize for one in problem.dtypes), problem.accumulator.itemsize
        # What a column of a region takes of the disk besides, which is a run in a file; all ranks take turns there.
        self.on_disk = machine.on_disk
        self._call_s = len(ranks) * machine.disk.call_s if machine.on_disk else 0.0
        # What several ranks need of a matrix in host memory each of them takes a part of.
        self._share_a = 1 / self._ranks_along if placement.in_host(Matrix.A) else 1.0
        self._share_b = 1 / self._ranks_down if placement.in_host(Matrix.B) else 1.0

    def steps(self, cut: _Sizes) -> int:
        """Return how many k-blocks and column blocks a rank takes, in all blocks of C."""
        return cut.down * cut.along * (math.ceil(self.k / cut.depth) + 1)

    def bytes_of_c(self) -> int:
        """Return what an element of a block of C takes."""
        return self._sum + (self._items[Matrix.C] if self._problem.rounds_c else 0)

    def largest(self, depth: int, slots: int, c_slots: int, room: float) -> tuple[float, float]:
        """Return rows and columns of the largest blocks of C that fit: of those whose A and B enter as often."""
        of_c = c_slots * self.bytes_of_c()
        item_a, item_b, _ = self._items
        of_a, of_b = slots * depth * item_a, (self._b_slots or slots) * depth * item_b
        # A enters once for each block's columns, B for its rows: least for blocks of one size with rows over columns
        ratio = self._share_b / self._share_a  # so that both enter as often.
        # of_c·ratio·cols² + (of_a·ratio + of_b)·cols = room
        half = (of_a * ratio + of_b) / (2 * of_c * ratio)
        cols = math.sqrt(half * half + room / (of_c * ratio)) - half
        rows = ratio * cols
        if rows > self.rows:
            rows = self.rows
            cols = (room - of_a * rows) / (of_c * rows + of_b)
        if cols > self.cols:
            cols = self.cols
            rows = min(self.rows, (room - of_b * cols) / (of_c * cols + of_a))
        return rows, cols

    def deepest(self, slots: int, c_slots: int) -> list[int]:
        """Return the depth of the deepest k-blocks beside all of C; none where C does not fit."""
        left = self.room - c_slots * self.bytes_of_c() * self.rows * self.cols
        item_a, item_b, _ = self._items
        each = item_a * slots * self.rows + item_b * (self._b_slots or slots) * self.cols
        depth = int(left / each) // self.step * self.step
        return [] if depth < self.step else [min(depth, self.k)]

    def seconds(self, cut: _Sizes) -> float:
        """Return what a cut takes on the rank with the most to do."""
        item_a, item_b, item_c = self._items
        rows, cols = math.ceil(self.rows / cut.down), math.ceil(self.cols / cut.along)
        k_blocks = math.ceil(self.k / cut.depth)
        blocks = cut.down * cut.along
        one = 2.0 * rows * cols * cut.depth / self._rate
        if self._shape is not None:
            added = (rows * cols * self._sum) if k_blocks > 1 else 0.0
            one = self._shape.seconds(rows, cols, cut.depth, self._multiprocessors, self._rate, added)
        products = blocks * k_blocks * one
        there = min(1.0, cut.slots * cut.depth / self.k)  # of the next block's k-blocks, where it shares them
        keeps_columns = cols * self._ranks_along >= rows * self._ranks_down
        near, far = (cut.down, cut.along) if keeps_columns else (cut.along, cut.down)
        kept_loads, other_loads = far * (near - (near - 1) * there), blocks - (far - 1) * there
        a_loads, b_loads = (other_loads, kept_loads) if keeps_columns else (kept_loads, other_loads)
        of_a, of_b = rows * self.k * item_a * self._share_a, cols * self.k * item_b * self._share_b
        of_c = rows * cols * item_c
        reads_c = self._problem.reads_c
        a_calls = self._share_a * (rows * k_blocks if self._problem.trans_a != "N" else self.k)
        b_calls = self._share_b * (cols * k_blocks if self._problem.trans_b == "N" else self.k)
        calls = a_loads * a_calls + b_loads * b_calls + (blocks * cols if reads_c else 0)
        enters = (a_loads * of_a + b_loads * of_b + (blocks * of_c if reads_c else 0)) / self._in + calls * self._call_s
        leaves = blocks * of_c / self._out + blocks * cols * self._call_s
        first = min(cut.depth, 256) * (rows * self._share_a * item_a + cols * self._share_b * item_b) / self._in
        last = of_c / 4 / self._out
        total = max(products, enters, leaves) if cut.slots > 1 else products + enters
        if cut.c_slots == 1 and blocks > 1:  # the next block's products have to wait for what leaves
            hidden = min(cut.slots, k_blocks) * one
            total += (blocks - 1) * max(0.0, of_c * (1 + reads_c) / self._out - hidden)
        return total + first + last + 1e-5 * blocks * k_blocks


def _candidates(model: _Model, how: Blocking, asked: Blocking) -> Iterator[_Sizes]:
    """Return the cut with the largest blocks for each depth, number of slots and of blocks of C."""
    depths = [min(how.block, model.k)]
    while not asked.block and depths[-1] > model.step:
        depths.append(max(model.step, depths[-1] // 2 // model.step * model.step))
    while not asked.block and model.on_disk and depths[0] < model.k:  # where long runs count
        depths.insert(0, min(2 * depths[0], model.k))
    for slots in (asked.slots,) if asked.slots else _SLOTS:
        for c_slots in (asked.c_slots,) if asked.c_slots else range(1, MOST_C_SLOTS + 1):
            deepest = model.deepest(slots, c_slots) if asked.c_rows and asked.c_cols and not asked.block else []
            for depth in [*depths, *deepest]:
                if (slots - 1) * depth >= model.k and not asked.slots:
                    continue
                cut = _cut_of(model, asked, (depth, slots, c_slots), model.room)
                if cut is not None:
                    yield cut


def _cut_of(model: _Model, asked: Blocking, panels: tuple[int, int, int], room: float) -> _Sizes | None:
    rows, cols = model.largest(*panels, room)
    rows, cols = float(asked.c_rows or rows), float(asked.c_cols or cols)
    if not (rows >= 1 and cols >= 1):
        return None
    down, along = math.ceil(model.rows / rows), math.ceil(model.cols / cols)
    if down * along == 1 and panels[2] > 1 and not asked.c_slots:
        return None
    return _Sizes(down, along, *panels)


def _made(
    model: _Model, how: Blocking, asked: Blocking, cut: _Sizes, fits: Callable[[Blocking], bool]
) -> Blocking | None:
    """Return a cut as options, with smaller blocks if these do not fit by a little."""
    room = float(model.room)
    for _ in range(_SHRINKINGS):
        if model.steps(cut) > MAX_STEPS:
            return None
        edges = {"c_rows": -(-model.rows // cut.down), "c_cols": -(-model.cols // cut.along)}
        edges.update({name: getattr(asked, name) for name in edges if getattr(asked, name)})
        k_blocks = {"block": cut.depth, "first": min(how.first, cut.depth)}
        made = in_rings(changed(how, **k_blocks, **edges, slots=cut.slots, c_slots=cut.c_slots))
        if fits(made):
            return made
        room *= _SHRINK
        smaller = _cut_of(model, asked, (cut.depth, cut.slots, cut.c_slots), room)
        if smaller is None or (asked.c_rows and asked.c_cols):
            return None
        cut = smaller
    return None
