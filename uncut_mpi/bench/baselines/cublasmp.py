"""cuBLASMp through nvmath-python: a process for each GPU, matrices as they are dealt or moved to what it likes best."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import os
import sys
from typing import Any, Final

import numpy as np

from uncut_mpi.bench.baselines.job import JobOperand, as_cyclic, operands
from uncut_mpi.bench.baselines.library import LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.task import MOVED, Matrices, Task
from uncut_mpi.bench.baselines.torch_parts import Move, TorchJobLibrary, even
from uncut_mpi.errors import named
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout

_LIBRARIES: Final = ("nccl/lib/libnccl", "nvshmem/lib/libnvshmem_host", "cublasmp/cu13/lib/libcublasmp")
"""Beneath folders of wheels: nvmath-python opens them by name, after those that it needs."""

_WAYS: Final = {
    "TN rows,cols,rows": ((True, False), ("rows", "cols", "rows")),
    "TN cols,rows,cols": ((True, False), ("cols", "rows", "cols")),
    "NN rows,cols,rows": ((False, False), ("rows", "cols", "rows")),
}
"""Whether A and B are stored transposed, and how A, B and C are dealt: what it has schedules with overlap for."""

_SHARE: Final = 0.4
"""Of a GPU's memory for the symmetric heap, where the environment says nothing."""


class CublasMpLibrary(TorchJobLibrary):
    """cuBLASMp, with PyTorch's tensors."""

    def __init__(self) -> None:
        super().__init__("cuda")
        total = self.torch.cuda.mem_get_info()[1]
        os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", str(int(_SHARE * total)))
        for name in _LIBRARIES:
            for path in (one for folder in sys.path for one in glob.glob(f"{folder}/nvidia/{name}.so*")):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        missing = ""
        try:
            self.nvmath = importlib.import_module("nvmath.distributed")
            self.advanced = importlib.import_module("nvmath.distributed.linalg.advanced")
            self.dealt = importlib.import_module("nvmath.distributed.distribution")
            version = importlib.import_module("nvmath.bindings.cublasMp").get_version()
        except Exception as error:  # a library that it opens may be missing, which is no ImportError
            missing = named(error)
        self.agree(not missing, f"nvmath-python with cuBLASMp is not installed ({missing})")
        self.nvmath.initialize(self.rank, self.comm, backends=["nccl", "nvshmem"])
        self.version = f"cuBLASMp {version} of nvmath-python {importlib.import_module('nvmath').__version__}"

    def symmetric(self, shape: tuple[int, int], dtype: Any) -> Any:
        """Return new memory that all GPUs reach, column-major. Collective among the processes."""
        return self.nvmath.allocate_symmetric_memory(
            shape, self.torch, dtype=dtype, axis_order="F", make_symmetric=True
        )

    def distribution(self, layout: Layout, shape: tuple[int, int]) -> Any:
        """Return its word for a layout; Unsupported where it has none."""
        if layout.kind in ("rows", "cols") and as_cyclic(layout, shape, self.size) is not None:
            return self.dealt.Slab.X if layout.kind == "rows" else self.dealt.Slab.Y
        cyclic = as_cyclic(layout, shape, self.size)
        if cyclic is None:
            raise Unsupported("cuBLASMp has block-cyclic matrices alone")
        order = self.dealt.ProcessGrid.Layout
        grid = self.dealt.ProcessGrid(
            shape=cyclic.grid, layout=order.ROW_MAJOR if cyclic.grid_order == "R" else order.COL_MAJOR
        )
        if layout.kind == "blocks":
            return self.dealt.BlockNonCyclic(grid)
        return self.dealt.BlockCyclic(grid, cyclic.block, first_process=cyclic.source)

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        return _MatmulProduct(self, task, matrices)


