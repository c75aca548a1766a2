#!/usr/bin/env bash
# Makes a virtual environment, installs rljax with its test extra, checks style, types and the site, and runs the tests.
#
#   bash tools/test.sh [--fast] [pytest arguments]
#
# --fast leaves out what is slow or needs a vLLM server (markers slow, vllm) and does not install vLLM.
# RLJAX_VENV: the environment's directory (default .venv). RLJAX_PYTHON: the interpreter (default python3.11 or newer).
# RLJAX_SKIP_VLLM=1 leaves the vLLM server's environment and its tests out; without it a vLLM that cannot be installed
# fails the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

fast=false
if [ "${1:-}" = --fast ]; then
  fast=true
  shift
fi

elsewhere="compilers and not harness and not processes and not launch_files and not slurm and not store and not sglang and not real_models and not vllm_tpu" # what has a script of its own
prepare_environment test
selection="not mesh and not $elsewhere"
if $fast; then
  selection="not mesh and not slow and not vllm and not $elsewhere"
elif [ "${RLJAX_SKIP_VLLM:-0}" != 1 ]; then
  bash launch/install_vllm.sh
fi
echo "== style"
"$RLJAX_BIN/ruff" check .
"$RLJAX_BIN/ruff" format --check .
# Types and the site are checked beside the first tests, most of which start more slowly than they compute.
said="$(mktemp)"
check_types_and_site() {
  "$RLJAX_BIN/mypy" && NO_MKDOCS_2_WARNING=1 "$RLJAX_BIN/mkdocs" build --strict --quiet
}
check_types_and_site >"$said" 2>&1 &
checks=$!
status=0
unset PYTHONDONTWRITEBYTECODE # else each process that a test starts compiles all modules again
# Each group of tests (tests/conftest.py) stays in one process. What --fast runs waits for a third of its time.
processes=2
! $fast || processes=3
split=(--numprocesses "$processes" --dist loadgroup --no-loadscope-reorder --max-worker-restart 0)
if ! $fast; then
  echo "== tests on eight simulated devices"
  asked=("$@")
  # Without words of the caller only the files that have such tests are read, which three processes do.
  [ $# -gt 0 ] || mapfile -t asked < <(grep --recursive --files-with-matches --include='*.py' 'mark\.mesh' tests)
  "$RLJAX_BIN/python" -m pytest --verbose --durations=5 -m "mesh and not harness" "${split[@]}" "${asked[@]}" || status=$?
  [ "$status" != 5 ] || status=0 # none among those asked for
fi
echo "== tests"
"$RLJAX_BIN/python" -m pytest --verbose --durations=15 -m "$selection" "${split[@]}" "$@" || status=$?
echo "== types and the site of docs/"
wait "$checks" || status=$?
cat "$said"
rm "$said"
exit "$status"
