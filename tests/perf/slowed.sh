#!/usr/bin/env bash
# One GPU is slowed by another process; the machine is measured so, and the searched plan is compared with equal
# blocks. Usage: tests/perf/slowed.sh OUTPUT_DIRECTORY [RANKS [SLOW_GPU]]
set -euo pipefail
out=${1:?usage: tests/perf/slowed.sh OUTPUT_DIRECTORY [RANKS [SLOW_GPU]]}
ranks=${2:-4}
slow=${3:-$((ranks - 1))}
python=$(command -v python3)
mkdir -p "$out"
export XDG_CACHE_HOME
XDG_CACHE_HOME=$(mktemp -d)
trap 'kill "$load" 2>/dev/null || true; rm -rf "$XDG_CACHE_HOME"' EXIT
"$python" tests/perf/load.py "$slow" 240 &
load=$!
sleep 5
timeout --kill-after=10 100 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m uncut_mpi.calibrate --time-limit 20 >"$out/slowed_calibrate.log" 2>&1
tail -n 3 "$out/slowed_calibrate.log"
timeout --kill-after=10 100 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m mpi4py tests/perf/sweep.py "$out/slowed.json" 8192 \
  "0,0,0;h,h,h" f64 "scheduler=kblocks" "scheduler=auto" "scheduler=kblocks" "scheduler=auto" scheduler=uncut
