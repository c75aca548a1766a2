#!/usr/bin/env bash
# Whole runs with real experiment trackers: W&B offline, trackio and the example for MLflow in stores on this machine,
# one run killed (marker trackers). About four minutes.
#
#   bash tools/test_trackers.sh [pytest arguments]
#
# The environment, with the trackers' packages, is made once, in $RLJAX_TRACKERS_VENV (default .venv-trackers).
# RLJAX_PYTHON: the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

venv="${RLJAX_TRACKERS_VENV:-.venv-trackers}"
mlflow=('mlflow-skinny>=3.17,<4' 'sqlalchemy>=2.0,<3' 'alembic>=1.13,<2')
own_environment "$venv" -e '.[train,wandb,trackio]' "${mlflow[@]}" 'pytest>=8.4,<9' 'pytest-timeout>=2.3,<3'
PYTHONPATH=. exec "$venv/bin/python" -m pytest -p no:cacheprovider -m trackers --durations=5 \
  tests/record/test_tracker_kinds.py "$@"
