"""
Extents that are dealt to processes in cyclic blocks, as ScaLAPACK deals rows and columns.

Block b goes to process (source + b) mod P, which has its blocks one behind the other. Indices count from 0 here, those
of ScaLAPACK's tools of the same names from 1.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

NUMBERS: Final = re.compile(r"[0-9]{1,18}(?:,[0-9]{1,18})*")
"""Whole numbers in a word; Python reads none of some thousand digits."""


def numroc(n: int, nb: int, iproc: int, isrcproc: int, nprocs: int) -> int:
    """Return how many of `n` rows or columns, dealt in blocks of `nb`, a process has (ScaLAPACK's NUMROC)."""
    blocks, rest = divmod(n, nb)
    each, more = divmod(blocks, nprocs)
    distance = (iproc - isrcproc) % nprocs
    return each * nb + (nb if distance < more else rest if distance == more else 0)


def indxg2p(indxglob: int, nb: int, isrcproc: int, nprocs: int) -> int:
    """Return the process that has a row or column (ScaLAPACK's INDXG2P, from 0)."""
    return (isrcproc + indxglob // nb) % nprocs


def indxg2l(indxglob: int, nb: int, nprocs: int) -> int:
    """Return where the process that has a row or column has it (ScaLAPACK's INDXG2L, from 0)."""
    return nb * (indxglob // (nb * nprocs)) + indxglob % nb


def indxl2g(indxloc: Any, nb: int, iproc: Any, isrcproc: int, nprocs: int) -> Any:
    """Return which row or column of all a process has at some place (ScaLAPACK's INDXL2G, from 0)."""
    return nprocs * nb * (indxloc // nb) + indxloc % nb + (iproc - isrcproc) % nprocs * nb


@dataclasses.dataclass(frozen=True, slots=True)
class CyclicOrder:
    """
    The order of an extent in which what a process has is contiguous: that of process 0, then that of process 1.

    A place in it is called a position. A product is right under any order that the operands share, so matrices that are
    dealt alike are multiplied as if each process had a block.

    Attributes
    ----------
    extent : int
        Rows or columns.
    block : int
        How many there are in a block.
    num_parts : int
        Processes along this extent.
    source : int
        The process that has the first block.
    skip : int
        How many elements the first block lacks, of a part of a larger extent.
    """

    extent: int
    block: int
    num_parts: int
    source: int = 0
    skip: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether positions are indices: no process has a block behind one of a later process."""
        return self.source + -(-(self.skip + self.extent) // self.block) <= self.num_parts or self.num_parts == 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many elements each process has."""
        shared = self.skip + self.extent
        every = [numroc(shared, self.block, one, self.source, self.num_parts) for one in range(self.num_parts)]
        every[self.source] -= min(self.skip, shared)
        return tuple(every)

    @property
    def starts(self) -> list[int]:
        """At which position what each process has begins, and where the last one's ends."""
        return [*itertools.accumulate(self.counts, initial=0)]

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Return which element is at each of some positions."""
        starts = np.array(self.starts)
        part = np.minimum(np.searchsorted(starts, positions, side="right"), self.num_parts) - 1
        local = positions - starts[part] + self.skip * (part == self.source)
        found: np.ndarray = indxl2g(local, self.block, part, self.source, self.num_parts) - self.skip
        return found

    def position(self, index: Any) -> Any:
        """Return at which position an element is, or each of an array of them, without looking at others."""
        part = indxg2p(index + self.skip, self.block, self.source, self.num_parts)
        local = indxg2l(index + self.skip, self.block, self.num_parts) - self.skip * (part == self.source)
        return np.array(self.starts)[part] + local

    def window(self, start: int, stop: int) -> CyclicOrder:
        """Return the order of the elements from `start` to before `stop`, as processes have them."""
        blocks, skip = divmod(self.skip + start, self.block)
        source = (self.source + blocks) % self.num_parts
        return CyclicOrder(stop - start, self.block, self.num_parts, source, skip)

    def within(self, positions: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
        """Return which positions of what one process has are of elements from `start` to before `stop`."""
        part = self._part(positions[0])
        ahead = self.starts[part] - (self.skip if part == self.source else 0)
        ends = (numroc(self.skip + one, self.block, part, self.source, self.num_parts) for one in (start, stop))
        first, last = (min(max(ahead + end, positions[0]), positions[1]) for end in ends)
        return first, last

    def in_window(self, positions: tuple[int, int], start: int, stop: int) -> tuple[int, int]:
        """Return the positions that `within` finds, counted in the order of the window."""
        first, last = self.within(positions, start, stop)
        begin = self.window(start, stop).starts[self._part(positions[0])] if first < last else 0
        return begin, begin + last - first

    def _part(self, position: int) -> int:
        return min(bisect.bisect_right(self.starts, position), self.num_parts) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Cyclic:
    """
    How blocks are dealt to a process grid in turn.

    Attributes
    ----------
    block : (int, int)
        Rows and columns of a block.
    grid : (int, int)
        Rows and columns of the grid.
    source : (int, int)
        The process that has the first block.
    grid_order : str
        ``"R"`` where processes fill the grid row by row, ``"C"`` column by column.
    skip : (int, int)
        How many rows and columns the first blocks lack, of a part of a larger matrix.
    """

    block: tuple[int, int]
    grid: tuple[int, int]
    source: tuple[int, int] = (0, 0)
    grid_order: Literal["R", "C"] = "R"
    skip: tuple[int, int] = (0, 0)

    def every_order(self, shape: tuple[int, int]) -> tuple[CyclicOrder, CyclicOrder]:
        """Return the orders of rows and columns of a matrix of this shape."""
        rows, cols = (
            CyclicOrder(*about) for about in zip(shape, self.block, self.grid, self.source, self.skip, strict=True)
        )
        return rows, cols

    def orders(self, shape: tuple[int, int]) -> tuple[CyclicOrder | None, CyclicOrder | None]:
        """Return the same, None for an order that changes nothing."""
        rows, cols = (None if order.is_plain else order for order in self.every_order(shape))
        return rows, cols

    def begun_at(self, row: int, col: int) -> Cyclic:
        """Return how a matrix is dealt from some row and column on."""
        rows, cols = (
            order.window(start, start) for order, start in zip(self.every_order((0, 0)), (row, col), strict=True)
        )
        return dataclasses.replace(self, source=(rows.source, cols.source), skip=(rows.skip, cols.skip))

    @property
    def transposed(self) -> Cyclic:
        """How the transposed matrix is dealt, to the same ranks."""
        turned: Literal["R", "C"] = "C" if self.grid_order == "R" else "R"
        return Cyclic(self.block[::-1], self.grid[::-1], self.source[::-1], turned, self.skip[::-1])

    def row_by_row(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return ranks of the processes, the grid read row by row."""
        if self.grid_order == "R":
            return ranks
        height, width = self.grid
        return [ranks[col * height + row] for row in range(height) for col in range(width)]

    @property
    def words(self) -> list[str]:
        """It in words, those left out that say what is usual."""
        found = [joined(self.block), joined(self.grid)]
        found += [f"{name}={joined(pair)}" for name in ("source", "skip") if any(pair := getattr(self, name))]
        return found + ["order=C"] * (self.grid_order == "C")

    @classmethod
    def parse(cls, words: Sequence[str]) -> Cyclic | None:
        """Return what has these words, None if there is none."""
        values: dict[str, tuple[int, int]] = {}
        for at, word in enumerate(words):
            name, _, text = word.rpartition("=")
            name = name or {0: "block", 1: "grid"}.get(at, "")
            if word == "order=C" and at == len(words) - 1:
                break
            numbers = split(text) if NUMBERS.fullmatch(text) else ()
            if len(numbers) != 2 or name in values or name not in ("block", "grid", "source", "skip"):
                return None
            values[name] = numbers[0], numbers[1]
        if "block" not in values or "grid" not in values:
            return None
        if any(skip and skip >= block for skip, block in zip(values.get("skip", (0, 0)), values["block"], strict=True)):
            return None
        return cls(**values, grid_order="C" if words[-1] == "order=C" else "R")


def joined(numbers: Sequence[int] | None) -> str:
    """Return numbers in one word."""
    return ",".join(map(str, numbers or ()))


def split(text: str) -> tuple[int, ...]:
    """Return the numbers in a word that `NUMBERS` matches."""
    return tuple(map(int, text.split(",")))
