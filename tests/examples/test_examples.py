"""Every example runs as its own header says, and says that it did."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIMIT_S = 60
SAID = {
    "01_single_call.py": r"2 ranks, .* 300x200x400: largest error \S+",
    "02_reuse_a_plan.py": r"9 repeated calls: 0 planner calls, 0 bytes broadcast, largest error \S+",
    "03_host_matrices.py": r"A h0, B h, C 1: largest error \S+",
    "04_read_a_schedule.py": r"(?s)grid \d+x\d+, tile 2048, digest [0-9a-f]{32}\n.*COPY.*GEMM.*tasks of rank 3:",
}


def launch_line(example):
    """Return the command of an example's header, for the interpreter and launcher of this environment."""
    line = re.search(r"^    ((?:mpiexec|python) .*?)\s{2,}\(", example.read_text(), re.MULTILINE).group(1)
    command = line.split()
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    programs = {"python": sys.executable, "mpiexec": mpiexec}
    return [programs.get(word, word) for word in command]


def test_every_example_is_named_here():
    assert [path.name for path in EXAMPLES] == sorted(SAID)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_its_header_says(example, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        launch_line(example),
        cwd=ROOT,
        env=environment,
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
        pytest.fail(f"still running after {LIMIT_S} s:\n{output}")
    assert process.returncode == 0, output
    assert re.search(SAID[example.name], output), output
