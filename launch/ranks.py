"""Where the ranks of a job go: what its nodes have, the map of all ranks, and the command that starts them there."""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import importlib.util
import itertools
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
# Below it the kernel tells of devices and routes.
ROOT = pathlib.Path("/")
# How long nodes may take to say what they have (s): Python starts slowly from the file system of a cluster.
ASKING_S = os.environ.get("UNCUT_LAUNCH_TIMEOUT_S", "120")
MARK = "uncut_mpi nodes: "
FORWARDED = re.compile("(UNCUT|CUDA|OMP|UCX|FI|MPI4PY)_|(PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV)$")
# Slurm has these if a job asked for them, and then a rank sees one GPU alone.
FENCES = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND")
LEVELS = ("single", "funneled", "serialized", "multiple")
# What MPICH and Open MPI leave of a job that was killed or has aborted. Who uses such a file has it open or mapped.
LEFT = (
    "/dev/shm/mpich_*",
    "/dev/shm/vader_segment.*",
    "/dev/shm/sm_segment.*",
    "/tmp/hydra_hwloc_xmlfile_*",
    "/tmp/pmix-gds-shmem.*",
)
# In the environment: where the package links what it has not finished (uncut_mpi/unfinished.py).
LINKS = "UNCUT_MPI_LEFT"
TOLD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def module(path: str) -> Any:
    """Return a module of the package that needs no other: a rank would wait several times as long for the package."""
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, CHECKOUT / "uncut_mpi" / path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


launcher, numa = module("spmd/launcher.py"), module("numa.py")


class NoPlaceError(Exception):
    """No rank can be on this node."""


def stop(*lines: str) -> NoReturn:
    """End with an error."""
    sys.exit("\n".join(f"node: error: {line}" for line in lines))


# -- what a node has ---------------------------------------------------------------------------


def read(path: pathlib.Path) -> str:
    """Return what a file of the kernel says, empty where it says nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_gpus() -> list[tuple[str, str]]:
    """Return PCI address and UUID of each GPU that CUDA may use here, in CUDA's order."""
    if not shutil.which("nvidia-smi"):
        raise NoPlaceError("there is no nvidia-smi, so no NVIDIA driver: use --no-gpu and the host backend here")
    command = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPlaceError(f"nvidia-smi failed: {(done.stdout + done.stderr).strip()}")
    listed = list(csv.reader(done.stdout.splitlines(), skipinitialspace=True))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # Ranks must agree on which GPU is the i-th; the order is the one that the caller gave.
        names = [name.strip() for name in visible.split(",") if name.strip()]
        chosen = [[gpu for gpu in listed if gpu[0] == name or gpu[1].startswith(name)] for name in names]
        unknown = [name for name, found in zip(names, chosen, strict=True) if len(found) != 1]
        if unknown:
            raise NoPlaceError(f"CUDA_VISIBLE_DEVICES names {unknown[0]}, which nvidia-smi does not know")
        listed = list(itertools.chain(*chosen))
    if not listed:
        raise NoPlaceError("nvidia-smi lists no GPU" if visible is None else "CUDA_VISIBLE_DEVICES hides all GPUs")
    # nvidia-smi writes an eight-digit PCI domain, the kernel a four-digit one.
    return [(bus.lower()[-12:], uuid) for _, uuid, bus in listed]


def domain_of(device: pathlib.Path) -> int:
    """Return the NUMA domain of a device, which a part of it may not know; -1 where nobody does."""
    return next((int(text) for one in (device, *device.parents) if (text := read(one / "numa_node"))), -1)


def bridges(one: pathlib.Path, other: pathlib.Path) -> int:
    """Return how many steps of the PCI tree are between two devices."""
    common = pathlib.Path(os.path.commonpath([one, other]))
    return len(one.parts) + len(other.parts) - 2 * len(common.parts)


