"""One word, one meaning: names of classes, and the words that the glossary explains."""

from __future__ import annotations

import ast
import pathlib
import re
from collections import Counter

ROOT = pathlib.Path(__file__).parents[2]

MATRIX = {"Matrix"}
"""A caller's matrix, and in the model the names of A, B and C, as `concepts.md` says."""


def test_no_two_classes_of_the_package_have_one_name() -> None:
    names = Counter(
        node.name.lstrip("_")
        for path in (ROOT / "uncut_mpi").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} <= MATRIX


def test_the_glossary_explains_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/concepts.md").read_text(), re.MULTILINE)
    words = Counter(word.strip() for row in rows for word in row.split(", ") if set(word) - set("- "))
    assert len(words) > 60
    assert [word for word, count in words.items() if count > 1] == []


OF_THE_CORE = {
    "chunk": ("uncut_", "kblocks_"),
    "slot": ("batch", "kblocks_", "staging", "records", "contract", "lowering", "list_proof", "cuda_executor"),
}
"""Where the core may speak of slices of transfers; of places in rings, and of the flags and events of lists."""


def test_words_of_the_core_stand_where_they_have_their_meaning() -> None:
    for path in (ROOT / "uncut_mpi" / "csrc").rglob("*.?pp"):
        for word, places in OF_THE_CORE.items():
            said = re.search(rf"(?<![a-z]){word}(s|ed)?(?![a-z])", path.read_text())
            assert said is None or path.name.startswith(places), (path.name, word)


OF_NAMES = {
    "bounds?": ("planning/", "model/", "calibration/", "command/", "api/", "device/cuda/warmup"),
    "cuts?": ("planning/", "model/layout", "model/positions", "api/interop", "api/session_matrices", "api/gate"),
    "chunks?|chunked": ("planning/", "api/plan", "api/call", "command/", "view/parts"),
    "pieces?": ("planning/", "model/positions", "api/matrix.", "api/views", "api/operands"),
    "rooms?": ("planning/", "free_memory", "segments", "api/matrix_files", "api/plan_maker", "command/planning"),
    "rounds(?!_c)": ("planning/kblocks_",),
    "slots?": ("planning/", "device/host/executor"),
}
"""Which files of Python may call something so, beside the benchmark, in the meaning that `concepts.md` has."""


def test_names_of_python_have_words_where_they_have_their_meaning() -> None:
    package = ROOT / "uncut_mpi"
    for path in package.rglob("*.py"):
        where, names = path.relative_to(package).as_posix(), set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.FunctionDef | ast.ClassDef):
                names |= {str(getattr(node, one)) for one in ("id", "attr", "arg", "name") if hasattr(node, one)}
        text = " ".join(re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names - {"__slots__"})
        for word, places in OF_NAMES.items():
            said = re.search(rf"(?<![a-z])({word})(?![a-z])", text)
            assert said is None or where.startswith((*places, "bench")), (where, word)
