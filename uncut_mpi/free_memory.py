"""How much memory is left to this process: on its node, and in the control groups that enclose it."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from typing import Final

OF_NODE: Final = "MemAvailable of the node"
USUAL_HOST_FRACTION: Final = 0.5
"""What ranks take of free host memory where nobody says: the program's matrices and the system need some, too."""

_NO_LIMIT: Final = 1 << 62  # of control groups, version 1: all bits but the last ones


def available_bytes() -> tuple[int, str]:
    """
    Return how much memory this process may still take, and what sets that limit.

    Returns
    -------
    nbytes : int
        The least of the kernel's estimate (``MemAvailable``) and what every enclosing control group
        leaves, page cache counted as free.
    limit : str
        Name of the one that is least.
    """
    of_node = _NO_LIMIT, "no known limit"
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in _read("/proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                of_node = int(line.split()[1]) * 1024, OF_NODE
    return min([of_node, *_cgroup_limits(of_node[0])])


def usual_room(free_bytes: int) -> int:
    """Return what a rank may take of so many bytes of host memory: a power of two, so that plans stay the same."""
    return 1 << max(0, int(USUAL_HOST_FRACTION * free_bytes).bit_length() - 1)


def _cgroup_limits(
    enough: int, root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup"
) -> Iterator[tuple[int, str]]:
    """Yield (bytes left, name) of control groups of either version that enclose us and may leave less than that."""
    try:
        text = _read(membership)
    except OSError:
        return
    for directory, names, said in _groups(text, root):
        left = _cgroup_room(directory, *names, enough)
        if left is not None:
            yield left, said


@functools.lru_cache(maxsize=4)
def _groups(membership: str, root: str) -> list[tuple[str, tuple[str, str], str]]:
    """Return directory, names of the limit and of what is taken, and what messages call it, of each that may be."""
    groups = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases, names = [root, f"{root}/unified"], ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            bases, names = [f"{root}/memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for base in bases:
            # In a container the path may be that of the host, of which only the root is mounted.
            inner = pathlib.PurePosixPath(path.lstrip("/"))
            for group in dict.fromkeys([inner, *inner.parents, pathlib.PurePosixPath(".")]):
                said = f"memory limit of control group /{'' if str(group) == '.' else group}"
                groups.append((str(pathlib.PurePosixPath(base) / group), names, said))
    return groups


def _read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:  # each first call reads some of them
        return file.read().decode()


def _cgroup_room(directory: str, limit_name: str, usage_name: str, enough: int) -> int | None:
    # Each reading takes the system 10 to 300 µs, and one is made for each segment.
    try:
        limit = int(_read(f"{directory}/{limit_name}"))  # "max" is no number: no limit
        if limit >= _NO_LIMIT:
            return None
        usage = int(_read(f"{directory}/{usage_name}"))
        if limit - usage >= enough:
            return None
        cache = 0
        for line in _read(f"{directory}/memory.stat").splitlines():
            name, value = line.split()
            if name in ("inactive_file", "active_file"):
                cache += int(value)
    except (OSError, ValueError):
        return None
    return max(0, limit - max(0, usage - cache))
