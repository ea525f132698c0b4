"""ScaLAPACK's pdgemm, by ctypes: a process for each rank, matrices as they are dealt or moved by its pdgemr2d."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any, Final

import numpy as np

from uncut_mpi.bench.baselines.job import JobLibrary, JobOperand, as_cyclic, operands
from uncut_mpi.bench.baselines.library import LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.task import MOVED, Matrices, Task
from uncut_mpi.errors import reason
from uncut_mpi.model.cyclic import Cyclic
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.spmd.runtime import library_version

_FILES: Final = {
    "MPICH": ("libscalapack-mpich.so.2.2", "libscalapack-mpich.so.2.1", "libscalapack.so"),
    "Open MPI": ("libscalapack-openmpi.so.2.2", "libscalapack-openmpi.so.2.1", "libscalapack.so"),
}
"""Names of the library by what the MPI's begins with."""

_LETTERS: Final = {DType.f64: "d", DType.f32: "s", DType.c128: "z", DType.c64: "c"}
_BLOCKS: Final = (64, 256)
"""Edges of blocks to which matrices are moved."""


class ScalapackLibrary(JobLibrary):
    """ScaLAPACK as it is installed for the MPI of this job."""

    def __init__(self) -> None:
        super().__init__()
        mpi = library_version()
        names = next((names for start, names in _FILES.items() if mpi.startswith(start)), ("libscalapack.so",))
        self._blacs, missing = None, ""
        for name in names:
            try:
                self._blacs = ctypes.CDLL(name)
            except OSError as error:
                missing = missing or reason(error)
            else:
                break
        self.agree(self._blacs is not None, f"ScaLAPACK for {mpi} is not installed ({missing})")
        self.library: Any = self._blacs
        self._contexts: dict[tuple[Any, ...], int] = {}
        self.version = f"ScaLAPACK ({name}, {_blas()}), {mpi}"

    def context(self, grid: tuple[int, int], order: str) -> int:
        """Return the number of a process grid of all processes."""
        if (grid, order) not in self._contexts:
            made = ctypes.c_int()
            self.library.Cblacs_get(-1, 0, ctypes.byref(made))
            self.library.Cblacs_gridinit(ctypes.byref(made), ctypes.c_char_p(order.encode()), *grid)
            self._contexts[grid, order] = made.value
        return self._contexts[grid, order]

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        if task.dtype not in _LETTERS:
            raise Unsupported(f"ScaLAPACK has no product of {task.dtype.name}")
        return _PdgemmProduct(self, task, matrices)


def _blas() -> str:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names = {os.path.basename(line.rsplit(maxsplit=1)[-1]) for line in maps}
    return ", ".join(sorted(name for name in names if name.startswith(("libblas", "libopenblas", "libmkl_core"))))


@dataclasses.dataclass(frozen=True, slots=True)
class _ScalapackParts:
    """A matrix as it is dealt to this process: its part, its descriptor and the number of its process grid."""

    array: np.ndarray
    descriptor: Any
    context: int


class _PdgemmProduct(LibraryProduct):
    def __init__(self, library: ScalapackLibrary, task: Task, matrices: Matrices) -> None:
        self._library, self._task, self._matrices = library, task, matrices
        self._letter = _LETTERS[task.dtype]
        self._given = operands(task, matrices, "F")
        found = [as_cyclic(one.layout, one.shape, library.size) for one in self._given]
        if None in found or self._given[2].turned:
            raise Unsupported("ScaLAPACK has block-cyclic matrices alone, and a column-major C")
        self._dealt = [
            self._held(one, cyclic, one.part(library.rank, library.size))
            for one, cyclic in zip(self._given, found, strict=True)
            if cyclic is not None
        ]
        grid = ProcessGrid.most_square(library.size)
        self._edges = {f"{MOVED}blocks of {edge} on {grid.rows}x{grid.cols}": edge for edge in _BLOCKS}
        self._moved: dict[str, list[_ScalapackParts]] = {}
        self._grid = grid.rows, grid.cols
        self.settings = ["as dealt"] if len({one.context for one in self._dealt}) == 1 else []
        self.settings += list(self._edges)

    def _held(self, one: JobOperand, cyclic: Cyclic, part: np.ndarray | None = None) -> _ScalapackParts:
        library = self._library
        if part is None:
            shape = Layout("block_cyclic", cyclic=cyclic).local_shape(one.shape, library.rank, num_ranks=library.size)
            part = np.empty(shape, self._task.dtype.numpy)
        context = library.context(cyclic.grid, cyclic.grid_order)
        facts = (1, context, *one.shape, *cyclic.block, *cyclic.source, max(1, part.shape[0]))
        return _ScalapackParts(np.asfortranarray(part), (ctypes.c_int * 9)(*facts), context)

    def call(self, setting: str) -> None:
        if setting not in self._edges:
            self._multiply(*self._dealt)
            return
        if setting not in self._moved:
            cyclic = Cyclic((self._edges[setting],) * 2, self._grid)
            self._moved = {setting: [self._held(one, cyclic) for one in self._given]}
        moved = self._moved[setting]
        for source, target in zip(self._dealt, moved, strict=True):
            self._move(source, target)
        self._multiply(*moved)
        self._move(moved[2], self._dealt[2])

    def _multiply(self, a: _ScalapackParts, b: _ScalapackParts, c: _ScalapackParts) -> None:
        task = self._task
        real = ctypes.c_double if task.dtype in (DType.f64, DType.c128) else ctypes.c_float
        # Of complex types a scalar is two numbers; of real ones the second is not looked at.
        ops = (ctypes.c_char_p(b"T" if one.turned else b"N") for one in self._given[:2])
        self._call(
            f"p{self._letter}gemm_",
            *(*ops, task.m, task.n, task.k, (real * 2)(task.alpha)),
            *(a, b, (real * 2)(task.beta), c),
        )

    def _move(self, source: _ScalapackParts, target: _ScalapackParts) -> None:
        rows, cols = source.descriptor[2:4]
        self._call(f"p{self._letter}gemr2d_", rows, cols, source, target, source.context)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a Fortran routine: numbers by address, a matrix as part, first row and column, descriptor."""
        one, passed = ctypes.c_int(1), []
        for argument in arguments:
            if isinstance(argument, _ScalapackParts):
                address = ctypes.c_void_p(argument.array.__array_interface__["data"][0])
                passed += [address, ctypes.byref(one), ctypes.byref(one), argument.descriptor]
            elif isinstance(argument, ctypes.c_char_p):
                passed.append(argument)
            else:
                passed.append(ctypes.byref(ctypes.c_int(argument) if isinstance(argument, int) else argument))
        getattr(self._library.library, name)(*passed)

    def reset(self) -> None:
        c, library = self._dealt[2].array, self._library
        c[...] = self._given[2].part(library.rank, library.size)

    def store(self) -> None:
        where = self._given[2].where(self._library.rank, self._library.size)
        self._matrices.out[where] = self._dealt[2].array

    def close(self) -> None:
        self._moved.clear()
