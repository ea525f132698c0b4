"""
The order in which `kblocks` fetches and multiplies: k-blocks, blocks of C, and what waits for what.

A rank's part of a product, C += op(A) op(B) with k elements to sum and a block of C, is cut
into k-blocks that grow from a small first one (compute starts early, and runs at full rate later) and
into column blocks (C leaves block by block). Three orders:

``"k"``
    Each k-block updates all columns. The k-blocks within the last quarter of k are done column block by column
    block, so that results leave while others are computed; the last of them is halved a few times, so that little
    is left to send at the end, and the others are large, as products run best.
``"columns"``
    The first column block is done k-block by k-block, as A arrives; then each other block at once,
    as its columns of B arrive; the last of them is halved a few times, so that little is left to do when the
    last bytes are there. C enters and leaves throughout: for host memory, which is shared by both directions. Where
    k-blocks of B are rows far apart in host memory (`whole`), all k of a block's columns is fetched at once.
``"corner"``
    There are row blocks too. The block in the first corner is done k-block by k-block; then, as each column block of B
    or row block of A arrives, all that it makes with what is there of the other, at once. Work grows as the square of
    what has arrived, and sums of parts of k are formed in the first block alone: reading and writing them makes a
    product of a half type a fifth to three fifths longer (``docs/performance.md``, 2026-11-23).
"""

from __future__ import annotations

import enum
import functools
import itertools
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import block_starts

TAIL_PARTS: Final = 4
"""The last 1/TAIL_PARTS of k is done column block by column block in the order ``"k"``."""

HALVINGS: Final = 2
"""How often the last of several column blocks is halved."""

LOOKAHEAD: Final = 2
"""Products for which fetches are issued before a product is: issuing one takes as long as six copies."""


class Step(enum.IntEnum):
    """What a step of a blocking does."""

    FETCH_A = 0
    FETCH_B = 1
    FETCH_C = 2
    MULTIPLY = 3
    FINISH = 4


class Move(NamedTuple):
    """
    One step, on the same blocks in every rank.

    Attributes
    ----------
    step : Step
        What to do: fetch a piece of op(A), of op(B), of C; multiply; hand finished columns on.
    k_start, k_stop : int
        Which part of the rank's k (elements); of no meaning for C and FINISH.
    first, last : int
        Column blocks from `first` up to, not including, `last`.
    top, bottom : int
        Row blocks from `top` up to, not including, `bottom`; of no meaning for FETCH_B.
    early : bool
        Whether this block of C is fetched before its products, so that they can be added to it.
    """

    step: Step
    k_start: int
    k_stop: int
    first: int
    last: int
    top: int = 0
    bottom: int = 1
    early: bool = False

    @property
    def size(self) -> int:
        """How many blocks of C it is about."""
        return (self.last - self.first) * (self.bottom - self.top)

    def meets(self, other: Move) -> bool:
        """Return whether there is a block of C that both are about."""
        across = self.first < other.last and other.first < self.last
        return across and self.top < other.bottom and other.top < self.bottom


class Steps(tuple[Move, ...]):
    """The steps of one rank, all of which are about one extent of k, and what follows from them alone."""

    @functools.cached_property
    def extent(self) -> int:
        """Elements of k."""
        return max((one.k_stop for one in self), default=0)

    @functools.cached_property
    def blocks(self) -> tuple[Move, ...]:
        """The blocks of C in which it is handed on, by the steps that do so."""
        return tuple(one for one in self if one.step == Step.FINISH)

    @functools.cached_property
    def num_blocks(self) -> int:
        """Into how many row and column blocks C is cut."""
        return sum(one.size for one in self.blocks)

    @functools.cached_property
    def products(self) -> tuple[Move, ...]:
        """The products."""
        return tuple(one for one in self if one.step == Step.MULTIPLY)

    @functools.cached_property
    def multiplies_at_once(self) -> bool:
        """Whether each product has all of k."""
        return all(one.k_stop - one.k_start == self.extent for one in self.products)

    @functools.cached_property
    def in_parts(self) -> frozenset[tuple[int, int]]:
        """The blocks of C, as `DirectBlocks` has them, of which no product has all of k."""
        parts = [one for one in self.products if one.k_stop - one.k_start < self.extent]
        return frozenset((one.top, one.first) for one in self.blocks if any(one.meets(part) for part in parts))

    @functools.cached_property
    def table(self) -> np.ndarray:
        """(step, k_start, k_stop, first, last, top, bottom) of each, int64."""
        return np.array([one[:7] for one in self], np.int64).reshape(-1, 7)

    @functools.cached_property
    def _direct(self) -> dict[tuple[bool, bool, int], DirectBlocks]:
        return {}

    def direct(self, *, half: bool, reads_c: bool, first: int) -> DirectBlocks:
        """
        Return the blocks of C that can be formed directly where it is not: C is added to, and sent as it is.

        Parameters
        ----------
        half : bool
            Whether the type is rounded: all of k has to be in one product then.
        reads_c : bool
            Whether there is a C to add to, which has to be there early enough.
        first : int
            Column blocks before it are summed elsewhere.
        """
        key = (half, reads_c, first)
        if key not in self._direct:
            with_c = {(one.top, one.first) for one in self.blocks if one.early and one.first >= first}
            every = {(one.top, one.first) for one in self.blocks}
            found = (with_c if reads_c else every) - self.in_parts if half else with_c if reads_c else set()
            self._direct[key] = DirectBlocks(self, frozenset(found))
        return self._direct[key]

    @functools.cached_property
    def direct_at_home(self) -> DirectBlocks:
        """The blocks of a C in a half type that can be formed directly where it is."""
        return DirectBlocks(self, frozenset((one.top, one.first) for one in self.blocks) - self.in_parts)


