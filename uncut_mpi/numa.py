"""
Memory spread over the NUMA nodes of a machine.

Host memory that every device reads should not lie on one node's memory channels. The kernel takes
pages by the policy of the thread that reserves them, so the policy is set around the reservation.
All of it is best effort: where the system has one node or refuses, memory lies where it would.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Final

# Numbers of the system calls on x86-64, the only platform of this package.
_SET_MEMPOLICY, _GET_MEMPOLICY = 238, 239
_DEFAULT, _INTERLEAVE = 0, 3
_MASK_WORDS: Final = 16
_WORD_BITS: Final = 64

_NODES = "/sys/devices/system/node/has_memory"
_STATUS = "/proc/self/status"


def memory_nodes() -> list[int]:
    """Return the nodes with memory that this process may use; empty where the system does not say."""
    try:
        found = kernel_list(pathlib.Path(_NODES).read_text())
        for line in pathlib.Path(_STATUS).read_text().splitlines():
            if line.startswith("Mems_allowed_list:"):
                found &= kernel_list(line.partition(":")[2])
    except (OSError, ValueError):
        return []
    return sorted(found)


@contextlib.contextmanager
def interleaved() -> Iterator[bool]:
    """
    Spread the pages that this thread reserves within the block over the nodes of `memory_nodes`.

    A policy that the user has set (``numactl``) stands.

    Yields
    ------
    bool
        Whether pages are spread.
    """
    chosen = memory_nodes()
    # More nodes than the mask holds are not spread over at all, rather than over some.
    fits = len(chosen) > 1 and max(chosen) < _MASK_WORDS * _WORD_BITS and platform.machine() == "x86_64"
    spread = False
    try:
        spread = fits and _policy() == _DEFAULT and _set_policy(_INTERLEAVE, chosen)
        yield spread
    finally:
        if spread:
            _set_policy(_DEFAULT, [])


def kernel_list(text: str) -> set[int]:
    """Return the numbers of a kernel list, as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _policy() -> int:
    """Return the memory policy of this thread; -1 where the system does not tell."""
    mode = ctypes.c_int(-1)
    refused = _syscall(_GET_MEMPOLICY, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return -1 if refused else mode.value


def _set_policy(mode: int, nodes: Sequence[int]) -> bool:
    if not nodes:
        return not _syscall(_SET_MEMPOLICY, ctypes.c_int(mode), None, ctypes.c_ulong(0))
    mask = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    # The kernel reads one bit less than it is told.
    return not _syscall(_SET_MEMPOLICY, ctypes.c_int(mode), mask, ctypes.c_ulong(_MASK_WORDS * _WORD_BITS + 1))


def _syscall(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), *arguments))
