#!/usr/bin/env bash
# Installs the wheels beside this checkout, if there are any, and measures on this machine's GPU (tools/first_gpu.py).
#
#   bash tools/first_gpu.sh [options of tools/first_gpu.py]
#
# The machine has Python 3.12 with torch and JAX for CUDA, and no network. RLJAX_WHEELS: the directory with the wheels
# that `python tools/first_gpu.py --fetch .whl` fetched (default .whl). RLJAX_COMMIT: the commit to record where git
# does not know it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels="${RLJAX_WHEELS:-.whl}"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
fi
PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" python3 tools/first_gpu.py "$@"
