"""
What a rank holds for matrices while these live: callers' arrays, segments that all ranks map, lines of files.

What callers pass becomes an array of numpy or of the device over the same memory (`take`), or an error with the mend.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.dealing import GivenArray
from uncut_mpi.api.matrix import HeldPart, Matrix, MatrixInfo
from uncut_mpi.api.matrix_files import MatrixFile
from uncut_mpi.api.stored import extent_bytes, stack_of, stored_of
from uncut_mpi.device import exported
from uncut_mpi.device.files import FileWindow
from uncut_mpi.device.interface import Backend, Pin
from uncut_mpi.device.views import matrix_at
from uncut_mpi.errors import DataFileError, ParamError, PinError, agreed, reason
from uncut_mpi.instead import BATCH
from uncut_mpi.mappings import Stretch, ground_of, object_name
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import lines_of
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import Part, Rectangle
from uncut_mpi.regular import open_regular
from uncut_mpi.segments import Segment
from uncut_mpi.spmd.group import Group
from uncut_mpi.unfinished import Discardable


class Lent(np.ndarray[Any, Any]):
    """
    An array of a caller who may free it after any call, and get other memory at the same address.

    It is never page-locked: devices would go on to see the memory that was there.
    """


# Subclasses of numpy's array that mean what lies in their buffer.
_PLAIN = (np.ndarray, np.memmap, np.matrix, Lent)
_LENT = "its owner may free it after any call"


@dataclasses.dataclass(frozen=True, slots=True)
class TakenArray:
    """A caller's array."""

    array: Any  # over the caller's memory, which it keeps alive
    on_device: bool  # whether it lies on this rank's device
    writeable: bool = True  # whether it may be written


def take(given: Any, backend: Backend) -> TakenArray:
    """
    Return what a caller registers as an array, without a copy. Local.

    Raise ParamError if it is no array, lies on another device, or means something else than what lies in its memory.
    """
    if isinstance(given, np.ndarray):
        array = _plain(given)
    elif backend.owns(given):
        return TakenArray(given, True)
    elif isinstance(given, Matrix | Batch):
        kind = "matrix" if isinstance(given, Matrix) else "batch"
        raise ParamError(f"{given} was given as an array: it is a {kind} of a session already, use it as it is")
    elif shows(given, "__dlpack__"):
        if exported.place_of(given)[0] != exported.HOST:
            array, writeable = backend.wrap(given)
            return TakenArray(array, True, writeable)
        with exported.translated(given):
            array = exported.from_dlpack(given).as_numpy()
    elif shows(given, "__cuda_array_interface__"):
        array, writeable = backend.wrap(given)
        return TakenArray(array, True, writeable)
    elif shows(given, "__array_interface__") and not isinstance(given, np.generic):
        array = exported.from_array_interface(given)
    else:
        raise ParamError(f"{'None' if given is None else type_text(given)} was given: {_mend(given)}")
    return TakenArray(array, backend.owns(array), array.flags.writeable)


def element_type(array: Any, kind: DType | None) -> DType:
    """
    Return the type in which the products of an array are computed: `kind` if given, else its own.

    Raise ParamError if that is none of the types there are, or `kind` is another in memory.
    """
    if not array.dtype.isnative:
        raise ParamError(
            f"an array of dtype {array.dtype} was given, which is of the other byte order: "
            "pass x.astype(x.dtype.newbyteorder('='))"
        )
    if kind is not None and kind.needs_scales and array.dtype == np.uint8:  # as which arrays are that know no float8
        return kind
    found = DType.parse(array.dtype)
    if kind is None:
        return found
    if found.numpy != kind.numpy:
        raise ParamError(f"an array of {found.name} was given as {kind.name}, which is {kind.numpy} in memory")
    return kind


