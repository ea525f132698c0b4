"""Products of matrix files that stay on the disk: A and B are read during the call, and C is written."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.api.matrix_files import MatrixFile, OutputFile
from uncut_mpi.api.session import Session
from uncut_mpi.command.arguments import GemmArguments
from uncut_mpi.command.sharers import Sharers
from uncut_mpi.errors import DataFileError, ParamError, agreed
from uncut_mpi.free_memory import available_bytes
from uncut_mpi.model.lines import blocks, index, lines_of
from uncut_mpi.model.locations import Location
from uncut_mpi.model.problem import Order
from uncut_mpi.regular import open_regular
from uncut_mpi.unfinished import Discardable

_Places: TypeAlias = Any
"""A range, or an array of numbers."""

_Files: TypeAlias = tuple[MatrixFile, MatrixFile, MatrixFile | None]
"""Of A, B and C."""

_FRACTION_OF_HOST = 0.8
"""Files of more than this part of the host memory that is free are not read into it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FileArray:
    """
    Some rows and columns of a matrix file, read when an array is made of them.

    Taken parts of by slices without a step and by lists of places, as a numpy array of two dimensions; a part is one of
    these again.
    """

    file: MatrixFile  # whose they are
    rows: _Places  # rows, cols: which of its rows and columns
    cols: _Places
    turned: bool = False  # whether this is their transpose

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


class Streamed:
    """
    The files of a product that is multiplied where they are. Methods are collective.

    A context manager: errors name the output file as it will be called, and it is removed if it was not completed.

    Attributes
    ----------
    a, b, c : Matrix
        Those of the product; C in the unfinished output file.
    result : FileArray
        The same C, for checks.
    values : tuple of FileArray
        A and B, and C as it was; where that is not read, as it is.
    paths : tuple of str
        Of A, B and C.
    """

    def __init__(
        self, session: Session, arguments: GemmArguments, files: _Files, shape: tuple[int, int], order: Order
    ) -> None:
        assert arguments.out_path is not None  # the command line has files
        self._session, self._before = session, files[2] if arguments.beta != 0 else None
        self._output: Discardable | None = None
        with session.together("checking the placement"):
            if any(one != Location.host() for one in (arguments.place.a, arguments.place.b, arguments.place.c)):
                raise ParamError(
                    f"--place {arguments.place}: matrix files that are multiplied where they are, are not placed "
                    "elsewhere; leave it out, or --host-memory where all fits"
                )
        a, b, _ = files
        output: OutputFile | None = None
        with session.together("creating the output file"):
            if session.rank == 0:
                output = OutputFile(arguments.out_path, shape, a.dtype, order, overwrite=arguments.overwrite)
        self._output = output
        self._target: MatrixFile = session.gather_values(output.target if output else None)[0]
        with contextlib.ExitStack() as after_errors:
            after_errors.push(self)
            self.a, self.b = (session.open_file(one.path, dtype=one.dtype) for one in (a, b))
            self.c = session.open_file(self._target.open_path, dtype=a.dtype, mode="r+")
            lines = lines_of(self._target.num_lines, session.rank, session.size)
            if session.rank and lines.start < lines.stop:  # of those it was found to be the file of rank 0
                with contextlib.suppress(OSError):
                    self._output = Discardable(self._target.open_path, open_regular(self._target.open_path))
            self.result = FileArray.of(self._target)
            first_c = self.result if self._before is None else FileArray.of(self._before)
            self.values = FileArray.of(a), FileArray.of(b), first_c
            self.paths = a.path, b.path, self._target.path
            self.reset()
            after_errors.pop_all()

    def __enter__(self) -> Streamed:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if self._output is not None:
            self._output.discard()
        if isinstance(error, DataFileError) and self._target.open_path in str(error):
            raise agreed(DataFileError(str(error).replace(self._target.open_path, self._target.path))) from None

    def reset(self) -> None:
        """Put into the output what C holds before a call, if that is read."""
        session, before = self._session, self._before
        if before is None:
            return
        with session.together("copying C to the output file"):
            lines = Sharers.of(session).lines(before.num_lines)  # other nodes need not see the files
            values, count = FileArray.of(before), lines.stop - lines.start
            shares = len(blocks(values[index(before.order, lines)].shape, before.order, before.dtype))
            for share in range(shares):
                some = lines_of(count, share, shares)
                here = slice(lines.start + some.start, lines.start + some.stop)
                self._target.write_lines(np.asarray(values[index(before.order, here)]), here)

    def commit(self) -> None:
        """Give the output file its name."""
        with self._session.together("completing the output file"):
            if isinstance(self._output, OutputFile):
                self._output.commit()


def are_streamed(session: Session, arguments: GemmArguments, files: _Files, shape: tuple[int, int]) -> bool:
    """Return whether files are multiplied where they are: if that is asked for, or memory is short. Collective."""
    a, b, _ = files
    of_c = shape[0] * shape[1] * (2 if arguments.beta != 0 else 1)
    nbytes = a.dtype.itemsize * (a.rows * a.cols + b.rows * b.cols + of_c)
    asked = arguments.options.host_memory > 0
    return bool(session.gather_values(asked or nbytes > _FRACTION_OF_HOST * available_bytes()[0])[0])
