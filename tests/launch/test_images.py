"""tools/check_images.py must read the Dockerfiles and manifests, and fail where the image would fail."""

import collections
import json
import sys
from pathlib import Path

import check_images
import pytest
from programs import program

OLD_SERVER = """FROM vllm/vllm-openai:v0.32.0
WORKDIR /opt/rljax
COPY . .
RUN python3 -m pip install --no-cache-dir --no-deps --editable .
ENTRYPOINT []
"""


def test_instructions_and_commands_of_the_manifests_are_read():
    text = "# a comment\nFROM a:1\nRUN one \\\n    && two\nENTRYPOINT []\n"
    assert check_images.instructions(text) == [("FROM", "a:1"), ("RUN", "one && two"), ("ENTRYPOINT", "[]")]
    key = ["install", "-m", "0400", "/run/secret/key", "/run/rljax/key"]
    train, serve = ["-m", "rljax.train", "/etc/rljax/config.yaml"], ["-m", "rljax.cli", "serve", "vllm"]
    assert check_images.container_commands("trainer") == [key, ["python3", *train]]
    assert check_images.container_commands("server") == [key, ["python3", *serve], ["vllm", "serve"]]


def test_lines_that_do_not_work_and_other_base_images_fail(tmp_path):
    for line, says in (
        ("RUN echo all is lost && exit 3", "RUN echo all is lost && exit 3: status 3\nall is lost"),
        ("ADD x y", "ADD x y: this program does not know what to do with it"),
    ):
        (place := tmp_path / line[:3]).mkdir()
        with pytest.raises(check_images.Failed) as failed:
            check_images.check("trainer", f"FROM python:3.12-slim\n{line}\n", place, Path(sys.prefix))
        assert str(failed.value) == says
    with pytest.raises(check_images.Failed, match=r"FROM vllm/vllm-openai:v0.32.0: .* does not hold this version"):
        check_images.base_image(OLD_SERVER, tmp_path)


def plant_pip(place, **versions):
    """Puts an interpreter into an environment; its pip notes its arguments and reports that it would install these."""
    found = [{"metadata": {"name": name, "version": version}} for name, version in versions.items()]
    (place / "said.json").write_text(json.dumps({"install": found}))
    save = f'echo "$@" >> {place}/words; for word; do last="$word"; done'
    program(place / "venv/bin/python3", f'{save}\n[[ "$*" != *--report* ]] || cp {place}/said.json "$last"')
    return place / "venv"


def test_the_builds_for_gpus_are_resolved_without_a_download(tmp_path, capsys):
    venv = plant_pip(tmp_path, **{"jax": "0.12", "numpy": "2", "nvidia-cudnn-cu12": "9.28"})
    pip = "python3 -m pip install --editable '.[gpu]'"
    found = check_images.gpu_packages("RUN it", pip, tmp_path, venv)
    assert found == {"jax": "0.12", "numpy": "2", "nvidia-cudnn-cu12": "9.28"}
    assert "3 packages, among them jax 0.12, nvidia-cudnn-cu12 9.28\n" in capsys.readouterr().out
    (words,) = (tmp_path / "words").read_text().splitlines()
    assert words.startswith("-m pip install --editable .[gpu] --dry-run ")


def test_the_installers_vllm_is_that_of_the_image(tmp_path):
    cuda = {"cuda-toolkit": "13.0.3"}
    venv = plant_pip(tmp_path, vllm="0.32.0", **cuda)
    check_images.resolve_vllm(OLD_SERVER, tmp_path, venv)
    assert "-m pip install vllm>=0.32,<0.33 --dry-run" in (tmp_path / "words").read_text()
    for versions, says in [
        ({"vllm": "0.32.1", **cuda}, r"is vllm 0.32.1, and the image begins from .*:v0.32.0"),
        ({"vllm": "0.32.0", "torch": "2.13.0+cpu"}, r"has CUDA none \(torch 2.13.0\+cpu\), but .* expects CUDA 13"),
    ]:
        plant_pip(tmp_path, **versions)
        with pytest.raises(check_images.Failed, match=says):
            check_images.resolve_vllm(OLD_SERVER, tmp_path, venv)


def test_packages_of_cuda_are_installed_where_they_fit(tmp_path, monkeypatch):
    usage, venv = collections.namedtuple("usage", "total used free"), plant_pip(tmp_path)
    packages = {"jax": "0.12", "jax-cuda12-plugin": "0.12", "nvidia-nccl-cu12": "2.32"}
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 9 * 2**30))
    check_images.install_cuda(packages, tmp_path, venv)
    installed = [line.split()[-1] for line in (tmp_path / "words").read_text().splitlines()]
    assert installed == ["jax-cuda12-plugin==0.12", "nvidia-nccl-cu12==2.32"]
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(0, 0, 7 * 2**30))
    with pytest.raises(check_images.Failed, match=r"need 8 GiB in .*, and 7.0 are free: set TMPDIR elsewhere"):
        check_images.install_cuda(packages, tmp_path, venv)


@pytest.mark.slow
def test_a_server_without_what_the_plugin_needs_fails(tmp_path, monkeypatch):
    """This environment takes the place of the base image, so the test needs neither vLLM nor a package index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip's way to say that setuptools is here
    venv = check_images.make_base("server", tmp_path, Path(sys.prefix), sys.executable)
    with pytest.raises(check_images.Failed, match="No module named 'zstandard'"):
        check_images.check("server", OLD_SERVER, tmp_path, venv)