def find_adapters() -> list[tuple[pathlib.Path, dict[str, Any]]]:
    """Return device and settings of the fastest adapters here that are up: InfiniBand and RoCE, else Ethernet."""
    up = [
        net
        for net in sorted(ROOT.glob("sys/class/net/*"))
        if (net / "device").exists() and not (net / "master").exists() and read(net / "operstate") in ("up", "unknown")
    ]
    found: list[tuple[str, pathlib.Path, str, str, dict[str, str]]] = []
    for port in sorted(ROOT.glob("sys/class/infiniband/*/ports/*")):
        if "ACTIVE" in read(port / "state"):
            card = port.parents[1]
            name = f"{card.name}:{port.name}"
            subnet = "InfiniBand " + read(port / "gids/0")[:19]
            # What TCP goes over stays in the list, for an MPI that cannot use the adapter.
            devices = ",".join([name, *(net.name for net in up)])
            settings = {"UCX_NET_DEVICES": devices, "FI_VERBS_DEVICE_NAME": card.name}
            found.append((read(port / "rate"), card / "device", name, subnet, settings))
    if not found:
        routes = [line.split() for line in read(ROOT / "proc/net/route").splitlines()]
        local = {to[0]: f"{to[1]}/{to[7]}" for to in routes if to[2] == "00000000" and to[1] != "00000000"}
        for net in up:
            settings = dict.fromkeys(("UCX_NET_DEVICES", "FI_TCP_IFACE", "OMPI_MCA_btl_tcp_if_include"), net.name)
            found.append((read(net / "speed"), net / "device", net.name, local.get(net.name, ""), settings))
    rates = [float((rate.split() or ["0"])[0]) for rate, *_ in found]
    return [
        (path.resolve(), {"adapter": name, "network": network, "settings": settings})
        for rate, (_, path, name, network, settings) in zip(rates, found, strict=True)
        if rate == max(rates)
    ]


