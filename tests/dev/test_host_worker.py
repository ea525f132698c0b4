"""The worker that makes copies of files."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from tests.dev.fake import HERE, SOURCES


@pytest.fixture(scope="module")
def worker(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("worker") / "worker"
    sources = [HERE / "host_worker.cpp", SOURCES / "host_worker.cpp", SOURCES / "host_files.cpp"]
    command = [compiler, "-std=c++20", "-O1", "-pthread", f"-I{SOURCES}", "-o", made, *sources, "-ldl"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    return made


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_it_does_with_the_threads_that_are_to_be_had(worker: pathlib.Path, threads: int) -> None:
    run = subprocess.run([str(worker), str(threads)], check=True, timeout=20, capture_output=True, text=True)
    assert run.stdout == "4\n"
