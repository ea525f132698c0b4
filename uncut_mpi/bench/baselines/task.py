"""What a baseline is asked to multiply, and the words in which it is asked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.places import Dealt
from uncut_mpi.segments import Segment

MOVED: Final = "moved to "
"""How the name of a setting begins that first moves matrices from where the task puts them to where it likes them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """
    One product C := alpha A B + beta C of column-major matrices.

    Attributes
    ----------
    m, n, k : int
        Extents (elements).
    dtype : DType
        Element type.
    alpha, beta : float
        Scalars.
    place : tuple of (int, str or None), length 3
        Number of the device that A, B and C are on; None: host memory; of a matrix that is dealt to devices, rank for
        rank, what `Dealt.parse` reads.
    compute : tuple of int
        Devices that may compute.
    a, b, c, out : bytes
        Handles of shared memory: A, B, C before a call, and room for C afterwards.
    """

    m: int
    n: int
    k: int
    dtype: DType
    alpha: float
    beta: float
    place: tuple[int | str | None, int | str | None, int | str | None]
    compute: tuple[int, ...]
    a: bytes
    b: bytes
    c: bytes
    out: bytes

    @property
    def extents(self) -> tuple[int, int, int]:
        """Extents m, n and k."""
        return self.m, self.n, self.k

    @property
    def dealt(self) -> tuple[Dealt, ...]:
        """How A, B and C are dealt; empty where any is in one memory."""
        words = [place for place in self.place if isinstance(place, str)]
        return tuple(map(Dealt.parse, words)) if len(words) == len(self.place) else ()

    @property
    def whole(self) -> tuple[int | None, ...]:
        """Numbers of the devices that A, B and C are on, None for host memory; empty where any is dealt."""
        found = tuple(place for place in self.place if not isinstance(place, str))
        return found if len(found) == len(self.place) else ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        facts = dataclasses.asdict(self)
        return {**facts, "dtype": self.dtype.name, **{name: facts[name].hex() for name in ("a", "b", "c", "out")}}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Task:
        """Return what `to_json` wrote."""
        handles = {name: bytes.fromhex(facts[name]) for name in ("a", "b", "c", "out")}
        lists = {name: tuple(facts[name]) for name in ("place", "compute")}
        return cls(**{**facts, **handles, **lists, "dtype": DType[facts["dtype"]]})


@dataclasses.dataclass(frozen=True, slots=True)
class Matrices:
    """
    The matrices of a task in host memory, column-major.

    Attributes
    ----------
    a : ndarray, shape (m, k)
    b : ndarray, shape (k, n)
    c : ndarray, shape (m, n)
        What C holds before a call.
    out : ndarray, shape (m, n)
        Where C is, if it is in host memory; and where `Product.store` puts it.
    """

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    out: np.ndarray

    @classmethod
    def open(cls, task: Task) -> Matrices:
        """Map the shared memory of a task."""
        m, n, k = task.extents
        shapes = {"a": (m, k), "b": (k, n), "c": (m, n), "out": (m, n)}
        return cls(
            **{
                name: Segment.open(getattr(task, name)).array(task.dtype.numpy, shape[::-1]).T
                for name, shape in shapes.items()
            }
        )


def words(message: dict[str, Any]) -> bytes:
    """Return a message as it crosses a pipe: a line."""
    return json.dumps(message).encode() + b"\n"
