"""
Count what the stages of launch/test did; knows JUnit reports, and nothing of the package.

A folder of reports holds one folder for each stage, and that holds any of: ``rank<r>.xml`` (the JUnit
report of rank r), ``rank<r>.log`` (what a rank other than 0 printed), ``problem`` (why the stage
failed), ``skipped`` (why it was not run), ``seconds``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

_RANKING = {"passed": 0, "skipped": 1, "failed": 2}


@dataclasses.dataclass
class Stage:
    """
    What one stage did.

    Attributes
    ----------
    name : str
        Name of its folder.
    passed, failed : int
        Tests; a test failed if it did so on any rank.
    skips : Counter
        Reason: number of tests.
    problem : str
        Why the stage as a whole failed; empty if it did not.
    whole_skip : str
        Why the stage was not run; empty if it was.
    seconds : str
        How long it took; empty if unknown.
    """

    name: str
    passed: int = 0
    failed: int = 0
    skips: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    problem: str = ""
    whole_skip: str = ""
    seconds: str = ""


def _outcome(case: ET.Element) -> tuple[str, str]:
    """Return (passed, skipped or failed; reason) of one test case."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed", ""
    skipped = case.find("skipped")
    if skipped is not None:
        return "skipped", " ".join(skipped.get("message", "").split()) or "no reason given"
    return "passed", ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""


def read_stage(folder: Path) -> Stage:
    """Return what the stage with this folder did, all its ranks taken together."""
    stage = Stage(folder.name, problem=_text(folder / "problem"), whole_skip=_text(folder / "skipped"))
    stage.seconds = _text(folder / "seconds")
    worst: dict[str, tuple[str, str]] = {}
    for report in sorted(folder.glob("rank*.xml")):
        try:
            cases = list(ET.parse(report).iter("testcase"))
        except ET.ParseError:  # the rank was ended while it wrote
            stage.problem = stage.problem or f"{report.name} is incomplete"
            continue
        for case in cases:
            key = f"{case.get('classname')}::{case.get('name')}"
            seen, found = worst.get(key), _outcome(case)
            if seen is None or _RANKING[found[0]] > _RANKING[seen[0]]:
                worst[key] = found
    for outcome, reason in worst.values():
        if outcome == "passed":
            stage.passed += 1
        elif outcome == "failed":
            stage.failed += 1
        else:
            stage.skips[reason] += 1
    if not stage.whole_skip and not worst:
        # A stage without reports is a tool such as a linter: one check, passed or failed as a whole.
        tested = any(folder.glob("rank*"))
        if stage.problem or tested:
            stage.problem = stage.problem or "no test was run"
        else:
            stage.passed = 1
    if stage.problem and not stage.failed:
        stage.failed = 1
    return stage


def summarise(stages: list[Stage]) -> tuple[list[str], int]:
    """Return the lines to print, the closing line last, and the exit status."""
    lines = [f"{'stage':<27} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    skips: collections.Counter[str] = collections.Counter()
    passed = failed = 0
    for stage in stages:
        here = sum(stage.skips.values())
        lines.append(f"{stage.name:<27} {stage.passed:>7} {stage.failed:>7} {here:>8} {stage.seconds:>8}")
        if stage.problem:
            lines.append(f"    failed: {stage.problem}")
        if stage.whole_skip:
            skips[f"stage {stage.name}: {stage.whole_skip}"] += 1
        skips.update(stage.skips)
        passed += stage.passed
        failed += stage.failed
    if skips:
        lines.append("skipped, by reason:")
        lines += [f"{count:>7}  {reason}" for reason, count in sorted(skips.items(), key=lambda x: (-x[1], x[0]))]
    if not passed and not failed:
        lines.append("no test was run")
    lines.append(f"{passed} passed, {failed} failed, {sum(skips.values())} skipped")
    return lines, int(failed > 0 or passed == 0)


def _place(log: str) -> str:
    """Return where a rank stood when it noted its place: the innermost frame outside of installed code."""
    dump = log.rpartition("Timeout (")[2]
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in (\S+)', dump, re.MULTILINE)
    for path, line, name in frames:
        if "/lib/python" not in path and not path.startswith("<"):
            return f"{os.path.relpath(path)}:{line} in {name}"
    return ""


def blame(folder: Path) -> list[str]:
    """
    Return what explains a failed stage of several ranks, naming the rank.

    If a rank reported a failure of its own, the end of that rank's output (the lowest rank's, without
    rank 0, whose output was seen already). Else, if the ranks hang, where each of them stood. Else the end of
    the first output that holds an error, else the last lines of every rank.
    """
    logs = {int(path.stem[4:]): _text(path) for path in folder.glob("rank*.log")}
    # pytest marks the lines of an error raised here with E; a rank that only heard of it has none.
    own, heard = (
        sorted(rank for rank, text in logs.items() if re.search(sign, text, re.MULTILINE))
        for sign in (r"^E  |^rank \d+ failed in ", r"^(FAILED|ERROR) ")
    )
    failed = own or heard
    if failed:
        lines = [f"rank {', '.join(map(str, failed))} of {folder.name} reported a failure"]
        if failed[0] != 0:
            lines += [f"--- rank {failed[0]} ---", *logs[failed[0]].splitlines()[-80:]]
        return lines
    places = {rank: place for rank, text in sorted(logs.items()) if (place := _place(text))}
    if places:
        counts = collections.Counter(places.values())
        common = max(counts.values())
        lines = [f"{folder.name} hangs; where each rank stood:"]
        for rank, place in places.items():
            odd = "   <-- differs from the others" if counts[place] < common else ""
            lines.append(f"  rank {rank}: {place}{odd}")
        silent = sorted(set(logs) - set(places))
        if silent:
            lines.append(f"  not heard of: rank {', '.join(map(str, silent))}")
        return lines
    for rank, text in sorted(logs.items()):
        if re.search(r"Traceback \(most recent|Error\b", text):
            return [f"--- rank {rank} of {folder.name} ---", *text.splitlines()[-80:]]
    lines = [f"no rank of {folder.name} said why; the end of what each printed:"]
    for rank, text in sorted(logs.items()):
        end = text.splitlines()[-3:] or ["(nothing)"]
        reported = "" if (folder / f"rank{rank}.xml").exists() else ", which wrote no report"
        lines += [f"--- rank {rank}{reported} ---", *end]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the summary of a folder of reports, or with ``--blame`` what the guilty rank said."""
    parser = argparse.ArgumentParser(description="Count what the stages of launch/test did.")
    parser.add_argument("--blame", action="store_true", help="print the output of the rank that failed")
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.blame:
        lines, status = blame(chosen.folder), 0
    else:
        lines, status = summarise([read_stage(path) for path in sorted(chosen.folder.iterdir()) if path.is_dir()])
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
