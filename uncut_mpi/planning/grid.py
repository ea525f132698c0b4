"""Process grids: which rank computes which block of C."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import there_are


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessGrid:
    """
    A grid of ranks, numbered row by row: the r-th of those that compute stands at (r // cols, r % cols).

    Where a problem's C is the transpose of the caller's (`GemmProblem.swapped`), its grid is the transpose of the
    caller's grid. It is numbered column by column, so that ranks fill the caller's row by row.

    Grid row I holds a contiguous block of the rows of C, grid column J a contiguous block of its
    columns. Ranks of a grid row need the same rows of op(A), ranks of a grid column the same columns
    of op(B). Ranks beyond the grid compute nothing, but may own matrices.

    Attributes
    ----------
    rows, cols : int
        Blocks of rows and of columns.
    transposed : bool
        Whether it is the transpose of the caller's.
    """

    rows: int
    cols: int
    transposed: bool = False

    @classmethod
    def most_square(cls, num_ranks: int, *, transposed: bool = False) -> ProcessGrid:
        """Return the factor pair of `num_ranks` nearest to a square, rows ≤ cols: 8 → 2×4, primes 1×G."""
        rows = next(rows for rows in range(math.isqrt(num_ranks), 0, -1) if num_ranks % rows == 0)
        return cls(rows, num_ranks // rows, transposed)

    @classmethod
    def choose(cls, num_ranks: int, asked: tuple[int, int] | None, *, transposed: bool = False) -> ProcessGrid:
        """
        Return the grid asked for, or the most square one.

        Raises
        ------
        ParamError
            If the grid asked for has more places than there are ranks to fill it.
        """
        if asked is None:
            return cls.most_square(num_ranks, transposed=transposed)
        grid = cls(*asked, transposed)
        if grid.size > num_ranks:
            raise ParamError(
                f"grid {grid} has {grid.size} places, but {there_are(num_ranks, 'rank')} to compute: "
                "ask for a smaller grid or use more ranks"
            )
        return grid

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return self.rows * self.cols

    def position(self, rank: int) -> tuple[int, int]:
        """Return (grid row, grid column) of a rank in the grid."""
        if self.transposed:
            return rank % self.rows, rank // self.rows
        return divmod(rank, self.cols)

    def rank(self, row: int, col: int) -> int:
        """Return the rank at (row, col)."""
        return col * self.rows + row if self.transposed else row * self.cols + col

    def check_shares(self, row_shares: Sequence[float] | None, col_shares: Sequence[float] | None) -> None:
        """Raise `ParamError` if there are shares, but not one for each grid row, or each grid column."""
        for what, blocks, shares in (("row", self.rows, row_shares), ("col", self.cols, col_shares)):
            if shares is not None and len(shares) != blocks:
                said = {"row": "col", "col": "row"}[what] if self.transposed else what
                raise ParamError(
                    f"{len(shares)} {said}_shares were given, grid {self} has {blocks} {said}s: name one for each"
                )

    def __str__(self) -> str:
        """Return the caller's grid as ``RxC``."""
        return f"{self.cols}x{self.rows}" if self.transposed else f"{self.rows}x{self.cols}"


def block_starts(extent: int, blocks: int) -> list[int]:
    """
    Return where `blocks` contiguous blocks of `extent` elements start, and `extent` at the end.

    Sizes differ by at most one, larger blocks first; blocks may be empty.
    """
    size, remainder = divmod(extent, blocks)
    return [index * size + min(index, remainder) for index in range(blocks + 1)]


def counted_starts(extent: int, shares: Sequence[float]) -> list[int] | None:
    """Return where blocks start whose sizes are the shares, and `extent` at the end; None if they are no sizes."""
    if math.fsum(shares) != extent or not all(float(share).is_integer() for share in shares):
        return None
    return [*itertools.accumulate(map(int, shares), initial=0)]


def share_starts(extent: int, shares: Sequence[float], step: int) -> list[int]:
    """
    Return where contiguous blocks proportional to `shares` start, and `extent` at the end.

    Every block gets its due, extent × share / sum of shares, rounded down to whole steps. The steps that are left go
    one each to the blocks that then exceed their due by the least part of it, the first of equal ones. So the last to
    finish is not far behind. The last block ends with the matrix. Where a block is due less than one step, blocks end
    at any element.

    Parameters
    ----------
    extent : int
        Elements to divide.
    shares : sequence of float
        One positive number per block.
    step : int
        Elements of which block edges are multiples.
    """
    total = math.fsum(shares)
    if extent * min(shares) < step * total:
        step = 1
    units = extent // step
    dues = [extent / step * (share / total) for share in shares]  # of the whole extent, its odd end included
    blocks = [math.floor(due) for due in dues]
    left = units - sum(blocks)
    if left:
        by_excess = sorted(range(len(dues)), key=lambda index: ((blocks[index] + 1) / dues[index], index))
        for index in by_excess[:left]:
            blocks[index] += 1
    starts = [0, *(step * units_before for units_before in itertools.accumulate(blocks))]
    starts[-1] = extent
    return starts


def grids(num_ranks: int, *, split_k: bool = True) -> list[tuple[int, int, int]]:
    """Return all (r, c, s) with r·c·s = `num_ranks`: least s first, then the most square, then the least r."""
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    found = [
        (rows, cols, num_ranks // rows // cols)
        for rows, cols in itertools.product(divisors, divisors)
        if num_ranks % (rows * cols) == 0
    ]
    return sorted(
        (grid for grid in found if split_k or grid[2] == 1),
        key=lambda grid: (grid[2], abs(grid[0] - grid[1]), grid[0]),
    )
