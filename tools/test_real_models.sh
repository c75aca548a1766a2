#!/usr/bin/env bash
# Runs the tests with real language models (tests/real_models), which it makes in .cache/models. It needs the network,
# 3 GB of disk, 12 GB of memory and about half an hour.
#
#   bash tools/test_real_models.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
prepare_environment test
export RLJAX_REAL_MODELS="${RLJAX_REAL_MODELS:-$PWD/.cache/models}"
bash tools/real_models.sh "$RLJAX_REAL_MODELS"
exec "$RLJAX_BIN/python" -m pytest -m real_models tests/real_models "$@"
