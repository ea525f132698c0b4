"""Other libraries' processes, as the bench command's rank 0 starts, asks and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import numpy as np

from uncut_mpi.bench.baselines.task import Task, words
from uncut_mpi.errors import reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.segments import Segment
from uncut_mpi.spmd.launcher import own_mpiexec
from uncut_mpi.spmd.runtime import library_version

BASELINES: Final = {
    "numpy": ("host",),
    "scipy": ("host",),
    "pdgemm": ("host",),
    "cublas": ("cuda",),
    "cublasxt": ("cuda",),
    "cublasmp": ("cuda",),
    **dict.fromkeys(("jax", "torch", "dtensor", "floor"), ("cuda", "host")),
}
"""Backends on which each of them stands for the same hardware."""

FLOOR: Final = "floor"
"""What is measured as other libraries are, but is none: the time of the arithmetic alone."""

JOBS: Final = ("pdgemm", "cublasmp", "dtensor")
"""Libraries that multiply in a process for each rank, which their own MPI job starts."""

_LAUNCHERS: Final = ("PMI", "OMPI_", "PRTE_", "MPI", "HYDRA", "HYDI", "SLURM_")
HOARDERS: Final = ("jax",)
"""Libraries whose processes keep device memory for as long as they live."""

ANSWER_S: Final = 600.0
"""How long a process may think about an answer, at least."""

JOB_ANSWER_S: Final = 120.0
"""The same of a job, whose processes may wait for one that has failed."""

_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_LAUNCHED: Final = {
    # As launch/environment has it, and no process bound to a core, where its BLAS would be bound too.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    # Nothing starts elsewhere. Without ssh Open MPI 4 does not start here either, unless it is told another program.
    "OMPI_MCA_plm_rsh_agent": "sh",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
_LOOK_S: Final = 0.05
_END_S: Final = 5.0
_LAST_WORDS_BYTES: Final = 400


class BaselineError(Exception):
    """A library could not do what it was asked; the text says why. On rank 0 alone: the others are told."""


class BaselineProcess:
    """
    One library in a process that has all the devices, or in a job of processes that have one each. On rank 0 alone.

    Parameters
    ----------
    name : str
        Of `BASELINES`.
    backend : str
        ``"cuda"`` or ``"host"``.
    devices : sequence of str
        UUIDs of the devices in the order of their numbers; with the host backend only their count matters.

    Attributes
    ----------
    patience_s : float
        How long it may think about an answer, at least.
    """

    def __init__(self, name: str, backend: str, devices: Sequence[str]) -> None:
        self.name = name
        self._count = len(devices) if name in JOBS else 1
        self.patience_s = JOB_ANSWER_S if name in JOBS else ANSWER_S
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._folder = tempfile.TemporaryDirectory(prefix="uncut-", ignore_cleanup_errors=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._lines: dict[socket.socket, IO[bytes]] = {}  # of each process that has come, to read its answers from
        self._open = True
        launcher: list[str] = []
        ours: Mapping[str, str] = os.environ
        if name in JOBS:
            launcher = [own_mpiexec(library_version()), "-n", str(self._count)]
            ours = {**os.environ, **job_environment(self._folder.name, self._count)}
        bound = os.sched_getaffinity(0)
        try:
            path = os.path.join(self._folder.name, "asks")
            self._listener.bind(path)
            self._listener.listen(self._count)
            # All cores, from the start, when a BLAS counts them: this rank may have been bound to some.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
            self._process = subprocess.Popen(
                [
                    *launcher,
                    *(sys.executable, "-m", "uncut_mpi.bench.baselines", name, backend, str(len(devices)), path),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                env=environment(ours, backend, devices, job=name in JOBS),
            )
        except OSError as error:
            self._free()
            raise BaselineError(f"the process of {name} cannot be started: {reason(error)}") from None
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, bound)

    def ask(self, message: Mapping[str, Any], patience_s: float | None = None) -> dict[str, Any]:
        """
        Return the answer to a message; of a job's processes, which all answer the same, that of the first.

        Parameters
        ----------
        message : mapping
            What each process is told.
        patience_s : float, optional
            How long it may take; the attribute by default.

        Raises
        ------
        BaselineError
            If the library says that it cannot, fails, ends, or is silent for too long; the process is no
            more then, but in the first case.
        """
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline = time.monotonic() + patience_s
        answers: list[dict[str, Any]] = []
        try:
            while len(self._lines) < self._count and time.monotonic() < deadline:
                self._accept()
            for connection in self._lines:
                connection.sendall(words(dict(message)))
            waiting = set(self._lines)
            while waiting:
                left = max(0.0, deadline - time.monotonic())
                for connection in (come := select.select([*waiting], [], [], left)[0]):
                    line = self._lines[connection].readline()
                    if not line:
                        raise self._ended()
                    waiting.discard(connection)
                    answers.append(json.loads(line))
                    if "error" in answers[-1]:  # the others may wait for this one
                        deadline = min(deadline, time.monotonic() + _END_S)
                if not come:
                    break
        except (BrokenPipeError, ConnectionResetError):
            raise self._ended() from None
        failed = [answer for answer in answers if "error" in answer]
        silent = len(answers) < self._count
        if silent or any(answer["ends"] for answer in failed):
            self.close(at_once=silent)
        if failed:
            raise BaselineError(failed[0]["error"])
        if silent:
            raise BaselineError(f"{self.name} gave no answer for {patience_s:g} s")
        return answers[0]

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._open and self._process.poll() is None

    def close(self, *, at_once: bool = False) -> None:
        """End the process. A second call does nothing."""
        if not self._open:
            return
        for connection, lines in self._lines.items():
            lines.close()
            connection.close()  # it ends when nobody asks any more
        self._lines.clear()
        self._end(0 if at_once else _END_S)
        self._free()

    def _accept(self) -> None:
        """Take on one more process if it comes, and look whether there still is one."""
        self._listener.settimeout(_LOOK_S)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            if self._process.poll() is not None:
                raise self._ended() from None
        else:
            connection.settimeout(None)
            self._lines[connection] = connection.makefile("rb")

    def _end(self, patience_s: float) -> None:
        # A launcher ends its processes when it is told to end, and cannot when it is killed.
        for end in ([self._process.terminate] if self.name in JOBS else []) + [self._process.kill]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                return
            end()
            patience_s = _END_S
        self._process.wait()

    def _free(self) -> None:
        self._open = False
        self._listener.close()
        self._said.close()
        self._folder.cleanup()

    def _ended(self) -> BaselineError:
        self._end(_END_S)
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _LAST_WORDS_BYTES))
        last = self._said.read().decode(errors="replace").strip()
        status = self._process.returncode
        self.close()
        return BaselineError(f"the process of {self.name} ended with status {status}: {last or 'it said nothing'}")


def job_environment(folder: str, count: int) -> dict[str, str]:
    """
    Return what the processes of a library's own MPI job need of their environment.

    Parameters
    ----------
    folder : str
        A folder for the job. It gets a link to this process's MPI library, named as Debian's ScaLAPACK asks for one of
        that ABI. So the job has one MPI and not two.
    count : int
        How many processes.
    """
    with open("/proc/self/maps", encoding="utf-8") as maps:
        mapped = (line.rsplit(maxsplit=1)[-1] for line in maps)
        mine = next((path for path in mapped if re.search(r"/libmpi(ch)?\.so\.12", path)), None)
    if mine is not None:
        os.symlink(mine, os.path.join(folder, "libmpich.so.12"))
    paths = [folder, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    threads = str(max(1, (os.cpu_count() or 1) // count))
    return {"LD_LIBRARY_PATH": ":".join(paths), **dict.fromkeys(_THREADS, threads)}


def environment(ours: Mapping[str, str], backend: str, devices: Sequence[str], *, job: bool = False) -> dict[str, str]:
    """
    Return the environment of a baseline's process: nothing of our MPI job, all devices, all cores.

    Parameters
    ----------
    ours : mapping
        That of rank 0.
    job : bool
        Whether it is a launcher's, of as many processes as devices, which share the cores as `ours` says.
    """
    found = {name: value for name, value in ours.items() if not name.startswith(_LAUNCHERS)}
    # JAX takes three quarters of every GPU at its start otherwise, and our matrices are there as well.
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if backend == "cuda":
        found["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(devices))
    else:
        found["JAX_PLATFORMS"] = "cpu"
        flags = f"{ours.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={len(devices)}"
        found["XLA_FLAGS"] = flags.strip()
        found["CUDA_VISIBLE_DEVICES"] = ""
    if job:
        return found | _LAUNCHED
    for name in _THREADS:
        found.pop(name, None)
    return found


class SharedTask:
    """
    A product's matrices in memory that baselines open. On rank 0 alone.

    Parameters
    ----------
    a, b, c : ndarray, shapes (m, k), (k, n), (m, n)
        Column-major; C as it is before a call. Copied.
    dtype : DType
        Their type.

    Raises
    ------
    CapacityError
        If there is no memory for the copies.
    """

    def __init__(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: DType) -> None:
        self._extents = (*c.shape, a.shape[1])
        self._dtype = dtype
        self._segments: list[Segment] = []
        try:
            for name, matrix in (("A", a), ("B", b), ("C", c)):
                segment = self._new(matrix.nbytes, name)
                np.copyto(segment.array(dtype.numpy, matrix.shape[::-1]), matrix.T)
            self._new(c.nbytes, "C")
        except BaseException:
            self.close()
            raise

    def task(
        self,
        alpha: float,
        beta: float,
        place: tuple[int | str | None, int | str | None, int | str | None],
        compute: tuple[int, ...],
    ) -> Task:
        """Return the task of multiplying them."""
        m, n, k = self._extents
        a, b, c, out = (segment.handle for segment in self._segments)
        return Task(m, n, k, self._dtype, alpha, beta, place, compute, a, b, c, out)

    def poison(self) -> None:
        """Fill the room for C with NaN, so that a result that nobody writes cannot pass a check."""
        self.result().fill(np.nan)

    def result(self) -> np.ndarray:
        """Return C as a baseline has stored it, shape (m, n), column-major."""
        m, n, _ = self._extents
        result: np.ndarray = self._segments[3].array(self._dtype.numpy, (n, m)).T
        return result

    def close(self) -> None:
        """Give the memory back."""
        for segment in self._segments:
            segment.close()

    def _new(self, nbytes: int, name: str) -> Segment:
        segment = Segment.create(nbytes, f"{name} for the processes of other libraries", interleave=True)
        self._segments.append(segment)
        return segment
