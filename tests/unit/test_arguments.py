"""The command line of the gemm command, as a pure function of its words."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uncut_mpi import plan
from uncut_mpi.bench import arguments as bench_arguments
from uncut_mpi.command import arguments, calibrate_arguments, planning
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.command.flags import make_parser, make_plan_parser
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.option_fields import NUMBER, declared
from uncut_mpi.planning.options import Blocking, ScheduleOptions

EVERY_FLAG = (
    "-m 1000 -n 777 -k 1301 --dtype bf16 --trans-a T --trans-b T --alpha 2 --beta 0.5 --place 3,h,5 --backend "
    "cuda --devices 3,1 --allow-shared-gpu --machine uniform --scheduler uncut --grid 2x1 --compute-ranks 5,0 "
    "--warmup 0 --repeat 7 --timeout 2.5 --tune-products --no-check --json facts.json --seed 9 --options"
)
OPTIONS = {
    "tile": 128, "max_hops": 2, "chunks": 3, "routing": "bw",
    "batch": False, "wr_lazy": False, "order": "fixed", "row_shares": [1, 2.5],
}  # fmt: skip


def test_no_arguments_ask_for_a_generated_verified_problem_of_default_size():
    args = parse([])
    assert (args.m, args.n, args.k, args.a_path, args.check) == (None, None, None, None, True)
    assert (args.alpha, args.beta) == (1.2345, 1.1154)
    assert args.options == ScheduleOptions()
    assert args.options.scheduler == "auto"
    assert not args.tune_products
    assert args.place == Places.parse("h,h,h")


def test_every_flag_reaches_its_field():
    args = parse([*EVERY_FLAG.split(), json.dumps(OPTIONS)])
    assert (args.m, args.n, args.k, args.dtype, args.trans_a, args.trans_b) == (1000, 777, 1301, DType.bf16, "T", "T")
    assert (args.alpha, args.beta, str(args.place), args.backend) == (2.0, 0.5, "3,h,5", "cuda")
    assert (args.devices, args.allow_shared_gpu) == ((3, 1), True)
    assert args.options == ScheduleOptions(
        scheduler="uncut",
        tile=128, grid=(2, 1), devices=(5, 0), max_hops=2, chunks=3,
        routing="bw", batch=False, wr_lazy=False, order="fixed", row_shares=(1.0, 2.5),
    )  # fmt: skip
    assert args.tune_products
    assert (args.warmup, args.repeat, args.timeout_s, args.check, args.json, args.seed) == (
        0, 7, 2.5, False, "facts.json", 9,
    )  # fmt: skip


def test_n_and_k_are_m_unless_given():
    args = parse(["-m", "500", "-k", "0"])
    assert (args.m, args.n, args.k) == (500, 500, 0)


def test_files_are_multiplied_with_alpha_1_and_no_c():
    args = parse(["A.npy", "B.npy", "-o", "OUT.npy", "--overwrite"])
    assert (args.a_path, args.b_path, args.c_path, args.out_path, args.overwrite) == (
        "A.npy", "B.npy", None, "OUT.npy", True,
    )  # fmt: skip
    assert (args.alpha, args.beta, args.m) == (1.0, 0.0, None)


@pytest.mark.parametrize(
    ("words", "files", "generated"),
    [
        ([], (0, 0), (2, 5)),
        (["--repeat", "3"], (2, 3), (2, 3)),
        (["--warmup", "1"], (1, 5), (1, 5)),
        (["--warmup", "0", "--repeat", "1"], (0, 1), (0, 1)),
        (["--tune", "4"], (2, 5), (2, 5)),
        (["--trace", "t.txt"], (0, 0), (2, 5)),
    ],
)
def test_files_are_multiplied_once_unless_a_measurement_is_asked_for(words, files, generated):
    for line, (warmup, repeat) in (([*words, "A.npy", "B.npy", "-o", "OUT.npy"], files), (words, generated)):
        found = parse(line)
        assert (found.warmup, found.repeat) == (warmup, repeat)


def test_a_machine_is_named_or_what_is_there_is_planned_for():
    assert parse([]).machine is None
    assert parse(["--machine", "h200-4x"]).machine == "h200-4x"


@pytest.mark.parametrize("flag", ["-o", "-c", "--json", "--trace", "--machine"])
@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_a_name_that_no_file_can_have_is_refused(flag, name):
    with pytest.raises(ParamError, match="is not the name of a file"):
        parse([flag, name])


def test_a_c_file_is_added_unless_beta_says_otherwise():
    words = ["A.npy", "B.npy", "-c", "C.npy", "-o", "OUT.npy"]
    assert parse(words).beta == 1.0
    assert parse([*words, "--beta", "0.25"]).beta == 0.25


@pytest.mark.parametrize("text", ["1+2j", "-1e-3-2j", "-2j", "1j"])
def test_scalars_of_complex_types_may_be_complex(text):
    made = parse(["--dtype", "c64", "--alpha", text, "--beta", text])
    assert made.alpha == made.beta == complex(text)
    for words in (["--dtype", "f64"], []):
        with pytest.raises(ParamError, match=r"is complex, and the matrices are f64: add --dtype c128"):
            parse([*words, "--alpha", text])
    with pytest.raises(ParamError, match="finite"):
        parse(["--dtype", "c64", "--alpha", "1+infj"])


@pytest.mark.parametrize("text", ["-1.5", "-1e-3", "-2E+1"])
def test_negative_scalars_need_no_equals_sign(text):
    assert parse(["--alpha", text, "--beta", text]).alpha == float(text)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_handed_over_and_not_printed(flag, capsys):
    with pytest.raises(HelpRequested) as caught:
        parse(["-m", "3", flag])
    for name in ["--place", "--options", "--help-schedulers", "--allow-shared-gpu", "-o", "OUT.npy"]:
        assert name in caught.value.text
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "value", "advice"),
    [
        ("--dtype f8", "f8", "f64, f32, f16, bf16"),
        ("--trans-a t", "'t'", "N, T"),
        ("--backend gpu", "gpu", "auto, cuda, host"),
        ('--options {"routing":"fast"}', "fast", "origin, bw, eta"),
        ('--options {"order":"random"}', "random", "fixed, eta"),
        ('--options {"chunk":2}', "no 'chunk'", "did you mean chunks"),
        ('--options {"blocking":{"row":2}}', "--options.blocking has no 'row'", "rows"),
        ('--options {"tile":1,"tile":2}', "'tile'", "say it once"),
        ('--options {"blocking":{"growth":1}}', "blocking.growth = 1", "below 2"),
        ('--options {"blocking":3}', "--options.blocking = 3 is an int", "names and values"),
        ('--options {"tile":', "is no JSON", "Expecting value"),
        ("--options [1]", "'[1]'", "neither a JSON object"),
        ("--options nowhere.json", "'nowhere.json'", "nor a file"),
        ('--grid 1x2 --options {"grid":[1,2]}', "--grid and grid", "leave one of them out"),
        ("--scheduler best", "best", "uncut"),
        ("--place h,h", "'h,h'", "three"),
        ("--place h,x,0", "'x'", "rank number"),
        ("--grid 8", "'8'", "2x4"),
        ("--grid 0x4", "'0'", "at least 1"),
        ('--options {"tile":-1}', "tile = -1", "below 0"),
        ('--options {"chunks":0}', "chunks = 0", "below 1"),
        ('--options {"chunks":1.5}', "1.5", "whole number"),
        ("-m -3", "-3", "at least 0"),
        ("--alpha nan", "nan", "finite"),
        ("--beta inf", "inf", "finite"),
        ("--timeout 0", "'0'", "above 0"),
        ("--repeat 0", "'0'", "at least 1"),
        ("--devices 0,a", "'a'", "whole number"),
        ('--options {"compute_lanes":2}', "has no 'compute_lanes'", "it has"),
        ("-n 5", "-n 5", "-m"),
        ("A.npy", "A.npy", "B.npy"),
        ("A.npy B.npy --overwrite", "--overwrite", "-o"),
        ("A.npy B.npy C.npy -o OUT.npy", "C.npy", "--help"),
        ("A.npy B.npy -o OUT.npy -m 5", "-m 5", "leave it out"),
        ("A.npy B.npy -o OUT.npy --beta 2", "2.0", "-c"),
        ("A.npy B.npy -o X --json X", "X", "different"),
        ("-o OUT.npy", "OUT.npy", "A.npy"),
        ("-c C.npy", "C.npy", "A.npy"),
        ("--overwrite", "--overwrite", "-o"),
        (
            '--grid 1x2 --options {"tile":512,"batch":false,"blocking":{"block":512}}',
            "no scheduler takes all of tile, --grid, batch, blocking.block",
            "leave some",
        ),
        (
            '--scheduler uncut --options {"blocking":{"splits":2,"order":"k"}}',
            "blocking.splits, blocking.order with",
            "with --scheduler uncut, which",
        ),
        ("--scheduler cyclic --metric edp", "--metric with --scheduler cyclic", "a search minimises it"),
        (
            '--scheduler kblocks --options {"order":"finish"}',
            "order with",
            "kblocks, which does not take that",
        ),
        (
            '--scheduler cyclic --options {"chunks":2}',
            "chunks with",
            "cyclic, which does not take that",
        ),
        ("--scheduler bands --grid 1x2", "--grid with", "with --scheduler bands, which does not take that"),
        ('--options {"blocking":{"first":512,"block":256}}', "512", "let the first be no longer"),
        ("--no-cach", "--no-cach", "--help"),
        ("--options", "--options", "--help"),
    ],
)
def test_bad_input_is_one_error_that_names_the_value_and_the_mend(words, value, advice, capsys):
    with pytest.raises(ParamError) as caught:
        parse(words.split())
    message = str(caught.value)
    assert value in message
    assert advice in message
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("flag", [["--devices", "0,1"], ["--allow-shared-gpu"], ["--tune-products"]])
def test_gpus_are_not_chosen_for_the_host_backend(flag):
    with pytest.raises(ParamError, match=flag[0]):
        parse(["--backend", "host", *flag])


def test_a_trace_is_written_in_the_form_that_its_name_says():
    assert parse(["--trace", "t.png"]).trace == "t.png"
    assert parse([]).trace is None
    with pytest.raises(ParamError, match=r"t\.pdf does not say which picture is wanted.*\.json"):
        parse(["--trace", "t.pdf"])


@pytest.mark.parametrize(
    "words",
    ["A B -o x.json --json x.json", "--json x.json --trace x.json", "A B -o x.json --trace x.json"],
)
def test_two_results_in_one_file_are_refused(words):
    with pytest.raises(ParamError, match=r"both name x\.json"):
        parse(words.split())


def test_places_are_memories_or_layouts_and_say_what_was_typed():
    text = "rows,blocks(3,4;5,6;ranks=3,1,0,2)@host,whole(1)@shared"
    places = Places.parse(text)
    assert str(places) == text
    assert places.a == Dealt(Layout.rows(), "device")
    assert places.b == Dealt(Layout.blocks([3, 4], [5, 6], ranks=[3, 1, 0, 2]), "host")
    assert str(Places.parse("cols@device,h,h2")) == "cols,h,h2"
    assert Places.parse("2,h,h2").c == Location.host(2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows,cols", "has 2 parts"),
        ("rows(1,2),cols,0,0", "has 4 parts"),
        ("row,h,h", "layout 'row' is not known"),
        ("rows@gpu,h,h", "memory = 'gpu'"),
        ("rows(3,h),h,h", "not known"),
        (",h,h", "rank number"),
    ],
)
def test_places_that_are_neither_are_named(text, words):
    with pytest.raises(ParamError, match=re.escape(words)):
        Places.parse(text)


def test_a_place_is_bound_to_the_extents_of_its_matrix():
    problem = GemmProblem(10, 8, 6, DType.f64, trans_a="T")
    bound = Places.parse("cols,replicated@host,rows(4,6)@shared").bind(problem, 2)
    assert [(part.rows, part.cols, str(part.location)) for part in bound.a.parts] == [
        ((0, 6), (0, 5), "0"),
        ((0, 6), (5, 10), "1"),
    ]
    assert [(part.rows, part.cols, str(part.location)) for part in bound.b.parts] == [
        ((0, 6), (0, 8), "h0"),
        ((0, 6), (0, 8), "h1"),
    ]
    assert bound.c == Location.host()
    turned = Places.parse("cols@C,rows@host@C,cols@F")
    assert (str(turned), turned.c.order) == ("cols@C,rows@host@C,cols@F", "F")
    found = turned.bind(problem, 2)
    assert [{part.order for part in one.parts} for one in (found.a, found.b, found.c)] == [{"C"}, {"C"}, {"F"}]
    whole = Places.parse("whole(1),rows(0,6)@host,h").bind(problem, 2)
    assert (whole.a, whole.b, whole.c) == (Location.device(1), Location.host(1), Location.host())
    for text, words in (("h,h,rows(3,6)", "has 9 rows, the matrix 10"), ("h,h,rows(3,6,1)", "3 parts for 2 ranks")):
        with pytest.raises(ParamError, match=words):
            Places.parse(text).bind(problem, 2)
    with pytest.raises(ParamError, match="names rank 5"):
        Places.parse("whole(5),h,h").check_ranks(2)
    with pytest.raises(ParamError, match="placed on rank 3"):
        Places.parse("rows,3,h").check_ranks(2)


# -- any words are arguments, help or one error ----------------------------------------------------


ODD_NUMBERS = (
    "0", "1", "2", "7", "-0", "+3", "-1", "1e3", "1.5", "１２", "٣", "²", "0x10", "1_000", "_1", "1__0", "nan", "-nan",
    "inf", "-inf", "infinity", "1e308", "1e309", "-1e309", "1e-400", ".", "½", "∞", "True", "None", "1j", "1,2",
    "1,", ",", "0,0", "1;2", "--", "-", "=",
    " 5", "5 ", "", " ", "\n", "\0", "1 2", "9" * 400, "9" * 5000, "-" + "9" * 400,
    *(str(2**power + more) for power in (15, 31, 32, 62, 63, 64, 128) for more in (-1, 0, 1)),
)  # fmt: skip
ODD_WORDS = (
    "f64", "tf32", "h,h,h", "0,h,1", "h1,h,h", "h,h", "h,h,h,h", "H,h,h", "2x4", "2X4", "x", "2x", "x2", "2×4",
    "2x4x1", "time", "pdp", "N", "T", "n", "auto", "host", "cuda", "uncut", "kblocks", "cyclic", "one", "tuned",
    "uncut:64", "cyclic:²", "cyclic:1d-cyclic", "uncut:", ":", "bands:-1", "A.npy", "t.json", "t.png", "t.txt",
    ".png", "t", "/", "é", "🦆", "%s", "%(default)s", "{}", "{0}", "$HOME", "@file", "\\",
    "\ud800", "\udcff", "\t", "a" * 5000,
)  # fmt: skip
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
    "0", "1", "2", "3", "7", "64", "１２", "1_000", "-0", str(2**31 - 1), str(2**31), str(2**62), str(2**63), "9" * 30,
)  # fmt: skip


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
