#!/usr/bin/env bash
# Calibrates a node with GPUs, the quick form and the whole, and prints what both found.
# Usage: tests/perf/calibrate.sh OUTPUT_DIRECTORY [RANKS]
set -uo pipefail
out=${1:?usage: tests/perf/calibrate.sh OUTPUT_DIRECTORY [RANKS]}
ranks=${2:-4}
python=$(command -v python3)
mkdir -p "$out"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
status=0

calibrate() { # name arguments...
  local name=$1 began=$SECONDS
  shift
  echo "== $name"
  timeout --kill-after=10 150 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m uncut_mpi.calibrate --backend cuda \
    --output "$out/$name.json" "$@" >"$out/$name.log" 2>"$out/$name.err" || { status=1; tail -n 15 "$out/$name.err"; }
  cat "$out/$name.log"
  echo "$name: $((SECONDS - began)) s with start and end"
}

calibrate quick --quick
calibrate whole
exit "$status"
