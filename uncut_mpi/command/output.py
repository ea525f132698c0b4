"""The result file: .npy, written by several ranks at once, complete or not there at all."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets

import numpy as np

from uncut_mpi.command.lines import blocks, reason
from uncut_mpi.errors import CapacityError, DataFileError
from uncut_mpi.model.dtypes import DType


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
    order: str
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
            descriptor = os.open(self.open_path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for block in blocks(shape, self.order, self.dtype):
                    at += _write_all(descriptor, _raw(values[block], self.order), at)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataFileError(f"{self.path} cannot be written: {reason(error)}") from None


class OutputFile:
    """
    A result file that appears under its name only when it is complete; held by one rank.

    Until `commit` the file has no name at all where the file system can do that (``O_TMPFILE``),
    so that even a job that is killed leaves nothing; elsewhere it has a hidden name in the same
    directory, which `discard` removes. A context manager that discards what was not committed.

    Attributes
    ----------
    target : OutputTarget
        What the other ranks need to write their lines.
    """

    def __init__(self, target: OutputTarget, descriptor: int, temporary: str | None, *, overwrite: bool) -> None:
        self.target = target
        self._descriptor: int | None = descriptor
        self._temporary = temporary
        self._overwrite = overwrite

    @classmethod
    def create(cls, path: str, rows: int, cols: int, dtype: DType, order: str, *, overwrite: bool) -> OutputFile:
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
            descriptor, temporary = _create_unfinished(final)
        except OSError as error:
            raise DataFileError(f"{path} cannot be created: {reason(error)}") from None
        try:
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                np.lib.format.write_array_header_1_0(
                    file,
                    {
                        "descr": np.lib.format.dtype_to_descr(dtype.numpy),
                        "fortran_order": order == "F",
                        "shape": (rows, cols),
                    },
                )
                offset = file.tell()
            _reserve(descriptor, path, offset + rows * cols * dtype.itemsize)
        except BaseException:
            _abandon(descriptor, temporary)
            raise
        open_path = temporary or f"/proc/{os.getpid()}/fd/{descriptor}"
        target = OutputTarget(final, open_path, rows, cols, order, dtype, offset)
        return cls(target, descriptor, temporary, overwrite=overwrite)

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
        if self._descriptor is None:
            raise ValueError(f"{self.target.path} was committed or discarded before")
        try:
            os.fsync(self._descriptor)
            self._give_name(self._descriptor)
            directory = os.open(os.path.dirname(self.target.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except FileExistsError:
            raise DataFileError(_exists(self.target.path)) from None
        except OSError as error:
            raise DataFileError(f"{self.target.path} cannot be completed: {reason(error)}") from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the unfinished file. After `commit`, or a second time, it does nothing."""
        if self._descriptor is not None:
            _abandon(self._descriptor, self._temporary)
            self._descriptor = None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()

    def _give_name(self, descriptor: int) -> None:
        final = self.target.path
        if not self._overwrite:
            # A link, unlike a rename, never replaces a file that appeared meanwhile.
            _link(descriptor, self._temporary, final)
            return
        if self._temporary is None:
            hidden = _hidden_name(final)
            _link(descriptor, None, hidden)
            self._temporary = hidden
        os.replace(self._temporary, final)
        self._temporary = None


def check_output(path: str, *, overwrite: bool) -> None:
    """
    Check that a file of this name could be written.

    Raises
    ------
    DataFileError
        If it exists (without `overwrite`), is no regular file, or its directory is missing or
        cannot be written.
    """
    final = os.path.realpath(path)
    parent = os.path.dirname(final)
    if os.path.isdir(final):
        raise DataFileError(f"{path} is a directory: name a file in it")
    if os.path.exists(final):
        if not os.path.isfile(final):
            raise DataFileError(f"{path} is not a regular file: name another one")
        if not overwrite:
            raise DataFileError(_exists(path))
    if not os.path.isdir(parent):
        raise DataFileError(f"{path} cannot be created: there is no directory {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataFileError(f"{path} cannot be created: the directory {parent} cannot be written by this user")


def _exists(path: str) -> str:
    return f"{path} exists: name another file, or give --overwrite"


def _create_unfinished(final: str) -> tuple[int, str | None]:
    """Return a descriptor open for writing, and the file's hidden name if it has to have one."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        # Not every file system can do it (NFS cannot); the error differs, so any means the other way.
        return os.open(os.path.dirname(final), flags | os.O_TMPFILE, 0o666), None
    name = _hidden_name(final)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666), name


def _hidden_name(final: str) -> str:
    directory, name = os.path.split(final)
    return os.path.join(directory, f".{name[:200]}.{secrets.token_hex(8)}.part")


def _reserve(descriptor: int, path: str, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataFileError(f"{path} cannot be created: {reason(error)}") from None
        room = os.fstatvfs(descriptor)
        raise CapacityError(
            f"{path} needs {size} bytes, and its file system has {room.f_bavail * room.f_frsize} available "
            f"({reason(error)}): free some or write elsewhere"
        ) from None


def _link(descriptor: int, temporary: str | None, name: str) -> None:
    if temporary is not None:
        os.link(temporary, name)
        return
    # A file without a name is linked through its descriptor. Only linkat, which Python calls when a
    # directory descriptor is given, follows the symbolic link that /proc shows for it.
    directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(descriptor), name, src_dir_fd=directory, follow_symlinks=True)
    finally:
        os.close(directory)


def _abandon(descriptor: int, temporary: str | None) -> None:
    os.close(descriptor)
    if temporary is not None:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _write_all(descriptor: int, data: memoryview, at: int) -> int:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
    return done


def _raw(block: np.ndarray, order: str) -> memoryview:
    """Return the bytes of a block in file order, without a copy where it lies so already."""
    lines = np.ascontiguousarray(block.T if order == "F" else block)
    return lines.reshape(-1).view(np.uint8).data
