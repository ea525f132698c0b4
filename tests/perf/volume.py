"""
How many bytes a product moves between nodes: ours beside ScaLAPACK's, for the same matrices dealt alike.

    python3 tests/perf/volume.py OUT.jsonl

Each rank is a node of its own (`launch/test-nodes`, so as root), and what enters its network link is counted by the
system, headers and all. So it does not matter by which calls of MPI a library moves something. Matrices are f64, in
blocks of 64x64, dealt in turn to a grid of ranks, in their host memory. Ours is what `auto` chooses, once for the
machine that a first session measures here, once for equal nodes, where bytes decide. Each is called once before, and
results are checked. Beside them stand COSMA's volume by its formula, and the least of a node by ours.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import mpi4py
import numpy as np

import uncut_mpi as um
from uncut_mpi.bench.baselines.scalapack import ScalapackLibrary
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.bench.processes import job_environment
from uncut_mpi.model.bounds import least_bytes_of_a_node
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem

ROOT = pathlib.Path(__file__).resolve().parents[2]
GRIDS = (2, 2), (2, 4)
PRODUCTS = (1024, 1024, 1024), (2048, 2048, 2048), (4096, 512, 512), (512, 512, 8192)
BLOCK, ALPHA, BETA, TIMES = 64, 1.2345, 1.1154, 3
NET = Net(25.0, 2e-6)  # of equal nodes, each with a device of 60 TFLOP/s
NETWORK = {"MPIR_CVAR_CH4_NETMOD": "ofi"}  # over UCX of MPICH 5.0.2 pdgemm waits for ever
SETTLE_S = 0.2  # for acknowledgements on their way


def into_this_node():
    """Return how many bytes have come over the node's link."""
    lines = pathlib.Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if "eth0:" in line)


def counted(comm, call):
    """Return the bytes that entered each node in a call (on rank 0)."""
    comm.Barrier()
    time.sleep(SETTLE_S)
    before = into_this_node()
    comm.Barrier()  # so that nobody has begun
    call()
    time.sleep(SETTLE_S)
    return comm.gather(into_this_node() - before)


