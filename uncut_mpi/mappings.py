"""
What lies behind an address of this process: which memory it is, so that all ranks can tell whether two are the same.

The system lists the mappings of a process in ``/proc/self/maps``. Bytes of a mapped object (a file, a memfd, a segment
of System V, shared anonymous memory) are the same wherever object and offset are. All else belongs to one process, and
its address there names it. CUDA gives host and device memory of a process one space of addresses.
"""

from __future__ import annotations

import bisect
import ctypes
import dataclasses
import errno
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_NO_OBJECT = ("anon_inode:", "/dev/nvidia")  # one inode for all that they map
_SYSTEM_V = "/SYSV"


class MappedArea(NamedTuple):
    """One line of ``/proc/self/maps``: addresses from `start` to before `stop`, from `offset` of an object."""

    start: int
    stop: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str

    @property
    def shared(self) -> bool:
        """Whether what is written reaches the object."""
        return self.permissions[3:4] == "s"


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A run of bytes in terms that all ranks share."""

    memory: str  # names what they lie in: a mapped object of the node, or one process
    start: int  # where they begin: offset in the object, or address in the process
    nbytes: int  # how many there are
    offset: int = 0  # bytes before them in the extent that they are some of
    # Whether writing the extent changes them. Not so for a file behind a private mapping, which is read only.
    written: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """What an extent of this process's addresses stands on."""

    stretches: tuple[Stretch, ...]  # what it consists of
    writeable: bool = True  # whether the system lets this process write to all of it
    trouble: str = ""  # why reading all of it would end this process; empty if it would not


def object_name(device: int, inode: int) -> str:
    """Return the name, as in `Stretch`, of what ``os.fstat`` says has this device and inode."""
    return _name(f"{os.major(device):02x}:{os.minor(device):02x}", inode)


def ground_of(address: int, nbytes: int, process: str, *, on_host: bool = True) -> Ground:
    """
    Return what an extent stands on. Where ``/proc`` cannot be read it is told by process and address alone.

    Parameters
    ----------
    address, nbytes : int
        Where it begins, and its size.
    process : str
        Names this process among those that compare.
    on_host : bool, default True
        False for memory of a device, of whose pages the list says nothing.
    """
    whole = Stretch(process, address, nbytes)
    if not nbytes:
        return Ground((whole,))
    try:
        with open("/proc/self/maps", "rb") as lines:
            mappings = covering(lines, address, address + nbytes)
    except OSError:
        return Ground((whole,))
    stretches = stretches_of(mappings, address, nbytes, process)
    if not on_host:
        return Ground(stretches)
    return Ground(
        stretches, all(mapping.permissions[1:2] == "w" for mapping in mappings), _trouble(mappings, address, nbytes)
    )


def covering(lines: Iterable[bytes], start: int, stop: int) -> list[MappedArea]:
    """
    Return the mappings that hold an address from `start` to before `stop`, in order.

    Parameters
    ----------
    lines : iterable of bytes
        Of ``/proc/self/maps``, sorted. None is asked for behind `stop`: new arrays come early, libraries last.
    """
    below = list(itertools.takewhile(lambda line: int(line[: line.index(b"-")], 16) < stop, lines))
    first = bisect.bisect_right(below, start, key=lambda line: _parse(line).stop)  # few of thousands are looked at
    return [_parse(line) for line in below[first:]]


def stretches_of(mappings: Sequence[MappedArea], address: int, nbytes: int, process: str) -> tuple[Stretch, ...]:
    """Return what an extent consists of, by the mappings that cover it: objects, and what belongs to the process."""
    stretches: list[Stretch] = []
    private: list[Stretch] = []
    for start, stop, mapping in _runs(mappings, address, address + nbytes):
        has_object = mapping is not None and mapping.inode != 0 and not _is_device(mapping.path)
        if mapping is None or not has_object or not mapping.shared:
            _append(private, Stretch(process, start, stop - start, start - address))
        if mapping is not None and has_object:
            name = _name(mapping.device, mapping.inode, mapping.path)
            inside = mapping.offset + start - mapping.start
            _append(stretches, Stretch(name, inside, stop - start, start - address, mapping.shared))
    return (*private, *stretches)


def _runs(mappings: Sequence[MappedArea], start: int, stop: int) -> Iterator[tuple[int, int, MappedArea | None]]:
    """Yield (from, to, mapping) for every part of an extent; None where nothing is mapped, as in a device's memory."""
    for mapping in mappings:
        if start < mapping.start:
            yield start, mapping.start, None
        start, end = max(start, mapping.start), min(stop, mapping.stop)
        yield start, end, mapping
        start = end
    if start < stop:
        yield start, stop, None


def _append(stretches: list[Stretch], stretch: Stretch) -> None:
    """Append a stretch, or make the last one longer where it goes on there."""
    last = stretches[-1] if stretches else None
    if (
        last is not None
        and (last.memory, last.written) == (stretch.memory, stretch.written)
        and (last.start + last.nbytes, last.offset + last.nbytes) == (stretch.start, stretch.offset)
    ):
        stretches[-1] = dataclasses.replace(last, nbytes=last.nbytes + stretch.nbytes)
    else:
        stretches.append(stretch)


def _parse(line: bytes) -> MappedArea:
    fields = line.rstrip(b"\n").split(maxsplit=5)
    start, stop = fields[0].split(b"-")
    path = fields[5].decode(errors="surrogateescape") if len(fields) > 5 else ""
    permissions, device = fields[1].decode(), fields[3].decode()
    return MappedArea(int(start, 16), int(stop, 16), permissions, int(fields[2], 16), device, int(fields[4]), path)


def _name(device: str, inode: int, path: str = "") -> str:
    # The inode of System V memory is its identifier, which may be that of a memfd on the same device.
    return f"{device} {inode}{' of System V' if path.startswith(_SYSTEM_V) else ''}"


def _is_device(path: str) -> bool:
    """Return whether a path is a device's, whose inode says nothing of what it maps."""
    if path.startswith(_NO_OBJECT):
        return True
    if not path.startswith("/dev/"):
        return False
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:  # "/dev/zero (deleted)", say, which is shared anonymous memory
        return False


def _trouble(mappings: Sequence[MappedArea], address: int, nbytes: int) -> str:
    for start, stop, mapping in _runs(mappings, address, address + nbytes):
        if mapping is None or mapping.permissions[:1] != "r":
            return f"nothing that can be read is mapped at {start:#x}"
        if mapping.inode and not _is_device(mapping.path) and not _can_be_read(stop - 1):
            return f"it goes beyond the end of {mapping.path}, which has become shorter since it was mapped"
    return ""


def _can_be_read(address: int) -> bool:
    """Have the system read one byte: where this process would get a bus error, the system says EFAULT."""
    source, sink = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.write(sink, ctypes.c_char.from_address(address))
    except OSError as error:
        return error.errno != errno.EFAULT
    finally:
        os.close(source)
        os.close(sink)
    return True