class _MatmulProduct(LibraryProduct):
    """
    Products in symmetric memory.

    nvmath-python returns C in new memory, which is the caller's C from then on. What was C is freed before the next
    call.
    """

    def __init__(self, library: CublasMpLibrary, task: Task, matrices: Matrices) -> None:
        self._library, self._task, self._matrices = library, task, matrices
        self._given = operands(task, matrices, "F")
        self._type = getattr(library.torch, str(task.dtype.numpy))
        size, rank = library.size, library.rank
        parts = [np.asfortranarray(one.part(rank, size)) for one in self._given]
        self._host = [
            library.tensor(part, on_host=True) if one.on_host else None
            for one, part in zip(self._given, parts, strict=True)
        ]
        self._parts = [library.symmetric(part.shape, self._type) for part in parts]
        for held, part in zip(self._parts, parts, strict=True):
            held.copy_(library.tensor(part))
        self._ways = {f"{MOVED}{name}": way for name, way in _WAYS.items()}
        self.settings = ["as dealt", *self._ways]
        self._spent: list[Any] = []
        self._setting = ""
        self._matmul: Any = None
        self._targets: list[Any] = []
        self._views: list[Any] = []
        self._moves: list[Move] = []

    def prepare(self) -> None:
        if self._spent:
            self._library.finish()
            self._library.nvmath.free_symmetric_memory(*self._spent)
            self._spent.clear()

    def call(self, setting: str) -> None:
        library = self._library
        if setting != self._setting:
            self._begin(setting)
        for part, host in zip(self._parts, self._host, strict=True):
            if host is not None:
                part.copy_(host, non_blocking=True)
        if setting == "as dealt":
            made = self._matmul.execute()
            self._matmul.reset_operands(c=made)
            self._spent.append(self._parts[2])
            self._parts[2] = made
        else:
            for move, part, target in zip(self._moves, self._logical(self._parts), self._views, strict=False):
                move(part, target)
            made = self._matmul.execute()
            self._spent.append(made)
            self._moves[3](made, self._logical(self._parts)[2])
        if self._host[2] is not None:
            self._host[2].copy_(self._parts[2], non_blocking=True)
        library.finish()

    def _logical(self, tensors: list[Any]) -> list[Any]:
        """Return parts of A, B and C, whichever of them are stored transposed."""
        return [tensor.t() if one.turned else tensor for one, tensor in zip(self._given, tensors, strict=True)]

    def _begin(self, setting: str) -> None:
        library = self._library
        self._end()
        if setting == "as dealt":
            if self._given[2].turned:
                raise Unsupported("cuBLASMp has no transposed C")
            turned = [one.turned for one in self._given[:2]]
            dealt = [library.distribution(one.layout, one.shape) for one in self._given]
            self._make(self._parts, turned, dealt)
        else:
            turned, kinds = list(self._ways[setting][0]), self._ways[setting][1]
            dealt = []
            for one, kind, turn in zip(self._given, kinds, (*turned, False), strict=True):
                layout, shape = _straight(one)
                target = even(kind, shape, range(library.size))
                self._moves.append(Move(library, shape, layout, target, self._type))
                local = target.local_shape(shape, library.rank, num_ranks=library.size)
                self._targets.append(library.symmetric(local[::-1] if turn else local, self._type))
                stored = target.transposed if turn else target
                dealt.append(library.distribution(stored, shape[::-1] if turn else shape))
            layout, shape = _straight(self._given[2])
            self._moves.append(Move(library, shape, even(kinds[2], shape, range(library.size)), layout, self._type))
            self._views = [
                tensor.t() if turn else tensor for tensor, turn in zip(self._targets, (*turned, False), strict=True)
            ]
            self._make(self._targets, turned, dealt)
        self._setting = setting

    def _make(self, tensors: list[Any], turned: list[bool], dealt: list[Any]) -> None:
        advanced, task = self._library.advanced, self._task
        qualifiers = np.zeros((3,), dtype=advanced.matrix_qualifiers_dtype)
        for which in range(2):
            qualifiers[which]["is_transpose"] = turned[which]
        options = None
        if task.dtype is DType.tf32:
            kinds = importlib.import_module("nvmath.bindings.cublas").ComputeType
            options = advanced.MatmulOptions(compute_type=kinds.COMPUTE_32F_FAST_TF32)
        a, b, c = tensors
        self._matmul = advanced.Matmul(
            *(a, b),
            c=c,
            alpha=task.alpha,
            beta=task.beta,
            distributions=dealt,
            qualifiers=qualifiers,
            options=options,
        )
        self._matmul.plan()

    def _end(self) -> None:
        self.prepare()
        self._setting = ""
        if self._matmul is not None:
            self._matmul.free()
            self._matmul = None
        self._moves.clear()
        if self._targets:
            self._library.nvmath.free_symmetric_memory(*self._targets)
            self._targets.clear()

    def reset(self) -> None:
        library, c = self._library, self._given[2]
        first = library.tensor(np.asfortranarray(c.part(library.rank, library.size)))
        for held in (self._parts[2], self._host[2]):
            if held is not None:
                held.copy_(first)
        library.finish()

    def store(self) -> None:
        library, c = self._library, self._given[2]
        out = self._matrices.out.T if c.turned else self._matrices.out
        out[c.where(library.rank, library.size)] = library.array(self._parts[2], self._task.dtype)

    def close(self) -> None:
        self._library.finish()
        self._end()
        self._library.nvmath.free_symmetric_memory(*self._parts)
        self._library.torch.cuda.empty_cache()


def _straight(one: JobOperand) -> tuple[Layout, tuple[int, int]]:
    """Return how a matrix itself is dealt, however it is stored, and its shape."""
    return (one.layout.transposed, one.shape[::-1]) if one.turned else (one.layout, one.shape)
