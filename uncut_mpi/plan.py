"""
The plan command: ``python -m uncut_mpi.plan``.

Chooses a schedule for a product on a machine that need not be there, and says what it expects of it and why;
uses neither MPI nor a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from uncut_mpi.command.flags import HelpRequested
from uncut_mpi.command.planning import parse, run
from uncut_mpi.errors import INTERRUPTED, UncutError


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command and return its exit status: 0, 2 after an error, or 130 after an interrupt.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.
    """
    try:
        run(parse(sys.argv[1:] if argv is None else argv))
    except HelpRequested as asked:
        sys.stdout.write(asked.text)
    except UncutError as error:
        sys.stdout.flush()
        sys.stderr.write(f"uncut_mpi.plan: {type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("uncut_mpi.plan: interrupted\n")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
