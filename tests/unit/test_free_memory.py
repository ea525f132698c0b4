"""What the node and control groups leave, and that segments keep to it."""

from __future__ import annotations

import pytest

from uncut_mpi import free_memory
from uncut_mpi.errors import CapacityError
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
