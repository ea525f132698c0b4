"""A rank that leaves by an unhandled error ends the job, and verdicts reach the exit status: real jobs of two ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.helpers import jobs
from tests.helpers.collective import carried
from tests.helpers.jobs import MACHINE
from uncut_mpi.spmd import abort

START = """
import sys, threading, time
from mpi4py import MPI
from uncut_mpi.spmd.abort import finish, install_abort_hook
comm = MPI.COMM_WORLD
install_abort_hook(comm)
install_abort_hook(comm)
"""
# What the other rank does meanwhile: wait for ever, as in a collective call.
WAIT = "comm.Barrier() if comm.rank == 0 else None\n"


@pytest.fixture
def job(job_of_ranks):
    """As `job_of_ranks`, of a program whose end is the business of spmd."""
    return lambda body, *wanted, start=START, **how: job_of_ranks(start + body, *wanted, **how)


@pytest.mark.parametrize("interpreter", [(), ("-m", "mpi4py")], ids=["plain python", "python -m mpi4py"])
def test_an_unhandled_error_ends_the_job_and_names_the_rank(job, interpreter):
    program = WAIT + "raise ValueError('no such thing')\n"
    output = job(program, "[rank 1 of 2] ValueError: no such thing", interpreter=interpreter)
    assert output.count("ValueError: no such thing") == 1  # said once, by one hook


@pytest.mark.parametrize(
    ("interpreter", "body", "error", "caught"),
    [
        (
            ("-m", "mpi4py"),
            "s.empty_host((2 + s.rank, 1))",
            "RankMismatchError: ranks passed different values: shape: ",
            0,
        ),
        ((), "raise (ValueError, KeyError)[s.rank]('x')", "KeyError: 'x'", 0),
        ((), "raise KeyboardInterrupt", "KeyboardInterrupt", 0),
        (("-m", "mpi4py"), "s.open_file('/none.npy')", "DataFileError: rank 0: /none.npy cannot be read: No such", 1),
    ],
    ids=["all, python -m mpi4py", "each its own, plain python", "interrupts", "rank 0 catches it, python -m mpi4py"],
)
def test_one_rank_prints_a_traceback_and_the_other_a_line(job, interpreter, body, error, caught):
    start = f"import sys\nfrom mpi4py import MPI\nimport uncut_mpi as um; W = MPI.COMM_WORLD; {MACHINE}\n"
    made = "[line.split('/')[-1].strip() for line in open('/proc/self/maps') if '/dev/shm/' in line]"
    program = f"""
print('made', *{made}, flush=True)
with um.Session(W, backend="host", machine=M) as s:
    try:
        {body}
    except um.UncutError:
        if s.rank >= {caught}:
            raise
"""
    first = f"[rank {caught} of {2 + caught}] Traceback (most recent call last):"
    output = job(program, first, interpreter=interpreter, start=start, ranks=2 + caught)
    assert output.count("Traceback") == 1, output
    (line,) = [line for line in output.splitlines() if line.startswith(f"[rank {1 + caught} of {2 + caught}] ")]
    assert error in line
    assert line.endswith("program.py:8)"), line
    assert "uncut_mpi/" not in output
    assert "During handling" not in output
    assert "direct cause" not in output
    assert "site-packages/mpi4py" not in output
    names = {word for line in output.splitlines() if line.startswith("made") for word in line.split()[1:]}
    assert not names & set(os.listdir("/dev/shm")), names


def test_who_only_saw_an_error_tells_a_line(job):
    program = f"""
from mpi4py import MPI
import uncut_mpi as um; W = MPI.COMM_WORLD; {MACHINE}
s = um.Session(W, backend="host", machine=M)
if s.rank == 1:
    raise ValueError("its own")
s.barrier()
"""
    output = job(program, "[rank 0 of 2] PeerFailedError: barrier: rank 1 left the session by ValueError, ", start="")
    assert output.count("Traceback") == output.count("[rank 1 of 2] Traceback") == 1, output


def test_a_rank_that_is_interrupted_while_a_command_loads_ends_the_job(job):
    program = """
import sys
from uncut_mpi.command.ranks import run_on_ranks

def __getattr__(name):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise KeyboardInterrupt
    return lambda comm, arguments, words, say: not comm.Barrier()

sys.exit(run_on_ranks("test", lambda words: None, "__main__:run", []))
"""
    job(program, "[rank 1 of 2] KeyboardInterrupt", start="")


def test_ctrl_c_ends_a_command_with_one_line_of_a_rank(comm, tmp_path):
    with carried(comm):
        if comm.rank == 0:
            process = jobs.start_gemm(
                "-m", "512", "--repeat", "100000", "--no-check", "--timeout", "20", XDG_CACHE_HOME=str(tmp_path)
            )
            assert jobs.wait_for(tmp_path / "uncut_mpi" / "machines")  # the machine is measured: all ranks are at work
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
            status, output, errors = jobs.ended(process)
            said = [line for line in errors.splitlines() if line.startswith("[rank")]
            assert status not in (None, 0), output + errors
            assert "Traceback" not in errors, errors
            assert "unhandled" not in errors, errors
            assert said, output + errors
            assert all(line.endswith("KeyboardInterrupt: the job ends") for line in said), errors


def test_an_interrupt_before_mpi_is_loaded_is_one_line(job):
    program = """
import sys
import uncut_mpi.command.ranks as ranks

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "uncut_mpi.spmd.abort":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.exit(ranks.run_on_ranks("test", lambda words: None, "", []))
"""
    output = job(program, start="")
    assert output.count("test: interrupted") == 2, output
    assert "Traceback" not in output, output


def test_the_end_of_a_job_leaves_no_shared_memory(job):
    made = "[line.split('/')[-1].strip() for line in open('/proc/self/maps') if '/dev/shm/' in line]"
    body = f"comm.Barrier()\nprint('made', *{made}, flush=True)\n"
    output = job(body + WAIT + "raise ValueError('end')\n")
    names = {word for line in output.splitlines() if line.startswith("made") for word in line.split()[1:]}
    assert not names & set(os.listdir("/dev/shm")), names


def test_an_interrupt_and_an_error_in_a_thread_end_the_job(job):
    job(WAIT + "raise KeyboardInterrupt\n", "[rank 1 of 2] KeyboardInterrupt")
    thread = "t = threading.Thread(target=lambda: 1 / 0, name='worker')\n"
    waits = "t.start() if comm.rank else None\ncomm.Barrier()\ncomm.recv()\n"
    job(thread + waits, "[rank 1 of 2, thread worker] ZeroDivisionError")


def test_leaving_by_sys_exit_does_not_end_the_job(job):
    body = (
        "t = threading.Thread(target=sys.exit)\nt.start()\nt.join()\n"
        "comm.Barrier()\nprint(f'rank {comm.rank} leaves', flush=True)\nsys.exit(0)\n"
    )
    job(body, "rank 0 leaves", "rank 1 leaves", status=0)


def test_one_rank_s_verdict_is_every_rank_s_exit_status(job):
    body = "status = finish(comm, 3 * comm.rank)\nprint(f'rank {comm.rank}: {status}', flush=True)\nsys.exit(status)\n"
    job(body, "rank 0: 3", "rank 1: 3")


def test_the_highest_exit_status_wins(comm, agree_all):
    for guilty in {0, comm.size - 1}:
        status = abort.finish(comm, 2 if comm.rank == guilty else 0)
        agree_all(status == 2, status)
    agree_all(abort.finish(comm, 0) == 0)
