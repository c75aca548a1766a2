#!/usr/bin/env bash
# Runs and real vLLM servers that are killed in the midst, faults planted one after the other, policies of other
# families through a real vLLM server, and further forms of what the suite tries in some: meshes, dtypes, engines,
# damages (marker harness). About an hour on two cores.
#
#   bash tools/test_harnesses.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
bash launch/install_vllm.sh
mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.harness' tests)
status=0
if [ $# -eq 0 ]; then
  "$RLJAX_BIN/python" -m pytest --verbose --durations=5 -m "mesh and harness" "${files[@]}" || status=$?
fi
"$RLJAX_BIN/python" -m pytest --verbose --durations=5 -m "harness and not mesh" "${files[@]}" "$@" || status=$?
exit "$status"
