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
    Elements of an input that are not finite: how many, and row and column (from 0) of the first in the order of rows.

    `matrix` is ``"A"``, ``"B"`` or ``"C"``, and `path` its file.
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
    """Return what is not finite in these lines (columns in F order, rows in C order) of a whole matrix, or None."""
    part = values[index(order, lines)]
    found = []
    for rows, cols in blocks(part.shape, order, DType.parse(values.dtype)):
        block = np.asarray(part[rows, cols])
        wrong = np.argwhere(~np.isfinite(block))
        if wrong.size:
            nan = int(np.count_nonzero(np.isnan(block)))
            # Blocks are whole lines, so only one of their slices has a start.
            start = (0, lines.start + cols.start) if order == "F" else (lines.start + rows.start, 0)
            row, col = (wrong[0] + start).tolist()
            found.append(NonFinite(matrix, path, nan, len(wrong) - nan, (row, col)))
    return join(found)


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