class DirectBlocks:
    """
    Blocks of C that need no sums apart from the products.

    Attributes
    ----------
    blocks : frozenset of (int, int)
        First row block and first column block of each.
    apart : tuple of (int, int)
        Up to which row block and which column block there are others, 0 for none.
    first : int
        Their first column block.
    marks : ndarray of int64
        Of each step whether it is about such a block, 1 or 0.
    """

    def __init__(self, steps: Steps, blocks: frozenset[tuple[int, int]]) -> None:
        self.blocks = blocks
        self.first = min((first for _, first in blocks), default=0)
        others = [one for one in steps.blocks if (one.top, one.first) not in blocks]
        self.apart = (max((one.bottom for one in others), default=0), max((one.last for one in others), default=0))
        self.marks = np.array([(one.top, one.first) in blocks for one in steps], np.int64)


def k_blocks(extent: int, first: int, most: int, growth: int = 2) -> list[tuple[int, int]]:
    """
    Return blocks of k: each ends `growth` times as far as the one before it, and has `most` elements at most.

    With 2 the first comes twice, then each is twice as long as the one before it.

    A last block shorter than half its predecessor is joined to that.

    Parameters
    ----------
    extent : int
        Elements of k.
    first, most : int
        Elements of the first block and of the largest; at least 1.
    growth : int
        At least 2. What a product takes of time brings more than the next block where arithmetic is the limit: fewer,
        larger products then read and write C less often.
    """
    most = max(1, min(most, extent))
    size = min(first, most)
    stops = [0]
    while stops[-1] < extent:
        stops.append(min(extent, stops[-1] + size))
        size = min(most, (growth - 1) * stops[-1])
    if len(stops) > 2 and 2 * (stops[-1] - stops[-2]) < stops[-2] - stops[-3]:
        del stops[-2]
    return list(itertools.pairwise(stops))


