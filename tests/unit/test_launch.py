"""The launchers: what they count, what they blame, when they stop. No MPI or GPU: stand-ins take their place."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


def load_summarise():
    spec = importlib.util.spec_from_file_location("launch_summarise", LAUNCH / "summarise.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


summarise = load_summarise()


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


@pytest.fixture
def node(tmp_path):
    """Run launch/node on a pretended machine with two GPUs."""
    bus = "00000000:{:02X}:00.0"
    executable(
        tmp_path / "nvidia-smi",
        'case $* in *--id=7*) exit 6 ;; *--id=1*) echo "' + bus.format(0x2B) + '" ;;\n'
        '*) printf "%s\\n" "' + bus.format(0x1A) + '" "' + bus.format(0x2B) + '" ;; esac\n',
    )
    # A stand-in for mpiexec: runs every rank in turn and tells each its number, unless NO_RANK is set.
    executable(
        tmp_path / "mpiexec",
        "if [[ $1 == --version ]]; then echo HYDRA; exit; fi\nn=$2; shift 4\n"
        'for ((r = 0; r < n; r++)); do [[ -n $NO_RANK ]] || export MPI_LOCALRANKID=$r; "$@" || exit; done\n',
    )

    def start(*arguments, **environment):
        path = f"{tmp_path}:/usr/bin:/bin"
        return run([str(LAUNCH / "node"), *arguments], path, VIRTUAL_ENV="/none", **environment)

    return start


class TestNode:
    def test_its_help_says_how_it_is_used(self, node):
        for flag in ("-h", "--help"):
            done = node(flag)
            assert (done.returncode, done.stderr) == (0, "")
            assert "launch/node [-n RANKS] [--dry-run] -- python" in done.stdout

    def test_starts_one_rank_per_gpu_and_prints_the_map(self, node):
        done = node("--", "sh", "-c", "echo program $MPI_LOCALRANKID $CUDA_DEVICE_MAX_CONNECTIONS $0", "x")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["program 0 32 x", "program 1 32 x"]
        assert "rank 0 -> GPU 0 (00000000:1a:00.0)" in done.stderr
        assert "rank 1 -> GPU 1 (00000000:2b:00.0)" in done.stderr

    def test_passes_the_programs_own_options_through(self, node):
        done = node("-n", "1", "--", "echo", "-n", "5", "--dry-run", "a b")
        assert done.stdout == "5 --dry-run a b"

    @pytest.mark.parametrize(
        ("arguments", "environment", "said"),
        [
            (["-n", "3", "--", "echo", "started"], {}, "3 ranks for 2 GPUs"),
            (["--", "echo", "started"], {"NO_RANK": "1"}, "does not tell its ranks their number"),
            (["-n", "2", "--", "echo", "started"], {"CUDA_VISIBLE_DEVICES": "1"}, "2 ranks for 1 GPUs"),
            (["--", "echo", "started"], {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7"),
            ([], {}, "no program was given"),
        ],
    )
    def test_what_cannot_work_is_said_before_anything_starts(self, node, arguments, environment, said):
        done = node(*arguments, **environment)
        assert done.returncode == 1
        assert said in done.stderr
        assert "started" not in done.stdout

    def test_a_mask_limits_the_gpus(self, node):
        one = node("--", "echo", "started", CUDA_VISIBLE_DEVICES="1")
        assert "rank 0 -> GPU 0 (00000000:2b:00.0)" in one.stderr

    def test_stops_without_a_driver(self, tmp_path):
        executable(tmp_path / "mpiexec", "echo HYDRA\n")
        for tool in ("bash", "dirname", "env"):
            (tmp_path / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
        (tmp_path / "grep").symlink_to("/bin/grep")
        done = run([str(LAUNCH / "node"), "--", "echo", "started"], str(tmp_path), VIRTUAL_ENV="/none")
        assert done.returncode == 1
        assert "no nvidia-smi" in done.stderr


@pytest.fixture
def batch(node, tmp_path):
    """Run launch/slurm.sbatch as Slurm does, a copy of it elsewhere, on the machine of `node`."""
    executable(
        tmp_path / "srun",
        'echo "srun $*"; while [[ $1 == --* ]]; do shift; done\n'
        'for ((r = 0; r < SLURM_NTASKS_PER_NODE; r++)); do SLURM_LOCALID=$r "$@" || exit; done\n',
    )
    copy = tmp_path / "slurm_script"
    copy.write_text((LAUNCH / "slurm.sbatch").read_text())

    def start(*arguments, ranks=2, **environment):
        given = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS_PER_NODE": str(ranks), "VIRTUAL_ENV": "/none"}
        return run(["bash", str(copy), *arguments], f"{tmp_path}:/usr/bin:/bin", **{**given, **environment})

    return start


class TestSlurm:
    def test_ranks_are_started_as_launch_node_starts_them(self, batch):
        done = batch("sh", "-c", "echo program $SLURM_LOCALID $CUDA_DEVICE_MAX_CONNECTIONS $OMP_NUM_THREADS $0", "x y")
        assert done.returncode == 0, done.stderr
        first, *programs = done.stdout.splitlines()
        assert first.startswith(f"srun --mpi=pmi2 --cpu-bind=none --kill-on-bad-exit=1 {LAUNCH}/node --as-rank sh -c")
        assert programs == ["program 0 32 1 x y", "program 1 32 1 x y"]
        assert "rank 1 -> GPU 1 (00000000:2b:00.0), cores" in done.stderr

    def test_srun_speaks_as_the_mpi_does_or_as_it_is_told(self, batch, tmp_path):
        assert "--mpi=cray " in batch("true", SLURM_MPI_TYPE="cray").stdout
        executable(tmp_path / "mpiexec", "echo mpiexec Open MPI 5.0.11\n")
        assert "--mpi=pmix " in batch("true").stdout

    @pytest.mark.parametrize(
        ("arguments", "changes", "said"),
        [
            ([], {}, "no program was given"),
            (["true"], {"ranks": 3}, "3 ranks on 2 GPUs"),
            (["true"], {"SLURM_SUBMIT_DIR": "/"}, "submit this file in the checkout"),
            (["true"], {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES names 7"),
        ],
    )
    def test_what_cannot_work_is_said_before_anything_starts(self, batch, arguments, changes, said):
        done = batch(*arguments, **changes)
        assert done.returncode == 1
        assert done.stdout == ""
        assert said in done.stderr


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
