"""
The order in which `kblocks` fetches and multiplies: k-blocks, blocks of C, and what waits for what.

A rank's part of a product is C += op(A) op(B), with k elements to sum and a block of C. It is cut into k-blocks that
grow from a small first one. So compute starts early, and runs at full rate later. It is cut into column blocks too, so
that C leaves block by block. There are four orders: ``"k"``, ``"k-columns"``, ``"columns"`` and ``"corner"``.
`blocking_of` says what each does.

The steps themselves are made in the core (``csrc/kblocks_steps.cpp``). Ranks that share pieces take the same ones, on
blocks of their own rows and columns.
"""

from __future__ import annotations

from typing import Final

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


def count_blocks(blocks: int) -> int:
    """Return how many blocks the core makes of so many equal ones, the last of several of which it halves."""
    return blocks + HALVINGS if blocks > 1 else blocks


def forms_sums(problem: GemmProblem, splits: int) -> bool:
    """Return whether something is formed apart from products: C beside them, a conversion, or partial sums of k."""
    return problem.reads_c or problem.sums_apart or splits > 1


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
    return _native.KBlocking(
        how,
        order=BLOCK_ORDERS.index(how.order),
        earliest=how.delivery == "earliest",
        tail_parts=how.tail or (COLUMN_TAIL_PARTS if how.order == "k-columns" and how.splits <= 1 else TAIL_PARTS),
        far_apart=far_apart,
        from_held=how.begin == "held",
        returns=how.sweep != "again",
        together=how.barrier == "node",
        at_owner=how.combine == "owner",
    )
