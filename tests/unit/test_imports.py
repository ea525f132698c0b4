"""What importing the package loads: a laptop without MPI and GPU can plan, and an import starts nothing."""

from __future__ import annotations

import subprocess
import sys


def modules_after(statement):
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}, set(done.stdout.split())


def test_an_import_loads_neither_mpi_nor_a_gpu_library():
    roots, _ = modules_after(
        "import uncut_mpi, uncut_mpi.model, uncut_mpi.planning, uncut_mpi.segments, uncut_mpi.plan"
    )
    assert not roots & {"mpi4py", "cupy", "cupy_backends", "cupyx"}


def test_planning_loads_no_other_room():
    import pkgutil

    import uncut_mpi.model
    import uncut_mpi.planning

    names = [
        info.name
        for room in (uncut_mpi.model, uncut_mpi.planning)
        for info in pkgutil.iter_modules(room.__path__, room.__name__ + ".")
    ]
    assert len(names) > 5
    roots, modules = modules_after("\n".join(f"import {name}" for name in names))
    assert not roots & {"mpi4py", "cupy", "cupy_backends", "cupyx"}
    assert not {name for name in modules if name.startswith(("uncut_mpi.spmd", "uncut_mpi.device", "uncut_mpi.api"))}


def test_the_package_does_not_import_the_module_that_dash_m_runs():
    # Otherwise python -m uncut_mpi.gemm would warn that the module is there already, and run it twice.
    _, modules = modules_after("import uncut_mpi; uncut_mpi.Session; from uncut_mpi import *")
    assert "uncut_mpi.gemm" not in modules
    import uncut_mpi

    assert not callable(getattr(uncut_mpi, "gemm", None))
