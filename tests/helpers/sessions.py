"""Sessions as tests open them, of whichever backend their folder tests."""

from __future__ import annotations

import dataclasses
import functools

import uncut_mpi as um


def opener(backend: str):
    """Return a function (comm, **options) -> Session of this backend on a machine of equal links, unless told else."""

    def open_session(comm, **options) -> um.Session:
        return um.Session(
            comm, **{"backend": backend, "machine": um.Machine.uniform(comm.size), "timeout_s": 20, **options}
        )

    return open_session


def hide_arrays(session: um.Session, monkeypatch, hidden=lambda: True) -> None:
    """Make the session's backend say, while `hidden()`, that no peer can open the arrays it is given."""
    backend = session._backend
    adopt = backend.adopt

    def adopt_hidden(array):
        adopted = adopt(array)
        return dataclasses.replace(adopted, handle=None, offset_bytes=0, obstacle="hidden on purpose")

    monkeypatch.setattr(backend, "adopt", lambda array: adopt_hidden(array) if hidden() else adopt(array))


def fail_runs(session: um.Session, monkeypatch, failing) -> None:
    """Make every operation list of this rank report an error, while `failing()`, after it has run."""
    backend = session._backend
    executable = backend.executable

    def make(*arguments):
        made = executable(*arguments)
        run = made.run

        @functools.wraps(run)
        def failing_run(**scalars):
            report = run(**scalars)
            if failing():
                report.error = um.DeviceError("failed on purpose")
            return report

        made.run = failing_run
        return made

    monkeypatch.setattr(backend, "executable", make)
