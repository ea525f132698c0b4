"""Paths that are not what a flag needs: refused at once and in words, never waited for; outputs whole or not there."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.helpers.hostile import interrupt
from uncut_mpi import plan
from uncut_mpi.api import matrix_files as files
from uncut_mpi.api.matrix_files import OutputFile, open_matrix
from uncut_mpi.bench.arguments import parse_bench
from uncut_mpi.command import artifacts
from uncut_mpi.command.arguments import parse as parse_gemm
from uncut_mpi.command.artifacts import check_paths, write_file
from uncut_mpi.command.calibrate_arguments import parse_calibrate
from uncut_mpi.command.product import check_output
from uncut_mpi.errors import DataFileError, ParamError
from uncut_mpi.model import lines
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine

LIMIT_S = 5.0

READ = {
    "fifo": "named pipe",
    "socket": "socket",
    "device": "regular file",
    "directory": "directory",
    "dangling": "No such file",
    "loop": "symbolic links",
    "nul": "no file can have",
    "surrogate": "no file can have",
    "empty": "No such file",
    "long": "name too long",
    "memory": "",
}
WRITTEN = {
    "socket": "socket",
    "directory": "directory",
    "loop": "symbolic links",
    "nul": "no file can have",
    "surrogate": "no file can have",
    "long": "name too long",
    "process": "cannot be written",
    "closed": "stream",
}


@pytest.fixture
def odd(request, tmp_path):
    """A path of some kind."""
    path = tmp_path / "odd"
    kind = request.param
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
            yield str(path)
            return
    elif kind == "directory":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to("odd")
    names = {
        "device": "/dev/null",
        "nul": f"{path}\0x",
        "surrogate": f"{path}\ud800",
        "empty": "",
        "long": f"{path}{'x' * 300}",
        "memory": "/proc/self/mem",
        "process": "/proc/uncut",
        "closed": "/dev/fd/987",
    }
    yield names.get(kind, str(path))


def refusal(call, kind=ParamError):
    """Return the message of a call that has to fail at once."""
    found: list[BaseException | None] = []

    def run():
        try:
            call()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert found, "it waits"
    assert isinstance(found[0], kind), repr(found[0])
    return str(found[0])


def each(kinds):
    return pytest.mark.parametrize(("odd", "said"), list(kinds.items()), indirect=["odd"], ids=list(kinds))


@each(READ)
def test_what_is_no_matrix_file_is_refused_at_once(odd, said):
    assert said in refusal(lambda: open_matrix(odd), DataFileError)


@each(READ)
def test_what_is_no_machine_file_is_refused_at_once(odd, said):
    assert said in refusal(lambda: load_machine(odd))


@each(WRITTEN)
@pytest.mark.parametrize(
    "check", [lambda path: check_paths({"--json": path}), lambda path: check_output(path, overwrite=True)]
)
def test_what_cannot_be_written_is_refused_before_any_work(odd, said, check):
    assert said in refusal(lambda: check(odd), DataFileError)


@pytest.mark.parametrize("flag", ["--machine", "--json", "--timeline", "--transfers"])
@pytest.mark.parametrize("odd", ["nul", "surrogate"], indirect=True)
def test_the_plan_command_refuses_odd_names(odd, flag, capsys):
    name = odd + {"--timeline": ".json", "--transfers": ".png"}.get(flag, "") if odd else odd
    assert plan.main(["-m", "64", flag, name]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1


def test_a_pipe_without_a_reader_and_one_that_is_not_emptied_are_said(tmp_path, monkeypatch):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    assert "nobody reads" in refusal(lambda: write_file("--json", pipe, b"{}\n"), DataFileError)
    monkeypatch.setattr(artifacts, "PATIENCE_S", 0.05)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        message = refusal(lambda: write_file("--json", pipe, b"x" * (1 << 20)), DataFileError)
    finally:
        os.close(reader)
    assert "0.05 s" in message


def _written(pipe, content):
    with contextlib.suppress(DataFileError):
        write_file("--json", pipe, content)
        return True
    return False


def test_a_pipe_with_a_slow_reader_gets_everything(tmp_path):
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    content = os.urandom(1 << 20)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as cat:
        found = []
        thread = threading.Thread(target=lambda: found.append(cat.stdout.read()))
        thread.start()
        # No error once cat has begun, "nobody reads" before.
        while not _written(pipe, content):
            time.sleep(0.01)
        thread.join(LIMIT_S)
    assert found == [content]


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/proc/self/fd/1", "link.json"])
def test_facts_on_standard_output_are_alone_there(tmp_path, name):
    (tmp_path / "link.json").symlink_to("/dev/stdout")
    words = [sys.executable, "-m", "uncut_mpi.plan", "-m", "64", "--json", name]
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run(words, cwd=tmp_path, stdout=log, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "log").read_text())["m"] == 64
    assert done.stderr.startswith(b"machine ")
    assert sorted(os.listdir(tmp_path)) == ["link.json", "log"]


@pytest.mark.parametrize(
    ("parse", "flag", "field"),
    [
        (lambda words: parse_gemm(["A.npy", "B.npy", *words]), "-o", "out_path"),
        (parse_gemm, "--json", "json"),
        (plan.parse, "--json", "json"),
        (parse_calibrate, "--json", "json"),
        (parse_calibrate, "--output", "output"),
        (parse_bench, "--output", "output"),
    ],
)
def test_a_dash_is_standard_output_wherever_a_file_is_written(parse, flag, field):
    assert getattr(parse([flag, "-"]), field) == "/dev/stdout"
    assert getattr(parse([flag, "./-"]), field) == "./-"


def test_a_dash_twice_is_an_error():
    for parse, words in ((parse_gemm, "A.npy B.npy -o - --json -"), (parse_calibrate, "--output - --json -")):
        with pytest.raises(ParamError, match="both name /dev/stdout"):
            parse(words.split())


def test_a_result_does_not_replace_a_standard_stream():
    assert "stream" in refusal(lambda: check_output("/dev/fd/1", overwrite=True), DataFileError)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path, overwrite):
    path = tmp_path / ("é" * 125 + ".npy")
    with OutputFile(str(path), (2, 2), DType.f64, "C", overwrite=overwrite) as out:
        out.target.write_lines(np.eye(2))
        out.commit()
    np.testing.assert_array_equal(np.load(path), np.eye(2))
    write_file("--json", str(path), b"{}\n")
    assert path.read_bytes() == b"{}\n"


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "facts.json"
    path.write_text("old")
    for call in ("pwrite", "fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, interrupt)
            with pytest.raises(KeyboardInterrupt):
                write_file("--json", str(path), b"{}\n")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["facts.json"]


@pytest.mark.parametrize("other", ["./facts.x", "there/../facts.x", "symbolic.x", "hard.x"])
def test_two_names_of_one_file_are_refused(tmp_path, other, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("there").mkdir()
    pathlib.Path("facts.x").write_text("old")
    pathlib.Path("symbolic.x").symlink_to("facts.x")
    pathlib.Path("hard.x").hardlink_to("facts.x")
    with pytest.raises(DataFileError, match=r"--json facts\.x and --trace .* are one file"):
        artifacts.check_paths({"--json": "facts.x", "--trace": other})
    with pytest.raises(DataFileError, match="which is read"):
        artifacts.check_paths({"--json": "facts.x", "--trace": None}, [other])


def _read_shrunk(path: str) -> None:
    file, blocks = open_matrix(path), files.blocks

    def shrinking(*arguments):
        for block in blocks(*arguments):
            yield block
            os.truncate(path, 5000)

    files.blocks, lines._BLOCK_BYTES = shrinking, 8000
    try:
        file.read_into(np.empty((100, 100)))
    except DataFileError as error:
        sys.exit(0 if "changed while it was" in str(error) else 1)
    sys.exit(2)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    np.save(tmp_path / "A.npy", np.ones((100, 100)))
    process = multiprocessing.get_context("spawn").Process(target=_read_shrunk, args=(str(tmp_path / "A.npy"),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"format": ' + "9" * 10_000 + "}", "\ud800", "null", "{}", "[1]"],
)
def test_a_machine_file_that_is_none_is_a_clear_error(tmp_path, text):
    path = tmp_path / "machine.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ParamError, match=r"machine\.json"):
        load_machine(str(path))


def test_a_machine_file_of_any_length_is_not_read(tmp_path):
    path = tmp_path / "machine.json"
    path.touch()
    os.truncate(path, 1 << 27)
    assert "more than" in refusal(lambda: load_machine(path))


@pytest.mark.parametrize("field", ["name", "key", "provenance"])
@pytest.mark.parametrize("value", [5, None, ["a"], {}])
def test_texts_of_a_machine_file_are_texts(tmp_path, field, value):
    content = json.loads(Machine.uniform(2).to_json())
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**content, field: value}))
    with pytest.raises(ParamError, match=rf"machine\.json: not a machine file: .*{field}"):
        load_machine(str(path))


@pytest.mark.parametrize("value", [0, 987, None, 1.5, ["h200-4x"], object()])
def test_what_is_no_path_is_no_machine(value):
    with pytest.raises(ParamError, match="neither one that ships"):
        load_machine(value)
