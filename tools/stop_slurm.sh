#!/usr/bin/env bash
# Ends the Slurm of tools/start_slurm.sh with its jobs and leaves no process of it.
#
#   bash tools/stop_slurm.sh DIR
#
# Status 1: something was still there after a minute, and was killed.
set -euo pipefail

(($# == 1)) || { echo "usage: bash tools/stop_slurm.sh DIR" >&2; exit 2; }
dir="$(cd "$1" && pwd)"
export SLURM_CONF="$dir/slurm.conf"

# while_true COMMAND...: waits until it fails, for 20 seconds; status 1 when it does not.
while_true() {
  local tries
  for ((tries = 0; tries < 100; tries++)); do
    "$@" || return 0
    sleep 0.2
  done
  return 1
}
jobs_are_there() { [[ -n "$(timeout 5 squeue --noheader 2>/dev/null)" ]]; }
# A daemon that has ended may stay as a zombie where nobody waits for it.
lives() { [[ -e "/proc/$1/stat" && "$(cut -d ' ' -f 3 "/proc/$1/stat" 2>/dev/null)" != [ZX] ]]; }

mapfile -t daemons < <(cat "$dir"/run/{slurmctld,slurmd.*,munged}.pid 2>/dev/null)
timeout 10 scancel --state=PENDING --user="$(id -un)" 2>/dev/null || true
timeout 10 scancel --user="$(id -un)" 2>/dev/null || true
while_true jobs_are_there || timeout 10 scancel --full --signal=KILL --user="$(id -un)" 2>/dev/null || true
timeout 10 scontrol shutdown 2>/dev/null || true
status=0
for pid in ${daemons[@]+"${daemons[@]}"}; do
  [[ "$pid" != "$(cat "$dir/run/munged.pid" 2>/dev/null)" ]] || kill "$pid" 2>/dev/null || true
  if ! while_true lives "$pid"; then
    echo "stop_slurm: process $pid did not end, killed" >&2
    kill -KILL "$pid" 2>/dev/null || true
    status=1
  fi
done
rm -f "$dir/slurm.conf"
exit "$status"
