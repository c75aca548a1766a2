#!/usr/bin/env bash
# Runs the tests that need a real server of vllm-tpu, in the environments .venv and .venv-vllm-tpu. They need no TPU: JAX
# computes on the CPU, with what tests/support/tpu_stand_in.py replaces.
#
#   bash tools/test_tpu_server.sh [pytest arguments]
#
# RLJAX_VLLM_TPU_VENV: the environment of the server. Its installation takes 10 GB and five minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
prepare_environment test
export RLJAX_VLLM_TPU_VENV="${RLJAX_VLLM_TPU_VENV:-$PWD/.venv-vllm-tpu}"
bash launch/install_vllm.sh --tpu "$RLJAX_VLLM_TPU_VENV"
exec "$RLJAX_BIN/python" -m pytest -m vllm_tpu tests/integration/test_vllm_tpu.py "$@"
