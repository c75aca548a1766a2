"""What the tests of environments of verifiers share: the package's Python, and a source over the embedded engine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rljax.rollout.build import load_jax_engine
from rljax.rollout.episodes.verifiers.host import PYTHON

HERE = Path(__file__).parent
TOY = HERE.parents[1] / "rljax/configs/toy-base"


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.verifiers)


@pytest.fixture(scope="session", autouse=True)
def verifiers_python():
    """Skips the tests without the package, and lets its process find the environments of the tests."""
    python = os.environ.get(PYTHON) or sys.executable
    if subprocess.run([python, "-c", "import verifiers.v1"], capture_output=True).returncode:
        pytest.skip(f"{python} has no verifiers: run tools/test_verifiers.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE / "environments"))
        yield python


@pytest.fixture(scope="session")
def toy_engine():
    """The embedded engine with the toy base in float32."""
    return load_jax_engine(TOY, "float32", 64)


@pytest.fixture
def forgetful_model(tmp_path):
    """The toy base with a chat template that shows the last message alone, and refuses to show a reply by itself."""
    shutil.copytree(TOY, tmp_path / "forgetful")
    template = "{% if messages[0].content == '-' %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
    (tmp_path / "forgetful/chat_template.jinja").write_text(template)
    return tmp_path / "forgetful"
