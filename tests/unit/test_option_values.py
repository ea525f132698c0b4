"""Options, problems, places and machines take any number that is one, as Python's own; all else is a ParamError."""

from __future__ import annotations

import dataclasses
import fractions
import pathlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.hostile import Hostile
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.errors import ParamError, UncutError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.options import Blocking, ScheduleOptions

ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)
INTS = st.sampled_from([0, 1, 2, 3, 4, 8, 64, -1, 1 << 40, 1 << 62, 1 << 70, 10**400, 10**5000])
NUMPY = st.sampled_from(
    [
        np.int64(2), np.int8(1), np.uint64(4), np.uint64(2**64 - 1), np.float64(2.0), np.float32(0.5), np.float16(1),
        np.bool_(True), np.str_("k"), np.complex64(1), np.array(2), np.array([2, 2]), np.array([[1.0, 2.0], [3, 4]]),
        np.array([]), np.array(["a"]), np.array([None]), np.ma.masked, ml_dtypes.bfloat16(2),
    ]
)  # fmt: skip
ODD = st.one_of(
    INTS,
    NUMPY,
    st.none(),
    st.booleans(),
    st.floats(),
    st.sampled_from([2.0, 1e300, 10**400, 1j, fractions.Fraction(1, 2), fractions.Fraction(4, 2)]),
    st.sampled_from(["", "2", "k", "auto", "uncut", "time", "N", "T", "F", "C", "h", "0,0,0", "f64", b"k", "\0", "é"]),
    st.sampled_from([ENDLESS, {}, {1: 2}, {1, 2}, object(), Hostile(), int, range(3), range(10**30), b"\1\2"]),
    st.lists(st.one_of(INTS, NUMPY, st.floats(), st.none()), max_size=3),
    st.tuples(INTS, INTS),
    st.lists(st.lists(st.one_of(st.integers(1, 4), st.floats(0.1, 4)), max_size=2), max_size=2),
)
NAMES = st.sampled_from([one.name for one in dataclasses.fields(ScheduleOptions)])
OF_PROBLEM = st.sampled_from([one.name for one in dataclasses.fields(GemmProblem)][3:])
OF_BLOCKING = st.sampled_from([one.name for one in dataclasses.fields(Blocking)])


def plain(value: object) -> bool:
    """Whether a value is of Python's own types, through and through."""
    if dataclasses.is_dataclass(value):
        return all(plain(getattr(value, one.name)) for one in dataclasses.fields(value))
    if isinstance(value, Alike):
        value = value.runs
    if isinstance(value, tuple):
        return all(map(plain, value))
    return value is None or isinstance(value, DType) or type(value) in (int, float, bool, str)


def check(make: object, *args: object, **kwargs: object) -> None:
    """Make something of odd values: an error of ours, or plain values that compare, hash and have a repr."""
    try:
        made = make(*args, **kwargs)  # type: ignore[operator]
    except UncutError as error:
        assert str(error)  # noqa: PT017 (most odd values are no error)
        return
    assert plain(made), made
    assert hash(made) == hash(dataclasses.replace(made))
    assert repr(made) == repr(dataclasses.replace(made))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.dictionaries(NAMES, ODD, max_size=2))
def test_odd_options(values: dict[str, object]) -> None:
    check(ScheduleOptions, **values)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(OF_BLOCKING, ODD, max_size=2))
def test_odd_blockings(values: dict[str, object]) -> None:
    check(Blocking, **values)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(ODD, min_size=3, max_size=3), st.dictionaries(OF_PROBLEM, ODD, max_size=2))
def test_odd_problems(extents: list[object], values: dict[str, object]) -> None:
    check(GemmProblem, *extents, **{"dtype": DType.f64, **values})
    for at in range(3):
        check(GemmProblem, *[8] * at, extents[at], *[8] * (2 - at), DType.f64)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ODD, ODD, ODD)
def test_odd_matrices_and_places(one: object, two: object, three: object) -> None:
    check(StoredMatrix, one, two, three)
    check(StoredMatrix, one, two, "F", three)
    check(Location, one, two)
    check(Location.device, one)
    check(Location.host, two)
    check(Location.parse, one)
    check(Placement, one, two, three)
    check(Placement, Location.host(), Location.host(), one)
    check(Placement.parse, two)
    matrix = StoredMatrix(8, 8)
    check(GemmProblem.from_operands, matrix, matrix, matrix, dtype=one, reads_c=two)
    check(GemmProblem.from_operands, matrix, one, matrix, dtype=DType.f64)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ODD, st.dictionaries(st.sampled_from([one.name for one in dataclasses.fields(Machine)]), ODD, max_size=2))
