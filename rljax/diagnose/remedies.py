"""The remedies of each cause, and the options of each project for them (``remedies.json``).

The file has for each remedy its words, and what serves any project ("" if nothing does). It has the remedies of each
cause, the best fitting first. It has each project's repository, and for each remedy the project's option with the file
there that defines it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def remedy_table() -> Mapping[str, Any]:
    """Returns the content of the file: its ``remedies``, ``causes`` and ``projects``."""
    table: dict[str, Any] = json.loads(Path(__file__).with_name("remedies.json").read_bytes())
    return table


def first_remedy(cause: str, project: str) -> dict[str, str]:
    """Returns the best fitting remedy of a cause for which a project has an option; {} of ``healthy``.

    A project that is not in the table has what serves any project. The result has the ``remedy`` in words, its
    ``option`` ("" if there is none) and the ``source`` of the option.
    """
    table, found = remedy_table(), list[dict[str, str]]()
    own = table["projects"].get(project, {"repository": "", "options": {}})
    for name in table["causes"].get(cause, ()):
        words, of_any = table["remedies"][name]
        option, path = own["options"].get(name, (of_any, ""))
        found.append({"remedy": words, "option": option, "source": f"{own['repository']}: {path}" if path else ""})
    return next((one for one in found if one["option"]), found[0] if found else {})
