"""The gemm command on files in a control group whose memory ends soon after what it was allowed to use."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers import jobs

RANKS, EXTENT = 2, 2900
HOST_MEMORY, DEVICE_MEMORY = 12_000_000, 24_000_000
"""Of each rank; devices of the host backend are memory of the host."""

CONTROLLERS = {  # the folder of all groups, and a group's limit and most so far
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    "/sys/fs/cgroup": ("memory.max", "memory.peak"),
}


class Group:
    """A control group with a limit of memory; what was cached counts, and gives way."""

    def __init__(self, folder: pathlib.Path, limit: str, most: str) -> None:
        self.folder, self._limit, self._most = folder, folder / limit, folder / most

    def gemm(self, limit: int, *words: str) -> tuple[int | None, str, int]:
        """Return exit status and output of the command with so many bytes, and what its ranks had at most."""
        self._limit.write_text(str(limit))
        enter = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self.folder / "cgroup.procs"]
        process = jobs.start_gemm(*words, by=enter)
        status, output, errors = jobs.ended(process, 60)
        return status, output + errors, int(self._most.read_text())


def own_groups() -> Iterator[tuple[pathlib.Path, tuple[str, str]]]:
    """Yield folders in which a group may be made: this process's own one, or as a container sees it the root."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        root = "/sys/fs/cgroup/memory" if "memory" in controllers.split(",") else "/sys/fs/cgroup"
        if root in CONTROLLERS and (not controllers or "memory" in controllers):
            yield pathlib.Path(root) / own.lstrip("/"), CONTROLLERS[root]
            yield pathlib.Path(root), CONTROLLERS[root]


@pytest.fixture
def group() -> Iterator[Group]:
    for parent, files in own_groups():
        folder = parent / f"uncut_mpi_test_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if all((folder / one).exists() for one in files):
                yield Group(folder, *files)
                return
        finally:
            remove(folder)
    pytest.skip("no control group with a limit of memory can be made here")


def remove(folder: pathlib.Path) -> None:
    """Remove a group once the last of its processes is gone."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.05)
    return folder.rmdir()


def test_files_larger_than_memory_are_multiplied_with_little_more_than_is_allowed(
    group: Group, tmp_path: pathlib.Path
) -> None:
    rng = np.random.default_rng(1)
    for extent, names in ((EXTENT, "AB"), (64, "ab")):
        for name in names:
            np.save(tmp_path / f"{name}.npy", np.asfortranarray(rng.standard_normal((extent, extent))))
    a, b, c = (str(tmp_path / f"{name}.npy") for name in "ABC")
    assert os.path.getsize(a) > 4 * HOST_MEMORY
    allowed = ["--host-memory", str(HOST_MEMORY), "--device-memory", str(DEVICE_MEMORY)]
    small = [str(tmp_path / f"{name}.npy") for name in "ab"], str(tmp_path / "c.npy")
    status, text, own = group.gemm(1 << 40, *small[0], "-o", small[1], *allowed)
    assert status == 0, text
    limit = own + 2 * RANKS * (HOST_MEMORY + DEVICE_MEMORY)
    assert limit < own + 3 * os.path.getsize(a)  # there is no room for all of them
    status, text, most = group.gemm(limit, a, b, "-o", c, *allowed)
    assert status == 0, text
    assert "PASS" in text
    assert most <= limit
