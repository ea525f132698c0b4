"""Commands as a reader types them, run with the interpreter and the launcher of this environment."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60


def run_command(command, cache, cwd=None):
    """Run a command line that begins with mpiexec or python and return what it prints; fail if it fails or hangs."""
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    programs = {"python": sys.executable, "mpiexec": mpiexec}
    process = subprocess.Popen(
        [programs.get(word, word) for word in shlex.split(command)],
        cwd=cwd or cache,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher passes it on to its ranks
        output, _ = process.communicate(timeout=20)
        pytest.fail(f"still running after {LIMIT_S} s: {command}\n{output}")
    assert process.returncode == 0, f"{command}\n{output}"
    return output
