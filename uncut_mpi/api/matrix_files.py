"""Matrix files: .npy, whose lines several ranks read, a range each."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import os
import stat
import struct
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import numpy as np

from uncut_mpi.errors import CapacityError, DataFileError, ParamError, reason
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.dtypes import DType, arithmetic_of
from uncut_mpi.model.lines import blocks, index
from uncut_mpi.model.problem import Order
from uncut_mpi.regular import kind_of, open_regular, status_of
from uncut_mpi.unfinished import OVERWRITE, UnfinishedFile, naming, partial_of, write_all
from uncut_mpi.units import bytes_text

# numpy writes types that it does not know itself, as ml_dtypes.bfloat16, as bytes without a meaning.
_UNNAMED_2_BYTES: Final = np.dtype("V2")

# How the length of a header stands in a file of each version, and the most of it that numpy reads unasked.
_LENGTHS: Final = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
_HEADER_BYTES: Final = 10_000
_END_BYTES: Final = 1 << 16
_MOST_EXTENT: Final = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True)
class MatrixFile:
    """
    A matrix in a .npy file that was found whole and of a known type; made by `open_matrix`.

    A value: rank 0 may open the file and send this to the others.
    """

    path: str  # the file
    rows: int  # rows, cols: shape (elements)
    cols: int
    order: Order  # "F" or "C"
    dtype: DType  # element type
    offset_bytes: int  # where the first element lies
    open_path: str = ""  # its name as long as it is unfinished (`OutputFile`); empty for that of `path`

    @property
    def num_lines(self) -> int:
        """Columns in Fortran order, rows in C order."""
        return self.cols if self.order == "F" else self.rows

    def read_into(self, out: np.ndarray, lines: slice = slice(None), within: slice = slice(None)) -> None:
        """
        Copy these lines into an array of their shape, of any layout.

        Parameters
        ----------
        out : ndarray, shape (rows, lines) in Fortran order or (lines, cols) in C order
            Of the file's dtype.
        lines : slice, default all
            Which lines.
        within : slice, default all
            Which elements of each of them.

        Raises
        ------
        DataFileError
            If the file can no longer be read, or has become shorter.
        """
        length = self.rows if self.order == "F" else self.cols
        start, stop, _ = lines.indices(self.num_lines)
        first, last, _ = within.indices(length)
        shape = (last - first, stop - start) if self.order == "F" else (stop - start, last - first)
        if out.shape != shape:
            raise ValueError(f"{self.path}: lines of shape {shape} do not fit an array of shape {out.shape}")
        # Whole lines follow each other in the file; of other ones each is a run of its own.
        runs = [slice(None)] if last - first == length else [slice(line, line + 1) for line in range(stop - start)]
        # Read and not mapped: a mapped file that somebody shortens ends the process that touches what was there.
        with self._opened(os.O_RDONLY, "read") as descriptor:
            for number, run in enumerate(runs):
                at = self.offset_bytes + ((start + number) * length + first) * self.dtype.itemsize
                part = out[index(self.order, run)]
                for block in blocks(part.shape, self.order, self.dtype):
                    at += _read_block(descriptor, part[block], self.order, at)

    def write_lines(self, values: np.ndarray, lines: slice = slice(None)) -> None:
        """
        Write these lines; several processes may write different lines at once.

        Parameters
        ----------
        values : ndarray, shape (rows, lines) in Fortran order or (lines, cols) in C order
            Of the file's dtype and any layout.
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
        with self._opened(os.O_WRONLY, "written") as descriptor:
            for block in blocks(shape, self.order, self.dtype):
                at += write_all(descriptor, _raw(values[block], self.order), at)

    @contextlib.contextmanager
    def _opened(self, flags: int, how: str) -> Iterator[int]:
        try:
            descriptor = open_regular(self.open_path or self.path, flags)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except EOFError:
            raise DataFileError(f"{self.path} changed while it was in use: it has become shorter") from None
        except OSError as error:
            raise DataFileError(f"{self.path} cannot be {how}: {reason(error)}") from None


