"""Errors as they travel between ranks, and the values of the model."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from uncut_mpi import errors
from uncut_mpi.errors import (
    CapacityError,
    DataFileError,
    ParamError,
    PeerFailedError,
    ScheduleError,
    TopologyError,
    UncutError,
)
from uncut_mpi.model.dtypes import DType, arithmetic_of, three_of
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.ports import Port
from uncut_mpi.model.problem import GemmProblem, StoredMatrix

# -- errors ----------------------------------------------------------------------------------------

TREE = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, UncutError)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError(), OSError(), OSError(5, None), ValueError(" ")])
def test_an_error_that_says_nothing_is_told_by_its_type(error: BaseException) -> None:
    assert errors.reason(error)
    for said in (errors.reason(error), errors.named(error), " ".join(errors.to_wire(error))):
        assert not said.endswith((":", " "))
    assert errors.named(error).startswith(type(error).__name__)
    assert errors.named(KeyError("x")) == "KeyError: 'x'"
    assert errors.reason(FileNotFoundError(2, "No such file", "x.npy")) == "No such file"


def test_what_others_raise_is_told_through_one_function() -> None:
    """Other errors may have no text: a sentence that ends with it would end at its colon."""
    found, looked_at = [], 0
    folder = pathlib.Path(errors.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py") if path.name != "errors.py"}
    ours = {one.name for tree in trees.values() for one in ast.walk(tree) if isinstance(one, ast.ClassDef)}
    ours |= {cls.__name__ for cls in TREE}
    for path, tree in trees.items():
        for handler in ast.walk(tree):
            if not isinstance(handler, ast.ExceptHandler) or handler.type is None or handler.name is None:
                continue
            looked_at += 1
            types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            if {ast.unparse(one) for one in types} <= ours:
                continue
            for one in ast.walk(handler):
                bare = f"{{{handler.name}}}", f"{{{handler.name}.strerror}}", f"str({handler.name})"
                if isinstance(one, ast.FormattedValue | ast.Call) and ast.unparse(one).strip("f'\"") in bare:
                    found.append(f"{path.relative_to(folder)}:{one.lineno}")
    assert looked_at > 50
    assert not found, "tell it with errors.reason or errors.named"


@pytest.mark.parametrize("cls", TREE)
def test_an_error_of_ours_travels_as_its_own_type(cls: type[UncutError]) -> None:
    back = errors.from_wire(*errors.to_wire(cls("needs 5, has 3")), rank=2)
    assert type(back) is cls
    assert str(back) == "needs 5, has 3"


def test_a_foreign_error_arrives_as_a_failed_peer_with_its_rank() -> None:
    back = errors.from_wire(*errors.to_wire(ZeroDivisionError("division by zero")), rank=2)
    assert type(back) is PeerFailedError
    assert str(back) == "rank 2 raised ZeroDivisionError: division by zero"


def test_an_error_without_message_travels_with_its_representation() -> None:
    assert errors.to_wire(KeyError()) == ("KeyError", "KeyError()")


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (ParamError, ValueError),
        (DataFileError, ValueError),
        (TopologyError, RuntimeError),
        (ScheduleError, RuntimeError),
        (CapacityError, MemoryError),
        (errors.StallError, TimeoutError),
    ],
)
def test_errors_can_be_caught_as_the_builtin_they_extend(cls: type[UncutError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)
    assert issubclass(cls, UncutError)


# -- element types ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("f64", DType.f64),
        ("bf16", DType.bf16),
        ("float32", DType.f32),
        (np.float16, DType.f16),
        ("tf32", DType.tf32),
        ("c64", DType.c64),
        (complex, DType.c128),
        (np.dtype("<c8"), DType.c64),
        (np.float32, DType.f32),
        (np.dtype("<f8"), DType.f64),
        (ml_dtypes.bfloat16, DType.bf16),
        (DType.f16, DType.f16),
    ],
)
def test_dtypes_are_parsed_from_names_and_numpy_types(value: object, expected: DType) -> None:
    assert DType.parse(value) is expected


@pytest.mark.parametrize("value", ["f128", "int64", np.clongdouble, np.dtype(">f8"), object(), "", 3])
def test_other_dtypes_are_refused_with_the_choice(value: object) -> None:
    with pytest.raises(ParamError, match="use one of f64, f32, f16, bf16, tf32, c64, c128, i8, i32, e4m3, e5m2"):
        DType.parse(value)


@pytest.mark.parametrize("dtype", list(DType))
def test_sizes_accumulators_and_roundoffs_fit_the_numpy_type(dtype: DType) -> None:
    assert dtype.itemsize == dtype.numpy.itemsize
    assert dtype.unit_roundoff == (0 if dtype.is_integer else float(ml_dtypes.finfo(dtype.numpy).eps) / 2)
    assert dtype.sums_wider == (dtype in (DType.f16, DType.bf16, DType.i8, DType.e4m3, DType.e5m2))
    assert dtype.accumulator is ((DType.i32 if dtype.is_integer else DType.f32) if dtype.sums_wider else dtype)


@pytest.mark.parametrize(
    ("types", "told"),
    [
        ("f16,bf16,f32", "A is f16, B is bf16, C is f32; convert them to one"),
        ("f32,f32,f16", "A is f32, B is f32, C is f16; let C be f32"),
        ("i8,i8,i8", "let C be i32"),
        ("i8,e4m3,i32", "A is i8, B is e4m3, C is i32; convert"),
        ("e4m3,e5m2,e4m3", "let C be f32 or bf16 or f16"),
        ("i32,i32,i32", "convert A and B"),
    ],
)
def test_types_that_do_not_go_together_are_refused_with_those_that_do(types: str, told: str) -> None:
    with pytest.raises(ParamError, match=told):
        arithmetic_of(tuple(DType[name] for name in types.split(",")))


def test_one_type_stands_for_all_with_the_usual_c() -> None:
    assert three_of(DType.i8) == (DType.i8, DType.i8, DType.i32)
    assert three_of(DType.e4m3) == (DType.e4m3, DType.e4m3, DType.f32)
    assert GemmProblem(2, 2, 2, (DType.f16, DType.f16, DType.f32)).accumulator is DType.f32
    assert not GemmProblem(2, 2, 2, (DType.f16, DType.f16, DType.f32)).rounds_c
    assert GemmProblem(2, 2, 2, three_of(DType.i8)) == GemmProblem(2, 2, 2, DType.i8)
    copied = GemmProblem(2, 2, 0, (DType.i8,) * 3, reads_c=False, copies=True)
    assert copied.dtypes == (DType.i8,) * 3


# -- placement -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "space", "rank"), [("h", "host", None), ("h3", "host", 3), ("0", "device", 0), (" 12 ", "device", 12)]
)
def test_locations_are_parsed(text: str, space: str, rank: int | None) -> None:
    assert Location.parse(text) == Location(space, rank)


@pytest.mark.parametrize("text", ["", "x", "-1", "h-1", "1h", "hh", "1.0", "H"])
def test_other_locations_are_refused(text: str) -> None:
    with pytest.raises(ParamError, match="is not a location"):
        Location.parse(text)


@pytest.mark.parametrize("text", ["h,h,h", "0,0,0", "2,1,h", "h4,11,h"])
def test_placements_print_as_they_are_written(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "0,0", "0,0,0,0"])
def test_placements_have_three_parts(text: str) -> None:
    with pytest.raises(ParamError, match="write three, for A, B and C"):
        Placement.parse(text)


@pytest.mark.parametrize(("text", "name"), [("4,0,h", "A"), ("0,h4,h", "B"), ("h,3,5", "C")])
def test_a_placement_on_a_missing_rank_names_matrix_rank_and_ranks(text: str, name: str) -> None:
    with pytest.raises(ParamError, match=rf"matrix {name} is placed on rank [45], but there are 4 ranks"):
        Placement.parse(text).check_ranks(4)


# -- problem ---------------------------------------------------------------------------------------

TRANSPOSE = {"N": lambda x: x, "T": lambda x: x.T}


def store(matrix: np.ndarray, order: str, ld: int) -> np.ndarray:
    """Return memory that holds `matrix` in an order with a leading dimension, poisoned in between."""
    lines, width = matrix.shape[::-1] if order == "F" else matrix.shape
    memory = np.full(lines * ld, np.nan)
    memory.reshape(lines, ld)[:, :width] = matrix.T if order == "F" else matrix
    return memory


def load(memory: np.ndarray, shape: tuple[int, int], ld: int) -> np.ndarray:
    """Return the column-major matrix that lies in memory."""
    return memory.reshape(-1, ld).T[: shape[0], : shape[1]]


@pytest.mark.parametrize("orders", list(itertools.product("FC", repeat=3)))
@pytest.mark.parametrize("trans", list(itertools.product("NT", repeat=2)))
def test_every_order_and_transposition_becomes_the_same_product(orders, trans) -> None:
    rng = np.random.default_rng(5)
    m, n, k = 3, 4, 5
    a = rng.random((m, k) if trans[0] == "N" else (k, m))
    b = rng.random((k, n) if trans[1] == "N" else (n, k))
    shapes = (a.shape, b.shape, (m, n))
    stored = [
        StoredMatrix(*shape, order, (shape[0] if order == "F" else shape[1]) + 2)
        for shape, order in zip(shapes, orders, strict=True)
    ]
    problem = GemmProblem.from_operands(*stored, dtype=DType.f64, trans_a=trans[0], trans_b=trans[1])
    assert problem.swapped == (orders[2] == "C")
    inputs = [store(x, s.order, s.ld) for x, s in zip((a, b), stored, strict=False)]
    first, second = reversed(inputs) if problem.swapped else inputs
    left = TRANSPOSE[problem.trans_a](load(first, problem.a_shape, problem.lda))
    right = TRANSPOSE[problem.trans_b](load(second, problem.b_shape, problem.ldb))
    memory = store(np.zeros((m, n)), orders[2], stored[2].ld)
    load(memory, (problem.m, problem.n), problem.ldc)[...] = left @ right
    expected = store(TRANSPOSE[trans[0]](a) @ TRANSPOSE[trans[1]](b), orders[2], stored[2].ld)
    np.testing.assert_allclose(memory, expected, rtol=1e-14)


@pytest.mark.parametrize("orders", list(itertools.product("FC", repeat=3)))
@pytest.mark.parametrize("trans", list(itertools.product("NTCR", repeat=2)))
def test_a_conjugated_factor_is_op_c_where_its_order_allows_it(orders, trans) -> None:
    stored = [StoredMatrix(4, 4, order) for order in orders]
    ops = list(zip(trans, orders[:2], strict=True))
    # It is transposed where its order is that of C, or it is not to be transposed and its order is the other one.
    if any((op == "C" and order != orders[2]) or (op == "R" and order == orders[2]) for op, order in ops):
        with pytest.raises(ParamError, match="conjugated and not transposed"):
            GemmProblem.from_operands(*stored, dtype=DType.c64, trans_a=trans[0], trans_b=trans[1])
    else:
        problem = GemmProblem.from_operands(*stored, dtype=DType.c64, trans_a=trans[0], trans_b=trans[1])
        found = (problem.trans_b, problem.trans_a) if problem.swapped else (problem.trans_a, problem.trans_b)
        assert [op == "C" for op in found] == [op in "CR" for op in trans]
    real = GemmProblem.from_operands(*stored, dtype=DType.f64, trans_a=trans[0], trans_b=trans[1])
    plain = {"C": "T", "R": "N"}
    assert real == GemmProblem.from_operands(
        *stored, dtype=DType.f64, **{f"trans_{name}": plain.get(op, op) for name, op in zip("ab", trans, strict=True)}
    )


def test_op_c_of_a_real_problem_is_op_t() -> None:
    assert GemmProblem(3, 4, 5, DType.f32, "C", "C") == GemmProblem(3, 4, 5, DType.f32, "T", "T")
    assert GemmProblem(3, 4, 5, DType.c64, "C") != GemmProblem(3, 4, 5, DType.c64, "T")


def test_a_machine_without_a_complex_rate_has_a_quarter_of_the_real_one() -> None:
    rates = {"f64": 60.0, "f32": 40.0, "c64": 12.0}
    machine = Machine.uniform(2, gemm_tflop_per_s=rates)
    assert machine.gemm_rate(DType.c128).tolist() == [15e12, 15e12]
    assert machine.typical_gemm_rate(DType.c64).tolist() == [12e12, 12e12]
    assert not Machine.uniform(2, gemm_tflop_per_s={"f32": 40.0}).has_gemm_rate(DType.c128)


def test_shapes_that_do_not_fit_are_named_alone_and_as_they_were_given() -> None:
    with pytest.raises(ParamError, match=r"fit: A is 3×5 and B is 6×4; the columns of A must equal the rows of B$"):
        GemmProblem.from_operands(StoredMatrix(3, 5), StoredMatrix(6, 4), StoredMatrix(3, 4), dtype=DType.f64)
    with pytest.raises(ParamError, match=r"fit: op\(A\) is 5×3 and B is 6×4; the columns of op\(A\) must"):
        GemmProblem.from_operands(
            StoredMatrix(3, 5), StoredMatrix(6, 4), StoredMatrix(3, 4), dtype=DType.f64, trans_a="T"
        )
    with pytest.raises(ParamError, match="so C must be 3×4, and is 4×3"):
        GemmProblem.from_operands(StoredMatrix(3, 5), StoredMatrix(5, 4), StoredMatrix(4, 3), dtype=DType.f64)


def test_a_problem_refuses_matrices_that_cannot_be_addressed() -> None:
    with pytest.raises(ParamError, match="B has 100000000000×100000000000 elements of 2 bytes, more than can be addr"):
        GemmProblem(7, 10**11, 10**11, DType.f16)
    with pytest.raises(ParamError, match="C has 4611686018427387904×7 elements of 8 bytes"):
        GemmProblem(7, 7, 7, DType.f64, ldc=1 << 62)


@pytest.mark.parametrize("trans", ["X", "n", ""])
def test_unknown_transpositions_are_refused(trans: str) -> None:
    with pytest.raises(ParamError, match="use 'N', 'T' or 'C'"):
        GemmProblem.from_operands(
            StoredMatrix(2, 2), StoredMatrix(2, 2), StoredMatrix(2, 2), dtype=DType.f64, trans_b=trans
        )
    with pytest.raises(ParamError, match="use 'N', 'T' or 'C'"):
        GemmProblem(2, 2, 2, DType.f64, trans_a=trans)


@pytest.mark.parametrize(("order", "least"), [("F", 3), ("C", 5)])
def test_a_leading_dimension_below_a_line_is_refused(order: str, least: int) -> None:
    assert StoredMatrix(3, 5, order).ld == least
    with pytest.raises(ParamError, match=f"is below {least}"):
        StoredMatrix(3, 5, order, least - 1)


def test_stored_matrices_refuse_other_orders_and_negative_extents() -> None:
    with pytest.raises(ParamError, match="column-major"):
        StoredMatrix(3, 5, "K")
    with pytest.raises(ParamError, match="3×-5 has a negative extent"):
        StoredMatrix(3, -5)


def test_the_same_memory_read_as_column_major() -> None:
    assert StoredMatrix(3, 5, "F").column_major_shape == (3, 5)
    assert StoredMatrix(3, 5, "C").column_major_shape == (5, 3)


@pytest.mark.parametrize("name", ["lda", "ldb", "ldc"])
def test_a_problem_refuses_leading_dimensions_below_the_stored_rows(name: str) -> None:
    problem = GemmProblem(3, 4, 5, DType.f64, trans_a="T")
    assert (problem.lda, problem.ldb, problem.ldc) == (5, 5, 3)
    with pytest.raises(ParamError, match=f"{name} = 2 is below the [35] stored rows"):
        GemmProblem(3, 4, 5, DType.f64, trans_a="T", **{name: 2})


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_negative_extents_are_refused(name: str) -> None:
    with pytest.raises(ParamError, match=f"{name} = -1 is negative"):
        dataclasses.replace(GemmProblem(1, 1, 1, DType.f64), **{name: -1})


def test_k_or_alpha_zero_leave_no_product() -> None:
    assert GemmProblem(2, 3, 4, DType.f64).has_product
    assert not GemmProblem(2, 3, 0, DType.f64).has_product
    assert not GemmProblem(2, 3, 4, DType.f64, scales_only=True).has_product
    assert GemmProblem(2, 3, 4, DType.f64).flops == 48


# -- machine ---------------------------------------------------------------------------------------


def measured() -> Machine:
    rng = np.random.default_rng(1)
    return Machine(
        name="node",
        key="abc",
        bandwidth_gb_per_s=rng.uniform(1, 400, (4, 4)),
        latency_s=rng.uniform(0, 1e-5, (4, 4)),
        gemm_tflop_per_s={"f64": rng.uniform(50, 60, 3), "f16": rng.uniform(500, 800, 3)},
        typical_gemm_tflop_per_s={"f64": rng.uniform(40, 50, 3), "f16": rng.uniform(400, 500, 3)},
        ports=(Port.of("in", 20.0, [(3, rank) for rank in range(3)]), Port.of("out", 15.0, [(0, 3), (1, 3)])),
        memory_bytes=np.array([10**9, 2 * 10**9, 141 * 10**9]),
        provenance="measured",
        steady=False,
    )


def test_a_machine_comes_back_from_json_bit_for_bit() -> None:
    machine = measured()
    back = Machine.from_json(machine.to_json())
    assert (back.name, back.key, back.provenance, back.steady) == ("node", "abc", "measured", False)
    for name in ("bandwidth_gb_per_s", "latency_s", "memory_bytes"):
        assert np.array_equal(getattr(back, name), getattr(machine, name))
    for name in ("gemm_tflop_per_s", "typical_gemm_tflop_per_s"):
        assert {k: v.tolist() for k, v in getattr(back, name).items()} == {
            k: v.tolist() for k, v in getattr(machine, name).items()
        }
    assert back.to_json() == machine.to_json()


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"format": 8}', "not json"])
def test_other_text_is_no_machine_file(text: str) -> None:
    with pytest.raises(ParamError, match="not a machine file"):
        Machine.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"latency_s": None},
        {"latency_s": [[1e-6], [1e-6, 2e-6]]},
        {"latency_s": [["x"]]},
        {"memory_bytes": [10**30]},
        {"bandwidth_gb_per_s": np.zeros((4, 4)).tolist()},
    ],
)
def test_a_machine_file_with_other_fields_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ParamError):
        Machine.from_json(json.dumps({**json.loads(measured().to_json()), **change}))


def test_another_machine_format_is_refused_with_both_versions() -> None:
    data = {**json.loads(measured().to_json()), "format": 10}
    with pytest.raises(ParamError, match="format 10 was found, this version reads 9"):
        Machine.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bandwidth_gb_per_s": np.ones((3, 3))}, r"bandwidth_gb_per_s of machine node has shape \(3, 3\)"),
        ({"latency_s": np.full((4, 4), np.nan)}, "latency_s of machine node has a negative or non-finite"),
        ({"latency_s": np.full((4, 4), -1.0)}, "latency_s of machine node has a negative or non-finite"),
        ({"bandwidth_gb_per_s": np.zeros((4, 4))}, "a link without bandwidth"),
        ({"gemm_tflop_per_s": {"f64": np.ones(2)}}, r"gemm_tflop_per_s\[f64\] of machine node is not 3 positive"),
        ({"gemm_tflop_per_s": {"f64": np.zeros(3)}}, r"^gemm_tflop_per_s\[f64\] of machine node is not 3 positive"),
        ({"typical_gemm_tflop_per_s": {"f64": np.zeros(3)}}, r"typical_gemm_tflop_per_s\[f64\] of machine node is not"),
    ],
)
def test_impossible_measurements_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ParamError, match=words):
        dataclasses.replace(measured(), **change)


def test_a_rate_that_was_not_measured_is_refused() -> None:
    assert measured().gemm_rate(DType.f64).tolist() == (measured().gemm_tflop_per_s["f64"] * 1e12).tolist()
    typical = measured().typical_gemm_rate(DType.f64)
    assert typical.tolist() == (measured().typical_gemm_tflop_per_s["f64"] * 1e12).tolist()
    for rate in (measured().gemm_rate, measured().typical_gemm_rate):
        with pytest.raises(TopologyError, match="no GEMM rate for bf16"):
            rate(DType.bf16)


def test_links_to_plan_with_are_slower_where_all_ranks_share_the_host() -> None:
    machine = measured()
    assert np.array_equal(machine.links(), machine.bandwidth_gb_per_s)
    links = machine.links(sharing=range(3))
    assert np.array_equal(links[:3, :3], machine.bandwidth_gb_per_s[:3, :3])
    assert np.array_equal(links[3, :3], machine.host_rates(range(3))[0])
    assert np.array_equal(links[:3, 3], machine.host_rates(range(3), inward=False, outward=True)[1])


def test_a_uniform_machine_has_equal_links_and_a_slower_host() -> None:
    machine = Machine.uniform(3, link_gb_per_s=100.0, host_gb_per_s=10.0)
    assert machine.bandwidth_gb_per_s[0].tolist() == [400.0, 100.0, 100.0, 10.0]
    assert machine.bandwidth_gb_per_s[3, :3].tolist() == [10.0] * 3
    with pytest.raises(ValueError, match="read-only"):
        machine.latency_s[0, 0] = 1.0


def test_a_placement_answers_what_schedulers_ask() -> None:
    mixed, shared = Placement.parse("2,h1,2"), Placement.parse("h,0,h")
    assert (mixed.in_host(), mixed.in_host(Matrix.A, Matrix.C), shared.in_host(Matrix.B)) == (True, False, False)
    assert (mixed.on_device(Matrix.B), mixed.on_device(Matrix.A, Matrix.B)) == (False, True)
    assert [mixed.device_of(matrix) for matrix in MATRICES] == [2, None, 2]
    assert [shared.owner_of(matrix) for matrix in MATRICES] == [None, 0, None]
    assert mixed.owner_of(Matrix.B) == 1
    assert (mixed.devices(), mixed.devices(Matrix.B), shared.devices()) == ({2}, set(), {0})
    assert (mixed.in_shared_host, shared.in_shared_host) == (False, True)
    assert [one.c_beside_inputs for one in (mixed, shared, Placement.parse("0,1,2"))] == [True, True, False]
