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
