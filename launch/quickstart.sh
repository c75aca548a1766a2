#!/usr/bin/env bash
# The main job from a bare machine: environment, toy base model, training, summary, report.png.
#
#   bash launch/quickstart.sh [--vllm] [--] [options of rljax.train]
#   bash launch/quickstart.sh -- --run.seed 3 --run.steps 60
#
# About 5 minutes on 2 cores after the downloads. Run again, it reuses the environment and the base model, and goes on
# with a run that was stopped (give another --run.dir, or remove runs/quickstart, to start afresh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac
[ "${1:-}" != "--" ] || shift

source launch/environment.sh
prepare_environment train
base=runs/toy-base
if [ ! -e "$base/model.safetensors" ]; then
  echo "== fitting the toy base model into $base (about 2 minutes)"
  "$RLJAX_BIN/python" tools/make_toy_base.py "$base"
fi
echo "== training"
exec "$RLJAX_BIN/python" -m rljax.train configs/quickstart.yaml "$@"
