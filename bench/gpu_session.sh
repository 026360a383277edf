#!/usr/bin/env bash
# One visit to a GPU machine, from the repository root: tests, benchmarks, counters, sanitizers.
#
#   OUT=DIR bench/gpu_session.sh [SECTION...]     default: those in DEFAULT
#   bench/gpu_session.sh --list                   the sections and their limits in seconds
#
# Every section has a limit of its own, and all of them together BUDGET_S (default 560); a section
# that fails or runs out of time does not stop the next. DIR gets two files, up to date after every
# section: summary.txt and session.tar.gz (results/ to commit, logs/, ncu's report).
#
# PYTHON      the interpreter (default python3)
# BUILD_ENV   for the section build, e.g. "NVFP4_EXTENSIONS=_cublaslt NVFP4_CUDA_ARCHS=90a"
# BENCH_ARGS  for the benchmarks, e.g. "--only quantize --no-compile"
# LIMIT_S     a limit in seconds for every section named, in place of its own
# PINS        the pin file that the section gate takes up the ladder
# BENCH_COMMIT  what the results name as commit where the tree has no git
set -u
cd "$(dirname "$0")/.." || exit 2
PYTHON="${PYTHON:-python3}"
BUDGET_S="${BUDGET_S:-560}"

declare -A LIMIT=(
  [build]=300 [env]=30 [test]=180 [matrix]=60 [ladder]=60 [gemm]=90 [grouped]=45 [producer]=150
  [overhead]=45
  [ncu]=120 [memcheck]=90 [racecheck]=90 [initcheck]=90 [twogpu]=60
  [sweeps]=420 [l2]=90 [gate]=330
)
DEFAULT=(env test matrix ladder gemm grouped producer overhead ncu memcheck racecheck initcheck)

if [ "${1:-}" = --list ]; then
  for name in build "${DEFAULT[@]}" twogpu sweeps l2 gate; do
    echo "$name ${LIMIT[$name]}"
  done
  exit 0
fi
for name in "$@"; do
  [ -n "${LIMIT[$name]:-}" ] || { echo "no section '$name': see $0 --list"; exit 2; }
done
: "${OUT:?set OUT to the folder that gets summary.txt and session.tar.gz}"
mkdir -p "$OUT" && OUT="$(cd "$OUT" && pwd)" || exit 2

WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
RESULTS="$WORK/session/results" LOGS="$WORK/session/logs"
mkdir -p "$RESULTS" "$LOGS"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR="$WORK/inductor" TRITON_CACHE_DIR="$WORK/triton"

# ---------------------------------------------------------------------------------- the sections

build() { env ${BUILD_ENV:-NVFP4_CUDA_ARCHS=90a} "$PYTHON" setup.py -q build_ext --inplace; }

env_() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv
  nvcc --version | grep release
  ncu --version | tail -1
  compute-sanitizer --version | head -1
  "$PYTHON" - <<'PROGRAM'
import torch
from nvfp4_linear import machine
print(machine.versions(), "CUDA kernels:", machine.has_cuda_kernels())
print(torch.cuda.get_device_properties(0))
assert machine.has_cuda_kernels(), "the build has no CUDA kernels: run the section build"
PROGRAM
}

test_() { "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider; }

matrix() { mkdir -p "$RESULTS/matrix" && "$PYTHON" -m tests.matrix --json "$RESULTS/matrix/h200.json"; }

bench() { "$PYTHON" -m "bench.$1" --device cuda --out "$RESULTS" ${BENCH_ARGS:-}; }
ladder() { "$PYTHON" -m bench.ladder_check --device cuda --out "$RESULTS"; }
gemm() { bench gemm && draw; }
grouped() { bench grouped; }
producer() { bench producer; }
overhead() { bench overhead; }
draw() { "$PYTHON" -m bench.plot "$RESULTS/gemm.json" || true; }

ncu_() { "$PYTHON" -m bench.profile ncu --out "$RESULTS" --raw "$WORK/session/ncu"; }

# cuBLASLt's own kernels are left out.
sanitizer() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
    --report-api-errors no --print-limit 20 --kernel-name-exclude 'regex=nvjet|xmma|cutlass|cublas' \
    "$PYTHON" -m bench.sanitize "${@:2}"
}
# The part that goes through cuBLASLt again, with a plain kernel in its stead: racecheck stops with
# an internal error in cuBLASLt's own, and initcheck doesn't see what they write.
without_cublaslt() {
  local double
  double="$("$PYTHON" -c 'from tests.fake_cublaslt import build_for_gpu; print(build_for_gpu())')" &&
    NVFP4_CUBLASLT_LIBRARY="$double" sanitizer "$1" --only decoded
}
memcheck() { sanitizer memcheck && without_cublaslt memcheck; }
# A process a part: the tool itself can stop with an internal error.
racecheck() {
  local part failed=0
  for part in producers gemm mid long grouped; do sanitizer racecheck --only "$part" || failed=1; done
  without_cublaslt racecheck || failed=1
  return "$failed"
}
initcheck() { sanitizer initcheck --only producers gemm mid long grouped && without_cublaslt initcheck; }