def _plain(given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of numpy's own types, or raise for one that means more than what lies in its buffer."""
    if isinstance(given, np.ma.MaskedArray):
        hidden = int(np.count_nonzero(np.ma.getmaskarray(given)))
        if hidden:
            raise ParamError(
                f"an array with {hidden} masked element{'s' if hidden > 1 else ''} was given, which a product "
                "would take for values: pass x.filled(value)"
            )
        given = np.ma.getdata(given)
    if type(given) not in _PLAIN:
        raise ParamError(
            f"{type_text(given)} was given, a kind of numpy array that may mean more than what lies in its "
            "memory: pass numpy.asarray(x)"
        )
    return given


def is_array(given: Any) -> bool:
    """Return whether what a caller gave shows its memory, as arrays and tensors do, or fails when it is to."""
    protocols = "__dlpack__", "__cuda_array_interface__", "__array_interface__"
    return not isinstance(given, np.generic) and any(shows(given, protocol) for protocol in protocols)


def is_batch(given: Any) -> bool:
    """Return whether a caller gave a list of arrays, or of matrices."""
    return isinstance(given, list | tuple) and len(given) > 0 and (isinstance(given[0], Matrix) or is_array(given[0]))


def has_elements(given: Any) -> bool:
    """Return whether what a caller gave as an array is none that is empty."""
    try:
        return 0 not in given.shape
    except Exception:  # it is no array, which is told where it is taken
        return True


def shows(given: Any, protocol: str) -> bool:
    """Return whether what a caller gave has an attribute, or fails when it is asked for that."""
    try:
        return hasattr(given, protocol)
    except Exception:  # of a property that fails: it is there, and is asked again where its error is told
        return True


def _mend(given: Any) -> str:
    if is_batch(given):
        return BATCH
    if given is None:
        return "the rank that has the array passes it, the others may pass None"
    if hasattr(type(given), "toarray"):
        return "pass x.toarray(), a dense array"
    return "pass numpy.asarray(x), or another array that shows its memory (a tensor)"


Start = tuple[int, int]
"""First row and column of a part."""


@dataclasses.dataclass(slots=True)
class Grip:
    """Memory that this rank holds for a matrix: a caller's array, or a segment that all ranks map."""

    address: int
    keep: Any = None
    segment: Segment | None = None
    pinned: bool = False
    window: FileWindow | None = None


class Mine(NamedTuple):
    """An array that this rank gives: as its caller has it, as numpy or the device has it, and what is held of it."""

    given: Any
    array: Any
    known: GivenArray
    grip: Grip
    batch: Any = None  # of three dimensions, as its caller has it; `given` and `array` are the matrix that it is


@dataclasses.dataclass(slots=True)
class Held:
    """What this rank holds for one matrix until it is released on all ranks."""

    info: MatrixInfo
    addresses: list[int]  # of each part in this process; 0 where it is not mapped
    grips: list[Grip]
    opened: list[bytes] = dataclasses.field(default_factory=list)  # handles of peers' parts
    unfinished: bool = False  # a file that has no name yet
    written: bool = False  # whether a call has written it to its end
    failed: list[Rectangle] = dataclasses.field(default_factory=list)  # what calls were to write and did not
    unwritten: list[Rectangle] = dataclasses.field(default_factory=list)  # of such a file, what no call has written
    output: Discardable | None = None  # of such a file; rank 0 makes it, others help
    lost: bool = False  # a file that could not be completed and is gone


class Grips:
    """Takes hold of memory, and lets go of it, by what the store holds for all matrices. Not collective."""

    def __init__(self, group: Group, backend: Backend, held: Mapping[int, Held]) -> None:
        self._rank, self._size, self._backend, self._held = group.rank, group.size, backend, held

    def _every(self) -> Iterator[Grip]:
        return (grip for held in self._held.values() for grip in held.grips)

    def lines_of_file(self, file: MatrixFile, holders: Sequence[int], name: str, *, writeable: bool) -> Iterator[Mine]:
        """
        Yield this rank's lines of a matrix file as an array; none if it has none. Local.

        Parameters
        ----------
        holders : sequence of int
            The ranks that have lines.
        name : str
            What all ranks call the file, as in `Stretch`; empty: as this rank sees it.
        """
        if self._rank not in holders:
            return
        share = lines_of(file.num_lines, holders.index(self._rank), len(holders))
        rows, cols = ((0, file.rows), (0, file.cols))
        length, item = (file.rows if file.order == "F" else file.cols), file.dtype.itemsize
        if not length or share.start == share.stop:
            return
        if file.order == "F":
            cols = share.start, share.stop
        else:
            rows = share.start, share.stop
        try:
            descriptor = open_regular(file.open_path or file.path, os.O_RDWR if writeable else os.O_RDONLY)
        except OSError as error:
            how = "read and written" if writeable else "read"
            raise DataFileError(f"{file.path} cannot be {how}: {reason(error)}") from None
        try:
            status = os.fstat(descriptor)
            first = file.offset_bytes + share.start * length * item
            nbytes = (share.stop - share.start) * length * item
            if status.st_size < first + nbytes:
                raise DataFileError(f"{file.path} changed while it was opened: it has become shorter")
            window = self._backend.files.open(file.path, descriptor, status.st_size)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise DataFileError(f"{file.path} cannot be opened: {reason(error)}") from None
            raise
        address = window.address + first
        lines = matrix_at(address, length, share.stop - share.start, length, file.dtype.numpy)
        array = lines if file.order == "F" else lines.T
        stretches = (Stretch(name or object_name(status.st_dev, status.st_ino), first, nbytes),)
        part = Part(rows, cols, Location.host(self._rank), file.order, length)
        held = HeldPart(part, self._rank, stretches, None, 0, f"it lies in the file {file.path}", True)
        yield Mine(None, array, GivenArray(held, file.dtype, writeable), Grip(address, window=window))

    def of_arrays(
        self, given: Iterable[tuple[Any, Start]], kind: DType | None, *, batches: bool = False
    ) -> Iterator[Mine]:
        """Yield callers' arrays, also of three dimensions, as `of_array` has each. Local."""
        for array, start in given:
            yield self.of_array(array, start, kind, batches=batches)

    def of_array(self, given: Any, start: Start, kind: DType | None, *, batches: bool = False) -> Mine:
        """Return a caller's array with what ranks are told of it and what is held of it. Local."""
        taken, library = take(given, self._backend), exported.library_of(type(given))
        array, stack, batch = taken.array, None, None
        if batches and array.ndim == 3:
            stack, strides = stack_of(array.shape, array.strides, array.dtype.itemsize)
            batch, given = given, self._backend.strided(array, stack.whole, strides)
            array = given
        stored = stored_of(array.shape, array.strides, array.dtype.itemsize)
        dtype = element_type(array, kind if array.size or array.dtype == np.uint8 else None)
        nbytes = extent_bytes(stored, dtype)
        rank = self._rank
        rows, cols = (start[0], start[0] + stored.rows), (start[1], start[1] + stored.cols)

        def made(grip: Grip, location: Location, those: tuple[Stretch, ...], writeable: bool, *about: Any) -> Mine:
            part = Part(rows, cols, location, stored.order, stored.ld)
            known = GivenArray(HeldPart(part, rank, those, *about), dtype, writeable, stack, library)
            return Mine(given, array, known, grip, batch)

        if taken.on_device:
            adopted = self._backend.adopt(array)
            ground = ground_of(adopted.address, nbytes, f"rank {rank}", on_host=False)
            _check_alignment(adopted.address, nbytes, dtype)
            about = adopted.handle, adopted.offset_bytes, adopted.obstacle
            grip = Grip(adopted.address, keep=adopted.keep)
            return made(grip, Location.device(rank), ground.stretches, taken.writeable, *about)
        address = array.__array_interface__["data"][0]
        _check_alignment(address, nbytes, dtype)
        for other in self._every():
            segment = other.segment
            if segment is not None and segment.address <= address < segment.address + max(1, segment.nbytes):
                stretch = Stretch(segment.memory, address - segment.address, nbytes)
                return made(Grip(address, array, segment), Location.host(), (stretch,), taken.writeable)
        ground = ground_of(address, nbytes, f"rank {rank}")
        if ground.trouble:
            raise ParamError(f"the array cannot be read: {ground.trouble}")
        # Last, since it is to be undone; and here, since what devices may write depends on it.
        pin, obstacle = Pin.FOREIGN, ""
        try:
            if isinstance(array, Lent):
                obstacle = "" if self._backend.takes_host_memory else _LENT
            elif nbytes:
                pin = self._backend.pin(address, nbytes)
        except PinError as error:
            obstacle = str(error)
        writeable = taken.writeable and ground.writeable and pin is not Pin.READABLE
        grip = Grip(address, keep=array, pinned=bool(pin))
        return made(grip, Location.host(rank), ground.stretches, writeable, None, 0, obstacle)

    def segment(self, memory: str, grips: Sequence[Grip]) -> Segment:
        """Return the segment that stretches call `memory`; the matrix it was made for may be gone already."""
        for grip in (*grips, *self._every()):
            if grip.segment is not None and grip.segment.memory == memory:
                return grip.segment
        raise agreed(ParamError(f"no matrix of this session lies in {memory} any more"))

    def let_go(self, grips: list[Grip]) -> None:
        """Unpin and unmap host memory, unless another matrix lies in it: then that one is to do so."""
        for grip in grips:
            segment = grip.segment
            heir = next((one for one in self._every() if segment is not None and one.segment is segment), None)
            if heir is not None:
                heir.pinned |= grip.pinned
                continue
            if grip.window is not None:
                self._backend.files.close(grip.window)
            if grip.pinned:
                self._backend.unpin(segment.address if segment is not None else grip.address)
            if segment is not None:
                segment.close()


def _check_alignment(address: int, nbytes: int, dtype: DType) -> None:
    if nbytes and address % dtype.itemsize:
        raise ParamError(
            f"the array begins at address {address:#x}, which is no multiple of {dtype.itemsize}, the bytes of its "
            f"elements ({dtype.name}): pass a copy (x.copy())"
        )
