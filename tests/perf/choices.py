"""
What versions of the search choose on a machine, as `model_data.py` reads it: no GPU.

    python3 tests/perf/choices.py MACHINE CASES.json OUT.json [LIBRARY]

MACHINE is a file or the name of one that ships. To each case of CASES.json (as `model_cases.py` writes them; without
options at first) the choice of this version is added, or of the one in the folder LIBRARY, unless an earlier choice is
the same schedule. "again" is set such that all choices are measured in turns. Run it once for every version, the
output of one being the next one's input.
"""

import dataclasses
import json
import pathlib
import sys


def words(options):
    """Return schedule options as `sweep.options_of` reads them: all that differs from the defaults."""
    found = []
    for prefix, values in (("", options), ("k.", options.blocking)):
        for field in dataclasses.fields(values):
            value = getattr(values, field.name)
            if field.name == "blocking" or (value == field.default and field.name != "scheduler"):
                continue
            if field.name == "areas":
                value = "/".join(",".join(map(repr, column)) for column in value)
            elif isinstance(value, tuple):
                value = ("x" if field.name == "grid" else ",").join(map(repr, value))
            found.append(f"{prefix}{field.name}={value}")
    return " ".join(found)


def main():
    """Add a version's choices."""
    named, cases_file, out, *library = sys.argv[1:]
    if library:
        sys.meta_path[:] = [one for one in sys.meta_path if "ditable" not in type(one).__module__]
        sys.path.insert(0, library[0])

    from uncut_mpi.model.dtypes import DType
    from uncut_mpi.model.machine import Machine
    from uncut_mpi.model.machine_files import load_machine
    from uncut_mpi.model.placement import Placement
    from uncut_mpi.model.problem import GemmProblem
    from uncut_mpi.planning.search import search

    file = pathlib.Path(named)
    machine = Machine.from_json(file.read_text(encoding="utf-8")) if file.exists() else load_machine(named)
    cases = json.loads(pathlib.Path(cases_file).read_text(encoding="utf-8"))
    for case in cases:
        problem = GemmProblem(case["m"], case["n"], case["k"], DType[case["dtype"]])
        best = search(problem, Placement.parse(case["place"]), machine.num_ranks, machine).best
        if best.schedule.digest() not in case.setdefault("digests", []):
            case["digests"].append(best.schedule.digest())
            case["options"] = [*case.get("options", []), words(best.options)]
        case["again"] = len(case["options"])
    pathlib.Path(out).write_text(json.dumps(cases, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
