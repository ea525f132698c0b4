"""
What surrounds a run, for bug reports: each fact is asked for on its own, and one that cannot be had is said so.

Little is imported before it is asked for: what a broken installation cannot load is a fact, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import pkgutil
import platform
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from uncut_mpi.command.artifacts import write_file
from uncut_mpi.command.entry import Say, takes_output, tell
from uncut_mpi.errors import named
from uncut_mpi.free_memory import available_bytes
from uncut_mpi.numa import memory_nodes
from uncut_mpi.spmd.launcher import rank_of_process
from uncut_mpi.units import bytes_text, labelled, name_ranks

_DISTRIBUTIONS: Final = (
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "threadpoolctl",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-ml-py",
)
_VARIABLES: Final = re.compile(
    r"(UNCUT|CUDA|NVIDIA|MPICH|MPIR_CVAR|UCX|FI|OMPI_MCA|PRTE_MCA)_"
    r"|(OMP|OPENBLAS|MKL|BLIS)_NUM_THREADS$|(PMI|OMPI_COMM_WORLD)_SIZE$|LD_(PRELOAD|LIBRARY_PATH)$|XDG_CACHE_HOME$"
    r"|SLURM_(JOB_ID|STEP_ID|NTASKS|STEP_NUM_TASKS|JOB_NUM_NODES|JOB_PARTITION)$"
)
_OF_A_PROCESS: Final = re.compile(r"URI|PORT|NAMESPACE|KEY|TOKEN|SECRET|PASS|JOBID|_NODE|_RANK|VPID", re.IGNORECASE)
"""In names of variables that launchers set: different in each job, or nobody's business."""
_FREE: Final = re.compile(r"[\d.]+ \w*B free")  # differs from moment to moment
_NODE_PID_NAMESPACE: Final = 0xEFFFFFFC  # the kernel's own number for the first one
_PATIENCE_S: Final = 60.0

Facts = dict[str, list[str]]
"""By what they are about, in lines."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line asks for; errors and ``--help`` as those of other commands."""
    return make_env_parser().parse_args(list(argv)) if argv else argparse.Namespace(json=None)


def make_env_parser() -> argparse.ArgumentParser:
    """Return the env command's parser."""
    from uncut_mpi.command.flags import add_json, adder, base_parser  # which need the compiled part

    parser = base_parser(
        "python -m uncut_mpi.env",
        "Says what a bug report needs: versions, devices, limits, settings, and whether a session opens.",
        "examples:\n  python -m uncut_mpi.env\n  mpiexec -n 4 python -m uncut_mpi.env --json env.json\n",
    )
    add_json(adder(parser.add_argument_group("report")), "the facts of every rank")
    return parser


def run(arguments: argparse.Namespace, say: Say) -> None:
    """Ask for all there is to know and say it. Collective where MPI can be had."""
    facts = _of_process()
    first = rank_of_process() == 0
    if first:  # now: what follows is not ours, and may end this process
        tell([_text(facts)], aside=takes_output(arguments))
    job = _of_job()
    everyone = [facts | job]
    try:
        everyone = _gathered(facts | job)
    except Exception as error:
        job["ranks"] = [_unknown(error)]
    if first:
        say(_text(job) + "".join(_differences(everyone)))
        write_file("--json", arguments.json, (json.dumps(everyone, indent=1) + "\n").encode())


def _text(facts: Facts) -> str:
    lines = [labelled(label, found) for label, found in facts.items()]
    return "".join(f"{one}\n" for found in lines for one in found)


def _differences(everyone: Sequence[Facts]) -> Iterator[str]:
    """Yield the lines that other ranks have and rank 0 has not, each with the ranks that have it."""
    for label, found in everyone[0].items():
        known = {_FREE.sub("", one) for one in found}
        others: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            for one in facts[label]:
                if _FREE.sub("", one) not in known:
                    others.setdefault(one, []).append(rank)
        yield _text({label: [f"{name_ranks(ranks)}: {one}" for one, ranks in others.items()]})


def _asked(**asked: Callable[[], Sequence[str]]) -> Facts:
    """Return the lines that each function has found, or why it has not: whatever is broken, the other facts count."""
    facts = {}
    for label, about in asked.items():
        try:
            facts[label] = list(about()) or ["none"]
        except Exception as error:
            facts[label] = [_unknown(error)]
    return facts


def _unknown(error: BaseException) -> str:
    return f"cannot be had: {' '.join(named(error).split())}"


# -- of this process -----------------------------------------------------------------------------


def _of_process() -> Facts:
    """Return what needs neither MPI nor a GPU."""
    return _asked(
        uncut_mpi=_package,
        python=lambda: [f"{platform.python_version()}, {sys.executable}"],
        packages=lambda: [", ".join(_versions())],
        blas=_blas,
        system=lambda: [f"{platform.node()}: {platform.platform()}, {' '.join(platform.libc_ver())}"],
        processor=_processor,
        memory=_memory,
        container=_container,
        variables=_variables,
    )


