"""What is published: a source distribution and a wheel, built without network, checked and installed."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rljax")

LOADED = """
import importlib.metadata as metadata, json, pathlib, sys
import rljax.schedule
package = pathlib.Path(rljax.schedule.__file__).parents[1]
scripts = metadata.distribution("rljax").entry_points.select(group="console_scripts")
print(json.dumps([str(package), (package / "py.typed").is_file(), sorted(s.name for s in scripts)]))
assert "flax" not in sys.modules
for script in scripts:
    assert callable(script.load()), script
"""


def run(*words, **options):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source distribution), built from a copy, so that the checkout stays clean."""
    here = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, here / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", here / "dist", here)
    (wheel,) = (here / "dist").glob("*.whl")
    (sdist,) = (here / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_twine_accepts_both(built):
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built).count("PASSED") == 2


def test_both_hold_every_module_and_nothing_of_the_tests(built):
    wheel, sdist = built
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rljax").rglob("*.py")}
    data = {"rljax/py.typed", "rljax/plan/h100_sxm.txtpb"}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == modules | data
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert modules <= in_sdist
    assert not any(name.startswith("tests/") for name in in_sdist)


def test_the_wheel_installs_and_its_commands_load(built, tmp_path):
    """Dependencies come from this interpreter, by a path file that stands behind the new environment's own packages."""
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", built[0])
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {"PATH": str(place / "bin"), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    found = json.loads(run(python, "-c", LOADED, cwd=tmp_path, env=clean).splitlines()[0])
    assert found == [str(packages / "rljax"), True, ["rljax"]]
    assert all((place / "bin" / name).is_file() for name in found[2])
