# Sourced by the scripts that install a server's environment: saying what goes on, finding Python, running with a log.
#
# Reads program (the script's name), venv and log (the file for the output of what is run).
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
    die "no Python 3.11, 3.12 or 3.13 found; name one with PYTHON=/path/to/python"
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
