#!/usr/bin/env bash
# Checks rljax on the accelerators of this machine, from the driver to a training step, and writes one JSON file to send
# (docs/check_accelerator.md).
#
#   bash launch/check_accelerator.sh [--tpu] [options of rljax check]
#   bash launch/check_accelerator.sh --models 0.6B 1.7B 4B
#   bash launch/check_accelerator.sh --json result.json   another name than accelerator_NAME.json in this directory
#   bash launch/check_accelerator.sh --only device step    some parts
#   bash launch/check_accelerator.sh --tiny          tries the kernels and the step on a CPU too
#
# Makes an environment first, with jax for CUDA where nvidia-smi finds a GPU; with --tpu one of its own, with jax for
# TPU, in .venv-tpu. No model is downloaded. The exit status is 1 when something is not as it should be.
# Not run on an accelerator yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source launch/environment.sh
case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --tpu)
    shift
    export RLJAX_VENV="${RLJAX_VENV:-$PWD/.venv-tpu}"
    prepare_environment train
    "$RLJAX_BIN/python" -m pip install -qq --progress-bar off 'jax[tpu]>=0.10,<0.13'
    ;;
  *) prepare_trainer_environment ;;
esac
# A run's share of each device's memory. JAX refuses to have both variables.
[[ -n "${XLA_PYTHON_CLIENT_MEM_FRACTION:-}" ]] || export XLA_CLIENT_MEM_FRACTION="${XLA_CLIENT_MEM_FRACTION:-0.92}"
status=0
if has_gpu; then # what vLLM needs here, as launch/install_vllm.sh checks it
  vllm="${RLJAX_VLLM_VENV:-$PWD/.venv-vllm}/bin/python"
  check_driver || status=1
  [[ ! -x "$vllm" ]] || check_compiler "$vllm" || status=1
fi
"$RLJAX_BIN/python" -m rljax.cli check "$@" || status=$?
exit "$status"
