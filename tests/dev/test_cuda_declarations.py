"""Our declarations of CUDA's types and functions, and our kernels, against the toolkits found here."""

from __future__ import annotations

import itertools
import pathlib
import re
import shutil
import site
import subprocess
import sys

import pytest

from uncut_mpi.device.cuda.kernels import TRANSPOSING, kernel_source
from uncut_mpi.model.dtypes import MEASURED, DType

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "uncut_mpi" / "csrc"


def include_folders() -> list[pathlib.Path]:
    """Folders with cuda.h: toolkits in /usr/local, headers of the system, and those of PyPI's wheels."""
    wheels = [pathlib.Path(path) for path in {*site.getsitepackages(), *sys.path} if path]
    candidates = itertools.chain(
        pathlib.Path("/usr/local").glob("cuda*/include"),
        [pathlib.Path("/usr/include")],
        *(path.glob("nvidia/*/include") for path in wheels),
    )
    found = {folder.resolve() for folder in candidates if (folder / "cuda.h").exists()}
    return sorted(folder for folder in found if (folder / "cudaTypedefs.h").exists())


def cublas_folders(beside: pathlib.Path) -> list[pathlib.Path]:
    """Folders with cublas_v2.h that may be of the same toolkit as a folder with cuda.h."""
    roots = [beside, *beside.parent.parent.glob("*/include")]
    return [folder for folder in roots if (folder / "cublas_v2.h").exists()]


def test_declarations_match_the_headers_found(compiler):
    folders = include_folders()
    if not folders:
        pytest.skip("no CUDA headers")
    for folder in folders:
        # Behind the folder itself, others supply what wheels leave out (crt/).
        behind = [one for one in (*folders, *cublas_folders(folder)) if one != folder]
        command = [
            compiler,
            "-std=c++20",
            "-fsyntax-only",
            f"-I{SOURCES}",
            *(f"-isystem{f}" for f in (folder, *behind)),
        ]
        if cublas_folders(folder) and any((one / "crt" / "host_defines.h").exists() for one in (folder, *behind)):
            command.append("-DCHECK_CUBLAS")
        result = subprocess.run([*command, str(HERE / "check_declarations.cpp")], capture_output=True, text=True)
        assert result.returncode == 0, f"{folder}:\n{result.stderr[:4000]}"


def test_each_prototype_is_the_newest_up_to_the_stated_version():
    header = (SOURCES / "cuda_driver.hpp").read_text()
    ours = {name: int(version) for name, version in re.findall(r"X\((cu[A-Z]\w+), (\d+),", header)}
    stated = int(re.search(r"stated_version = (\d+)", header)[1])
    assert len(ours) > 20
    for folder in include_folders():
        known = re.findall(r"PFN_(cu\w+?)_v(\d+)\)", (folder / "cudaTypedefs.h").read_text())
        for name, version in ours.items():
            versions = [int(v) for other, v in known if other == name and int(v) <= stated]
            assert versions, f"{folder} has no {name}"
            assert version == max(versions), f"{name} in {folder}"


def signature(written: DType, *reads: DType) -> int:
    return int(written) | sum((int(read) + 1) << (4 * (i + 1)) for i, read in enumerate(reads))


def test_every_kernel_that_schedules_use_compiles(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    wide = DType.f32
    signatures = [signature(t, *reads) for t in (*MEASURED, DType.i32) for reads in ((), (t,), (t, t))]
    for t in (DType.f16, DType.bf16):
        signatures += [signature(t, wide, t), signature(t, wide), signature(wide, t, wide), signature(t, *[wide] * 8)]
    narrow = [(DType.i8, DType.i8)]
    narrow += [(half, float8) for half in (DType.f16, DType.bf16) for float8 in (DType.e4m3, DType.e5m2)]
    signatures += [signature(*one) for one in narrow]
    signatures += [TRANSPOSING | size for size in (1, 2, 4, 8, 16)]
    source = tmp_path / "kernels.cu"
    source.write_text(kernel_source(signatures))
    command = [nvcc, "-std=c++14", "-arch=sm_75", "-ptx", "-o", str(tmp_path / "kernels.ptx"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "kernels.ptx").read_text().count(".visible .entry") == len(signatures)
