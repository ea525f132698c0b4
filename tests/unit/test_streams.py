"""What commands print on odd streams: files first, characters replaced, a status and one line where nothing arrives."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.hostile import interrupt
from uncut_mpi import plan
from uncut_mpi.command import planning
from uncut_mpi.command.artifacts import check_paths, write_file
from uncut_mpi.errors import DataFileError

SMALL = ["-m", "64", "--ranks", "2"]
COMMAND = [sys.executable, "-m", "uncut_mpi.plan", *SMALL]


@contextlib.contextmanager
def stream_to(path, encoding, errors="strict"):
    """Yield a text stream to a file or descriptor; nothing that it could not write is an error when it is closed."""
    descriptor = os.dup(path) if isinstance(path, int) else os.open(path, os.O_WRONLY | os.O_CREAT)
    stream = io.TextIOWrapper(
        io.FileIO(descriptor, "w", closefd=False), encoding=encoding, errors=errors, write_through=True
    )
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):
            stream.close()
        os.close(descriptor)


@pytest.fixture
def broken(request):
    """A standard stream of some kind that takes nothing."""
    with contextlib.ExitStack() as opened:
        if request.param == "none":
            yield None
        elif request.param == "closed":
            stream = io.StringIO()
            stream.close()
            yield stream
        elif request.param == "full":
            yield opened.enter_context(stream_to("/dev/full", "utf-8"))
        else:
            reader, writer = os.pipe()
            os.close(reader)
            opened.callback(os.close, writer)
            yield opened.enter_context(stream_to(writer, "utf-8"))


@pytest.mark.parametrize(
    ("encoding", "errors"),
    [("ascii", "strict"), ("ascii", "surrogateescape"), ("latin-1", "strict"), ("koi8-r", "strict")],
)
@pytest.mark.parametrize("words", [SMALL, ["--help"]], ids=["report", "help"])
def test_characters_that_an_encoding_lacks_are_replaced(tmp_path, monkeypatch, encoding, errors, words):
    path, facts = tmp_path / "out", tmp_path / "facts.json"
    with stream_to(path, encoding, errors) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert plan.main([*words, "--json", str(facts)] if words is SMALL else words) == 0
    text = path.read_bytes().decode(encoding)
    if words is SMALL:
        assert "m×n×k = 64×64×64" in text or "m?n?k = 64?64?64" in text
        assert json.loads(facts.read_text())["ranks"] == 2
    else:
        assert "--place" in text


@pytest.mark.parametrize("words", [SMALL, ["--help"], ["--version"]], ids=["report", "help", "version"])
@pytest.mark.parametrize(
    ("broken", "why"),
    [("none", "closed"), ("closed", "closed"), ("full", "No space left"), ("pipe", "Broken pipe")],
    indirect=["broken"],
)
def test_output_that_cannot_be_written_is_one_line_and_a_status(tmp_path, monkeypatch, capsys, broken, why, words):
    facts = tmp_path / "facts.json"
    monkeypatch.setattr(sys, "stdout", broken)
    status = plan.main([*words, "--json", str(facts)] if words is SMALL else words)
    errors = capsys.readouterr().err
    assert status == 2
    assert errors.count("\n") == 1
    assert "standard output" in errors
    assert why in errors
    if words is SMALL:
        assert json.loads(facts.read_text())["ranks"] == 2


@pytest.mark.parametrize("broken", ["none", "closed", "full", "pipe"], indirect=True)
def test_an_error_that_nobody_can_be_told_is_the_exit_status_all_the_same(monkeypatch, broken):
    monkeypatch.setattr(sys, "stderr", broken)
    assert plan.main(["--ranks", "0"]) == 2
    monkeypatch.setattr(planning, "search", interrupt)
    assert plan.main(SMALL) == 130


def test_a_stream_that_does_not_wait_gets_all_of_a_long_text():
    # Pipes of some terminals and job managers are non-blocking: a write of more than fits fails half way.
    code = (
        "import os, sys, threading, time\n"
        "from uncut_mpi.command import streams\n"
        "os.set_blocking(1, False)\n"
        "sys.exit(1 if streams.to_output('×' * 300000) else 0)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        out = process.stdout.read()
    assert process.returncode == 0
    assert out.decode() == "×" * 300000


def ended(redirected, facts, **environment):
    """Return (status, what it said on standard error) of the plan command in a shell."""
    words = ["bash", "-c", redirected, "bash", *COMMAND, "--json", str(facts)]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, timeout=60, check=False)
    errors = done.stderr.decode()
    assert "Traceback" not in errors
    assert "ignored" not in errors
    return done.returncode, errors


@pytest.mark.parametrize(
    ("redirected", "said"),
    [
        ('"$@" >&-', "standard output is closed"),
        ('"$@" >&- 2>&- <&-', ""),
        ('set -o pipefail; "$@" | sleep 0', "Broken pipe"),
    ],
)
def test_a_process_without_a_reader_writes_its_files_and_ends_with_a_status(tmp_path, redirected, said):
    facts = tmp_path / "facts.json"
    status, errors = ended(redirected, facts)
    assert status == 2
    assert said in errors
    assert errors.count("\n") == bool(said)
    assert json.loads(facts.read_text())["ranks"] == 2


def test_the_c_locale_is_enough(tmp_path):
    facts = tmp_path / "facts.json"
    assert ended('"$@"', facts, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") == (0, "")
    assert json.loads(facts.read_text())["ranks"] == 2


def test_the_status_of_an_error_is_its_own_where_standard_error_is_full(tmp_path):
    assert ended('"$@" --ranks 0 2>/dev/full', tmp_path / "facts.json") == (2, "")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    # Else what a library prints to standard error by its number would go into the file.
    code = (
        "import os, sys\n"
        "from uncut_mpi.command import streams\n"
        "streams.guard()\n"
        "with open(sys.argv[1], 'w') as file: os.write(2, b'printed'); file.write(str(file.fileno() > 2))\n"
    )
    words = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code, str(tmp_path / "file")]
    subprocess.run(words, timeout=60, check=True)
    assert (tmp_path / "file").read_text() == "True"


# -- files that commands write: whole or not at all, and refused before any work -------------------


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "facts.x"
    path.write_text("old and longer than the new content")
    check_paths({"--json": str(path)})
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
        check_paths({"--json": str(tmp_path)})
    with pytest.raises(DataFileError, match="no directory"):
        check_paths({"--json": str(tmp_path / "missing" / "facts.x")})


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    check_paths({"--json": str(pipe)})
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
        check_paths({"--json": str(link)})
        with pytest.raises(DataFileError, match=r"full\.json cannot be written: No space left"):
            write_file("--json", str(link), b"{}\n")
        assert link.is_char_device()
