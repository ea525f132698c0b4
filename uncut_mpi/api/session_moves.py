"""The calls of a session that copy matrices: to another layout, from one rank or to one, to the host and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from uncut_mpi.api.exclusive import public_call
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.request import Choices, Request, Scalars, check_copy, infos_of
from uncut_mpi.api.session_base import SessionBase
from uncut_mpi.api.wanted import NewMatrix, layout_of, own_memory, rank_of
from uncut_mpi.errors import ParamError
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory, memory_of
from uncut_mpi.model.positions import indices_of, picked
from uncut_mpi.spmd import agreement


class MovesMatrices(SessionBase):
    """The matrices of a session, copied into others."""

    @public_call
    def scatter(self, array: Any, layout: Layout, root: int = 0, *, memory: Memory = "device") -> Matrix:
        """
        Return a new matrix with the elements of an array of one rank, dealt to ranks. Collective.

        Parameters
        ----------
        array : array on rank `root`; ignored elsewhere (pass None)
            As of `register`.
        layout : Layout
            What each rank is to have.
        root : int, default 0
            The rank that has the array.
        memory : {"device", "host", "shared"}
            As of `empty`.

        Raises
        ------
        ParamError, CapacityError
            As `register` and `empty`.
        """
        with self._gate.call("scatter") as open_with:
            place, wanted, where = rank_of("root", root, self.size), layout_of(layout), memory_of(memory)
            wanted.check_memory(where)
            open_with(root=place, layout=wanted, memory=where)
            source = self._store.register(array, place)
            made = self._store.empty(NewMatrix(source.shape, source.dtype, source.order, wanted, where))
            self._copy("scatter", source, made)
            self._store.release(source)
        return made

    @public_call
    def gather(self, matrix: Matrix, root: int = 0) -> np.ndarray | None:
        """
        Return all of a matrix as a new numpy array on one rank, None elsewhere. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any layout.
        root : int, default 0
            The rank that gets the array.

        Raises
        ------
        ParamError, CapacityError
            If the arguments are none of these, or the rank has too little memory.
        """
        with self._gate.call("gather") as open_with:
            source, place = self._store.check("gather: matrix", matrix), rank_of("root", root, self.size)
            open_with(matrix=source.info, root=place)
            whole = NewMatrix(source.shape, source.dtype, source.order, Layout.whole(place), "host")
            made = self._store.empty(whole)
            self._copy("gather", source, made)
            array: np.ndarray | None = made.array if self.rank == place else None
            self._store.release(made)
        return array

    @public_call
    def redistribute(
        self, matrix: Matrix, layout: Layout | None, *, out: Matrix | None = None, memory: Memory | None = None
    ) -> Matrix:
        """
        Copy a matrix into one that is dealt otherwise. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any layout.
        layout : Layout or None
            What each rank is to have; with `out` None stands for its layout, also where that has no name.
        out : Matrix, optional
            Where it is copied to: a matrix of this layout, and of the same shape and type. By default a new one. Parts
            that are stored in another order are transposed on their way.
        memory : str, optional
            Of a new one, as of `empty`; by default each rank's is that of its part of `matrix`.

        Returns
        -------
        Matrix
            `out`, or the new one.

        Raises
        ------
        ParamError, CapacityError
            If arguments do not fit, or a rank has too little memory.
        """
        with self._gate.call("redistribute") as open_with:
            source = self._store.check("redistribute: matrix", matrix)
            target, where = None, None
            wanted = None if layout is None and out is not None else layout_of(layout)
            if wanted is not None:
                wanted.rectangles(source.shape, self.size)
            if out is None:
                where = None if memory is None else memory_of(memory)
                if wanted is not None and where is not None:
                    wanted.check_memory(where)
            else:
                target = self._store.check("redistribute: out", out)
                fits = wanted is None or target.layout == wanted.filled(source.shape, self.size)
                if memory is not None or not fits:
                    raise ParamError(
                        f"out is of layout {target.layout}, but layout {wanted} and memory {memory} were given: "
                        "pass the layout of out, or None, and no memory, or no out"
                    )
                check_copy(("matrix", source.info), ("out", target.info))
            told = None if target is None else target.info
            open_with(matrix=source.info, layout=wanted, out=told, memory=where)
            if target is None:
                assert wanted is not None  # which is an option with out alone
                about = source.shape, source.dtype, source.order
                target = self._store.empty(NewMatrix(*about, wanted, where or own_memory(source, wanted)))
            self._copy("redistribute", source, target)
        return target

    @public_call
    def download(self, matrix: Matrix) -> Matrix:
        """
        Return a host matrix that every rank reads with the elements of a matrix. Collective.

        Parameters
        ----------
        matrix : Matrix
            Of any location; one in shared host memory is returned as it is.
        """
        with self._gate.call("download") as open_with:
            found = self._store.check("download: matrix", matrix)
            found.info.check_in_memory()
            self._await_caller(found)
            open_with(matrix=found.info)
            if found.whole.location == Location.host():  # of one in parts not all ranks have the array
                return found
            copy = self._store.empty(NewMatrix(found.shape, found.dtype, found.order, Layout.whole(0), "shared"))
            with agreement.collective(self._group, "downloading a matrix"):
                self._move(found, copy.array, writes=False)
        return copy

    @public_call
    def upload(self, source: Matrix, target: Matrix) -> None:
        """
        Copy a shared host matrix into a matrix of the same shape and type. Collective.

        Raises
        ------
        ParamError
            If shapes or types differ, `source` is not in shared host memory, or `target` cannot be written, overlaps it
            in memory or overlaps itself.
        """
        with self._gate.call("upload") as open_with:
            source, target = (
                self._store.check(f"upload: {name}", one) for name, one in (("source", source), ("target", target))
            )
            check_copy(("source", source.info), ("target", target.info))
            if source.whole.location != Location.host():
                raise ParamError(f"source ({source}) is not in shared host memory: use empty_host")
            self._await_caller(source, target)
            open_with(source=source.info, target=target.info)
            self._store.is_written(target, written=False)
            with agreement.collective(self._group, "uploading a matrix"):
                self._move(target, source.array, writes=True)
            self._store.is_written(target, written=True)

    def _await_caller(self, *matrices: Matrix) -> None:
        """Wait for what the caller's stream does, before matrices are moved without a plan, as with one. Local."""
        self._backend.mark_caller(None)
        self._backend.await_caller()
        self._store.check_files(matrices)

    def _move(self, matrix: Matrix, every: np.ndarray, *, writes: bool) -> None:
        """Copy this rank's parts of a matrix into an array of all elements, or from it. Local."""
        info, backend, item = matrix.info, self._backend, every.itemsize
        for at, held in enumerate(info.parts):
            part, own = held.part, matrix.own_part(at)
            if own is None or held.holder != self.rank or 0 in part.shape:
                continue
            address, array = own
            there = picked(*indices_of((part.rows, part.cols), info.layout.orders))
            if part.location.space == "host" and not info.file:
                if writes:
                    array[...] = every[there]
                else:
                    every[there] = array
                continue
            block = every[there]
            lines = block if part.order == "F" else block.T
            in_place = isinstance(there[0], slice) and lines.strides[0] == item
            if not in_place:
                lines = np.asfortranarray(lines) if writes else np.empty_like(lines, order="F")
            if info.file:
                ends = (address, part.ld * item), (lines.ctypes.data, lines.strides[1])
                (to, to_pitch), (source, pitch) = ends if writes else ends[::-1]
                backend.files.copy(to, to_pitch, source, pitch, (lines.shape[0] * item, lines.shape[1]))
            elif writes:
                backend.from_host(address, part.ld, lines)
            else:
                backend.to_host(address, part.ld, lines)
            if not (writes or in_place):
                every[there] = lines if part.order == "F" else lines.T

    def _copy(self, call: str, source: Matrix, target: Matrix) -> None:
        """Copy a matrix into another, as part of a call that has opened. Collective."""
        try:
            self._backend.mark_caller(None)
            request = Request(call, (source, source, target), Scalars(1.0, 0.0), Choices.of("N", "N", None))
            plan = self._plans.known(PlanKey.of_copy(infos_of(request.matrices), request.choices))
        except Exception as error:
            self._gate.fail(call, error)
        self._calls.run(request, plan, self._plans.keep)
