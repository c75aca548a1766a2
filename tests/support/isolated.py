"""Programs that can import only some packages besides the standard library and rljax."""

import subprocess
import sys

ONLY = """
import sys

allowed = {*sys.argv.pop(1).split(","), *sys.stdlib_module_names, "rljax"}

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in allowed or name.startswith("_sysconfigdata"):
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
"""
COMMAND = "from rljax.errors import run_cli; from rljax.cli import main; sys.exit(run_cli(main))"
# A module without a spec was made inside an extension module, not imported.
ALONE = """
loaded = {name.partition(".")[0] for name, module in sys.modules.items() if getattr(module, "__spec__", None)}
strangers = {name for name in loaded - allowed if not name.startswith("_")}
assert not strangers, strangers
rooms = {name for name in sys.modules if name.startswith("rljax.") and not name.startswith("rljax.ROOM")}
assert not rooms, rooms
print("isolated")
"""


def run_with_only(packages, body, *words, room=None):
    """Runs a program's text where only ``packages`` can be imported; returns the ended process.

    With ``room`` the program ends with "isolated" if it imported no other room of rljax.
    """
    text = ONLY + body + (ALONE.replace("ROOM", room) if room else "")
    command = [sys.executable, "-c", text, ",".join(packages), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def rljax_with_only(packages, *words):
    """Runs the command ``rljax`` in the same way; returns (exit status, output, errors)."""
    done = run_with_only(packages, COMMAND, *words)
    return done.returncode, done.stdout, done.stderr
