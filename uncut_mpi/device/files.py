"""
Files whose bytes have addresses, as memory has.

No memory lies at these addresses: they say which byte of which file is meant. So matrices in files have buffers,
pieces and overlaps like any others. Copies on lanes of the host read and write the file there. Whoever else touches
such an address is ended by the system, and gets no wrong numbers.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import DataFileError

_NO_ACCESS: Final = 0  # PROT_NONE
_MAP_NORESERVE: Final = 0x4000  # of Linux
_ENDED: Final = -1


@dataclasses.dataclass(eq=False)
class FileWindow:
    """
    The addresses of a file's bytes.

    Attributes
    ----------
    path : str
        The file, for messages.
    descriptor : int
        Of this process; closed with the window.
    address, nbytes : int
        Where its first byte is, and how many it has.
    """

    path: str
    descriptor: int
    address: int
    nbytes: int
    _reserved: mmap.mmap

    def flush(self) -> None:
        """Return when all that was written to it is safe on the disk."""
        try:
            os.fsync(self.descriptor)
        except OSError as error:
            raise self.error(error.errno or errno.EIO) from None

    def shorter(self) -> DataFileError:
        """Return the error of a file that has become shorter."""
        return DataFileError(f"{self.path} changed while it was in use: it has become shorter")

    def error(self, code: int) -> DataFileError:
        """Return the error of an error number of the system, or of a file that ended too early."""
        if code == _ENDED:
            return self.shorter()
        return DataFileError(f"{self.path} cannot be read or written: {os.strerror(code)}")


class FileWindows:
    """The windows of a device backend."""

    def __init__(self) -> None:
        self._windows: list[FileWindow] = []

    def open(self, path: str, descriptor: int, nbytes: int) -> FileWindow:
        """Return addresses for so many bytes of a file, whose descriptor is the window's from now on."""
        reserved = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, _NO_ACCESS)
        address = int(np.frombuffer(reserved, np.uint8).ctypes.data)
        window = FileWindow(path, descriptor, address, nbytes, reserved)
        self._windows.append(window)
        return window

    def close(self, window: FileWindow) -> None:
        """Give the addresses back and close the file."""
        self._windows.remove(window)
        os.close(window.descriptor)

    def copy(
        self, to: int, to_pitch: int, source: int, pitch: int, shape: tuple[int, int], transposed_bytes: int = 0
    ) -> None:
        """
        Copy columns, one end or both in files.

        Parameters
        ----------
        to, source : int
            Address of the first byte.
        to_pitch, pitch : int
            From one column to the next (bytes).
        shape : tuple of int
            Bytes of a column, and columns, of what is written.
        transposed_bytes : int, optional
            Of an element, if columns are rows of the source.

        Raises
        ------
        DataFileError
            If a file cannot be read or written, or ends before.
        """
        ends = (to, to_pitch), (source, pitch)
        code, descriptor = _native.copy_with_files(self.table(), *ends, *shape, transposed_bytes)
        if code:
            failed = self.of(descriptor)
            assert failed is not None  # it is one of ours
            raise failed.error(code)

    def of(self, descriptor: int) -> FileWindow | None:
        """Return the window of a descriptor."""
        return next((one for one in self._windows if one.descriptor == descriptor), None)

    def table(self) -> list[_native.HostFile]:
        """Return them for the core."""
        return [_native.HostFile(one.address, one.nbytes, one.descriptor) for one in self._windows]
