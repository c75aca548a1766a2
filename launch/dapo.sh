#!/usr/bin/env bash
# Trains Qwen3-4B-Base on DAPO-Math-17k with the length-triggered schedule, on one machine with 8 GPUs of 80 GB.
#
#   bash launch/dapo.sh [options of launch/single_node.sh]
#   bash launch/dapo.sh --dry-run
#   bash launch/dapo.sh -- --run.seed 1 --run.dir runs/dapo-seed1
#
# Makes the two environments, fetches model and problems from the Hugging Face hub, prepares the problems, starts four
# vLLM servers on GPUs 4-7 and trains on GPUs 0-3. The same command goes on with a run that was stopped. --dry-run
# makes the trainer's environment, prints what would be started and what the run would take, and fetches nothing from
# the hub. Not run on GPUs yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=configs/paper/qwen3_4b_length_triggered.yaml
model=Qwen/Qwen3-4B-Base
dry_run=false
for word in "$@"; do
  case "$word" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run) dry_run=true ;;
    --) break ;;
  esac
done

source launch/environment.sh
prepare_trainer_environment
if ! $dry_run; then
  # In a container /dev/shm is often too small. This is said before vLLM and the problems are fetched.
  source launch/served.sh
  given=()
  for word in "$@"; do
    if ((${#given[@]})) || [ "$word" = -- ]; then given+=("$word"); fi
  done
  check_run "$config" "${given[@]:1}" --rollout.engine vllm --rollout.urls http://127.0.0.1:0 || exit 2
  bash launch/install_vllm.sh
  if [ ! -e runs/data/dapo.parquet ]; then
    "$RLJAX_BIN/python" -m rljax.cli prepare BytedTsinghua-SIA/DAPO-Math-17k runs/data/dapo.parquet \
      --model "$model" --max-prompt-tokens 1024
  fi
  if [ ! -e runs/data/aime-24.parquet ]; then
    "$RLJAX_BIN/python" -m rljax.cli prepare BytedTsinghua-SIA/AIME-2024 runs/data/aime-24.parquet
  fi
fi
exec bash launch/single_node.sh "$config" --trainer-gpus 0-3 --server-gpus 4-7 "$@"
