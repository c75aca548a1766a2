#!/usr/bin/env bash
# Runs the recipes of docs/schedule.md and the exporters of docs/compare.md in the packages they are for, on a CPU, and
# writes what came of it into the table of docs/others.md.
#
#   bash tools/test_peers.sh [peft] [tunix] [skyrl_tx] [skyrl] [trl] [deepspeed] [verl] [easydel] [maxtext]  (default: all)
#
# Each package gets a virtual environment of its own in $RLJAX_PEERS (default .venv-peers), 2 to 6 GB each.
# RLJAX_PEERS_PYTHON: the interpreter, Python 3.12 or 3.13 (default: the first that launch/python.sh finds).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/python.sh

root=${RLJAX_PEERS:-.venv-peers}

if ! interpreter=$(find_python 12 "${RLJAX_PEERS_PYTHON:-}"); then
  echo "error: ${RLJAX_PEERS_PYTHON:-there} is no Python 3.12 or 3.13; name one in RLJAX_PEERS_PYTHON" >&2
  exit 2
fi

# What SkyRL's trainer imports. Its extra declares it together with kernels that are compiled for CUDA.
SKYRL_NEEDS="skyrl-gym==0.4.0 ray==2.57.0 hydra-core==1.3.4 accelerate aiohttp fastapi func_timeout httpx jaxtyping
  loguru omegaconf orjson pybase64 tensordict torchdata tqdm uvicorn wandb"

packages() {
  case $1 in
    peft) echo "peft==0.21.2 torch .[train]" ;;
    tunix) echo "google-tunix==0.1.7 .[optax]" ;;
    skyrl_tx) echo "skyrl-tx==0.3.0 jax flax optax torch ." ;;
    skyrl) echo "skyrl==0.4.0 $SKYRL_NEEDS torch .[optax]" ;;
    trl) echo "trl==1.16.0 transformers==5.23.0 torch .[train]" ;;
    deepspeed) echo "deepspeed==0.19.8 setuptools torch .[optax]" ;;
    verl) echo "verl==0.9.1 transferqueue torchdata torch cachetools fastapi uvicorn .[optax]" ;; # the last three undeclared
    easydel) echo "easydel==0.3.0 pillow torch .[optax]" ;; # pillow undeclared
    maxtext) echo "maxtext==0.2.5 jax flax optax ." ;; # its extras for TPUs and CUDA alone declare what it needs
    *) echo "error: unknown package $1" >&2; return 2 ;;
  esac
}

[ $# -gt 0 ] || set -- peft tunix skyrl_tx skyrl trl deepspeed verl easydel maxtext
for name in "$@"; do packages "$name" >/dev/null; done # a wrong name ends it here
status=0
for name in "$@"; do
  wanted=$(packages "$name")
  bin=$root/$name/bin
  if [ ! -e "$root/$name/ready" ]; then
    "$interpreter" -m venv "$root/$name"
    # shellcheck disable=SC2086
    "$bin/pip" install --quiet $wanted pyarrow pytest
    touch "$root/$name/ready"
  fi
  tests=tests/peers/test_$name.py
  [ "$name" != peft ] || tests=tests/policy/test_peft.py
  echo "== $name: $wanted"
  HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=1 PYTHONPATH=. \
    "$bin/python" -m pytest -p no:cacheprovider --junitxml="$root/$name.xml" "$tests" || status=1
  "$bin/python" tools/peers_table.py docs/others.md "${wanted%% *}" "$tests" "$root/$name.xml"
done
exit $status