# Two GPUs of one host: the tests that need them, and every kernel on the second one.
twogpu() {
  "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider tests/test_graphs_streams_devices.py &&
    CUDA_VISIBLE_DEVICES=1 "$PYTHON" -m bench.sanitize
}

# The algorithm lab: goes on from the committed sweeps, and measures their finals again.
sweeps() {
  mkdir -p "$RESULTS/sweeps" && cp bench/results/sweeps/* "$RESULTS/sweeps" &&
    "$PYTHON" -m bench.sweeps --finals --rounds 8 --seconds 390 --out "$RESULTS/sweeps" \
      --work "$WORK/sweeps"
}
l2() { "$PYTHON" -m bench.l2 ncu --out "$RESULTS/l2" --raw "$WORK/session/l2"; }
gate() {
  mkdir -p "$RESULTS/gate"
  "$PYTHON" -m nvfp4_linear gate --pins "${PINS:-bench/results/sweeps/h200.pins}" --canonical \
    --keep-going --out "$RESULTS/gate/h200.json"
}

# ------------------------------------------------------------------------------------ running them

pack() {
  tar -C "$WORK" -czf "$OUT/.session.part" session && mv "$OUT/.session.part" "$OUT/session.tar.gz"
  cp "$WORK/summary" "$OUT/summary.txt"
}

run_section() {
  local name="$1" limit="${LIMIT_S:-${LIMIT[$1]}}" left=$((BUDGET_S - SECONDS)) start=$SECONDS code
  local log="$LOGS/$name.log" function="$name"
  case "$name" in env | test | ncu) function="${name}_" ;; esac
  [ "$limit" -le "$left" ] || limit="$left"
  if [ "$limit" -lt 15 ]; then
    echo "$name | skipped | 0 s | the budget of $BUDGET_S s is spent" >>"$WORK/summary"
    failed=1
    return
  fi
  echo "== $name (at most $limit s)"
  # timeout runs a program, not a function: a shell that has them all and calls one.
  SESSION_FUNCTION="$function" timeout -k 10 "$limit" bash -c "$FUNCTIONS" >"$log" 2>&1
  code=$?
  if [ "$code" -ne 0 ]; then
    failed=1
    tail -n 15 "$log"
  fi
  local result="ok"
  [ "$code" -eq 0 ] || result="failed ($code)"
  [ "$code" -ne 124 ] || result="timed out"
  echo "$name | $result | $((SECONDS - start)) s | $(tail -n 1 "$log" | cut -c -150)" >>"$WORK/summary"
  pack
}

FUNCTIONS="$(declare -f build env_ test_ matrix bench ladder gemm grouped producer overhead draw ncu_ sanitizer \
  without_cublaslt memcheck racecheck initcheck twogpu sweeps l2 gate)
\"\$SESSION_FUNCTION\""
export PYTHON RESULTS LOGS WORK
failed=0
[ $# -gt 0 ] || set -- "${DEFAULT[@]}"
: >"$WORK/summary"
for name in "$@"; do run_section "$name"; done
pack
echo
"$PYTHON" -m bench.report "$RESULTS"/*.json 2>/dev/null
echo "section | result | time | last line"
cat "$WORK/summary"
exit "$failed"
