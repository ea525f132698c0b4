"""The calibrate command: its words, its progress, and the energy counter of a GPU."""

from __future__ import annotations

import io
import sys
import types

import pytest

from tests.helpers.commands import Terminal
from uncut_mpi.command.calibrate_arguments import DEFAULT_TIME_LIMIT_S, parse_calibrate
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.command.progress import ProgressBar
from uncut_mpi.device.cuda.power import PowerMeter
from uncut_mpi.errors import ParamError


def test_no_words_ask_for_everything():
    given = parse_calibrate([])
    assert (given.backend, given.quick, given.output, given.json) == ("auto", False, None, None)
    assert given.time_limit_s == DEFAULT_TIME_LIMIT_S


def test_every_flag_reaches_its_field():
    words = "--backend cuda --devices 1,0 --allow-shared-gpu --time-limit 7.5 --output m.json --json facts.json "
    words += "--ranks-per-node 2"
    given = parse_calibrate(words.split())
    assert (given.backend, given.devices, given.allow_shared_gpu) == ("cuda", (1, 0), True)
    assert (given.ranks_per_node, parse_calibrate([]).ranks_per_node) == (2, None)
    assert (given.time_limit_s, given.output, given.json) == (7.5, "m.json", "facts.json")
    assert parse_calibrate(["--quick"]).quick
    assert parse_calibrate(["--disk", "/data"]).disk == "/data"
    assert given.disk is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--fast", "--fast"),
        ("--compute-ranks 0", "--compute-ranks"),
        ("--time-limit 0", "not above 0"),
        ("--time-limit 5 --quick", "--quick"),
        ("--backend tpu", "tpu"),
        ("--output m.json --json m.json", "both name m.json"),
        ("--backend host --devices 0", "no GPUs"),
    ],
)
def test_words_that_make_no_sense_are_an_error(words, said):
    with pytest.raises(ParamError, match=said):
        parse_calibrate(words.split())


def test_help_names_every_flag():
    with pytest.raises(HelpRequested) as caught:
        parse_calibrate(["--help"])
    for flag in ("--quick", "--time-limit", "--output", "--json", "--backend", "--devices"):
        assert flag in caught.value.text


def test_a_terminal_gets_one_line_that_ends_when_all_is_done(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    bar = ProgressBar("calibrating")
    for done in range(101):
        bar.show(done, 100, "x" * 100)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert "[" + "#" * 30 + "] 100/100" in text
    assert max(len(line) for line in text.split("\r")) < 120


def test_a_file_gets_a_few_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    bar = ProgressBar("calibrating")
    for done in range(101):
        bar.show(done, 100, "links")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "calibrating [..............................] 0/100 links"
    assert lines[5] == "calibrating [###############...............] 50/100 links"
    assert lines[-1] == "calibrating [##############################] 100/100 links"
    assert len(lines) == 11


class FakeNvml(types.ModuleType):
    """What nvidia-ml-py offers, as far as it is used."""

    class NVMLError(Exception):
        pass

    def __init__(self, fails=""):
        super().__init__("pynvml")
        self.fails, self.opened = fails, []

    def _check(self, name):
        if self.fails == name:
            raise self.NVMLError(name)

    def nvmlInit(self):
        self._check("init")

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        self._check("handle")
        self.opened.append(index)
        return f"handle of GPU-{index}"

    def nvmlDeviceGetUUID(self, handle):
        uuid = handle.removeprefix("handle of ")
        return uuid.encode() if uuid == "GPU-0" else uuid  # releases of the package differ

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._check("energy")
        assert handle == "handle of GPU-1"
        return 123456


def test_the_counter_is_told_in_joules_and_opened_once(monkeypatch):
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = PowerMeter("GPU-1")
    assert [meter.energy_j(), meter.energy_j()] == [pytest.approx(123.456)] * 2
    assert nvml.opened == [0, 1]
    assert PowerMeter("GPU-7").energy_j() is None


@pytest.mark.parametrize("fails", ["init", "handle", "energy"])
def test_what_nvml_refuses_is_unknown(monkeypatch, fails):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(fails))
    assert PowerMeter("GPU-1").energy_j() is None


def test_without_nvml_it_is_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert PowerMeter("GPU-1").energy_j() is None