def test_odd_machines_and_types(one: object, values: dict[str, object]) -> None:
    machine = Machine.uniform(3)
    for make in (
        lambda: DType.parse(one),
        lambda: machine.subset(one),  # type: ignore[arg-type]
        lambda: machine.check_ranks(one),  # type: ignore[arg-type]
        lambda: machine.host_rates(one),  # type: ignore[arg-type]
        lambda: machine.links(sharing=one),  # type: ignore[arg-type]
        lambda: machine.gemm_rate(one),  # type: ignore[arg-type]
        lambda: machine.has_gemm_rate(one),  # type: ignore[arg-type]
        lambda: dataclasses.replace(machine, **values),
        lambda: Machine.uniform(2, **dict.fromkeys(("link_gb_per_s", "memory_bytes"), one)),  # type: ignore[arg-type]
        lambda: Machine.uniform(one) if not isinstance(one, int) or abs(one) < 100 or one > 10**6 else None,  # type: ignore[arg-type]
        lambda: Machine.from_json(one),  # type: ignore[arg-type]
        lambda: load_machine(one),  # type: ignore[arg-type]
    ):
        try:
            make()
        except UncutError as error:
            assert str(error)  # noqa: PT017 (most odd values are no error)


def key(options: ScheduleOptions, **problem: object) -> bytes:
    made = GemmProblem(**{"m": 8, "n": 9, "k": 10, "dtype": DType.f64, **problem})  # type: ignore[arg-type]
    return PlanKey(made, Placement.parse("0,1,h"), options).digest


def test_equal_values_have_one_key() -> None:
    options = ScheduleOptions(grid=(2, 1), row_shares=(1, 3), tile=64, devices=(1, 0), areas=None, caching=True)
    for other in (
        ScheduleOptions(
            grid=np.array([2, 1], np.int32), row_shares=[np.float32(1), np.int64(3)], tile=np.uint8(64),  # type: ignore[arg-type]
            devices=(np.int64(1), 0), caching=np.bool_(True),
        ),
        ScheduleOptions(grid=[2, 1], row_shares=(1.0, 3.0), tile=64, devices=range(1, -1, -1)),  # type: ignore[arg-type]
    ):  # fmt: skip
        assert (other, hash(other), repr(other)) == (options, hash(options), repr(options))
        assert key(other) == key(options)
    assert key(options, m=np.int64(8), reads_c=np.bool_(True), trans_a=np.str_("N")) == key(options)
    assert repr(Location.device(np.int64(1))) == repr(Location.device(1))  # type: ignore[arg-type]
    assert repr(Blocking(splits=np.int64(2), order=np.str_("k"))) == repr(Blocking(splits=2, order="k"))  # type: ignore[arg-type]


def test_what_is_no_number_of_something_is_refused_with_its_value() -> None:
    for make, message in (
        (lambda: ScheduleOptions(tile=2.0), r"tile = 2\.0 is a float: pass a whole number"),  # type: ignore[arg-type]
        (lambda: ScheduleOptions(tile=True), r"tile = True is a bool: pass a whole number"),
        (lambda: ScheduleOptions(caching="no"), r"caching = 'no' is a str: pass True or False"),  # type: ignore[arg-type]
        (lambda: ScheduleOptions(grid=(2,)), r"grid = \(2,\) .* two"),  # type: ignore[arg-type]
        (lambda: ScheduleOptions(row_shares=("1", 2)), r"row_shares\[0\] = '1' is a str"),  # type: ignore[arg-type]
        (lambda: ScheduleOptions(scheduler=3), r"scheduler = 3 is an int: pass a word"),  # type: ignore[arg-type]
        (lambda: Blocking(columns="4"), r"columns = '4' is a str: pass a whole number"),  # type: ignore[arg-type]
        (lambda: GemmProblem(8.0, 8, 8, DType.f64), r"m = 8\.0 is a float: pass a whole number"),  # type: ignore[arg-type]
        (lambda: GemmProblem(8, 8, 8, "f64"), r"dtype = 'f64' is a str: pass a DType"),  # type: ignore[arg-type]
        (lambda: StoredMatrix(8, None), r"cols = None is a NoneType: pass a whole number"),  # type: ignore[arg-type]
        (lambda: Location.device(None), r"rank = None is a NoneType"),  # type: ignore[arg-type]
        (lambda: Placement.parse(3), r"placement 3 "),  # type: ignore[arg-type]
        (lambda: Machine.uniform(0), r"0 ranks"),
        (lambda: Machine.uniform(10**9), r"1000000000 ranks"),
    ):
        with pytest.raises(ParamError, match=message):
            make()


def test_a_path_of_a_machine_may_be_a_path(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(Machine.uniform(2).to_json())
    assert load_machine(file).num_ranks == 2
