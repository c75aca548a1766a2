#!/usr/bin/env bash
# Runs the tests that need a real SGLang server (tests/sglang), in the environments .venv and .venv-sglang.
#
#   bash tools/test_sglang.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
prepare_environment test
bash launch/install_sglang.sh
exec "$RLJAX_BIN/python" -m pytest -m sglang tests/sglang "$@"
