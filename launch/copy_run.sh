#!/usr/bin/env bash
# Keeps a copy of a run directory in an object store, and brings it back to a disk without it.
#
#   rljax train CONFIG.yaml --checkpoint.after-save 'bash launch/copy_run.sh save s3://BUCKET/PREFIX'
#   bash launch/copy_run.sh load s3://BUCKET/PREFIX RUN      before a start; does nothing where RUN has a checkpoint
#
# s3:// needs `aws`, gs:// needs `gcloud`. Each run needs a PREFIX of its own. With RLJAX_RUN_COPY=s3://BUCKET/PREFIX
# launch/single_node.sh and launch/slurm.sbatch do the second line.
set -euo pipefail

[[ $# == 3 && "$1" =~ ^(save|load)$ && "$2" =~ ^(s3|gs):// ]] || {
  echo "copy_run: expected save URL RUN/checkpoints/STEP, or load URL RUN, with s3:// or gs://, got '$*'" >&2
  exit 2
}
url="${2%/}"

# one FROM TO, and all FROM TO OPTIONS...: copy a file, and what differs in a folder
if [[ "$url" == s3://* ]]; then
  one() { aws s3 cp --only-show-errors "$1" "$2"; }
  all() { aws s3 sync --only-show-errors "$1" "$2" --exclude owner.json --exclude '*-tmp*' "${@:3}"; }
  delete=--delete
else
  one() { gcloud storage cp --quiet "$1" "$2"; }
  all() { gcloud storage rsync --quiet --recursive "$1" "$2" --exclude='owner\.json$|.*-tmp' "${@:3}"; }
  delete=--delete-unmatched-destination-objects
fi

if [[ "$1" == save ]]; then
  run="${3%/checkpoints/*}"
  # The rows go first: a checkpoint without its rows is of no use, and rows without their checkpoint are run again.
  one "$run/metrics.jsonl" "$url/metrics.jsonl"
  all "$run" "$url" "$delete"
elif [[ -e "$3/.loading" ]] || ! compgen -G "$3/checkpoints/*" >/dev/null; then
  # An empty prefix of gs:// is an error of rsync, and no reason not to start.
  if [[ "$url" == gs://* ]] && ! said="$(gcloud storage ls "$url/" 2>&1)"; then
    [[ "$said" != *"matched no objects"* ]] || exit 0
    echo "$said" >&2
    exit 1
  fi
  mkdir -p "$3"
  : >"$3/.loading" # what broke off is loaded again
  all "$url" "$3"
  rm "$3/.loading"
fi
