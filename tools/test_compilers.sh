#!/usr/bin/env bash
# Compiles small steps for machines that are not here and checks what is said of them (marker compilers).
#
#   bash tools/test_compilers.sh [pytest arguments]
#
# The environment is that of launch/install_compilers.sh, which is made when it is not there yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="${RLJAX_COMPILE_VENV:-.venv-compile}"
bash launch/install_compilers.sh "$venv"
"$venv/bin/python" -c 'import pytest, pytest_timeout' 2>/dev/null ||
  "$venv/bin/python" -m pip install --quiet 'pytest>=8.4,<9' 'pytest-timeout>=2.3,<3'
# The other tests want packages that this environment does not have.
mapfile -t files < <(grep -rl --include='test_*.py' 'mark.compilers' tests)
PYTHONPATH=. exec "$venv/bin/python" -m pytest -p no:cacheprovider -m compilers --durations=10 "${files[@]}" "$@"
