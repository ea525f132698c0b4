"""Test nodes are separate as those of a cluster are, and what ends a job on them ends all of it: real jobs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

import uncut_mpi as um
from tests.helpers.jobs import ROOT, begin, ended, launcher

TOOL = ROOT / "launch" / "test-nodes"
CANNOT = 77  # its exit status where it cannot run

BARRIERS = """
import time
from mpi4py import MPI

comm = MPI.COMM_WORLD
comm.Barrier()
if comm.rank == 0:
    print("begun", flush=True)
while True:
    request, began, cut = comm.Ibarrier(), time.monotonic(), False
    while not request.Test():
        if comm.rank == 0 and not cut and time.monotonic() - began > 2:
            cut = True
            print(MPI.Get_processor_name(), "waits", flush=True)
            if ABORTS:
                comm.Abort(9)
                time.sleep(60)
    if comm.bcast(cut):
        break
"""


@pytest.fixture(scope="module", autouse=True)
def possible():
    done = subprocess.run([TOOL, "--", "true"], capture_output=True, text=True, timeout=30)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr


def start(*command, options=(), **environment):
    """Start a command among two test nodes."""
    return begin([TOOL, "--share", sys.prefix, *options, "--", *command], **environment)


def start_ranks(count, program, *options):
    return start(launcher(), "-n", count, sys.executable, "-c", program, options=options)


def link(process, change):
    """Change the link of node 1."""
    subprocess.run([TOOL, change, "1", str(process.pid)], check=True, timeout=10)


def test_ranks_of_two_nodes_share_no_memory_process_or_name():
    program = """
import json, os
from mpi4py import MPI
from uncut_mpi.errors import TopologyError
from uncut_mpi.segments import Segment, node_identity
from uncut_mpi.spmd.group import Group

def opens(handle):
    try:
        Segment.open(handle).close()
    except TopologyError as error:
        return str(error)
    return "opened"

comm = MPI.COMM_WORLD
segments = [Segment.create(100, "a test", use_file=use_file) for use_file in (False, True)]
folders = "/dev/shm", "/tmp"
for folder in folders:
    open(f"{folder}/of-{comm.rank}", "x").close()
handles = comm.bcast([one.handle for one in segments])
facts = {
    "name": os.uname().nodename,
    "boot": open("/proc/sys/kernel/random/boot_id").read(),
    "identity": node_identity(),
    "node of": Group(comm).node_of,
    "links": sorted(line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line),
    "spaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc", "uts", "mnt")],
    "sum": comm.allreduce(comm.rank),
    "files": [os.path.exists(f"{folder}/of-0") for folder in folders],
    "opens": [opens(handle) for handle in handles],
}
everyone = comm.gather(facts)
if comm.rank == 0:
    print(json.dumps(everyone))
"""
    status, output, errors = ended(start_ranks(4, program, "--ranks-per-node", 2))
    assert status == 0, errors
    ranks = json.loads(output)
    of = {fact: [rank[fact] for rank in ranks] for fact in ranks[0]}
    assert of["name"] == ["test0", "test0", "test1", "test1"]
    assert of["links"] == 4 * [["eth0", "lo"]]
    assert of["sum"] == 4 * [6]
    assert len(set(of["boot"])) == 1
    here = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "ipc", "uts", "mnt")]
    for ours, *spaces in zip(here, *of["spaces"], strict=True):
        assert spaces[0::2] == spaces[1::2]
        assert len({ours, *spaces}) == 3
    assert of["identity"][0::2] == of["identity"][1::2]
    assert len(set(of["identity"])) == 2
    assert of["node of"] == 4 * [[0, 0, 1, 1]]
    assert of["files"] == [[True, True], [True, True], [False, False], [False, False]]
    assert of["opens"][:2] == 2 * [["opened", "opened"]]
    assert not any("opened" in segments for segments in of["opens"][2:])


def test_a_rank_that_aborts_ends_the_job_with_its_status():
    program = "from mpi4py import MPI; comm = MPI.COMM_WORLD; comm.Abort(7) if comm.rank else comm.Barrier()"
    status, _, errors = ended(start_ranks(2, program))
    assert status == 7, errors


def test_a_link_that_is_cut_is_noticed_by_ranks_and_one_that_is_mended_goes_on():
    process = start_ranks(2, f"ABORTS = False\n{BARRIERS}")
    assert process.stdout.readline() == "begun\n"
    link(process, "--cut")
    assert process.stdout.readline() == "test0 waits\n"
    link(process, "--join")
    assert ended(process)[0] == 0


def test_a_rank_ends_the_job_though_the_other_node_is_cut_off():
    process = start_ranks(2, f"ABORTS = True\n{BARRIERS}")
    assert process.stdout.readline() == "begun\n"
    link(process, "--cut")
    status, _, errors = ended(process)  # the MPI may lose what a rank writes just before
    assert status == 9, errors


def processes(mark):
    """Return the directories of all that have a mark in their environment; of one that has ended it is empty."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ends just now
            if mark.encode() in path.read_bytes():
                found.append(path.parent)
    return found


