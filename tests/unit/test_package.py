"""The package as a whole: what an import loads, what it offers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    documented = set(re.findall(r"auto(?:class|function):: uncut_mpi\.(\w+)$", reference, re.MULTILINE))
    errors = {name for name in uncut_mpi.__all__ if name.endswith("Error")}  # by automodule
    assert documented == set(uncut_mpi.__all__) - errors - {"__version__"}


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
