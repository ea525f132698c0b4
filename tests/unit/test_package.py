"""The package as a whole: what an import loads, what it offers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

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


def test_planning_and_model_load_neither_mpi_nor_cuda():
    code = (
        "import importlib, pkgutil, sys, uncut_mpi.model, uncut_mpi.planning\n"
        "for room in (uncut_mpi.model, uncut_mpi.planning):\n"
        "    for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "print(sorted(set(sys.modules) & {'mpi4py', 'cupy'}), 'uncut_mpi.planning.schedule' in sys.modules)"
    )
    assert run(code).strip() == "[] True"


def test_every_public_name_can_be_had_and_is_documented():
    code = (
        "import uncut_mpi\n"
        "for name in uncut_mpi.__all__:\n"
        "    value = getattr(uncut_mpi, name)\n"
        "    if name != '__version__' and not value.__doc__: print(name)"
    )
    assert run(code) == ""


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


def test_links_between_documents_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`((?:uncut_mpi|launch|docs|examples|tests)/[\w./-]*)`", text))
    assert len(named) > 4
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
