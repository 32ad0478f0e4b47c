#!/usr/bin/env bash
# One visit to a machine with a GPU, which needs no network:
#   PARTS=build,tests,head,attention,neighbours,scorer,decode,training,counters,tune OUT=folder RESULTS=folder LIMIT=570 \
#     PYTHON=python3 benchmarks/gpu_check.sh
# Wheels in build/wheels (`make gpu-wheels`) are used for this visit alone; nothing is installed for good.
# Every part, and of the tests every file, has a time of its own, so that one that fails or hangs leaves the others
# theirs. RESULTS gets the result files, OUT log.txt; a table of what was measured, and one of what ran, come last.
set -uo pipefail
cd "$(dirname "$0")/.."

KNOWN=build,tests,head,attention,neighbours,scorer,decode,training,counters,tune
PARTS=${PARTS:-build,tests,head,attention,neighbours,scorer,decode}
OUT=${OUT:-build/gpu_check}
RESULTS=${RESULTS:-$OUT} LIMIT=${LIMIT:-570} PYTHON=${PYTHON:-python3}
export TRITON_INTERPRET=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
for name in ${PARTS//,/ }; do
  if [[ ",$KNOWN," != *",$name,"* ]]; then
    echo "PARTS: expected some of $KNOWN, got $name; separate them by commas" >&2
    exit 2
  fi
done
mkdir -p "$OUT" "$RESULTS"
: > "$OUT/log.txt"
summary=()
if compgen -G "build/wheels/*.whl" > /dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" build/wheels/*.whl &&
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} || summary+=("wheels: failed, none is used")
fi

left() { echo $((LIMIT - SECONDS)); }

# run NAME LIMIT COMMAND...: LIMIT seconds of a short visit, more of a longer one. The command's output goes to the log,
# its end to the terminal where it failed.
run() {
  local name=$1 limit=$(($2 * (LIMIT > 570 ? LIMIT : 570) / 570)) began=$SECONDS code
  shift 2
  if (($(left) < 15)); then
    summary+=("$name: not begun, $LIMIT s are over")
    return
  fi
  limit=$((limit < $(left) - 10 ? limit : $(left) - 10))
  echo "=== $name: $*" >> "$OUT/log.txt"
  timeout --kill-after=5 "$limit" "$@" > "$OUT/part.txt" 2>&1
  code=$?
  cat "$OUT/part.txt" >> "$OUT/log.txt"
  if ((code)); then
    echo "--- $name failed ($code), its end:"
    tail -n 25 "$OUT/part.txt" | cut -c1-300
  fi
  local ended="ok"
  ((code == 0)) || ended="failed, $code"
  ((code != 124 && code != 137)) || ended="ended at its $limit s"
  summary+=("$name: $ended, $((SECONDS - began)) s, $(tail -n 1 "$OUT/part.txt" | cut -c1-120)")
}

bench() {
  run "$1" "$2" "$PYTHON" -m pytest "benchmarks/bench_$3.py" --benchmark-only --benchmark-disable-gc -p no:xdist \
    -p no:cacheprovider -s --write-results "$RESULTS"
}

part() {
  case $1 in
    build)
      if command -v nvcc > /dev/null; then
        FB_BUILD_CUDA=force FB_BUILD_CPU=auto run build 150 "$PYTHON" setup.py -q build_ext --inplace
      else
        summary+=("build: no nvcc here")
      fi
      ;;
    tests)
      for file in tests/gpu/test_*_gpu.py; do
        run "$(basename "$file" _gpu.py)" 120 "$PYTHON" -m pytest -q -x -p no:xdist -p no:cacheprovider "$file"
      done
      run contract 150 "$PYTHON" -m pytest -q --maxfail=5 -p no:cacheprovider -n 8 tests/kernels/test_contract.py \
        -k "triton or cuda"
      ;;
    head) bench head 120 linear_logprob ;;
    attention) bench attention 120 branch_attention ;;
    neighbours) bench neighbours 90 neighbours ;;
    scorer) bench scorer 240 scorer ;;
    decode) bench decode 240 decode ;;
    training) bench training 180 training ;;
    counters) run counters 240 "$PYTHON" -m benchmarks.counters ;;
    tune) run tune 480 "$PYTHON" -m benchmarks.tune --seconds 40 --output "$OUT/tuned" ;;
  esac
}

for name in ${PARTS//,/ }; do part "$name"; done
rm -f "$OUT/part.txt"
"$PYTHON" -m benchmarks.summary "$RESULTS" 2>&1 | cut -c1-200
printf '%s\n' "${summary[@]}"
[[ "${summary[*]}" != *failed* && "${summary[*]}" != *ended\ at* && "${summary[*]}" != *not\ begun* ]]
