# Sourced by the scripts that make a virtual environment: which interpreter to make it with.

# first_python MINOR CANDIDATE...: the first that runs and is Python 3.MINOR or newer, up to 3.13; status 1 if none is.
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
