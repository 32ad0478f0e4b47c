#!/usr/bin/env bash
# One visit of VISIT=10, 30 or 60 minutes to a machine with a GPU, which needs no network (benchmarks/GPU.md):
#   VISIT=30 PYTHON=python3 benchmarks/gpu_check.sh
# PARTS=build,check,head chooses what runs, LIMIT=1700 the total seconds, RESULTS=folder where <device>/<bench>.json go,
# OUT=folder where the log goes. Wheels in build/wheels (`make gpu-wheels`) are used for this visit only; nothing is
# installed. Compilation comes first, many at a time; then the other parts, the most useful first. Each has its own time
# limit, so one that fails or hangs takes no time from the others. Results are written after every case; what ran and the
# targets are printed last.
set -uo pipefail
cd "$(dirname "$0")/.."

VISIT=${VISIT:-10}
BY_WORTH=build,check,head,attention,decode,scorer,neighbours,kernels
case $VISIT in
  10) HALVES=2 ;;
  30) HALVES=3 BY_WORTH+=,tests,end_to_end,training,compiled ;;
  60) HALVES=4 BY_WORTH+=,tests,end_to_end,training,compiled,counters,tune ;;
  *) echo "VISIT: expected 10, 30 or 60 minutes, got $VISIT; choose the shorter one" >&2 && exit 2 ;;
esac
KNOWN=build,check,head,attention,decode,scorer,neighbours,kernels,tests,end_to_end,training,compiled,counters,tune
PARTS=${PARTS:-$BY_WORTH}
OUT=${OUT:-build/gpu_check}
RESULTS=${RESULTS:-benchmarks/results} LIMIT=${LIMIT:-$((VISIT * 60 - 30))} PYTHON=${PYTHON:-python3}
export TRITON_INTERPRET=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
export FB_KERNELS_DEVICES=$OUT/devices  # kernels that the check switches off are off for this visit only
for name in ${PARTS//,/ }; do
  if [[ ",$KNOWN," != *",$name,"* ]]; then
    echo "PARTS: expected some of $KNOWN, got $name; separate them by commas" >&2
    exit 2
  fi
done
rm -rf "$OUT/parts" "$OUT/devices"
mkdir -p "$OUT/parts" "$RESULTS"
: > "$OUT/log.txt"
CORES=$(nproc)
FILES=$((CORES > 8 ? CORES / 4 : 2)) # test files at a time, each with its own processes
names=() shown=0 wheels=
if compgen -G "build/wheels/*.whl" > /dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" build/wheels/*.whl &&
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} || wheels="wheels: failed, none is used"
fi

left() { echo $((LIMIT - SECONDS)); }

# perform NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds in a visit of 10 minutes, 1.5 times that in 30 minutes
# and twice that in 60: the limits of a visit's parts add up to no more than the visit. Its output, and a line on how it ended, go to files named after it.
perform() {
  local name=$1 limit=$(($2 * HALVES / 2)) began=$SECONDS code ended="ok"
  local output=$OUT/parts/$name.txt line=$OUT/parts/$name.line
  shift 2
  echo "=== $name: at most $limit s: $*" > "$output"
  if (($(left) < 15)); then
    echo "$name: not begun, $LIMIT s are over" > "$line"
    return
  fi
  limit=$((limit < $(left) - 10 ? limit : $(left) - 10))
  timeout --signal=INT --kill-after=10 "$limit" env --default-signal=INT "$@" >> "$output" 2>&1
  code=$?
  ((code == 0)) || ended="failed, $code"
  ((code != 124 && code != 137)) || ended="ended at its $limit s"
  echo "$name: $ended, $((SECONDS - began)) s, $(tail -n 1 "$output" | cut -c1-120)" > "$line"
}

# After parts have run: appends their output to the log, and prints the end of the output of those that failed.
collect() {
  local name
  for name in "${names[@]:shown}"; do
    cat "$OUT/parts/$name.txt" >> "$OUT/log.txt"
    if ! grep -q "^$name: ok\|: not begun" "$OUT/parts/$name.line"; then
      echo "--- $(cut -d, -f1,2 "$OUT/parts/$name.line"), its end:"
      tail -n 25 "$OUT/parts/$name.txt" | cut -c1-300
    fi
  done
  shown=${#names[@]}
}

run() {
  names+=("$1")
  perform "$@"
  collect
}

# beside JOBS NAME LIMIT COMMAND...: runs in the background, at most JOBS at a time; call `wait` and `collect` afterwards.
beside() {
  local jobs=$1
  shift
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
  names+=("$1")
  perform "$@" &
}

bench() { # NAME LIMIT FILE PEERS MORE...
  local name=$1 limit=$2 file=$3 peers=$4
  shift 4
  run "$name" "$limit" "$PYTHON" -m pytest "benchmarks/bench_$file.py" --benchmark-only --benchmark-disable-gc \
    -p no:xdist -p no:cacheprovider -s --peers "$peers" "$@" --write-results "$RESULTS"
}

part() {
  local file op arch
  case $1 in
    build)
      arch=$("$PYTHON" -c "import torch; print('sm_%d%d' % torch.cuda.get_device_capability())")
      beside "$CORES" build 100 env FB_BUILD_CUDA=force FB_BUILD_CPU=auto "$PYTHON" -c "import setup; setup.build_in_place()"
      for op in $("$PYTHON" -m benchmarks.aot --list); do
        beside "$CORES" "compile_$op" 100 "$PYTHON" -m benchmarks.aot "$op" --arch "$arch" --quick
      done
      wait
      collect
      ;;
    check)
      run check 80 "$PYTHON" -m fb_kernels.env --check
      tail -n +2 "$OUT/parts/check.txt" | cut -c1-200
      ;;
    head) bench head 70 linear_logprob eager ;;
    attention) bench attention 85 branch_attention eager ;;
    decode) bench decode 80 decode eager ;;
    end_to_end) bench end_to_end 120 end_to_end eager ;;
    scorer) bench scorer 75 scorer eager ;;
    neighbours) bench neighbours 40 neighbours eager ;;
    kernels)
      bench head_kernels 20 linear_logprob eager --kernels
      bench attention_kernels 20 branch_attention eager --kernels
      ;;
    tests)
      for file in tests/gpu/test_*_gpu.py; do
        beside "$FILES" "$(basename "$file" _gpu.py)" 180 "$PYTHON" -m pytest -q --maxfail=20 --tb=short \
          -p no:cacheprovider -n 4 --dist worksteal "$file"
      done
      beside "$FILES" contract 180 "$PYTHON" -m pytest -q --maxfail=20 --tb=short -p no:cacheprovider -n 8 \
        tests/kernels/test_contract.py -k "triton or cuda"
      wait
      collect
      ;;
    training) bench training 90 training eager ;;
    compiled)
      bench head_compiled 50 linear_logprob compiled
      bench attention_compiled 50 branch_attention compiled
      bench neighbours_compiled 40 neighbours compiled
      bench decode_compiled 80 decode compiled -k decode_step
      ;;
    counters) run counters 240 "$PYTHON" -m benchmarks.counters ;;
    tune) run tune 360 "$PYTHON" -m benchmarks.tune --seconds 40 --output "$OUT/tuned" ;;
  esac
}

for name in ${PARTS//,/ }; do part "$name"; done
summary=$(echo "$wheels"; for name in "${names[@]}"; do cat "$OUT/parts/$name.line"; done)
echo "$summary"
"$PYTHON" -m benchmarks.summary "$RESULTS" 2>&1 | cut -c1-240
[[ $summary != *failed* && $summary != *"ended at"* && $summary != *"not begun"* ]]
