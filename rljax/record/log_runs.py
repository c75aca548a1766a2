"""Splits a log that holds several runs."""

from rljax.mismatch.names import RUN_COLUMNS
from rljax.record.training_logs import Rows, columns_of


def split_runs(rows: Rows) -> dict[str, Rows]:
    """Returns the rows of each run in one export, by the run's name; empty if the log has one run.

    W&B's export of a chart names the columns ``RUN - NAME``. A table of several runs names them in a column.
    """
    columns = columns_of(rows)
    pairs = [column.split(" - ", 1) for column in columns if " - " in column]
    names = list(dict.fromkeys(run for run, _ in pairs))
    if len(names) > 1 and len({name for _, name in pairs}) < len(pairs):
        ours = {run: [name for name in columns if " - " not in name or name.startswith(f"{run} - ")] for run in names}
        return {
            run: [{name.removeprefix(f"{run} - "): row[name] for name in ours[run] if name in row} for row in rows]
            for run in names
        }
    for column in RUN_COLUMNS:
        named = [(str(row[column]), row) for row in rows if type(row.get(column)) in (str, int)]
        if len(runs := dict.fromkeys(run for run, _ in named)) > 1:
            return {run: [row for name, row in named if name == run] for run in runs}
    return {}
