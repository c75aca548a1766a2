"""tools/check_images.py: what it reads of the Dockerfiles and manifests, and that it fails where an image would."""

import sys
from pathlib import Path

import check_images
import pytest

OLD_SERVER = """FROM vllm/vllm-openai:v0.32.0
WORKDIR /opt/rljax
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps --editable .
ENTRYPOINT []
"""


def test_lines_that_go_on_are_one_instruction():
    text = "# a comment\nFROM a:1\nRUN one \\\n    && two\nENTRYPOINT []\n"
    assert check_images.instructions(text) == [("FROM", "a:1"), ("RUN", "one && two"), ("ENTRYPOINT", "[]")]


def test_the_commands_are_those_of_the_manifests():
    key = ["install", "-m", "0400", "/run/secret/key", "/run/rljax/key"]
    assert check_images.container_commands("trainer") == [
        key,
        ["python3", "-m", "rljax.train", "/etc/rljax/config.yaml"],
    ]
    serve = ["python3", "-m", "rljax.cli", "serve", "vllm"]
    worker = ["python3", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert check_images.container_commands("server") == [key, serve, worker]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("RUN echo all is lost && exit 3", "RUN echo all is lost && exit 3: status 3\nall is lost"),
        ("ADD x y", "ADD x y: this program does not know what to do with it"),
    ],
)
def test_a_line_that_does_not_work_fails(line, says, tmp_path):
    with pytest.raises(check_images.Failed) as failed:
        check_images.check("trainer", f"FROM python:3.12-slim\n{line}\n", tmp_path, Path(sys.prefix))
    assert str(failed.value) == says


def test_another_version_of_the_base_image_fails(tmp_path):
    with pytest.raises(check_images.Failed, match=r"FROM vllm/vllm-openai:v0.32.0: .* does not hold this version"):
        check_images.base_image(OLD_SERVER, tmp_path)


@pytest.mark.slow
def test_a_server_without_what_the_plugin_needs_fails(tmp_path, monkeypatch):
    """This environment stands for the base image, so that the test needs neither vLLM nor a package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's way to say that setuptools is here
    venv = check_images.make_base("server", tmp_path, Path(sys.prefix), sys.executable)
    with pytest.raises(check_images.Failed, match="No module named 'zstandard'"):
        check_images.check("server", OLD_SERVER, tmp_path, venv)
