"""
The order in which `kblocks` fetches and multiplies: k-blocks, blocks of C, and what waits for what.

A rank's part of a product is C += op(A) op(B), with k elements to sum and a block of C. It is cut into k-blocks that
grow from a small first one. So compute starts early, and runs at full rate later. It is cut into column blocks too, so
that C leaves block by block. There are four orders: ``"k"``, ``"k-columns"``, ``"columns"`` and ``"corner"``.
`steps_of` says what each does.

The steps themselves are made in the core (``csrc/kblocks_steps.cpp``), once for every schedule that a search tries.
"""

from __future__ import annotations

import enum
import functools
from typing import Final, NamedTuple

from uncut_mpi import _native
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import BLOCK_ORDERS, Blocking

TAIL_PARTS: Final = 4
"""The last 1/TAIL_PARTS of k is done column block by column block in the order ``"k"``, if `Blocking.tail` is 0."""

COLUMN_TAIL_PARTS: Final = 2
"""
The last 1/COLUMN_TAIL_PARTS of k is done so in the order ``"k-columns"``, unless ranks share k: then sums of all of C
follow, and a quarter is better
(``docs/performance.md``, 2026-11-24, 21 h).
"""

HALVINGS: Final = 2
"""How often the last of several column blocks is halved."""


_MOST_KEPT: Final = 1024
"""Steps of more k-blocks are too large to be kept."""


class StepKind(enum.IntEnum):
    """What a step does."""

    FETCH_A = 0
    FETCH_B = 1
    FETCH_C = 2
    MULTIPLY = 3
    FINISH = 4


class Step(NamedTuple):
    """
    One step, on the same blocks in every rank.

    Attributes
    ----------
    kind : StepKind
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

    kind: StepKind
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


class Steps(tuple[Step, ...]):
    """The steps of one rank, all of which are about one extent of k, and what follows from them alone."""

    @functools.cached_property
    def extent(self) -> int:
        """Elements of k."""
        return max((one.k_stop for one in self), default=0)

    @functools.cached_property
    def blocks(self) -> tuple[Step, ...]:
        """The blocks of C in which it is handed on, by the steps that do so."""
        return tuple(one for one in self if one.kind == StepKind.FINISH)

    @functools.cached_property
    def num_blocks(self) -> int:
        """Into how many row and column blocks C is cut."""
        return sum(one.size for one in self.blocks)

    @functools.cached_property
    def products(self) -> tuple[Step, ...]:
        """The products."""
        return tuple(one for one in self if one.kind == StepKind.MULTIPLY)

    @functools.cached_property
    def multiplies_at_once(self) -> bool:
        """Whether each product has all of k."""
        return all(one.k_stop - one.k_start == self.extent for one in self.products)


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

    Notes
    -----
    They start at multiples of 256 elements, which a library's kernels compute at a time, if equal blocks have four
    times as many. Else at multiples of 128, and so on. Calls with other blocks took 1 to 23 % longer
    (``docs/performance.md``, 2026-11-26, blocks at multiples of 256).
    """
    return tuple(_native.block_edges(extent, blocks, step))


def count_blocks(blocks: int) -> int:
    """Return how many blocks `block_edges` makes of `blocks`."""
    return blocks + HALVINGS if blocks > 1 else blocks


def forms_sums(problem: GemmProblem, splits: int) -> bool:
    """Return whether something is formed apart from products: C beside them, a conversion, or partial sums of k."""
    return problem.reads_c or problem.rounds_c or splits > 1


def blocking_of(how: Blocking, *, far_apart: bool) -> _native.KBlocking:
    """
    Return how the core cuts a rank's part of a product.

    Parameters
    ----------
    how : Blocking
        With everything set.
    far_apart : bool
        Whether k-blocks of B are rows far apart in host memory. The largest k-blocks then end at multiples of their
        length, and the orders ``"columns"`` and ``"corner"`` fetch all k of B's columns at once.
    """
    return _native.KBlocking(
        how,
        order=BLOCK_ORDERS.index(how.order),
        earliest=how.delivery == "earliest",
        tail_parts=how.tail or (COLUMN_TAIL_PARTS if how.order == "k-columns" and how.splits <= 1 else TAIL_PARTS),
        far_apart=far_apart,
        from_held=how.begin == "held",
        returns=how.sweep != "again",
    )


def count_k_blocks(extent: int, how: Blocking) -> int:
    """Return how many k-blocks there are of `extent` elements of k, give or take one, without making them."""
    return blocking_of(how, far_apart=False).count_k_blocks(extent)


def steps_of(extent: int, how: Blocking, *, far_apart: bool) -> Steps:
    """
    Return the steps of one rank in the order in which they are issued, as the core makes them.

    Ranks that share pieces take the same steps, on blocks of their own rows and columns.

    Parameters
    ----------
    extent : int
        Elements of k that the rank sums.
    how, far_apart
        As for `blocking_of`.

    Notes
    -----
    ``"k"``
        Each k-block updates all columns. The k-blocks within the last quarter of k (`Blocking.tail`) are done column
        block by column block, so that results leave while others are computed. The last column block is halved a few
        times, so that little is left to send at the end. The others are large, as products run best.
    ``"k-columns"``
        The same with the last half of k (a quarter where ranks share k; `Blocking.tail`). Of that A's part arrives in
        one piece and B's column block by column block, so that a product waits for its own columns only. Whole k-blocks
        count; where there is no other k-block it is ``"k"``.
    ``"columns"``
        The first column block is done k-block by k-block, as A arrives. Then each other block is done at once, as its
        columns of B arrive. The last of them is halved a few times, so that little is left to do when the last bytes
        are there. C enters and leaves throughout: for host memory, which is shared by both directions. Where k-blocks
        of B are rows far apart in host memory (`far_apart`), all k of a block's columns is fetched at once.
    ``"corner"``
        There are row blocks too. The first block of both is done k-block by k-block. Then, as each column block of B or
        row block of A arrives, all that it makes with what is there of the other is done at once. Work grows as the
        square of what has arrived. Sums of parts of k are formed in the first block alone. To read and write them makes
        a product of a half type a fifth to three fifths longer (``docs/performance.md``, 2026-11-23).
    """
    many = count_k_blocks(extent, how) > _MOST_KEPT
    return (_made.__wrapped__ if many else _made)(extent, how, far_apart=far_apart)


@functools.lru_cache(maxsize=512)  # a search asks for the same ones on many grids
def _made(extent: int, how: Blocking, *, far_apart: bool) -> Steps:
    made = blocking_of(how, far_apart=far_apart).steps(extent)
    kinds = {int(kind): kind for kind in StepKind}  # a schedule may have half a million steps
    return Steps(Step(kinds[one[0]], *one[1:]) for one in made)
