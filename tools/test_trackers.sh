#!/usr/bin/env bash
# Whole runs with real experiment trackers: W&B offline, trackio and MLflow in stores on this machine, one run killed
# (marker trackers). About four minutes.
#
#   bash tools/test_trackers.sh [pytest arguments]
#
# The environment, with the trackers' extras, is made once, in $RLJAX_TRACKERS_VENV (default .venv-trackers).
# RLJAX_PYTHON: the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

venv="${RLJAX_TRACKERS_VENV:-.venv-trackers}"
own_environment "$venv" -e '.[train,wandb,trackio,mlflow]' 'pytest>=8.4,<9' 'pytest-timeout>=2.3,<3'
PYTHONPATH=. exec "$venv/bin/python" -m pytest -p no:cacheprovider -m trackers --durations=5 \
  tests/record/test_tracker_kinds.py "$@"
