"""Jobs in which a rank meets a fault: the others end soon, the status says so, it is named and nothing is left."""

from __future__ import annotations

import pytest

from tests.helpers.collective import carried
from tests.helpers.judged import Case, run

CASES = [
    Case(fault="never calls", point="open: begin", rank=0),
    Case(fault="exception", point="first call: in binding the plan", rank=1),
    Case(fault="kill", point="repeated call: task GEMM", rank=0),
    Case(fault="stop", point="close: at freeing the SoftBuf", rank=1),
    Case(fault="_exit(0)", point="first call: at broadcast", rank=1),
    Case(fault="fork", point="repeated call: begin", rank=1),
    Case("nodes", fault="lost message", point="repeated call: begin", rank=0),
    Case("files", fault="file shrinks", point="repeated call: begin", rank=1),
    Case("command", fault="full disk", point="command: gate create_file", rank=0),
]
"""Each differs from the others in what sees it; tests/perf/faults.py has all points."""


@pytest.mark.host_backend
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fault}, {case.point}")
def test_a_fault_of_one_rank_ends_the_job_and_leaves_nothing(comm, case):
    with carried(comm):
        if comm.rank == 0:
            found = run(case, timeout_s=2.0)
            assert not found.problems, f"{found.problems}, status {found.status}\n{found.said}"
