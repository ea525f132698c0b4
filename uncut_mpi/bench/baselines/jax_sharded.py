"""JAX: one process whose compiler shares a product among its devices, as sharding annotations say."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported, splits
from uncut_mpi.bench.baselines.task import MOVED, Matrices, Task
from uncut_mpi.errors import reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.places import Dealt


class JaxLibrary(Library):
    """
    JAX's products.

    Parameters
    ----------
    backend : str
        ``"cuda"``, or ``"host"``: then XLA's CPU stands for as many devices.
    devices : int
        How many there are.
    """

    takes_dealt = True

    def __init__(self, backend: str, devices: int) -> None:
        try:
            self._jax = importlib.import_module("jax")
        except ImportError as error:
            raise Unsupported(f"JAX is not installed ({reason(error)})") from None
        self._jax.config.update("jax_enable_x64", True)
        try:
            found = self._jax.devices("gpu" if backend == "cuda" else "cpu")
        except RuntimeError as error:
            raise Unsupported(f"JAX reaches no {'GPU' if backend == 'cuda' else 'CPU'}: {reason(error)}") from None
        if len(found) < devices:
            raise Unsupported(f"JAX sees {len(found)} of {devices} devices")
        self._devices = found[:devices]
        self.version = f"JAX {self._jax.__version__}"

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        made = _DealtProduct if task.dealt else _PlacedProduct
        return made(self._jax, self._devices, task, matrices)


_PINNED = ", page-locked"


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """One way of sharing: how A, B and C lie on the devices, and what multiplies them so."""

    a_t: Any
    b_t: Any
    c_t: Any
    multiply: Any


class _JaxProduct(LibraryProduct):
    """Row-major, as JAX has it: Cᵀ = Bᵀ Aᵀ."""

    def __init__(self, jax: Any, devices: list[Any], task: Task, matrices: Matrices) -> None:
        self._jax, self._task, self._matrices = jax, task, matrices
        self._compute = [devices[number] for number in task.compute]
        extents = (task.m, task.n, task.k)
        # Shards are of one size in JAX.
        self._splits = {
            name: parts
            for name, parts in splits(len(self._compute)).items()
            if all(extent % part == 0 for extent, part in zip(extents, parts, strict=True))
        }
        self._ways: dict[str, _Way] = {}

    def _way(self, name: str) -> _Way:
        return self._ways.get(name) or self._ways.setdefault(name, self._make(name))

    def _make(self, setting: str) -> _Way:
        jax, task = self._jax, self._task
        rows, cols, depths = parts = self._splits[setting]
        devices = np.array(self._compute[: rows * cols * depths]).reshape(parts)
        mesh = jax.sharding.Mesh(devices, ("m", "n", "k"))

        def lying(*axes: str | None) -> Any:
            return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

        # Summed over k, C is shared among the same devices in rows.
        c_t = lying("n", "m") if depths == 1 else lying("k", None) if task.n % depths == 0 else lying(None, None)
        accumulator = task.dtype.accumulator.numpy
        precision = "tensorfloat32" if task.dtype is DType.tf32 else "highest"

        def multiply(b_t: Any, a_t: Any, c_t: Any) -> Any:
            product = jax.numpy.matmul(b_t, a_t, precision=precision, preferred_element_type=accumulator)
            summed = product * accumulator.type(task.alpha) + c_t.astype(accumulator) * accumulator.type(task.beta)
            return summed.astype(c_t.dtype)

        return _Way(lying("k", "m"), lying("n", "k"), c_t, jax.jit(multiply, out_shardings=c_t))


class _PlacedProduct(_JaxProduct):
    """Matrices that are in one memory each."""

    def __init__(self, jax: Any, devices: list[Any], task: Task, matrices: Matrices) -> None:
        super().__init__(jax, devices, task, matrices)
        single = jax.sharding.SingleDeviceSharding
        self._places = [None if number is None else single(devices[number]) for number in task.whole]
        self._pinned = single(self._compute[0], memory_kind="pinned_host")
        self._a_t = self._put(matrices.a.T, self._places[0])
        self._b_t = self._put(matrices.b.T, self._places[1])
        self._c_t: Any = None
        # Host memory as NumPy has it, and as JAX page-locks it for a device.
        self._in_pinned: dict[str, Any] = {}
        self.settings = list(self._splits)
        if None in self._places:
            self.settings += [name + _PINNED for name in self._splits]

    def call(self, setting: str) -> None:
        name, pinned, _ = setting.partition(_PINNED)
        way = self._way(name)
        put = self._jax.device_put
        a_t, b_t = self._a_t, self._b_t
        if pinned:
            a_t, b_t = self._page_locked("a", a_t, 0), self._page_locked("b", b_t, 1)
            if self._places[2] is None and isinstance(self._c_t, np.ndarray):  # the first such call
                self._c_t = put(self._c_t, self._pinned)
        c_t = way.multiply(put(b_t, way.b_t), put(a_t, way.a_t), put(self._c_t, way.c_t))
        if self._places[2] is not None:
            self._c_t = put(c_t, self._places[2]).block_until_ready()
        elif pinned:
            self._c_t = put(c_t, self._pinned).block_until_ready()
        else:
            self._c_t = np.asarray(c_t)

    def _page_locked(self, name: str, matrix: Any, which: int) -> Any:
        """Return a matrix in page-locked host memory if it is in host memory; copied there once."""
        if self._places[which] is not None:
            return matrix
        if name not in self._in_pinned:
            self._in_pinned[name] = self._put(matrix, self._pinned)
        return self._in_pinned[name]

    def reset(self) -> None:
        self._c_t = self._put(self._matrices.c.T.copy(), self._places[2])

    def store(self) -> None:
        np.copyto(self._matrices.out.T, np.asarray(self._c_t))

    def close(self) -> None:
        self._a_t = self._b_t = self._c_t = None
        self._in_pinned.clear()
        self._ways.clear()

    def _put(self, matrix: np.ndarray, place: Any) -> Any:
        return matrix if place is None else self._jax.device_put(matrix, place).block_until_ready()


class _Shards:
    """
    A matrix as it is dealt to JAX's devices: shards of one size, of which those of uneven parts are not full.

    Parameters
    ----------
    jax : module
        JAX.
    devices : list
        One for each rank.
    dealt : Dealt
        How the transposed matrix is dealt.
    shape : (int, int)
        Its rows and columns, which the grid of its parts must divide.
    """

    def __init__(self, jax: Any, devices: list[Any], dealt: Dealt, shape: tuple[int, int]) -> None:
        if dealt.memory == "shared" or dealt.layout.kind in ("replicated", "whole"):
            raise Unsupported("each device has a part of its own of a matrix")
        self._jax = jax
        layout, holders = dealt.layout, dealt.layout.holders(len(devices))
        down = {"rows": len(holders), "cols": 1}.get(layout.kind) or _grid_of(layout)[0]
        grid = down, len(holders) // down
        if shape[0] % grid[0] or shape[1] % grid[1]:
            raise Unsupported(
                f"shards of {shape[0]}x{shape[1]} on {grid[0]}x{grid[1]} devices would not be of one size"
            )
        mesh = jax.sharding.Mesh(np.array([devices[rank] for rank in holders]).reshape(grid), ("p", "q"))
        spread = jax.sharding.PartitionSpec("p", "q")
        self._on_devices = jax.sharding.NamedSharding(mesh, spread)
        on_host = dealt.memory == "host"
        self._place = (
            jax.sharding.NamedSharding(mesh, spread, memory_kind="pinned_host") if on_host else self._on_devices
        )
        firsts = [holders[at * grid[1]] for at in range(grid[0])], holders[: grid[1]]
        self._sources, self._positions = [], []
        for axis, (ranks, extent) in enumerate(zip(firsts, shape, strict=True)):
            indices = [layout.indices(shape, rank, num_ranks=len(devices))[axis] for rank in ranks]
            longest = max(map(len, indices))
            source, position = np.zeros(longest * len(ranks), np.int32), np.empty(extent, np.int32)
            for at, some in enumerate(indices):
                source[at * longest : at * longest + len(some)] = some
                position[some] = at * longest + np.arange(len(some))
            self._sources.append(source)
            self._positions.append(position)
        self.is_plain = all(np.array_equal(one, np.arange(len(one))) for one in self._sources)
        self._straighten = self._taking(self._positions)
        self._deal = self._taking(self._sources)
        self.array: Any = None

    def _taking(self, indices: list[np.ndarray]) -> Any:
        numpy = self._jax.numpy

        def taken(matrix: Any) -> Any:
            return numpy.take(numpy.take(matrix, indices[0], axis=0), indices[1], axis=1)

        return self._jax.jit(taken, out_shardings=self._on_devices)

    def fill(self, matrix: np.ndarray) -> None:
        """Deal a matrix in NumPy's memory."""
        self.array = self._jax.device_put(matrix[np.ix_(*self._sources)], self._place).block_until_ready()

    def straight(self) -> Any:
        """Return the matrix in equal parts, its rows and columns in their order."""
        array = self._jax.device_put(self.array, self._on_devices)
        return array if self.is_plain else self._straighten(array)

    def put(self, straight: Any) -> None:
        """Deal a matrix that is on the devices."""
        array = self._jax.device_put(straight, self._on_devices)
        self.array = self._jax.device_put(array if self.is_plain else self._deal(array), self._place)

    def numpy(self) -> np.ndarray:
        """Return the matrix in NumPy's memory."""
        held: np.ndarray = np.asarray(self.array)[np.ix_(*self._positions)]
        return held


