"""``python -m uncut_mpi.baselines NAME BACKEND DEVICES READ WRITE``: started by the bench command, not by hand."""

from __future__ import annotations

import os
import sys

from uncut_mpi.baselines.serve import load, serve


def main(argv: list[str]) -> None:
    """Serve one library over two pipes."""
    name, backend, devices, asked, answers = argv
    with os.fdopen(int(asked), "rb") as reading, os.fdopen(int(answers), "wb") as writing:
        serve(reading, writing, lambda: load(name, backend, int(devices)))


if __name__ == "__main__":
    main(sys.argv[1:])
