#!/usr/bin/env bash
# Products of dealt matrices beside other libraries and the floor, all taking turns: the most telling problems first, as
# many as the time allows. A later run with the same directory goes on. Prints one table at its end.
# Usage: tests/perf/rivals.sh OUTPUT_DIRECTORY [RANKS [SECONDS]]
# METHODS and WORDS, of the bench command, may be others: METHODS=auto,numpy,floor WORDS='--backend host --scale 0.01'.
# Wheels in .gpu/ are installed beside what is there; .gpu/ is not under version control. They are made so:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#     -d .gpu nvmath-python==0.8.0 nvidia-cublasmp-cu13==0.7.0.125 cuda-core==0.4.0
set -euo pipefail
out=${1:?usage: tests/perf/rivals.sh OUTPUT_DIRECTORY [RANKS [SECONDS]]}
ranks=${2:-2}
limit=${3:-370}
python=$(command -v python3)
mkdir -p "$out"
if compgen -G '.gpu/*.whl' >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .gpu/*.whl
  export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
# Multicast needs rights that a container may lack.
export NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-32G}
read -ra words <<<"${WORDS:---backend cuda}"
mlp=8192x28672x8192,8192x8192x28672
runs=(
  "f64,f16 8192,slabs,orders"
  "bf16 $mlp"
  "f64,f16 8192,blocks,cyclic,uneven"
  "f64,f32,f16 4096,slabs,orders"
  "f32 8192,slabs,orders"
  "f64,f16 4096x4096x65536,24576x24576x2048,slabs"
  "f64,f32,f16 16384,slabs"
  "f64,f16 4096,blocks,cyclic,uneven"
  "f32 4096x4096x65536,24576x24576x2048,slabs"
  "f64,f32,f16 16384,4096x4096x65536,24576x24576x2048,orders,blocks,cyclic,uneven"
)
methods=${METHODS:-auto,cublasmp,dtensor,jax,floor}
failed=0
for run in "${runs[@]}"; do
  left=$((limit - SECONDS))
  # What is left is for the last problem that has begun, too: one takes some 20 s.
  ((left > 25)) || break
  timeout --kill-after=10 "$((left + 20))" ${MPIEXEC:-mpiexec} -n "$ranks" "$python" -m uncut_mpi.bench \
    --dataset layouts --dtypes "${run% *}" --only "${run#* }" --methods "$methods" \
    "${words[@]}" --rounds 5 --warmup 5 --repeat 30 --time-cap 1 --time-limit "$((left - 20))" --output "$out/rivals.jsonl" \
    >"$out/rivals.log" 2>&1 || failed=1
  grep -E '^(error|Traceback)|wrong: ' "$out/rivals.log" || true
done
"$python" - "$out/rivals.jsonl" "$methods" <<'PYTHON'
import json
import sys

from uncut_mpi.command.bench_summary import summary_text

with open(sys.argv[1]) as file:
    rows = [json.loads(line) for line in file]
text = summary_text(rows, sys.argv[2].split(","))
print(text[: text.index("All operations")] + text[text.rindex("\n\n") + 2 :])
PYTHON
exit "$failed"
