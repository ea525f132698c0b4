"""The help of every command: each option that takes a value says what it is without it."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from uncut_mpi.bench.arguments import make_bench_parser
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.calibrate_arguments import make_calibrate_parser
from uncut_mpi.command.flags import make_parser, make_plan_parser
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.metrics import METRICS, Metric, energy_j
from uncut_mpi.planning.search import search

PARSERS = {
    "gemm": make_parser(),
    "plan": make_plan_parser(),
    "bench": make_bench_parser(),
    "calibrate": make_calibrate_parser(),
}


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


@pytest.mark.parametrize("command", ["gemm", "plan"])
def test_metrics_are_those_of_the_registry(command):
    text = " ".join(PARSERS[command].format_help().split())
    assert f"--metric {'|'.join(METRICS)}" in text
    assert all(metric.about in text for metric in METRICS.values())


def test_the_plan_commands_help_speaks_of_no_files_of_matrices(capsys):
    told = {}
    for make in (make_parser, make_plan_parser):
        make().print_help()
        told[make] = " ".join(capsys.readouterr().out.split())
    for phrase in ("or the files' own", "with files 1", "without -c"):
        assert phrase in told[make_parser]
        assert phrase not in told[make_plan_parser]
    assert all("h and a number = host memory of that rank alone" in one for one in told.values())