@functools.lru_cache(maxsize=4096)
def block_edges(extent: int, blocks: int, step: int) -> tuple[int, ...]:
    """
    Return where column blocks or row blocks start, and `extent` at the end.

    Parameters
    ----------
    extent : int
        Columns or rows.
    blocks : int
        How many equal blocks there are, the last of which is halved `HALVINGS` times if there are several.
    step : int
        Blocks start at multiples of it where that leaves none empty.
    """
    units = extent // step
    if units < count_blocks(blocks):
        step, units = 1, extent
    starts = block_starts(units, blocks)
    if blocks > 1:
        for _ in range(HALVINGS):
            starts.insert(-1, starts[-2] + (starts[-1] - starts[-2] + 1) // 2)
    return (*(step * start for start in starts[:-1]), extent)


def count_blocks(blocks: int) -> int:
    """Return how many blocks `block_edges` makes of `blocks`."""
    return blocks + HALVINGS if blocks > 1 else blocks


def forms_sums(problem: GemmProblem, splits: int) -> bool:
    """Return whether something is formed apart from products: C beside them, a conversion, or partial sums of k."""
    return problem.reads_c or problem.dtype.is_half or splits > 1


@functools.lru_cache(maxsize=512)  # a search asks for the same ones on many grids
def moves(
    extent: int, *, first: int, most: int, blocks: int, order: str, whole: bool, growth: int = 2, rows: int = 1
) -> Steps:
    """
    Return the steps of one rank in the order in which they are issued.

    Ranks that share pieces take the same steps, on blocks of their own rows and columns.

    Parameters
    ----------
    extent : int
        Elements of k that the rank sums.
    first, most, growth : int
        As for `k_blocks`.
    blocks : int
        Column blocks, as for `block_edges`, at least 1.
    order : str
        ``"k"``, ``"columns"`` or ``"corner"``.
    whole : bool
        Whether the other orders than ``"k"`` fetch all k of B's columns at once.
    rows : int
        Row blocks, as for `block_edges`; 1 but in the order ``"corner"``.
    """
    ramp = k_blocks(extent, first, most, growth)
    if order == "k":
        fetches, work = _by_k(ramp, extent, count_blocks(blocks))
    elif order == "columns":
        fetches, work = _by_columns(ramp, extent, most, blocks, whole)
    else:
        fetches, work = _from_corner(ramp, extent, count_blocks(rows), count_blocks(blocks), whole)
    merged: list[Move] = []
    issued = 0
    for at, (need, move) in enumerate(work):
        ahead = max([need, *(later for later, _ in work[at : at + LOOKAHEAD + 1])])
        merged += fetches[issued:ahead]
        issued = max(issued, ahead)
        merged.append(move)
    return Steps(merged)


_Work = list[tuple[int, Move]]  # how many fetches a step needs, and the step


def _by_k(ramp: list[tuple[int, int]], extent: int, blocks: int) -> tuple[list[Move], _Work]:
    fetches: list[Move] = []
    work: _Work = []
    tail = len(ramp)
    while blocks > 1 and tail > 0 and (extent - ramp[tail - 1][0]) * TAIL_PARTS <= extent:
        tail -= 1
    if blocks > 1 and tail == len(ramp):
        tail -= 1
    for start, stop in ramp:
        fetches += [Move(Step.FETCH_A, start, stop, 0, blocks), Move(Step.FETCH_B, start, stop, 0, blocks)]
    if len(ramp) == 1:
        tail = 0
    early = tail == 0  # no product begins before all of A and B is there
    fetches += [Move(Step.FETCH_C, 0, extent, at, at + 1, early=early) for at in range(blocks)]
    for at, (start, stop) in enumerate(ramp[:tail]):
        work.append((2 * at + 2, Move(Step.MULTIPLY, start, stop, 0, blocks)))
    for at in range(blocks):
        with_c = 2 * len(ramp) + at + 1
        if tail < len(ramp):
            needed = with_c if early else 2 * len(ramp)
            work.append((needed, Move(Step.MULTIPLY, ramp[tail][0], extent, at, at + 1, early=early)))
        work.append((with_c, Move(Step.FINISH, 0, extent, at, at + 1, early=early)))
    return fetches, work


def _by_columns(
    ramp: list[tuple[int, int]], extent: int, most: int, blocks: int, whole: bool
) -> tuple[list[Move], _Work]:
    fetches: list[Move] = []
    work: _Work = []
    if whole:
        fetches.append(Move(Step.FETCH_B, 0, extent, 0, 1))
    for start, stop in ramp:
        fetches.append(Move(Step.FETCH_A, start, stop, 0, 0))
        if not whole:
            fetches.append(Move(Step.FETCH_B, start, stop, 0, 1))
        work.append((len(fetches), Move(Step.MULTIPLY, start, stop, 0, 1)))
    fetches.append(Move(Step.FETCH_C, 0, extent, 0, 1))
    work.append((len(fetches), Move(Step.FINISH, 0, extent, 0, 1)))
    for at in range(1, count_blocks(blocks)):
        fetches.append(Move(Step.FETCH_C, 0, extent, at, at + 1, early=True))
        for start, stop in [(0, extent)] if whole or at < blocks else k_blocks(extent, most, most):
            fetches.append(Move(Step.FETCH_B, start, stop, at, at + 1))
            work.append((len(fetches), Move(Step.MULTIPLY, start, stop, at, at + 1, early=True)))
        work.append((len(fetches), Move(Step.FINISH, 0, extent, at, at + 1, early=True)))
    return fetches, work


def _from_corner(
    ramp: list[tuple[int, int]], extent: int, rows: int, columns: int, whole: bool
) -> tuple[list[Move], _Work]:
    fetches: list[Move] = []
    work: _Work = []
    early = len(ramp) == 1
    c = Move(Step.FETCH_C, 0, extent, 0, 1, early=early)
    if whole:
        fetches.append(Move(Step.FETCH_B, 0, extent, 0, 1))
    if early:
        fetches.append(c)
    for start, stop in ramp:
        fetches.append(Move(Step.FETCH_A, start, stop, 0, 0))
        if not whole:
            fetches.append(Move(Step.FETCH_B, start, stop, 0, 1))
        work.append((len(fetches), Move(Step.MULTIPLY, start, stop, 0, 1, early=early)))
    if not early:
        fetches.append(c)
    work.append((len(fetches), c._replace(step=Step.FINISH)))
    right, bottom = 1, 1  # what is there of B and A
    while right < columns or bottom < rows:
        # Whichever has less of its blocks there.
        if bottom == rows or (right < columns and right * rows <= bottom * columns):
            grown = Move(Step.FETCH_C, 0, extent, right, right + 1, 0, bottom, early=True)
            fetches += [grown, Move(Step.FETCH_B, 0, extent, right, right + 1)]
            right += 1
        else:
            grown = Move(Step.FETCH_C, 0, extent, 0, right, bottom, bottom + 1, early=True)
            fetches += [grown, Move(Step.FETCH_A, 0, extent, 0, 0, bottom, bottom + 1)]
            bottom += 1
        work += [(len(fetches), grown._replace(step=step)) for step in (Step.MULTIPLY, Step.FINISH)]
    return fetches, work
