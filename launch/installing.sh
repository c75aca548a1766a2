# Sourced by the scripts that install a server's environment: what they say, Python, the GPU, a log, rljax's plugin.
#
# Reads program (the script's name), repo, venv and log (the file for the output of what is run).
source "$(dirname "${BASH_SOURCE[0]}")/machine.sh"
source "$(dirname "${BASH_SOURCE[0]}")/python.sh"

child=""

say() { echo "$program: $*" >&2; }
die() { say "$*"; exit 1; }

stop_child() {
  if [[ -n "$child" ]] && kill -0 "$child" 2>/dev/null; then
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
  fi
}
trap stop_child EXIT
trap 'say "interrupted; run it again to go on"; exit 130' INT TERM

server_python() {
  find_python 11 "${PYTHON:-}" ||
    die "no Python 3.11, 3.12 or 3.13 found: $python_remedy, and name it with PYTHON=/path/to/python"
}

# waited TITLE COMMAND...: runs it with its output in the log and says every 15 seconds that it goes on.
waited() {
  local title="$1" began=$SECONDS next=15
  shift
  say "$title"
  "$@" >>"$log" 2>&1 &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - began >= next)); then
      say "  $((SECONDS - began)) s, $(du -sh "$venv" 2>/dev/null | cut -f1) on disk"
      next=$((next + 15))
    fi
  done
  local status=0
  wait "$child" || status=$?
  child=""
  return "$status"
}

# failed: shows the end of the log and ends the script.
failed() {
  tail -n 15 "$log" >&2
  die "pip failed; the whole log is $log"
}

# install_plugin GROUP: rljax, with its entry point in GROUP, and what it needs beside the server; at once when they are
# there. The installed entry point is a copy of the one in pyproject.toml, made when the plugin was installed.
install_plugin() {
  local is_here='
import importlib.metadata, pathlib, sys, tomllib
import numba, rljax, xxhash, zstandard
repo, group = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
wanted = tomllib.loads((repo / "pyproject.toml").read_text())["project"]["entry-points"][group]["rljax"]
found = importlib.metadata.entry_points(group=group, name="rljax")
installed = [(point.dist.name, point.value) for point in found]
sys.exit(installed != [("rljax-llm", wanted)] or pathlib.Path(rljax.__file__).resolve().parents[1] != repo)
'
  (cd / && "$venv/bin/python" -c "$is_here" "$repo" "$1") 2>/dev/null && return
  local needs
  mapfile -t needs < <("$venv/bin/python" "$repo/launch/plugin_needs.py")
  remove_former_name "$venv/bin/python" "$repo" >>"$log" 2>&1 || failed
  waited "installing rljax's plugin (without its dependencies)" \
    "$venv/bin/python" -m pip install --no-deps -e "$repo" || failed
  waited "installing what the plugin needs besides" "$venv/bin/python" -m pip install "${needs[@]}" || failed
}
