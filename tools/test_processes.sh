#!/usr/bin/env bash
# Runs of 1, 2 and 4 real processes: every engine and form of update, resumes, planted faults, and a vLLM server of two
# workers. About an hour on two cores.
#
#   bash tools/test_processes.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
bash launch/install_vllm.sh
"$RLJAX_BIN/python" -m pytest --verbose -rP --durations=10 -m processes tests/processes tests/integration "$@"
