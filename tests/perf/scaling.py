"""
Draw how many times as fast as one GPU 2, 3, … are: from the step `scaling` of `table.sh`.

python3 tests/perf/scaling.py SCALING.json PICTURE.svg

A line for each problem and place, with bars from the least to the largest sample. Dotted: as many times as GPUs.
"""

import json
import pathlib
import sys

import matplotlib.pyplot as plt


def times(case, ranks):
    """Return the median, the least and the largest time (s) by the number of GPUs."""
    found = {}
    for one in case["cases"]:
        if one["way"] == "ours" or one["way"].startswith("devices="):
            count = ranks if one["way"] == "ours" else one["way"].count(",") + 1
            found[count] = (one["seconds"], *one["spread_s"])
    return dict(sorted(found.items()))


def main():
    """Draw the file's cases."""
    data, picture = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")), sys.argv[2]
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    for case in data["cases"]:
        found = times(case, data["ranks"])
        alone = found[1][0]
        gains = [alone / median for median, _, _ in found.values()]
        ends = [[alone / median - alone / most for median, _, most in found.values()]]
        ends.append([alone / least - alone / median for median, least, _ in found.values()])
        size = f"{case['m']}³" if case["m"] == case["n"] == case["k"] else f"{case['m']}×{case['n']}×{case['k']}"
        rate = 2e-12 * case["m"] * case["n"] * case["k"] / list(found.values())[-1][0]
        label = f"{case['dtype']} {size} at {case['place']}: {rate:.0f} TFLOP/s"
        axes.errorbar(list(found), gains, ends, marker="o", capsize=3, label=label)
    axes.plot(list(found), list(found), ":", color="gray")
    axes.set(xlabel="GPUs", ylabel="times as fast as one", title=f"{data['devices'][0]}, {data['date']}")
    axes.set_xticks(list(found))
    axes.legend(fontsize="small")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
