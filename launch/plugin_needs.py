"""Prints what rljax's plugin needs beside a server, one pip requirement a line: the extra ``plugin`` of pyproject.toml.

python launch/plugin_needs.py | xargs -d '\\n' python -m pip install
"""

import pathlib
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
print("\n".join(project["optional-dependencies"]["plugin"]))
