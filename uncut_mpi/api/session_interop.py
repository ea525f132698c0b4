"""The calls of a session that take arrays which PyTorch or JAX have dealt to processes, and show matrices to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from uncut_mpi.api.exclusive import public_call
from uncut_mpi.api.interop import (
    JaxMesh,
    Sharded,
    TorchMesh,
    cuts_of,
    holders_of,
    layout_of_parts,
    of_dtensor,
    of_jax,
    parts_of_rank,
    rectangle_of,
    show,
)
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.session_base import SessionBase
from uncut_mpi.errors import raised_by_all
from uncut_mpi.model.dtypes import DType
from uncut_mpi.spmd import agreement


class Interoperates(SessionBase):
    """The matrices of a session, made of arrays of PyTorch and JAX."""

    @public_call
    def from_dtensor(self, dtensor: Any, *, dtype: object = None) -> Matrix:
        """
        Make a DTensor of PyTorch a matrix, without a copy. Collective.

        Parameters
        ----------
        dtensor : torch.distributed.tensor.DTensor
            Of two dimensions, over a mesh of any shape. Each process of the mesh is a rank of this session, in any
            order; ranks that are not in the mesh pass it too. What torch has enqueued on its current stream is awaited.
        dtype : str or DType, optional
            As of `distribute`.

        Returns
        -------
        Matrix
            ``Shard(0)`` is a layout of rows, ``Shard(1)`` of columns, ``Replicate()`` replicated, ``Shard(0)`` with
            ``Shard(1)`` of blocks, each with counts. Others, as ``Shard(0)`` with ``Replicate()``, are single parts as
            of `distribute_parts`. The local tensors are kept alive, and as C they are written.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks: if it is ``Partial`` (redistribute it first) or records a gradient, if the processes of its
            mesh are no ranks of the session; as `distribute`. If shapes differ: ``DTensor.from_local`` of uneven
            parts needs ``shape=`` and ``stride=``.
        """
        return self._of_parts("from_dtensor", lambda: of_dtensor(dtensor), dtype)

    @public_call
    def from_jax(self, array: Any, *, dtype: object = None) -> Matrix:
        """
        Make an array that JAX has dealt to processes a matrix, without a copy. Collective.

        Parameters
        ----------
        array : jax.Array
            Of two dimensions and any sharding. Each of its devices is a rank's of this session, in any order. It is
            awaited (``block_until_ready``).
        dtype : str or DType, optional
            As of `distribute`.

        Returns
        -------
        Matrix
            Its layout is of rows, columns or blocks, or replicated; else it is single parts as of `distribute_parts`.
            Its shards are kept alive. Arrays of JAX never change, so it can be A or B, not C.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks: if devices belong to no rank of the session, or to several, as without
            ``jax.distributed.initialize``; as `distribute`.
        """
        return self._of_parts("from_jax", lambda: of_jax(array), dtype)

    def _of_parts(self, call: str, describe: Callable[[], Sharded], dtype: object) -> Matrix:
        with self._gate.call(call) as open_with:
            given, kind = describe(), None if dtype is None else DType.parse(dtype)
            open_with(shape=given.shape, dealt=given.dealt, dtype=kind)
            places, parts = zip(*self._group.allgather_objects((given.places, [*given.arrays])), strict=True)
            layout = None
            with raised_by_all():
                holders_of(places, given.num_places)
                if all(len(ones) <= 1 for ones in parts):
                    layout = layout_of_parts([next(iter(ones), None) for ones in parts], given.shape)
            starts = [(array, (0, 0) if layout else (rows[0], cols[0])) for (rows, cols), array in given.arrays.items()]
            return self._store.distribute(starts, layout, given.shape, kind)

    def _shown(self, call: str, matrix: Matrix, given: Any) -> Any:
        """Return a matrix as an array of another library over a mesh of that; see `Matrix.to_dtensor` and `to_jax`."""
        with self._gate.call(call) as open_with:
            self._backend.mark_caller()
            mesh = TorchMesh(given) if call == "to_dtensor" else JaxMesh(given)
            self._store.check(call, matrix).info.check_in_memory()
            open_with(matrix=matrix.info, mesh=mesh.shape)
            self._backend.await_caller()
            of_ranks, parts = zip(*self._group.allgather_objects((mesh.places, parts_of_rank(matrix))), strict=True)
            with raised_by_all():
                holders = holders_of(of_ranks, int(np.prod(mesh.shape)))
                what = f"{matrix} is to be a {mesh.kind}"
                cuts = cuts_of(what, matrix.layout, matrix.shape, parts, mesh.shape, holders, even=mesh.even)
            own = [rectangle_of(matrix.shape, mesh.shape, cuts, place) for place in mesh.places]
            with agreement.collective(self._group, f"making a {mesh.kind}"):
                return show(matrix, mesh, cuts, own, self._backend)
