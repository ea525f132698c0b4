"""A matrix file as something to take parts of, without ever having all of it in memory."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.api.matrix_files import MatrixFile

_Places: TypeAlias = Any
"""A range, or an array of numbers."""


class FileArray:
    """
    Some rows and columns of a matrix file, read when an array is made of them.

    Taken parts of by slices without a step and by lists of places, as a numpy array of two dimensions; a part is one of
    these again.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns.
    size : int
        Elements.
    dtype : numpy.dtype
        Their type.
    """

    def __init__(self, file: MatrixFile, rows: _Places | None = None, cols: _Places | None = None) -> None:
        self._file = file
        self._rows = range(file.rows) if rows is None else rows
        self._cols = range(file.cols) if cols is None else cols
        self._turned = False
        self.dtype = file.dtype.numpy

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        shape = len(self._rows), len(self._cols)
        return shape[::-1] if self._turned else shape

    @property
    def size(self) -> int:
        """Elements."""
        return len(self._rows) * len(self._cols)

    @property
    def T(self) -> FileArray:
        """The transposed matrix."""
        made = FileArray(self._file, self._rows, self._cols)
        made._turned = not self._turned
        return made

    def __getitem__(self, key: Any) -> FileArray:
        keys: tuple[Any, Any] = key if isinstance(key, tuple) else (key, slice(None))
        down, along = keys[::-1] if self._turned else keys
        made = FileArray(self._file, _some(self._rows, down), _some(self._cols, along))
        made._turned = self._turned
        return made

    def astype(self, dtype: Any) -> np.ndarray:
        """Read it, and return it in another type."""
        return self.__array__().astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read it; raises `DataFileError` if that fails."""
        in_columns = self._file.order == "F"
        lines, within = (self._cols, self._rows) if in_columns else (self._rows, self._cols)
        shape = len(lines), len(within)
        out = np.empty(shape, self.dtype)  # line by line, as the file has them
        if out.size:
            self._read(out, lines, within)
        found = out.T if in_columns != self._turned else out
        return found if dtype is None else found.astype(dtype)

    def _read(self, out: np.ndarray, lines: _Places, within: _Places) -> None:
        first, last = int(min(within)), int(max(within)) + 1
        span = slice(first, last)
        in_columns = self._file.order == "F"
        if isinstance(lines, range) and isinstance(within, range):
            self._file.read_into(out.T if in_columns else out, slice(lines.start, lines.stop), span)
            return
        line = np.empty((1, last - first), self.dtype)
        for at, number in enumerate(lines):
            self._file.read_into(line.T if in_columns else line, slice(int(number), int(number) + 1), span)
            out[at] = line[0, np.asarray(within) - first]


def _some(places: _Places, key: Any) -> _Places:
    return places[key] if isinstance(key, slice) else np.asarray(places)[key]
