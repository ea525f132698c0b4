"""
Uses one process for long, and says what it uses of the system meanwhile.

    mpiexec -n N python3 -m mpi4py tests/perf/soak.py OUT.json [CALLS [SESSIONS [OUT.png]]]

A tenth of the calls (of 100,000) are random sequences (tests/helpers/sequences.py), with errors among them, but no
interrupts: sessions that these break are kept until the end. The others are a mix of calls in one session, over and
over. Then come as many sessions as asked for (1,000), each with a product: closed; then dropped unclosed, which the
next one gives back. Each rank samples itself; the table is of the rank that grew most.
"""

from __future__ import annotations

import functools
import gc
import json
import pathlib
import sys
import time
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from tests.helpers import sequences
from tests.helpers.usage import communicators_left, usage
from uncut_mpi.api.gate import Gate

PART, SAMPLES = 250, 20


def counted():
    """Count calls in sessions from now on; the number is the only item of what is returned."""
    opened, calls = Gate.open, [0]

    def counting(gate, *arguments, **named):
        calls[0] += 1
        return opened(gate, *arguments, **named)

    mock.patch.object(Gate, "open", counting).start()
    return calls


def product(comm, *, close):
    """Open a session, multiply in it, and close or drop it."""
    session = um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size))
    a = session.empty_host((8, 8), "f64")
    session.gemm(a, a)
    if close:
        session.close()


def mix(session):
    """Return calls that are made over and over: matrices that come and go, products of all forms, errors."""
    kinds, rank = [(24, "f64"), (17, "f32"), (33, "c64"), (40, "bf16")], session.rank
    held = [[session.empty_host((edge, edge), dtype) for _ in range(3)] for edge, dtype in kinds]
    dealt = session.empty((30, 30), "f64", um.Layout.rows(), memory="device")
    mine, plans = np.ones((20, 20)), [session.plan(*of_kind) for of_kind in held]
    views = held[0][0][:8, :9], held[0][1][:9, :7]  # once: 256 calls are known again

    def refused(call, *arguments, **named):
        try:
            call(*arguments, **named)
        except um.UncutError:
            return
        raise AssertionError(f"{call} works")

    def new():
        session.release(session.empty_host((9, 9), "f64"))

    def several():
        for begun in [session.gemm(*of_kind, wait=False) for of_kind in held]:
            begun.wait()

    return [
        *(functools.partial(plan.execute, 2.0) for plan in plans),
        *(functools.partial(session.gemm, *of_kind, trans_a="T") for of_kind in held),
        lambda: session.gemm(*held[0][:2]),
        lambda: session.gemm(*views),
        lambda: session.gather(dealt, root=0),
        lambda: session.redistribute(dealt, um.Layout.cols()),
        lambda: session.scatter(mine if rank == 0 else None, um.Layout.rows(), 0),
        lambda: session.release(session.register(mine if rank == 0 else None, root=0)),
        lambda: session.upload(held[0][0], held[0][2]),
        lambda: plans[0].trace(1.0),
        lambda: session.gather_values((rank, mine[0])),
        lambda: session.agree({"a": [1, 2]}, "a value"),
        lambda: refused(session.gemm, held[0][0], held[1][1]),
        lambda: refused(session.agree, rank if session.size > 1 else object(), "a value"),
        lambda: refused(session.empty_host, (-1, 2)),
        session.barrier,
        session.poison_softbuf,
        new,
        several,
    ]


def phases(comm, calls, sessions):
    """Yield the name of each phase, and a generator of what it has done so far."""

    def random_calls():
        made, seed = counted(), 0
        while made[0] < calls / 10:
            sequences.run(comm, seed, PART)
            seed += 1
            yield made[0]

    def repeated():
        with um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size)) as session:
            each, done = mix(session), 0
            while done < 0.9 * calls:
                for _ in range(max(1, int(0.9 * calls / SAMPLES / len(each)))):
                    for call in each:
                        call()
                    done += len(each)
                yield done

    def many(*, close):
        for number in range(SAMPLES):
            for _ in range(max(1, sessions // SAMPLES)):
                product(comm, close=close)
            yield (number + 1) * max(1, sessions // SAMPLES)

    yield "random calls", random_calls()
    yield "repeated calls", repeated()
    yield "sessions closed", many(close=True)
    yield "sessions dropped", many(close=False)


def soak(comm, calls, sessions):
    """Return of each phase the samples of every rank, and the communicators in use behind it beside before all."""
    um.Session(comm, backend="host").close()
    sequences.WEIGHTS["interrupt"] = 0
    found, free = {}, communicators_left(comm)
    for name, phase in phases(comm, calls, sessions):
        samples, began = [], time.perf_counter()
        for done in phase:
            gc.collect()
            comm.Barrier()
            samples.append(usage() | {"done": done, "seconds": time.perf_counter() - began})
        product(comm, close=True)  # gives back what was dropped last
        used = free - communicators_left(comm)
        found[name] = {"ranks": comm.gather(samples), "communicators": used}
    return found


def growth(samples, what):
    """Return by how much something grows each time in the second half of a phase, by its first and last samples."""
    half = samples[len(samples) // 2 :] if len(samples) > 2 else samples
    times = half[-1]["done"] - half[0]["done"]
    return (half[-1][what] - half[0][what]) / times if times else 0.0


NAMES = "rss_bytes", "malloc_bytes", "blocks", "objects", "descriptors", "mappings", "shm_files"


def table(found):
    """Return the growths as lines of a table."""
    lines = [f"| per call or session, in the second half | {' | '.join(found)} |", "| --- |" + " ---: |" * len(found)]
    for what in NAMES:
        each = [max(growth(samples, what) for samples in phase["ranks"]) for phase in found.values()]
        lines.append(f"| {what} | {' | '.join(f'{value:.3g}' for value in each)} |")
    lines.append(
        f"| communicators more than before all | {' | '.join(str(one['communicators']) for one in found.values())} |"
    )
    lines.append(f"| done | {' | '.join(str(one['ranks'][0][-1]['done']) for one in found.values())} |")
    return "\n".join(lines)


def plot(found, path):
    """Draw what rank 0 uses over what it has done."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {"rss_bytes": ("resident memory (MB)", 1e-6), "malloc_bytes": ("malloc (MB)", 1e-6)}
    drawn |= {
        "blocks": ("Python's blocks (thousands)", 1e-3),
        "descriptors": ("descriptors", 1),
        "mappings": ("mappings", 1),
    }
    figure, axes = pyplot.subplots(len(drawn), len(found), figsize=(11, 9), sharex="col", sharey="row", squeeze=False)
    for column, (name, phase) in zip(axes.T, found.items(), strict=True):
        samples = phase["ranks"][0]
        for axis, (what, (label, factor)) in zip(column, drawn.items(), strict=True):
            axis.plot([one["done"] for one in samples], [one[what] * factor for one in samples], marker=".")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
            if axis in axes[:, 0]:
                axis.set_ylabel(label)
        column[-1].set_xlabel(name)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(out, calls="100000", sessions="1000", picture=""):
    comm = MPI.COMM_WORLD
    found = soak(comm, int(calls), int(sessions))
    if comm.rank == 0:
        about = {"date": time.strftime("%Y-%m-%d"), "ranks": comm.size, "mpi": MPI.Get_library_version().split("\n")[0]}
        pathlib.Path(out).write_text(json.dumps(about | {"phases": found}))
        print(table(found), flush=True)
        if picture:
            plot(found, picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
