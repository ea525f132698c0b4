"""What the env command says in one process, also where parts of the installation are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

from uncut_mpi.command.environment import _differences
from uncut_mpi.device.cuda.description import _peers

LABELS = [
    "uncut_mpi", "python", "packages", "blas", "system", "processor", "memory", "container", "variables", "gpus", "mpi",
    "session", "job",
]  # fmt: skip


def said(tmp_path, words=(), before="", **environment):
    """Run it after some statements; return the lines of its report."""
    code = f"import sys\n{before}\nfrom uncut_mpi.env import main\nsys.exit(main({[*words]!r}))"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "CUDA"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], text=True, capture_output=True, timeout=60, check=False,
        env={**kept, "XDG_CACHE_HOME": str(tmp_path), **environment},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_all_is_told_and_nothing_is_kept(tmp_path):
    lines = said(tmp_path, ["--json", str(tmp_path / "e")], UNCUT_ODD="7", CUDA_HOME="", PMIX_SECURITY_KEY="hush")
    (facts,) = json.loads((tmp_path / "e").read_text())
    assert [line.split()[0] for line in lines if line[0] != " "] == LABELS == list(facts)
    assert len(lines) < 40
    assert {"CUDA_HOME=", "UNCUT_ODD=7"} <= set(facts["variables"])
    assert "hush" not in "".join(lines)
    assert facts["session"][0].startswith("opens with one rank: ")
    where, machine = facts["job"]
    assert where.startswith("1 rank on 1 node: ")
    assert str(tmp_path) in machine
    assert "not there yet" in machine
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_what_is_missing_is_told_in_its_line(tmp_path):
    broken = ("mpi4py", "mpi4py.MPI", "threadpoolctl", "cupy", "uncut_mpi._native")
    lines = said(tmp_path, before="".join(f"sys.modules[{name!r}] = None\n" for name in broken))
    assert [line.split()[0] for line in lines if line[0] != " "] == [*LABELS, "ranks"]  # which nobody could ask
    lacking = {line.split()[0] for line in lines if "cannot be had" in line}
    assert lacking == {"uncut_mpi", "blas", "processor", "gpus", "mpi", "session", "job", "ranks"}


def test_of_other_ranks_only_what_differs_is_said():
    one = {"memory": ["5 GB free of 8 GB", "locked 1"], "gpus": ["0: A"]}
    two = {"memory": ["6 GB free of 8 GB", "locked 2"], "gpus": ["0: A"]}
    assert "".join(_differences([one, two, one, two])) == "memory      ranks 1, 3: locked 2\n"


def test_which_devices_reach_each_other_is_one_line_or_one_of_each():
    for reach, wanted in (
        (lambda here, there: True, ["each reaches all others (peer access)"]),
        (
            lambda here, there: there == here + 1,
            ["0 reaches 1 (peer access)", "1 reaches 2 (peer access)", "2 reaches no other (peer access)"],
        ),
    ):
        assert _peers(types.SimpleNamespace(deviceCanAccessPeer=reach), 3) == wanted
