#!/usr/bin/env bash
# A task of the trainers' step of launch/slurm.sbatch: runs COMMAND, and task 0 writes its exit status into FILE.
#
#   bash launch/slurm_trainer.sh FILE COMMAND...
#
# SIGTERM, which Slurm sends to both, is COMMAND's affair.
set -uo pipefail

file="$1" asked=false
shift
trap 'asked=true' TERM
"$@"
status=$?
[[ "$SLURM_PROCID" != 0 ]] || echo "$status" >"$file"
# Once a task has failed, srun sends the others SIGTERM. Process 0, whose status counts, first has time to notice
# (30 s) and end by itself. A task that was sent SIGTERM is soon gone: of one that takes longer than
# MessageTimeout (10 s) Slurm repeats the message after a minute, and ends what the job then runs after its requeue.
if [[ "$SLURM_PROCID" != 0 && "$status" != 0 ]]; then
  if $asked; then sleep 3; else sleep 45; fi
fi
exit "$status"
