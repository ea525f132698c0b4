"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets


class UnfinishedFile:
    """
    A file that is written before it has its name; held by one process.

    Until `commit` it has no name at all where the file system can do that (``O_TMPFILE``), so that even a process that
    is killed leaves nothing. Elsewhere it has a hidden name in the same directory, which `discard` removes. A context
    manager that discards what was not committed. Its methods raise OSError.

    Attributes
    ----------
    final : str
        The name that it will have.
    descriptor : int
        Open for reading and writing.
    open_path : str
        Name under which a process of this node and user opens it until then.
    """

    def __init__(self, final: str) -> None:
        self.final = final
        self._hidden = os.path.join(os.path.dirname(final), f".uncut_mpi.{secrets.token_hex(8)}.part")
        self.descriptor, self._named = _create(os.path.dirname(final), self._hidden)
        self.open_path = self._hidden if self._named else f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor discarded."""
        return self._open

    def commit(self, *, overwrite: bool) -> None:
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
            self._give_name(overwrite=overwrite)
            directory = os.open(os.path.dirname(self.final), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the unfinished file. After `commit`, or a second time, it does nothing."""
        if not self._open:
            return
        self._open = False
        os.close(self.descriptor)
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self._hidden)

    def __enter__(self) -> UnfinishedFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.discard()

    def _give_name(self, *, overwrite: bool) -> None:
        if not overwrite:
            # A link, unlike a rename, never replaces a file that appeared meanwhile.
            self._link(self.final)
            return
        if not self._named:
            self._named = True  # first, so that an interrupt in between leaves nothing
            self._link_nameless(self._hidden)
        os.replace(self._hidden, self.final)
        self._named = False

    def _link(self, name: str) -> None:
        if not self._named:
            self._link_nameless(name)
            return
        try:
            os.link(self._hidden, name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # The file system has no links: an empty file takes the name if nobody has it, and is replaced at once.
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            try:
                os.replace(self._hidden, name)
            except OSError:
                os.unlink(name)
                raise
            self._named = False

    def _link_nameless(self, name: str) -> None:
        # A file without a name is linked through its descriptor. Only linkat, which Python calls when a
        # directory descriptor is given, follows the symbolic link that /proc shows for it.
        directory = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.link(str(self.descriptor), name, src_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)


def _create(directory: str, hidden: str) -> tuple[int, bool]:
    """Return a descriptor open for writing, and whether the file has to have its hidden name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    with contextlib.suppress(OSError):
        # Not every file system can do it (NFS cannot); the error differs, so any means the other way.
        return os.open(directory, flags | os.O_TMPFILE, 0o666), False
    return os.open(hidden, flags | os.O_CREAT | os.O_EXCL, 0o666), True
