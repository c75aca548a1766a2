# Sourced by the launch scripts: finds Python, makes a virtual environment once, installs rljax with an extra.
#
# RLJAX_VENV: the environment's directory (default: .venv of this checkout, or .venv-gpu for the extra gpu).
# RLJAX_PYTHON: the interpreter to make it with. Sets RLJAX_BIN, the environment's bin directory.

rljax_repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

source "$rljax_repo/launch/machine.sh"
source "$rljax_repo/launch/python.sh"

rljax_python() {
  find_python 11 "${RLJAX_PYTHON:-}" && return
  echo "error: ${RLJAX_PYTHON:+RLJAX_PYTHON is $RLJAX_PYTHON, but }rljax needs Python 3.11, 3.12 or 3.13: $python_remedy, and name it in RLJAX_PYTHON if it is not on the PATH" >&2
  return 1
}

# prepare_environment EXTRA: an environment in which `pip install -e .[EXTRA]` is done; at once when it is.
prepare_environment() {
  local extra="$1" name=.venv venv stamp python
  [ "$extra" != gpu ] || name=.venv-gpu
  venv="${RLJAX_VENV:-$rljax_repo/$name}"
  mkdir -p "$(dirname "$venv")"
  RLJAX_BIN="$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")/bin"
  stamp="$venv/.rljax-$extra-$(cksum < "$rljax_repo/pyproject.toml" | cut -d ' ' -f 1)"
  if [ -e "$stamp" ] && [ -x "$RLJAX_BIN/python" ]; then
    echo "== environment $venv is ready"
  else
    python="$(rljax_python)"
    echo "== making the environment $venv with $("$python" --version) (a minute or two)"
    make_environment "$python" "$venv"
    "$RLJAX_BIN/python" -m pip install -qq --upgrade pip
    if [ "$extra" = test ]; then
      install_cpu_torch
    fi
    remove_former_name "$RLJAX_BIN/python" "$rljax_repo"
    "$RLJAX_BIN/python" -m pip install -qq --progress-bar off -e "$rljax_repo[$extra]"
    if [ "$extra" = test ]; then
      install_gym
    fi
    touch "$stamp"
    echo "== installed: $("$RLJAX_BIN/python" -m pip list 2>/dev/null | awk '$1 ~ /^(jax|flax|optax|orbax-checkpoint|grain|transformers|torch)$/ {printf "%s %s, ", $1, $2}')"
  fi
  keep_compiled
}

# keep_compiled: compiled programs are kept, so that a second run starts at once.
keep_compiled() {
  export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$rljax_repo/.cache/jax}"
  export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.5}"
  export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="${JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES:--1}"
}

# own_environment VENV WORDS...: an environment in which `pip install WORDS` is done, once.
own_environment() {
  local venv="$1"
  shift
  [ ! -e "$venv/.ready" ] || return 0
  make_environment "$(rljax_python)" "$venv"
  "$venv/bin/python" -m pip install --quiet "$@"
  touch "$venv/.ready"
}

# trainer_extra: the extra that trains here, gpu where nvidia-smi finds a GPU, else train.
trainer_extra() {
  if has_gpu; then echo gpu; else echo train; fi
}

# prepare_trainer_environment: the one that RLJAX_VENV names, as it is, where it exists; else one with trainer_extra.
prepare_trainer_environment() {
  if [ -n "${RLJAX_VENV:-}" ] && [ -x "$RLJAX_VENV/bin/python" ]; then
    RLJAX_BIN="$(cd "$RLJAX_VENV/bin" && pwd)"
    keep_compiled
  else
    prepare_environment "$(trainer_extra)"
  fi
}

# pycosat, which reasoning-gym needs, is compiled where it is installed. So the extra test does not hold it.
install_gym() {
  "$RLJAX_BIN/python" -m pip install -qq --progress-bar off -e "$rljax_repo[gym]" ||
    echo "warning: reasoning-gym cannot be installed (it needs a C compiler); its tests will be skipped" >&2
}

# The parity tests compare with torch. 2.13.0 exists as a CPU build for Python 3.11; elsewhere the index decides, and
# without any torch those tests are skipped.
install_cpu_torch() {
  "$RLJAX_BIN/python" -c 'import torch' 2>/dev/null && return
  echo "== installing torch for the parity tests"
  "$RLJAX_BIN/python" -m pip install -qq --progress-bar off 'torch==2.13.0' ||
    echo "warning: no torch for this Python; the parity tests will be skipped" >&2
}
