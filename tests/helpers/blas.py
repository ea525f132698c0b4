"""The names of BLAS and PBLAS with a library behind them that counts, and matrices as its programs deal them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import types

import numpy as np
import pytest
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.blas import calls

GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (4, 2)}
TYPES = {"s": "f4", "d": "f8", "c": "c8", "z": "c16"}
BEHIND = r"""
#include <stdint.h>
/* What stands behind the library in these tests: it counts, and says what grid there is. */
int passed_on, told, aborted, exited, grid[4];
intptr_t handle;
#define BEHIND(name) void name(void) { passed_on++; }
#define BOTH(letter, name) BEHIND(letter##name##_) BEHIND(p##letter##name##_)
#define TYPES(name) BOTH(s, name) BOTH(d, name) BOTH(c, name) BOTH(z, name)
TYPES(gemm) TYPES(syrk) TYPES(syr2k) TYPES(symm) TYPES(trmm) TYPES(trsm)
BOTH(c, herk) BOTH(z, herk) BOTH(c, her2k) BOTH(z, her2k) BOTH(c, hemm) BOTH(z, hemm)
BEHIND(dgemm_64_) BEHIND(pdgemm_64_)
void Cblacs_gridinfo(int context, int *rows, int *cols, int *row, int *col) {
    *rows = grid[0], *cols = grid[1], *row = grid[2], *col = grid[3];
}
void Cblacs_get(int context, int what, int *value) { *value = what == 10 ? 77 : -1; }
intptr_t Cblacs2sys_handle(int number) { return number == 77 ? handle : 0; }
int (*most_of_all)(int);
void Cigamx2d(int context, char *scope, char *top, int m, int n, int *a, int lda, int *ra, int *ca, int ldia, int row,
              int col) {
    *a = most_of_all(*a);
}
void Cblacs_abort(int context, int code) { aborted = code; }
void Cblacs_gridexit(int context) { exited++; }
void pxerbla_(int *context, char *name, int *number) { told = *number; }
"""


@functools.cache
def libraries(base):
    """Return the library, and what is behind it, loaded by this process: once, since the former keeps what it finds."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = base / "blas"
    folder.mkdir()
    (folder / "behind.c").write_text(BEHIND)
    command = [compiler, "-shared", "-fPIC", "-o", str(folder / "behind.so"), str(folder / "behind.c")]
    subprocess.run(command, check=True, timeout=60)
    behind = ctypes.CDLL(str(folder / "behind.so"), ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(um.blas.library())), ctypes.CDLL(str(um.blas.library(ilp64=True)))
    return types.SimpleNamespace(behind=behind, lp64=loaded[0], ilp64=loaded[1])


@pytest.fixture(scope="module", name="names")
def names_of_blas(tmp_path_factory, backend_name):
    """Yield the library, and what is behind it."""
    os.environ.update(UNCUT_MPI_BLAS_BACKEND=backend_name, UNCUT_MPI_BLAS_MIN_GFLOP="0")
    yield libraries(tmp_path_factory.getbasetemp())
    calls.forget(-1)


def matrix(rng, shape, kind):
    """Return a column-major matrix of full mantissas."""
    made = rng.random(shape) - 0.5
    return np.asfortranarray((made + 1j * rng.random(shape) if "c" in kind else made).astype(kind))


def applied(array, op):
    return array if op == "N" else array.T if op == "T" else array.conj().T


def reals(value, kind):
    return np.array([value], kind).ctypes.data_as(ctypes.c_void_p)


def numbers(*values, integer=ctypes.c_int):
    return [ctypes.byref(integer(value)) for value in values]


def at(array):
    return ctypes.c_void_p(array.ctypes.data)


class Dealt:
    """This rank's array of a matrix of a program, with its descriptor."""

    def __init__(self, rng, comm, shape, block, *, begun=None, source=(0, 0), gap=0, grid=None, place=None, full=None):
        self.full = comm.bcast(matrix(rng, shape, "f8")) if full is None else full
        self.grid = grid or GRIDS[comm.size]
        self.place = place or divmod(comm.rank, self.grid[1])
        skip = [whole - first for whole, first in zip(block, begun or block, strict=True)]
        self.indices = []
        for axis in (0, 1):
            at_here = np.arange(shape[axis] + skip[axis])
            owner = (source[axis] + at_here // block[axis]) % self.grid[axis]
            here = at_here[owner == self.place[axis]] - skip[axis]
            self.indices.append(here[here >= 0])
        rows, cols = map(len, self.indices)
        self.array = np.full((max(1, rows) + gap, cols), 77.0, self.full.dtype, order="F")
        self.array[:rows] = self.full[np.ix_(*self.indices)]
        self.rows, ld = rows, max(1, rows) + gap
        first = (1, 5, *shape) if begun is None else (2, 5, *shape, *begun)
        self.descriptor = (ctypes.c_int * 11)(*first, *block, *source, ld)


@contextlib.contextmanager
def grid_of(names, comm, shape, place, *, ends=True):
    """Let there be a grid of a communicator's ranks; the ranks outside it have a negative place."""
    most = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda value: comm.allreduce(value, MPI.MAX))
    (ctypes.c_int * 4).in_dll(names.behind, "grid")[:] = *shape, *place
    ctypes.c_ssize_t.in_dll(names.behind, "handle").value = comm.handle
    ctypes.c_void_p.in_dll(names.behind, "most_of_all").value = ctypes.cast(most, ctypes.c_void_p).value
    yield
    if ends:
        names.lp64.Cblacs_gridexit(5)


@pytest.fixture(name="grid")
def grid_of_ranks(names, comm):
    """Make a grid of the ranks."""
    shape = GRIDS[comm.size]
    with grid_of(names, comm, shape, divmod(comm.rank, shape[1])):
        yield
