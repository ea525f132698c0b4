"""
Memory that several processes of one node share.

A segment is anonymous where it can be (``memfd_create``, which a small ``/dev/shm`` does not limit and which cannot
outlive its processes); peers open it through ``/proc/<pid>/fd``. Where that is refused it is an exclusive file in
``/dev/shm``, mode 0600, whose name goes as soon as every peer has opened it. Either way all of its pages are reserved
before it is used. So too little memory is a `CapacityError`, and never a bus error in the middle of a product.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import pathlib
import platform
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from uncut_mpi.errors import CapacityError, DeviceError, ParamError, TopologyError, UncutError, reason
from uncut_mpi.free_memory import OF_NODE, available_bytes
from uncut_mpi.mappings import object_name
from uncut_mpi.numa import interleaved
from uncut_mpi.units import bytes_text

ALIGNMENT: Final = 2 << 20
"""
Where segments begin (bytes): devices read rows that lie in two lines of 64 KiB more slowly, which is of use to
schedules only if all know where lines begin; and the system may use its large pages.
"""

_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux
_SHM = "/dev/shm"
_NAME = re.compile(rf"{_SHM}/uncut_mpi-[0-9]+-[0-9a-f]+")

# Memory left to the rest of the node when a segment is reserved: the kernel kills processes before
# it runs out to the last page.
_MARGIN_BYTES = 128 << 20
_TURN_TIMEOUT_S = 60.0


def node_identity() -> str:
    """
    Return a text that is equal for processes of one node, which can open each other's segments and device memory.

    All containers of a machine have its boot in common. Such memory is reached through the PID namespace: by the list
    of a process's files, and by CUDA. So a container with PIDs of its own is a node of its own.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def require_same_node(node: str, memory: str) -> None:
    """Raise TopologyError if this process cannot open some memory, since that is on another node (`node_identity`)."""
    if node != node_identity():
        raise TopologyError(
            f"{memory} is on another node than {platform.node()}, or in a container with PIDs of its own: only "
            "processes of one node can open it; split the communicator with comm.Split_type(MPI.COMM_TYPE_SHARED), or "
            "start all ranks of a machine in one container, or in several that share PIDs (docker run --pid=host "
            "--ipc=host)"
        )


