"""Matrix files: what is accepted, what is refused, and that ranks' ranges of lines make up the whole."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest

from uncut_mpi import unfinished
from uncut_mpi.api.matrix_files import MatrixFile, OutputFile, open_matrix, open_operands, output_order
from uncut_mpi.command.product import check_output
from uncut_mpi.errors import CapacityError, DataFileError
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.lines import lines_of

ALL_DTYPES = pytest.mark.parametrize("dtype", MEASURED, ids=lambda one: one.name)
ORDERS = pytest.mark.parametrize("order", ["C", "F"])


def matrix(rows: int, cols: int, dtype: DType, order: str = "C", seed: int = 1) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, cols))
    return np.asarray(values.astype(dtype.numpy), order=order)


def save(path: pathlib.Path, array: np.ndarray) -> str:
    with open(path, "wb") as file:
        np.save(file, array)
    return str(path)


def asked(dtype: DType) -> DType | None:
    return dtype if dtype in (DType.bf16, DType.tf32) else None


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lines", "count"), [(0, 3), (1, 4), (11, 4), (777, 8), (5, 1)])
def test_shares_cover_every_line_once_and_differ_by_at_most_one(lines, count):
    shares = [lines_of(lines, share, count) for share in range(count)]
    assert [i for one in shares for i in range(one.start, one.stop)] == list(range(lines))
    lengths = [one.stop - one.start for one in shares]
    assert max(lengths) - min(lengths) <= 1


# -- reading -----------------------------------------------------------------------------------------


@ALL_DTYPES
@ORDERS
def test_ranges_of_lines_read_by_ranks_make_up_the_matrix(tmp_path, dtype, order):
    expected = matrix(37, 23, dtype, order)
    file = open_matrix(save(tmp_path / "x.npy", expected), asked(dtype))
    assert (file.rows, file.cols, file.order, file.dtype) == (37, 23, order, dtype)
    for out_order in "CF":
        out = np.full((37, 23), np.nan, dtype.numpy, order=out_order)
        for share in range(3):
            lines = lines_of(file.num_lines, share, 3)
            file.read_into(out[:, lines] if order == "F" else out[lines], lines)
        np.testing.assert_array_equal(bits(out), bits(expected))


@ORDERS
def test_reading_in_many_blocks_gives_the_same(tmp_path, order, monkeypatch):
    monkeypatch.setattr("uncut_mpi.model.lines._BLOCK_BYTES", 1000)
    expected = matrix(50, 60, DType.f64, order)
    out = np.full((50, 60), np.nan, order="F")
    open_matrix(save(tmp_path / "x.npy", expected)).read_into(out)
    np.testing.assert_array_equal(out, expected)


@ORDERS
def test_a_rectangle_is_read_from_each_of_its_lines(tmp_path, order, monkeypatch):
    monkeypatch.setattr("uncut_mpi.model.lines._BLOCK_BYTES", 1000)
    expected = matrix(50, 60, DType.f32, order)
    file = open_matrix(save(tmp_path / "x.npy", expected))
    for rows, cols in ((slice(3, 40), slice(0, 60)), (slice(0, 50), slice(7, 59)), (slice(49, 50), slice(2, 5))):
        out = np.full((50, 60), np.nan, np.float32)
        file.read_into(out[rows, cols], *((cols, rows) if order == "F" else (rows, cols)))
        assert np.isnan(out).sum() == 50 * 60 - expected[rows, cols].size
        np.testing.assert_array_equal(out[rows, cols], expected[rows, cols])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 7), (7, 1)])
def test_thin_and_empty_matrices_are_read(tmp_path, shape):
    expected = matrix(*shape, DType.f64)
    file = open_matrix(save(tmp_path / "x.npy", expected))
    out = np.empty(shape)
    file.read_into(out)
    np.testing.assert_array_equal(out, expected)


def test_an_out_array_of_another_shape_is_refused(tmp_path):
    file = open_matrix(save(tmp_path / "x.npy", matrix(4, 5, DType.f32)))
    with pytest.raises(ValueError, match=r"\(4, 5\).*\(1, 5\)"):
        file.read_into(np.empty((1, 5), np.float32))


def refusal(path: str | pathlib.Path, dtype: DType | None = None) -> str:
    with pytest.raises(DataFileError) as caught:
        open_matrix(str(path), dtype)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    assert os.strerror(errno.ENOENT) in refusal(tmp_path / "nothing.npy")


def test_a_directory_is_refused(tmp_path):
    assert os.strerror(errno.EISDIR) in refusal(tmp_path)


def test_a_device_is_refused():
    assert "regular file" in refusal("/dev/null")


@pytest.mark.parametrize("content", [b"", b"\x93NUM", b"PK\x03\x04 an archive of arrays", b"1.0, 2.0\n3.0, 4.0\n"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    assert "not a .npy file" in refusal(path)


def test_a_damaged_header_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    content = pathlib.Path(save(path, matrix(3, 3, DType.f64))).read_bytes()
    path.write_bytes(content.replace(b"fortran_order", b"fortran_wrong"))
    assert "not a .npy file" in refusal(path)


@pytest.mark.parametrize("lost", [1, 8, 72])
def test_a_truncated_file_is_refused_with_both_lengths(tmp_path, lost):
    path = tmp_path / "x.npy"
    content = pathlib.Path(save(path, matrix(3, 3, DType.f64))).read_bytes()
    path.write_bytes(content[:-lost])
    message = refusal(path)
    assert f"need {len(content)} bytes" in message
    assert f"has {len(content) - lost}" in message


@pytest.mark.parametrize("shape", [(), (9,), (3, 3, 1)])
def test_other_than_two_dimensions_are_refused(tmp_path, shape):
    assert f"shape {shape}" in refusal(save(tmp_path / "x.npy", np.ones(shape)))


@pytest.mark.parametrize("dtype", ["i8", "c32", "?", "S4", "V4", "f4,f4", "O"])
def test_other_types_are_refused(tmp_path, dtype):
    message = refusal(save(tmp_path / "x.npy", np.zeros((2, 2), dtype)))
    assert "convert" in message


def test_foreign_byte_order_is_refused_with_the_conversion(tmp_path):
    message = refusal(save(tmp_path / "x.npy", np.zeros((2, 2), ">f8")))
    assert "big-endian" in message
    assert "newbyteorder" in message


def test_bfloat16_needs_to_be_named(tmp_path):
    path = save(tmp_path / "x.npy", np.zeros((2, 2), ml_dtypes.bfloat16))
    assert "give dtype bf16" in refusal(path)
    assert "dtype f16 was given" in refusal(path, DType.f16)
    assert open_matrix(path, DType.bf16).dtype is DType.bf16


def test_another_type_than_the_one_asked_is_refused(tmp_path):
    path = save(tmp_path / "x.npy", np.zeros((2, 2), np.float32))
    message = refusal(path, DType.f64)
    assert "holds f32" in message
    assert "dtype f64" in message


def test_operands_of_different_types_are_refused_by_name(tmp_path):
    a = save(tmp_path / "a.npy", matrix(2, 2, DType.f64))
    b = save(tmp_path / "b.npy", matrix(2, 2, DType.f32))
    with pytest.raises(DataFileError, match=r"A .*a\.npy, B .*b\.npy: .*A is f64, B is f32"):
        open_operands(a, b, None, None)
    assert [file and file.dtype for file in open_operands(a, a, None, None)] == [DType.f64, DType.f64, None]


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ("C", "C", None, "C"),
        ("C", "F", None, "F"),
        ("F", "F", None, "F"),
        ("F", "F", "C", "C"),
        ("C", "C", "F", "F"),
    ],
)
def test_the_result_has_the_order_of_c_else_of_both_inputs(tmp_path, a, b, c, expected):
    files = [
        order and open_matrix(save(tmp_path / f"{name}.npy", matrix(3, 3, DType.f64, order)))
        for name, order in (("A", a), ("B", b), ("C", c))
    ]
    assert output_order(*files) == expected


# -- writing -----------------------------------------------------------------------------------------


def create(path: pathlib.Path, array: np.ndarray, order: str = "F", *, overwrite: bool = False) -> OutputFile:
    return OutputFile(str(path), array.shape, DType.parse(array.dtype), order, overwrite=overwrite)


@ALL_DTYPES
@ORDERS
@pytest.mark.parametrize("source_order", ["C", "F"])
def test_lines_written_apart_are_what_numpy_loads(tmp_path, dtype, order, source_order):
    expected = matrix(37, 23, dtype, source_order)
    path = tmp_path / "out.npy"
    with create(path, expected, order) as out:
        for share in (2, 0, 1):
            lines = lines_of(out.target.num_lines, share, 3)
            out.target.write_lines(expected[:, lines] if order == "F" else expected[lines], lines)
        assert not path.exists()
        out.commit()
    found = np.load(path)
    np.testing.assert_array_equal(bits(found), bits(expected))
    assert found.flags.f_contiguous == (order == "F")
    assert os.listdir(tmp_path) == ["out.npy"]


def _write_share(target: MatrixFile, array: np.ndarray, share: int) -> None:
    lines = lines_of(target.num_lines, share, 2)
    target.write_lines(array[:, lines], lines)


def test_other_processes_write_their_lines(tmp_path):
    expected = matrix(30, 20, DType.f64)
    path = tmp_path / "out.npy"
    with create(path, expected) as out:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_write_share, args=(out.target, expected, 1))
        process.start()
        _write_share(out.target, expected, 0)
        process.join(60)
        assert process.exitcode == 0
        out.commit()
    np.testing.assert_array_equal(np.load(path), expected)


def test_many_blocks_and_strided_arrays_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("uncut_mpi.model.lines._BLOCK_BYTES", 1000)
    wide = matrix(50, 70, DType.f64, "F")
    with create(tmp_path / "out.npy", wide[3:40, ::2], "C") as out:
        out.target.write_lines(wide[3:40, ::2])
        out.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wide[3:40, ::2])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1)])
def test_empty_and_single_results_are_written(tmp_path, shape):
    expected = matrix(*shape, DType.f32)
    with create(tmp_path / "out.npy", expected) as out:
        out.target.write_lines(expected)
        out.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_a_discarded_file_leaves_nothing(tmp_path):
    with create(tmp_path / "out.npy", np.ones((3, 3))) as out:
        out.target.write_lines(np.ones((3, 3)))
    assert os.listdir(tmp_path) == []
    out.discard()


def _create_and_die(path: pathlib.Path) -> None:
    out = create(path, np.ones((3, 3)))
    out.target.write_lines(np.ones((3, 3)))
    os.kill(os.getpid(), 9)


def test_what_a_killed_process_leaves_is_no_result_and_the_next_one_says_what_goes_on(tmp_path):
    path = tmp_path / "out.npy"
    process = multiprocessing.get_context("spawn").Process(target=_create_and_die, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    assert os.listdir(tmp_path) == ["out.npy.partial"]
    for refuse in (lambda: create(path, np.eye(3)), lambda: check_output(str(path), overwrite=False)):
        with pytest.raises(DataFileError, match=r"out\.npy\.partial, a job that was cut short .*--overwrite"):
            refuse()
    assert os.listdir(tmp_path) == ["out.npy.partial"]
    with create(path, np.eye(3), overwrite=True) as out:
        out.target.write_lines(np.eye(3))
        out.commit()
    np.testing.assert_array_equal(np.load(path), np.eye(3))
    assert os.listdir(tmp_path) == ["out.npy"]


def test_what_is_left_of_a_job_that_was_cut_short_may_still_be_discarded_by_its_processes(tmp_path):
    partial = tmp_path / "out.npy.partial"
    partial.write_bytes(b"left")
    late = unfinished.Discardable(str(partial), os.open(partial, os.O_RDONLY))
    with create(tmp_path / "out.npy", np.eye(3), overwrite=True) as out:
        late.discard()
        out.target.write_lines(np.eye(3))
        out.commit()
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.eye(3))
    assert os.listdir(tmp_path) == ["out.npy"]


def test_a_fork_leaves_the_unfinished_file_of_its_parent(tmp_path):
    with create(tmp_path / "out.npy", np.eye(3)) as out:
        process = multiprocessing.get_context("fork").Process(target=unfinished.discard_unfinished)
        process.start()
        process.join(60)
        out.target.write_lines(np.eye(3))
        out.commit()
    assert os.listdir(tmp_path) == ["out.npy"]


def test_a_folder_that_cannot_be_read_does_not_take_the_name_away(tmp_path, monkeypatch):
    opened = os.open

    def refuse(name, flags, *more, **named):
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(name, flags, *more, **named)

    with create(tmp_path / "out.npy", np.eye(3)) as out:
        monkeypatch.setattr(os, "open", refuse)
        out.commit()
    assert os.listdir(tmp_path) == ["out.npy"]


def test_a_file_that_cannot_be_taken_is_not_left_empty(tmp_path, monkeypatch):
    def refuse(*unused):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "out.npy"
    path.write_bytes(b"mine")
    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(DataFileError, match="cannot be created"):
        create(path, np.eye(3), overwrite=True)
    assert os.listdir(tmp_path) == ["out.npy"]


def test_a_file_that_is_being_written_is_not_taken_over(tmp_path):
    path = tmp_path / "out.npy"
    with create(path, np.eye(3)) as out:
        for refuse in (
            lambda: create(path, np.eye(3), overwrite=True),
            lambda: check_output(str(path), overwrite=True),
        ):
            with pytest.raises(DataFileError, match="is writing it: commit or release the matrix that writes it"):
                refuse()
        out.target.write_lines(np.eye(3))
        out.commit()
    np.testing.assert_array_equal(np.load(path), np.eye(3))


def test_an_existing_file_is_kept_without_overwrite(tmp_path):
    path = tmp_path / "out.npy"
    path.write_bytes(b"mine")
    with pytest.raises(DataFileError, match=r"out\.npy exists.*--overwrite"):
        create(path, np.ones((3, 3)))
    assert path.read_bytes() == b"mine"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    path = tmp_path / "out.npy"
    with create(path, np.ones((3, 3))) as out:
        path.write_bytes(b"mine")
        with pytest.raises(DataFileError, match="exists"):
            out.commit()
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["out.npy"]


@pytest.mark.parametrize("change", ["replaced", "removed", "shortened"])
def test_what_others_did_to_an_unfinished_file_gets_no_name(tmp_path, change):
    path, partial = tmp_path / "c.npy", tmp_path / "c.npy.partial"
    output = OutputFile(str(path), (40, 3), DType.f64, "C", overwrite=False)
    if change == "shortened":
        os.truncate(partial, 500)
    else:
        partial.unlink()
    if change == "replaced":
        partial.write_text("mine")
    with pytest.raises(DataFileError, match="shorter" if change == "shortened" else "removed or replaced"):
        output.commit()
    assert not path.exists()
    assert partial.exists() == (change == "replaced")  # which is somebody else's


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    def link(*unused, **more):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "out.npy"
    with create(path, np.eye(3)) as out:
        out.target.write_lines(np.eye(3))
        out.commit()
    np.testing.assert_array_equal(np.load(path), np.eye(3))
    with create(tmp_path / "two.npy", np.eye(3)) as out:
        (tmp_path / "two.npy").write_bytes(b"mine")
        with pytest.raises(DataFileError, match="exists"):
            out.commit()
    assert (tmp_path / "two.npy").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["out.npy", "two.npy"]


def test_an_existing_file_is_replaced_only_at_commit(tmp_path):
    path = tmp_path / "out.npy"
    path.write_bytes(b"mine")
    with create(path, np.eye(3), overwrite=True) as out:
        out.target.write_lines(np.eye(3))
        assert path.read_bytes() == b"mine"
        out.commit()
    np.testing.assert_array_equal(np.load(path), np.eye(3))
    assert os.listdir(tmp_path) == ["out.npy"]


def test_a_symbolic_link_is_followed(tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    link = tmp_path / "out.npy"
    link.symlink_to(target / "real.npy")
    with create(link, np.eye(3)) as out:
        out.target.write_lines(np.eye(3))
        out.commit()
    assert link.is_symlink()
    np.testing.assert_array_equal(np.load(target / "real.npy"), np.eye(3))


def test_the_result_has_the_permissions_of_any_new_file(tmp_path):
    other = tmp_path / "other"
    other.touch()
    with create(tmp_path / "out.npy", np.eye(3)) as out:
        out.commit()
    assert (tmp_path / "out.npy").stat().st_mode == other.stat().st_mode


def test_bad_output_names_are_refused_before_any_work(tmp_path):
    with pytest.raises(DataFileError, match="is a directory"):
        check_output(str(tmp_path), overwrite=True)
    with pytest.raises(DataFileError, match="no directory"):
        check_output(str(tmp_path / "missing" / "out.npy"), overwrite=False)
    with pytest.raises(DataFileError, match="not a regular file"):
        check_output("/dev/null", overwrite=True)


def test_a_full_disk_is_said_before_any_work_with_what_is_needed(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "planted")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"needs 8.000 MB.* available"):
        create(tmp_path / "out.npy", np.ones((1000, 1000)))
    assert os.listdir(tmp_path) == []


def test_the_whole_size_is_reserved_at_creation(tmp_path):
    with create(tmp_path / "out.npy", np.ones((500, 400))) as out:
        status = os.stat(out.target.open_path)
        assert status.st_size == out.target.offset_bytes + 500 * 400 * 8
        assert status.st_blocks * 512 >= 500 * 400 * 8


def test_lines_of_another_shape_or_type_are_refused(tmp_path):
    with create(tmp_path / "out.npy", np.ones((5, 4))) as out:
        with pytest.raises(ValueError, match="shape"):
            out.target.write_lines(np.ones((5, 3)))
        with pytest.raises(ValueError, match="float32"):
            out.target.write_lines(np.ones((5, 4), np.float32))


def test_committing_twice_is_a_mistake(tmp_path):
    with create(tmp_path / "out.npy", np.ones((5, 4))) as out:
        out.commit()
        with pytest.raises(ValueError, match="before"):
            out.commit()
