"""Other libraries' processes, as the bench command's rank 0 starts, asks and ends them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.baselines.task import Task, words
from uncut_mpi.model.dtypes import DType
from uncut_mpi.segments import Segment

BASELINES: Final = {"numpy": ("host",), "cublas": ("cuda",), "cublasxt": ("cuda",), "jax": ("cuda", "host")} | {
    "torch": ("cuda", "host")
}
"""Backends on which each of them stands for the same hardware."""

_LAUNCHERS: Final = ("PMI", "OMPI_", "PRTE_", "MPI", "HYDRA", "HYDI", "SLURM_")
HOARDERS: Final = ("jax",)
"""Libraries whose processes keep device memory for as long as they live."""

ANSWER_S: Final = 600.0
"""How long a process may think about an answer, at least."""

_END_S: Final = 5.0
_LAST_WORDS_BYTES: Final = 400


class BaselineError(Exception):
    """A library could not do what it was asked; the text says why. On rank 0 alone: the others are told."""


class BaselineProcess:
    """
    One library in a process that has all the devices. On rank 0 alone.

    Parameters
    ----------
    name : str
        Of `BASELINES`.
    backend : str
        ``"cuda"`` or ``"host"``.
    devices : sequence of str
        UUIDs of the devices in the order of their numbers; with the host backend only their count matters.
    """

    def __init__(self, name: str, backend: str, devices: Sequence[str]) -> None:
        asked, self._ask = os.pipe()
        self._answers, answering = os.pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._rest = b""
        self.name = name
        bound = os.sched_getaffinity(0)
        try:
            # All cores, from the start, when a BLAS counts them: this rank may have been bound to some.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, range(os.cpu_count() or 1))
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "uncut_mpi.baselines"),
                    *(name, backend, str(len(devices)), str(asked), str(answering)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(asked, answering),
                env=environment(os.environ, backend, devices),
            )
        except OSError as error:
            os.close(self._ask)
            os.close(self._answers)
            self._ask = -1
            self._said.close()
            raise BaselineError(f"the process of {name} cannot be started: {error.strerror}") from None
        finally:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, bound)
            os.close(asked)
            os.close(answering)

    def ask(self, message: Mapping[str, Any], patience_s: float = ANSWER_S) -> dict[str, Any]:
        """
        Return the answer to a message.

        Raises
        ------
        BaselineError
            If the library says that it cannot, fails, ends, or is silent for too long; the process is no
            more then, but in the first case.
        """
        try:
            os.write(self._ask, words(dict(message)))
        except BrokenPipeError:
            raise self._ended() from None
        deadline = time.monotonic() + patience_s
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.close(at_once=True)
                raise BaselineError(f"{self.name} gave no answer for {patience_s:g} s")
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise self._ended()
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            if answer["ends"]:
                self.close()
            raise BaselineError(answer["error"])
        return answer

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._ask >= 0 and self._process.poll() is None

    def close(self, *, at_once: bool = False) -> None:
        """End the process. A second call does nothing."""
        if self._ask < 0:
            return
        os.close(self._ask)  # it ends when nobody asks any more
        self._ask = -1
        try:
            self._process.wait(0 if at_once else _END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._said.close()

    def _ended(self) -> BaselineError:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _LAST_WORDS_BYTES))
        last = self._said.read().decode(errors="replace").strip()
        status = self._process.returncode
        self.close()
        return BaselineError(f"the process of {self.name} ended with status {status}: {last or 'it said nothing'}")


def environment(ours: Mapping[str, str], backend: str, devices: Sequence[str]) -> dict[str, str]:
    """
    Return the environment of a baseline's process: nothing of the MPI job, all devices, all cores.

    Parameters
    ----------
    ours : mapping
        That of rank 0.
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
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
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
        place: tuple[int | None, int | None, int | None],
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
