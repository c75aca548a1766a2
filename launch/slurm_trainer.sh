#!/usr/bin/env bash
# A task of the trainers' step of launch/slurm.sbatch: runs COMMAND, and task 0 writes its exit status into FILE.
#
#   bash launch/slurm_trainer.sh FILE COMMAND...
#
# SIGTERM, which Slurm sends to both, is COMMAND's affair.
set -uo pipefail

file="$1"
shift
trap : TERM
"$@"
status=$?
[[ "$SLURM_PROCID" != 0 ]] || echo "$status" >"$file"
# Once a task has failed, srun sends the others SIGTERM. Process 0, whose status counts, first has time to end by itself.
[[ "$SLURM_PROCID" == 0 || "$status" == 0 ]] || sleep 15
exit "$status"
