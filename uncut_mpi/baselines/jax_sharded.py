"""JAX: one process whose compiler shares a product among its devices, as sharding annotations say."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np

from uncut_mpi.baselines.library import Library, Product, Unsupported, splits
from uncut_mpi.baselines.task import Matrices, Task
from uncut_mpi.model.dtypes import DType


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

    def __init__(self, backend: str, devices: int) -> None:
        try:
            self._jax = importlib.import_module("jax")
        except ImportError as error:
            raise Unsupported(f"JAX is not installed ({error})") from None
        self._jax.config.update("jax_enable_x64", True)
        try:
            found = self._jax.devices("gpu" if backend == "cuda" else "cpu")
        except RuntimeError as error:
            raise Unsupported(f"JAX reaches no {'GPU' if backend == 'cuda' else 'CPU'}: {error}") from None
        if len(found) < devices:
            raise Unsupported(f"JAX sees {len(found)} of {devices} devices")
        self._devices = found[:devices]
        self.version = f"JAX {self._jax.__version__}"

    def open(self, task: Task, matrices: Matrices) -> Product:
        """See `Library.open`."""
        return _JaxProduct(self._jax, self._devices, task, matrices)


_PINNED = ", page-locked"


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """One way of sharing: how A, B and C lie on the devices, and what multiplies them so."""

    a_t: Any
    b_t: Any
    c_t: Any
    multiply: Any


class _JaxProduct(Product):
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
        single = jax.sharding.SingleDeviceSharding
        self._places = [None if number is None else single(devices[number]) for number in task.place]
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
        way = self._ways.get(name) or self._ways.setdefault(name, self._make(name))
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
