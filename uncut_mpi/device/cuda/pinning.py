"""
Host memory that this process has page-locked: each range once, for all matrices and sessions that lie in it.

Copies of memory that is not page-locked, or in part only, keep the host thread that issues them until they are done. On
an H100 that took 0.2 s behind a kernel of 0.2 s. But the thread must never wait for the device. So memory that cannot
be page-locked as a whole is not used by any device, and what other matrices still use stays page-locked.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

from uncut_mpi.device.interface import Pin
from uncut_mpi.errors import PinError

_FLAGS = {Pin.WRITEABLE: 1 | 2, Pin.READABLE: 1 | 2 | 8}  # portable, mapped, read-only
_INVALID_VALUE, _ALREADY_REGISTERED = 1, 712
_UNREGISTERED = 0  # a type of memory


@dataclasses.dataclass(slots=True)
class _Range:
    """Registered memory, and how often each owner uses it."""

    start: int
    stop: int
    kind: Pin
    uses: dict[object, int]


class PinnedMemory:
    """
    The ranges of a process.

    Parameters
    ----------
    runtime : module
        cupy's runtime.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._ranges: list[_Range] = []
        self._mutex = threading.Lock()

    def pin(self, owner: object, address: int, nbytes: int) -> Pin:
        """
        Page-lock memory, or count one more use of memory that is.

        Parameters
        ----------
        owner : object
            Whose use it is, of one session: nothing of it is in flight.
        address, nbytes : int
            At least one byte.

        Raises
        ------
        PinError
            If it cannot be page-locked as a whole.
        """
        stop = address + nbytes
        with self._mutex:
            met = [one for one in self._ranges if one.start < stop and address < one.stop]
            for one in met:
                if one.start <= address and stop <= one.stop:
                    one.uses[owner] = one.uses.get(owner, 0) + 1
                    return one.kind
            if not met and self._is_known(address) and self._is_known(stop - 1):
                return Pin.FOREIGN
            if any({*one.uses} != {owner} for one in met):
                raise _in_part(address, nbytes, "another session uses")
            return self._extend(owner, address, stop, met)

    def unpin(self, owner: object, address: int) -> None:
        """Give one use of the memory at an address back; the last one ends the page-lock."""
        with self._mutex:
            for one in self._ranges:
                if one.start <= address < one.stop and owner in one.uses:
                    one.uses[owner] -= 1
                    if not one.uses[owner]:
                        self._end_use(one, owner)
                    return

    def unpin_all(self, owner: object) -> None:
        """Give back all that an owner uses."""
        with self._mutex:
            for one in [one for one in self._ranges if owner in one.uses]:
                self._end_use(one, owner)

    def _end_use(self, one: _Range, owner: object) -> None:
        del one.uses[owner]
        if not one.uses:
            self._ranges.remove(one)
            self._runtime.hostUnregister(one.start)

    def _extend(self, owner: object, address: int, stop: int, met: list[_Range]) -> Pin:
        """Register memory as one range with those that it overlaps, all of the same owner."""
        start, end = min([address, *(one.start for one in met)]), max([stop, *(one.stop for one in met)])
        for one in met:
            self._runtime.hostUnregister(one.start)
        kind = Pin.WRITEABLE
        status = self._register(start, end, kind)
        if status == _INVALID_VALUE and all(one.kind is Pin.READABLE for one in met):
            # What devices cannot write, as the pages of a file, they can read still.
            kind = Pin.READABLE
            status = self._register(start, end, kind)
        if status:
            lost = [one for one in met if self._register(one.start, one.stop, one.kind)]
            self._ranges = [one for one in self._ranges if one not in lost]
            if status == _ALREADY_REGISTERED or met:
                raise _in_part(address, stop - address, "the program or another matrix uses")
            raise PinError(
                f"CUDA cannot page-lock the {stop - address} bytes of host memory at {address:#x} (error {status}): "
                "use less host memory, or raise the limit of what is locked (ulimit -l)"
            )
        self._ranges = [one for one in self._ranges if one not in met]
        uses: dict[object, int] = {owner: 1 + sum(one.uses[owner] for one in met)}
        self._ranges.append(_Range(start, end, kind, uses))
        return kind

    def _register(self, start: int, stop: int, kind: Pin) -> int:
        """Register memory and return CUDA's status, 0 if it did."""
        try:
            self._runtime.hostRegister(start, stop - start, _FLAGS[kind])
        except self._runtime.CUDARuntimeError as error:
            return int(error.status)
        return 0

    def _is_known(self, address: int) -> bool:
        """Whether CUDA knows an address of host memory: as registered, allocated by it, or managed."""
        return bool(self._runtime.pointerGetAttributes(address).type != _UNREGISTERED)


pinned_memory = functools.cache(PinnedMemory)
"""The ranges of this process, which all its backends share."""


def _in_part(address: int, nbytes: int, whose: str) -> PinError:
    return PinError(
        f"of the {nbytes} bytes of host memory at {address:#x} {whose} a part that is page-locked already: "
        "register the whole first, or pass a copy (numpy.array(x))"
    )
