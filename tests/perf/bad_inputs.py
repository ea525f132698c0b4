"""
Reads inputs that went bad, as many of each kind as asked for (1,200), and prints what came of them.

    python3 tests/perf/bad_inputs.py OUT.json [COUNT [SEED]]

tests/helpers/bad_inputs.py makes them. It ends with the first that gives another error than ours.
"""

import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from tests.helpers.bad_inputs import read_all


def main(out, count="1200", seed="0"):
    found = read_all(int(count), int(seed))
    errors = sorted({name for of_kind in found.values() for name in of_kind})
    print(f"| input | {' | '.join(errors)} |\n| --- |{' ---: |' * len(errors)}")
    for kind, of_kind in found.items():
        print(f"| {kind} | {' | '.join(str(of_kind[name] or '') for name in errors)} |")
    pathlib.Path(out).write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "seed": int(seed), "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
