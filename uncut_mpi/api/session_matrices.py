"""The calls of a session that make matrices: new ones, of arrays that ranks or PyTorch and JAX have; their release."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate, public_call
from uncut_mpi.api.interop import (
    JaxMesh,
    Sharded,
    TorchMesh,
    cuts_of,
    holders_of,
    layout_of_parts,
    memory_of,
    of_dtensor,
    of_jax,
    parts_of_rank,
    rectangle_of,
    show,
)
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.matrix_files import MatrixFile, OutputFile, open_matrix
from uncut_mpi.api.typed import overload
from uncut_mpi.api.wanted import layout_of, new_matrix, parts_of, rank_of, shape_of
from uncut_mpi.device.exported import HOST, Shown, place_of
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import ParamError, raised_by_all
from uncut_mpi.model.arguments import flag, shown
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Memory
from uncut_mpi.model.problem import Order
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group

_Two: TypeAlias = tuple[int, int]
_Three: TypeAlias = tuple[int, int, int]


class MakesMatrices:
    """
    The matrices of a session, made and released; `Session` makes what this works on.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are.
    """

    _group: Group
    _backend: Backend
    _store: MatrixStore
    _calls: Calls
    _gate: Gate

    @property
    def rank(self) -> int:
        """Rank of this process in the session's communicator."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @overload
    def empty_host(self, shape: _Two, dtype: object = ..., *, order: Order = ...) -> Matrix: ...
    @overload
    def empty_host(self, shape: _Three, dtype: object = ..., *, order: Order = ...) -> Batch: ...
    @overload
    def empty_host(self, shape: Sequence[int], dtype: object = ..., *, order: Order = ...) -> Any: ...
    @public_call
    def empty_host(self, shape: Sequence[int], dtype: object = np.float64, *, order: Order = "C") -> Any:
        """
        Return an uninitialised host matrix that every rank of the node reads and writes. Collective.

        One segment per node, pinned for every rank's device; each rank's `Matrix.array` is a view of it.

        Parameters
        ----------
        shape : sequence of two int, or three
            Rows and columns; of a batch how many matrices first.
        dtype : numpy dtype or str
            float64, float32, float16 or ml_dtypes.bfloat16 (or f64, f32, f16, bf16; tf32, which is float32 in memory);
            int8 and int32 (i8, i32), ml_dtypes.float8_e4m3fn and float8_e5m2 (e4m3, e5m2; of cupy uint8).
        order : {"C", "F"}
            Storage order.

        Returns
        -------
        Matrix or Batch
            A batch if the shape has three numbers.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        CapacityError
            If the node has too little memory for it; nothing is left behind.
        """
        with self._gate.call("empty_host") as open_with:
            wanted = new_matrix(shape, dtype, order, Layout.whole(0), "shared", self.size)
            open_with(**wanted.asked())
            return self._store.empty(wanted)

    @overload
    def empty_device(self, shape: _Two, dtype: object = ..., *, rank: int, order: Order = ...) -> Matrix: ...
    @overload
    def empty_device(self, shape: _Three, dtype: object = ..., *, rank: int, order: Order = ...) -> Batch: ...
    @overload
    def empty_device(self, shape: Sequence[int], dtype: object = ..., *, rank: int, order: Order = ...) -> Any: ...
    @public_call
    def empty_device(self, shape: Sequence[int], dtype: object = np.float64, *, rank: int, order: Order = "C") -> Any:
        """
        Return an uninitialised matrix in the device memory of one rank. Collective.

        `Matrix.array` is a cupy array there (a numpy array with the host backend).

        Parameters
        ----------
        shape, dtype, order
            As of `empty_host`.
        rank : int
            Whose device.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        CapacityError
            If that device has too little memory.
        """
        with self._gate.call("empty_device") as open_with:
            whole = Layout.whole(rank_of("rank", rank, self.size))
            wanted = new_matrix(shape, dtype, order, whole, "device", self.size)
            open_with(**wanted.asked())
            return self._store.empty(wanted)

    @overload
    def empty(
        self, shape: _Two, dtype: object, layout: Layout, *, order: Order = ..., memory: Memory = ...
    ) -> Matrix: ...
    @overload
    def empty(
        self, shape: _Three, dtype: object, layout: Layout, *, order: Order = ..., memory: Memory = ...
    ) -> Batch: ...
    @overload
    def empty(
        self, shape: Sequence[int], dtype: object, layout: Layout, *, order: Order = ..., memory: Memory = ...
    ) -> Any: ...
    @public_call
    def empty(
        self,
        shape: Sequence[int],
        dtype: object,
        layout: Layout,
        *,
        order: Order = "C",
        memory: Memory = "device",
    ) -> Any:
        """
        Return an uninitialised matrix that is dealt to ranks. Collective.

        Parameters
        ----------
        shape, dtype, order
            As of `empty_host`.
        layout : Layout
            What each rank has; `Matrix.local` is that. Of a batch ``Layout.rows()`` deals whole matrices.
        memory : {"device", "host", "shared"}
            Where: in the memory of each rank's device, in host memory of each rank alone, or in one segment of host
            memory. Every rank of the node reads and writes that segment, and each `Matrix.local` is a view of it.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks; if the layout does not fit the shape or the
            number of ranks.
        CapacityError
            If a rank has too little memory.
        """
        with self._gate.call("empty") as open_with:
            wanted = new_matrix(shape, dtype, order, layout_of(layout), memory, self.size)
            wanted.layout.rectangles(wanted.shape, self.size)
            open_with(**wanted.asked())
            return self._store.empty(wanted)

    @overload
    def distribute(self, local: Any, layout: Layout, *, shape: _Two, dtype: object = ...) -> Matrix: ...
    @overload
    def distribute(self, local: Any, layout: Layout, *, shape: _Three, dtype: object = ...) -> Batch: ...
    @overload
    def distribute(
        self, local: Any, layout: Layout, *, shape: Sequence[int] | None = ..., dtype: object = ...
    ) -> Any: ...
    @public_call
    def distribute(
        self, local: Any, layout: Layout, *, shape: Sequence[int] | None = None, dtype: object = None
    ) -> Any:
        """
        Make arrays of the ranks one matrix, of which each is a part, without a copy. Collective.

        Parameters
        ----------
        local : array or None
            This rank's part, as of `register`; None, or an array without elements, where it has none. Memory, order and
            leading dimension may differ between ranks. An array of three dimensions is of whole matrices of a batch.
        layout : Layout
            How the matrix is dealt to ranks; of a batch what it says of rows is true of the matrices' numbers. Of
            ``Layout.rows()`` and ``Layout.cols()`` without counts, the arrays say how many each rank has.
        shape : sequence of two int, or three, optional
            Rows and columns of the matrix; needed where neither counts nor arrays say them. As of `empty_host`.
        dtype : str or DType, optional
            As of `register`; needed where no rank has an array.

        Returns
        -------
        Matrix or Batch
            Its `Matrix.local` is the array that was given, which is kept alive; of a rank that gave None an array of
            the part's shape, without elements.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks, with rank: value. If arrays do not add up to the shape or are of different types; if ranks
            pass different layouts, shapes or types; as `register`.

        Notes
        -----
        What `register` says of memory holds for each part. Arrays of ``Layout.replicated()`` must be equal: one of them
        is read, and as C all are written.
        """
        with self._gate.call("distribute") as open_with:
            wanted, extents = layout_of(layout), None if shape is None else shape_of(shape, batches=True)
            kind = None if dtype is None else DType.parse(dtype)
            open_with(layout=wanted, shape=extents, dtype=kind)
            given = [] if local is None else [(local, (0, 0))]
            return self._store.distribute(given, wanted, extents, kind, batches=True)

    @public_call
    def distribute_parts(
        self, parts: Sequence[tuple[Any, tuple[int, int]]], *, shape: Sequence[int], dtype: object = None
    ) -> Matrix:
        """
        Make arrays of the ranks one matrix, each of which says where it is, without a copy. Collective.

        Parameters
        ----------
        parts : sequence of (array, (int, int))
            What this rank has: any number of arrays as of `distribute`, each with its first row and column.
        shape : sequence of two int
            Rows and columns of the matrix.
        dtype : str or DType, optional
            As of `distribute`.

        Returns
        -------
        Matrix
            Its `Matrix.local` is a tuple of the arrays.

        Raises
        ------
        ParamError, RankMismatchError
            On all ranks. If parts overlap, leave the matrix or leave an element of it out; as `distribute`. Parts of
            equal rows and columns on several ranks are replicas.
        """
        with self._gate.call("distribute_parts") as open_with:
            given, extents = parts_of(parts), shape_of(shape)
            kind = None if dtype is None else DType.parse(dtype)
            open_with(shape=extents, dtype=kind)
            return cast(Matrix, self._store.distribute(given, None, extents, kind))

    @overload
    def register(self, array: np.ndarray[_Two, Any], *, root: int, dtype: object = ...) -> Matrix: ...
    @overload
    def register(self, array: np.ndarray[_Three, Any], *, root: int, dtype: object = ...) -> Batch: ...
    @overload
    def register(self, array: Any, *, root: int, dtype: object = ...) -> Any: ...
    @public_call
    def register(self, array: Any, *, root: int, dtype: object = None) -> Any:
        """
        Make an existing array of one rank usable by all, without a copy. Collective.

        Parameters
        ----------
        array : array on rank `root`; ignored elsewhere (pass None)
            Two-dimensional, rows or columns contiguous (any leading dimension); of three dimensions a batch of such. It
            is of numpy or cupy, or anything that shows its memory by ``__dlpack__``, ``__cuda_array_interface__`` or
            ``__array_interface__``, as tensors of torch and jax do. It lies in host memory or on the device of `root`.
            What its library has enqueued on its current stream so far is awaited.
        root : int
            The rank that has it; the same on all ranks.
        dtype : str or DType, optional
            What its products are computed in, the same on all ranks: ``"tf32"`` for a float32 array, to use TF32; else
            that of the array.

        Returns
        -------
        Matrix or Batch
            On `root` its `Matrix.array` is of the array's library, or of numpy or cupy, over the same memory; what
            was registered is kept alive.

        Raises
        ------
        ParamError
            On all ranks: if it is not such an array, or means more than what lies in its memory (masked elements,
            units, a gradient); if ranks name different roots.

        Notes
        -----
        A view of a matrix of this session in shared host memory (`empty_host`) stays shared: all ranks read and write
        it, and `Matrix.array` is a view on each. All other host memory is private to `root`: only its link reaches
        it. What CUDA cannot page-lock of that, a thread of `root` copies to and from memory that is, during each call
        (`PlanSummary.staged`), which takes longer. Read-only arrays, and those of libraries whose arrays never change
        (jax), can be A or B, not C.

        What is the same memory is judged by the memory, not by its address. So two maps of one file, a window of MPI,
        shared memory of other sessions and processes, and managed memory seen from host and device are known. It cannot
        be known of device memory that the program itself has mapped from another process (CUDA IPC, virtual memory
        management) and of what drivers other than CUDA's map (XPMEM). C must not overlap A or B there either. It is
        looked up once: leave a registered mapping as it is, and a mapped file no shorter, until the release.
        """
        with self._gate.call("register") as open_with:
            place, kind = rank_of("root", root, self.size), None if dtype is None else DType.parse(dtype)
            open_with(dtype=kind)  # roots are compared by the store, whose error says what a matrix is
            return self._store.register(array, place, kind)

    @public_call
    def open_file(self, path: str, *, dtype: object = None, mode: str = "r") -> Matrix:
        """
        Make a matrix file usable where it is, however large: products read and write it piece by piece. Collective.

        Each rank has an equal number of its lines: columns of a file in Fortran order, rows in C order. Threads of it
        read and write these for all ranks, during calls, through page-locked memory (`host_memory` of the session says
        how much). The file has no array: `Matrix.local` is refused, and `Session.download` reads it into memory.

        Of several nodes the first one has to see the file. Ranks of others that do not see it have no lines of it. What
        is only read may be another copy on each node, of the same size and time (``cp -p``, ``rsync -t``).

        Parameters
        ----------
        path : str or os.PathLike
            A .npy file of two dimensions, the same on all ranks.
        dtype : str or DType, optional
            What it must hold; needed for bf16, which such a file cannot name, and for tf32.
        mode : {"r", "r+"}
            Whether it is only read, or can be C too. What is written stays in the file; after an error it can hold
            some of a result.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        DataFileError
            On all ranks: if the file cannot be opened, is no such file, or is not the same one on all that see it.

        Notes
        -----
        The file has to stay as long as it is until the release. A call that finds it shorter ends with a DataFileError
        on all ranks.
        """
        with self._gate.call("open_file") as open_with:
            if mode not in ("r", "r+"):
                raise ParamError(
                    f"mode = {shown(mode)}: use 'r' (read) or 'r+' (read and write); create_file makes a new one"
                )
            name, kind = path_of(path), None if dtype is None else DType.parse(dtype)
            open_with(path=name, dtype=kind, mode=mode)
            opened: MatrixFile | None = None
            with agreement.collective(self._group, "opening a matrix file"):
                if self.rank == 0:
                    opened = open_matrix(name, kind)
            return self._store.open_file(opened, writeable=mode == "r+")

    @public_call
    def create_file(
        self, path: str, shape: Sequence[int], dtype: object, *, order: Order = "F", overwrite: bool = False
    ) -> Matrix:
        """
        Make a matrix file of zeros, and open it to be read and written. Collective.

        Until it is complete it is called as `path` with ``.partial`` behind that, in the same folder. It gets its name
        by `commit`, `release` or `close`. If a call that was to write to it has failed, and nothing has been written
        there since, these raise instead, and the last two remove it. (A call that is refused before it begins leaves
        what was written before.) They also remove a file that nothing was written to. An error that leaves the
        session's ``with``, or that nobody catches, removes it, whichever rank has it. A job that is killed leaves it;
        so does one that ends without closing its session, which rank 0 says then.

        Parameters
        ----------
        path : str or os.PathLike
            A .npy file; the same on all ranks.
        shape, dtype : (int, int), str or DType
            Rows and columns, and the element type.
        order : {"F", "C"}
            Whether columns or rows follow each other in the file; columns by default, where new matrices in memory are
            in C order.
        overwrite : bool, default False
            Whether it may replace a file of that name, when it is complete, and one that was left unfinished. It has
            the mode of the file that it replaces.

        Returns
        -------
        Matrix
            As of `open_file` with mode ``"r+"``.

        Raises
        ------
        ParamError
            If an argument is none of these, or differs between ranks.
        DataFileError
            On all ranks: if there is such a file, finished or not, or it cannot be created.
        CapacityError
            On all ranks, if the disk has no room for it.
        """
        made: OutputFile | None = None
        with self._gate.call("create_file") as open_with:
            wanted = new_matrix(shape, dtype, order, Layout.rows(), "host")
            name, replaces = path_of(path), flag("overwrite", overwrite)
            open_with(path=name, **wanted.asked(), overwrite=replaces)
            try:
                with agreement.collective(self._group, "creating a matrix file"):
                    if self.rank == 0:
                        about = wanted.shape, wanted.dtype, wanted.order
                        made = OutputFile(name, *about, overwrite=replaces, how="pass overwrite=True")
                target = None if made is None else made.target
                return self._store.open_file(target, writeable=True, output=made)
            except BaseException:
                if made is not None:
                    made.discard()
                raise

    @public_call
    def commit(self, matrix: Matrix) -> None:
        """
        Give a file of `create_file` its name, with all that was written to it safe on the disk. Collective.

        The matrix can be used as before; what is written from now on changes the file. If it has its name, or is one
        of `open_file`, the call does the rest: all that was written until now is safe on the disk.

        Raises
        ------
        ParamError
            If the matrix lies in no file.
        DataFileError
            On all ranks: if the disk refuses, or a file of that name has appeared meanwhile without ``overwrite=True``.
            The unfinished file is removed then.
        """
        with self._gate.call("commit") as open_with:
            info = self._store.check("matrix", matrix).info
            if not info.file:
                raise ParamError(f"{info} lies in no file: pass a matrix of create_file")
            open_with(matrix=info)
            self._store.commit(info.number)

    @public_call
    def release(self, matrix: Matrix | Batch) -> None:
        """Give a matrix of this session back: unpin, unmap, free. Its views end with it. Collective.

        A file of `create_file` gets its name, or is removed, as is said there.
        """
        with self._gate.call("release") as open_with:
            whole = matrix.base if isinstance(matrix, Batch) else matrix
            info = self._store.check("matrix", whole).info
            if info.view is not None:
                raise ParamError(f"{info} is a view and has no memory of its own: release the matrix")
            if isinstance(matrix, Batch) and not matrix.is_whole:
                raise ParamError(f"{matrix} is a view and has no memory of its own: release the batch")
            open_with(matrix=info)
            self._store.release(whole)

    # -- arrays that other libraries deal -------------------------------------------------------

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
            return cast(Matrix, self._store.distribute(starts, layout, given.shape, kind))

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

    def _memory(self, matrix: Matrix, array: Any) -> Shown:
        """Return an array that this rank has of a matrix for other libraries; see `ShowsMemory`. Local."""
        return memory_of(matrix, array, self._backend, writes=True)

    def _let_follow(self, stream: int | None, memory: Shown) -> None:
        """Let who takes memory by DLPack, under a stream as that has it, wait for what is under way. Local."""
        if place_of(memory)[0] == HOST:
            self._calls.flight.drain()
        elif stream != -1:  # by which nothing is to be awaited
            self._calls.flight.let_follow(stream or 1)  # the default stream
            self._backend.let_follow(stream or 1)


def path_of(path: object) -> str:
    """Return the path that a caller names, or raise ParamError."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise ParamError(f"path = {shown(path)} is no path: pass a str")
    if not os.fspath(path):
        raise ParamError("path = '' is empty: name a file")
    return os.fspath(path)
