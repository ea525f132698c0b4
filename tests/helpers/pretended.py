"""
Stand-ins for what launchers start, on nodes that are folders: ``python -m tests.helpers.pretended WHAT WORDS``.

`WHAT` is ``mpiexec``, ``srun`` or ``scontrol``, or ``python`` for what runs ``launch/ranks.py``. The environment says
the rest: PRETENDED is the folder that has one for each node. Of a node, ``says`` has what it says beside what it has,
and where there is ``dead`` it is not reached. Every launcher writes down what it was told.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import types
from pathlib import Path

RANKS = Path(__file__).resolve().parents[2] / "launch" / "ranks.py"
sys.path.insert(0, str(RANKS.parent))  # as Python does for what runs there
NODES = Path(os.environ.get("PRETENDED", "/nowhere"))


def load_ranks(node: str):
    """Return launch/ranks.py as it is on a node."""
    spec = importlib.util.spec_from_file_location("launch_ranks", RANKS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.ROOT, module.platform = NODES / node, types.SimpleNamespace(node=lambda: node)
    return module


def look(node: str, no_gpu: bool) -> dict:
    """Return what a node says of itself."""
    os.environ["NODE"] = node
    facts = load_ranks(node).look(no_gpu) | {"node": node, "threads": 3}
    facts["versions"] = {"uncut_mpi": "1", "MPI": "MPICH 5"}
    said = NODES / node / "says"
    return facts | (json.loads(said.read_text()) if said.exists() else {})


def launch(what: str, words: list[str]) -> int:
    """Start each rank in turn, or have each node answer."""
    with (NODES / "told").open("a") as told:
        print(what, *words, file=told)
    long = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if what == "srun":
        size, each = int(long["--ntasks"]), int(long["--distribution"].removeprefix("plane="))
        hosts = [name for name in long["--nodelist"].split(",") for _ in range(each)][:size]
        command = words[len(long) :]
        names = "SLURM_PROCID", "SLURM_LOCALID"
    else:
        size = int(words[words.index("-n") + 1])
        at = next((words.index(option) + 1 for option in ("-hosts", "--host") if option in words), 0)
        counts = [part.split(":") for part in words[at].split(",")] if at else [("here", size)]
        hosts = [name for name, count in counts for _ in range(int(count))]
        command = words[next(i for i, word in enumerate(words) if word.startswith("/") or word == "true") :]
        names = "PMI_RANK", "MPI_LOCALRANKID"
        if "--host" in words:
            names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"
    dead = [host for host in hosts if (NODES / host / "dead").exists()]
    if dead:
        print(f"no route to {dead[0]}", file=sys.stderr)
        return 255
    if "--answer" in command:
        facts = [look(host, "--no-gpu" in command) for host in hosts]
        print(load_ranks("here").MARK + json.dumps(facts))
        return 0
    if os.environ.get("DEALS_OTHERWISE") == "hosts":
        hosts = hosts[::-1]
    for rank, host in enumerate(hosts):
        other = os.environ.get("DEALS_OTHERWISE") == "local"
        number = (
            {} if os.environ.get("NO_RANK") else {names[0]: str(rank), names[1]: str(hosts[:rank].count(host) + other)}
        )
        process = os.fork()  # which need not load everything again
        if not process:
            os.environ |= {**number, "NODE": host}
            try:
                main("python", command[1:])
            except SystemExit as end:
                if isinstance(end.code, int):
                    os._exit(end.code)
                os.write(2, f"{end.code}\n".encode())
            os._exit(1)
        if os.waitpid(process, 0)[1]:
            return 1
    return 0


def main(what: str, words: list[str]) -> int:
    """Be what is asked for."""
    if what == "scontrol":
        print(words[2].replace(",", "\n"))
        return 0
    if what != "python":
        return launch(what, words)
    if not words or Path(words[0]) != RANKS:  # another program
        os.execv(sys.executable, [sys.executable, *words])
    ranks = load_ranks(os.environ.get("NODE", "here"))
    ranks.as_rank(words[2:]) if words[1:2] == ["--as-rank"] else ranks.main(words[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
