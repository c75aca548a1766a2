#!/usr/bin/env bash
# Pages of rljax view in a real Chromium, driven by playwright (marker browser). About a minute.
#
#   bash tools/test_view.sh [pytest arguments]
#
# RLJAX_CHROMIUM: the browser (default /usr/bin/chromium). Playwright has an environment of its own, which is made once,
# in $RLJAX_BROWSER_VENV (default .venv-browser), with the interpreter of the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

prepare_environment test
venv="${RLJAX_BROWSER_VENV:-$PWD/.venv-browser}"
RLJAX_PYTHON="$RLJAX_BIN/python" own_environment "$venv" 'playwright>=1.50,<2'
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PYTHONPATH=".:$packages" exec "$RLJAX_BIN/python" -m pytest --verbose -p no:xdist --durations=5 -m browser tests/view "$@"
