#!/usr/bin/env bash
# Calibrates a node with GPUs: the quick form, of which the end is printed, and the whole, without the ports that were
# fitted. The logs and the machine files stay in the directory.
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
  echo "$name: $((SECONDS - began)) s with start and end"
}

calibrate quick --quick
tail -n 2 "$out/quick.log"
calibrate whole
sed '/^ports:/,/^$/d' "$out/whole.log"
exit "$status"
