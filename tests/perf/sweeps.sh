#!/usr/bin/env bash
# Tile and option sweeps on a node with GPUs. Usage: tests/perf/sweeps.sh OUTPUT_DIRECTORY RANKS
set -uo pipefail
out=${1:?output directory}
ranks=${2:?ranks}
python=$(command -v python3)
sweep() {
  timeout --kill-after=10 90 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m mpi4py tests/perf/sweep.py "$out/sweep_$1_${2//,/}.json" "$@" 2>&1 | grep -v "^$"
}
sweep 4096 0,0,0 tile=1024 tile=2048 "tile=1024 batch=False" "tile=2048 batch=False" "tile=2048 chunks=2"
sweep 8192 0,0,0 tile=2048 "tile=2048 batch=False" "tile=2048 chunks=2" "tile=2048 compute_lanes=2"
sweep 16384 0,0,0 tile=2048 tile=3072 tile=4096 "tile=2048 chunks=2" "tile=2048 batch=False" "tile=4096 batch=False"
sweep 4096 h,h,h tile=1024 tile=2048 "tile=1024 chunks=2"
sweep 8192 h,h,h tile=1024 tile=1536 tile=2048 "tile=2048 chunks=2" "tile=1024 chunks=1" "tile=2048 chunks=1"
sweep 16384 h,h,h tile=2048 tile=3072 tile=4096 "tile=2048 chunks=2" "tile=2048 chunks=1" "tile=4096 chunks=2" "tile=2048 compute_lanes=2"
