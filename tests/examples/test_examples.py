"""Every example runs as its own header says, and says that it did."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.helpers.jobs import LIMIT_S, ROOT, run_command

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAID = {
    "01_single_call.py": r"2 ranks, .* 300x200x400: largest error \S+",
    "02_reuse_a_plan.py": r"9 repeated calls: 0 planner calls, 0 bytes broadcast, largest error \S+",
    "03_host_matrices.py": r"A h0, B h, C 1: largest error \S+",
    "04_read_a_schedule.py": r"(?s)grid \d+x\d+, tile 2048, digest [0-9a-f]{32}\n.*COPY.*GEMM.*tasks of rank 3:",
    "tensors.py": r"(?s)float64 on c.*float32 on c.*bfloat16 on c.*, C at \S+: largest error \S+",
}
NEEDS = {"tensors.py": "torch"}


def launch_line(example):
    """Return the command of an example's header."""
    return re.search(r"^    ((?:mpiexec|python) .*?)\s{2,}\(", example.read_text(), re.MULTILINE).group(1)


def test_every_example_is_named_here():
    assert [path.name for path in EXAMPLES] == sorted(SAID)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_its_header_says(example, tmp_path):
    needed = NEEDS.get(example.name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    output = run_command(launch_line(example), tmp_path, ROOT)
    assert re.search(SAID[example.name], output), output
