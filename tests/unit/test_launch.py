"""The launchers: what they count, what they blame, when they stop. No MPI or GPU: stand-ins take their place."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import uncut_mpi
from tests.helpers import pretended
from uncut_mpi.segments import node_identity

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


def load(name):
    spec = importlib.util.spec_from_file_location(name, LAUNCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


summarise = load("summarise")
prove = load("prove")  # which imports the one above


def report(folder, rank, **cases):
    """Write the JUnit report of one rank: test name = passed, failed, error, or a reason to skip."""
    body = {
        "passed": "",
        "failed": '<failure message="assert 1 == 2">trace</failure>',
        "error": '<error message="set-up">trace</error>',
    }
    lines = [
        f'<testcase classname="t" name="{name}">'
        + body.get(outcome, f'<skipped type="pytest.skip" message="{outcome}"/>')
        + "</testcase>"
        for name, outcome in cases.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    text = f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>"
    (folder / f"rank{rank}.xml").write_text(text)


class TestSummary:
    @pytest.mark.parametrize(
        ("ranks", "notes", "said", "status"),
        [
            (
                [
                    {
                        "a": "passed",
                        "b": "passed",
                        "c": "no GPU",
                        "d": "no GPU",
                        "e": "other",
                        "f": "failed",
                        "g": "error",
                    }
                ],
                {"problem": "exit status 1"},
                ["      2  no GPU", "      1  other", "2 passed, 2 failed, 3 skipped"],
                1,
            ),
            ([{"a": "passed", "b": "why not"}], {}, ["1 passed, 0 failed, 1 skipped"], 0),
            (
                [{"a": "passed", "b": "passed"}, {"a": "failed", "b": "passed"}],
                {},
                ["1 passed, 1 failed, 0 skipped"],
                1,
            ),
            ([{"a": "passed"}], {"problem": "ended by force"}, ["ended by force", "1 passed, 1 failed, 0 skipped"], 1),
            ([{"a": "passed"}], {"rank1.xml": "<testsuites><t"}, ["rank1.xml", "1 passed, 1 failed, 0 skipped"], 1),
            ([{}], {}, ["no test was run", "0 passed, 1 failed, 0 skipped"], 1),
            ([{"a": "no reason to run"}], {}, ["0 passed, 0 failed, 1 skipped"], 1),
            ([], {"skipped": "no GPU here"}, ["      1  stage x: no GPU here", "0 passed, 0 failed, 1 skipped"], 1),
            ([], {"seconds": "1"}, ["1 passed, 0 failed, 0 skipped"], 0),  # a linter is one check
            ([], {"seconds": "1", "problem": "exit status 1"}, ["0 passed, 1 failed, 0 skipped"], 1),
        ],
    )
    def test_a_stage_is_counted_by_its_tests_their_worst_rank_and_what_became_of_it(
        self, tmp_path, ranks, notes, said, status
    ):
        for rank, cases in enumerate(ranks):
            report(tmp_path / "x", rank, **cases)
        (tmp_path / "x").mkdir(exist_ok=True)
        for name, text in notes.items():
            (tmp_path / "x" / name).write_text(f"{text}\n")
        lines, found = summarise.summarise([summarise.read_stage(tmp_path / "x")])
        assert (lines[-1], found) == (said[-1], status)
        assert all(any(words in line for line in lines) for words in said), lines

    def test_stages_are_added_up_and_none_at_all_is_a_failure(self, tmp_path, capsys):
        lines, status = summarise.summarise([])
        assert (lines[-1], status) == ("0 passed, 0 failed, 0 skipped", 1)
        (tmp_path / "gpu").mkdir()
        (tmp_path / "gpu" / "skipped").write_text("no GPU on this machine\n")
        for outcome, status, last in (("failed", 1, "0 passed, 1 failed"), ("passed", 0, "1 passed, 0 failed")):
            report(tmp_path / "unit", 0, a=outcome)
            assert summarise.main([str(tmp_path)]) == status
            assert capsys.readouterr().out.splitlines()[-1] == f"{last}, 1 skipped"


class TestBlame:
    def test_the_rank_that_reported_a_failure_is_named_and_quoted(self, tmp_path):
        (tmp_path / "rank0.log").write_text("+++ Timeout +++\n")
        (tmp_path / "rank1.log").write_text("passed here, but\nrank 2 failed\nFAILED tests/mpi/test_a.py::test_x\n")
        (tmp_path / "rank2.log").write_text("E   assert 3 == 4\nFAILED tests/mpi/test_a.py::test_x - assert\n")
        lines = summarise.blame(tmp_path)
        assert lines[0].startswith("rank 2 of ")
        assert "E   assert 3 == 4" in lines

    def test_a_rank_that_ended_the_job_is_named(self, tmp_path):
        (tmp_path / "rank0.log").write_text("..")
        (tmp_path / "rank1.log").write_text("\nrank 1 failed in call of tests/mpi/test_a.py::test_x; they wait\nwhy\n")
        lines = summarise.blame(tmp_path)
        assert lines[0].startswith("rank 1 of ")
        assert lines[-1] == "why"

    def test_of_a_hanging_job_the_rank_that_stands_elsewhere_is_marked(self, tmp_path):
        for rank, line in ((0, 15), (1, 15), (2, 14)):
            (tmp_path / f"rank{rank}.log").write_text(
                "..Timeout (0:00:50)!\nThread 0x1 (most recent call first):\n"
                '  File "/v/lib/python3.11/site-packages/x.py", line 1 in wait\n'
                f'  File "/r/tests/test_a.py", line {line} in test_h\n'
                '  File "/r/tests/other.py", line 3 in outer\n'
            )
        marked = [line for line in summarise.blame(tmp_path) if "differs" in line]
        assert len(marked) == 1
        assert re.search(r"rank 2: .*test_a.py:14 in test_h", marked[0])

    def test_a_rank_that_noted_nothing_is_said_to_be_silent(self, tmp_path):
        (tmp_path / "rank0.log").write_text('Timeout (0:00:50)!\n  File "/r/tests/test_a.py", line 1 in test_h\n')
        (tmp_path / "rank1.log").write_text("")
        assert "  not heard of: rank 1" in summarise.blame(tmp_path)

    def test_where_no_rank_says_why_the_end_of_each_is_quoted(self, tmp_path):
        (tmp_path / "rank0.log").write_text("one\ntwo\nthree\n.... [100%]")
        (tmp_path / "rank0.xml").write_text("<testsuites/>")
        (tmp_path / "rank1.log").write_text("")
        lines = summarise.blame(tmp_path)
        assert lines[1:] == [
            "--- rank 0 ---",
            "two",
            "three",
            ".... [100%]",
            "--- rank 1, which wrote no report ---",
            "(nothing)",
        ]


def executable(path, text):
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


def run(command, path, **environment):
    return subprocess.run(
        command,
        env={"PATH": path, "HOME": os.environ.get("HOME", "/"), **environment},
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )


def write(folder, **files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def link(path, to):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(to)


class Nodes:
    """Pretended nodes, each a folder with what the kernel and nvidia-smi would say there."""

    def __init__(self, folder):
        self.folder = folder
        self.cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))

    def gpu(self, node, bus, way, *, domain=0, cores=None):
        """Add a GPU at the end of a way of bridges."""
        device = write(
            self.folder / node / "sys/devices" / way / f"0000:{bus}",
            numa_node=domain,
            local_cpulist=self.cores if cores is None else cores,
        )
        link(self.folder / node / "sys/bus/pci/devices" / f"0000:{bus}", device)
        gpus = self.folder / node / "gpus"
        listed = gpus.read_text() if gpus.exists() else ""
        gpus.write_text(f"{listed}{listed.count('GPU-')}, GPU-{node}-{bus}, 00000000:{bus.upper()}\n")

    def infiniband(self, node, name, way, *, domain=0, rate="200 Gb/sec (4X HDR)", state="4: ACTIVE", subnet="fe80"):
        """Add an adapter of InfiniBand."""
        device = write(self.folder / node / "sys/devices" / way / name, numa_node=domain)
        card = self.folder / node / "sys/class/infiniband" / name
        write(
            card, **{"ports/1/state": state, "ports/1/rate": rate, "ports/1/gids/0": subnet + ":0000:0000:0000:1:2:3:4"}
        )
        link(card / "device", device)

    def ethernet(self, node, name, way, *, domain=0, speed="10000", state="up", net="0000000A", master=False):
        """Add an adapter of Ethernet, whose device knows its NUMA domain by the one above it."""
        device = write(self.folder / node / "sys/devices" / way / name, numa_node=domain) / "virtio1"
        device.mkdir()
        card = write(self.folder / node / "sys/class/net" / name, operstate=state, speed=speed)
        link(card / "device", device)
        if master:
            link(card / "master", device)
        route = self.folder / node / "proc/net/route"
        route.parent.mkdir(parents=True, exist_ok=True)
        with route.open("a") as routes:
            print("Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT", file=routes)
            print(name, "00000000 0100000A 0003 0 0 0 00000000 0 0 0", file=routes)
            print(name, net, "00000000 0001 0 0 0 00FFFFFF 0 0 0", file=routes)

    def says(self, name, /, **facts):
        """Have a node say something else of itself."""
        write(self.folder / name, says=json.dumps(facts))

    def two(self, node, count=2):
        """Make a node with so many GPUs, two unless said otherwise, each with an adapter beside it."""
        for number, name in enumerate("abc"[:count]):
            self.gpu(node, f"{0x1A + 17 * number:02x}:00.0", f"pci{name}/0000:{name}0:01.0")
            self.infiniband(node, f"mlx5_{number}", f"pci{name}/0000:{name}0:01.0")


@pytest.fixture
def nodes(tmp_path):
    """Pretended nodes, and tools that find them; `here` is the one that launches, with two GPUs."""
    found = Nodes(tmp_path / "nodes")
    found.tools = tmp_path / "tools"
    found.tools.mkdir()
    stand_in = f"exec {sys.executable} -m tests.helpers.pretended"
    for name in ("python", "srun", "scontrol"):
        executable(found.tools / name, f'{stand_in} {name} "$@"\n')
    executable(
        found.tools / "mpiexec",
        f'[[ $1 != --version ]] || {{ echo "${{MPI:-HYDRA}}"; exit; }}\n{stand_in} mpiexec "$@"\n',
    )
    executable(found.tools / "nvidia-smi", f"cat {found.folder}/${{NODE:-here}}/gpus\n")
    found.two("here")
    return found


@pytest.fixture
def node(nodes):
    """Run launch/node on pretended nodes."""

    def start(*arguments, **environment):
        environment = {"VIRTUAL_ENV": "/none", "PRETENDED": str(nodes.folder), **environment}
        return run([str(LAUNCH / "node"), *arguments], f"{nodes.tools}:/usr/bin:/bin", **environment)

    return start


class TestNode:
    def test_its_help_says_how_it_is_used(self, node):
        for flag in ("-h", "--help"):
            done = node(flag)
            assert (done.returncode, done.stderr) == (0, "")
            assert "launch/node [-n RANKS]" in done.stdout
            for option in ("--hostfile FILE", "--slurm", "--no-gpu", "--dry-run"):
                assert option in done.stdout

    def test_starts_one_rank_per_gpu_and_prints_the_map(self, node):
        done = node("--", "sh", "-c", "echo program $MPI_LOCALRANKID $CUDA_DEVICE_MAX_CONNECTIONS $0", "x")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["program 0 32 x", "program 1 32 x"]
        assert "rank 0 -> here, GPU 0 (0000:1a:00.0), cores" in done.stderr
        assert "rank 1 -> here, GPU 1 (0000:2b:00.0), cores" in done.stderr

    def test_passes_the_programs_own_options_through(self, node):
        done = node("-n", "1", "--", "echo", "-n", "5", "--dry-run", "a b")
        assert done.stdout == "5 --dry-run a b"

    @pytest.mark.parametrize(
        ("arguments", "environment", "said"),
        [
            (["-n", "3", "--", "echo", "started"], {}, "3 ranks for 2 GPUs"),
            (["-n", "-1", "--", "echo", "started"], {}, "not a number of ranks"),
            (["--bogus", "--", "echo", "started"], {}, "unknown argument '--bogus'"),
            (["--", "echo", "started"], {"NO_RANK": "1"}, "does not tell its ranks their number"),
            (["-n", "2", "--", "echo", "started"], {"CUDA_VISIBLE_DEVICES": "1"}, "2 ranks for 1 GPUs"),
            (["--", "echo", "started"], {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7"),
            (["--", "echo", "started"], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES hides all GPUs"),
            (["--", "/none/started"], {}, "cannot start /none/started"),
            (["--slurm", "--", "echo", "started"], {}, "--slurm outside a job of Slurm"),
            ([], {}, "no program was given"),
            (["--prove", "--", "echo", "started"], {}, "--prove runs programs of its own"),
        ],
    )
    def test_what_cannot_work_is_said_before_anything_starts(self, node, arguments, environment, said):
        done = node(*arguments, **environment)
        assert done.returncode == 1
        assert said in done.stderr
        assert "started" not in done.stdout

    @pytest.mark.parametrize("mask", ["1", "GPU-here-2b"])
    def test_a_mask_limits_the_gpus(self, node, mask):
        one = node("--", "echo", "started", CUDA_VISIBLE_DEVICES=mask)
        assert "rank 0 -> here, GPU 0 (0000:2b:00.0)" in one.stderr

    def test_stops_without_a_driver(self, node, nodes):
        (nodes.tools / "nvidia-smi").unlink()
        done = node("--", "echo", "started")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no nvidia-smi" in done.stderr
        assert "--no-gpu" in done.stderr

    def test_without_gpus_ranks_are_dealt_to_numa_domains(self, node, nodes):
        for domain, cores in ((0, "0"), (1, ""), (2, "1")):  # the second is memory alone
            write(nodes.folder / f"here/sys/devices/system/node/node{domain}", cpulist=cores)
        done = node("--no-gpu", "--dry-run", "--", "echo")
        ranks = [line for line in done.stdout.splitlines() if " -> " in line]
        assert [re.search(r"no GPU, cores (.), NUMA domain (.)", line).groups() for line in ranks] == [
            ("0", "0"),
            ("1", "2"),
        ]
        assert node("--no-gpu", "-n", "5", "--", "echo", "started").stdout.count("started") == 5

    def test_a_rank_is_bound_to_the_cores_near_its_gpu_that_it_may_use(self, node, nodes):
        mine = min(os.sched_getaffinity(0))
        nodes.gpu("here", "3c:00.0", "pcic", cores=f"{mine},4000-4001")
        nodes.gpu("here", "4d:00.0", "pcid", cores="4000")
        program = "import os; print(sorted(os.sched_getaffinity(0)))"
        done = node("--", "python", "-c", program)
        everything = str(sorted(os.sched_getaffinity(0)))
        assert done.stdout.splitlines() == [everything, everything, f"[{mine}]", everything]
        assert f"rank 2 may use 1 of cores {mine},4000-4001" in done.stderr
        assert "rank 3 may use 0 of cores 4000" in done.stderr


def mapped(done):
    """Return rank, node, GPU, cores, NUMA domain, adapter and settings of each line of a map."""
    pattern = r"rank (\d+) -> (\w+), (?:GPU (\d)|no GPU).*, cores (\S+), NUMA domain (\w+), adapter (\S+) \((.*)\)$"
    return [re.search(pattern, line).groups() for line in done.stdout.splitlines() if " -> " in line]


class TestPlaces:
    def test_each_gpu_gets_the_cores_and_the_adapter_of_its_socket(self, node, nodes):
        for name in ("a", "b"):
            for socket in (0, 1):
                for number in range(3):
                    cores = f"{2 * socket}-{2 * socket + 1}"
                    nodes.gpu(name, f"{socket}{number}:00.0", f"pci{socket}/x/{number}", domain=socket, cores=cores)
                nodes.infiniband(name, f"mlx5_{socket}", f"pci{socket}/y", domain=socket)
            nodes.infiniband(name, "storage", "pci0/x/0", rate="100 Gb/sec (2X HDR)")
            nodes.infiniband(name, "unplugged", "pci0/x/0", state="1: DOWN")
            nodes.ethernet(name, "eth0", "pci0/z")
        hosts = write(nodes.folder, hosts="a\nb")
        done = node("--hostfile", f"{hosts}/hosts", "--dry-run", "--", "echo")
        assert done.returncode == 0, done.stderr
        assert mapped(done) == [
            (
                str(6 * index + gpu), name, str(gpu), f"{2 * (gpu // 3)}-{2 * (gpu // 3) + 1}", str(gpu // 3),
                f"mlx5_{gpu // 3}:1", f"UCX_NET_DEVICES=mlx5_{gpu // 3}:1,eth0 FI_VERBS_DEVICE_NAME=mlx5_{gpu // 3}",
            )
            for index, name in enumerate("ab")
            for gpu in range(6)
        ]  # fmt: skip

    def test_in_a_domain_the_fewest_bridges_decide_and_of_equals_each_is_used(self, node, nodes):
        for number in range(4):
            nodes.gpu("a", f"1{number}:00.0", f"pci0/switch{number // 2}/port{number}")
        for number in range(4):  # the first two are at the second switch
            nodes.infiniband("a", f"mlx5_{number}", f"pci0/switch{1 - number // 2}/port{number + 4}")
        nodes.infiniband("a", "mlx5_a", "pci0/switch0", domain=1)
        hosts = write(nodes.folder, hosts="a")
        done = node("--hostfile", f"{hosts}/hosts", "--dry-run", "--", "echo")
        assert [adapter for *_, adapter, _ in mapped(done)] == ["mlx5_2:1", "mlx5_3:1", "mlx5_0:1", "mlx5_1:1"]

    def test_of_ethernet_those_with_an_address_of_one_network_are_bound(self, node, nodes):
        for name in ("a", "b"):
            nodes.gpu(name, "1a:00.0", "pci1", domain=1)
            nodes.ethernet(name, "eth0", "pci1")
            nodes.ethernet(name, "eth1", "pci1", domain=1, state="down")
            nodes.ethernet(name, "eth2", "pci1", domain=1, master=True)
            nodes.ethernet(name, "eth3", "pci1", domain=1, speed="1000")
            nodes.ethernet(name, "eth4", "pci1/bridge", domain=1)
        hosts = write(nodes.folder, hosts="a\nb")
        done = node("--hostfile", f"{hosts}/hosts", "--dry-run", "--", "echo")
        bound = "UCX_NET_DEVICES=eth4 FI_TCP_IFACE=eth4 OMPI_MCA_btl_tcp_if_include=eth4"
        assert [place[4:] for place in mapped(done)] == 2 * [("1", "eth4", bound)]

    @pytest.mark.parametrize("kind", ["other subnets", "other networks", "no address", "one node"])
    def test_adapters_that_may_not_reach_each_other_are_left_to_the_mpi(self, node, nodes, kind):
        for name, subnet, net in (("a", "fe80", "0000000A"), ("b", "fec0", "0001000A")):
            nodes.gpu(name, "1a:00.0", "pci0")
            if kind in ("other subnets", "one node"):
                nodes.infiniband(name, "mlx5_0", "pci0", subnet=subnet)
            else:
                nodes.ethernet(name, "eth0", "pci0", net=net if kind == "other networks" else "00000000")
        hosts = write(nodes.folder, hosts="a" if kind == "one node" else "a\nb")
        done = node("--hostfile", f"{hosts}/hosts", "--dry-run", "--", "echo")
        assert {place[6] for place in mapped(done)} == {"not bound"}, done.stderr

    def test_what_the_kernel_does_not_say_is_not_bound(self, node, nodes):
        (nodes.folder / "bare").mkdir()
        write(nodes.folder, hosts="bare", **{"bare/gpus": "0, GPU-x, 00000000:1A:00.0"})
        done = node("--hostfile", f"{nodes.folder}/hosts", "--dry-run", "--", "echo")
        assert "GPU 0 (0000:1a:00.0), cores not bound, NUMA domain unknown, adapter unknown (not bound)" in done.stdout


class TestHostfile:
    @pytest.fixture
    def job(self, node, nodes):
        """Run launch/node on two nodes of two GPUs, whose adapters are of one subnet."""
        nodes.two("a")
        nodes.two("b")

        def start(*arguments, hosts="a\nb", **environment):
            write(nodes.folder, hosts=hosts)
            return node("--hostfile", f"{nodes.folder}/hosts", *arguments, **environment)

        return start

    @pytest.fixture
    def told(self, nodes):
        """Return what launchers were told, without what starts Python."""
        return lambda: (nodes.folder / "told").read_text().splitlines()

    def test_ranks_fill_one_node_after_the_other_and_take_their_places(self, job):
        program = "echo $PMI_RANK $NODE $MPI_LOCALRANKID $UCX_NET_DEVICES $FI_VERBS_DEVICE_NAME $CUDA_DEVICE_ORDER"
        done = job("--", "sh", "-c", program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{rank} {name} {local} mlx5_{local}:1 mlx5_{local} PCI_BUS_ID"
            for rank, (name, local) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
        ]
        assert "rank 3 -> b, GPU 1 (0000:2b:00.0)" in done.stderr

    def test_what_the_user_has_set_stands(self, job):
        done = job("--", "sh", "-c", "echo $UCX_NET_DEVICES $FI_VERBS_DEVICE_NAME", UCX_NET_DEVICES="all")
        assert done.stdout.splitlines() == 2 * ["all mlx5_0", "all mlx5_1"]

    @pytest.mark.parametrize(
        ("hosts", "arguments", "wanted"),
        [
            ("a\nb", [], "a:2,b:2"),
            ("# mine\n\na:1  # one\nb:2", [], "a:1,b:2"),
            ("a slots=2\nb slots = 1", [], "a:2,b:1"),
            ("a\nb\na\nb", [], "a:2,b:2"),
            ("a\nb", ["-n", "3"], "a:2,b:1"),
            ("a\nb", ["-n", "2"], "a:2"),
        ],
    )
    def test_a_dry_run_prints_the_command_and_starts_nothing(self, job, told, hosts, arguments, wanted):
        done = job(*arguments, "--dry-run", "--", "echo", "a b", hosts=hosts)
        assert done.returncode == 0, done.stderr
        command = done.stdout.splitlines()[-1]
        assert command.startswith(
            "env CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_DEVICE_ORDER=PCI_BUS_ID OMP_NUM_THREADS=1 PATH="
        )
        assert f"mpiexec -n {len(mapped(done))} -bind-to none -hosts {wanted} " in command
        assert command.endswith(f"{LAUNCH}/ranks.py --as-rank echo 'a b'")
        assert len(mapped(done)) == sum(int(part[2:]) for part in wanted.split(","))
        assert [line.split()[:6] for line in told()] == [["mpiexec", "-n", "2", "-bind-to", "none", "-hosts"]]
        assert all("--answer" in line for line in told())

    def test_what_a_dry_run_prints_starts_the_job(self, job, nodes):
        command = job("--dry-run", "--", "sh", "-c", "echo program $PMI_RANK").stdout.splitlines()[-1]
        path = f"{nodes.tools}:/usr/bin:/bin"
        done = run(["sh", "-c", command], path, PRETENDED=str(nodes.folder))
        assert done.stdout.splitlines() == [f"program {rank}" for rank in range(4)], done.stderr

    def test_open_mpi_is_told_in_its_own_words(self, job, told):
        done = job("--", "sh", "-c", "echo $OMPI_COMM_WORLD_RANK $NODE", MPI="mpiexec (Open MPI) 5.0.11", UCX_TLS="all")
        assert done.stdout.splitlines() == ["0 a", "1 a", "2 b", "3 b"], done.stderr
        first, last = told()
        assert first.startswith(
            "mpiexec -n 2 --bind-to none --host a:1,b:1 --map-by slot -x CUDA_DEVICE_MAX_CONNECTIONS "
        )
        assert last.startswith(
            "mpiexec -n 4 --bind-to none --host a:2,b:2 --map-by slot -x CUDA_DEVICE_MAX_CONNECTIONS "
        )
        for name in ("PATH", "VIRTUAL_ENV", "UNCUT_PLACES", "UCX_TLS", "OMP_NUM_THREADS"):
            assert f" -x {name} " in last

    def test_nodes_with_different_numbers_of_gpus_are_used(self, job, nodes):
        nodes.two("c", 3)
        done = job("--", "sh", "-c", "echo $NODE", hosts="a\nc")
        assert done.stdout.split() == ["a", "a", "c", "c", "c"]
        assert "not as many ranks on all nodes: a 2, c 3" in done.stderr

    def test_containers_with_gpus_of_their_own_are_nodes(self, job, nodes):
        nodes.says("a", node="boot/pid:1")
        nodes.says("b", node="boot/pid:2")
        assert job("--", "sh", "-c", "echo $NODE").stdout.split() == ["a", "a", "b", "b"]

    def test_a_thread_level_that_serves_one_thread_is_said(self, job, nodes):
        nodes.says("b", threads=2)
        done = job("--", "echo", "started")
        assert done.stdout.count("started") == 4
        assert "thread level serialized" in done.stderr

    @pytest.mark.parametrize(("otherwise", "place"), [("hosts", "process 0 of b"), ("local", "process 1 of a")])
    def test_ranks_that_are_elsewhere_than_the_map_says_stop(self, job, otherwise, place):
        done = job("--", "echo", "started", DEALS_OTHERWISE=otherwise)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"rank 0 was to be process 0 of a, and is {place}" in done.stderr

    @pytest.mark.parametrize(
        ("says", "words"),
        [
            ({"node": "a"}, ["a and b are one node", "name it once"]),
            ({"places": [{"uuid": "GPU-a-2b:00.0"}]}, ["a and b both see GPU GPU-a-2b:00.0", "docker --gpus"]),
            ({"threads": 0}, ["thread level single (MPICH 5)", "MPI4PY_RC_THREAD_LEVEL"]),
            ({"versions": {"uncut_mpi": "2", "MPI": "MPICH 5"}}, ["versions of uncut_mpi: 1 (a) and 2 (b)"]),
            ({"versions": {"uncut_mpi": "1", "MPI": "MPICH 4"}}, ["versions of MPI: MPICH 5 (a) and MPICH 4 (b)"]),
            ({"why": "nvidia-smi lists no GPU"}, ["b: nvidia-smi lists no GPU"]),
        ],
    )
    def test_nodes_that_make_no_job_are_refused_with_what_to_do(self, job, nodes, told, says, words):
        nodes.says("b", **({"host": "b"} | says))
        done = job("--", "echo", "started")
        assert (done.returncode, done.stdout) == (1, "")
        assert [word for word in words if word not in done.stderr] == []
        assert len(told()) == 1

    def test_hosts_that_are_not_reached_are_named(self, job, nodes):
        write(nodes.folder, **{"b/dead": ""})
        done = job("--", "echo", "started")
        assert (done.returncode, done.stdout) == (1, "")
        for words in ("not reached: b (of a, b)", "ssh without a password", "no route to b"):
            assert words in done.stderr

    @pytest.mark.parametrize(("limit", "said"), [("1", "within 1 s (UNCUT_LAUNCH_TIMEOUT_S)"), ("50", "it broke")])
    def test_nodes_on_which_mpi_does_not_start_are_told_from_those_that_are_not_reached(self, job, nodes, limit, said):
        waits = "exec sleep 60" if limit == "1" else "echo it broke >&2; exit 3"
        executable(
            nodes.tools / "mpiexec",
            f'case " $* " in *" --version "*) echo HYDRA ;; *" --answer "*) {waits} ;; esac\n',
        )
        done = job("--", "echo", "started", UNCUT_LAUNCH_TIMEOUT_S=limit)
        assert (done.returncode, done.stdout) == (1, "")
        for words in ("all nodes are reached, but MPI did not get through on a, b", str(ROOT), said):
            assert words in done.stderr

    @pytest.mark.parametrize(
        ("hosts", "said"),
        [
            ("", "names no host"),
            ("a 2", "'a 2' is not HOST, HOST:RANKS or HOST slots=RANKS"),
            ("a:0", "'a:0' is not HOST"),
            ("a:3\nb", "3 ranks on 2 GPUs of a: one rank needs one GPU. Ask for at most 2"),
            ("a\na:1\na\nb", "3 ranks on 2 GPUs of a"),
        ],
    )
    def test_a_hostfile_that_cannot_be_is_refused(self, job, hosts, said):
        done = job("--", "echo", "started", hosts=hosts)
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr

    def test_a_hostfile_that_is_not_there_is_refused(self, node):
        done = node("--hostfile", "/none/hosts", "--", "echo")
        assert done.returncode == 1
        assert "--hostfile /none/hosts: No such file" in done.stderr

    def test_what_a_thousand_ranks_are_told_fits_into_their_environment(self):
        ranks = pretended.load_ranks("here")
        place = {
            "cores": "0-27,56-83",
            "settings": {"UCX_NET_DEVICES": "mlx5_0:1,eth0", "FI_VERBS_DEVICE_NAME": "mlx5_0"},
        }
        table = ranks.table_of(
            [({"host": f"node{index:04}.cluster", "places": 8 * [place]}, 8) for index in range(128)]
        )
        assert len(table) < 16_000
        assert json.loads(table)["nodes"][127] == ["node0127.cluster", 8, 0]

    def test_a_node_says_which_it_is_and_what_mpi_offers_there(self):
        pytest.importorskip("mpi4py")
        done = run([sys.executable, str(LAUNCH / "ranks.py"), "--answer", "--no-gpu"], os.environ["PATH"])
        assert done.returncode == 0, done.stderr
        (facts,) = json.loads(done.stdout.partition("nodes: ")[2])
        assert (facts["node"], facts["host"]) == (node_identity(), platform.node())
        assert facts["versions"]["uncut_mpi"] == uncut_mpi.__version__
        assert facts["versions"]["MPI"].startswith(("MPICH", "Open MPI", "Intel", "CRAY", "MVAPICH"))
        assert facts["threads"] in range(4)
        assert facts["places"]

    def test_nodes_say_over_mpi_what_they_have(self, tmp_path):
        # With the mpiexec that is there: two names of this node, which it takes for two.
        if not shutil.which("mpiexec"):
            pytest.skip("no mpiexec here")
        write(tmp_path, hosts="one\nother")
        executable(tmp_path / "shell", 'while [[ $1 == -* ]]; do shift; done; shift; exec bash -c "$*"\n')
        shells = dict.fromkeys(
            ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"), f"{tmp_path}/shell"
        )
        command = [str(LAUNCH / "node"), "--no-gpu", "--hostfile", f"{tmp_path}/hosts", "--", "echo", "started"]
        done = run(command, os.environ["PATH"], VIRTUAL_ENV=os.environ.get("VIRTUAL_ENV", "/none"), **shells)
        assert (done.returncode, done.stdout) == (1, "")
        assert "one and other are one node" in done.stderr


@pytest.fixture
def batch(nodes, tmp_path):
    """Run launch/slurm.sbatch as Slurm does, a copy of it elsewhere, on the nodes of `nodes`."""
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())

    def start(*arguments, ranks=2, hosts="here", **environment):
        given = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": hosts,
            "SLURM_NTASKS_PER_NODE": str(ranks),
            "VIRTUAL_ENV": "/none",
            "PRETENDED": str(nodes.folder),
        }
        return run(["bash", str(copy), *arguments], f"{nodes.tools}:/usr/bin:/bin", **{**given, **environment})

    return start


class TestSlurm:
    def test_ranks_are_started_as_launch_node_starts_them(self, batch, nodes):
        program = (
            "echo program $SLURM_LOCALID $CUDA_DEVICE_MAX_CONNECTIONS $OMP_NUM_THREADS ${SLURM_NTASKS_PER_NODE:-0} $0"
        )
        done = batch("sh", "-c", program, "x y")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["program 0 32 1 0 x y", "program 1 32 1 0 x y"]
        asked, started = (nodes.folder / "told").read_text().splitlines()
        options = "srun --mpi=pmi2 --cpu-bind=none --kill-on-bad-exit=1 --nodes=1"
        assert asked.startswith(f"{options} --ntasks=1 --nodelist=here --distribution=plane=1 ")
        assert started.startswith(f"{options} --ntasks=2 --nodelist=here --distribution=plane=2 ")
        assert f"{LAUNCH}/ranks.py --as-rank sh -c echo program" in started
        assert "rank 1 -> here, GPU 1 (0000:2b:00.0), cores" in done.stderr

    @pytest.mark.parametrize(
        ("options", "wanted"), [([], ["a 0", "a 1", "b 0", "b 1"]), (["-n", "3", "--"], ["a 0", "a 1", "b 0"])]
    )
    def test_several_nodes_are_one_job_with_one_map(self, batch, nodes, options, wanted):
        nodes.two("a")
        nodes.two("b")
        done = batch(*options, "sh", "-c", "echo $NODE $SLURM_LOCALID", hosts="a,b")
        assert done.stdout.splitlines() == wanted, done.stderr
        assert done.stderr.count(" -> ") == len(wanted)

    def test_the_report_is_one_file(self):
        assert "#SBATCH --output=uncut_mpi-%j.txt\n" in (LAUNCH / "slurm.sbatch").read_text()

    def test_srun_speaks_as_the_mpi_does_or_as_it_is_told(self, batch, nodes):
        for environment, wanted in (({"SLURM_MPI_TYPE": "cray"}, "cray"), ({"MPI": "mpiexec Open MPI 5.0.11"}, "pmix")):
            assert f"--mpi={wanted} " in batch("--dry-run", "--", "true", **environment).stdout

    @pytest.mark.parametrize(
        ("arguments", "changes", "said"),
        [
            ([], {}, "no program was given"),
            (["true"], {"ranks": 3}, "3 ranks on 2 GPUs"),
            (["true"], {"SLURM_SUBMIT_DIR": "/"}, "submit this file in the checkout"),
            (["true"], {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7"),
            (["true"], {"SLURM_GPUS_PER_TASK": "1"}, "SLURM_GPUS_PER_TASK=1: each rank would see one GPU"),
            (["true"], {"SLURM_GPU_BIND": "closest"}, "ask with --gpus-per-node"),
            (["true"], {"hosts": "a,c", "ranks": 0}, "a 2, c 3"),
            (["true"], {"hosts": "a,c", "ranks": 0}, "sbatch --ntasks-per-node=2"),
        ],
    )
    def test_what_cannot_work_is_said_before_anything_starts(self, batch, nodes, arguments, changes, said):
        nodes.two("a")
        nodes.two("c", 3)
        done = batch(*arguments, **changes)
        assert done.returncode == 1
        assert done.stdout == ""
        assert said in done.stderr


class TestProve:
    @pytest.fixture
    def proof(self, tmp_path, monkeypatch):
        """Run a proof of steps of our own: name, limit (s), what a shell does."""

        def start(*steps):
            def found(text):
                if "nothing" in text:
                    raise ValueError("proves nothing")
                return text.splitlines()

            made = [prove.Step(name, limit_s, ["bash", "-c", does], found) for name, limit_s, does in steps]
            monkeypatch.setattr(prove, "make_steps", lambda *about: made)
            status = prove.main(argparse.Namespace(prove=str(tmp_path / "proof")), [])
            lines = (tmp_path / "proof/report.txt").read_text().splitlines()
            table = [line.split(maxsplit=3) for line in lines[4 : 4 + len(steps)]]
            return status, lines, {name: (state, said) for name, state, _, said in table}

        return start

    def test_each_step_has_a_line_and_what_it_found_and_said_is_kept(self, proof, tmp_path):
        status, lines, table = proof(("map", 9, "echo all here; echo rank 0"), ("b", 9, "echo fast; echo slow >&2"))
        assert (status, lines[0]) == (0, "uncut_mpi on the nodes of this job: all steps passed")
        assert lines[1].startswith(f"versions: python {platform.python_version()}, uncut-mpi ")
        assert table == {"map": ("passed", "all here"), "b": ("passed", "fast")}
        assert lines[lines.index("map:") + 1] == "  rank 0"
        assert (tmp_path / "proof/b.txt").read_text() == "fast\nslow\n"

    @pytest.mark.parametrize(
        ("does", "said"),
        [
            ("echo broken; exit 3", "exit status 3; see x.txt"),
            ("echo it waits; exec sleep 60", "ended by force after 1 s; see x.txt"),
            ("echo nothing", "ValueError: proves nothing; see x.txt"),
        ],
    )
    def test_a_step_that_fails_is_named_with_its_words_and_the_others_are_run(self, proof, does, said):
        status, lines, table = proof(("map", 9, "echo all here"), ("x", 1, does), ("y", 9, "echo fine"))
        assert (status, lines[0][-14:]) == (1, "1 STEPS FAILED")
        assert table["x"] == ("FAILED", said)
        assert lines[lines.index("x:") + 1] == f"  {does.partition('echo ')[2].partition(';')[0]}"
        assert any(line.startswith("y ") and " passed " in line for line in lines)

    def test_where_nodes_answer_no_more_the_rest_is_not_run(self, proof, tmp_path):
        gone = tmp_path / "gone"
        steps = ("map", 9, f"echo here; [[ ! -e {gone} ]]"), ("x", 9, f"touch {gone}; exit 1"), ("y", 9, f"rm {gone}")
        status, lines, _ = proof(*steps)
        assert status == 1
        assert gone.exists()
        assert [line.split()[:2] for line in lines[5:8]] == [["x", "FAILED"], ["map-again", "FAILED"], ["y", "not"]]
        assert "the nodes do not answer" in lines[7]

    def test_of_what_is_left_of_the_time_a_step_gets_no_more(self, proof, monkeypatch):
        monkeypatch.setattr(prove, "LIMIT_S", 1)
        status, _, table = proof(("map", 9, "exec sleep 60"), ("y", 9, "echo fine"))
        assert (status, table["map"][1]) == (1, "ended by force after 1 s; see map.txt")

    def test_slurm_runs_it_by_launch_node_on_all_nodes_of_the_job(self, batch, nodes, tmp_path):
        nodes.two("a")
        nodes.two("b")
        mapped, program = nodes.folder / "mapped", 'shift 2; [[ $* == *--answer* ]] || { echo "$*" >>$PRETENDED/begun; '
        program += f'[[ $* == *--dry-run* && ! -e {mapped} ]] && touch {mapped} || exit 7; }}; exec "$@"\n'
        executable(nodes.tools / "timeout", program)  # all fails after the first map
        done = batch("--prove", str(tmp_path / "proof"), hosts="a,b")
        assert done.returncode == 1, done.stderr
        report = (tmp_path / "proof/report.txt").read_text()
        for said in ("4 ranks on 2 nodes (a 2, b 2), 4 GPUs", "rank 3 -> b, GPU 1 (0000:2b:00.0)", "exit status 7"):
            assert said in report
        for step in ("gemm-small-rows-cols-rows", "gemm-large-files", "calls", "plan", "bytes"):
            assert re.search(rf"^{step} +not run +0.0  the nodes do not answer", report, re.MULTILINE), report
        begun = (nodes.folder / "begun").read_text().splitlines()
        assert begun[0] == f"{LAUNCH}/node --slurm --dry-run -- true"
        assert begun[1].startswith(f"{LAUNCH}/node --slurm -- python -m uncut_mpi.calibrate --json {tmp_path}/proof/")
        assert begun[2:] == begun[:1]

    def test_bytes_between_nodes_are_held_against_what_must_come(self, tmp_path):
        for moved, fine in ((8_000_000, True), (7_999_999, False)):
            write(
                tmp_path, plan=json.dumps({"k": 1000, "n": 1000, "nodes": [{}, {}], "bytes": {"node_to_node": moved}})
            )
            write(tmp_path, run=json.dumps({"planned": 8_000_000, "sent": 8_080_000.0}))
            if fine:
                said = prove.found_bytes(tmp_path / "plan", tmp_path / "run", "")
                assert said == [
                    "planned 8.00 MB, 1.000 of (nodes - 1)·k·n·8; run 8.00 MB, of which adapters have counted 1.010"
                ]
            else:
                with pytest.raises(ValueError, match="8000000 must come"):
                    prove.found_bytes(tmp_path / "plan", tmp_path / "run", "")


@pytest.fixture
def nodes_on(tmp_path):
    """Run launch/test-nodes on a machine that has some of its tools, for a user of this number."""

    def start(*arguments, tools=("unshare", "nsenter", "setpriv", "mount", "ip"), user=0):
        for tool in ("bash", "realpath"):
            (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
        for tool in tools:
            executable(tmp_path / tool, f"echo {tool} failed: Operation not permitted >&2\nexit 1\n")
        executable(tmp_path / "id", f"echo {user}\n")
        return run(["/bin/bash", str(LAUNCH / "test-nodes"), *arguments], str(tmp_path), VIRTUAL_ENV="/none")

    return start


class TestTestNodes:
    @pytest.mark.parametrize(
        ("machine", "said"),
        [
            ({"user": 1000}, "made by root alone: run this as root"),
            ({"tools": ("unshare", "nsenter", "setpriv", "mount")}, "no 'ip'. Install it:"),
            ({"tools": ()}, "apt-get install -y iproute2 util-linux"),
            ({}, "unshare failed: Operation not permitted"),
            ({}, "docker run --privileged"),
        ],
        ids=["user", "no ip", "no tools", "refused", "container"],
    )
    def test_where_there_can_be_none_that_is_said_with_the_way_out(self, nodes_on, machine, said):
        done = nodes_on("--", "echo", "started", **machine)
        assert (done.returncode, done.stdout) == (77, "")
        assert said in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((), "no command was given"),
            (("--nodes", "0", "--", "true"), "--nodes 0: write a number from 1 to 99"),
            (("--ranks-per-node", "x", "--", "true"), "--ranks-per-node x: write a number"),
            (("--share",), "--share needs a value"),
            (("mpiexec",), "unknown argument 'mpiexec'; write the command after --"),
            (("--cut", "1"), "--cut needs the number of a node, and the process"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, nodes_on, arguments, said):
        done = nodes_on(*arguments)
        assert done.returncode == 1
        assert said in done.stderr


@pytest.fixture
def tests_on(tmp_path):
    """Run launch/test on a pretended machine with so many GPUs, whose tests pass but for one that is skipped."""
    tools = tmp_path / "tools"
    tools.mkdir()
    started = tmp_path / "started"
    # A stand-in for every test: notes its rank, mode and arguments, and writes its report.
    executable(
        tools / "python",
        f'[[ $1 != launch/summarise.py ]] || exec {sys.executable} "$@"\n'
        "[[ $* != '-c import xdist' ]] || exit 1\n"
        "for word; do [[ $word != --junitxml=* ]] || report=${word#--junitxml=}; done\n"
        "blocking=${CUDA_LAUNCH_BLOCKING:-unset}\n"
        'echo "rank $PMI_RANK connections ${CUDA_DEVICE_MAX_CONNECTIONS:-unset} blocking $blocking $*"'
        f" >>{started}\n"
        "[[ ${FAILS:-none} != $blocking ]] || exit 1\n"
        'skipped=\'<testcase classname="t" name="b"><skipped message="too few ranks"/></testcase>\'\n'
        'echo "<testsuites><testcase classname=\\"t\\" name=\\"a\\"/>$skipped</testsuites>" >"$report"\n',
    )
    executable(
        tools / "mpiexec",
        "[[ $1 != --version ]] || { echo HYDRA; exit; }\n"
        'n=$2; shift 2; for ((r = 0; r < n; r++)); do PMI_RANK=$r "$@" || exit; done\n',
    )

    def start(gpus, *arguments, **environment):
        if gpus:
            lines = "".join(f"GPU {number}: Pretended\\n" for number in range(gpus))
            executable(tools / "nvidia-smi", f'[[ $* == --list-gpus ]] && printf "{lines}"\n')
        command = [str(LAUNCH / "test"), "--no-setup", *arguments]
        done = run(command, f"{tools}:/usr/bin:/bin", TMPDIR=str(tmp_path), **environment)
        return done, started.read_text().splitlines() if started.exists() else []

    return start


class TestTests:
    def test_the_tests_of_several_gpus_run_on_a_rank_for_each_in_every_mode(self, tests_on):
        done, started = tests_on(3, "--stage", "multigpu")
        assert done.returncode == 0, done.stdout + done.stderr
        modes = [line.partition(" -m ")[0] for line in started]
        assert modes == [
            f"rank {rank} {mode}"
            for mode in ("connections 32 blocking unset", "connections 1 blocking unset", "connections 32 blocking 1")
            for rank in range(3)
        ] + [f"rank {rank} connections 32 blocking unset" for rank in range(4)]
        assert all(" tests/multigpu " in line for line in started)
        assert ["--share-gpus" in line for line in started] == 9 * [False] + 4 * [True]
        lines = done.stdout.splitlines()
        assert lines[-1] == "4 passed, 0 failed, 4 skipped"
        assert "      4  too few ranks" in lines

    @pytest.mark.parametrize(
        ("gpus", "environment", "count"),
        [(1, {}, 3 + 4), (4, {}, 12), (4, {"CUDA_VISIBLE_DEVICES": "2,3"}, 6 + 4)],
        ids=["one is enough", "ranks that have one each share none", "a mask limits the ranks"],
    )
    def test_ranks_are_as_many_as_gpus_and_four_share_fewer(self, tests_on, gpus, environment, count):
        done, started = tests_on(gpus, "--stage", "multigpu", **environment)
        assert (done.returncode, len(started)) == (0, count), done.stdout + done.stderr

    @pytest.mark.parametrize(("gpus", "mask"), [(0, None), (2, "")])
    def test_without_a_gpu_its_tests_are_one_skip_with_the_reason(self, tests_on, gpus, mask):
        environment = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        done, started = tests_on(gpus, "--stage", "unit", "--stage", "gpu", "--stage", "multigpu", **environment)
        assert len(started) == 1
        assert "tests/unit" in started[0]
        lines = done.stdout.splitlines()
        for stage in ("gpu", "multigpu"):
            assert f"      1  stage {stage}: no GPU on this machine" in lines
        assert (lines[-1], done.returncode) == ("1 passed, 0 failed, 3 skipped", 0)

    def test_a_mode_that_fails_is_named_and_the_others_still_run(self, tests_on):
        done, started = tests_on(2, "--stage", "multigpu", FAILS="unset")
        assert done.returncode == 1
        assert len(started) == 5  # rank 0 of two modes and of shared GPUs, both ranks of the mode that blocks
        assert "2 passed" not in done.stdout
        lines = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("multigpu")]
        assert lines == ["multigpu-2", "multigpu-2-launch-blocking", "multigpu-2-one-connection", "multigpu-4-shared"]
        assert done.stdout.splitlines()[-1] == "1 passed, 3 failed, 1 skipped"


class TestSetup:
    def test_installs_first_what_the_build_requires(self):
        # Read as text: tomllib is not in Python 3.10.
        project = (ROOT / "pyproject.toml").read_text()
        required = re.search(r"^requires = \[(.*)\]", project, re.MULTILINE).group(1).replace(",", "")
        named = re.search(r"^build_requires=\((.*)\)", (LAUNCH / "setup").read_text(), re.MULTILINE).group(1)
        assert named == required

    @pytest.fixture
    def setup_on(self, tmp_path):
        """Run launch/setup in a copy of its folder, on a machine with only the tools named."""
        tools, checkout = tmp_path / "tools", tmp_path / "checkout"
        tools.mkdir()
        (checkout / "launch").mkdir(parents=True)
        (checkout / "uncut_mpi" / "csrc").mkdir(parents=True)
        for name in ("pyproject.toml", "CMakeLists.txt", "launch/setup"):
            (checkout / name).write_bytes((ROOT / name).read_bytes())
        basic = "bash env dirname uname flock cat find sort xargs sha256sum cut mktemp rm mkdir touch head grep"
        for tool in basic.split():
            (tools / tool).symlink_to(next(p for p in (Path("/usr/bin") / tool, Path("/bin") / tool) if p.exists()))

        def start(*arguments, **environment):
            return run(["bash", str(checkout / "launch" / "setup"), *arguments], str(tools), **environment)

        start.tools, start.checkout = tools, checkout
        return start

    @pytest.fixture
    def machine(self, setup_on):
        """Put tools on the machine: a Python that lacks something, or none, and by default a compiler."""

        def put(lacks, *, compiler=True):
            if lacks is not None:
                known = f'case $1 in --version) echo Python 3.12.1 ;; -c) echo 3.12 ;; *) echo "{lacks}" ;; esac\n'
                executable(setup_on.tools / "python3", known)
            if compiler:
                executable(setup_on.tools / "c++", "exit 0\n")
            return setup_on

        return put

    @pytest.mark.parametrize(
        ("lacks", "said"),
        [
            ("venv", ["lacks the venv module", "apt-get install -y python3.12-venv", "dnf install -y python3"]),
            ("headers", ["the headers (Python.h)", "apt-get install -y python3.12-dev", "dnf install -y python3"]),
            (
                "venv headers",
                [
                    "the venv module and the headers (Python.h)",
                    "-y python3.12-venv python3.12-dev",
                    "dnf install -y py",
                ],
            ),
            (None, ["no Python 3.10 or later"]),
        ],
    )
    def test_what_there_is_not_of_python_is_named_with_the_command_that_brings_it(self, machine, lacks, said):
        done = machine(lacks)()
        assert done.returncode == 1
        assert [words for words in said if words not in done.stderr] == []

    def test_a_missing_compiler_is_named_with_the_command_that_brings_it(self, machine):
        done = machine("nothing", compiler=False)()
        assert done.returncode == 1
        for words in ("no C++20 compiler", "sudo apt-get install -y g++", "sudo dnf install -y gcc-c++"):
            assert words in done.stderr

    def test_an_old_python_is_refused(self, machine, setup_on):
        done = machine("old")("--python", str(setup_on.tools / "python3"))
        assert done.returncode == 1
        assert "needs Python 3.10 or later" in done.stderr

    def test_an_environment_of_the_user_is_not_touched(self, machine, setup_on):
        machine("nothing")
        theirs = setup_on.checkout / ".venv"
        theirs.mkdir()
        (theirs / "precious").write_text("x")
        done = setup_on()
        assert done.returncode == 1
        assert "was not made by launch/setup" in done.stderr
        assert (theirs / "precious").exists()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--mpi", "lam"), "--mpi lam: choose"),
            (("--cuda", "11"), "--cuda 11: choose"),
            (("--bogus",), "unknown argument '--bogus'"),
            (("--python",), "--python needs a value"),
        ],
    )
    def test_unknown_choices_are_refused(self, setup_on, arguments, said):
        done = setup_on(*arguments)
        assert done.returncode == 1
        assert said in done.stderr
