"""
The problems on which papers published results, in their order, and products of matrices that are dealt to ranks.

Rank numbers are those of nodes with eight devices. Words for dealt matrices hold for any number of ranks.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final, NamedTuple

from uncut_mpi.model.layout import Layout, even_counts

UNCUT_REGULAR_PLACEMENTS: Final = ("h,h,h", "0,0,0")
UNCUT_PLACEMENTS: Final = (*UNCUT_REGULAR_PLACEMENTS, "4,2,h", "h,h,0", "4,2,7")
PARALIA_PLACEMENTS: Final = (
    "h,h,h",
    "0,0,h",
    "4,2,h",
    "h,h,0",
    "h,0,5",
    "0,0,0",
    "0,1,2",
    "0,3,6",
    "4,2,5",
    "1,6,7",
)


SHAPES: Final = ("square", "fat-thin", "thin-fat")
DATA: Final = ("host", "one-device", "devices", "mixed")
"""All in host memory, all on one device, on several devices, or in both kinds of memory."""

DEALT: Final = ("whole", "slabs", "blocks", "cyclic", "uneven", "orders")
"""
How matrices are dealt: not at all, in rows or columns, in blocks, block-cyclically, unevenly, stored in both orders.

What is several of these counts as the last of them.
"""

ALIKE: Final = ("rows", "cols", "blocks", "cyclic:64", "cyclic:256", "cyclic:1024")
OTHERWISE: Final = (
    *("rows,cols,rows", "rows@C,cols,rows", "cols@C,rows,cols", "cyclic:256:64,cyclic:256,cyclic:256"),
    *("cyclic:256,rows,cols", "uneven-rows,uneven-rows,uneven-rows", "rows,rows@host,rows", "rows,rows@C,rows"),
)
LAYOUT_SHAPES: Final = (
    *((extent, extent, extent) for extent in (4096, 8192, 16384)),
    *((4096, 4096, 65536), (24576, 24576, 2048)),
)


class Case(NamedTuple):
    """
    One problem: C of m×n, k, and where A, B and C live.

    Attributes
    ----------
    m, n, k : int
        Elements.
    placement : str
        As `Placement.parse` reads it; or, of matrices that are dealt to ranks, of words that `places` completes.
    """

    m: int
    n: int
    k: int
    placement: str

    @property
    def shape(self) -> str:
        """One of `SHAPES`: ``"square"``, ``"fat-thin"`` (k is below the larger of m and n) or ``"thin-fat"``."""
        edge = max(self.m, self.n)
        if self.m == self.n == self.k:
            return SHAPES[0]
        return SHAPES[1] if self.k < edge else SHAPES[2]

    @property
    def data(self) -> str:
        """Where the matrices are, one of `DATA`."""
        places = self.placement.split(",")
        on_host = {place == "h" or "@host" in place for place in places}
        if on_host == {True}:
            return DATA[0]
        if True in on_host:
            return DATA[3]
        return DATA[1] if len(set(places)) == 1 and self.dealt == DEALT[0] else DATA[2]

    @property
    def dealt(self) -> str:
        """How the matrices are dealt, one of `DEALT`."""
        marks = dict(zip(DEALT[1:], ("rows|cols", "blocks", "cyclic", "uneven", "@C"), strict=True))
        return next((name for name in reversed(DEALT[1:]) if re.search(marks[name], self.placement)), DEALT[0])

    def places(self, num_ranks: int) -> str:
        """
        Return the placement for so many ranks, as `Places.parse` reads it.

        ``blocks`` and ``cyclic:MB:NB`` (or ``cyclic:NB``) get the most square grid, ``uneven-rows`` and ``uneven-cols``
        as many shares for each rank as its number, counted from 1.
        """
        shapes = ((self.m, self.k), (self.k, self.n), (self.m, self.n))
        return ",".join(
            _completed(word, shape, num_ranks) for word, shape in zip(self.placement.split(","), shapes, strict=True)
        )


def uncut_regular() -> list[Case]:
    """Return the regular set of the Uncut-GEMMs paper (section IV-A): squares, two placements."""
    return [Case(*shape, placement) for placement in UNCUT_REGULAR_PLACEMENTS for shape in _uncut_squares()]


def uncut_irregular() -> list[Case]:
    """Return the irregular set of the Uncut-GEMMs paper (section IV-A): three kinds of shapes, five placements."""
    shapes = _uncut_squares()
    shapes += [(edge, edge, edge // ratio) for edge in range(16384, 40961, 4096) for ratio in (4, 8, 16)]
    shapes += [(edge, edge, edge * ratio) for edge in range(5120, 11265, 1024) for ratio in (4, 8, 16)]
    return [Case(*shape, placement) for placement in UNCUT_PLACEMENTS for shape in shapes]


def paralia() -> list[Case]:
    """
    Return the 630 problems of the PARALiA paper (section 4.2).

    The squares' step is 1024, as in the authors' scripts; the text prints 4.
    """
    shapes = [(extent, extent, extent) for extent in range(2048, 22529, 1024)]
    shapes += [(edge, edge, edge // ratio) for edge in range(8192, 32769, 4096) for ratio in (2, 8, 32)]
    shapes += [(depth // ratio, depth // ratio, depth) for depth in range(12288, 36865, 4096) for ratio in (2, 8, 32)]
    return [Case(*shape, placement) for placement in PARALIA_PLACEMENTS for shape in shapes]


def layouts() -> list[Case]:
    """
    Return products of matrices that are dealt to ranks, and the two products of a transformer's MLP.

    The latter gather A while they multiply (8192 tokens by their features, weights dealt in columns), and add up C as
    rows of it (weights dealt in rows).
    """
    placements = [f"{word},{word},{word}" for word in ALIKE]
    cases = [Case(*shape, placement) for placement in (*placements, *OTHERWISE) for shape in LAYOUT_SHAPES]
    return [*cases, Case(8192, 28672, 8192, "rows,cols,cols"), Case(8192, 8192, 28672, "cols,rows,rows")]


def parsec() -> list[Case]:
    """
    Return squares in host memory as in the PaRSEC paper (section V), up to the largest that a node holds.

    Three matrices of order 145,000 fit its nodes of 512 GB (section III-A). Its Fig. 2 sweeps tiles at 70,000.
    """
    return [Case(edge, edge, edge, "h,h,h") for edge in range(10_000, 140_001, 10_000)]


def _completed(word: str, shape: tuple[int, int], num_ranks: int) -> str:
    kind, mark, how = word.partition("@")
    down = next(rows for rows in range(math.isqrt(num_ranks), 0, -1) if num_ranks % rows == 0)
    grid = down, num_ranks // down
    name, *numbers = kind.split(":")
    if name == "blocks":
        kind = str(Layout.blocks(*(even_counts(extent, parts) for extent, parts in zip(shape, grid, strict=True))))
    elif name == "cyclic":
        mb, nb = int(numbers[0]), int(numbers[-1])
        kind = str(Layout.block_cyclic(mb, nb, grid))
    elif name in ("uneven-rows", "uneven-cols"):
        extent = shape[name == "uneven-cols"]
        starts = [extent * rank * (rank + 1) // (num_ranks * (num_ranks + 1)) for rank in range(num_ranks + 1)]
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        kind = str((Layout.rows if name == "uneven-rows" else Layout.cols)(counts))
    return f"{kind}{mark}{how}"


def _uncut_squares() -> list[tuple[int, int, int]]:
    return [(extent, extent, extent) for extent in (*range(5120, 16385, 1024), *range(20480, 32769, 2048))]
