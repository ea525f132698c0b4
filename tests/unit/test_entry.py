"""How commands are found and begun: python -m uncut_mpi, the console script, the short help and the whole one."""

from __future__ import annotations

import importlib
import io
import itertools
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import uncut_mpi
import uncut_mpi as um
from tests.helpers.commands import PARSERS, Terminal
from tests.helpers.planned import search
from uncut_mpi.__main__ import COMMANDS, main
from uncut_mpi.command import progress
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.command.flags import make_parser, make_plan_parser
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.metrics import METRICS, Metric, energy_j

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
        "uncut_mpi: ParamError: there is no command 'multiply': use one of gemm, plan, bench, calibrate, env, or "
        "--help\n"
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


# -- the help of every command: each option that takes a value says what it is without it ----------


def valued(parser):
    """The options that take a value."""
    return [action for action in parser._actions if action.option_strings and action.nargs != 0]


def shown(default):
    """Write a default as the command line has it."""
    if isinstance(default, tuple):
        return ",".join(shown(one) for one in default)
    if isinstance(default, DType):
        return default.name
    return f"{default:g}" if isinstance(default, float) else str(default)


@pytest.mark.parametrize("command", PARSERS)
def test_every_option_with_a_value_names_its_default(command):
    for action in valued(PARSERS[command]):
        text = (action.help % vars(action)).replace("Default", "default")
        assert "default" in text, action.option_strings
        # 0 leaves a choice open, which words describe.
        if action.default not in (None, 0) or (action.default == 0 and "%(default)s" in action.help):
            assert f"default {shown(action.default)}" in text, (action.option_strings, text)


@pytest.mark.parametrize("command", PARSERS)
def test_switches_are_off_by_default_and_the_help_says_so(command):
    parser = PARSERS[command]
    assert "take no value are off by default" in parser.format_help()
    switches = [action for action in parser._actions if action.nargs == 0 and action.const is not None]
    assert all(action.default is not action.const for action in switches)


@pytest.mark.parametrize("flag", ["--json", "--devices", "--compute-ranks", "--metric"])
def test_a_flag_means_the_same_in_every_command(flag):
    forms = {
        (action.metavar, action.nargs, action.dest, str(action.type))
        for parser in PARSERS.values()
        for action in valued(parser)
        if flag in action.option_strings
    }
    forms = {form[:3] if flag == "--metric" else form for form in forms}  # its type is made anew for each
    assert len(forms) == 1, forms


def test_a_new_metric_is_a_line_in_the_registry(monkeypatch):
    monkeypatch.setitem(METRICS, "ed2p", Metric("the new one", lambda cost: cost.energy_j * cost.seconds**2, "J s²"))
    for parser in (make_parser(), make_plan_parser()):
        assert "ed2p: the new one" in " ".join(parser.format_help().split())
    options = parse(["--metric", "ed2p"]).options
    assert options == um.ScheduleOptions(metric="ed2p")
    problem = GemmProblem(3000, 3000, 3000, DType.f64)
    found = search(problem, um.Placement.parse("0,0,0"), 4, um.load_machine("h200-4x"), options)
    assert found.metric == "ed2p"
    values = [energy_j(one.simulation) * one.predicted_s**2 for one in found.candidates]
    assert values[0] == min(values)


def test_the_plan_commands_help_speaks_of_no_files_of_matrices(capsys):
    told = {}
    for make in (make_parser, make_plan_parser):
        make().print_help()
        told[make] = " ".join(capsys.readouterr().out.split())
    for phrase in ("or the files' own", "with files 1", "without -c"):
        assert phrase in told[make_parser]
        assert phrase not in told[make_plan_parser]
    assert all("h and a number = host memory of that rank alone" in one for one in told.values())


# -- how far a call is, as the command shows it ----------------------------------------------------


Stream = Callable[..., io.StringIO]


@pytest.fixture
def shown_on(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Take the place of standard error by a stream, on which a call is shown after some time (s), and so often."""

    def install(stream: io.StringIO, first_s: float, every_s: float = 100.0) -> io.StringIO:
        monkeypatch.setattr(sys, "stderr", stream)
        for name, seconds in (("_FIRST_S", first_s), ("_TERMINAL_S", every_s), ("_ELSEWHERE_S", every_s)):
            monkeypatch.setattr(progress, name, seconds)
        return stream

    return install


def watched(stream: io.StringIO, looks: int) -> str:
    """Return what is shown of a call that ends after so many looks at how far it is."""
    seen = itertools.count(1)
    enough = threading.Event()

    def part() -> float:
        number = next(seen)
        if number >= looks:
            enough.set()
        return number / 10

    with progress.watch("multiplying", part):
        assert enough.wait(20)
    return stream.getvalue()


def test_a_terminal_gets_one_line_with_the_time_that_is_left(shown_on: Stream) -> None:
    text = watched(shown_on(Terminal(), 0.0, 0.001), 5)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    lines = [line.strip() for line in text.split("\r")[1:]]
    assert lines[0].startswith("multiplying [###...........................]  10%, ")
    assert all(" so far, about " in line and line.endswith(" left") for line in lines)
    assert max(map(len, text.split("\r"))) < 125


def test_a_file_gets_lines(shown_on: Stream) -> None:
    lines = watched(shown_on(io.StringIO(), 0.0, 0.001), 12).splitlines()
    assert len(lines) >= 11
    assert lines[4].startswith("multiplying [###############...............]  50%, ")
    assert lines[10].startswith("multiplying [##############################] 100%, ")


def test_nothing_is_said_of_a_call_that_is_soon_over_or_has_just_begun(shown_on: Stream) -> None:
    stream = shown_on(io.StringIO(), 100.0)
    with progress.watch("multiplying", lambda: 1.0):
        pass
    assert stream.getvalue() == ""
    looked = threading.Event()
    shown_on(stream, 0.0)
    with progress.watch("multiplying", lambda: float(looked.set() or 0)):
        assert looked.wait(20)
    assert stream.getvalue().endswith(" so far, beginning\n")


def test_an_error_passes() -> None:
    with pytest.raises(KeyError), progress.watch("multiplying", lambda: 0.0):
        raise KeyError
