"""Files that commands write: whole or not at all, and refused before any work."""

from __future__ import annotations

import os

import pytest

from uncut_mpi.command.artifacts import check_path, write_file
from uncut_mpi.errors import DataFileError


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "facts.x"
    path.write_text("old and longer than the new content")
    check_path("--json", str(path))
    write_file("--json", str(path), b"{}\n")
    assert path.read_text() == "{}\n"
    assert os.listdir(tmp_path) == ["facts.x"]


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "facts.x"
    path.touch()
    for mode in (0o600, 0o440):
        path.chmod(mode)
        write_file("--json", str(path), b"{}\n")
        assert path.stat().st_mode & 0o777 == mode


def test_a_file_that_cannot_be_completed_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "facts.x"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataFileError, match="No space left"):
        write_file("--json", str(path), b"{}\n")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["facts.x"]


def test_a_bad_path_is_refused_before_any_work(tmp_path):
    with pytest.raises(DataFileError, match=r"^--json .* is a directory"):
        check_path("--json", str(tmp_path))
    with pytest.raises(DataFileError, match="no directory"):
        check_path("--json", str(tmp_path / "missing" / "facts.x"))


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    check_path("--json", str(pipe))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file("--json", str(pipe), b"{}\n")
        assert os.read(reader, 100) == b"{}\n"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    if os.path.exists("/dev/full"):
        link = tmp_path / "full.json"
        link.symlink_to("/dev/full")
        check_path("--json", str(link))
        with pytest.raises(DataFileError, match=r"full\.json cannot be written: No space left"):
            write_file("--json", str(link), b"{}\n")
        assert link.is_char_device()
