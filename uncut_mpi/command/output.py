"""The result file: .npy, written by several ranks at once, complete or not there at all."""

from __future__ import annotations

import dataclasses
import os
import stat

import numpy as np

from uncut_mpi.api.matrix_files import reserve, write_header
from uncut_mpi.command.artifacts import check_writable, stream_number, write_all
from uncut_mpi.command.unfinished import UnfinishedFile
from uncut_mpi.errors import DataFileError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import blocks
from uncut_mpi.model.problem import Order
from uncut_mpi.regular import open_regular, reason, status_of


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTarget:
    """
    Where ranks write the lines of a result; a value, made by `OutputFile` and sent to the other ranks.

    Attributes
    ----------
    path : str
        Name that the file will have.
    open_path : str
        Name under which a process of this node and user opens the unfinished file.
    rows, cols : int
        Shape (elements).
    order : str
        ``"F"`` or ``"C"``.
    dtype : DType
        Element type.
    offset_bytes : int
        Where the first element lies.
    """

    path: str
    open_path: str
    rows: int
    cols: int
    order: Order
    dtype: DType
    offset_bytes: int

    @property
    def num_lines(self) -> int:
        """Columns in Fortran order, rows in C order."""
        return self.cols if self.order == "F" else self.rows

    def write_lines(self, values: np.ndarray, lines: slice = slice(None)) -> None:
        """
        Write these lines of the result; several processes may write different lines at once.

        Parameters
        ----------
        values : ndarray, shape (rows, lines) in Fortran order or (lines, cols) in C order
            Of the target's dtype and any layout.
        lines : slice, default all
            Which lines.

        Raises
        ------
        DataFileError
            If the file cannot be written.
        """
        start, stop, _ = lines.indices(self.num_lines)
        shape = (self.rows, stop - start) if self.order == "F" else (stop - start, self.cols)
        if values.shape != shape or values.dtype != self.dtype.numpy:
            raise ValueError(
                f"{self.path}: an array of shape {values.shape} and dtype {values.dtype} "
                f"was given for lines of shape {shape} and dtype {self.dtype.name}"
            )
        line_bytes = (self.rows if self.order == "F" else self.cols) * self.dtype.itemsize
        at = self.offset_bytes + start * line_bytes
        try:
            descriptor = open_regular(self.open_path, os.O_WRONLY)
            try:
                for block in blocks(shape, self.order, self.dtype):
                    at += write_all(descriptor, _raw(values[block], self.order), at)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataFileError(f"{self.path} cannot be written: {reason(error)}") from None


class OutputFile:
    """
    A result file that appears under its name only when it is complete; held by one rank.

    A context manager that discards what was not committed; see `UnfinishedFile`.

    Attributes
    ----------
    target : OutputTarget
        What the other ranks need to write their lines.
    """

    def __init__(self, target: OutputTarget, unfinished: UnfinishedFile, *, overwrite: bool) -> None:
        self.target = target
        self._unfinished = unfinished
        self._overwrite = overwrite

    @classmethod
    def create(cls, path: str, rows: int, cols: int, dtype: DType, order: Order, *, overwrite: bool) -> OutputFile:
        """
        Make the unfinished file, with its header written and its whole size reserved on the disk.

        Parameters
        ----------
        path : str
            Name of the complete file. A symbolic link is followed.
        rows, cols : int
            Shape (elements).
        dtype : DType
            Element type; bf16 is saved as numpy saves it, as elements of 2 bytes without a name.
        order : str
            ``"F"`` or ``"C"``.
        overwrite : bool
            Whether a file of that name may be replaced.

        Raises
        ------
        DataFileError
            If the file exists (without `overwrite`), is a directory, or its directory is missing
            or cannot be written.
        CapacityError
            If the disk has no room for it.
        """
        final = os.path.realpath(path)
        check_output(path, overwrite=overwrite)
        try:
            unfinished = UnfinishedFile(final)
        except OSError as error:
            raise DataFileError(f"{path} cannot be created: {reason(error)}") from None
        descriptor = unfinished.descriptor
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                offset = write_header(file, (rows, cols), dtype, order)
            reserve(descriptor, path, offset + rows * cols * dtype.itemsize)
        except BaseException:
            unfinished.discard()
            raise
        target = OutputTarget(final, unfinished.open_path, rows, cols, order, dtype, offset)
        return cls(target, unfinished, overwrite=overwrite)

    def commit(self) -> None:
        """
        Give the file its name, with all that was written to it safe on the disk.

        Call it when every rank has written its lines.

        Raises
        ------
        DataFileError
            If the disk refuses, or a file of that name has appeared (without `overwrite`); the
            unfinished file is discarded then.
        """
        if not self._unfinished.is_open:
            raise ValueError(f"{self.target.path} was committed or discarded before")
        try:
            self._unfinished.commit(overwrite=self._overwrite)
        except FileExistsError:
            raise DataFileError(_exists(self.target.path)) from None
        except OSError as error:
            raise DataFileError(f"{self.target.path} cannot be completed: {reason(error)}") from None

    def discard(self) -> None:
        """Remove the unfinished file. After `commit`, or a second time, it does nothing."""
        self._unfinished.discard()

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()


def check_output(path: str, *, overwrite: bool) -> None:
    """
    Check that a file of this name could be written.

    Raises
    ------
    DataFileError
        If it exists (without `overwrite`), is no regular file, or its directory is missing or
        cannot be written.
    """
    if stream_number(path) is not None:
        raise DataFileError(f"{path} is a stream of this process, not a regular file: name another one")
    try:
        mode = status_of(path).st_mode
    except OSError:
        pass  # what is wrong, if anything is, the check below says
    else:
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not stat.S_ISSOCK(mode):
            raise DataFileError(f"{path} is not a regular file: name another one")
        if stat.S_ISREG(mode) and not overwrite:
            raise DataFileError(_exists(path))
    check_writable(path, path)


def _exists(path: str) -> str:
    return f"{path} exists: name another file, or give --overwrite"


def _raw(block: np.ndarray, order: Order) -> memoryview:
    """Return the bytes of a block in file order, without a copy where it lies so already."""
    lines = np.ascontiguousarray(block.T if order == "F" else block)
    return lines.reshape(-1).view(np.uint8).data
