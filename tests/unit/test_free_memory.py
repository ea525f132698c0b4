"""What the node and control groups leave, and that segments keep to it."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers import jobs
from tests.helpers.by_hand import ByHand
from uncut_mpi import free_memory
from uncut_mpi.device.cuda.preparation import own_memory
from uncut_mpi.errors import CapacityError
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Role
from uncut_mpi.segments import Segment


def limits(tmp_path, membership, enough=1 << 62):
    (tmp_path / "cgroup").write_text(membership)
    return {name: left for left, name in free_memory._cgroup_limits(enough, str(tmp_path), str(tmp_path / "cgroup"))}


def put(directory, **files):
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_version_2_counts_every_enclosing_limit_and_cache_as_free(tmp_path):
    put(tmp_path / "a", memory__max="1000\n", memory__current="700\n", memory__stat="inactive_file 100\nanon 5\n")
    put(tmp_path / "a/b", memory__max="max\n", memory__current="1\n", memory__stat="")
    put(tmp_path / "a/b/c", memory__max="500\n", memory__current="600\n", memory__stat="active_file 50\n")
    found = limits(tmp_path, "0::/a/b/c\n")
    assert found == {
        "memory limit of control group /a": 400,
        "memory limit of control group /a/b/c": 0,
    }


def test_what_leaves_more_than_the_node_has_is_no_limit(tmp_path):
    put(tmp_path / "a", memory__max="1000\n", memory__current="700\n", memory__stat="inactive_file 100\n")
    assert limits(tmp_path, "0::/a\n", 300) == {}
    # Without its cache it has less than that.
    assert limits(tmp_path, "0::/a\n", 301) == {"memory limit of control group /a": 400}


def test_version_1_inside_a_container_is_found_at_the_mounted_root(tmp_path):
    put(
        tmp_path / "memory",
        memory__limit_in_bytes="4096",
        memory__usage_in_bytes="96",
        memory__stat="cache 1\n",
    )
    found = limits(tmp_path, "9:cpu:/x\n4:memory:/docker/1234\n0::/\n")
    assert found == {"memory limit of control group /": 4000}


def test_no_control_groups_are_no_limit(tmp_path):
    assert limits(tmp_path, "0::/\n") == {}
    assert list(free_memory._cgroup_limits(1 << 62, str(tmp_path), str(tmp_path / "missing"))) == []


def test_the_least_limit_is_the_one_that_counts(monkeypatch):
    monkeypatch.setattr(free_memory, "_cgroup_limits", lambda enough: iter([(160 << 20, "the least")]))
    assert free_memory.available_bytes() == (160 << 20, "the least")
    with pytest.raises(CapacityError, match="the least"):
        Segment.create(155 << 20, "a test")
    Segment.create(20 << 20, "a test").close()


# -- memory in which a plan for GPUs warms up ------------------------------------------------------


def test_buffers_without_an_address_and_others_memory_are_left_out() -> None:
    build = ByHand(2)
    user = build.add(0, 64, 64, role=Role.USER)
    first, unused, last, peers = (build.add(at, 64, cols) for at, cols in ((0, 3), (0, 64), (0, 5), (1, 64)))
    for to in (first, last):
        build.copy(build.copy_lane(0, 0, 0), to._replace(cols=3), user._replace(cols=3))
    program = lower(build.done()).rank_list(0)
    addresses = np.zeros(5, np.int64)
    assert own_memory(program, addresses) == (0, 0)
    used = [one.buffer for one in (user, first, last, peers)]  # as `unused` is not used it has none
    addresses[used] = 1 << 20, 4096, 8192, 256
    assert own_memory(program, addresses) == (4096, 4096 + 64 * 5 * 8)
    assert unused.buffer not in program.buffers_used()


# -- a control group whose memory ends soon after what the gemm command was allowed ----------------


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
