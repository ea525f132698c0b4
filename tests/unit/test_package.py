"""The package as a whole: what an import loads, what it offers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from uncut_mpi import _native

ROOT = Path(__file__).resolve().parents[2]


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planted_faults_lie_where_the_code_is():
    """`tests/dev/planted.py` runs for hours, and nobody would see before that what it changes has moved."""
    for line in (ROOT / "tests/dev/planted.txt").read_text().splitlines()[1:]:
        name, right, _, how = line.split("  |  ")
        source = (ROOT / "uncut_mpi" / name).read_text()
        assert source.count(right.replace("\\n", "\n")) == 1, line
        assert all((ROOT / "tests" / one.partition("::")[0]).exists() for one in how.split()[1:]), line


def test_importing_the_package_loads_neither_mpi_nor_cuda():
    loaded = run("import sys, uncut_mpi; print(sorted(set(sys.modules) & {'mpi4py', 'cupy', 'threadpoolctl'}))")
    assert loaded.strip() == "[]"


def test_every_public_name_can_be_had_and_is_documented():
    code = (
        "import uncut_mpi\n"
        "for name in uncut_mpi.__all__:\n"
        "    value = getattr(uncut_mpi, name)\n"
        "    if name != '__version__' and not value.__doc__: print(name)"
    )
    assert run(code) == ""


def test_dir_lists_what_users_may_use_and_nothing_else():
    import uncut_mpi

    assert dir(uncut_mpi) == sorted(uncut_mpi.__all__)


def test_completion_of_every_name_loads_neither_mpi_nor_cuda():
    code = (
        "import rlcompleter, sys, uncut_mpi\n"
        "complete = rlcompleter.Completer({'uncut_mpi': uncut_mpi}).complete\n"
        "found = {complete('uncut_mpi.', i) for i in range(200)}\n"
        "print('uncut_mpi.Session(' in found, 'uncut_mpi.GemmPlan(' in found)\n"
        "print(sorted(set(sys.modules) & {'mpi4py', 'mpi4py.MPI', 'cupy', 'torch'}))"
    )
    assert run(code).split("\n") == ["True True", "[]", ""]


def in_a_checkout(tmp_path, code, *, installed=True, compiled_for=""):
    """What Python says that was started beside a copy of the package without its compiled part, as in a checkout."""
    shutil.copytree(ROOT / "uncut_mpi", tmp_path / "uncut_mpi", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if compiled_for:
        (tmp_path / "uncut_mpi" / f"_native.{compiled_for}.so").write_bytes(b"")
    site = tmp_path / "site"
    site.mkdir()
    names = ["numpy", "numpy.libs", "ml_dtypes"] + (["uncut_mpi-*.dist-info"] if installed else [])
    for base in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for found in (one for name in names for one in base.glob(name)):
            (site / found.name).symlink_to(found)
    # Without site, whose .pth files lead to the package that is being tested.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return done.stderr.strip().splitlines()[-1] if done.returncode else done.stdout


@pytest.mark.parametrize("name", ["Session", "load_machine", "plan"])
def test_a_checkout_without_its_compiled_part_is_explained(tmp_path, name):
    code = {"plan": "import uncut_mpi.planning.planner", "Session": "import uncut_mpi; uncut_mpi.Session"}.get(
        name, "import uncut_mpi, uncut_mpi.planning.planner"
    )
    said = in_a_checkout(tmp_path, code)
    assert said.startswith("ImportError: ")
    for part in (str(tmp_path / "uncut_mpi"), "compiled part", "pip install -e .", "another folder"):
        assert part in said


def test_a_checkout_that_is_not_installed_is_explained(tmp_path):
    said = in_a_checkout(tmp_path, "import uncut_mpi", installed=False)
    assert said.startswith("ImportError: ")
    for part in ("not installed", "launch/setup", "pip install -e ."):
        assert part in said


def test_a_part_that_was_compiled_for_another_python_is_explained(tmp_path):
    said = in_a_checkout(tmp_path, "import uncut_mpi.planning.planner", compiled_for="cpython-27-x86_64-linux-gnu")
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    assert version in said
    assert "_native.cpython-27-x86_64-linux-gnu.so" in said


def test_every_public_name_is_in_the_reference():
    import uncut_mpi

    reference = (ROOT / "docs" / "reference.md").read_text()
    documented = set(re.findall(r"auto(?:class|function|module):: uncut_mpi\.(\w+)$", reference, re.MULTILINE))
    errors = {name for name in uncut_mpi.__all__ if name.endswith("Error")}  # by automodule
    assert documented - {"errors"} == set(uncut_mpi.__all__) - errors - {"__version__"}


def test_the_version_is_the_one_of_the_project_file():
    import uncut_mpi

    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE).group(1)
    assert uncut_mpi.__version__ == version


def test_links_between_documents_lead_to_pages_and_headings():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else [""]
            slugs = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name} links to {target}#{anchor}"


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:uncut_mpi|launch|docs|examples|tests)/[\w./-]*)`", text))
    assert len(named) > 4
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# -- what importing the package loads --------------------------------------------------------------


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


# -- ranks that meet and then leave: who met with them is not told that they left that meeting -----


RECORD_BYTES, ROUNDS = 64, 150
MET = (1, 2)


def test_a_meeting_that_everybody_came_to_is_complete_although_some_left_at_once():
    outcomes = []
    for _ in range(ROUNDS):
        room = np.zeros(_native.Meeting.memory_bytes(3), np.uint8)
        mine, everyone = np.zeros(RECORD_BYTES, np.uint8), np.zeros((3, 3 * RECORD_BYTES), np.uint8)
        meetings = [_native.Meeting(room, rank, mine, everyone[rank]) for rank in range(3)]
        start = threading.Barrier(3)

        def take_part(rank, meetings=meetings, start=start):
            start.wait()
            outcome = meetings[rank].meet(0.0)
            while outcome == 0:
                outcome = meetings[rank].collect(1e-6)
            outcomes.append(outcome)
            meetings[rank].leave("ValueError")

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert len(outcomes) == 3 * ROUNDS
    assert all(outcome in MET for outcome in outcomes), [*map(outcomes.count, range(4))]


# -- what a source distribution holds --------------------------------------------------------------


def test_a_source_distribution_has_what_a_build_needs_and_no_build(tmp_path):
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    needed = {
        str(path.relative_to(ROOT)) for path in (ROOT / "uncut_mpi").rglob("*") if "__pycache__" not in path.parts
    }
    needed = {name for name in needed if (ROOT / name).is_file() and not name.endswith(".so")}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "PKG-INFO", *needed} - held == set()
    assert [name for name in held if name.startswith(("build/", ".venv/", ".ci/")) or name.endswith(".so")] == []
