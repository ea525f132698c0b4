"""
Files that appear under their name only when they are complete.

Until then a file is called as it will be, with ``.partial`` behind that, in the same folder. An error removes it, on
whichever process of its job; a job that is killed leaves it, and the next one says so.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterator
from typing import Final

from uncut_mpi.errors import DataFileError, reason
from uncut_mpi.regular import open_regular

OVERWRITE: Final = "give --overwrite"
"""How commands are told to replace a file."""

PARTIAL: Final = ".partial"
LEFT: Final = "UNCUT_MPI_LEFT"
"""In the environment of what launch/node starts: a folder with a link to each unfinished file, named as its inode."""
_logger = logging.getLogger("uncut_mpi")
_MOST_BYTES: Final = 255  # of a name in a folder


def partial_of(final: str) -> str:
    """Return what a file is called until it is complete; the end of a name that is too long is left out."""
    folder, name = os.path.split(final)
    return os.path.join(folder, os.fsdecode(os.fsencode(name)[: _MOST_BYTES - len(PARTIAL)]) + PARTIAL)


def _made(path: str) -> int:
    return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


class Discardable:
    """
    A file without its name that this process removes if its job fails; written here, or held by a peer.

    Parameters
    ----------
    path : str
        What it is called.
    descriptor : int
        By which it is open here; closed by `discard`.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path, self.descriptor = os.path.abspath(path), descriptor
        self.is_open = self._is_there = True
        self._process, self._link = os.getpid(), ""
        _open.add(self)

    def discard(self) -> None:
        """Remove it, unless it has its name. A second call does nothing."""
        _open.discard(self)
        if self.is_open:
            self.is_open = False
            if self._is_there and self._is_mine():
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
            os.close(self.descriptor)
            if self._link and self._process == os.getpid():
                with contextlib.suppress(OSError):
                    os.unlink(self._link)

    def tell(self) -> None:
        """Say that it is left, if this process has made it."""

    def _is_mine(self) -> bool:
        """Return whether the file still has its name, no other one has taken it, and this is no fork."""
        with contextlib.suppress(FileNotFoundError):
            same = os.path.samestat(os.fstat(self.descriptor), os.lstat(self.path))
            return same and self._process == os.getpid()
        return False


_open: Final[set[Discardable]] = set()


class UnfinishedFile(Discardable):
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
        self.final, self._overwrite = final, overwrite
        super().__init__(partial_of(final), _made(partial_of(final)))
        self._is_there = False
        try:
            self._take()
        except BaseException:
            self.discard()
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
        if not self._is_mine():  # completed meanwhile
            raise in_use
        if found.st_size:
            if not self._overwrite:
                raise FileExistsError(errno.EEXIST, "a job that was cut short has left it")
            os.unlink(self.path)  # and not emptied: a process of that job may still be about to discard what it knows
            fresh = _made(self.path)
            os.dup2(fresh, self.descriptor, inheritable=False)
            os.close(fresh)
            self._take()
            return
        self._is_there = True
        if folder := os.environ.get(LEFT):
            self._link = os.path.join(folder, str(found.st_ino))
            with contextlib.suppress(OSError):  # another node than the launcher's
                os.symlink(self.path, self._link)
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
        finally:
            self.discard()
        with contextlib.suppress(OSError):  # it is complete, also in a folder that nobody may read
            directory = os.open(os.path.dirname(self.final), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def tell(self) -> None:
        """Say that it is left."""
        if self._process == os.getpid():
            mend = "call Session.commit or Session.close before the end (overwrite=True makes it again)"
            _logger.warning("%s was not completed and is left as %s: %s", self.final, self.path, mend)

    def __enter__(self) -> UnfinishedFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()

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


@contextlib.contextmanager
def naming(what: str, path: str, how: str = OVERWRITE, done: str = "written") -> Iterator[str]:
    """Yield the name of a file to be made, without symbolic links; raise DataFileError, which begins with `what`."""
    if os.path.basename(path) in ("", os.curdir, os.pardir):
        raise DataFileError(f"{what or 'an empty path'} names no file: end it with the name of one")
    final = os.path.realpath(path)
    try:
        yield final
    except (FileExistsError, BlockingIOError) as error:
        mend = "wait until it is complete" if isinstance(error, BlockingIOError) else f"{how} to replace it"
        if any(one.path == partial_of(final) for one in _open):
            mend = "commit or release the matrix that writes it"
        found = f"{what} is there unfinished as {partial_of(final)}, {reason(error)}"
        raise DataFileError(f"{found}: {mend}, or name another file") from None
    except OSError as error:
        raise DataFileError(f"{what} cannot be {done}: {reason(error)}") from None


def discard_unfinished() -> None:
    """Remove all files that this process writes or helps to write and that have no name yet: its job fails. Local."""
    for file in [*_open]:
        file.discard()


@atexit.register
def _end() -> None:
    """Discard them after an error that nobody caught, but for one at a prompt; else say what is left."""
    if hasattr(sys, "last_type") and not hasattr(sys, "ps1"):
        discard_unfinished()
    for file in _open:
        file.tell()


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