def find_places(no_gpu: bool) -> list[dict[str, Any]]:
    """Return what each rank of this node gets: GPU or NUMA domain, the cores near it, the adapter nearest to it."""
    if no_gpu:
        domains = sorted(ROOT.glob("sys/devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:]))
        found = [("", "", domain, int(domain.name[4:]), read(domain / "cpulist")) for domain in domains]
        found = [one for one in found if one[4]] or [("", "", ROOT, -1, "")]  # some domains have memory alone
    else:
        devices = [(*gpu, (ROOT / "sys/bus/pci/devices" / gpu[0]).resolve()) for gpu in find_gpus()]
        found = [(*gpu, domain_of(gpu[2]), read(gpu[2] / "local_cpulist")) for gpu in devices]
    adapters, places = find_adapters(), list[dict[str, Any]]()
    for bus, uuid, device, domain, cores in found:
        nearest: dict[str, Any] = {"adapter": "", "network": "", "settings": {}}
        if adapters:
            used = [place["adapter"] for place in places]
            # Of adapters that are as near, each gets a rank before one gets two.
            _, _, _, best = min(
                (domain_of(there) != domain, bridges(device, there) if bus else 0, used.count(one["adapter"]), index)
                for index, (there, one) in enumerate(adapters)
            )
            nearest = adapters[best][1]
        places.append({"gpu": bus, "uuid": uuid, "domain": domain, "cores": cores, **nearest})
    return places


def look(no_gpu: bool) -> dict[str, Any]:
    """Return what this node has, or why no rank can be here."""
    facts: dict[str, Any] = {"host": platform.node(), "node": "", "places": [], "why": ""}
    try:
        facts["places"] = find_places(no_gpu)
    except NoPlaceError as error:
        facts["why"] = str(error)
    return facts


def answer(no_gpu: bool) -> None:
    """Run by a process on each node: rank 0 says what all have, and what MPI offers there."""
    import uncut_mpi
    from uncut_mpi.segments import node_identity
    from uncut_mpi.spmd.runtime import MPI, check_launcher, library_version, world

    facts, comm = look(no_gpu) | {"node": node_identity()}, world()
    check_launcher()
    facts["versions"] = {"uncut_mpi": uncut_mpi.__version__, "MPI": library_version()}
    facts["threads"] = [getattr(MPI, f"THREAD_{level.upper()}") for level in LEVELS].index(MPI.Query_thread())
    told = comm.gather(facts)
    if comm.rank == 0:
        print(f"\n{MARK}{json.dumps(told)}", flush=True)


# -- asking all of them ------------------------------------------------------------------------


def read_hostfile(path: str) -> list[tuple[str, int]]:
    """Return the hosts of a file of MPICH or Open MPI, and how many ranks each may have; 0 where it does not say."""
    hosts: dict[str, int] = {}
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError as error:
        stop(f"--hostfile {path}: {error.strerror}")
    for line in lines:
        text = line.partition("#")[0].strip()
        if text:
            parts = re.fullmatch(r"([^\s:]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?", text)
            if not parts:
                stop(f"--hostfile {path}: '{text}' is not HOST, HOST:RANKS or HOST slots=RANKS")
            host, ranks = parts[1], int(parts[2] or 0)
            hosts[host] = (hosts[host] or 1) + (ranks or 1) if host in hosts else ranks  # some name it for each rank
    if not hosts:
        stop(f"--hostfile {path} names no host")
    return list(hosts.items())


def hosts_of_slurm() -> list[tuple[str, int]]:
    """Return the hosts of this Slurm job, and how many ranks each may have."""
    for name in FENCES:
        if os.environ.get(name, "none") != "none":
            stop(
                f"{name}={os.environ[name]}: each rank would see one GPU, and ranks map each other's memory",
                "ask with --gpus-per-node, and leave --gpus-per-task, --ntasks-per-gpu and --gpu-bind out",
            )
    if not os.environ.get("SLURM_JOB_NODELIST"):
        stop("--slurm outside a job of Slurm (no SLURM_JOB_NODELIST): use sbatch launch/slurm.sbatch, or salloc")
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    # Taken out, since srun would count by it too.
    ranks = int(os.environ.pop("SLURM_NTASKS_PER_NODE", 0))
    return [(host, ranks) for host in done.stdout.split()]


def start(hosts: list[tuple[str, int]], slurm: bool, *command: str) -> list[str]:
    """Return what runs a command so many times on each host, in their order; a host without a name is this one."""
    ranks, open_mpi = str(sum(count for _, count in hosts)), bool(os.environ.get("UNCUT_OPEN_MPI"))
    # A rank is bound near its GPU by itself; the launcher must not bind it elsewhere first.
    if slurm:
        kind = os.environ.get("SLURM_MPI_TYPE") or ("pmix" if open_mpi else "pmi2")
        options = [f"--mpi={kind}", "--cpu-bind=none", "--kill-on-bad-exit=1", f"--nodes={len(hosts)}"]
        options += [f"--ntasks={ranks}", "--nodelist=" + ",".join(host for host, _ in hosts)]
        # So many to each node in turn. After an arbitrary distribution Slurm 22.05 starts no other step of the job.
        return ["srun", *options, f"--distribution=plane={hosts[0][1]}", *command]
    options = ["--bind-to" if open_mpi else "-bind-to", "none"]
    if hosts[0][0]:
        options += ["--host" if open_mpi else "-hosts", ",".join(f"{host}:{count}" for host, count in hosts)]
        if open_mpi:  # which takes to other nodes only what it is told to
            options += ["--map-by", "slot", *(word for name in forwarded() for word in ("-x", name))]
    # By its path, from which Open MPI knows where it is on other nodes.
    return [shutil.which("mpiexec") or "mpiexec", "-n", ranks, *options, *command]


def forwarded() -> list[str]:
    """Return the names of what ranks on other nodes need of this environment."""
    return sorted(filter(FORWARDED.match, os.environ))


def ask(hosts: list[tuple[str, int]], slurm: bool, no_gpu: bool) -> list[dict[str, Any]]:
    """Return what each node says of itself."""

    def begin(names: list[str], output: int, *command: str) -> subprocess.Popen[str]:
        limited = ["timeout", "--kill-after=5", ASKING_S, *start([(name, 1) for name in names], slurm, *command)]
        return subprocess.Popen(limited, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True)

    names = [host for host, _ in hosts]
    asking = begin(names, subprocess.PIPE, sys.executable, __file__, "--answer", *["--no-gpu"] * no_gpu)
    out, err = asking.communicate()
    told = [line.partition(MARK)[2] for line in out.splitlines() if MARK in line]
    if told:
        return list(json.loads(told[0]))
    said = (err.strip() or out.strip()).splitlines()[-8:]
    # A launcher waits for all of them: which are missing shows when each is tried alone.
    trials = [(name, begin([name], subprocess.DEVNULL, "true")) for name in names]
    lost = [name for name, trial in trials if trial.wait()]
    if lost:
        stop(
            f"not reached: {', '.join(lost)} (of {', '.join(names)})",
            f"{'srun' if slurm else 'mpiexec'} must start programs there (ssh without a password, the same MPI at the "
            "same path); or leave them out",
            *said,
        )
    late = f" within {ASKING_S} s (UNCUT_LAUNCH_TIMEOUT_S)" if asking.returncode == 124 else ""
    stop(
        f"all nodes are reached, but MPI did not get through on {', '.join(names)}{late}",
        f"{CHECKOUT} must be on all of them, with its environment; containers on one machine "
        "must share /dev/shm and PIDs, or MPI must not use shared memory (UCX_TLS=tcp,self, OMPI_MCA_btl=tcp,self)",
        *said,
    )


def check(told: list[dict[str, Any]], names: list[str]) -> None:
    """Stop where nodes cannot make one job."""
    for facts in told:
        if facts["why"]:
            stop(f"{facts['host']}: {facts['why']}")
    for what in told[0]["versions"]:
        found = {facts["versions"][what]: name for facts, name in zip(told, names, strict=True)}
        if len(found) > 1:
            different = " and ".join(f"{version} ({name})" for version, name in found.items())
            stop(f"nodes have different versions of {what}: {different}", "use the same environment on all of them")
    level = min(facts["threads"] for facts in told)
    if not level:
        stop(
            f"MPI has thread level single ({told[0]['versions']['MPI']}), and ranks have threads",
            "use an MPI that was built with threads, and no MPI4PY_RC_THREAD_LEVEL or MPI4PY_RC_THREADS",
        )
    if level < LEVELS.index("multiple"):
        print(f"node: MPI has thread level {LEVELS[level]}: it cannot serve several threads of a rank", file=sys.stderr)
    taken: dict[str, str] = {}
    for facts, name in zip(told, names, strict=True):
        for thing in (facts["node"], *(place["uuid"] for place in facts["places"] if place["uuid"])):
            if thing in taken:
                if thing == facts["node"]:
                    stop(f"{taken[thing]} and {name} are one node: name it once, with all its ranks")
                stop(
                    f"{taken[thing]} and {name} both see GPU {thing}, on which would be two ranks: give containers on "
                    "one machine GPUs of their own (CUDA_VISIBLE_DEVICES, docker --gpus), or use one container",
                )
            taken[thing] = name


def deal(told: list[dict[str, Any]], hosts: list[tuple[str, int]], asked: argparse.Namespace) -> list[int]:
    """Return how many ranks each node gets: as many as it has GPUs, or fewer where that was asked for."""
    counts, ranks = [], asked.n
    for facts, (_, slots) in zip(told, hosts, strict=True):
        room = len(facts["places"])
        if asked.no_gpu:
            room = -(-ranks // len(hosts)) or room
        elif slots > room:
            stop(
                f"{slots} ranks on {room} GPUs of {facts['host']}: one rank needs one GPU. Ask for at most {room} there"
            )
        counts.append(slots or room)
    if ranks > sum(counts):
        stop(f"{ranks} ranks for {sum(counts)} {'places' if asked.no_gpu else 'GPUs'}: start at most {sum(counts)}")
    if len(set(counts)) > 1:
        different = ", ".join(f"{facts['host']} {count}" for facts, count in zip(told, counts, strict=True))
        if asked.slurm:
            stop(
                f"srun starts as many ranks on each node, and there is not room for as many: {different}",
                f"ask for {min(counts)} on each: sbatch --ntasks-per-node={min(counts)}; or for nodes that are alike",
            )
        print(f"node: not as many ranks on all nodes: {different}", file=sys.stderr)
    left = ranks or sum(counts)
    return [min(count, max(0, left - sum(counts[:index]))) for index, count in enumerate(counts)]


# -- starting ----------------------------------------------------------------------------------


def lines_of_map(nodes: list[tuple[dict[str, Any], int]]) -> list[str]:
    """Return a line for each rank."""
    lines: list[str] = []
    for facts, count in nodes:
        for local in range(count):
            place = facts["places"][local % len(facts["places"])]
            gpu = f"GPU {local} ({place['gpu']})" if place["gpu"] else "no GPU"
            settings = " ".join(f"{name}={value}" for name, value in place["settings"].items())
            lines.append(
                f"node: rank {len(lines)} -> {facts['host']}, {gpu}, cores {place['cores'] or 'not bound'}, "
                f"NUMA domain {place['domain'] if place['domain'] >= 0 else 'unknown'}, "
                f"adapter {place['adapter'] or 'unknown'} ({settings or 'not bound'})"
            )
    return lines


def as_rank(program: list[str]) -> NoReturn:
    """Run by each rank: take its place, then run the program, and see that it ends as a rank has to."""
    rank = launcher.rank_of_process(unknown=-1)
    if rank < 0:
        stop("this launcher does not tell its ranks their number (Open MPI, MPICH, MVAPICH, PMIx and srun do)")
    told = json.loads(os.environ["UNCUT_PLACES"])
    ends = list(itertools.accumulate(count for _, count, _ in told["nodes"]))
    node = next((index for index, end in enumerate(ends) if rank < end), -1)
    host, count, kind = told["nodes"][node]
    local = rank - ends[node] + count
    if platform.node() != host or launcher.node_rank(rank, os.environ) not in (rank, local):
        here = f"process {launcher.node_rank(rank, os.environ)} of {platform.node()}"
        stop(f"rank {rank} was to be process {local} of {host}, and is {here}: the launcher deals ranks out otherwise")
    cores, settings = told["kinds"][kind][local % len(told["kinds"][kind])]
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    # Memory needs no binding: the kernel takes it from the domain of the cores that use it first.
    if cores:
        near = numa.kernel_list(cores) & os.sched_getaffinity(0)
        if near:
            os.sched_setaffinity(0, near)
        if len(near) < len(numa.kernel_list(cores)):
            print(f"node: rank {rank} may use {len(near)} of cores {cores}", file=sys.stderr)
    heard, said = os.pipe()
    os.set_inheritable(said, True)
    os.environ[launcher.ENDS] = f"{said}:{os.fstat(said).st_ino}"
    try:
        status = run(program, signal.SIGKILL)
    except OSError as error:
        stop(f"rank {rank} cannot start {program[0]}: {error.strerror}")
    os.close(said)
    os.set_blocking(heard, False)  # a process that the program has left may have the other end
    with contextlib.suppress(BlockingIOError):
        if status == 0 and os.read(heard, 2) == launcher.BEGAN:
            stop(
                f"rank {rank} ended with status 0 and without MPI_Finalize, as by os._exit(0): the job has failed, "
                "since others may wait for it; leave by sys.exit, or call MPI.Finalize() before"
            )
    if status < 0:
        with contextlib.suppress(OSError):  # nobody can catch this one
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)  # so that the launcher says by what it ended
    sys.exit(status)


def run(command: list[str], when_alone: int, *, passes_on: bool = False) -> int:
    """
    Run a command and return its status, negative for a signal that has ended it.

    It gets a signal when this process ends before it. Those of a terminal come to both. Others come to this process
    alone, and are passed on, or to the whole group.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*TOLD, signal.SIGCHLD})
    control = ctypes.CDLL(None).prctl

    def begin() -> None:
        control(1, when_alone)  # PR_SET_PDEATHSIG
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    process = subprocess.Popen(command, close_fds=False, preexec_fn=begin)
    while process.poll() is None:
        told = signal.sigwaitinfo({*TOLD, signal.SIGCHLD})
        if passes_on and told.si_signo != signal.SIGCHLD and told.si_pid:
            process.send_signal(told.si_signo)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def remove_unfinished(folder: str) -> None:
    """Remove the files that a job has left without their names, to which there are links."""
    for link in pathlib.Path(folder).iterdir():
        with contextlib.suppress(OSError):
            if link.stat().st_ino == int(link.name):
                link.readlink().unlink()


def remove_left(since_s: float) -> None:
    """Remove what a job that began then has left of its MPI on this node, and no process uses."""
    found = [path for pattern in LEFT for path in ROOT.glob(pattern[1:])]
    with contextlib.suppress(OSError):
        ours = {path for path in found if path.lstat().st_uid == os.getuid() and path.lstat().st_mtime >= since_s}
        used = {link for process in ROOT.glob("proc/[0-9]*") for link in links_of(process)} if ours else set()
        for path in ours - used:
            path.unlink(missing_ok=True)


def links_of(process: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that a process has open or mapped, as far as this user may see them."""
    found = []
    for one in itertools.chain((process / "fd").glob("*"), (process / "map_files").glob("*")):
        with contextlib.suppress(OSError):
            found.append(one.readlink())
    return found


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what is asked of launch/node, and the program."""
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(prog="node", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", type=int, default=0, metavar="RANKS")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hostfile", metavar="FILE")
    where.add_argument("--slurm", action="store_true")
    parser.add_argument("--no-gpu", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--prove", nargs="?", const="", metavar="FOLDER")
    asked, others = parser.parse_known_args(words[:cut])
    if others:
        stop(f"unknown argument '{others[0]}'; write the program after --")
    if bool(words[cut + 1 :]) is (asked.prove is not None):
        given = "--prove runs programs of its own: leave yours out"
        stop(given if words[cut + 1 :] else "no program was given: launch/node -- python -m uncut_mpi.gemm")
    if asked.n < 0:
        stop(f"-n {asked.n} is not a number of ranks")
    return asked, words[cut + 1 :]


def table_of(nodes: list[tuple[dict[str, Any], int]]) -> str:
    """Return what each rank has to know, by which it finds its place; nodes that are alike are written once."""
    kinds: list[Any] = []
    table = []
    for facts, count in nodes:
        kind = [(place["cores"], place["settings"]) for place in facts["places"][:count]]
        kinds += [kind] * (kind not in kinds)
        table.append((facts["host"], count, kinds.index(kind)))
    return json.dumps({"nodes": table, "kinds": kinds}, separators=(",", ":"))


def main(words: list[str]) -> None:
    """Ask, deal, print and start."""
    asked, program = parse(words)
    if asked.prove is not None:
        import prove

        sys.exit(prove.main(asked, [host for host, _ in read_hostfile(asked.hostfile)] if asked.hostfile else []))
    # GPUs are numbered as nvidia-smi numbers them, and false waits between streams are fewer with 32 channels.
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    hosts = hosts_of_slurm() if asked.slurm else read_hostfile(asked.hostfile) if asked.hostfile else [("", 0)]
    if hosts[0][0]:
        told = ask(hosts, asked.slurm, asked.no_gpu)
    else:
        told = [look(asked.no_gpu) | {"versions": {}, "threads": LEVELS.index("multiple")}]
    check(told, [host or "this node" for host, _ in hosts])
    counts = deal(told, hosts, asked)
    nodes = [(facts, count) for facts, count in zip(told, counts, strict=True) if count]
    places = [place for facts, count in nodes for place in facts["places"][:count]]
    if len(nodes) == 1 or len({place["network"] for place in places}) > 1 or not places[0]["network"]:
        for place in places:  # adapters of different networks do not reach each other: the MPI knows which to use
            place["settings"] = {}
    os.environ["UNCUT_PLACES"] = table_of(nodes)
    used = [(host, count) for (host, _), count in zip(hosts, counts, strict=True) if count]
    command = start(used, asked.slurm, sys.executable, __file__, "--as-rank", *program)
    print(*lines_of_map(nodes), sep="\n", file=sys.stdout if asked.dry_run else sys.stderr, flush=True)
    if asked.dry_run:
        print(shlex.join(["env", *(f"{name}={os.environ[name]}" for name in forwarded()), *command]))
    else:
        began_s = time.time()
        with tempfile.TemporaryDirectory(prefix="uncut_mpi-") as folder:
            os.environ[LINKS] = folder
            status = run(command, signal.SIGTERM, passes_on=True)
            if status:
                remove_unfinished(folder)
        remove_left(began_s)
        if status and hosts[0][0]:
            others = start(
                [(host, 1) for host, _ in used], asked.slurm, sys.executable, __file__, "--tidy", str(began_s)
            )
            subprocess.run(["timeout", "--kill-after=5", "30", *others], check=False)
        sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(sys.argv[2:])
    elif sys.argv[1:2] == ["--tidy"]:
        remove_left(float(sys.argv[2]))
    elif sys.argv[1:2] == ["--answer"]:
        answer("--no-gpu" in sys.argv)
    else:
        main(sys.argv[1:])