class Segment:
    """
    Memory shared by processes of one node; made by `create`, mapped by peers with `open`.

    Not collective. Closing while arrays of it exist is safe. The handle and the name go at once. The pages stay mapped
    here until the last such array is dropped, because every array holds the mapping.

    Attributes
    ----------
    address : int
        Of its first byte in this process, a multiple of `ALIGNMENT` where there is address space for that, else of a
        page; valid also when `nbytes` is 0.
    nbytes : int
        Bytes asked for. Whole pages are mapped, at least one.
    handle : bytes
        By which peers on the same node open it, until `unlink` or `close` of the creator.
    memory : str
        What it is, the same in every process of the node, as `mappings.ground_of` names it.
    """

    def __init__(self, mapping: _Mapped, nbytes: int, handle: bytes, made: _MemoryObject | None = None) -> None:
        self._mapping: mmap.mmap | None = mapping.memory
        self._start = mapping.start
        self.nbytes = nbytes
        self.handle = handle
        parts = _unpack(handle)
        self.memory = object_name(parts.device, parts.inode)
        self.address = _address(mapping.memory) + mapping.start
        # Runs at close, when the object is collected, and at the latest at interpreter exit.
        self._withdraw = weakref.finalize(self, (made or _MemoryObject()).withdraw)

    @classmethod
    def create(cls, nbytes: int, purpose: str, *, use_file: bool = False, interleave: bool = False) -> Segment:
        """
        Reserve a new segment, filled with zeros.

        Parameters
        ----------
        nbytes : int
            Its size; 0 is allowed.
        purpose : str
            What it is for, as an error message calls it.
        use_file : bool, default False
            Use a file in ``/dev/shm`` even where anonymous memory can be had.
        interleave : bool, default False
            Spread its pages over the NUMA nodes, for memory that all devices read.

        Raises
        ------
        CapacityError
            If the node, the container or ``/dev/shm`` has too little memory left; nothing is kept.
        DeviceError
            If the system refuses for another reason.
        """
        if nbytes < 0:
            raise ParamError(f"{purpose} of {nbytes} bytes: a size cannot be negative")
        mapped = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        made = _MemoryObject()
        try:
            descriptor = made.make(purpose, use_file=use_file)
            with _turn(made):
                _check_room(mapped, purpose, bool(made.path))
                with interleaved() if interleave else contextlib.nullcontext():
                    _reserve(descriptor, mapped, purpose, bool(made.path))
            mapping = _map(descriptor, mapped, purpose)
            status = os.fstat(descriptor)
            of_process = node_identity(), os.getpid(), descriptor
            parts = _HandleParts(*of_process, status.st_dev, status.st_ino, nbytes, mapped, made.path)
            return cls(mapping, nbytes, json.dumps(parts).encode(), made)
        except BaseException:
            made.withdraw()
            raise

    @classmethod
    def open(cls, handle: bytes) -> Segment:
        """
        Map a segment that another process of this node created.

        Raises
        ------
        TopologyError
            If the creator is on another node (`node_identity`), is gone, or has withdrawn the segment. Also if the
            system does not let this process look at it.
        CapacityError
            If the address space of this process is too small.
        """
        parts = _unpack(handle)
        require_same_node(parts.node, f"the shared memory of process {parts.pid}")
        path = parts.path or f"/proc/{parts.pid}/fd/{parts.descriptor}"
        try:
            file = _OpenFile(os.open, path, os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if parts.path else 0))
        except OSError as error:
            raise _refused(parts, path, error) from error
        try:
            status = os.fstat(file.descriptor)
            if (status.st_dev, status.st_ino, status.st_size) != (parts.device, parts.inode, parts.mapped):
                # The creator has ended and its process or file number serves something else now.
                raise TopologyError(
                    f"{path} is no longer the shared memory that process {parts.pid} created: that process has "
                    "ended or withdrawn it; keep it open until every peer has mapped it"
                )
            mapping = _map(file.descriptor, parts.mapped, "shared memory of a peer")
        finally:
            file.close()
        return cls(mapping, parts.nbytes, handle)

    def array(
        self, dtype: Any = np.uint8, shape: int | tuple[int, ...] | None = None, offset_bytes: int = 0
    ) -> np.ndarray[Any, Any]:
        """
        Return a C-ordered array whose memory is this segment.

        Parameters
        ----------
        dtype : numpy dtype
            Type of its elements.
        shape : int or tuple of int, optional
            By default as many elements as fit.
        offset_bytes : int, default 0
            Where it starts.

        Raises
        ------
        ParamError
            If the segment is closed or the array does not lie inside it.
        """
        if self._mapping is None:
            raise ParamError("the shared memory is closed: no new array can be made of it")
        kind = np.dtype(dtype)
        if shape is None:
            shape = max(0, self.nbytes - offset_bytes) // kind.itemsize
        extent = (shape,) if isinstance(shape, int) else tuple(shape)
        count = int(np.prod(extent, dtype=np.int64))
        if not 0 <= offset_bytes <= self.nbytes - count * kind.itemsize:
            raise ParamError(
                f"an array of {extent} {kind} at byte {offset_bytes} does not lie within the {self.nbytes} bytes of "
                "shared memory"
            )
        return np.frombuffer(self._mapping, kind, count, self._start + offset_bytes).reshape(extent)

    def unlink(self) -> None:
        """Withdraw the handle, once every peer has opened it; the memory stays mapped. A second call does nothing."""
        self._withdraw()

    def close(self) -> None:
        """Withdraw the handle and unmap, now or when the last array of it is dropped. A second call does nothing."""
        self._withdraw()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # While arrays exist the mapping refuses; they keep it, and it goes with the last of them.
            with contextlib.suppress(BufferError):
                mapping.close()


