"""Machine files: those that ship with the package in ``uncut_mpi/machines``, and one's own."""

from __future__ import annotations

import pathlib
from importlib import resources
from typing import Final

from uncut_mpi.errors import ParamError, reason
from uncut_mpi.model.arguments import shown
from uncut_mpi.model.machine import Machine
from uncut_mpi.regular import read_regular

_FOLDER: Final = resources.files("uncut_mpi") / "machines"
_SUFFIX: Final = ".json"
_MOST_BYTES: Final = 1 << 26  # a whole calibration of eight GPUs, with its samples, has a hundredth of that


def machine_names() -> list[str]:
    """Return the names of the machines that ship with the package, in alphabetical order."""
    return sorted(file.name.removesuffix(_SUFFIX) for file in _FOLDER.iterdir() if file.name.endswith(_SUFFIX))


def load_machine(name_or_path: str | pathlib.Path) -> Machine:
    """
    Return a machine that ships with the package, or one from a file.

    Local: reads one file, no MPI or CUDA call.

    Parameters
    ----------
    name_or_path : str or pathlib.Path
        One of `machine_names`, or the path of a file that `Machine.to_json` wrote. A name goes first;
        write ``./name`` for a file that is called like a machine that ships.

    Returns
    -------
    Machine
        Its `provenance` says where each figure comes from.

    Raises
    ------
    ParamError
        If it is neither, or the file is not a machine file of this format.
    """
    names = machine_names()
    try:
        if isinstance(name_or_path, str) and name_or_path in names:
            text = (_FOLDER / f"{name_or_path}{_SUFFIX}").read_text(encoding="utf-8")
        else:
            text = read_regular(name_or_path, _MOST_BYTES).decode("utf-8")
    except (OSError, ValueError, TypeError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise ParamError(
            f"machine {_quoted(name_or_path)} is neither one that ships with the package nor a file that can be read "
            f"({why}): use one of {', '.join(names)}, or the path of a file with Machine.to_json's text"
        ) from None
    try:
        return Machine.from_json(text)
    except ParamError as error:
        raise ParamError(f"{name_or_path}: {error}") from None


def _quoted(value: object) -> str:
    """Return what a caller asked for in quotes, a path as it is written."""
    return repr(str(value)) if isinstance(value, str | pathlib.PurePath) else shown(value)
