"""The tables of the diagnosis (``causes.json``): causes, limits of the field, remedies, and the options of projects.

A cause has its kind, its words and its remedies, the best fitting first. A limit has the fields of ``Threshold``. A
remedy has its words, and what serves any project ("" if nothing does). A project has its repository, and for each
remedy the project's option with the file there that defines it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("causes.json").read_bytes())
"""The tables ``causes``, ``limits``, ``remedies`` and ``projects``."""
CAUSES: Mapping[str, tuple[str, str]] = {name: (kind, words) for name, (kind, words, _) in TABLES["causes"].items()}
"""The kind of each cause, and the cause in words."""


def first_remedy(cause: str, project: str) -> dict[str, str]:
    """Returns the best fitting remedy of a cause for which a project has an option; {} of ``healthy``.

    A project that is not in the table has what serves any project. The result has the ``remedy`` in words, its
    ``option`` ("" if there is none) and the ``source`` of the option.
    """
    own, found = TABLES["projects"].get(project, {"repository": "", "options": {}}), list[dict[str, str]]()
    for name in TABLES["causes"][cause][2]:
        words, of_any = TABLES["remedies"][name]
        option, path = own["options"].get(name, (of_any, ""))
        found.append({"remedy": words, "option": option, "source": f"{own['repository']}: {path}" if path else ""})
    return next((one for one in found if one["option"]), found[0] if found else {})
