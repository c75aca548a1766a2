# Sourced by the scripts that make a virtual environment: the search for the interpreter to make it with, and the
# removal of what an older checkout installed.

# first_python MINOR CANDIDATE...: prints the first that runs and is Python 3.MINOR or newer, up to 3.13; status 1 if
# none is.
first_python() {
  local oldest="$1" candidate
  shift
  for candidate in "$@"; do
    if [ -n "$candidate" ] &&
      "$candidate" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info[:2] < (3, 14))" >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# remove_former_name PYTHON REPO: removes the distribution rljax from PYTHON's environment, and its metadata from the
# checkout. The distribution rljax-llm had this name, which another project has on the package index. Beside the new
# one it would register the plugins of servers twice.
remove_former_name() {
  rm -rf "$2/rljax.egg-info"
  "$1" -m pip uninstall -qq --yes rljax
}

# make_environment PYTHON DIR: makes the virtual environment DIR unless it is there. What a failure leaves is removed, or
# the next call would take a directory without pip for an environment.
make_environment() {
  local version
  if [ -x "$2/bin/python" ]; then
    "$2/bin/python" -m pip --version >/dev/null 2>&1 && return
    echo "error: $2 has no pip: run '$2/bin/python -m ensurepip', or remove $2 and run this again" >&2
    return 1
  fi
  "$1" -m venv "$2" >&2 && return
  rm -rf "$2"/{bin,include,lib,lib64,share,pyvenv.cfg}
  version="$("$1" -c 'import sysconfig; print(sysconfig.get_python_version())')"
  echo "error: $1 makes no virtual environment: install python$version-venv (Debian, Ubuntu), or take another interpreter, as uv's: uv python install $version" >&2
  return 1
}

# No interpreter was found: how to get one, to follow what the script needs.
python_remedy="install one (Ubuntu 22.04: apt install python3.11 python3.11-venv python3.11-dev; without root: uv python install 3.12)"

# find_python MINOR [NAMED]: prints NAMED where it is given and fits. Otherwise prints the first fitting interpreter on
# the PATH, or else the first that pyenv has installed: a python3.N on the PATH may stand for one that pyenv has but
# has not chosen. Status 1 if there is none.
find_python() {
  local oldest="$1" named="${2:-}" minor root candidates=() installed=()
  if [ -n "$named" ]; then
    first_python "$oldest" "$named"
    return
  fi
  root="$(pyenv root 2>/dev/null || true)"
  for ((minor = oldest; minor < 14; minor++)); do
    candidates+=("python3.$minor")
    [ -z "$root" ] || installed+=("$root"/versions/3."$minor"*/bin/python3."$minor")
  done
  first_python "$oldest" "${candidates[@]}" python3 ${installed[@]+"${installed[@]}"}
}
