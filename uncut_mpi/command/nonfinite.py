"""NaN and infinity in input files: which file, how many, where the first is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import blocks, index
from uncut_mpi.model.problem import Order


@dataclasses.dataclass(frozen=True, slots=True)
class NonFinite:
    """
    Elements of an input that are not finite, or of a part of it.

    Attributes
    ----------
    matrix, path : str
        ``"A"``, ``"B"`` or ``"C"``, and its file.
    nan, infinite : int
        How many are NaN, and how many infinite.
    first : tuple of int
        Row and column, from 0, of the first in the order of rows; in the matrix as the file has it.
    """

    matrix: str
    path: str
    nan: int
    infinite: int
    first: tuple[int, int]

    def __str__(self) -> str:
        counts = [f"{count} {name}" for count, name in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        elements = "element" if self.nan + self.infinite == 1 else "elements"
        return (
            f"{self.path} ({self.matrix}) holds {' and '.join(counts)} {elements}, "
            f"the first at row {self.first[0]}, column {self.first[1]} (from 0)"
        )


def find(matrix: str, path: str, values: np.ndarray, order: Order, lines: slice) -> NonFinite | None:
    """
    Return what is not finite in these lines (columns in F order, rows in C order) of a matrix, None if all is.

    Parameters
    ----------
    values : ndarray
        The whole matrix.
    order : {"C", "F"}
        Its storage order.
    """
    part = values[index(order, lines)]
    nan = infinite = 0
    first: tuple[int, int] | None = None
    for rows, cols in blocks(part.shape, order, DType.parse(values.dtype)):
        wrong = ~np.isfinite(part[rows, cols])
        if not wrong.any():
            continue
        of_block = int(np.count_nonzero(np.isnan(part[rows, cols])))
        nan += of_block
        infinite += int(np.count_nonzero(wrong)) - of_block
        row, col = np.argwhere(wrong)[0].tolist()
        # Blocks are whole lines, so only one of their slices has a start.
        if order == "F":
            col += lines.start + cols.start
        else:
            row += lines.start + rows.start
        first = (row, col) if first is None else min(first, (row, col))
    return None if first is None else NonFinite(matrix, path, nan, infinite, first)


def join(parts: Sequence[NonFinite | None]) -> NonFinite | None:
    """Return the finding on a whole matrix from those on its parts."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return dataclasses.replace(
        found[0],
        nan=sum(part.nan for part in found),
        infinite=sum(part.infinite for part in found),
        first=min(part.first for part in found),
    )
