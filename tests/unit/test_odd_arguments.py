"""Random invalid and odd argument vectors: arguments, help, or one ParamError; and plans of odd numbers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uncut_mpi import plan
from uncut_mpi.bench import arguments as bench_arguments
from uncut_mpi.command import arguments, calibrate_arguments, planning
from uncut_mpi.command.flags import make_parser, make_plan_parser
from uncut_mpi.command.help import HelpRequested
from uncut_mpi.errors import ParamError
from uncut_mpi.planning.option_fields import NUMBER, declared
from uncut_mpi.planning.options import Blocking, ScheduleOptions

ODD_NUMBERS = (
    *("0", "1", "2", "7", "-0", "+3", "-1", "1e3", "1.5", "１２", "٣", "²", " 5", "5 ", "0x10", "1_000", "_1", "1__0"),
    *(
        "nan",
        "-nan",
        "inf",
        "-inf",
        "infinity",
        "1e308",
        "1e309",
        "-1e309",
        "1e-400",
        ".",
        "",
        " ",
        "\n",
        "\0",
        "½",
        "∞",
    ),
    *(str(2**power + more) for power in (15, 31, 32, 62, 63, 64, 128) for more in (-1, 0, 1)),
    *(
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 400,
        "True",
        "None",
        "1j",
        "1,2",
        "1,",
        ",",
        "0,0",
        "1;2",
        "1 2",
        "--",
        "-",
        "=",
    ),
)
ODD_WORDS = (
    *(
        "f64",
        "tf32",
        "h,h,h",
        "0,h,1",
        "h1,h,h",
        "h,h",
        "h,h,h,h",
        "H,h,h",
        "2x4",
        "2X4",
        "x",
        "2x",
        "x2",
        "2×4",
        "2x4x1",
    ),
    *("time", "pdp", "N", "T", "n", "auto", "host", "cuda", "uncut", "kblocks", "cyclic", "one", "tuned", "uncut:64"),
    *("cyclic:²", "cyclic:1d-cyclic", "uncut:", ":", "bands:-1", "A.npy", "t.json", "t.png", "t.txt", ".png", "t", "/"),
    *("é", "\ud800", "\udcff", "🦆", "%s", "%(default)s", "{}", "{0}", "$HOME", "@file", "\\", "\t", "a" * 5000),
)
COMMANDS = {
    "gemm": (arguments, "make_parser", arguments.parse),
    "plan": (planning, "make_plan_parser", planning.parse),
    "bench": (bench_arguments, "make_bench_parser", bench_arguments.parse_bench),
    "calibrate": (calibrate_arguments, "make_calibrate_parser", calibrate_arguments.parse_calibrate),
}


def vectors(seed, parser, count):
    """Yield argument vectors: flags with values that fit them, that do not, or are missing, and stray words."""
    draw = random.Random(seed)
    flags = [(option, action) for action in parser._actions for option in action.option_strings]
    for _ in range(count):
        words = []
        for _ in range(draw.randint(1, 5)):
            flag, action = draw.choice(flags)
            values = ODD_NUMBERS if draw.random() < 0.6 else ODD_WORDS
            value = draw.choice((action.metavar or "").split("|")) if draw.random() < 0.2 else draw.choice(values)
            form = draw.random()
            if action.nargs == 0 and form < 0.9:
                words.append(flag)
            elif form < 0.5:
                words += [flag, value]
            elif form < 0.85:
                words.append(f"{flag}={value}" if flag.startswith("--") else f"{flag}{value}")
            elif form < 0.9:
                words.append(flag)
            elif form < 0.95:
                words.append(value)
            else:
                words.append(flag[: draw.randint(1, len(flag))] + draw.choice(("", "-", "=", value)))
        yield words


def outcome(parse, words):
    """Return the arguments that words are, or the error or help that they ask for; anything else is raised."""
    try:
        return parse(words)
    except (HelpRequested, ParamError) as told:
        return told


@pytest.mark.parametrize("command", COMMANDS)
def test_any_words_are_arguments_or_one_error(command):
    module, name, parse = COMMANDS[command]
    parser = getattr(module, name)()
    taken = []

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        for words in vectors(seed, parser, 25):
            found = outcome(parse, words)
            if isinstance(found, ParamError):
                assert len(str(found)) < 1000, words
                assert "invalid" not in str(found), words  # argparse's word for a type that raised
            elif isinstance(found, HelpRequested):
                assert found.text.endswith("\n")
            else:
                assert type(found).__dataclass_params__.frozen
                taken.append(words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda: parser)  # making one takes longer than all that it does
        check()
    assert len(taken) > 50  # the vectors are not all nonsense


def whole_numbers(make):
    """Yield the flags that take one whole number."""
    for action in make()._actions:
        if action.option_strings and action.metavar in ("M", "N", "K", "T", "S", "G", "H", "L", "P", "BYTES"):
            yield action.option_strings[-1]


@pytest.mark.parametrize("make", [make_parser, make_plan_parser, bench_arguments.make_bench_parser])
def test_no_whole_number_is_boundless(make):
    parser = make()
    flags = [flag for flag in whole_numbers(make) if flag not in ("--timeout", "--time-limit", "--time-cap", "--scale")]
    assert len(flags) > 2
    for flag in flags:
        for value in (2**63, 2**64, 10**400):
            with pytest.raises(ParamError, match=r"at most \d+|is not 0 to") as caught:
                parser.parse_args([flag, str(value)])
            assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"), [("１２", 12), (" 5", 5), ("1_000", 1000), ("+7", 7), ("-0", 0), ("٣", 3), ("007", 7)]
)
def test_what_python_takes_for_a_whole_number_is_one(text, value):
    assert arguments.parse([f"-m{text}" if text[0] in "+1" else "-m", *([] if text[0] in "+1" else [text])]).m == value


@pytest.mark.parametrize("text", ["1e3", "0x10", "nan", "inf", "1.0", "²", "½", "", " ", "1__0"])
def test_what_it_does_not_take_is_an_error(text):
    with pytest.raises(ParamError, match="whole number") as caught:
        arguments.parse(["-m", text])
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["1e-400", "-0.5e-999", "4.9e-325", "٣e-400"])
def test_a_scalar_that_would_become_0_is_refused(text):
    for flag in ("--alpha", "--beta"):
        with pytest.raises(ParamError, match="too small"):
            arguments.parse([f"{flag}={text}"])


def test_zeros_and_the_smallest_numbers_are_scalars():
    for text, value in (("0", 0.0), ("-0.0e5", 0.0), ("0e-999", 0.0), ("5e-324", 5e-324), ("-1e-310", -1e-310)):
        assert arguments.parse([f"--alpha={text}"]).alpha == value


def test_numbers_of_lists_are_bounded_too():
    for words in (["--devices", f"0,{10**30}"], ["--compute-ranks", f"{2**70}"], ["--grid", f"{2**70}x1"]):
        with pytest.raises(ParamError, match="at most"):
            arguments.parse(words)
    with pytest.raises(ParamError) as caught:
        arguments.parse(["--place", f"{'9' * 5000},h,h"])
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("flag", ["--json", "--options", "--place", "--alpha", "--devices"])
def test_two_dashes_are_no_value(flag):
    with pytest.raises(ParamError, match=flag):
        arguments.parse([f"{flag}=--"])


@pytest.mark.parametrize("words", [["--scale", "1e300"], ["--scale", "1e308", "--dtypes", "f16"]])
def test_a_dataset_beyond_what_can_be_addressed_is_refused(words):
    with pytest.raises(ParamError, match="--scale"):
        bench_arguments.parse_bench(words)


SIZES = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "１２",
    "1_000",
    "-0",
    str(2**31 - 1),
    str(2**31),
    str(2**62),
    str(2**63),
    "9" * 30,
)


def _texts(kind, frame):
    """Return JSON that says one option, of every option and every value of its kind."""
    for name, about in declared(kind):
        for value in about.words or (SIZES if about.kind is NUMBER else ("true", "1", "[1, 2]", "[[1], [2, 1]]")):
            plain = value.isascii() and not about.words
            yield frame % (f'"{name}": {value}' if plain else f'"{name}": "{value}"')


VALUES = {
    **dict.fromkeys(("-m", "-n", "-k"), ("0", "1", "2", "65", "300", "１２", "1_0")),
    "--ranks": ("1", "2", "3", "4", "0", str(2**31), "9" * 30),
    "--place": ("h,h,h", "0,0,0", "0,h,1", "h1,h,h", "9,h,h", "h,h"),
    "--dtype": ("f64", "f32", "f16", "bf16", "tf32"),
    "--trans-a": ("N", "T"),
    "--alpha": ("0", "-0.0", "1e-400", "1e308", "-1"),
    "--beta": ("0", "1", "1e308"),
    "--scheduler": ("uncut", "kblocks", "cyclic", "cyclic:edp", "cyclic:no", "bands", "auto", ":"),
    "--grid": ("1x1", "1x2", "2x1", "2x2", "9x9", f"{2**62}x1"),
    "--compute-ranks": ("0", "1,0", "0,1,2,3", "9", "0,0"),
    "--options": (
        *_texts(ScheduleOptions, "{%s}"),
        *_texts(Blocking, '{"blocking": {%s}}'),
        "{}",
        "[]",
        "{",
        "nowhere",
    ),
    "--metric": ("time", "pdp"),
}


def test_a_plan_of_any_flags_is_made_or_refused(capsys):
    planned = []

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        draw = random.Random(seed)
        for _ in range(5):
            words = ["-m", draw.choice(("0", "1", "70", "300"))]
            for flag in draw.sample(sorted(VALUES), draw.randint(1, 4)):
                words += [flag, draw.choice(VALUES[flag])]
            status = plan.main(words)
            assert status in (0, 2), words
            planned.append(status == 0)

    check()
    assert sum(planned) > len(planned) / 4
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4KiB", 4096),
        ("4 kb", 4000),
        ("1.5GiB", 3 << 29),
        ("2tb", 2 * 10**12),
        ("1e3MB", 10**9),
    ],
)
def test_bytes_are_numbers_with_a_unit_or_without(text, value):
    assert arguments.parse(["--device-memory", text]).options.device_memory == value


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "GiB", "4 G", "nanGB", "infGB", "-1GB", "1e30TB", "1e-9kB", "0x10"]
)
def test_bytes_that_are_none_are_refused(text):
    with pytest.raises(ParamError, match="--device-memory"):
        arguments.parse([f"--device-memory={text}"])