class OutputFile(UnfinishedFile):
    """
    A matrix file that appears under its name only when it is complete; held by one rank.

    Its methods raise DataFileError.

    Parameters
    ----------
    path : str
        Name of the complete file. A symbolic link is followed.
    shape, dtype, order
        Of the matrix. It is of zeros, with the header written and the whole size reserved on the disk. bf16 is saved as
        numpy saves it, as elements of 2 bytes without a name.
    overwrite : bool
        Whether a file of that name may be replaced, or an unfinished one.
    how : str
        How the caller says so, for the error.

    Attributes
    ----------
    target : MatrixFile
        What the other ranks need to write their lines.

    Raises
    ------
    DataFileError
        If the file exists (without `overwrite`) or is being written, is no regular file, or its directory is
        missing or cannot be written.
    CapacityError
        If the disk has no room for it.
    """

    def __init__(
        self, path: str, shape: tuple[int, int], dtype: DType, order: Order, *, overwrite: bool, how: str = OVERWRITE
    ) -> None:
        check_new(path, overwrite=overwrite, how=how)
        with naming(path, path, how, "created") as final:
            super().__init__(final, overwrite=overwrite)
        try:
            with os.fdopen(self.descriptor, "wb", closefd=False) as file:
                kind = np.lib.format.dtype_to_descr(dtype.numpy)
                about = {"descr": kind, "fortran_order": order == "F", "shape": shape}
                np.lib.format.write_array_header_1_0(file, about)
                file.flush()
                offset = file.tell()
            self._nbytes = offset + shape[0] * shape[1] * dtype.itemsize
            reserve(self.descriptor, path, self._nbytes)
        except BaseException:
            self.discard()
            raise
        # By the name that the caller gave: a rank for which that is another file has an error, as of any file.
        open_path = self.path if os.path.islink(path) else partial_of(path)
        self.target = MatrixFile(path, *shape, order, dtype, offset, open_path)

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
        path = self.target.path
        if not self.is_open:
            raise ValueError(f"{path} was committed or discarded before")
        if os.fstat(self.descriptor).st_size < self._nbytes:
            self.discard()
            raise DataFileError(f"{path} has become shorter while it was written: write it again")
        try:
            super().commit()
        except FileExistsError:
            raise DataFileError(f"{path} exists, it has appeared meanwhile: name another file") from None
        except OSError as error:
            raise DataFileError(f"{path} cannot be completed: {reason(error)}") from None


