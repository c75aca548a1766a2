#!/usr/bin/env bash
# Compares two engines on the same tokens, without a server: the embedded engine samples in bfloat16 through its
# key-value cache, and the trainer's forward scores the responses in bfloat16 and in float32.
#
#   bash launch/compare.sh [options of rljax compare]
#   bash launch/compare.sh --model DIR                # a Hugging Face directory of your own, on the toy's prompts
#   bash launch/compare.sh --scorer hf:bfloat16       # transformers as well; needs torch in the environment
#
# Without --model it takes the quickstart's base model. Prints the pairwise mismatch, each scorer's noise floor and a
# verdict, and writes runs/comparison. Status 0: every pair passes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  -h | --help)
    sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

source launch/environment.sh
prepare_environment train
exec "$RLJAX_BIN/python" -m rljax.cli compare --toy --out runs/comparison "$@"