# -- making --------------------------------------------------------------------------------------


class _OpenFile:
    """
    An open file, closed with the last reference at the latest: an interrupt may come before any other line.

    Parameters
    ----------
    opening : callable
        Returns its descriptor from the arguments.
    """

    def __init__(self, opening: Callable[..., int], *arguments: object) -> None:
        self._held: list[int] = []
        # Opening and keeping are one step of the interpreter, as are taking and closing: no interrupt comes between.
        self._close = weakref.finalize(self, collections.deque, map(os.close, self._held), 0)
        self._held.extend(map(opening, *([one] for one in arguments)))

    @property
    def descriptor(self) -> int:
        """By which it is open."""
        return self._held[0]

    def close(self) -> None:
        """Close it. A second call does nothing."""
        self._close()


class _MemoryObject:
    """
    The memory object of a segment in the process that made it; at first there is none.

    Attributes
    ----------
    file : _OpenFile or None
        By which it is open.
    path : str
        Of a file in ``/dev/shm``; empty for anonymous memory.
    lock : _OpenFile or None
        What keeps other processes from reserving memory meanwhile.
    """

    def __init__(self) -> None:
        self.file: _OpenFile | None = None
        self.lock: _OpenFile | None = None
        self.path = ""
        self._creator = os.getpid()

    def make(self, purpose: str, *, use_file: bool) -> int:
        """Make it, empty, and return its descriptor."""
        if not use_file:
            try:
                self.file = _OpenFile(os.memfd_create, "uncut_mpi", os.MFD_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                    raise _failed(error, f"{purpose}: memfd_create") from error
            else:
                os.fchmod(self.file.descriptor, 0o600)
                return self.file.descriptor
        self.path = f"{_SHM}/uncut_mpi-{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.file = _OpenFile(os.open, self.path, flags, 0o600)
        except OSError as error:
            mend = f": the node must allow memfd_create or a writable {_SHM}"
            raise _failed(error, f"{purpose}: creating {self.path}", mend) from error
        return self.file.descriptor

    def withdraw(self) -> None:
        """Take its name away and close it, and the lock too. A second call does nothing."""
        if os.getpid() != self._creator:
            return  # a forked child inherits the object, not the duty
        if self.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            self.path = ""
        for file in (self.file, self.lock):
            if file is not None:
                file.close()


@contextlib.contextmanager
def _turn(made: _MemoryObject) -> Iterator[None]:
    """
    Let the processes of a node reserve one after the other.

    Ranks that ask at the same moment would each find the same memory free, and together take more
    than there is. Advisory: where no lock can be had in time, the check is only less exact.
    """
    try:
        with contextlib.suppress(OSError):
            made.lock = _OpenFile(os.open, _SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        deadline, sleep_s = time.monotonic() + _TURN_TIMEOUT_S, 5e-5  # ranks ask together, mostly for little
        while made.lock is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(made.lock.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(sleep_s)
                sleep_s = min(2 * sleep_s, 2e-3)
            except OSError:
                break
        yield
    finally:
        if made.lock is not None:
            made.lock.close()


def _failed(error: OSError, doing: str, mend: str = "") -> UncutError:
    """Return what to raise where the system refuses: of a limit of this process which one."""
    for number, limit in ((errno.EFBIG, "file sizes (ulimit -f)"), (errno.EMFILE, "open files (ulimit -n)")):
        if error.errno == number:
            return CapacityError(f"{doing} failed ({reason(error)}): raise the limit of {limit}")
    return DeviceError(f"{doing} failed ({reason(error)}){mend}")


def _check_room(nbytes: int, purpose: str, in_shm: bool) -> None:
    available, limit = available_bytes()
    usable = available - min(_MARGIN_BYTES, available // 16)
    if nbytes > usable:
        more = "free some of it" if limit == OF_NODE else "raise the limit (docker run --memory=SIZE)"
        raise CapacityError(
            f"{purpose} needs {bytes_text(nbytes)} of shared memory; {bytes_text(max(0, usable))} are available "
            f"({limit}): use smaller matrices, or {more}"
        )
    if in_shm and nbytes > _shm_room():
        raise _shm_too_small(nbytes, purpose)


def _shm_room() -> int:
    file_system = os.statvfs(_SHM)
    return file_system.f_bavail * file_system.f_frsize


def _shm_too_small(nbytes: int, purpose: str) -> CapacityError:
    return CapacityError(
        f"{purpose} needs {bytes_text(nbytes)} of shared memory; {_SHM} has {bytes_text(_shm_room())} left: "
        "enlarge it (docker run --shm-size=SIZE or --ipc=host; mount -o remount,size=SIZE /dev/shm)"
    )


def _reserve(descriptor: int, nbytes: int, purpose: str, in_shm: bool) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise _failed(error, f"{purpose}: reserving {bytes_text(nbytes)}") from error
        if in_shm:
            raise _shm_too_small(nbytes, purpose) from error
        available, limit = available_bytes()
        raise CapacityError(
            f"{purpose} needs {bytes_text(nbytes)} of shared memory; the system refused, with "
            f"{bytes_text(available)} available ({limit}): use smaller matrices or fewer ranks"
        ) from error


class _Mapped(NamedTuple):
    """A mapped object: its bytes begin at `start` of the memory, which ends with it or behind it."""

    memory: mmap.mmap
    start: int


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


def _map(descriptor: int, nbytes: int, purpose: str) -> _Mapped:
    try:
        return _map_aligned(descriptor, nbytes) or _Mapped(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, _ACCESS), 0)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise _failed(error, f"{purpose}: mapping {bytes_text(nbytes)}") from error
        raise CapacityError(
            f"{purpose} needs {bytes_text(nbytes)} of address space, and the system refused: "
            "raise the limit (ulimit -v)"
        ) from error


def _map_aligned(descriptor: int, nbytes: int) -> _Mapped | None:
    """
    Map at a multiple of `ALIGNMENT`, or return None where that cannot be had.

    The system aligns to pages alone. So more is mapped, private and never touched, and the object put over a part of
    it; it goes as a whole when the memory is closed.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, nbytes + ALIGNMENT, flags, _ACCESS)
    except OSError:
        return None
    begin = _address(memory)
    start = -begin % ALIGNMENT
    system = ctypes.CDLL(None).mmap
    system.restype = ctypes.c_void_p
    system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    if system(begin + start, nbytes, _ACCESS, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != begin + start:
        memory.close()
        return None
    return _Mapped(memory, start)


# -- opening -------------------------------------------------------------------------------------


class _HandleParts(NamedTuple):
    """What a handle says: of the creator's process, of the memory object, and of its sizes."""

    node: str
    pid: int
    descriptor: int
    device: int
    inode: int
    nbytes: int
    mapped: int
    path: str


def _unpack(handle: bytes) -> _HandleParts:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        parts = _HandleParts(*json.loads(handle))
        *numbers, path = parts[1:]
        plain = [type(one) for one in parts] == [str, *[int] * len(numbers), str] and min(numbers) >= 0
        # No other file is opened, whatever a handle says.
        if plain and parts.nbytes <= parts.mapped and (not path or _NAME.fullmatch(path)):
            return parts
    raise ParamError(f"{len(handle)} bytes that are no handle of shared memory: pass Segment.handle unchanged")


def _refused(parts: _HandleParts, path: str, error: OSError) -> TopologyError:
    if error.errno in (errno.EACCES, errno.EPERM):
        return TopologyError(
            f"the system does not let this process open {path}: run all ranks as one user, in one container"
        )
    where = f"its {_SHM} is not ours" if parts.path else "it has ended"
    return TopologyError(
        f"{path}, shared memory of process {parts.pid}, cannot be opened ({reason(error)}): {where}, or it has "
        "withdrawn the memory; start all ranks in one container and keep it until every peer has mapped it"
    )
