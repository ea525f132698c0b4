"""
Inputs that went bad, each of a kind: what comes from files, from other processes, from the command line, from callers.

Valid ones are changed at random: some of their bytes, or a value of the JSON that they hold. Each is then read as it
would be. That is right if it is still valid, or if it is an error of ours.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import json
import os
import pathlib
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import uncut_mpi as um
from tests.helpers.hostile import Hostile
from uncut_mpi.api.matrix_files import open_matrix
from uncut_mpi.bench import arguments as bench_arguments
from uncut_mpi.command import arguments, calibrate_arguments, planning
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.verify import verify
from uncut_mpi.segments import Segment
from uncut_mpi.spmd.values import decoded, encoded

ODD = [
    None, True, 0, -1, 1, 2, 7, 1 << 31, 1 << 40, 1 << 63, 10**30, 0.5, -2.5, 1e300, float("inf"), float("nan"), "",
    "k", "2", "h", "\0", "é" * 300, "nan", [], [1], [[1, 2], [3, 4]], {}, {"a": 1}, [None], [[]], "0,0,0", "f64",
    "cyclic",
]  # fmt: skip
HOSTILE = [*ODD, Hostile(), object(), b"x", 1j, np.float32(2), np.array([1, 2]), int, range(3)]

Read = Callable[[], object]


def bad_bytes(rng: random.Random, valid: bytes) -> bytes:
    """Return bytes of which some are changed, left out, doubled, or cut off."""
    data = bytearray(valid)
    hows = rng.choice(((3, 4), range(5)))  # of as many bytes, or not
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        how = rng.choice(hows)
        if how == 0:
            del data[at:]
        elif how == 1:
            data[at : at + rng.choice((1, 8))] = b""
        elif how == 2:
            data[at:at] = data[at : at + 16]
        elif how == 3 and len(data) >= at + 8:
            data[at : at + 8] = struct.pack("<q", rng.choice((-1, 1 << 31, 1 << 62, -(1 << 63), 0, 3)))
        else:
            data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)


def bad_value(rng: random.Random, valid: Any) -> Any:
    """Return plain values of which one is odd, lacks, or stands at another's place."""
    made = copy.deepcopy(valid)
    places: list[tuple[Any, Any]] = []

    def look(at: Any) -> None:
        for key in at if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], dict | list):
                look(at[key])

    look(made)
    of, key = rng.choice(places)
    how = rng.randrange(6)
    if how == 0:
        del of[key]
    elif how == 1:
        other, its = rng.choice(places)
        of[key] = copy.deepcopy(other[its])
    elif how == 2 and isinstance(of, dict):
        of[rng.choice(("name", "x", ""))] = of.pop(key)
    else:
        of[key] = rng.choice(ODD)
    return made


def bad_json(rng: random.Random, text: str) -> str:
    """Return the text of JSON in which a value or some bytes are bad."""
    if rng.random() < 0.3:
        return bad_bytes(rng, text.encode()).decode("latin1")
    return json.dumps(bad_value(rng, json.loads(text))) if rng.random() < 0.99 else "[" * 100_000


def read_schedule(data: bytes) -> None:
    schedule = Schedule.decode(data)
    verify(schedule)
    lower(schedule)


def open_segment(handle: bytes) -> None:
    Segment.open(handle).close()


def parse(parser: Callable[[list[str]], object], words: list[str]) -> None:
    with contextlib.suppress(HelpRequested):
        parser(words)


