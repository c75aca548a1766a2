#!/usr/bin/env bash
# Installs SGLang into a virtual environment of its own, with rljax's plugin beside it.
#
#   bash launch/install_sglang.sh [VENV_DIR]      default: $RLJAX_SGLANG_VENV, else .venv-sglang in this checkout
#
# Where there is an NVIDIA GPU it installs SGLang with all that it asks for; elsewhere, for tests and small models, its
# Python files with a torch for the CPU and without its kernels (about 2.3 GB and two minutes). A finished environment is
# used again as it is. Environment variables:
#   PYTHON             interpreter to build from (default: the first Python 3.11 to 3.13 that launch/python.sh finds)
#   RLJAX_SGLANG_SPEC  pip requirement to install instead of the default
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-${RLJAX_SGLANG_VENV:-$repo/.venv-sglang}}"
mkdir -p "$venv"
venv="$(cd "$venv" && pwd)"
log="$venv/install.log"
marker="$venv/.rljax-sglang"
program=install_sglang
source "$repo/launch/installing.sh"

# What SGLang imports on a CPU; its own requirements are of builds for CUDA.
beside=('transformers>=5.19,<5.20' aiohttp fastapi 'uvicorn>=0.51' uvloop orjson packaging psutil pybase64 pydantic
  python-multipart 'pyzmq>=25.1.2' requests setproctitle msgspec prometheus-client partial_json_parser pillow einops
  IPython tqdm interegular dill 'apache-tvm-ffi>=0.1.11,<0.1.12' 'sentencepiece>=0.2.1,<0.3'
  'compressed-tensors>=0.18,<0.19' gguf 'openai>=2.8,<2.9' jsonschema 'xgrammar>=0.2.7,<0.3' 'openai-harmony>=0.0.4,<0.1'
  soundfile)
spec="${RLJAX_SGLANG_SPEC:-sglang>=0.5.23,<0.5.24}"

if [[ ! -x "$venv/bin/python" ]]; then
  python="$(server_python)"
  say "new environment $venv ($("$python" --version 2>&1))"
  make_environment "$python" "$venv" || exit 1
fi
pip=("$venv/bin/python" -m pip install)

if [[ "$(cat "$marker" 2>/dev/null || true)" == "$spec" ]]; then
  say "$spec is already in $venv"
else
  rm -f "$marker"
  : >"$log"
  imports='import torch, sglang'
  waited "upgrading pip" "${pip[@]}" --upgrade pip || say "going on with the old pip"
  if has_gpu; then
    waited "installing $spec (several minutes)" "${pip[@]}" "$spec" || failed
  else
    waited "installing torch for the CPU" "${pip[@]}" 'torch==2.13.0+cpu' || failed
    waited "installing $spec" "${pip[@]}" --no-deps 'torchvision>=0.28,<0.29' 'triton>=3.7,<3.8' "$spec" || failed
    waited "installing what it needs on a CPU" "${pip[@]}" "${beside[@]}" || failed
    imports='from rljax.rollout.servers.sglang.server import stand_in; kept = stand_in(); import sglang'
  fi
  PYTHONPATH="$repo" "$venv/bin/python" -c "$imports" >>"$log" 2>&1 || failed
  echo "$spec" >"$marker"
fi

install_plugin sglang.srt.plugins
say "ready: $venv"
