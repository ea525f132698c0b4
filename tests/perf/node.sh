#!/usr/bin/env bash
# Measures and verifies square products on a node with GPUs: f64, all on GPU 0 and all on host, and the
# ablation at 8192; then a few of the papers' problems beside other libraries, where those are installed.
# Usage: tests/perf/node.sh OUTPUT_DIRECTORY [RANKS [SIZE...]]
set -euo pipefail
out=${1:?usage: tests/perf/node.sh OUTPUT_DIRECTORY [RANKS [SIZE...]]}
ranks=${2:-4}
sizes=("${@:3}")
[ ${#sizes[@]} -gt 0 ] || sizes=(4096 8192 16384)
python=$(command -v python3)
mkdir -p "$out"

product() {
  timeout --kill-after=10 120 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m uncut_mpi.gemm --backend cuda "$@"
}

failed=0
for n in "${sizes[@]}"; do
  for place in 0,0,0 h,h,h; do
    name=f64_${n}_${place//,/}
    product -m "$n" --place "$place" --warmup 5 --repeat 10 --json "$out/$name.json" >"$out/$name.log" 2>&1 || failed=1
    tail -n 4 "$out/$name.log"
  done
done
for place in 0,0,0 h,h,h; do
  name=ablation_8192_${place//,/}
  product -m 8192 --place "$place" --ablation --warmup 3 --repeat 10 --json "$out/$name.json" >"$out/$name.log" 2>&1 || failed=1
  tail -n 8 "$out/$name.log"
done
timeout --kill-after=10 300 ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m uncut_mpi.bench --backend cuda --dataset uncut-irregular \
  --sample 6 --scale 0.5 --time-cap 0.5 --methods auto,tuned,uncut,one,cyclic,bands,cublas,cublasxt,jax,torch \
  --output "$out/others.jsonl" --plot "$out/others.png" >"$out/others.log" 2>&1 || failed=1
tail -n 60 "$out/others.log"
exit "$failed"
