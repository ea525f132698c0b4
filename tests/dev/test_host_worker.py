"""The worker that makes copies of files."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests.dev.fake import HERE, SOURCES


@pytest.fixture(scope="module", params=["", "-fsanitize=address,undefined", "-fsanitize=thread"])
def worker(compiler: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> pathlib.Path:
    """The program, also with the sanitizers: launch/sanitize has the rest of the core with them."""
    made = tmp_path_factory.mktemp("worker") / "worker"
    sources = [HERE / "host_worker.cpp", SOURCES / "host_worker.cpp", SOURCES / "host_files.cpp"]
    how = ["-std=c++20", "-O1", "-pthread", *filter(None, [request.param]), "-fno-sanitize-recover=undefined"]
    command = [compiler, *how, f"-I{SOURCES}", "-o", made, *sources, "-ldl"]
    done = subprocess.run([str(part) for part in command], check=False, timeout=120, capture_output=True, text=True)
    if request.param and "cannot find" in done.stderr:
        pytest.skip(f"this compiler has no library for {request.param}")
    done.check_returncode()
    return made


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_it_does_with_the_threads_that_are_to_be_had(worker: pathlib.Path, threads: int) -> None:
    run = subprocess.run([str(worker), str(threads)], check=True, timeout=20, capture_output=True, text=True)
    assert run.stdout == "4\n"