def _package() -> list[str]:
    where = pathlib.Path(__file__).resolve().parents[1]
    from uncut_mpi import _native

    return [f"{importlib.metadata.version('uncut_mpi')} in {where}, compiled part {_native.__file__}"]


def _versions() -> Iterator[str]:
    for name in _DISTRIBUTIONS:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"no {name}"


def _blas() -> list[str]:
    from uncut_mpi.device.host.system import BlasThreads

    blas = BlasThreads(len(os.sched_getaffinity(0)))
    return [f"{blas.name}, {blas.num_threads} threads at most"]


def _processor() -> list[str]:
    from uncut_mpi.device.host.system import processor_name, usable_cores

    nodes = memory_nodes()
    numa = f"NUMA nodes with memory {', '.join(map(str, nodes))}" if nodes else "no NUMA nodes told"
    return [f"{processor_name()}, {usable_cores()} of {os.cpu_count()} cores, {numa}"]


def _memory() -> list[str]:
    free, limit = available_bytes()
    shm = os.statvfs("/dev/shm")
    soft, hard = (
        "no limit" if one == resource.RLIM_INFINITY else bytes_text(one)
        for one in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return [
        f"{bytes_text(free)} free ({limit}) of {bytes_text(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}",
        f"/dev/shm {bytes_text(shm.f_bavail * shm.f_frsize)} free of {bytes_text(shm.f_blocks * shm.f_frsize)}",
        f"locked at most (ulimit -l) {soft}" + ("" if soft == hard else f", can be raised to {hard}"),
    ]


def _container() -> list[str]:
    own = os.stat("/proc/self/ns/pid").st_ino != _NODE_PID_NAMESPACE
    marks = [path for path in ("/.dockerenv", "/run/.containerenv", "/.singularity.d") if os.path.exists(path)]
    return [
        f"{'a PID namespace of its own' if own else 'the PID namespace of the node'}"
        f"{', ' if marks else ''}{', '.join(marks)}; processor time {_processor_share()}"
    ]


def _processor_share() -> str:
    """Return what the control group allows, by the files of either version."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        files = [pathlib.Path("/sys/fs/cgroup", name) for name in names]
        if all(file.is_file() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            return "without limit" if quota in ("max", "-1") else f"of {int(quota) / int(period):g} cores"
    return "without a limit that is told"


def _variables() -> list[str]:
    return [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name) and not _OF_A_PROCESS.search(name)
    ]


# -- of the job ----------------------------------------------------------------------------------


def _of_job() -> Facts:
    """Return what needs MPI, a GPU or both. Collective, as far as it comes."""
    gpus, mpi = "uncut_mpi.device.select:describe_gpus", "uncut_mpi.spmd.runtime:describe"
    return _asked(
        gpus=lambda: pkgutil.resolve_name(gpus)(),
        mpi=lambda: pkgutil.resolve_name(mpi)(),
        session=_session,
        job=_job,
    )


def _session() -> list[str]:
    """Open a session of this rank alone; nothing is measured and kept for it."""
    from uncut_mpi.api.session import Session
    from uncut_mpi.model.machine import Machine
    from uncut_mpi.spmd.runtime import MPI

    with Session(MPI.COMM_SELF, machine=Machine.uniform(1), ranks_per_node=1) as session:
        versions = ", ".join(f"{name} {version}" for name, version in session.versions.items())
        return [f"opens with one rank: {session.backend_name} ({session.backend_reason}), {versions}"]


def _job() -> list[str]:
    """Give all ranks their devices, as a session does, and look for the machine that it would plan with."""
    from uncut_mpi.api.lifetime import ranks_per_node_of
    from uncut_mpi.api.measure import cache_directory, machine_key
    from uncut_mpi.api.start import start_backend
    from uncut_mpi.model.arguments import counted
    from uncut_mpi.model.machine_files import load_machine
    from uncut_mpi.spmd.group import Group
    from uncut_mpi.spmd.runtime import world

    with Group(world(), _PATIENCE_S, ranks_per_node_of(None)) as group:
        where = f"{counted(group.size, 'rank')} on {counted(group.num_nodes, 'node')}"
        started = start_backend(group, backend="auto", devices=None, allow_shared_gpu=False)
        started.backend.close()
        path = cache_directory() / f"{machine_key(started.identities, group.hosts, group.node_of)}.json"
    kept = load_machine(str(path)).provenance if path.is_file() else "not there yet, the first session measures it"
    return [f"{where}: {started.backend.name} ({started.reason})", f"machine {path}: {kept}"]


def _gathered(facts: Facts) -> list[Facts]:
    from uncut_mpi.spmd.group import Group
    from uncut_mpi.spmd.runtime import world

    with Group(world(), _PATIENCE_S) as group:
        return group.allgather_objects(facts, "gathering what ranks know", _PATIENCE_S)
