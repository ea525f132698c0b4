"""A report of all ranks, whenever somebody asks for one: the job goes on."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from uncut_mpi.api import watchdog

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.one_node("ranks that see each other")]


def test_who_is_awaited_is_told_at_a_signal_and_the_call_goes_on(comm, mpi_tmp_path, monkeypatch):
    told, report = [], watchdog.report
    monkeypatch.setattr(watchdog, "report", lambda held: told.append(report(held)) or told[-1])
    monkeypatch.setattr(watchdog, "_ONCE_MS", 0)
    seen, last = mpi_tmp_path / "seen", comm.size - 1
    wanted = f"for rank {last} to begin call"

    def ask():
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s and not any(wanted in text for text in told):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.05)
        seen.touch()

    with um.Session(comm, backend="host") as session:
        if comm.rank == 0:
            threading.Thread(target=ask).start()
        while comm.rank == last and not seen.exists():
            time.sleep(0.02)
        session.barrier()
        text = "\n".join(told)
    collective_assert(comm, comm.rank > 0 or (wanted in text and "rank 0 is in barrier, for" in text), text)
