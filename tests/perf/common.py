"""What benchmarks share: in which order versions take turns, schedule options in words, random matrices."""

import numpy as np

import uncut_mpi as um
from uncut_mpi.command.product import Source
from uncut_mpi.planning.options import Blocking


def in_turns(count, rounds):
    """
    Return numbers below `count`, each once a round, in a random order that is the same on all ranks.

    Clocks sink with load, and rise while a device waits. In a fixed order each version would come after the same one,
    and gain by it if that one is slow.
    """
    order = np.random.default_rng(7)
    return [int(at) for _ in range(rounds) for at in order.permutation(count)]


def options_of(text):
    """Return the schedule options written as ``name=value`` words; those with ``k.`` are of `Blocking`."""
    values, blocking = {}, {}
    for word in text.split():
        name, value = word.split("=")
        value = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
        if name == "grid":
            value = tuple(int(part) for part in value.split("x"))
        if name == "areas":
            value = tuple(tuple(float(part) for part in column.split(",")) for column in value.split("/"))
        if name in ("devices", "row_shares", "col_shares"):
            value = tuple((int if name == "devices" else float)(part) for part in str(value).split(","))
        (blocking if name.startswith("k.") else values)[name.removeprefix("k.")] = value
    return um.ScheduleOptions(**values, blocking=Blocking(**blocking))


def pool(dtype):
    """Return one mebi-element of random values with the mantissa in use, the same on every rank."""
    return (np.random.default_rng(7).random(1 << 20) - 0.5).astype(dtype.numpy)


def source(rows, cols, values):
    """Return a matrix in Fortran order whose columns run through `values`, each from another start."""

    def fill(out, down, along):
        for at, column in enumerate(range(along.start, along.stop)):
            start = column * 7919 % (len(values) - rows) if rows < len(values) else 0
            out[:, at] = values[start + down.start : start + down.stop]

    return Source(rows, cols, "F", fill)


def say(session, text):
    """Print a line once."""
    if session.rank == 0:
        print(text, flush=True)
