"""
What it costs a program to meet products for the first time, on as many ranks as it is started with.

    mpiexec -n N python3 -m mpi4py tests/perf/first_calls.py OUT.json

Each program runs several times in one session, its products in host memory that all ranks share: what its products took
the first time is set beside the median of the later times. Results are checked.
"""

import json
import pathlib
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

AGAIN = 5
RNG = np.random.default_rng(11)


class Timed:
    """The products of a session, and what each of them took (s) in each pass through a program."""

    def __init__(self, session, passes=()):
        self.session, self.passes = session, list(passes)

    def gemm(self, *operands, **options):
        """As `Session.gemm`, timed from when all ranks are there."""
        self.session.barrier()
        start = time.perf_counter()
        result = self.session.gemm(*operands, **options)
        self.passes[-1].append(time.perf_counter() - start)
        return result

    def matrix(self, values):
        """Return a matrix in host memory with these values."""
        made = self.session.empty_host(values.shape)
        if self.session.rank == 0:
            made.array[...] = values
        return made


def trailing_updates(timed, size, width):
    """Subtract outer products from ever smaller corners of a matrix."""
    before = RNG.random((size, size))
    matrix, wanted = timed.matrix(before), before.copy()
    for at in range(width, size, width):
        timed.gemm(matrix[at:, at - width : at], matrix[at - width : at, at:], matrix[at:, at:], alpha=-1e-3, beta=1.0)
        wanted[at:, at:] -= 1e-3 * wanted[at:, at - width : at] @ wanted[at - width : at, at:]
    return np.abs(matrix.array - wanted).max() / np.abs(wanted).max()


def cholesky(timed, size, width):
    """Factorise a positive definite matrix by blocks of columns."""
    factor = RNG.random((size, size))
    whole = factor @ factor.T + size * np.eye(size)
    matrix = timed.matrix(whole)
    for at in range(0, size, width):
        end = at + width
        if timed.session.rank == 0:
            block = matrix.array[at:end, at:end] = np.linalg.cholesky(matrix.array[at:end, at:end])
            matrix.array[end:, at:end] = np.linalg.solve(block, matrix.array[end:, at:end].T).T
        timed.session.barrier()
        if end < size:
            below = matrix[end:, at:end]
            timed.gemm(below, below.T, matrix[end:, end:], alpha=-1.0, beta=1.0)
    lower = np.tril(matrix.array)
    return np.abs(lower @ lower.T - whole).max() / np.abs(whole).max()


def randomised_svd(timed, rows, cols, rank):
    """Find the largest singular values of a matrix of low rank, with two power iterations."""
    values = RNG.random((rows, rank)) @ RNG.random((rank, cols))
    a = timed.matrix(values)
    sample = timed.gemm(a, timed.matrix(RNG.random((cols, rank + 8))))
    for _ in range(2):
        sample = timed.gemm(a, timed.gemm(a.T, timed.matrix(np.linalg.qr(sample.array)[0])))
    basis = timed.matrix(np.linalg.qr(sample.array)[0])
    found = np.linalg.svd(timed.gemm(basis.T, a).array, compute_uv=False)[:rank]
    wanted = np.linalg.svd(values, compute_uv=False)[:rank]
    return np.abs(found - wanted).max() / wanted[0]


def shapes(timed, count, most):
    """Multiply matrices of many shapes."""
    off = 0.0
    for _ in range(count):
        m, n, k = (int(extent) for extent in RNG.integers(16, most, 3))
        left, right = RNG.random((m, k)), RNG.random((k, n))
        found = timed.gemm(timed.matrix(left), timed.matrix(right)).array
        off = max(off, np.abs(found - left @ right).max() / k)
    return off


PROGRAMS = {
    "15 trailing updates of 1024²": lambda timed: trailing_updates(timed, 1024, 64),
    "Cholesky of 1024² by 128": lambda timed: cholesky(timed, 1024, 128),
    "randomised SVD of 2000×600": lambda timed: randomised_svd(timed, 2000, 600, 20),
    "40 shapes below 400": lambda timed: shapes(timed, 40, 400),
}


def main(out):
    """Run the programs, print a table, and write what each call took."""
    global RNG
    comm, all_passes = MPI.COMM_WORLD, {}
    with um.Session(comm) as session:
        shapes(Timed(session, [[]]), 2, 200)  # libraries are loaded, the machine is known
    for name, program in PROGRAMS.items():
        with um.Session(comm, max_plans=64) as session:
            timed = Timed(session)
            for _ in range(1 + AGAIN):
                RNG = np.random.default_rng(11)  # the same values and shapes each time, on all ranks
                timed.passes.append([])
                off = program(timed)
                if off > 1e-10:
                    sys.exit(f"{name}: a relative error of {off:.1e}")
        first, *again = (sum(one) for one in timed.passes)
        usual = statistics.median(again)
        late = max(once - min(others) for once, *others in zip(*timed.passes, strict=True))
        if comm.rank == 0:
            print(
                f"{name}: first {1e3 * first:.1f} ms, again {1e3 * usual:.1f} ({first / usual:.2f} times), "
                f"at most {1e3 * late:.1f} more in a call",
                flush=True,
            )
        all_passes[name] = timed.passes
    if comm.rank == 0:
        about = {"ranks": comm.size, "device": session.device_names[0], "passes_s": all_passes}
        pathlib.Path(out).write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