@pytest.mark.parametrize(
    ("work", "number", "wanted"),
    [
        ("true", None, 3),
        ("sleep 60", signal.SIGINT, 128 + signal.SIGINT),
        ("sleep 60", signal.SIGTERM, 128 + signal.SIGTERM),
        ("sleep 60", signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["by itself", "interrupted", "terminated", "killed"],
)
def test_nothing_is_left_however_a_job_ends(work, number, wanted):
    links, value = set(os.listdir("/sys/class/net")), os.urandom(8).hex()
    job = f"{launcher()} -n 2 bash -c 'echo up; {work}'; setsid sleep 60 & exit 3"
    process = start("bash", "-c", job, UNCUT_MARK=value)
    assert [process.stdout.readline() for _ in range(2)] == 2 * ["up\n"]
    if number is not None:
        assert len(processes(value)) > 8
        process.send_signal(number)
    status, _, errors = ended(process)
    assert status == wanted, errors
    deadline = time.monotonic() + 10  # the system ends them, a moment later
    while (left := processes(value)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []
    assert set(os.listdir("/sys/class/net")) == links
    assert "test-nodes" not in pathlib.Path("/proc/self/mounts").read_text()


def test_a_link_that_is_not_there_is_refused():
    done = subprocess.run([TOOL, "--cut", "1", str(os.getpid())], capture_output=True, text=True, timeout=10)
    assert done.returncode == 1
    assert f"process {os.getpid()} runs no test node 1" in done.stderr


def test_products_over_two_nodes_are_right_and_a_node_that_is_cut_off_is_named_with_its_task():
    program = """
import itertools, sys
import numpy as np
from mpi4py import MPI
import uncut_mpi as um
from uncut_mpi.model.ports import Net

machine = um.Machine.cluster(um.Machine.uniform(1), 2, Net(1.0, 3e-5))
values = np.random.default_rng(7).uniform(-1, 1, (2, 150, 150))
with um.Session(MPI.COMM_WORLD, backend="host", machine=machine, timeout_s=2) as session:
    first = session.rank == 0
    a, b = (session.scatter(one if first else None, um.Layout.rows(), memory="host") for one in values)
    c = session.empty((150, 150), "f64", um.Layout.cols())
    session.gemm(a, b, c)
    found = session.gather(c)
    if first:
        error, bound = np.abs(found - values[0] @ values[1]), np.abs(values[0]) @ np.abs(values[1])
        print("right" if (error <= 154 * 2.3e-16 * bound).all() else "wrong", flush=True)
    source, target = session.empty_host((8000, 8000)), session.empty((8000, 8000), "f64", um.Layout.whole(1))
    if first:
        source.array.fill(1.0)
    for turn in itertools.count():
        session.upload(source, target)
        if first and turn == 0:
            print("begun", flush=True)
"""
    process = start(launcher(), "-n", 2, sys.executable, "-m", "mpi4py", "-c", program)
    assert [process.stdout.readline() for _ in range(2)] == ["right\n", "begun\n"]
    link(process, "--cut")
    status, _, errors = ended(process)
    assert status != 0
    assert "StallError" in errors
    assert re.search(r"rank 0 sends task \d+ to rank 1 on test1|rank 1 awaits task \d+ from rank 0 on test0", errors)


def test_a_calibration_of_two_nodes_measures_what_joins_them():
    words = ["--backend", "host", "--quick", "--output", "-"]
    status, output, errors = ended(start(launcher(), "-n", 2, sys.executable, "-m", "uncut_mpi.calibrate", *words))
    assert status == 0, errors
    machine = um.Machine.from_json(output)
    assert machine.node_of.tolist() == [0, 1]
    ports = {port.name: port.capacity_gb_per_s for port in machine.ports}
    ways = [f"node {node}, adapter 0 {way}" for node in (0, 1) for way in ("sends", "receives")]
    assert len({ports[way] for way in ways}) == 1
    assert {one["kind"] for one in json.loads(output)["net"]} == {"alone", "nodes"}
    # A message over TCP takes longer than a copy within a node.
    assert machine.latency_s[0, 1] > machine.latency_s[0, 0]


def test_a_node_that_is_cut_off_ends_the_measurement_of_the_net_with_the_names_of_both():
    program = """
from mpi4py import MPI
from uncut_mpi.api import net_probe
from uncut_mpi.spmd.group import Group

net_probe._LIMIT_S = 2.0
group = Group(MPI.COMM_WORLD)
net_probe.measure_net(group)
if group.rank == 0:
    print("begun", flush=True)
while True:
    net_probe.measure_net(group)
"""
    process = start(launcher(), "-n", 2, sys.executable, "-m", "mpi4py", "-c", program)
    assert process.stdout.readline() == "begun\n"
    link(process, "--cut")
    status, _, errors = ended(process)
    assert status != 0
    assert "StallError: measuring the net between nodes (test0, test1): a message or a rank did not come" in errors


def test_files_that_only_one_node_has_are_multiplied_by_ranks_of_both_in_turn():
    make = """
import numpy as np

values = np.random.default_rng(0)
for name, shape in (("a", (90, 70)), ("b", (70, 80)), ("c", (90, 80))):
    np.save(f"/tmp/{name}.npy", values.uniform(-1, 1, shape))
"""
    see = "import numpy as np; a, b, c, d, e = (np.load(f'/tmp/{x}.npy') for x in 'abcde'); "
    see += "print(np.abs(d - a @ b).max() < 1e-12 > np.abs(e - a @ b - c / 2).max())"
    python, mpiexec = shlex.quote(sys.executable), shlex.quote(launcher())
    gemm = f"{mpiexec} -n 4 {python} -m uncut_mpi.gemm /tmp/a.npy /tmp/b.npy --backend host"
    commands = (
        f"{mpiexec} -n 1 {python} -c {shlex.quote(make)}",  # on the first node
        f"{gemm} -o /tmp/d.npy",  # ranks 0 and 2 are on the first node, 1 and 3 on the other
        f"{gemm} -c /tmp/c.npy --beta 0.5 --host-memory 1MiB -o /tmp/e.npy",
        f"{mpiexec} -n 1 {python} -c {shlex.quote(see)}",
    )
    status, output, errors = ended(start("bash", "-c", " && ".join(commands)))
    assert status == 0, errors
    assert output.count("PASS\n") == 2
    assert output.endswith("True\n")
