"""``python -m uncut_mpi.bench``."""

import sys

from uncut_mpi.bench import main

if __name__ == "__main__":
    sys.exit(main())
