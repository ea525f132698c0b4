"""Every example runs as its own header says, and says that it did."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.helpers.jobs import LIMIT_S, ROOT, ended, run_command, start

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAID = {
    "01_single_call.py": r"2 ranks, .* 300x200x400: largest error \S+",
    "02_reuse_a_plan.py": r"9 repeated calls: 0 planner calls, 0 bytes broadcast, largest error \S+",
    "03_host_matrices.py": r"A h0, B h, C 1: largest error \S+",
    "04_read_a_schedule.py": r"(?s)grid \d+x\d+, tile 2048, digest [0-9a-f]{32}\n.*COPY.*GEMM.*tasks of rank 3:",
    "cholesky.py": r"2 ranks, \S+ backend: 700x700 in \S+ ms, \S+ TFLOP/s\nlargest error of L L\^T \S+, bound \S+",
    "kernel_ridge.py": r"(?s)2 ranks, .* 1MiB for each .* of 2.9 MB .*\nerror on held-out points 0.0\d+, noise 0.05,",
    "mlp.py": r"uncut_mpi, 2 ranks, \S+ backend: \S+ ms a step\nerrors, as shares of their bounds: y \S+, .*W2 \S+\n",
    "newton_schulz.py": r"(?s)2 ranks, .* 128x320 bf16: \S+ ms a step, \S+ TFLOP/s\nsingular values 0.\d+ to 1.\d+,",
    "tensors.py": r"(?s)float64 on c.*float32 on c.*bfloat16 on c.*, C at \S+: largest error \S+",
}
NEEDS = {"tensors.py": "torch"}
LINES = {"cholesky.py": 100, "kernel_ridge.py": 130, "mlp.py": 151, "newton_schulz.py": 130}  # which do a whole job


def launch_line(example):
    """Return the command of an example's header."""
    return re.search(r"^    ((?:mpiexec|python) .*?)\s{2,}\(", example.read_text(), re.MULTILINE).group(1)


def test_every_example_is_named_here():
    assert [path.name for path in EXAMPLES] == sorted(SAID)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < LINES.get(example.name, 60)


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_its_header_says(example, tmp_path):
    needed = NEEDS.get(example.name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    output = run_command(launch_line(example), tmp_path, ROOT)
    assert re.search(SAID[example.name], output), output


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("newton_schulz.py", ["--steps", "2"], "the result is not orthogonal"),
        ("cholesky.py", ["--shift", "-1"], "Matrix is not positive definite"),
        ("kernel_ridge.py", ["--iterations", "1"], "the error on held-out points is larger"),
    ],
)
def test_an_example_whose_check_fails_ends_with_a_status(name, words, said):
    status, _, errors = ended(start(["-m", "mpi4py", ROOT / "examples" / name, *words]))
    assert status, errors
    assert said in errors


@pytest.mark.parametrize("name", LINES)
def test_a_whole_job_runs_on_several_nodes(name):
    process = start(["-m", "mpi4py", ROOT / "examples" / name], ranks=3, UNCUT_MPI_RANKS_PER_NODE="1")
    status, output, errors = ended(process, LIMIT_S)
    assert status == 0, errors
    assert "3 ranks" in output


def test_a_wrong_gradient_of_an_mlp_ends_with_a_status(tmp_path):
    text, right = (ROOT / "examples" / "mlp.py").read_text(), "dact.local[:] *= by"
    assert text.count(right) == 1
    wrong = tmp_path / "mlp.py"
    wrong.write_text(text.replace(right, f"{right}; dact.local[:1, :1] = 0"))  # one element of each rank
    status, _, errors = ended(start(["-m", "mpi4py", wrong]))
    assert status, errors
    assert "an error of uncut_mpi is larger than its bound" in errors


def test_pytorch_makes_what_the_mlp_does():
    pytest.importorskip("torch")
    example = ROOT / "examples" / "mlp.py"
    status, output, errors = ended(start(["-m", "mpi4py", example, "--host", "--beside-torch"]), LIMIT_S)
    assert status == 0, errors
    assert re.search(r"PyTorch, 2 ranks, host backend: \S+ ms a step\nerrors, .*W2 \S+\n", output), output


def test_a_tall_matrix_is_orthogonalised_as_its_transpose_is():
    example = ROOT / "examples" / "newton_schulz.py"
    status, output, errors = ended(start(["-m", "mpi4py", example, "--rows", "200", "--cols", "90"], ranks=3))
    assert status == 0, errors
    assert "200x90 bf16" in output
