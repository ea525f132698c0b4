"""
Files that appear under their name only when they are complete.

Until then a file is called as it will be, with ``.partial`` behind that, in the same folder. An error removes it; a
process that is killed leaves it, and the next one says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import Final

from uncut_mpi.errors import DataFileError, reason
from uncut_mpi.regular import open_regular

OVERWRITE: Final = "give --overwrite"
"""How commands are told to replace a file."""

PARTIAL: Final = ".partial"
_MOST_BYTES: Final = 255  # of a name in a folder


def partial_of(final: str) -> str:
    """Return what a file is called until it is complete; the end of a name that is too long is left out."""
    folder, name = os.path.split(final)
    return os.path.join(folder, os.fsdecode(os.fsencode(name)[: _MOST_BYTES - len(PARTIAL)]) + PARTIAL)


class UnfinishedFile:
    """
    A file that is written before it has its name; held by one process, which others of its user may help to write it.

    A context manager that discards what was not committed. Its methods raise OSError.

    Parameters
    ----------
    final : str
        The name that it will have, without symbolic links.
    overwrite : bool
        Whether a file of that name may be replaced, and one that was left unfinished. What replaces a file has the mode
        of that.

    Attributes
    ----------
    path : str
        The name that it has until then.
    descriptor : int
        Open for reading and writing.

    Raises
    ------
    FileExistsError
        If an unfinished file was left there, without `overwrite`.
    BlockingIOError
        If there is one that is still being written.
    """

    def __init__(self, final: str, *, overwrite: bool) -> None:
        self.final, self.path, self._overwrite = final, partial_of(final), overwrite
        self.descriptor = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        self.is_open = self._is_there = True
        try:
            self._take()
        except BaseException:
            os.close(self.descriptor)
            raise

    def _take(self) -> None:
        in_use = BlockingIOError(errno.EAGAIN, "another process, or another matrix of this one, is writing it")
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use from None
        except OSError:
            pass  # a file system without locks
        found = os.fstat(self.descriptor)
        if not (os.path.exists(self.path) and os.path.samestat(found, os.stat(self.path))):  # completed meanwhile
            raise in_use
        if found.st_size and not self._overwrite:
            raise FileExistsError(errno.EEXIST, "a job that was cut short has left it")
        os.ftruncate(self.descriptor, 0)
        if os.path.exists(self.final):
            os.fchmod(self.descriptor, stat.S_IRUSR | stat.S_IWUSR)

    def commit(self) -> None:
        """
        Give the file its name, with all that was written to it safe on the disk.

        Raises
        ------
        FileExistsError
            If there is a file of that name, without `overwrite`.
        OSError
            If the disk refuses. The unfinished file is discarded then, too.
        """
        try:
            os.fsync(self.descriptor)
            self._give_name()
            directory = os.open(os.path.dirname(self.final), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the unfinished file. After `commit`, or a second time, it does nothing."""
        if self.is_open:
            self.is_open = False
            if self._is_there and self._is_mine():
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self.descriptor)

    def __enter__(self) -> UnfinishedFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()

    def _is_mine(self) -> bool:
        """Return whether the unfinished file still has its name, and no other one has taken it."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
        return False

    def _give_name(self) -> None:
        if not self._is_mine():
            self._is_there = False
            raise OSError(errno.ESTALE, f"{self.path} has been removed or replaced meanwhile")
        if self._overwrite:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(self.descriptor, stat.S_IMODE(os.stat(self.final).st_mode))
            os.replace(self.path, self.final)
            self._is_there = False
            return
        try:
            os.link(self.path, self.final)  # which, unlike a rename, never replaces a file that appeared meanwhile
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # The file system has no links: an empty file takes the name if nobody has it, and is replaced at once.
            os.close(os.open(self.final, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            try:
                os.replace(self.path, self.final)
            except OSError:
                os.unlink(self.final)
                raise
            self._is_there = False


def unfinished_file(
    what: str, path: str, *, overwrite: bool, how: str = OVERWRITE, done: str = "written"
) -> UnfinishedFile:
    """Return the unfinished file of a name, or raise DataFileError, which begins with `what`."""
    final = os.path.realpath(path)
    try:
        return UnfinishedFile(final, overwrite=overwrite)
    except (FileExistsError, BlockingIOError) as error:
        mend = "wait until it is complete" if isinstance(error, BlockingIOError) else f"{how} to replace it"
        found = f"{what} is there unfinished as {partial_of(final)}, {reason(error)}"
        raise DataFileError(f"{found}: {mend}, or name another file") from None
    except OSError as error:
        raise DataFileError(f"{what} cannot be {done}: {reason(error)}") from None


def replace_file(path: str, content: bytes) -> None:
    """Write a file, complete or not at all; one that is there is replaced. A symbolic link is followed."""
    with UnfinishedFile(os.path.realpath(path), overwrite=True) as file:
        write_all(file.descriptor, memoryview(content))
        file.commit()


def write_all(descriptor: int, data: memoryview, at: int = 0) -> int:
    """Write bytes to a file from a place on, and return how many; raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
    return done
