"""Jobs with a planted fault (`planted`), and what is judged: who ends when and how, what is said, what is left."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from tests.helpers import planted
from tests.helpers.jobs import ROOT, begin, launcher

SOON_S = 15.0
"""Within so long each other rank has to end or raise."""
SHM = "64m"
"""What a job has of /dev/shm, as a container has."""
TIMEOUT_S = 10.0
"""Of sessions: how long their ranks wait for one that is stopped or stays away."""
END_S = 20.0
"""How long a job may take to end after all of its ranks have raised or ended."""
LEFT = re.compile(r"uncut_mpi|mpich|vader|sm_segment|ompi|hydra|pmix|prte|partial")
OF_ALL = ("file shrinks", "full disk", "full /dev/shm")
"""Faults that any rank meets, whichever brings them about."""
HARMLESS = ("fork",)
"""Faults after which the job has to go on, and to be right."""

# What runs a job in a mount namespace, with small /dev/shm, /tmp and disk of its own, and tells what is left in them.
_APART = """
folder=$1 size=$2 shown=$3; shift 3
mount -t tmpfs -o size=$size tmpfs /dev/shm
mkdir /dev/shm/before && mount --rbind /tmp /dev/shm/before && mount -t tmpfs tmpfs /tmp
for one in $shown "$folder"; do
  case $one in /tmp/*) mkdir -p "$one" && mount --rbind "/dev/shm/before/${one#/tmp/}" "$one" ;; esac
done
umount -l /dev/shm/before && rmdir /dev/shm/before
mkdir -p "$folder/disk" && mount -t tmpfs -o size=4m tmpfs "$folder/disk" && cp "$folder"/*.npy "$folder/disk"
"$@"
status=$?
ls -A /dev/shm /tmp "$folder/disk" >"$folder/left"
exit $status
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One job: a fault at a point on a rank, or none."""

    scenario: str = "node"
    fault: str = ""
    point: str = ""
    rank: int = 0
    ranks: int = 2
    backend: str = "host"
    size: int = 192
    by_launcher: bool = True


@dataclasses.dataclass
class Outcome:
    """What has become of a job."""

    case: Case
    status: int | None
    planted: bool
    slowest_s: float  # until the last of the other ranks had ended or raised
    said: str  # by the other ranks and on standard error
    left: list[str]
    points: dict[str, int]
    problems: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def can_be_apart() -> bool:
    """Whether jobs can have a mount namespace of their own here."""
    if not shutil.which("unshare"):
        return False
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


def used_on_gpus() -> list[int]:
    """Return what is used of each GPU (in steps of 64 MiB)."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(line) // 64 for line in said.splitlines()]


def is_there(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def notes_of(folder: pathlib.Path, rank: int) -> list[dict]:
    """Return what a rank has noted so far."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # a line that is being written
            break
    return found


def run(case: Case, *, timeout_s: float = TIMEOUT_S, limit_s: float = 60.0, by: tuple[str, ...] = ()) -> Outcome:
    """Run a job, by a command, and judge it."""
    with tempfile.TemporaryDirectory(prefix="uncut_faults_") as name:
        folder = pathlib.Path(name)
        for at in "ab":  # where there are no files of matrices, something small
            np.save(folder / f"{at}.npy", np.ones((case.size, case.size) if "node" not in case.scenario else 1))
        (folder / "disk").mkdir()
        spec = {"folder": name, "timeout_s": timeout_s} | dataclasses.asdict(case)
        program = [sys.executable, "-m", "mpi4py", "-m", "tests.helpers.planted"]
        started = [launcher(), "-n", case.ranks, *program]
        if case.by_launcher:
            started = [ROOT / "launch" / "node", *(["--no-gpu"] if case.backend == "host" else []), "-n", case.ranks]
            started += ["--", *program]
        # What a user sets for Open MPI; within a job there is more, of that job's.
        said = ("MPI4PY_", "MPI4PY_" if "OMPI_COMM_WORLD_SIZE" in os.environ else "OMPI_MCA_")
        of_mpi = {key: value for key, value in os.environ.items() if key.startswith(said)}
        about = {planted.SPEC: json.dumps(spec), "XDG_CACHE_HOME": name, **of_mpi}
        if can_be_apart():
            shown = " ".join({str(ROOT), sys.prefix})
            started = ["unshare", "-m", "sh", "-c", _APART, "sh", name, SHM, shown, *by, *started]
        before = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
        used = used_on_gpus() if case.backend == "cuda" else []
        process = begin(started, **about)
        try:
            found = _judged(case, process, folder, before, limit_s)
            until_s = time.monotonic() + SOON_S
            while used and any(map(operator.gt, now := used_on_gpus(), used)) and time.monotonic() < until_s:
                time.sleep(0.2)
            if used and any(map(operator.gt, now, used)):
                found.problems.append(f"left: memory of GPUs, {used} and now {now} times 64 MiB")
            return found
        finally:
            for pid in _processes_of(name):
                os.kill(pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            process.stderr.close()


def _processes_of(name: str) -> list[int]:
    """Return the processes whose environment names the folder of a job."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if name.encode() in path.read_bytes() and is_there(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _judged(case: Case, process: subprocess.Popen, folder: pathlib.Path, before: set[str], limit_s: float) -> Outcome:
    out: list[str] = []
    readers = [
        threading.Thread(target=lambda stream=stream: out.append(stream.read()), daemon=True)
        for stream in (process.stdout, process.stderr)
    ]
    for reader in readers:
        reader.start()
    over: dict[int, float] = {}
    began = time.monotonic()
    planted_s, ended_s = 0.0, 0.0
    pids: dict[int, int] = {}
    while time.monotonic() - began < limit_s + (planted_s and SOON_S):
        now = time.monotonic()
        for rank in range(case.ranks):
            notes = notes_of(folder, rank)
            if notes:
                pids[rank] = notes[0]["pid"]
            planted_s = next((note["s"] for note in notes if note["event"] == "planted"), planted_s)
            raised = [note["s"] for note in notes if note["event"] == "raised"]
            if rank not in over and (raised or (rank in pids and not is_there(pids[rank]))):
                over[rank] = raised[0] if raised else now
        if process.poll() is not None:
            break
        waiting = set(range(case.ranks)) - {case.rank} - over.keys()
        ended_s = 0.0 if waiting else ended_s or now
        if ended_s and now - ended_s > END_S:
            break
        time.sleep(0.02)
    status = process.poll()
    time.sleep(0.1 if status is not None else 0.0)
    # The shell that looks what is left is the last of them.
    processes = [pid for pid in _processes_of(str(folder)) if pid != os.getpid()]
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    for reader in readers:
        reader.join(5)
    notes = {rank: notes_of(folder, rank) for rank in range(case.ranks)}
    raised = [f"[{rank}] {note['error']}" for rank in notes for note in notes[rank] if note["event"] == "raised"]
    left = [f"process {pid}" for pid in processes]
    if (folder / "left").exists():
        left += [line for line in (folder / "left").read_text().splitlines() if LEFT.search(line)]
        left = [line for line in left if not line.startswith("uncut_faults_") and ":" not in line]
    elif not can_be_apart():
        now_there = {*os.listdir("/dev/shm"), *os.listdir("/tmp")}
        left += [one for one in now_there - before if LEFT.search(one) and one != folder.name]
    times = [over.get(rank, float("inf")) - planted_s for rank in notes if rank != case.rank]
    passed = [note["points"] for rank in notes for note in notes[rank] if note["event"] == "passed"]
    found = Outcome(
        case,
        status,
        bool(planted_s),
        max(times, default=0.0),
        "\n".join([*raised, *out]),
        left,
        {name: count for one in reversed(passed) for name, count in one.items()},
    )
    found.problems = _problems(found, notes, raised)
    return found


def _problems(found: Outcome, notes: dict[int, list[dict]], raised: list[str]) -> list[str]:
    case, wrong = found.case, []
    if not case.fault:
        return [f"status {found.status}"] * (found.status != 0) + found.left
    if not found.planted:
        return ["the point was not reached"]
    if case.fault in HARMLESS:
        said = [note["said"] for note in notes[case.rank] if note["event"] == "child"]
        if not said or any("worked" in one for one in said):
            wrong.append(f"the child: {said}")
        if found.status != 0:
            wrong.append(f"status {found.status}")
    else:
        may_work = case.fault in ("full /dev/shm", "shared memory", "host memory", "full disk", "file shrinks")
        if found.status is None:
            wrong.append("the job does not end")
        elif found.status == 0 and not may_work:
            wrong.append("status 0")
        if found.slowest_s > SOON_S and not (may_work and found.status == 0):
            wrong.append(f"others end after {found.slowest_s:.1f} s")
        others = [one for one in raised if not one.startswith(f"[{case.rank}]")]
        if case.scenario == "command":  # of which rank 0 says what has come
            others = [found.said] if others else []
        named = [re.search(rf"ranks? ([\d, -]|and)*\b{case.rank}\b", one) for one in others]
        shares_nothing = case.point in (
            "open: begin",
            "open: at opening a session",
        )  # yet, by which to see who is missing
        if not all(named) and not shares_nothing and case.fault not in OF_ALL:
            wrong.append("the rank is not named")
    return wrong + [f"left: {one}" for one in found.left]
