"""A fake CUDA driver for the tests of this folder, compiled once."""

from __future__ import annotations

import shutil

import pytest

from tests.dev.fake import FakeCuda, build_fake


@pytest.fixture(scope="session")
def compiler():
    """A C++ compiler on this machine."""
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if found is None:
        pytest.skip("no C++ compiler")
    return found


@pytest.fixture(scope="session")
def library(compiler, tmp_path_factory):
    """The fake driver, as the executor's library."""
    return FakeCuda(build_fake(compiler, tmp_path_factory.mktemp("fake")))


@pytest.fixture
def fake(library):
    """The fake driver as new; what a test changes in it does not outlive the test."""
    library.reset()
    yield library
    library.reset()
