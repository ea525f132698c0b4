"""Real jobs, mostly of two ranks, started by mpiexec from within a test, which may run under another mpiexec itself."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 60

MACHINE = (
    "import os; from uncut_mpi.model.ports import Net; "
    "E = min(W.size, int(os.environ.get('UNCUT_MPI_RANKS_PER_NODE') or W.size)); "
    "M = um.Machine.uniform(W.size) if E == W.size else um.Machine.joined("
    "[um.Machine.uniform(min(E, W.size - at)) for at in range(0, W.size, E)], [rank // E for rank in range(W.size)], "
    "Net(10.0, 5e-6))"
)
"""A line of a program with `um` and the communicator `W`: M is a machine of equal links on the nodes that there are."""


def launcher():
    """Return the mpiexec of the MPI in use."""
    beside = pathlib.Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def begin(command, cwd=ROOT, **environment):
    """Start a command, standard output and error apart; return the process."""
    # The job must not take this test's own launcher for its own.
    inherited = ("PMI", "HYD", "MPI", "OMPI_", "ORTE", "PMIX", "PRTE", "SLURM")
    kept = "OMPI_ALLOW_RUN_AS_ROOT"
    own = {name: value for name, value in os.environ.items() if not name.startswith(inherited) or name.startswith(kept)}
    return subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env={**own, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start(words, ranks=2, by=(), **environment):
    """Start ``python WORDS`` on some ranks by a command; return the process."""
    return begin([*by, launcher(), "-n", ranks, sys.executable, *words], **environment)


def start_gemm(*words, by=(), **environment):
    """Start the gemm command on the host backend on two ranks, by a command; return the process."""
    return start(["-m", "uncut_mpi.gemm", "--backend", "host", *words], by=by, **environment)


def ended(process, limit_s=25):
    """Return (exit status or None if it hung, standard output, standard error)."""
    try:
        output, errors = process.communicate(timeout=limit_s)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return None, output, errors


def wait_for(path, limit_s=20):
    """Wait until a file is there; return whether it came."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def run_command(command, cache, cwd=None):
    """Run what a reader types, which begins with mpiexec or python, and return what it prints; fail if it fails."""
    programs = {"python": sys.executable, "mpiexec": launcher()}
    words = [programs.get(word, word) for word in shlex.split(command)]
    status, output, errors = ended(begin(words, cwd or cache, XDG_CACHE_HOME=str(cache)), LIMIT_S)
    good = status == 0 and "leaked" not in errors  # of what the core has made
    assert good, f"{command}: status {status} (None: it hung)\n{output}{errors}"
    return errors + output
