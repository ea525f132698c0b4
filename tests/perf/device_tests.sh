#!/usr/bin/env bash
# Runs the multi-GPU tests with as many ranks as given. Usage: tests/perf/device_tests.sh RANKS LOG_DIRECTORY [PYTEST ARGUMENTS]
set -uo pipefail
ranks=${1:?ranks}
out=${2:?log directory}
shift 2
python=$(command -v python3)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
status=0
timeout --kill-after=10 500 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m mpi4py -m pytest tests/multigpu --only-mpi -q \
  --timeout=90 --timeout-method=thread -p no:cacheprovider --color=no "$@" >"$out/multigpu_$ranks.log" 2>&1 || status=1
grep -ahE "^(E  |FAILED|ERROR|[0-9]+ (passed|failed))" "$out/multigpu_$ranks.log" | sort | uniq -c | sort -rn | head -40
exit "$status"
