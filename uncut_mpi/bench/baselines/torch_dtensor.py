"""PyTorch's DTensor: a process for each rank, parts where placements say, redistributed before and after a product."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.library import LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.task import MOVED, Matrices, Task
from uncut_mpi.bench.baselines.torch_parts import Move, TorchJobLibrary, even
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.positions import picked


class DTensorLibrary(TorchJobLibrary):
    """DTensor; parameters as of `TorchJobLibrary`."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.of = importlib.import_module("torch.distributed.tensor")
        self._meshes: dict[tuple[int, ...], Any] = {}
        self.version += " DTensor"

    def mesh(self, grid: tuple[int, ...]) -> Any:
        """Return the processes as a mesh that is filled column by column."""
        if grid not in self._meshes:
            make = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
            self._meshes[grid] = make(self.device.type, np.arange(self.size).reshape(grid, order="F").tolist())
        return self._meshes[grid]

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        if any(dealt.memory == "shared" for dealt in task.dealt):
            raise Unsupported("each process has a part of its own of a matrix")
        self.torch.backends.cuda.matmul.allow_tf32 = task.dtype is DType.tf32
        return _DTensorProduct(self, task, matrices)


@dataclasses.dataclass(slots=True)
class _Tensors:
    """A matrix as it is dealt: this process's part, and its placements where DTensor has such."""

    part: Any
    shape: tuple[int, int]
    layout: Layout
    placements: tuple[Any, ...] | None
    moves: dict[tuple[str, bool], Move] = dataclasses.field(default_factory=dict)


