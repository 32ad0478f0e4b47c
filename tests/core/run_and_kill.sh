#!/usr/bin/env bash
# The five commands of a run, each killed with SIGKILL somewhere on its way and then run to its end.
# Usage: run_and_kill.sh CONFIG RUN SECONDS...   (after how many seconds each command is killed)
set -euo pipefail
config=$1 run=$2
shift 2
for command in collect futures score train evaluate; do
  futurebridge "$command" --config "$config" --run-dir "$run" > /dev/null &
  started=$!
  sleep "$1"
  shift
  kill -KILL "$started" 2> /dev/null || echo "$command: had ended before it was killed"
  wait "$started" 2> /dev/null || true
  futurebridge "$command" --config "$config" --run-dir "$run"
done
