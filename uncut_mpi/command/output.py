"""Whether the result file of a command can be written."""

from __future__ import annotations

from uncut_mpi.api.matrix_files import check_new
from uncut_mpi.command.artifacts import check_writable, stream_number
from uncut_mpi.errors import DataFileError


def check_output(path: str, *, overwrite: bool) -> None:
    """
    Check that a file of this name could be written.

    Raises
    ------
    DataFileError
        If it exists (without `overwrite`), also unfinished, is no regular file, or its directory is missing or
        cannot be written.
    """
    if stream_number(path) is not None:
        raise DataFileError(f"{path} is a stream of this process, not a regular file: name another one")
    check_new(path, overwrite=overwrite)
    check_writable(path, path, overwrite=overwrite)