class _DTensorProduct(LibraryProduct):
    """
    Row-major, as PyTorch has it: Cᵀ = Bᵀ Aᵀ.

    What a product on each process needs is gathered first. Parts of k are added up in the accumulator's type while they
    are scattered.
    """

    def __init__(self, library: DTensorLibrary, task: Task, matrices: Matrices) -> None:
        self._library, self._task, self._matrices = library, task, matrices
        shard, copies, partial = library.of.Shard, library.of.Replicate(), library.of.Partial()
        grids = [
            (len(dealt.layout.col_counts or ()), len(dealt.layout.row_counts or ()))  # of the transposed matrices
            for dealt in task.dealt
            if dealt.layout.kind == "blocks"
        ]
        grid = grids[0] if grids and min(grids[0]) > 1 else (library.size,)
        self._mesh, deep = library.mesh(grid), len(grid)
        # Blocks of a transposed matrix are dealt column by column, and the parts of slabs in the order of the mesh.
        self._order = np.arange(library.size).reshape(grid, order="F").ravel().tolist()
        self._rows, self._cols = (shard(0),) * deep, (shard(1),) * deep
        self._a, self._b, self._c = (
            self._held(dealt.layout.transposed, matrix.T, dealt.order or "F", dealt.memory == "host", grid)
            for dealt, matrix in zip(task.dealt, (matrices.a, matrices.b, matrices.c), strict=True)
        )
        every = (copies,) * deep
        ways = {"cols of C": (self._rows, every, self._rows), "rows of C": (every, self._cols, self._cols)}
        if deep > 1:
            ways["blocks of C"] = (shard(0), copies), (copies, shard(1)), (shard(0), shard(1))
        ways["parts of k"] = self._cols, self._rows, (partial,) * deep
        moved = MOVED if None in [one.placements for one in (self._a, self._b, self._c)] else ""
        self._ways = {moved + name: way for name, way in ways.items()}
        self.settings = list(self._ways)
        self._partial = (partial,) * deep

    def _held(self, layout: Layout, matrix: np.ndarray, order: str, on_host: bool, grid: tuple[int, ...]) -> _Tensors:
        library = self._library
        rows, cols = shape = (matrix.shape[0], matrix.shape[1])
        part = matrix[self._where(layout, shape)]
        part = np.ascontiguousarray(part) if order == "F" else np.asfortranarray(part)
        placements = None
        shard = library.of.Shard
        known = {
            "rows": (Layout.rows(ranks=self._order), rows % library.size == 0, self._rows),
            "cols": (Layout.cols(ranks=self._order), cols % library.size == 0, self._cols),
        }
        if len(grid) > 1 and rows % grid[0] == cols % grid[1] == 0:
            counts = [rows // grid[0]] * grid[0], [cols // grid[1]] * grid[1]
            known["blocks"] = Layout.blocks(*counts, ranks=self._order), True, (shard(0), shard(1))
        for one, good, found in known.values():
            if good and one.rectangles(shape, library.size) == layout.rectangles(shape, library.size):
                placements = found if layout.cyclic is None else None
        return _Tensors(library.tensor(part, on_host=on_host), shape, layout, placements)

    def _slabs(self, wanted: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """Return the slabs to which a matrix is moved that is dealt in no way of DTensor's, and their placements."""
        return ("cols", self._cols) if wanted == self._cols else ("rows", self._rows)

    def _dealt(self, one: _Tensors, wanted: tuple[Any, ...]) -> Any:
        """Return what this process needs of a matrix."""
        library, part, placements = self._library, one.part, one.placements
        if part.device != library.device:
            part = part.to(library.device, non_blocking=True)
        if placements is None:
            kind, placements = self._slabs(wanted)
            target = even(kind, one.shape, self._order)
            shape = target.local_shape(one.shape, library.rank, num_ranks=library.size)
            source, part = part, library.torch.empty(shape, dtype=part.dtype, device=library.device)
            self._move(one, kind, True)(source, part)
        if placements == wanted:
            return part
        dealt = library.of.DTensor.from_local(part.contiguous(), self._mesh, placements, run_check=False)
        return dealt.redistribute(self._mesh, wanted).to_local()

    def _move(self, one: _Tensors, kind: str, inward: bool) -> Move:
        if (kind, inward) not in one.moves:
            layouts = one.layout, even(kind, one.shape, self._order)
            source, target = layouts if inward else layouts[::-1]
            one.moves[kind, inward] = Move(self._library, one.shape, source, target, one.part.dtype)
        return one.moves[kind, inward]

    def call(self, setting: str) -> None:
        library, task, c = self._library, self._task, self._c
        b_wanted, a_wanted, wanted = self._ways[setting]
        b_t, a_t = self._dealt(self._b, b_wanted), self._dealt(self._a, a_wanted)
        if wanted == self._partial:
            wanted = c.placements or self._rows
            wider = task.dtype.sums_wider
            if wider and library.device.type == "cuda":
                part = library.torch.mm(b_t, a_t, out_dtype=library.torch.float32)
            else:
                part = b_t.float() @ a_t.float() if wider else b_t @ a_t
            sums = library.of.DTensor.from_local(part, self._mesh, self._partial, run_check=False)
            part = sums.redistribute(self._mesh, wanted).to_local()
            c_t = self._dealt(c, wanted)
            c_t.copy_(part.mul_(task.alpha).add_(c_t, alpha=task.beta))
        else:
            c_t = self._dealt(c, wanted)
            c_t.addmm_(b_t, a_t, beta=task.beta, alpha=task.alpha)
        self._put_back(c_t, wanted)
        library.finish()

    def _put_back(self, c_t: Any, wanted: tuple[Any, ...]) -> None:
        library, c = self._library, self._c
        kind, slabs = self._slabs(wanted)
        placements = c.placements or slabs
        if placements != wanted:
            dealt = library.of.DTensor.from_local(c_t, self._mesh, wanted, run_check=False)
            c_t = dealt.redistribute(self._mesh, placements).to_local()
        if c.placements is None:
            moved = library.torch.empty_like(c.part, device=library.device)
            self._move(c, kind, False)(c_t, moved)
            c_t = moved
        if c_t.data_ptr() != c.part.data_ptr():
            c.part.copy_(c_t, non_blocking=True)

    def reset(self) -> None:
        library, c = self._library, self._c
        c.part.copy_(library.tensor(np.ascontiguousarray(self._matrices.c.T[self._where(c.layout, c.shape)])))
        library.finish()

    def store(self) -> None:
        library, c = self._library, self._c
        self._matrices.out.T[self._where(c.layout, c.shape)] = library.array(c.part, self._task.dtype)

    def _where(self, layout: Layout, shape: tuple[int, int]) -> tuple[Any, ...]:
        return picked(*layout.indices(shape, self._library.rank, num_ranks=self._library.size))

    def close(self) -> None:
        self._library.finish()
        del self._a, self._b, self._c
        if self._library.device.type == "cuda":
            self._library.torch.cuda.empty_cache()
