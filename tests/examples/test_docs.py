"""What README.md and docs/how-to/ tell a reader to type works: programs, commands, flags."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest

from tests.helpers.commands import PARSERS
from tests.helpers.jobs import ROOT, run_command

HOW_TO = ROOT / "docs" / "how-to"
DOCUMENTS = {"README": [ROOT / "README.md"], "how-to": sorted(HOW_TO.glob("*.md"))}
MISSING = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is None]

# What a reader has at hand who tries a block of a recipe: a session on all ranks and three matrices.
PRELUDE = """\
import numpy as np
from mpi4py import MPI
import uncut_mpi as um

comm = MPI.COMM_WORLD
blocks = {blocks!r}
with um.Session(comm) as session:
    a, b, c = (session.empty_host(shape) for shape in ((60, 50), (50, 40), (60, 40)))
    if session.rank == 0:
        for matrix in (a, b, c):
            matrix.array[:] = 1.0
    at_hand = dict(np=np, MPI=MPI, um=um, comm=comm, session=session, s=session, a=a, b=b, c=c)
    for place, text in blocks:
        exec(compile(text, place, "exec"), dict(at_hand))
        session.barrier()
if comm.rank == 0:
    print(len(blocks), "blocks ran")
"""


def blocks_of(text: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with its first line."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: one.start(2)].count("\n") + 1, one[2]) for one in found if one[1] == language]


def commands_of(text: str) -> list[str]:
    """The commands of a block, continued lines joined, comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := re.sub(r"(^|\s+)#.*", "", line).strip())]


@pytest.mark.parametrize("pages", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_programs_run_on_two_ranks(pages, tmp_path):
    # Errors name the page and count its lines.
    runnable = [
        (path.name, "\n" * (line - 1) + text)
        for path in pages
        for line, text in blocks_of(path.read_text(), "python")
        if not any(f"import {name}" in text for name in MISSING)
    ]
    assert runnable
    program = tmp_path / "blocks.py"
    program.write_text(PRELUDE.format(blocks=runnable))
    output = run_command(f"mpiexec -n 2 python -m mpi4py {program}", tmp_path)
    assert f"{len(runnable)} blocks ran" in output


def test_ten_minutes_end_with_two_files_multiplied(tmp_path):
    text = (HOW_TO / "first-steps.md").read_text()
    name, program = re.search(r"Save this as `(\S+)`:\n\n```python\n(.*?)```", text, re.DOTALL).groups()
    (tmp_path / name).write_text(program)
    started = [
        run_command(command, tmp_path)
        for _, block in blocks_of(text, "")
        for command in commands_of(block)
        if command.startswith(("mpiexec ", "python "))
    ]
    assert len(started) == 4
    assert started[0].splitlines()[-1] == started[3].splitlines()[-1] == "PASS"
    assert float(re.search(r"largest error (\S+)", started[1])[1]) < 1e-10
    assert (tmp_path / "C.npy").exists()


@pytest.mark.parametrize("pages", DOCUMENTS.values(), ids=DOCUMENTS)
def test_the_commands_have_flags_that_exist(pages):
    found = 0
    for path in pages:
        for line, text in blocks_of(path.read_text(), ""):
            for command in commands_of(text):
                called = re.search(r"python -m uncut_mpi[. ](\w+)(.*)", command)
                if called:
                    found += 1
                    try:
                        PARSERS[called[1]].parse_args(shlex.split(called[2].split(" | ")[0]))
                    except Exception as error:
                        pytest.fail(f"{path.name}, block at line {line}: {command}: {error}")
    assert found > 2
