#!/usr/bin/env bash
# The GPU tests in the modes that change how CUDA queues and launches, and the litmus of flags and copies.
# launch/test runs the same tests in the same modes; this keeps what they print.
# Usage: tests/perf/modes.sh OUTPUT_DIRECTORY RANKS [MODE...], where a MODE is NAME=VALUE, or "" for as usual
set -uo pipefail
out=${1:?output directory}
ranks=${2:?ranks}
modes=("${@:3}")
[ ${#modes[@]} -gt 0 ] || modes=("" CUDA_DEVICE_MAX_CONNECTIONS=1 CUDA_LAUNCH_BLOCKING=1)
python=$(command -v python3)
status=0
for mode in "${modes[@]}"; do
  echo "== ${mode:-as usual}"
  mkdir -p "$out/mode_$mode"
  env $mode tests/perf/device_tests.sh "$ranks" "$out/mode_$mode" --color=no || status=1
done
echo "== litmus"
timeout --kill-after=10 120 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m mpi4py tests/gpu/litmus.py --json "$out/litmus.json" || status=1
echo "== one GPU"
timeout --kill-after=10 150 "$python" -m pytest tests/gpu -q --color=no -p no:cacheprovider >"$out/gpu.log" 2>&1 || status=1
tail -n 15 "$out/gpu.log"
exit "$status"
