"""Prose that a reader can follow: short sentences and module docstrings, and what they refer to is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_WORDS = 30
MOST_LINES = 15

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "uncut_mpi").rglob("*.py"))
TREE = re.compile(r"^::\n\n(?:    .*\n?|\n)+", re.MULTILINE)  # a literal block of a docstring
BLOCK = re.compile(r"^(`{3,})[^\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)  # code
NO_SENTENCES = re.compile(r"^ *(\||#|!\[|---|\.\. |::|[-=~^]{3,}$).*$", re.MULTILINE)  # tables, headings, pictures
FIELD = re.compile(r"^ *\w+(, \w+)* : .*$", re.MULTILINE)  # a parameter or attribute, and its type
LITERAL = re.compile(r"(`+).+?\1", re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
END = re.compile(r"[.!?]\)?[*\"]{0,2}(?=\s)|\n\s*\n|\n\s*(?:[-*]|\d+\.)\s")
WORD = re.compile(r"\w")
CITED = re.compile(r"\b20\d\d-\d\d-\d\d\b")
RESULT = re.compile(r"`([\w*.-]+_(?:[1-9]xh(?:\d+|ost)|simulated)_[\w*.-]+\.(?:jsonl?|txt))`")


def sentences(text: str) -> list[str]:
    """Return the sentences of Markdown or of a docstring; a literal is one word."""
    for no_sentences in (TREE, BLOCK, FIELD, NO_SENTENCES):
        text = no_sentences.sub("\n\n", text)
    text = LINK.sub(r"\1", LITERAL.sub("literal", text))
    return [" ".join(one.split()) for one in END.split(text + "\n")]


def too_long(text: str) -> list[str]:
    return [one for one in sentences(text) if sum(map(bool, map(WORD.search, one.split()))) > MOST_WORDS]


def test_long_sentences_are_found() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    assert too_long(
        f"Short. {words}. {words} `a literal` end.\n\n```\n{words} {words}\n```\n| {words} {words} |\n"
    ) == [f"{words} literal end"]
    assert not too_long(f"- {words}\n- {words}\n\n{words}")
    assert not too_long(f"Returns\n-------\none, two : {words} of them\n    {words}\nthree : bool\n    {words}.")


def test_sentences_of_pages_are_short() -> None:
    found = {path.name: too_long(path.read_text(encoding="utf-8")) for path in PAGES}
    assert not {name: long for name, long in found.items() if long}


def docstrings(node: ast.Module | ast.stmt) -> Iterator[str]:
    """Yield the docstring of a module, class or function, and those of what is defined in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
        for inner in node.body:
            yield from docstrings(inner)


def test_docstrings_are_of_short_sentences_and_those_of_modules_of_few_lines() -> None:
    found = {}
    for path in MODULES:
        texts = list(docstrings(ast.parse(path.read_text(encoding="utf-8"))))
        lines = len(texts[0].splitlines())
        wrong = [f"{lines} lines"] if lines > MOST_LINES else []
        wrong += [one for text in texts for one in too_long(text)]
        if wrong:
            found[str(path.relative_to(ROOT))] = wrong
    assert not found


def test_sentences_of_the_cores_comments_are_short() -> None:
    found = {}
    for path in sorted((ROOT / "uncut_mpi" / "csrc").rglob("*.?pp")):
        # What is not a line of comment alone ends a paragraph.
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        text = "\n".join(line.removeprefix("// ") if line.startswith("// ") else "" for line in lines)
        if too_long(text):
            found[path.name] = too_long(text)
    assert not found


def test_decisions_and_files_that_are_referred_to_are_there() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    code = [path for path in (ROOT / "uncut_mpi").rglob("*") if path.suffix in (".py", ".cpp", ".hpp")]
    cited = {(path.name, date) for path in code for date in CITED.findall(path.read_text(encoding="utf-8"))}
    assert len(cited) > 10
    assert not {(name, date) for name, date in cited if date not in page}
    results = ROOT / "docs" / "performance" / "results"
    named = set(RESULT.findall(page))
    assert named
    assert not [name for name in named if not list(results.glob(name))]
    assert not [path.name for path in results.iterdir() if not any(map(path.match, named))]
