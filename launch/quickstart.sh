#!/usr/bin/env bash
# The main job from a bare machine: environment, training of the toy base model, summary, report.png.
#
#   bash launch/quickstart.sh [--vllm | --sglang] [--] [options of rljax.train]
#   bash launch/quickstart.sh -- --run.seed 3 --run.dir runs/seed3
#   bash launch/quickstart.sh --vllm -- --run.steps 12 --rollout.dtype float32 --precision.compute-dtype float32
#
# Four minutes on 2 cores, installation included. Run again, it reuses the environment and goes on with a run that was
# stopped (give another --run.dir, or remove the old one, to start afresh). With --vllm the rollouts
# come from a real vLLM server, installed into .venv-vllm, and with --sglang from an SGLang server in .venv-sglang;
# launch/single_node.sh starts it and ends it with the run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

engine=jax
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --vllm | --sglang) engine="${1#--}" ;;
    --)
      shift
      break
      ;;
    *) break ;;
  esac
  shift
done

source launch/environment.sh
prepare_environment train
# Its model is so small that a CPU trains it, on machines with GPUs, too.
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
if [ "$engine" = jax ]; then
  echo "== training"
  exec "$RLJAX_BIN/python" -m rljax.train configs/quickstart.yaml "$@"
fi

bash "launch/install_$engine.sh"
servers=(--rollout.engine "$engine" --rollout.urls http://127.0.0.1:0) # the real URL is not known yet
dtype="$("$RLJAX_BIN/python" -m rljax.cli config --show rollout.dtype configs/quickstart.yaml "$@" "${servers[@]}")"
export RLJAX_VENV="${RLJAX_BIN%/bin}"
exec bash launch/single_node.sh configs/quickstart.yaml --engine "$engine" -- --run.dir "runs/quickstart-$engine-$dtype" "$@"