def _grid_of(layout: Layout) -> tuple[int, int]:
    return layout.cyclic.grid if layout.cyclic else (len(layout.row_counts or ()), len(layout.col_counts or ()))


class _DealtProduct(_JaxProduct):
    """Matrices that are dealt to devices; what is no even sharding is made one by taking rows and columns."""

    def __init__(self, jax: Any, devices: list[Any], task: Task, matrices: Matrices) -> None:
        super().__init__(jax, devices, task, matrices)
        self._a, self._b, self._c = (
            _Shards(jax, devices, dataclasses.replace(dealt, layout=dealt.layout.transposed), matrix.T.shape)
            for dealt, matrix in zip(task.dealt, (matrices.a, matrices.b, matrices.c), strict=True)
        )
        self._a.fill(matrices.a.T)
        self._b.fill(matrices.b.T)
        plain = self._a.is_plain and self._b.is_plain and self._c.is_plain
        self.settings = [name if plain else MOVED + name for name in self._splits]

    def call(self, setting: str) -> None:
        way, put = self._way(setting.removeprefix(MOVED)), self._jax.device_put
        a_t, b_t, c_t = (one.straight() for one in (self._a, self._b, self._c))
        self._c.put(way.multiply(put(b_t, way.b_t), put(a_t, way.a_t), put(c_t, way.c_t)))
        self._c.array.block_until_ready()

    def reset(self) -> None:
        self._c.fill(self._matrices.c.T)

    def store(self) -> None:
        np.copyto(self._matrices.out.T, self._c.numpy())

    def close(self) -> None:
        self._a.array = self._b.array = self._c.array = None
        self._ways.clear()