def check_new(path: str, *, overwrite: bool, how: str = OVERWRITE) -> None:
    """Raise DataFileError if a file of this name is there and may not be replaced, or is no regular file."""
    try:
        mode = status_of(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataFileError(f"{path} cannot be created: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise DataFileError(f"{path} is a directory: name a file in it")
    if not stat.S_ISREG(mode):
        raise DataFileError(f"{path} is {kind_of(mode)}, not a regular file: name another one")
    if not overwrite:
        raise DataFileError(f"{path} exists: name another file, or {how} to replace it")


def reserve(descriptor: int, path: str, size: int) -> None:
    """Give a file all of its room on the disk, or raise CapacityError or DataFileError; what has none takes none."""
    there = os.fstatvfs(descriptor)
    room = there.f_bavail * there.f_frsize
    try:
        if size > room:  # to try it would fill the disk meanwhile, which others write to, too
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataFileError(f"{path} cannot be created: {reason(error)}") from None
        mend = "raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "free some"
        raise CapacityError(
            f"{path} needs {bytes_text(size)}, and its file system has {bytes_text(room)} "
            f"available ({reason(error)}): {mend} or write elsewhere"
        ) from None


def known_of(path: str) -> tuple[int, int, int, int, bytes] | None:
    """
    Return what this node knows now of a file; None if it does not see it.

    That is its device, number, size and time (ns), and a digest of its beginning and end. For files that ranks of
    several nodes write at the same moment may have one size and time.
    """
    try:
        descriptor = open_regular(path)  # a look at the name alone may be answered by what was known of it before
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        ends = (os.pread(descriptor, _END_BYTES, at) for at in (0, max(0, status.st_size - _END_BYTES)))
        digest = hashlib.blake2b(b"".join(ends), digest_size=16).digest()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, digest


def mark(path: str) -> None:
    """Give a file the time of this moment, with all that was written to it before safe; DataFileError if refused."""
    try:
        descriptor = open_regular(path, os.O_RDWR)
        try:
            os.fsync(descriptor)
            os.utime(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataFileError(f"{path} cannot be read and written: {reason(error)}") from None


def open_matrix(path: str, dtype: DType | None = None) -> MatrixFile:
    """
    Check a .npy file and return what it holds; reads the header alone.

    Parameters
    ----------
    path : str
        The file.
    dtype : DType, optional
        What it must hold. Needed for bf16, which a .npy file cannot name.

    Raises
    ------
    DataFileError
        If the file is missing, a directory, not .npy, truncated or not two-dimensional. Also if it is of a type that
        cannot be multiplied, of a foreign byte order or of another type than `dtype`.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            shape, fortran, found = _read_header(file, path)
            offset = file.tell()
            length = os.fstat(file.fileno()).st_size
    except OSError as error:
        there = isinstance(error, FileNotFoundError) and os.path.exists(partial_of(path))
        more = f"; it is unfinished, as {partial_of(path)}: complete it first (Session.commit)" if there else ""
        raise DataFileError(f"{path} cannot be read: {reason(error)}{more}") from None
    if len(shape) != 2:
        raise DataFileError(f"{path} holds an array of shape {shape}, which has {dimensions_text(len(shape))}")
    if bool in map(type, shape):  # a number to numpy
        raise DataFileError(
            f"{path} has the shape {shape}, an extent that is no whole number: write it with numpy.save"
        )
    if min(shape) < 0:
        raise DataFileError(f"{path} has the shape {shape}, with a negative extent: write it again with numpy.save")
    element = _element_type(path, found, dtype)
    needed = offset + shape[0] * shape[1] * element.itemsize
    if length < needed:
        raise DataFileError(
            f"{path} is truncated: {shape[0]}×{shape[1]} elements of {element.name} need {needed} bytes, "
            f"the file has {length}; write it again"
        )
    if max(shape) > _MOST_EXTENT:  # beside an extent of 0
        raise DataFileError(f"{path} has the shape {shape}: an extent is at most {_MOST_EXTENT}")
    return MatrixFile(path, shape[0], shape[1], "F" if fortran else "C", element, offset)


def open_operands(
    a: str, b: str, c: str | None, dtype: DType | None
) -> tuple[MatrixFile, MatrixFile, MatrixFile | None]:
    """Open A, B and, if named, C as `open_matrix`; raise DataFileError if there is no product of their types."""
    opened = {name: open_matrix(path, dtype) for name, path in (("A", a), ("B", b), ("C", c)) if path is not None}
    in_a, in_b, in_c = opened["A"], opened["B"], opened.get("C")
    try:
        arithmetic_of((in_a.dtype, in_b.dtype, (in_c or in_a).dtype))
    except ParamError as error:
        found = ", ".join(f"{name} {file.path}" for name, file in opened.items())
        raise DataFileError(f"{found}: {error}") from None
    return in_a, in_b, in_c


def output_order(a: MatrixFile, b: MatrixFile, c: MatrixFile | None) -> Order:
    """Return the order of the result: that of C where there is one, else C where A and B both have that, else F."""
    if c is not None:
        return c.order
    return "C" if a.order == b.order == "C" else "F"


def _read_header(file: BinaryIO, path: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran's, and type, by numpy's own reading of the header."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError as error:
        raise _not_npy(path, reason(error)) from None
    if version not in _LENGTHS:
        when = "newer than" if version > max(_LENGTHS) else "none of those that"
        raise DataFileError(f"{path} has .npy format {version[0]}.{version[1]}, which is {when} numpy reads here")
    form = _LENGTHS[version]
    beginning = file.read(struct.calcsize(form))
    if len(beginning) < struct.calcsize(form):
        raise _not_npy(path, "it ends in its header")
    (length,) = struct.unpack(form, beginning)
    if length > _HEADER_BYTES:
        raise DataFileError(
            f"{path} has a header of {length} bytes, numpy reads at most {_HEADER_BYTES} without being told that it is "
            "safe: write it again with numpy.save"
        )
    text = io.BytesIO(beginning + file.read(length))
    # Version 3 is version 2 with names of fields in UTF-8, and what has fields is no matrix.
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Python 2 wrote it
            return read(text)
    except Exception as error:  # the text is compiled by Python, which knows many ways to refuse one
        raise _not_npy(path, reason(error)) from None


def _not_npy(path: str, why: str) -> DataFileError:
    said = why.partition("\n")[0]
    return DataFileError(f"{path} is not a .npy file: {textwrap.shorten(said, 120)}; write it with numpy.save")


def _read_block(descriptor: int, block: np.ndarray, order: Order, at: int) -> int:
    """Read whole lines from a place in a file on, and return how many bytes; raises EOFError where they end sooner."""
    lines = block.T if order == "F" else block
    target = lines if lines.flags.c_contiguous else np.empty(lines.shape, lines.dtype)
    data: memoryview = target.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(data):
        count = os.preadv(descriptor, [data[done:]], at + done)
        if not count:
            raise EOFError
        done += count
    if target is not lines:
        lines[...] = target
    return done


def _element_type(path: str, found: np.dtype[Any], asked: DType | None) -> DType:
    if found == _UNNAMED_2_BYTES and found.names is None:
        if asked is DType.bf16:
            return asked
        told = "" if asked is None else f", but dtype {asked.name} was given"
        raise DataFileError(
            f"{path} holds elements of 2 bytes without a type, as numpy saves bfloat16{told}: "
            "give dtype bf16 if it is that"
        )
    if found.byteorder == ">":
        raise DataFileError(f"{path} holds big-endian {found.name}: save array.astype(array.dtype.newbyteorder('<'))")
    if found.names is not None:
        raise DataFileError(
            f"{path} holds records of {len(found.names)} fields: convert one of them to a matrix and save that"
        )
    if found.hasobject:
        raise DataFileError(
            f"{path} holds Python objects, which are not unpickled: convert them to float64 and save those"
        )
    known = {one.numpy: one for one in (DType.f64, DType.f32, DType.f16, DType.c64, DType.c128)}
    element = known.get(found)
    if element is None:
        raise DataFileError(
            f"{path} holds {found}: convert it to float64, float32, float16, bfloat16, complex64 or complex128"
        )
    if asked is DType.tf32 and element is DType.f32:
        return asked
    if asked is not None and element is not asked:
        raise DataFileError(
            f"{path} holds {element.name}, but dtype {asked.name} was given: leave it out or convert the file"
        )
    return element


def _raw(block: np.ndarray, order: Order) -> memoryview:
    """Return the bytes of a block in file order, without a copy where it lies so already."""
    lines = np.ascontiguousarray(block.T if order == "F" else block)
    return lines.reshape(-1).view(np.uint8).data
