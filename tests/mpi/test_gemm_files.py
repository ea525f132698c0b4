"""The gemm command as a tool: files multiplied once, machines to plan for, and paths that are not what a flag needs."""

from __future__ import annotations

import json

import pytest

from tests.helpers.collective import collective_assert
from tests.helpers.commands import in_process
from tests.helpers.sessions import measured_machine
from uncut_mpi.gemm import main

pytestmark = pytest.mark.mpi(min_size=1)


@pytest.fixture(scope="module")
def machine_cache(comm, backend_name):
    """A directory for the machine that these tests measure once; gone afterwards."""
    with measured_machine(comm, backend_name) as path:
        yield path


@pytest.fixture
def job(comm, capfd, backend_name, machine_cache, monkeypatch):
    """Runs the command in this process; returns (status, everything rank 0 printed, its errors)."""
    monkeypatch.setenv("XDG_CACHE_HOME", machine_cache)
    return in_process(main, comm, capfd, ["--backend", backend_name])


@pytest.mark.xfail(strict=True, reason="PASS is said of a result without elements, which nobody checked")
@pytest.mark.parametrize("words", [["-m", "0"], ["-m", "0", "-n", "5", "-k", "7"], ["-m", "5", "-n", "0"]])
def test_a_result_without_elements_is_not_called_right(comm, job, mpi_tmp_path, words):
    path = mpi_tmp_path / "facts.json"
    status, out, err = job([*words, "--warmup", "0", "--repeat", "1", "--json", path])
    facts = json.loads(path.read_text())
    good = (
        status == 0
        and out.endswith("UNCHECKED\n")
        and "check       nothing to check: C is " in out
        and facts["passed"] is None
        and facts["check_detail"].startswith("nothing to check")
    )
    collective_assert(comm, good, f"status {status} {out}{err}")
