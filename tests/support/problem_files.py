"""The problems of a file, for tests of what was written or is refused."""

from rljax.data.files import answered_rows


def read_problems(path, form=None):
    """Returns all problems of a file. Raises the errors of ``answered_rows``."""
    return tuple(problem for _, problem in answered_rows(path, None, form))
