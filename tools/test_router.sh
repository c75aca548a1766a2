#!/usr/bin/env bash
# Rollouts through a real vllm-router, over stand-ins and over two real vLLM servers of which one is killed (marker
# router). About four minutes.
#
#   bash tools/test_router.sh [pytest arguments]
#
# The router has an environment of its own, which is made once, in $RLJAX_ROUTER_VENV (default .venv-router).
# RLJAX_PYTHON: the interpreter to make it with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

venv="${RLJAX_ROUTER_VENV:-$PWD/.venv-router}"
own_environment "$venv" 'vllm-router>=0.1.17,<0.2'
prepare_environment test
bash launch/install_vllm.sh
export RLJAX_ROUTER="$venv/bin/vllm-router"
exec "$RLJAX_BIN/python" -m pytest --verbose -p no:xdist --durations=5 -m router \
  tests/rollout/test_router.py tests/integration/test_vllm_router.py "$@"
