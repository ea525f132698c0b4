#!/usr/bin/env bash
# What is published of a node with GPUs, in calls of ten minutes: each word is a step of its own, and says how long it took.
# Usage: tests/perf/table.sh OUTPUT_DIRECTORY RANKS STEP...
#   build       installs the package, an old version if .gpu/old holds one (old_version.sh), and wheels of .gpu/
#   calibrate   measures the machine for all later steps
#   tests       tests/multigpu on all GPUs
#   whole       whole matrices beside their floor, other libraries and the old version, in turns
#   dealt       the same of dealt matrices
#   scaling     8192 and 16384 cubed on 1 to RANKS GPUs, which scaling.py draws
#   budgets     products that do not fit
#   irregular   30 of the irregular problems of the Uncut-GEMMs paper, and the steps of its figure 8
#   nodes       the main command, the same of dealt matrices with half of the ranks taken for a node, and a rank that is killed
# Wheels are made so, where there is a network; .gpu/ is not under version control:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     -d .gpu nvmath-python==0.8.0 nvidia-cublasmp-cu13==0.7.0.125 cuda-core==0.4.0 pytest-mpi
# TRACE=--trace adds traces; WHOLE, DEALT and SCALING may name other problems, with ; between them.
set -uo pipefail
out=${1:?usage: tests/perf/table.sh OUTPUT_DIRECTORY RANKS STEP...}
ranks=${2:?ranks}
python=$(command -v python3)
site=$PWD/.gpu/site
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 CUDA_DEVICE_MAX_CONNECTIONS=32
# Multicast needs rights that a container may lack.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-16G}
export XLA_PYTHON_CLIENT_PREALLOCATE=false
whole=${WHOLE:-f64 4096 0,0,0/h,h,h;f64 8192 0,0,0/h,h,h;bf16 8192 0,0,0;bf16 16384 0,0,0;f32 8192 0,0,0/h,h,h;f64 4096x4096x65536 0,0,0/h,h,h;f64 24576x24576x2048 0,0,0/h,h,h;f64 1536 0,0,0;f16 1536 0,0,0;f32 16384 0,0,0;f64 16384 0,0,0/h,h,h;bf16 12288 1,h,0;f64 33x1000003x17 0,0,0;f64 24576 0,0,0/h,h,h}
dealt=${DEALT:-f64 8192 rows,cols,rows@C/rows,rows,rows;f16 8192 rows,cols,rows@C/rows,rows,rows;f32 8192 rows,cols,rows@C;bf16 16384 rows,cols,rows@C}
scaling=${SCALING:-f64 8192 0,0,0/h,h,h;f16 8192 0,0,0;f64 16384 0,0,0/h,h,h;f16 16384 0,0,0}
mkdir -p "$out"
status=0

job() { # seconds, program, arguments...
  local limit=$1
  shift
  timeout --kill-after=10 "$limit" ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m mpi4py "$@"
}

table() { # name, seconds, problems, arguments...
  local name=$1 limit=$2 problems=$3 old=()
  shift 3
  "$python" -c 'import uncut_old' 2>/dev/null && old=(--old uncut_old)
  IFS=';' read -ra problems <<<"${problems}"
  job $((limit + 40)) tests/perf/table.py "$out/$name.json" "${problems[@]//\//;}" "${old[@]}" --seconds "$limit" ${TRACE:-} \
    ${MACHINE:+--machine "$MACHINE"} ${OLD_MACHINE:+--old-machine "$OLD_MACHINE"} "$@" >"$out/$name.log" 2>"$out/$name.err" || { status=1; tail -n 5 "$out/$name.err"; }
  cat "$out/$name.log"
}

for step in "${@:3}"; do
  began=$SECONDS
  case $step in
    build)
      "$python" -m pip install -q --no-build-isolation --no-deps -e . >"$out/build.log" 2>&1 || { tail -n 20 "$out/build.log"; exit 1; }
      mkdir -p "$site"
      if compgen -G '.gpu/*.whl' >/dev/null; then
        "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .gpu/*.whl >>"$out/build.log" 2>&1
      fi
      if [[ -d .gpu/old ]]; then
        "$python" -m pip install -q --no-build-isolation --no-deps --target "$site" .gpu/old >>"$out/build.log" 2>&1 || tail -n 5 "$out/build.log"
      fi ;;
    calibrate)
      export MACHINE=$out/machine.json
      job 150 -m uncut_mpi.calibrate --backend cuda --output "$MACHINE" >"$out/calibrate.log" 2>&1 || { status=1; tail -n 15 "$out/calibrate.log"; }
      tail -n 4 "$out/calibrate.log" ;;
    tests) tests/perf/device_tests.sh "$ranks" "$out" || status=1 ;;
    whole) table whole "${WHOLE_S:-300}" "$whole" --libraries "${LIBRARIES:-cublas,cublasxt,torch}" ;;
    dealt) table dealt "${DEALT_S:-150}" "$dealt" --libraries "${LIBRARIES:-dtensor,cublasmp,jax}" ;;
    scaling)
      fewer=()
      for ((count = 1; count < ranks; count++)); do fewer+=(--options "devices=$(seq -s, 0 $((count - 1)))"); done
      table scaling "${SCALING_S:-120}" "$scaling" "${fewer[@]}"
      "$python" tests/perf/scaling.py "$out/scaling.json" "$out/scaling.svg" || status=1 ;;
    budgets)
      job 200 tests/perf/out_of_core.py "$out/budgets.json" 150 'f64 32768 h,h,h 4GiB =' 'f64 32768 h,h,h 2GiB' \
        -- scheduler=parsec cubes >"$out/budgets.log" 2>"$out/budgets.err" || { status=1; tail -n 5 "$out/budgets.err"; }
      cat "$out/budgets.log" ;;
    irregular)
      job 440 -m uncut_mpi.bench --dataset uncut-irregular --sample 30 --methods auto,uncut,eta,bandwidth,caching,baseline \
        --time-cap 0.5 --time-limit 400 --output "$out/irregular.jsonl" >"$out/irregular.log" 2>&1 || status=1
      tail -n 60 "$out/irregular.log" ;;
    nodes)
      job 60 -m uncut_mpi.gemm >"$out/main.log" 2>&1 || status=1
      UNCUT_MPI_RANKS_PER_NODE=$(((ranks + 1) / 2)) job 90 -m uncut_mpi.gemm --place rows,cols,rows >"$out/nodes.log" 2>&1 || status=1
      tail -n 12 "$out/main.log" "$out/nodes.log"
      tests/perf/device_tests.sh "$ranks" "$out" -k abort || status=1 ;;
    *) echo "no step $step"; exit 2 ;;
  esac
  echo "== $step: $((SECONDS - began)) s"
done
exit "$status"
