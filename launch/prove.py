"""
Proves on the nodes of a job that the product works there: steps, each under a limit of its own, and one report.

``launch/node --prove`` runs it. Steps are programs that launch/node starts. What each says is kept beside the report.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import summarise

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_S = 1700  # of all steps: a job of launch/slurm.sbatch has half an hour
ASKING_S = 300  # in which launch/node has said which nodes it does not reach
CALLS = 1000
PLACES = ("rows,cols,rows", "h,h,h", "files")
SIZES = {True: {"small": 256, "large": 2048}, False: {"small": 1024, "large": 16384}}  # without GPUs, and with
MAKE = "import sys, numpy as np; np.save(sys.argv[2], np.random.default_rng(0).uniform(-1, 1, 2 * (int(sys.argv[1]),)))"
TEST_NEEDS = ("pytest", "pytest_mpi", "pytest_timeout", "hypothesis")

Found = Callable[[str], list[str]]
"""Returns what a step has found, the first line for the table, of what it said; raises if that proves nothing."""


@dataclasses.dataclass
class Step:
    """A program, the seconds that it may take, and what it finds; without a program, why it is skipped."""

    name: str
    limit_s: int
    command: list[str]
    found: Found
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


class Proof:
    """Runs steps and writes the report, anew after each: whatever ends the job, it says how far that has come."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.began, self.failed = folder, time.monotonic(), 0
        self.table = [f"{'step':<25} {'':<7} {'seconds':>7}  found"]
        self.details = list[str]()
        print(f"node: the report comes to {folder}/report.txt", *self.table, sep="\n", flush=True)

    def add(self, name: str, state: str, seconds: float, lines: list[str]) -> None:
        """Note what has become of a step."""
        self.failed += state == "FAILED"
        self.table.append(f"{name:<25} {state:<7} {seconds:>7.1f}  {lines[0]}")
        if lines[1:]:
            self.details += ["", f"{name}:", *(f"  {line}" for line in lines[1:])]
        print(self.table[-1], flush=True)
        self.write("not all steps have been run yet")

    def write(self, verdict: str) -> None:
        """Write the report."""
        head = [f"uncut_mpi on the nodes of this job: {verdict}", f"versions: {versions(self.folder)}", ""]
        (self.folder / "report.txt").write_text("\n".join([*head, *self.table, *self.details, ""]))

    def run(self, step: Step) -> bool:
        """Run a step within what is left of the time; return whether it did not fail."""
        if not step.command:
            self.add(step.name, "skipped", 0.0, step.found(""))
            return True
        said, began = self.folder / f"{step.name}.txt", time.monotonic()
        limit_s = min(step.limit_s, math.ceil(LIMIT_S - (began - self.began)))
        if limit_s <= 0:
            self.add(step.name, "FAILED", 0.0, [f"not started: all steps together had {LIMIT_S} s"])
            return False
        with said.open("w") as output:
            status = subprocess.run(
                ["timeout", "--kill-after=10", str(limit_s), *step.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | step.environment,
                cwd=CHECKOUT,
                check=False,
            ).returncode
        text, why = said.read_text(errors="replace"), ""
        try:
            lines = step.found(text)
        except Exception as error:  # of whatever a program that has failed has left
            lines, why = [], f"{type(error).__name__}: {error}"
        if status in (124, 137):
            why = f"ended by force after {limit_s} s"
        elif status:
            why = f"exit status {status}"
        if why:
            own = [line for line in text.splitlines() if not line.startswith("node: rank ")]
            lines = [f"{why}; see {said.name}", *own[-20:]]
        self.add(step.name, "FAILED" if why else "passed", time.monotonic() - began, lines)
        return not why


def versions(folder: pathlib.Path) -> str:
    """Return what there is; of MPI, BLAS and the driver, which Python does not know, as a product of ours says."""
    told: dict[str, Any] = {}
    for name in ("uncut-mpi", "mpi4py", "numpy"):
        try:
            told[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            told[name] = "not installed"
    products = [json.loads(path.read_text()) for path in sorted(folder.glob("gemm-*.json"))]
    of_product = ("mpi", "blas", "cupy", "cuda", "driver", "device", "backend")
    told |= {name: products[0][name] for name in of_product if products and products[0][name]}
    return ", ".join(f"{name} {value}" for name, value in {"python": sys.version.split()[0], **told}.items())


# -- what steps find -------------------------------------------------------------------------------


def found_map(text: str) -> list[str]:
    """Return how many ranks are on which nodes, and the map."""
    ranks = [line for line in text.splitlines() if re.match(r"node: rank \d+ -> ", line)]
    hosts = collections.Counter(line.split()[4].rstrip(",") for line in ranks)
    gpus = sum(", GPU " in line for line in ranks)
    on = ", ".join(f"{host} {count}" for host, count in hosts.items())
    return [f"{len(ranks)} ranks on {len(hosts)} nodes ({on}), {gpus} GPUs", *ranks]


def found_net(text: str) -> list[str]:
    """Return what a calibration says of the net."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.startswith("net between nodes")), None)
    if begin is None:
        return ["one node, so no net was measured"]
    end = next(at for at in range(begin, len(lines)) if lines[at].startswith("latency "))
    return [lines[end], *lines[begin : end + 1]]


def found_product(path: pathlib.Path, text: str) -> list[str]:
    """Return what a product took, beside what was expected."""
    facts = json.loads(path.read_text())
    if not facts["passed"]:
        raise ValueError("the product was not verified")
    took, expected = facts["median_s"], facts["predicted_s"]
    return [
        f"verified on {facts['nodes']} nodes: {1e3 * took:.3f} ms, expected {1e3 * expected:.3f}, "
        f"ratio {took / expected:.2f}; {facts['tflop_per_s']:.3g} TFLOP/s, {facts['how']}"
    ]


def found_tests(folder: pathlib.Path, text: str) -> list[str]:
    """Return how many tests did what, and what the guilty rank said."""
    stage = summarise.read_stage(folder)
    skipped = sum(stage.skips.values())
    if not stage.passed or stage.failed:
        raise ValueError("\n".join([f"{stage.passed} passed, {stage.failed} failed", *summarise.blame(folder)]))
    return [f"{stage.passed} passed, {skipped} skipped", *(f"skipped: {why}" for why in stage.skips)]


def found_calls(path: pathlib.Path, text: str) -> list[str]:
    """Return what a call takes that moves nothing, on one node and on all."""
    facts = json.loads(path.read_text())
    within, over, barrier, one_way = (facts[f"{name}_us"] for name in ("within", "over", "barrier", "one_way"))
    if not one_way:
        return [f"{over:.1f} us on one node, a barrier of MPI {barrier:.1f}"]
    return [
        f"{within:.1f} us on one node, {over:.1f} on {facts['nodes']} (a barrier of MPI {barrier:.1f}): "
        f"{over - within:.1f} more, which is {(over - within) / one_way:.1f} of the one-way latency, {one_way:.1f}"
    ]


def found_plan(text: str) -> list[str]:
    """Return what a plan expects, and what it moves."""
    label, found = "", list[str]()
    for line in text.splitlines():
        label = line[:11].strip() or label
        found += [line] * (label in ("predicted", "bytes", "nodes"))
    return [" ".join(found[0].split()), *found[1:]]


def found_bytes(planned: pathlib.Path, counted: pathlib.Path, text: str) -> list[str]:
    """Return what goes between nodes, beside what must: of B, dealt by columns, each node has what others hold."""
    facts, run = (json.loads(path.read_text()) for path in (planned, counted))
    nodes = len(facts["nodes"])
    if nodes == 1:
        return ["one node"]
    least = 8 * facts["k"] * facts["n"] * (nodes - 1)
    moved = facts["bytes"]["node_to_node"]
    if moved < least or run["planned"] < least:
        raise ValueError(f"{moved} bytes planned, {run['planned']} run, and (nodes - 1)·k·n·8 = {least} must come")
    return [
        f"planned {moved / 1e6:.2f} MB, {moved / least:.3f} of (nodes - 1)·k·n·8; run {run['planned'] / 1e6:.2f} MB, "
        f"of which adapters have counted {run['sent'] / run['planned']:.3f}"
    ]


# -- what ranks do ---------------------------------------------------------------------------------


def sent_bytes() -> int:
    """Return what the adapters of this node have sent since they are up, as the kernel counts it."""
    lines = [line.split(":") for line in pathlib.Path("/proc/net/dev").read_text().splitlines() if ":" in line]
    ethernet = sum(int(rest.split()[8]) for name, rest in lines if name.strip() != "lo")
    words = pathlib.Path("/sys/class/infiniband").glob("*/ports/*/counters/port_xmit_data")  # of 4 bytes
    return max(ethernet, sum(4 * int(path.read_text()) for path in words))


def median_us(work: Callable[[], object], count: int) -> float:
    """Return the median of what a work takes (us), after some that do not count."""
    times = list[float]()
    for _ in range(count + count // 10):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times[count // 10 :])


def measure_calls(comm: Any, backend: str, machine: Any) -> dict[str, Any]:
    """Return medians over calls that move nothing, on each node alone and on all, and of the way of a short message."""
    import numpy as np

    import uncut_mpi as um

    def call_us(comm: Any, machine: Any) -> float:
        with um.Session(comm, backend=backend, machine=machine) as session:
            a, c = (session.empty((comm.size, 8), np.float64, um.Layout.rows()) for _ in "ac")
            b = session.empty((8, 8), np.float64, um.Layout.replicated())
            for one in (a, b, c):
                one.local[...] = 1.0
            return median_us(lambda: session.gemm(a, b, c), CALLS)

    node_of = machine.node_of.tolist()
    facts = {"over": call_us(comm, machine), "barrier": median_us(comm.Barrier, CALLS), "within": 0.0, "one_way": 0.0}
    if len(set(node_of)) > 1:
        alone = comm.Split(node_of[comm.rank])
        facts["within"] = call_us(alone, um.Machine.uniform(alone.size))
        ends, word = (0, node_of.index(node_of[-1])), np.zeros(1)

        def there_and_back() -> None:
            if comm.rank == ends[0]:
                comm.Send(word, ends[1])
                comm.Recv(word, ends[1])
            elif comm.rank == ends[1]:
                comm.Recv(word, ends[0])
                comm.Send(word, ends[0])

        facts["one_way"] = median_us(there_and_back, CALLS) / 2
    slowest = {f"{name}_us": max(comm.allgather(value)) for name, value in facts.items()}
    return {"nodes": len(set(node_of)), **slowest}


def measure_bytes(comm: Any, backend: str, machine: Any, extent: int) -> dict[str, Any]:
    """Return what a planned product sends between nodes, and what the adapters of all of them count."""
    import numpy as np

    import uncut_mpi as um

    repeat, node_of = 3, machine.node_of.tolist()
    with um.Session(comm, backend=backend, machine=machine) as session:
        layouts = (um.Layout.rows(), um.Layout.cols(), um.Layout.rows())
        a, b, c = (session.empty((extent, extent), np.float64, layout) for layout in layouts)
        for one in (a, b, c):
            one.local[...] = 1.0
        with session.plan(a, b, c) as plan:
            planned = plan.schedule.bytes_by_link().get("node_to_node", 0)
            plan.execute()
            comm.Barrier()
            before = sent_bytes()
            for _ in range(repeat):
                plan.execute()
            comm.Barrier()
            told = comm.allgather((sent_bytes() - before) / repeat)
    return {"planned": planned, "sent": sum(told[node_of.index(node)] for node in set(node_of))}


def as_rank(words: list[str]) -> None:
    """Run by each rank of a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("calls", "bytes", "tests"))
    parser.add_argument("path", type=pathlib.Path)
    parser.add_argument("--no-gpu", action="store_true")
    parser.add_argument("--extent", type=int, default=0)
    asked = parser.parse_args(words)
    if asked.what == "tests":
        test(asked.path)
    from mpi4py import MPI

    import uncut_mpi as um

    comm, backend = MPI.COMM_WORLD, "host" if asked.no_gpu else "auto"
    kept = asked.path.with_name("machine.json")  # which the other nodes need not see
    machine = um.Machine.from_json(comm.bcast(kept.read_text() if comm.rank == 0 else None))
    if asked.what == "calls":
        facts = measure_calls(comm, backend, machine)
    else:
        facts = measure_bytes(comm, backend, machine, asked.extent)
    if comm.rank == 0:
        asked.path.write_text(json.dumps(facts))


def test(folder: pathlib.Path) -> NoReturn:
    """Become a rank of the tests, which has folders of its own and, but for rank 0, a file for what it says."""
    from ranks import launcher

    rank = launcher.rank_of_process()
    folder.mkdir(parents=True, exist_ok=True)
    if rank:
        with (folder / f"rank{rank}.log").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
    command = [sys.executable, "-m", "mpi4py", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["tests/mpi", "--only-mpi", "-m", "on_nodes", "--timeout=60", "--timeout-method=thread"]
    command += ["-o", "faulthandler_timeout=50"]
    command += [f"--junitxml={folder}/rank{rank}.xml", f"--basetemp={folder}/tmp{rank}"]
    os.execv(command[0], command)


# -- all of it -------------------------------------------------------------------------------------


def make_steps(asked: argparse.Namespace, hosts: list[str], folder: pathlib.Path) -> list[Step]:
    """Return the steps, in their order."""
    options = ["--no-gpu"] * asked.no_gpu + (["-n", str(asked.n)] if asked.n else [])
    where = ["--slurm"] * asked.slurm + (["--hostfile", os.path.abspath(asked.hostfile)] if asked.hostfile else [])
    backend = ["--backend", "host"] * asked.no_gpu
    node = [str(CHECKOUT / "launch" / "node")]

    def ranks(*program: str, options: list[str] = options, where: list[str] = where) -> list[str]:
        return [*node, *where, *options, "--", "python", *program]

    def measured(what: str, *words: str) -> list[str]:
        given = ["--no-gpu"] * asked.no_gpu
        return ranks("-m", "mpi4py", "launch/prove.py", what, f"{folder}/{what}.json", *given, *words)

    machine = f"{folder}/machine.json"
    calibrate = ranks("-m", "uncut_mpi.calibrate", *backend, "--json", machine)
    steps = [
        Step("map", ASKING_S, [*node, *where, *options, "--dry-run", "--", "true"], found_map),
        Step("calibrate", 300, calibrate, found_net),
    ]
    for size, extent in SIZES[asked.no_gpu].items():
        for place in PLACES:
            name = f"gemm-{size}-{place.replace(',', '-')}"
            words, json_path = ["-m", str(extent), "--place", place], folder / f"{name}.json"
            if place == "files":
                words = [*2 * [f"{folder}/{size}.npy"], "-o", f"{folder}/{size}-product.npy", "--repeat", "3"]
                made = [sys.executable, "-c", MAKE, str(extent), f"{folder}/{size}.npy"]
                steps.append(Step(f"file-{size}", 120, made, lambda text: ["A and B of products of files"]))
            words += [*backend, "--machine", machine, "--json", str(json_path)]
            found = functools.partial(found_product, json_path)
            steps.append(Step(name, 180, ranks("-m", "uncut_mpi.gemm", *words), found))
    lacking = [name for name in TEST_NEEDS if importlib.util.find_spec(name) is None]
    if lacking:
        steps.append(Step("tests", 0, [], lambda text: [f"not installed: {', '.join(lacking)}"]))
    else:  # of the host backend, on two ranks of the first node and one of the next
        alone = os.environ.get("SLURM_JOB_NUM_NODES") == "1" if asked.slurm else len(hosts) == 1
        each = 3 if alone else 2
        (folder / "hosts").write_text("".join(f"{host}:{each}\n" for host in hosts[:2]))
        there = where if asked.slurm else ["--hostfile", f"{folder}/hosts"] * bool(where)
        command = ranks("launch/prove.py", "tests", f"{folder}/tests", options=["--no-gpu", "-n", "3"], where=there)
        nodes = {"UNCUT_MPI_RANKS_PER_NODE": "2", "SLURM_NTASKS_PER_NODE": str(each)}
        steps.append(Step("tests", 400, command, functools.partial(found_tests, folder / "tests"), nodes))
    steps.append(Step("calls", 120, measured("calls"), functools.partial(found_calls, folder / "calls.json")))
    large = str(SIZES[asked.no_gpu]["large"])
    plan = [sys.executable, "-m", "uncut_mpi.plan", "-m", large, "--place", PLACES[0]]
    plan += ["--machine", machine, "--json", f"{folder}/plan.json"]
    steps += [
        Step("plan", 120, plan, found_plan),
        Step(
            "bytes",
            120,
            measured("bytes", "--extent", large),
            functools.partial(found_bytes, folder / "plan.json", folder / "bytes.json"),
        ),
    ]
    return steps


def main(asked: argparse.Namespace, hosts: list[str]) -> int:
    """Run all steps and return the exit status; where nodes are gone the rest is left out."""
    name = f"uncut_mpi-proof-{os.environ.get('SLURM_JOB_ID') or time.strftime('%Y%m%d-%H%M%S')}"
    folder = pathlib.Path(asked.prove or name).absolute()
    folder.mkdir(parents=True)
    proof, lost = Proof(folder), ""
    steps = make_steps(asked, hosts, folder)
    for step in steps:
        if lost:
            proof.add(step.name, "not run", 0.0, [lost])
        elif not proof.run(step):
            again = dataclasses.replace(steps[0], name="map-again")
            if step is steps[0] or not proof.run(again):
                lost = "the nodes do not answer"
    for path in folder.glob("*.npy"):
        path.unlink()
    proof.write(f"{proof.failed} STEPS FAILED" if proof.failed else "all steps passed")
    print(f"node: {proof.failed} steps failed; {folder}/report.txt", flush=True)
    return int(proof.failed > 0)


if __name__ == "__main__":
    as_rank(sys.argv[1:])
