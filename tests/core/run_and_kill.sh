#!/usr/bin/env bash
# The six commands of a run, each killed with SIGKILL once it has finished some of its shards, and then run to its end.
# Usage: run_and_kill.sh CONFIG RUN
set -euo pipefail
config=$1 run=$2
mkdir -p "$run"

shards() { find "$run" -name '*.json' ! -name manifest.json | wc -l; }

for command in collect futures score rollouts train evaluate; do
  before=$(shards)
  futurebridge "$command" --config "$config" --run-dir "$run" > /dev/null &
  started=$!
  while [ "$(shards)" -le "$before" ]; do
    kill -0 "$started" || { echo "$command: ended before it was killed" >&2; exit 1; }
    sleep 0.01
  done
  kill -KILL "$started"
  wait "$started" 2> /dev/null || true
  echo "$command: killed at $(($(shards) - before)) shards"
  futurebridge "$command" --config "$config" --run-dir "$run"
done
