"""What ranks send each other is values: no class and no function of anything else is named by the bytes that come."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random

import numpy as np
import pytest

import uncut_mpi as um
from uncut_mpi.model.dtypes import DType
from uncut_mpi.spmd.values import decoded, encoded

VALUES = [
    None, True, 1 << 200, 1.5, 2j, "text", b"bytes", bytearray(b"x"), (1, [2, {3: {4}}]), frozenset({5}), range(6),
    slice(7), np.float32(8), np.datetime64("2026-01-01"), DType.bf16, np.float64, um.Layout.rows(),
    um.ScheduleOptions(),
]  # fmt: skip


class Runs:
    """Is made again by a call."""

    def __init__(self, call, *arguments):
        self.call = call, arguments

    def __reduce__(self):
        return self.call


@dataclasses.dataclass
class Foreign:
    """A value of a program's own."""

    number: int = 1


HOSTILE = {
    "a command": Runs(os.system, "exit 3"),
    "an expression": Runs(eval, "1 / 0"),
    "an attribute": Runs(getattr, "x", "format"),
    "a file": Runs(open, "/dev/null"),
    "a function of numpy's": Runs(np.fromfile, "/dev/null"),
    "a function of ours": Runs(um.load_machine, "dgx_h100"),
    "an object of ours": Runs(um.Session, None),
    "a module of ours": Runs(um.Machine.from_json, "{}"),
    "a foreign value": Foreign(),
    "a class": Foreign,
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_arrive_as_they_are(value):
    got = decoded(encoded(value))
    assert type(got) is type(value)
    assert got == value


def test_a_machine_arrives_as_it_is():
    machine = um.Machine.uniform(2)
    assert decoded(encoded(machine)).to_json() == machine.to_json()


@pytest.mark.parametrize("dtype", ["f8", "c16", "<i4", "U3", [("a", "i4"), ("b", "f8")]])
def test_so_do_arrays(dtype):
    for array in (
        np.zeros(0, dtype),
        np.zeros((3, 2), dtype),
        np.zeros((4, 6), dtype)[::2, ::3],
        np.zeros((3, 2), dtype, "F"),
    ):
        got = decoded(encoded(array))
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert got.tobytes() == array.tobytes()


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_would_run_code_is_refused(what, protocol):
    with pytest.raises(um.ParamError, match="is not sent from rank to rank"):
        decoded(pickle.dumps([1, HOSTILE[what]], protocol))


def test_a_name_behind_a_dot_is_no_way_out():
    for name in ("os.system", "dataclasses.sys.modules", "np.load", "ParamError.__init__"):
        text = b"\x80\x04\x8c\x17uncut_mpi.spmd.values  \x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(um.ParamError):
            decoded(text.replace(b"\x17uncut_mpi.spmd.values  ", b"\x15uncut_mpi.spmd.values"))


def test_bytes_that_are_no_values_are_an_error_of_ours():
    valid, rng = encoded(VALUES[:12]), random.Random(5)
    for _ in range(300):
        data = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decoded(data[: rng.randint(0, 2 * len(data))])
        except um.UncutError:
            continue
