"""Scores ``rljax diagnose``, ``compare``, ``replay`` and ``view`` on the exam's cases, all in this process.

``cases.json`` has the cases, and ``inputs`` their files, each compressed. README.md says where they come from.
"""

import collections
import gzip
import json
from pathlib import Path

from toy_runs import outcome

from rljax.commands import compare, diagnose, replay, view

HERE = Path(__file__).parent
CASES = {case["id"]: case for case in json.loads((HERE / "cases.json").read_text(encoding="utf-8"))["cases"]}
ERRORS = (0, 1)  # the exit statuses with a diagnosis


def unpack(case, folder):
    """Writes the input of a case into ``folder``, a directory if the case names one; returns its path."""
    packed = HERE / "inputs" / f"{case['file']}.gz"
    files = [packed] if packed.exists() else sorted((HERE / "inputs" / case["file"]).glob("*.gz"))
    for file in files:
        path = folder / file.relative_to(HERE / "inputs").with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.decompress(file.read_bytes()))
    return folder / case["file"]


def score_diagnosis(case, path):
    """Returns the result of a case's diagnosis, its false hints, and what is said in one line."""
    status, out, err = outcome(diagnose.main, [path, "--json", "-"])
    found = json.loads(out) if status in ERRORS else {"cause": "error", "confidence": None, "findings": []}
    cause, possible = found["cause"], {one["cause"] for one in found["findings"] if one["confidence"] == "possible"}
    bad = set(case["must_not"]) | ({"eight_bits", "other_weights"} if "healthy" in case["expected"] else set())
    result = {"error": "error", "cannot_tell": "cannot tell"}.get(cause, "wrong")
    if cause in [*case["expected"], *case["acceptable"]]:
        result = "right" if cause in case["expected"] else "acceptable"
    said = f"{cause} ({found['confidence']}) {sorted(possible)} {err.strip()}"
    return result, sorted(possible & bad), said


def score_compare(case, path, folder):
    """Returns the result of ``compare`` on the first pair of columns, and what is said."""
    _, _, err = outcome(compare.main, [path, "--out", folder / "compared"])
    report = folder / "compared" / "report.json"
    if not report.exists():
        return "error", err
    verdict = json.loads(report.read_text())["pairs"][0]["verdict"]
    report.unlink()
    wanted, said = case["compare"], f"{verdict['status']} {verdict['cause']}"
    if verdict["cause"] in wanted["cause"] and verdict["status"] in wanted["status"]:
        return "right", said
    return ("acceptable" if verdict["cause"] in wanted.get("acceptable", ()) else "wrong"), said


def score_replay(case, path):
    """Returns the result of ``replay``, and what is said."""
    wanted = case["replay"]
    _, out, err = outcome(replay.main, [path, "--json", "-", *wanted.get("arguments", [])])
    log = json.loads(out)["logs"][0] if out else {"error": err}
    if log.get("error") or log.get("length_column") is None:
        text = f"{log.get('error')} {err}"
        is_named = all(name in text for name in wanted.get("must_name", []))
        return ("acceptable" if wanted.get("error_ok") and is_named else "error"), text
    lengths, surge, span = log["lengths"], log["rules"][0]["surge_step"], wanted.get("surge")
    read = [length for length in lengths if length is not None]
    checks = {
        "column": wanted.get("column", "") in log["length_column"],
        "names": all(name in out + err for name in wanted.get("must_name", [])),
        "steps": log["steps"] <= wanted.get("steps_at_most", log["steps"]),
        "lengths": len(read) == len(wanted.get("lengths", read))
        and all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(read, wanted.get("lengths", read), strict=True)),
        "surge": "surge" not in wanted
        or (surge is None and (span is None or wanted.get("surge_optional", False)))
        or (surge is not None and span is not None and span[0] <= surge <= span[1]),
    }
    failed = [name for name, is_met in checks.items() if not is_met]
    return ("wrong" if failed else "right"), f"{log['length_column']}, {log['steps']} steps, wrong: {failed}"


def score_view(path, folder):
    """Returns whether ``view`` writes its page."""
    status, _, err = outcome(view.main, [path, "-o", page := folder / "view.html"])
    return ("right" if status == 0 and page.exists() else "error"), err


def score(names, folder):
    """Returns the counts of the diagnoses' results and "false hints", those of each "COMMAND RESULT", and all lines."""
    counts, others, lines = collections.Counter(), collections.Counter(), []
    for name in names:
        case = CASES[name]
        path = unpack(case, folder)
        result, hints, said = score_diagnosis(case, path)
        counts.update([result] + ["false hints"] * bool(hints))
        lines.append(f"{name}: {'/'.join(case['expected'])}: {said}: {result} {hints}")
        calls = {
            "compare": lambda case=case, path=path: score_compare(case, path, folder),
            "replay": lambda case=case, path=path: score_replay(case, path),
            "view": lambda path=path: score_view(path, folder),
        }
        for command, call in calls.items():
            if command in case["commands"] and (command == "view" or command in case):
                result, said = call()
                others[f"{command} {result}"] += 1
                lines.append(f"  {command}: {said}: {result}")
    return counts, others, lines
