#!/usr/bin/env bash
# Plays environments of verifiers with examples/verifiers_rollouts on a real vLLM (marker verifiers). About five minutes.
#
#   bash tools/test_verifiers.sh [pytest arguments]
#
# The package has an environment of its own, which is made once, in $RLJAX_VERIFIERS_VENV (default .venv-verifiers), with
# the interpreter of the tests. RLJAX_VERIFIERS_PYTHON: a Python that has the package already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
if [ -z "${RLJAX_VERIFIERS_PYTHON:-}" ]; then
  venv="${RLJAX_VERIFIERS_VENV:-$PWD/.venv-verifiers}"
  RLJAX_PYTHON="$RLJAX_BIN/python" own_environment "$venv" '.[verifiers]'
  export RLJAX_VERIFIERS_PYTHON="$venv/bin/python"
fi
exec "$RLJAX_BIN/python" -m pytest --verbose -p no:xdist --durations=5 -m verifiers tests/examples/verifiers "$@"
