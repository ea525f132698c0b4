"""
The matrices of a session: made, registered, shared with peers, released.

Memory that peers may have mapped is never freed by the garbage collector. A dropped `Matrix` is only marked. The next
collective call that makes or releases a matrix frees those which every rank has dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.api.batch import Batch, Stacks
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.dealing import by_layout, by_products, by_starts, proposed
from uncut_mpi.api.grips import Grip, Grips, Held, Lent, Mine, Start, has_elements, is_batch
from uncut_mpi.api.matrix import HeldPart, Home, LocalParts, Matrix, MatrixInfo, Name
from uncut_mpi.api.matrix_files import MatrixFile, OutputFile, known_of, mark
from uncut_mpi.api.memory import PeerMappings
from uncut_mpi.api.operands import NOTHING, Batches
from uncut_mpi.api.request import Choices, Operands
from uncut_mpi.api.stored import host_view, stored_of
from uncut_mpi.api.views import Several
from uncut_mpi.api.wanted import NewMatrix
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import (
    CapacityError,
    DataFileError,
    ParamError,
    RankMismatchError,
    agreed,
    is_agreed,
    raised_by_all,
    reason,
)
from uncut_mpi.instead import BATCH
from uncut_mpi.mappings import Stretch, object_name
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import BoundLayout, Order, Part, common
from uncut_mpi.segments import Segment
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group
from uncut_mpi.unfinished import Discardable

HOST_ALIGNMENT: Final = 64
"""Bytes of which a new array in host memory begins at a multiple: JAX uses no other memory as it is."""

_MOST_VECTORS: Final = 1024


class MatrixStore:
    """
    Every matrix of a session.

    Methods are collective unless they say otherwise, within a call that has opened: every rank is in it,
    with the same arguments.
    """

    def __init__(self, group: Group, backend: Backend, counters: Counters, home: Home) -> None:
        self._group, self._backend, self._counters, self._home = group, backend, counters, home
        self.mappings = PeerMappings(backend)
        self._held: dict[int, Held] = {}
        self._grips = Grips(group, backend, self._held)
        self._dropped: set[int] = set()
        self._vectors: set[Name] = set()  # those that `check_vector` has passed
        self._given: weakref.WeakValueDictionary[int, Matrix] = weakref.WeakValueDictionary()
        self._next = 0
        self._batches = Batches(home)
        self.on_release: list[Any] = [self._batches.forget]

    # -- making ------------------------------------------------------------------------------

    def empty(self, wanted: NewMatrix) -> Matrix | Batch:
        """See `Session.empty`."""
        made = self._empty_shared(wanted) if wanted.memory == "shared" else self._empty_parts(wanted)
        return made if wanted.stacks is None else self._batch(made, wanted.stacks)

    def _empty_parts(self, wanted: NewMatrix) -> Matrix:
        rank, size, array = self._group.rank, self._group.size, None
        with agreement.collective(self._group, f"allocating a {wanted.memory} matrix"):
            shape = wanted.layout.local_shape(wanted.shape, rank, num_ranks=size)
            # Of a matrix without elements its arrays say where it would lie.
            if 0 not in shape or (0 in wanted.shape and rank in wanted.layout.holders(size)):
                array = self._new_array(wanted.memory, shape, wanted.dtype, wanted.order)
        given = [] if array is None else [(array, (0, 0))]
        made: Matrix = self.distribute(given, wanted.layout, wanted.shape, wanted.dtype, wanted.order)
        return made

    def register(self, array: Any, root: int, kind: DType | None) -> Any:
        """See `Session.register`."""
        roots = self._collect(root)
        if any(other != root for other in roots):
            raise agreed(
                RankMismatchError(
                    f"ranks named different roots: {agreement.by_rank([f'root {other}' for other in roots])}; "
                    "one matrix lies on one rank, which all of them name. A matrix of which each rank has a part is "
                    "made with distribute"
                )
            )
        given = [(array, (0, 0))] if self._group.rank == root else []
        return self._deal(self._grips.of_arrays(given, kind, batches=True), Layout.whole(root), None, kind)

    def distribute(
        self,
        given: Sequence[tuple[Any, Start]],
        layout: Layout | None,
        shape: tuple[int, ...] | None,
        kind: DType | None,
        order: Order = "C",
        *,
        batches: bool = False,
    ) -> Any:
        """
        Return the arrays of ranks as a matrix, or batch if they may be; see `Session.distribute`, `distribute_parts`.

        Parameters
        ----------
        given : sequence of (array, (int, int))
            What this rank has, and of which element on.
        layout : Layout or None
            How the parts are dealt, if not as this rank says; then it gives one array or none, from (0, 0) on.
        order : str
            As of `by_layout`.
        """
        self._collect()
        return self._deal(self._grips.of_arrays(given, kind, batches=batches), layout, shape, kind, order)

    def like(self, matrix: Matrix, given: Any, before: Matrix | None) -> Matrix:
        """
        Return a matrix dealt as another one, made of an array of each rank.

        Parameters
        ----------
        given : array, or sequence of arrays
            This rank's part; of a matrix in single parts those that it has, in the order of `Matrix.local`.
        before : Matrix or None
            What this was asked for before; if all ranks give the same arrays again, it is returned.
        """
        same = before is not None and before.home is self._home and _is_local(given, before)
        again = self._collect(same)
        if before is not None and all(again):
            return before
        starts = [(rows[0], cols[0]) for rows, cols in matrix.rectangles]
        parts = [(given, (0, 0))] if matrix.layout is not None else [*zip(given, starts, strict=True)]
        mine = self._grips.of_arrays(parts, matrix.dtype)
        made: Matrix = self._deal(mine, matrix.layout, matrix.shape, matrix.dtype)
        return made

    def lend(self, matrices: Sequence[Matrix], arrays: Sequence[Lent]) -> None:
        """
        Have this rank's parts of matrices of lent arrays lie in others from now on. Local.

        Raise ParamError if one is stored otherwise than before, or the last, which is written, overlaps another.
        """
        if any(np.shares_memory(one, arrays[-1]) for one in arrays[:-1]):
            raise ParamError("the array that is written overlaps another one")
        for matrix, array in zip(matrices, arrays, strict=True):
            held = self._held[matrix.info.number]
            for number, of in enumerate(held.info.parts):
                if of.holder == self._group.rank and array.size:
                    stored = stored_of(array.shape, array.strides, array.dtype.itemsize)
                    if (stored.order, stored.ld) != (of.part.order, of.part.ld):
                        raise ParamError(f"an array of leading dimension {stored.ld} was given, not of {of.part.ld}")
                    address = array.__array_interface__["data"][0]
                    if address != held.addresses[number]:
                        held.addresses[number], held.grips = address, [Grip(address, keep=array)]
                        for call in self.on_release:  # what is bound to the one before
                            call(matrix.info.number)

    def open_file(self, found: MatrixFile | None, *, writeable: bool, output: Discardable | None = None) -> Matrix:
        """
        See `Session.open_file`: ranks that see it have equal numbers of its lines, each reads and writes its own.

        Parameters
        ----------
        found : MatrixFile or None
            On rank 0 the file.
        output : OutputFile, optional
            On rank 0, of a file that has no name yet.
        """
        file: MatrixFile = self._collect(found)[0]
        holders, name = self._seeing(file, writeable=writeable)
        mine = self._grips.lines_of_file(file, holders, name, writeable=writeable)
        ranks = None if len(holders) == self._group.size else holders
        layout = Layout.cols(ranks=ranks) if file.order == "F" else Layout.rows(ranks=ranks)
        matrix: Matrix = self._deal(mine, layout, (file.rows, file.cols), file.dtype, file.order, file.path)
        held = self._held[matrix.info.number]
        if file.open_path and output is None:
            windows = [grip.window for grip in held.grips if grip.window is not None]
            with contextlib.suppress(OSError):  # then an error of this rank alone leaves it to rank 0
                output = Discardable(file.open_path, os.dup(windows[0].descriptor)) if windows else None
        held.unfinished, held.output = bool(file.open_path), output
        held.unwritten = [((0, file.rows), (0, file.cols))] if held.unfinished else []
        return matrix

    def _seeing(self, file: MatrixFile, *, writeable: bool) -> tuple[list[int], str]:
        """
        Return the ranks that read and write a file, and what other nodes than the first call it; empty for that one.

        All of the first node, and those of others that see it too. What is only read may be a copy of the same time.
        Of what is written rank 0 changes the time first, so that only the file itself has that; the system of one node
        numbers devices otherwise than that of another.
        """
        group, path = self._group, file.open_path or file.path
        if group.num_nodes == 1:
            return [*range(group.size)], ""
        if writeable:
            with agreement.collective(group, "opening a matrix file"):
                if group.rank == 0:
                    mark(path)
        every = group.allgather_objects(known_of(path))
        first, ranks = every[0], [rank for rank, node in enumerate(group.node_of) if node == 0]
        if first is None:
            return ranks, ""  # rank 0 says why
        for rank, found in enumerate(every):
            if found is None or rank in ranks:
                continue
            if found[2:] != first[2:]:
                raise agreed(
                    DataFileError(
                        f"{file.path} is not the same file on all ranks: rank {rank} on {group.hosts[rank]} sees "
                        f"another one than rank 0 on {group.hosts[0]}; name one on a file system that nodes share, or "
                        "one that only the first node has. To be read, equal copies of one time do (cp -p, rsync -t)"
                    )
                )
            ranks.append(rank)
        return sorted(ranks), "" if group.node == 0 else object_name(*first[:2])

    # -- using -------------------------------------------------------------------------------

    def check(self, name: str, matrix: object) -> Matrix:
        """Return `matrix` if it is a live matrix of this session, else raise ParamError. Local."""
        if not isinstance(matrix, Matrix):
            mend = "(session.distribute(array, layout), session.register(array, root=...) or session.empty_host(shape))"
            mend = BATCH if is_batch(matrix) else f"pass a Matrix of this session {mend}"
            if isinstance(matrix, numbers.Number) and name in ("A", "B", "C", "a", "b"):  # as in a call of BLAS
                mend = "pass the matrices first, and factors by their names (alpha=, beta=)"
            raise ParamError(f"{name} is {'None' if matrix is None else type_text(matrix)}: {mend}")
        if matrix.home is not self._home:
            raise ParamError(f"{name} is a matrix that was released or belongs to another session")
        return matrix

    def check_vector(self, name: str, matrix: object) -> Matrix:
        """Return `matrix` as `check` does, if every rank has all of it where it computes, side by side. Local."""
        found = self.check(name, matrix)
        if found.info.name in self._vectors:  # as mostly, and to look takes some us a rank
            return found
        lacking = [rank for rank in range(self._group.size) if self._own_part(found.info, rank) is None]
        if lacking and 0 not in found.shape:
            raise ParamError(
                f"{name} is not all, its elements side by side, in memory that rank {lacking[0]} computes in: pass a "
                "matrix that is dealt by um.Layout.replicated() and lies on the devices"
            )
        if len(self._vectors) >= _MOST_VECTORS:
            self._vectors.clear()
        self._vectors.add(found.info.name)
        return found

    def own_address(self, info: MatrixInfo) -> int:
        """Return where this rank has all of a vector, 0 if it is empty. Local."""
        part = self._own_part(info, self._group.rank)
        return 0 if part is None else self.address(info, part)

    def _own_part(self, info: MatrixInfo, rank: int) -> int | None:
        """Return the number of the part that is all of a vector where a rank computes, if there is one."""
        places = [Location.device(rank)]
        if self._backend.takes_host_memory:
            places += [Location.host(rank), Location.host()]
        for number, held in enumerate(info.parts):
            part, (rows, cols) = held.part, held.part.stored_shape
            if part.location in places and part.shape == info.layout.shape and (cols == 1 or part.ld == rows):
                return number
        return None

    def check_any(self, name: str, one: object) -> Matrix | Batch:
        """Return `one` if it is a live matrix or batch of this session, else raise ParamError. Local."""
        if not isinstance(one, Batch):
            return self.check(name, one)
        if one.base.home is not self._home:
            raise ParamError(f"{name} is a batch that was released or belongs to another session")
        return one

    def check_files(self, matrices: Sequence[Matrix]) -> None:
        """Raise DataFileError if a file of this rank is gone, or no longer as long as it was. Local."""
        for matrix in matrices:
            info = matrix.info
            numbers = info.view.numbers if isinstance(info.view, Several) else (info.number,)
            for held in map(self._held.__getitem__, numbers if info.file else ()):
                self._check_there(held)
                for grip in held.grips:
                    if grip.window is not None and os.fstat(grip.window.descriptor).st_size < grip.window.nbytes:
                        raise grip.window.shorter()

    def operands(self, a: Any, b: Any, c: Any, choices: Choices) -> Operands:
        """Return A, B and C, each as `check` does; of batches those of one product for all of theirs. Local."""
        # Asked at once, since mostly it is so and this is part of every call.
        if type(a) is type(b) is type(c) is Matrix and a.home is b.home is c.home is self._home:
            return a, b, c
        return self._batches.operands(self.check_any, (a, b, c), choices[:2])

    def proposed(self, wanted: NewMatrix, memories: Sequence[Memory]) -> Any:
        """Return a matrix, or batch, that is not made, of which each rank would make its part in a memory. Local."""
        made = Matrix(proposed(wanted, memories), array=None, local=NOTHING, home=self._home)
        return made if wanted.stacks is None else Batch(made, wanted.stacks, (0, 0))

    def address(self, info: MatrixInfo, part: int) -> int:
        """Return where this rank finds a part: its own address, or the peer's memory mapped here. Local."""
        matrix, number, start = info.origin(part)
        held = self._held[matrix]
        of = held.info.parts[number]
        if not held.addresses[number] and of.part.location.space == "device" and of.holder != self._group.rank:
            assert of.handle is not None  # else plans leave it to its owner
            held.addresses[number] = self.mappings.open(of.handle) + of.offset_bytes
            held.opened.append(of.handle)
        return held.addresses[number] + start if held.addresses[number] else 0

    def begin_writing(self, info: MatrixInfo) -> None:
        """Note that a matrix is being written; a file of which some is not written to its end gets no name. Local."""
        self._held[info.number].failed.append((info.seen.rows, info.seen.cols))

    def refuse_writing(self, info: MatrixInfo) -> None:
        """Note that a matrix is not written, as it was to be; what an earlier call has written stays good. Local."""
        held, seen = self._held[info.number], (info.seen.rows, info.seen.cols)
        held.failed += [shared for one in held.unwritten if (shared := common(one, seen))]

    def end_writing(self, info: MatrixInfo) -> None:
        """Note that a matrix has been written to its end. Local."""
        held = self._held[info.number]
        held.written = True
        held.failed, held.unwritten = (
            [rest for one in some for rest in info.seen.not_of(one)] for some in (held.failed, held.unwritten)
        )

    # -- releasing ---------------------------------------------------------------------------

    def commit(self, number: int) -> None:
        """See `Session.commit`, of the matrix of a number."""
        held = self._held[number]
        self._check_there(held)
        if held.failed:
            (top, bottom), (left, right) = held.failed[0]
            raise agreed(
                DataFileError(
                    f"a call that was to write rows {top} to {bottom} and columns {left} to {right} of "
                    f"{held.info.file} has failed: write them, or all of it, again before it is completed"
                )
            )
        with agreement.collective(self._group, "completing a matrix file"):
            for grip in held.grips:
                if grip.window is not None:
                    grip.window.flush()
        if not held.unfinished:
            return
        held.unfinished, held.lost = False, True
        with agreement.collective(self._group, "completing a matrix file"):
            if isinstance(held.output, OutputFile):
                held.output.commit()
        held.lost = False

    def _check_there(self, held: Held) -> None:
        if held.lost:
            raise agreed(DataFileError(f"{held.info} could not be completed and is gone: release it and make it again"))

    def drop_files(self) -> None:
        """Remove the files that have no name yet. Local."""
        for held in self._held.values():
            held.unfinished = False
            if held.output is not None:
                held.output.discard()

    def release(self, matrix: Matrix) -> None:
        """See `Session.release`."""
        self._free([matrix.info.number])

    def close(self) -> None:
        """Release every matrix."""
        self._free(sorted(self._held))

    def give_back_alone(self) -> None:
        """Unpin and unmap what this rank holds, when no rank can be asked any more. Local."""
        self.mappings.close_all()
        self.drop_files()
        while self._held:
            self._grips.let_go(self._held.popitem()[1].grips)

    def _free(self, numbers: list[int]) -> None:
        error: BaseException | None = None
        for held in map(self._held.__getitem__, numbers):
            if held.unfinished and (held.written or held.failed):
                try:
                    self.commit(held.info.number)
                except Exception as caught:  # of all ranks; the memory goes all the same
                    error = caught
        with agreement.collective(self._group, "unmapping matrices"):
            for number in numbers:
                for call in self.on_release:
                    call(number)
                held = self._held[number]
                while held.opened:
                    self.mappings.close(held.opened.pop())
        with agreement.collective(self._group, "freeing matrices"):
            for number in numbers:
                matrix = self._given.pop(number, None)
                if matrix is not None:
                    matrix.end()
                held = self._held.pop(number)
                self._dropped.discard(number)
                if held.output is not None:
                    held.output.discard()
                self._grips.let_go(held.grips)
        if error is not None:
            raise error

    def _collect(self, word: Any = None) -> list[Any]:
        """Free what every rank has dropped; return the word that each of them gives along."""
        self._dropped.intersection_update(self._held)  # a released matrix is dropped too, later
        dropped, words = zip(*self._group.allgather_objects((frozenset(self._dropped), word)), strict=True)
        everywhere = frozenset.intersection(*dropped)
        if everywhere:
            self._free(sorted(everywhere))
        return list(words)

    # -- parts -------------------------------------------------------------------------------

    def _empty_shared(self, wanted: NewMatrix) -> Matrix:
        """Return a matrix in one segment of the node, which lies there as a whole, however it is dealt."""
        self._collect()
        layout = wanted.layout.filled(wanted.shape, self._group.size)
        (rows, cols), kind = wanted.shape, wanted.dtype
        nbytes = rows * cols * kind.itemsize
        if self._group.num_nodes > 1 and layout != Layout.whole():
            with raised_by_all():
                raise ParamError(
                    f"a matrix dealt in shared memory was asked for, and ranks are on {self._group.num_nodes} nodes: "
                    "use memory='host', each rank's own, or 'device'"
                )
        segment = exchange.segment_of(self._group, 0, nbytes, f"a host matrix of {rows}×{cols}")
        memory = "" if segment is None else segment.memory
        if self._group.num_nodes > 1:  # of which others know its name alone
            memory = self._group.from_root(lambda: memory)
        bound = BoundLayout.whole(wanted.shape, Location.host(), wanted.order)
        part = Part((0, rows), (0, cols), Location.host(), wanted.order)
        held = HeldPart(part, layout.holders(self._group.size)[0], (Stretch(memory, 0, nbytes),))
        grips = [] if segment is None else [Grip(segment.address, segment=segment)]
        matrix = self._publish(MatrixInfo(0, bound, kind, (held,), layout), [], grips)
        try:
            with agreement.collective(self._group, "pinning a host matrix"):
                for grip in grips if nbytes else ():
                    grip.pinned = bool(self._backend.pin(grip.address, nbytes))
        except BaseException as error:
            if is_agreed(error):  # raised by all ranks, so all of them give it back
                self._free([matrix.info.number])
            raise
        return matrix

    def _new_array(self, memory: Memory, shape: tuple[int, int], dtype: DType, order: Order) -> Any:
        """Return an uninitialised array of this rank. Local."""
        if memory == "device":
            self._counters.allocations += 1
            return self._backend.empty(*shape, dtype, order)
        try:
            nbytes = shape[0] * shape[1] * dtype.itemsize
            flat = np.empty(nbytes + HOST_ALIGNMENT, np.uint8)
            start = -flat.ctypes.data % HOST_ALIGNMENT
            return flat[start : start + nbytes].view(dtype.numpy).reshape(shape, order=order)
        except MemoryError as error:
            raise CapacityError(
                f"there is no host memory for a part of {shape[0]}×{shape[1]}: {reason(error)}"
            ) from error

    def _deal(
        self,
        ours: Iterable[Mine],
        layout: Layout | None,
        shape: tuple[int, ...] | None,
        kind: DType | None,
        order: Order = "C",
        file: str = "",
    ) -> Any:
        """
        Return the matrix of what ranks have, or raise on all of them what one met; see `by_layout`.

        It is a batch where arrays have three dimensions, or the shape has.
        """
        mine: list[Mine] = []
        try:
            with agreement.collective(self._group, "registering a matrix"):
                for one in ours:
                    mine.append(one)
            of_ranks = self._group.allgather_objects([one.known for one in mine])
            if len({one.held.stretches[0].memory for of_rank in of_ranks for one in of_rank if file}) > 1:
                raise agreed(
                    DataFileError(
                        f"{file} is not the same file on all ranks: name it by a path that all of them see "
                        "(os.path.abspath), on a file system that they share"
                    )
                )
            given, stacks = [ones[0] if ones else None for ones in of_ranks], None
            with raised_by_all():
                if layout is None:
                    assert shape is not None  # which is no option without a layout
                    dealt = by_starts(of_ranks, (shape[0], shape[1]), kind)
                elif len(shape or ()) == 3 or any(one is not None and one.stack is not None for one in given):
                    dealt, stacks = by_products(given, layout, shape, kind)
                else:
                    dealt = by_layout(given, layout, None if shape is None else (shape[0], shape[1]), kind, order)
            made = self._publish(dealt, mine, [one.grip for one in mine], file)
            known = [one.known for one in mine] or [one for of_rank in of_ranks for one in of_rank]
            made.library = next((one.library for one in known), "")
            return made if stacks is None else self._batch(made, stacks, mine[0].batch if mine else None)
        except BaseException:
            self._grips.let_go([one.grip for one in mine])
            raise

    def _batch(self, base: Matrix, stacks: Stacks, array: Any = None) -> Batch:
        """Return a batch, of which this rank has given an array."""
        (own, _) = stacks.dealt.rectangles((stacks.count, 1), self._group.size)[self._group.rank]
        return Batch(base, stacks, own, array)

    def _publish(self, info: MatrixInfo, mine: Sequence[Mine], grips: list[Grip], file: str = "") -> Matrix:
        """
        Return a new matrix, and give it a number.

        Parameters
        ----------
        mine : sequence of Mine
            What this rank gives.
        grips : list of Grip
            What it holds of that; segments of other ranks' parts come to them.
        file : str, optional
            That it lies in.
        """
        self._next += 1
        info = dataclasses.replace(info, number=self._next, file=file)
        addresses, arrays, array = [], {}, None
        ours = iter([one for one in mine if one.known.has_elements or 0 in info.layout.shape])
        for number, held in enumerate(info.parts):
            one = next(ours, None) if held.holder == self._group.rank else None
            addresses.append(0 if one is None else one.grip.address)
            if one is not None:
                arrays[number] = one.array
            if held.part.location == Location.host() and self._group.node == 0:
                (stretch,) = held.stretches
                segment = self._grips.segment(stretch.memory, grips)
                if not any(grip.segment is segment for grip in grips):
                    grips.append(Grip(segment.address + stretch.start, segment=segment))
                addresses[number] = segment.address + stretch.start
                if not info.in_parts:
                    array = arrays[number] = _view_of(segment, stretch, info)
        if array is None and not file:
            array = next((one for one in arrays.values() if one.shape == info.layout.shape), None)
        own = {number: (addresses[number], one) for number, one in arrays.items()}
        local = self._local_parts(info, mine, array, own)
        matrix = Matrix(info, array=array, local=local, home=self._home)
        self._held[info.number] = Held(info, addresses, grips)
        weakref.finalize(matrix, self._dropped.add, info.number)
        self._given[info.number] = matrix
        return matrix

    def _local_parts(
        self, info: MatrixInfo, mine: Sequence[Mine], array: Any, own: Mapping[int, tuple[int, Any]]
    ) -> LocalParts:
        """Return what this rank has of a matrix. Local."""
        rectangles = tuple((part.rows, part.cols) for part in (one.known.held.part for one in mine))
        location = info.parts[0].part.location
        arrays = tuple(one.given for one in mine)
        if info.dealt is not None:
            rectangles = (info.dealt.rectangles(info.layout.shape, self._group.size)[self._group.rank],)
            (top, bottom), (left, right) = rectangles[0]
            kept = [one for one in mine if one.array.shape == (bottom - top, right - left)]
            kept = [one for one in kept if one.known.dtype.numpy == info.dtype.numpy]
            arrays = tuple(one.given for one in kept)
            if kept:
                location = kept[0].known.held.part.location
            elif location == Location.host() and not info.in_parts and array is not None:
                arrays = (array[top:bottom, left:right],)
        elif mine:
            location = mine[0].known.held.part.location
        memory: Memory = "device" if location.space == "device" else "shared" if location.rank is None else "host"

        def empty(rows: int, cols: int) -> Any:
            return self._new_array(memory, (rows, cols), info.dtype, info.stored.order)

        return LocalParts(rectangles, arrays, own, memory, empty)


def _view_of(segment: Segment, stretch: Stretch, info: MatrixInfo) -> np.ndarray:
    """Return a matrix that lies in shared host memory as a whole."""
    flat = segment.array(np.uint8, segment.nbytes)[stretch.start :]
    item = info.dtype.itemsize
    return host_view(flat[: len(flat) // item * item].view(info.dtype.numpy), info.stored)


def _is_local(given: Any, matrix: Matrix) -> bool:
    """Return whether a caller gave what this rank has of a matrix; all that has no elements is alike."""
    local = matrix.local
    if matrix.layout is None:
        return len(given) == len(local) and all(one is other for one, other in zip(given, local, strict=True))
    return local is given or (0 in local.shape and not has_elements(given))
