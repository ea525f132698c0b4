"""What every baseline has: a library, its products, the settings they can be computed with."""

from __future__ import annotations

import abc
import itertools

from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.planning.grid import block_starts


class Unsupported(Exception):
    """The library, or this machine, cannot do what was asked; the text says why."""


class LibraryProduct(abc.ABC):
    """
    A task that a library has taken on, its matrices where the task puts them.

    Attributes
    ----------
    settings : list of str
        Ways in which the library can compute it; all of them give the same result.
    """

    settings: list[str]

    def prepare(self) -> None:
        """Do what need not be timed before a call; nothing by default."""
        return

    @abc.abstractmethod
    def call(self, setting: str) -> None:
        """Compute once; C is back in its place on return."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Put into C what it holds before a call."""

    @abc.abstractmethod
    def store(self) -> None:
        """Put C into `Matrices.out`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what was allocated."""


class Library(abc.ABC):
    """
    A library as it is installed here.

    Attributes
    ----------
    version : str
        Its name and version, for the record.
    takes_whole, takes_dealt : bool
        Whether it multiplies matrices that are in one memory each, and those that are dealt to ranks.

    Raises
    ------
    Unsupported
        By its constructor, if it is not installed or does not reach the devices.
    """

    version: str
    takes_whole = True
    takes_dealt = False

    def wait(self) -> None:
        """Wait until every process that multiplies is here; there is one by default."""
        return

    def slowest(self, seconds: float) -> float:
        """Return the longest time of all processes that multiply (s)."""
        return seconds

    @abc.abstractmethod
    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """
        Take on a task.

        Raises
        ------
        Unsupported
            If the library has no such product.
        """


def splits(count: int) -> dict[str, tuple[int, int, int]]:
    """
    Return ways to share a product among devices, by name: parts of (m, n, k).

    One device, every grid of blocks of C, and parts of k whose results are added up.
    """
    found = {"1 device": (1, 1, 1)}
    if count > 1:
        for rows in range(1, count + 1):
            if count % rows == 0:
                found[f"{rows}x{count // rows} blocks of C"] = (rows, count // rows, 1)
        found[f"{count} parts of k"] = (1, 1, count)
    return found


def ranges(extent: int, parts: int) -> list[slice]:
    """Return equal parts of an extent."""
    starts = block_starts(extent, parts)
    return [slice(begin, end) for begin, end in itertools.pairwise(starts)]
