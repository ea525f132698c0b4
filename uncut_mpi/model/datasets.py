"""
The problems on which papers published results: shapes and placements, in the papers' order.

Rank numbers are those of nodes with eight devices.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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


class Case(NamedTuple):
    """
    One problem: C of m×n, k, and where A, B and C live.

    Attributes
    ----------
    m, n, k : int
        Elements.
    placement : str
        As `Placement.parse` reads it.
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
        places = set(self.placement.split(","))
        if places == {"h"}:
            return DATA[0]
        if "h" in places:
            return DATA[3]
        return DATA[1] if len(places) == 1 else DATA[2]


def uncut_regular() -> list[Case]:
    """Return the regular set of the Uncut-GEMMs paper (section IV-A): squares, two placements."""
    return [Case(*shape, placement) for placement in UNCUT_REGULAR_PLACEMENTS for shape in _uncut_squares()]


def uncut_irregular(*, notebooks: bool = False) -> list[Case]:
    """
    Return the irregular set of the Uncut-GEMMs paper (section IV-A): squares, fat-thin, thin-fat, five placements.

    Parameters
    ----------
    notebooks : bool
        Whether to add the squares 3072 and 4096, which the authors' published notebooks have and the paper
        does not name.
    """
    shapes = [(extent, extent, extent) for extent in (3072, 4096)] if notebooks else []
    shapes += _uncut_squares()
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


def _uncut_squares() -> list[tuple[int, int, int]]:
    return [(extent, extent, extent) for extent in (*range(5120, 16385, 1024), *range(20480, 32769, 2048))]
