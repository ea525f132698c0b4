"""``python -m uncut_mpi.bench.baselines NAME BACKEND DEVICES SOCKET``: started by the bench command, not by hand."""

from __future__ import annotations

import socket
import sys

from uncut_mpi.bench.baselines.serve import load, serve


def main(argv: list[str]) -> None:
    """Serve one library over a socket; of a library in several processes each serves over its own."""
    name, backend, devices, path = argv
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rb") as asked, connection.makefile("wb") as answers:
            serve(asked, answers, lambda: load(name, backend, int(devices)))


if __name__ == "__main__":
    main(sys.argv[1:])