@contextlib.contextmanager
def kinds(folder: str) -> Iterator[dict[str, Callable[[random.Random], Read]]]:
    """Yield what makes an input of each kind, and returns what reads it."""
    machines = [load_machine(name).to_json() for name in machine_names()[:2]]
    problem = GemmProblem(40, 24, 30, DType.f64, reads_c=True)
    plans = [
        plan(problem, Placement.parse(where), 2, Machine.uniform(2), ScheduleOptions(scheduler=how)).schedule.encode()
        for how, where in (("uncut", "0,1,h"), ("kblocks", "h,0,1"))
    ]
    options = json.dumps(
        {"tile": 64, "grid": [2, 1], "row_shares": [1, 2.5], "blocking": {"rows": 8}, "search": "rule"}
    )
    segment = Segment.create(4096, "a test")
    device = MemoryHandle(7, "node", b"u" * 16, 1 << 20, 4096, 9, b"i" * 64).encode()
    sent = encoded([None, (1, 2.5), {"a": {3}}, "text" * 40, b"bytes", um.Layout.rows(), DType.f64])
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.ones((5, 4)))
    path = os.path.join(folder, "A.npy")
    lines = {
        arguments.parse: "-m 100 -n 77 -k 31 --dtype bf16 --trans-a T --alpha 2 --beta 0.5 --place 0,h,0 --grid 2x1",
        planning.parse: '-m 100 -n 77 -k 31 --ranks 2 --dtype f32 --scheduler uncut --options {"tile":128}',
        bench_arguments.parse_bench: "--repeat 3 --dtype f64",
        calibrate_arguments.parse_calibrate: "--quick",
    }

    def npy(rng: random.Random) -> Read:
        pathlib.Path(path).write_bytes(bad_bytes(rng, whole.getvalue()[: rng.choice((128, 288))]))

        def read() -> None:
            file = open_matrix(path)
            file.read_into(np.empty((file.rows, file.cols), file.dtype.numpy))

        return read

    def words(rng: random.Random) -> Read:
        parser, text = rng.choice([*lines.items()])
        made = text.split()
        made[rng.randrange(len(made))] = str(
            rng.choice([*ODD, "--", "-m", "--no-such", "1e400", "２", "-5", "--place=x"])
        )
        return lambda: parse(parser, made)

    def public(rng: random.Random) -> Read:
        odd = [rng.choice(HOSTILE) for _ in range(3)]
        return rng.choice(
            [
                lambda: GemmProblem(odd[0], 4, 4, DType.f64),
                lambda: GemmProblem(4, 4, 4, odd[0], trans_a=odd[1]),
                lambda: um.Layout.rows(odd[0]),
                lambda: um.Layout.blocks(odd[0], odd[1]),
                lambda: Placement.parse(odd[0]),
                lambda: Location.parse(odd[0]),
                lambda: load_machine(odd[0]),
                lambda: ScheduleOptions(tile=odd[0], grid=odd[1]),
                lambda: ScheduleOptions(devices=odd[0], scheduler=odd[1], metric=odd[2]),
                lambda: Machine.uniform(2, link_gb_per_s=odd[0], memory_bytes=odd[1]),
                lambda: Machine.uniform(3).subset(odd[0]),
                lambda: DType.parse(odd[0]),
            ]
        )

    def of(read: Callable[[Any], object], change: Callable[[random.Random, Any], Any], *valid: Any):
        def make(rng: random.Random) -> Read:
            bad = change(rng, rng.choice(valid))
            return lambda: read(bad)

        return make

    try:
        yield {
            "machine files": of(Machine.from_json, bad_json, *machines),
            "schedules": of(read_schedule, bad_bytes, *plans),
            "options": of(lambda text: ScheduleOptions.decoded(json.loads(text)), bad_options, options),
            "handles of shared memory": of(open_segment, bad_handle, segment.handle),
            "handles of device memory": of(MemoryHandle.decode, bad_bytes, device),
            "values from other ranks": of(decoded, bad_bytes, sent),
            ".npy files": npy,
            "words of commands": words,
            "arguments": public,
        }
    finally:
        segment.close()


def bad_options(rng: random.Random, text: str) -> str:
    return json.dumps(bad_value(rng, json.loads(text)))


def bad_handle(rng: random.Random, handle: bytes) -> bytes:
    return bad_bytes(rng, handle) if rng.random() < 0.5 else json.dumps(bad_value(rng, json.loads(handle))).encode()


def read_all(count: int, seed: int = 0) -> dict[str, collections.Counter[str]]:
    """
    Read so many bad inputs of each kind, and return how often what came of it.

    AssertionError for the first that is an error of another's, with what makes it again.
    """
    found: dict[str, collections.Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, kinds(folder) as every:
        for kind, make in every.items():
            found[kind] = collections.Counter()
            for number in range(count):
                read = make(random.Random(f"{kind} {seed} {number}"))
                try:
                    read()
                    said = "still valid"
                except um.UncutError as error:
                    said = type(error).__name__ if str(error) else "no message"
                except Exception as error:
                    raise AssertionError(
                        f"{kind}, seed {seed}, number {number}: {type(error).__name__}: {error}"
                    ) from error
                found[kind][said] += 1
    return found
