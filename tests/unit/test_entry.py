"""How commands are found and begun: python -m uncut_mpi, the console script, the short help and the whole one."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import uncut_mpi
from uncut_mpi.__main__ import COMMANDS, main
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.flags import make_parser, make_plan_parser
from uncut_mpi.command.help import HelpRequested

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_package_says_what_commands_there_are_and_how_they_are_started(words, capsys):
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", out, re.MULTILINE) for name in COMMANDS)
    assert "mpiexec -n 4 python -m uncut_mpi gemm" in out


def test_an_unknown_command_is_status_2(capsys):
    assert main(["multiply", "-m", "5"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "uncut_mpi: ParamError: there is no command 'multiply': use one of gemm, plan, bench, calibrate, or --help\n"
    )
    assert not captured.out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"uncut_mpi {uncut_mpi.__version__}\n"


def test_under_a_launcher_one_process_says_it(capsys, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert (main([]), main(["multiply"])) == (0, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_every_command_is_run_by_its_name_without_mpi_for_its_help():
    code = (
        "import sys, runpy\n"
        f"for command in {list(COMMANDS)}:\n"
        "    sys.argv = ['uncut-mpi', command, '--help']\n"
        "    try: runpy.run_module('uncut_mpi', run_name='__main__')\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mpi4py', 'cupy', 'matplotlib')]"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(f"python -m uncut_mpi.{command}" in done.stdout for command in COMMANDS)


def test_the_console_script_is_the_same(capsys):
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.search(r'^uncut-mpi = "([\w.]+):(\w+)"$', text, re.MULTILINE).groups()
    assert getattr(importlib.import_module(module), function)([]) == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(("make", "fewer"), [(make_parser, 20), (make_plan_parser, 15)])
def test_the_short_help_explains_a_few_options_and_names_all(make, fewer):
    parser = make()
    options = {option for action in parser._actions for option in action.option_strings[-1:]}
    short, whole = parser.format_short(), parser.format_help()
    explained = set(re.findall(r"^  (?:-h, )?(-{1,2}[\w-]+)", short.partition("more options")[0], re.MULTILINE))
    assert 8 <= len(explained) <= fewer
    assert all(re.search(rf"(?<![\w-]){option}(?![\w-])", short) for option in options)
    assert short.count("\n") < whole.count("\n") / 1.5


def test_the_whole_help_is_asked_for():
    with pytest.raises(HelpRequested) as caught:
        parse(["--help-all"])
    assert caught.value.text == make_parser().format_help()


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {uncut_mpi.__version__}\n" in text
    assert "name: uncut_mpi developers" in text
    assert "Uncut-GEMMs" in text
