"""Counts the calls of Python and C functions. The count grows with Python's own work, the same on any machine."""

import sys
from collections import Counter


def count_calls(work):
    """Returns the number of each event of ``sys.setprofile`` (calls and returns) while ``work()`` runs."""
    counted = Counter()
    sys.setprofile(lambda frame, event, argument: counted.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted
