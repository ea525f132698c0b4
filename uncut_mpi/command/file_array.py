"""A matrix file as something to take parts of, without ever having all of it in memory."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.api.matrix_files import MatrixFile
from uncut_mpi.model.problem import Order

_Places: TypeAlias = Any
"""A range, or an array of numbers."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FileArray:
    """
    Some rows and columns of a matrix file, read when an array is made of them.

    Taken parts of by slices without a step and by lists of places, as a numpy array of two dimensions; a part is one of
    these again.

    Attributes
    ----------
    file : MatrixFile
        Whose they are.
    rows, cols : range or ndarray of int
        Which of its rows and columns.
    turned : bool
        Whether this is their transpose.
    """

    file: MatrixFile
    rows: _Places
    cols: _Places
    turned: bool = False

    @classmethod
    def of(cls, file: MatrixFile) -> FileArray:
        """Return all of a file."""
        return cls(file, range(file.rows), range(file.cols))

    @property
    def order(self) -> Order:
        """In which order the file has its elements."""
        return self.file.order

    @property
    def array(self) -> Any:
        """Itself, as a matrix of a session has its elements."""
        return self

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self.file.dtype.numpy

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        shape = len(self.rows), len(self.cols)
        return shape[::-1] if self.turned else shape

    @property
    def size(self) -> int:
        """Elements."""
        return len(self.rows) * len(self.cols)

    @property
    def T(self) -> FileArray:
        """The transposed matrix."""
        return dataclasses.replace(self, turned=not self.turned)

    def __getitem__(self, key: Any) -> FileArray:
        keys: tuple[Any, Any] = key if isinstance(key, tuple) else (key, slice(None))
        down, along = keys[::-1] if self.turned else keys
        return dataclasses.replace(self, rows=_some(self.rows, down), cols=_some(self.cols, along))

    def astype(self, dtype: Any) -> np.ndarray:
        """Read it, and return it in another type."""
        return self.__array__().astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read it; raises `DataFileError` if that fails."""
        in_columns = self.file.order == "F"
        lines, within = (self.cols, self.rows) if in_columns else (self.rows, self.cols)
        out = np.empty((len(lines), len(within)), self.dtype)  # line by line, as the file has them
        if out.size:
            self._read(out, lines, within)
        found = out.T if in_columns != self.turned else out
        return found if dtype is None else found.astype(dtype)

    def _read(self, out: np.ndarray, lines: _Places, within: _Places) -> None:
        first, last = int(min(within)), int(max(within)) + 1
        span = slice(first, last)
        in_columns = self.file.order == "F"
        if isinstance(lines, range) and isinstance(within, range):
            self.file.read_into(out.T if in_columns else out, slice(lines.start, lines.stop), span)
            return
        line = np.empty((1, last - first), self.dtype)
        for at, number in enumerate(lines):
            self.file.read_into(line.T if in_columns else line, slice(int(number), int(number) + 1), span)
            out[at] = line[0, np.asarray(within) - first]


def _some(places: _Places, key: Any) -> _Places:
    return places[key] if isinstance(key, slice) else np.asarray(places)[key]
