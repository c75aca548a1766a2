#!/usr/bin/env bash
# Makes a virtual environment, installs rljax with its test extra, checks style, types and the site, and runs the tests.
#
#   bash tools/test.sh [pytest arguments]
#
# RLJAX_VENV: the environment's directory (default .venv). RLJAX_PYTHON: the interpreter (default python3.11 or newer).
# RLJAX_SKIP_VLLM=1 leaves the vLLM server's environment and its tests out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
if [ "${RLJAX_SKIP_VLLM:-0}" != 1 ]; then
  bash launch/install_vllm.sh || echo "warning: no vLLM here; its tests will be skipped" >&2
fi
echo "== style and types"
"$RLJAX_BIN/ruff" check .
"$RLJAX_BIN/ruff" format --check .
"$RLJAX_BIN/mypy"
echo "== the site of docs/"
NO_MKDOCS_2_WARNING=1 "$RLJAX_BIN/mkdocs" build --strict --quiet
echo "== tests"
exec "$RLJAX_BIN/python" -m pytest --verbose --durations=15 "$@"
