#!/usr/bin/env bash
# Runs and real vLLM servers that are killed in the midst, faults planted one after the other, random malformed inputs, and
# policies of other families through a real vLLM server (marker harness). About six minutes on two cores.
#
#   bash tools/test_harnesses.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
bash launch/install_vllm.sh
exec "$RLJAX_BIN/python" -m pytest --verbose --durations=5 -m harness tests/integration tests/rollout tests/tools "$@"