def cosma(extents, ranks):
    """
    Return what COSMA moves between ranks from its own layouts at least, and converting to them and back adds about.

    The first is the least of all grids of three dimensions (Kwasniewski and others, SC 2019, memory without limit). In
    a part of its layouts each rank has nearly a P-th of what is dealt in small blocks, so all but that moves.
    """
    m, n, k = extents
    grids = [(p, q, ranks // p // q) for p in range(1, ranks + 1) for q in range(1, ranks + 1) if ranks % (p * q) == 0]
    # Each rank gathers its blocks of A and B from the ranks that share them, and sums of C are scattered so.
    least = min(8 * (m * k * (q - 1) + k * n * (p - 1) + m * n * (r - 1)) for p, q, r in grids)
    return least, 8 * (m * k + k * n + m * n) * (ranks - 1) // ranks


class Case:
    """A product of dealt matrices, and what it should be."""

    def __init__(self, comm, extents, grid):
        self.comm, self.extents, self.layout = comm, extents, um.Layout.block_cyclic(BLOCK, BLOCK, grid)
        m, n, k = extents
        rng = np.random.default_rng(7)
        self.matrices = [np.asfortranarray(rng.random(shape) - 0.5) for shape in ((m, k), (k, n), (m, n))]
        a, b, c = self.matrices
        self.wanted = ALPHA * (a @ b) + BETA * c

    def mine(self, matrix):
        """Return a copy of this rank's part of a matrix."""
        where = self.layout.indices(matrix.shape, self.comm.rank, num_ranks=self.comm.size)
        return np.asfortranarray(matrix[np.ix_(*where)])

    def samples(self, reset, call, result):
        """Return what entered each node in some calls, after one that does not count; check the result."""
        found = []
        for _ in range(1 + TIMES):
            reset()
            found.append(counted(self.comm, call))
        worst = max(self.comm.allgather(float(np.abs(result() - self.mine(self.wanted)).max())))
        assert worst < 1e-12 * self.extents[2], (self.extents, worst)
        return found[1:]

    def ours(self, session):
        """Measure ours with one session."""
        parts = [self.mine(matrix) for matrix in self.matrices]
        dealt = [
            session.distribute(part, self.layout, shape=of.shape) for part, of in zip(parts, self.matrices, strict=True)
        ]
        plan = session.plan(*dealt)
        into = self.samples(
            lambda: np.copyto(parts[2], self.mine(self.matrices[2])),
            lambda: plan.execute(alpha=ALPHA, beta=BETA),
            lambda: dealt[2].local,
        )
        facts = plan.summary
        planned = {"how": facts.how, "digest": facts.digest, "between_nodes": facts.bytes_by_link["node_to_node"]}
        return {"into_nodes": into, **planned, "predicted_s": facts.predicted_s}

    def pdgemm(self, scalapack):
        """Measure ScaLAPACK's."""
        (a, b, c), (m, n, k), word = self.matrices, self.extents, str(Dealt(self.layout, "host"))
        out = np.full_like(c, np.nan)
        task = Task(m, n, k, DType.f64, ALPHA, BETA, (word, word, word), (), b"", b"", b"", b"")
        product = scalapack.open(task, Matrices(a, b, c, out))

        def result():
            product.store()
            return self.mine(out)

        into = self.samples(product.reset, lambda: product.call("as dealt"), result)
        product.close()
        return {"into_nodes": into}

    def least(self, machine):
        """Return what some node moves at least that does its share."""
        m, n, k = self.extents
        problem, dealt = GemmProblem(m, n, k, DType.f64, reads_c=True), Dealt(self.layout, "host")
        return least_bytes_of_a_node(problem, Places(dealt, dealt, dealt).bind(problem, self.comm.size), machine)


def rank(out, *grid):
    """Measure all products on one grid, as one of its ranks."""
    from mpi4py import MPI

    comm, scalapack = MPI.COMM_WORLD, ScalapackLibrary()
    equal = Machine.cluster(Machine.uniform(1), comm.size, NET)
    found = [{"product": extents, "grid": grid} for extents in PRODUCTS]
    cases = [Case(comm, extents, grid) for extents in PRODUCTS]
    for name, machine in (("ours_equal_nodes", equal), ("ours_measured", None)):
        with um.Session(comm, backend="host", machine=machine) as session:
            for one, case in zip(found, cases, strict=True):
                one[name] = case.ours(session)
    for one, case in zip(found, cases, strict=True):
        one["pdgemm"] = case.pdgemm(scalapack)
        one["cosma_formula"], one["least_of_a_node"] = cosma(case.extents, comm.size), case.least(equal)
    if comm.rank == 0:
        versions = {"version": um.__version__, "library": scalapack.version}
        lines = [json.dumps({**one, **versions}) + "\n" for one in found]
        pathlib.Path(out).write_text("".join(lines), encoding="utf-8")


def row(one):
    """Return a product's line of a table: MB into all nodes, with the most into one of them, and what is computed."""
    cells = ["x".join(map(str, one["product"])), "x".join(map(str, one["grid"]))]
    for name in ("ours_equal_nodes", "ours_measured", "pdgemm"):
        into = np.median(one[name]["into_nodes"], axis=0) / 1e6
        cells.append(f"{into.sum():.1f} ({into.max():.1f})")
    formula, conversion = one["cosma_formula"]
    all_least = int(np.prod(one["grid"])) * one["least_of_a_node"]
    return " | ".join([*cells, *(f"{size / 1e6:.1f}" for size in (formula, formula + conversion, all_least))])


def main(out):
    """Run a job for each grid, print what they found and write it."""
    mpi4py.rc.initialize = False
    from mpi4py import MPI  # noqa: F401 (its library is mapped, which the jobs need by name)

    found = []
    for rows, cols in GRIDS:
        with tempfile.TemporaryDirectory() as folder:
            part = f"{folder}/found.jsonl"
            nodes = [ROOT / "launch" / "test-nodes", "--nodes", rows * cols, "--share", folder, "--share", sys.prefix]
            job = ["mpiexec", "-n", rows * cols, sys.executable, "-m", "mpi4py", __file__, part, rows, cols]
            environment = {**os.environ, **job_environment(folder, rows * cols), **NETWORK}
            subprocess.run([*map(str, [*nodes, "--", *job])], env=environment, check=True, timeout=400)
            found.append(pathlib.Path(part).read_text(encoding="utf-8"))
    pathlib.Path(out).write_text("".join(found), encoding="utf-8")
    print("product | grid | ours, equal nodes | ours, measured | pdgemm | COSMA | with conversion | least by nodes")
    print(*map(row, map(json.loads, "".join(found).splitlines())), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        rank(sys.argv[1], *map(int, sys.argv[2:]))
