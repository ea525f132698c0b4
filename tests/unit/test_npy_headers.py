"""Matrix files are judged by what they hold: every version that numpy reads, and a true reason for what is refused."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import struct

import numpy as np
import pytest

from uncut_mpi.api.matrix_files import open_matrix
from uncut_mpi.errors import DataFileError


def header(version, text, *, encoding="latin1"):
    """Return the beginning of a .npy file, padded as numpy does."""
    raw = text.encode(encoding)
    wide = "<H" if version == (1, 0) else "<I"
    beginning = 8 + struct.calcsize(wide)
    raw += b" " * (-(beginning + len(raw) + 1) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack(wide, len(raw)) + raw


def write(path, version, text, content=b"", **more):
    path.write_bytes(header(version, text, **more) + content)
    return str(path)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", "CF")
def test_every_version_is_read_as_numpy_reads_it(tmp_path, version, order):
    expected = np.asarray(np.random.default_rng(2).random((5, 7)), order=order)
    path = tmp_path / "A.npy"
    with open(path, "wb") as file:
        np.lib.format.write_array(file, expected, version=version)
    found = np.empty((5, 7))
    opened = open_matrix(str(path))
    opened.read_into(found)
    np.testing.assert_array_equal(found, expected)
    assert opened.order == order


def test_a_file_of_python_2_is_read(tmp_path):
    content = np.arange(6.0).tobytes()
    path = write(tmp_path / "A.npy", (1, 0), "{'descr': '<f8', 'fortran_order': False, 'shape': (2L, 3L), }", content)
    found = np.empty((2, 3))
    open_matrix(path).read_into(found)
    np.testing.assert_array_equal(found, np.arange(6.0).reshape(2, 3))


PLAIN = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 2), }"


@pytest.mark.parametrize(
    ("version", "text", "said"),
    [
        ((1, 0), PLAIN.replace("'<f8'", "'|O'"), "Python objects"),
        ((1, 0), PLAIN.replace("'<f8'", "[('a', '<f8'), ('b', '<f8')]"), "records of 2 fields"),
        ((3, 0), PLAIN.replace("'<f8'", "[('ä', '<f8'), ('β', '<f8')]"), "records of 2 fields"),
        ((3, 0), PLAIN.replace("'<f8'", "'<c32'"), "complex256"),
        ((1, 0), PLAIN.replace("'<f8'", "('<f8', (2,))"), "convert"),
        ((1, 0), PLAIN.replace("(2, 2)", "(-2, -2)"), "negative"),
        ((1, 0), PLAIN.replace("(2, 2)", "(2**70, 2)"), "not a .npy file"),
        ((1, 0), PLAIN.replace("(2, 2)", f"({2**70}, 2)"), "truncated"),
        ((1, 0), PLAIN.replace("(2, 2)", f"({2**70}, 0)"), "at most"),
        ((1, 0), PLAIN.replace("(2, 2)", "(2.0, 2)"), "not a .npy file"),
        ((1, 0), PLAIN.replace("(2, 2)", "(True, 2)"), "an extent that is no whole number"),
        ((1, 0), PLAIN.replace("(2, 2)", "(2, False)"), "an extent that is no whole number"),
        ((1, 0), PLAIN.replace("False", "0"), "not a .npy file"),
        ((1, 0), PLAIN.replace("False", "'no'"), "not a .npy file"),
        ((1, 0), PLAIN.replace("'<f8'", "'<f99'"), "not a .npy file"),
        ((2, 0), PLAIN + " " * 20_000, "header of 2"),
        ((2, 0), "(" * 5000, "not a .npy file"),
        ((2, 0), "-" * 9000 + "1", "not a .npy file"),
        ((1, 0), "__import__('os').abort()", "not a .npy file"),
        ((4, 0), PLAIN, "format 4.0, which is newer"),
        ((0, 9), PLAIN, "format 0.9, which"),
    ],
)
def test_what_is_refused_has_a_true_reason(tmp_path, version, text, said):
    path = write(tmp_path / "A.npy", version, text, b"\0" * 64, encoding="utf-8" if version == (3, 0) else "latin1")
    with pytest.raises(DataFileError) as caught:
        open_matrix(path)
    assert str(caught.value).startswith(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(path) + 300


def test_objects_are_not_unpickled(tmp_path):
    path = tmp_path / "A.npy"
    with open(path, "wb") as file:
        np.save(file, np.array([[{}, {}]], object), allow_pickle=True)
    with pytest.raises(DataFileError):
        open_matrix(str(path))
    path.write_bytes(pickle.dumps([[1.0]]))
    with pytest.raises(DataFileError, match=r"not a \.npy file"):
        open_matrix(str(path))


@pytest.mark.parametrize("length", [0, 5, 6, 7, 8, 9, 10, 11, 60, 127])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_a_file_that_ends_early_is_refused(tmp_path, version, length):
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.ones((2, 2)), version=version)
    path = tmp_path / "A.npy"
    path.write_bytes(whole.getvalue()[:length])
    with pytest.raises(DataFileError, match=r"A\.npy"):
        open_matrix(str(path))


def test_a_header_that_claims_to_be_very_long_is_not_waited_for(tmp_path):
    path = tmp_path / "A.npy"
    path.write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b"{")
    with pytest.raises(DataFileError, match=r"A\.npy"):
        open_matrix(str(path))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_damaged_files_are_read_or_refused(tmp_path, version):
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.ones((5, 4)), version=version)
    draw, path = random.Random(7), tmp_path / "A.npy"
    for _ in range(200):
        content = bytearray(whole.getvalue())
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(128)
            content[at : at + draw.choice((0, 1, 1, 1, 9))] = draw.choice(
                (b"", bytes([draw.randrange(256)]), b"(", b"9", b"'")
            )
        path.write_bytes(content)
        with contextlib.suppress(DataFileError):
            file = open_matrix(str(path))
            file.read_into(np.empty((file.rows, file.cols), file.dtype.numpy))
