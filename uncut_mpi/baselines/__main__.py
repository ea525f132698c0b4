"""``python -m uncut_mpi.baselines NAME BACKEND DEVICES READ WRITE``: started by the bench command, not by hand."""

from __future__ import annotations

import contextlib
import os
import sys

from uncut_mpi.baselines.serve import load, serve


def main(argv: list[str]) -> None:
    """Serve one library over two pipes."""
    name, backend, devices, asked, answers = argv
    # All cores: a rank may have been bound to some of them.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with os.fdopen(int(asked), "rb") as reading, os.fdopen(int(answers), "wb") as writing:
        serve(reading, writing, lambda: load(name, backend, int(devices)))


if __name__ == "__main__":
    main(sys.argv[1:])
