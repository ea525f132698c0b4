"""
The matrices of a session: made, registered, shared with peers, released.

Memory that peers may have mapped is never freed by the garbage collector: a dropped `Matrix` is
only marked, and the next collective call that makes or releases a matrix frees those which every
rank has dropped.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np

from uncut_mpi.api.arrays import element_type, take
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.matrix import READ_ONLY, Matrix, MatrixInfo, extent_bytes, host_view, layout_of
from uncut_mpi.api.memory import PeerMappings
from uncut_mpi.api.request import Operands
from uncut_mpi.device.interface import Backend, Pin
from uncut_mpi.errors import ParamError, PinError, RankMismatchError, agreed, is_agreed
from uncut_mpi.mappings import Piece, ground_of
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.problem import Order, StoredMatrix
from uncut_mpi.segments import Segment
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group


@dataclasses.dataclass(slots=True)
class _Held:
    """What this rank holds for one matrix until it is released on all ranks."""

    info: MatrixInfo
    address: int
    keep: Any = None
    segment: Segment | None = None
    pinned: bool = False
    peer_address: int = 0


class MatrixStore:
    """
    Every matrix of a session.

    Methods are collective unless they say otherwise, within a call that has opened: every rank is in it,
    with the same arguments.
    """

    def __init__(self, group: Group, backend: Backend, counters: Counters) -> None:
        self._group, self._backend, self._counters = group, backend, counters
        self.mappings = PeerMappings(backend)
        self._held: dict[int, _Held] = {}
        self._dropped: set[int] = set()
        self._given: weakref.WeakValueDictionary[int, Matrix] = weakref.WeakValueDictionary()
        self._next = 0
        self._home = object()
        self.on_release: list[Any] = []

    # -- making ------------------------------------------------------------------------------

    def empty_host(self, shape: tuple[int, int], kind: DType, order: Order) -> Matrix:
        """See `Session.empty_host`."""
        stored = StoredMatrix(*shape, order)
        self._collect()
        nbytes = stored.rows * stored.cols * kind.itemsize
        segment = exchange.shared_segment(self._group, nbytes, f"a {stored.rows}×{stored.cols} host matrix")
        number = self._take_number()
        info = MatrixInfo(number, stored, kind, Location.host(), (Piece(segment.memory, 0, nbytes),))
        held = _Held(info, segment.address, segment=segment)
        self._held[number] = held
        self._pin(held, nbytes)
        array = host_view(segment.array(kind.numpy, stored.rows * stored.cols), info)
        return self._publish(held, array)

    def empty_device(self, shape: tuple[int, int], kind: DType, rank: int, order: Order) -> Matrix:
        """See `Session.empty_device`."""
        array = None
        with agreement.collective(self._group, "allocating a device matrix"):
            if self._group.rank == rank:
                array = self._backend.empty(*shape, kind, order)
                self._counters.allocations += 1
        return self.register(array, rank, kind)

    def register(self, array: Any, root: int, kind: DType | None = None) -> Matrix:
        """See `Session.register`."""
        roots = self._collect(root)
        if any(other != root for other in roots):
            raise agreed(
                RankMismatchError(
                    f"ranks named different roots: {agreement.by_rank([f'root {other}' for other in roots])}; "
                    "one matrix lies on one rank, which all of them name. A matrix of which each rank has a part "
                    "cannot be registered: make it with empty_host, and let each rank write its part of .array"
                )
            )
        number = self._take_number()
        held: _Held | None = None
        error: BaseException | None = None
        if self._group.rank == root:
            try:
                held, array = self._describe(array, number, root, kind)
            except BaseException as caught:  # also an interrupt: the other ranks wait in the agreement below
                error = caught
        agreement.collective_result(self._group, error, "registering a matrix")
        infos = self._group.allgather_objects(held.info if held else None)
        info = infos[root]
        if held is None:
            held = _Held(info, 0)
        if info.location == Location.host():
            (piece,) = info.pieces
            segment = self._segment(piece.memory)
            held.address = segment.address + piece.start
            held.segment = segment
            flat = segment.array(np.uint8, segment.nbytes)[piece.start :]
            array = host_view(
                flat[: len(flat) // info.dtype.itemsize * info.dtype.itemsize].view(info.dtype.numpy), info
            )
        self._held[number] = held
        return self._publish(held, array if held.address else None)

    # -- using -------------------------------------------------------------------------------

    def check(self, name: str, matrix: object) -> Matrix:
        """Return `matrix` if it is a live matrix of this session, else raise ParamError. Local."""
        if not isinstance(matrix, Matrix):
            raise ParamError(
                f"{name} is {'None' if matrix is None else type_text(matrix)}: pass a Matrix of this session "
                "(session.register(array, root=...) or session.empty_host(shape))"
            )
        if matrix.home is not self._home:
            raise ParamError(f"{name} is a matrix that was released or belongs to another session")
        return matrix

    def operands(self, a: Any, b: Any, c: Any) -> Operands:
        """Return A, B and C, each as `check` does. Local."""
        # Asked at once, since mostly it is so and this is part of every call.
        if type(a) is type(b) is type(c) is Matrix and a.home is b.home is c.home is self._home:
            return a, b, c
        return self.check("A", a), self.check("B", b), self.check("C", c)

    def address(self, matrix: Matrix) -> int:
        """Return where this rank finds element (0, 0): its own address, or the peer's memory mapped here. Local."""
        info = matrix.info
        held = self._held[info.number]
        if info.location.space == "host" or info.location.rank == self._group.rank:
            return held.address
        if not held.peer_address:
            assert info.handle is not None  # else plans leave it to its owner
            held.peer_address = self.mappings.open(info.handle) + info.offset_bytes
        return held.peer_address

    def download(self, matrix: Matrix) -> Matrix:
        """See `Session.download`."""
        if matrix.location == Location.host():
            return matrix
        copy = self.empty_host(matrix.shape, matrix.dtype, matrix.order)
        with agreement.collective(self._group, "downloading a matrix"):
            if matrix.location.rank == self._group.rank:
                if matrix.location.space == "host":
                    copy.array[...] = matrix.array
                else:
                    out = copy.array if matrix.order == "F" else copy.array.T
                    self._backend.to_host(matrix.address, matrix.info.stored.ld, out)
        return copy

    def upload(self, source: Matrix, target: Matrix) -> None:
        """See `Session.upload`."""
        with agreement.collective(self._group, "uploading a matrix"):
            if source.shape != target.shape or source.dtype is not target.dtype:
                raise ParamError(f"{source} cannot be copied into {target}: shapes and types must be equal")
            if source.location != Location.host():
                raise ParamError(f"{source} is not in shared host memory: use empty_host")
            if not target.info.writeable:
                raise ParamError(f"{target} {READ_ONLY}")
            owner = target.location.rank
            if owner != self._group.rank and not (owner is None and self._group.rank == 0):
                return
            if target.location.space == "host":
                target.array[...] = source.array
                return
            data = source.array if target.order == "F" else source.array.T
            self._backend.from_host(target.address, target.info.stored.ld, np.asfortranarray(data))

    # -- releasing ---------------------------------------------------------------------------

    def release(self, matrix: Matrix) -> None:
        """See `Session.release`."""
        self._free([matrix.info.number])

    def close(self) -> None:
        """Release every matrix."""
        self._free(sorted(self._held))

    def give_back_alone(self) -> None:
        """Unpin and unmap what this rank holds, when no rank can be asked any more. Local."""
        self.mappings.close_all()
        while self._held:
            self._let_go(self._held.popitem()[1])

    def _free(self, numbers: list[int]) -> None:
        with agreement.collective(self._group, "unmapping matrices"):
            for number in numbers:
                for call in self.on_release:
                    call(number)
                held = self._held[number]
                if held.peer_address and held.info.handle:
                    self.mappings.close(held.info.handle)
        with agreement.collective(self._group, "freeing matrices"):
            for number in numbers:
                matrix = self._given.pop(number, None)
                if matrix is not None:
                    matrix.closed, matrix.home = True, None
                held = self._held.pop(number)
                self._dropped.discard(number)
                self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        """Unpin and unmap host memory, unless another matrix lies in it: then that one is to do so."""
        segment = held.segment
        heir = next((other for other in self._held.values() if segment is not None and other.segment is segment), None)
        if heir is not None:
            heir.pinned |= held.pinned
            return
        if held.pinned:
            self._backend.unpin(segment.address if segment is not None else held.address)
        if segment is not None:
            segment.close()

    def _collect(self, word: int = 0) -> list[int]:
        """Free what every rank has dropped; return the word that each of them gives along."""
        self._dropped.intersection_update(self._held)  # a released matrix is dropped too, later
        dropped, words = zip(*self._group.allgather_objects((frozenset(self._dropped), word)), strict=True)
        everywhere = frozenset.intersection(*dropped)
        if everywhere:
            self._free(sorted(everywhere))
        return list(words)

    # -- parts -------------------------------------------------------------------------------

    def _describe(self, given: Any, number: int, root: int, kind: DType | None) -> tuple[_Held, Any]:
        """Return what this rank knows of a caller's array, and the array. Local."""
        taken = take(given, self._backend)
        array = taken.array
        stored = layout_of(array.shape, array.strides, array.dtype.itemsize)
        dtype = element_type(array, kind)
        nbytes = extent_bytes(stored, dtype)
        if taken.on_device:
            adopted = self._backend.adopt(array)
            ground = ground_of(adopted.address, nbytes, _process(root), on_host=False)
            info = MatrixInfo(
                number,
                stored,
                dtype,
                Location.device(root),
                ground.pieces,
                adopted.handle,
                adopted.offset_bytes,
                adopted.obstacle,
                taken.writeable,
            )
            _check_alignment(adopted.address, nbytes, dtype)
            return _Held(info, adopted.address, keep=adopted.keep), array
        address = array.__array_interface__["data"][0]
        _check_alignment(address, nbytes, dtype)
        for held in self._held.values():
            segment = held.segment
            if segment is not None and segment.address <= address < segment.address + max(1, segment.nbytes):
                piece = Piece(segment.memory, address - segment.address, nbytes)
                info = MatrixInfo(number, stored, dtype, Location.host(), (piece,), writeable=taken.writeable)
                return _Held(info, address, keep=array), array
        ground = ground_of(address, nbytes, _process(root))
        if ground.trouble:
            raise ParamError(f"the array cannot be read: {ground.trouble}")
        # Last, since it is to be undone; and here, since what devices may write depends on it.
        pin, obstacle = Pin.FOREIGN, ""
        try:
            if nbytes:
                pin = self._backend.pin(address, nbytes)
        except PinError as error:
            obstacle = str(error)
        writeable = taken.writeable and ground.writeable and pin is not Pin.READABLE
        info = MatrixInfo(
            number, stored, dtype, Location.host(root), ground.pieces, obstacle=obstacle, writeable=writeable
        )
        return _Held(info, address, keep=array, pinned=bool(pin)), array

    def _pin(self, held: _Held, nbytes: int) -> None:
        try:
            with agreement.collective(self._group, "pinning a host matrix"):
                held.pinned = bool(self._backend.pin(held.address, nbytes)) if nbytes else False
        except BaseException as error:
            if is_agreed(error):  # raised by all ranks, so all of them give it back
                self._free([held.info.number])
            raise

    def _segment(self, memory: str) -> Segment:
        """Return the segment that pieces call `memory`; the matrix it was made for may be gone already."""
        for held in self._held.values():
            if held.segment is not None and held.segment.memory == memory:
                return held.segment
        raise agreed(ParamError(f"no matrix of this session lies in {memory} any more"))

    def _take_number(self) -> int:
        self._next += 1
        return self._next

    def _publish(self, held: _Held, array: Any) -> Matrix:
        matrix = Matrix(held.info, array=array, address=held.address, home=self._home)
        weakref.finalize(matrix, self._dropped.add, held.info.number)
        self._given[held.info.number] = matrix
        return matrix


def _process(rank: int) -> str:
    return f"rank {rank}"


def _check_alignment(address: int, nbytes: int, dtype: DType) -> None:
    if nbytes and address % dtype.itemsize:
        raise ParamError(
            f"the array begins at address {address:#x}, which is no multiple of {dtype.itemsize}, the bytes of its "
            f"elements ({dtype.name}): pass a copy (x.copy())"
        )
