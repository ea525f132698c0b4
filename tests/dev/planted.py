"""
Plants faults of one line, one after the other, and says which tests find them: `planted.py [FILE...]`, for minutes.

Not part of the test command. It changes the sources of this checkout, compiles those of the core, and puts them back.
Whoever leaves a test out runs it, and so knows that another one finds what that one found. The table is `planted.txt`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def faults() -> list[list[str]]:
    """Return (file, right, wrong, ranks, tests) of each that a test finds."""
    lines = (ROOT / "tests/dev/planted.txt").read_text().splitlines()[1:]
    found = [[word.replace("\\n", "\n") for word in line.split("  |  ")] for line in lines]
    return [[*words, *how.split(maxsplit=1)] for *words, how in found if how != "none"]


def build() -> None:
    folder = next((ROOT / "build").iterdir())
    always = {**os.environ, "CMAKE_INSTALL_ALWAYS": "1"}  # else what is less than a second newer is not installed
    for step in (["--build", folder], ["--install", folder, "--prefix", sysconfig.get_path("purelib")]):
        subprocess.run(["cmake", *map(str, step)], check=True, capture_output=True, env=always)


def find(ranks: str, tests: str) -> str:
    """Return the first test that fails, or what else ended them; "" if none does."""
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"tests/{one}" for one in tests.split())]
    if "mpi/" in tests:
        words = ["-m", "mpi4py", *words, "-p", "no:hypothesispytest", "--only-mpi", "--timeout=60"]
        words.append("--timeout-method=thread")
    launcher = [] if ranks == "1" else ["mpiexec", "-n", ranks]
    command = ["timeout", "-k5", "300", *launcher, sys.executable, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"status {done.returncode}"])[0] if done.returncode else ""


def main(wanted: list[str]) -> int:
    missed = 0
    for name, right, wrong, ranks, tests in faults():
        if wanted and not any(word in name for word in wanted):
            continue
        path = ROOT / "uncut_mpi" / name
        source, began = path.read_text(), time.monotonic()
        if source.count(right) != 1:
            raise SystemExit(f"{name} has {source.count(right)} times: {right}")
        try:
            path.write_text(source.replace(right, wrong))
            if path.suffix in (".cpp", ".hpp"):
                build()
            found = find(ranks, tests)
        finally:
            path.write_text(source)
            if path.suffix in (".cpp", ".hpp"):
                build()
        missed += not found
        print(f"{time.monotonic() - began:4.0f} s  {name}: {wrong!r}  {found or 'MISSED'}", flush=True)
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
