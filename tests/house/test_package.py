"""The source distribution and the wheel are built without network, checked and installed."""

import json
import os
import re
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
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "rljax", "configs", "docs")

LOADED = """
import importlib.metadata as metadata, json, pathlib, sys
import rljax.schedule
package = pathlib.Path(rljax.schedule.__file__).parents[1]
scripts = metadata.distribution("rljax-llm").entry_points.select(group="console_scripts")
print(json.dumps([str(package), (package / "py.typed").is_file(), sorted(s.name for s in scripts)]))
assert not {"jax", "optax", "torch", "flax"} & set(sys.modules)
for script in scripts:
    assert callable(script.load()), script
"""


def run(*words, **options):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Returns (wheel, source distribution), built from a copy, so that the checkout stays clean."""
    here = tmp_path_factory.mktemp("package")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, here / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, here / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", here / "dist", here)
    (wheel,) = (here / "dist").glob("*.whl")
    (sdist,) = (here / "dist").glob("*.tar.gz")
    return wheel, sdist


# The words of an installation end where a sentence goes on with "in".
BY_NAME = re.compile(r"pip3? +install\b(?:(?! in )[^|&;`\n])*?(?<![\w./$-])rljax(-llm)?(?![\w./-])")
# The pages that a message of the package names.
NAMED = {
    name
    for path in (*(ROOT / "rljax").rglob("*.py"), ROOT / "rljax/diagnose/causes.json")
    for name in re.findall(r"rljax docs ([a-z_]+)", path.read_text(encoding="utf-8"))
}
PAGES = ("*.md", "*.py", "*.sh", "*.sbatch", "*.yaml", "*.toml", "*Dockerfile")


BY_NAME_LINES = [*("pip install rljax", "pip install 'rljax[train,gym]'", "python -m pip install --upgrade rljax-llm")]
OTHER_LINES = [
    *("pip install '.[train]' in a checkout of rljax", "pip install -e '.[train]' && rljax train quickstart"),
    *('pip install -e "$rljax_repo[$extra]"', "`pip install '.[gym]'` brings rljax's tasks"),
]


def test_nothing_installs_rljax_by_name():
    """The name rljax is another project's on the package index, and rljax-llm is not published."""
    assert [line for line in BY_NAME_LINES + OTHER_LINES if BY_NAME.search(line)] == BY_NAME_LINES
    listed = run("git", "ls-files", *PAGES, cwd=ROOT).split()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in listed if not name.startswith("tests/")}
    assert "README.md" in texts
    # A command stands on one line, except that a page may break it after "pip install".
    searched = {name: BY_NAME.search(text.replace("install\n", "install ")) for name, text in texts.items()}
    assert {name: match[0] for name, match in searched.items() if match} == {}


def test_both_hold_every_module_and_nothing_of_the_tests(built):
    wheel, sdist = built
    assert run(sys.executable, "-m", "twine", "check", "--strict", *built).count("PASSED") == 2
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rljax").rglob("*.py")}
    configs = {path for kind in ("*.yaml", "paper/*.yaml", "toy-base/*") for path in ROOT.glob(f"configs/{kind}")}
    data = {"rljax/py.typed", "rljax/plan/h100_sxm.txtpb", "rljax/rollout/servers/vllm/metadata/vllm-0+cpu.egg-info"}
    data |= {"rljax/mismatch/atlas.json", "rljax/diagnose/causes.json"}
    data |= {f"rljax/view/page.{kind}" for kind in ("html", "css", "js")}
    data |= {f"rljax/{path.relative_to(ROOT)}" for path in configs} | {f"rljax/docs/{name}.md" for name in NAMED}
    assert len(configs) > 12
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert in_wheel == modules | data
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert modules <= in_sdist
    assert not any(name.startswith("tests/") for name in in_sdist)


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Returns the bin directory and the variables of a new environment with the wheel and this one's dependencies."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=False)
    python = place / "bin/python"
    into = [sys.executable, "-m", "pip", "--python", python, "install"]
    run(*into, "--ignore-installed", "--no-deps", "--no-index", built[0])
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS")
    kept = {name: os.environ[name] for name in variables if name in os.environ}
    return place / "bin", {"PATH": str(place / "bin"), "JAX_PLATFORMS": "cpu", "HOME": str(place)} | kept


def test_an_extra_brings_what_its_half_needs(built):
    """The core of the schedule must be installable with numpy alone."""
    with zipfile.ZipFile(built[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    needed: dict[str, set[str]] = {}
    for line in lines:
        if line.startswith("Requires-Dist: "):
            requirement, _, marker = line.removeprefix("Requires-Dist: ").partition(";")
            package = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
            needed.setdefault(marker.strip(), set()).add(package)
    by_extra = {re.sub(r"\W*extra\W+|\W+$", "", marker): packages for marker, packages in needed.items()}
    expected = {"": {"numpy"}, "optax": {"jax", "optax"}, "torch": {"torch"}, "gpu": {"rljax-llm", "jax"}}
    expected |= {"replay": {"matplotlib", "tensorboardX"}}
    assert {extra: by_extra[extra] for extra in expected} == expected
    assert {"jax", "optax", "flax", "transformers"} <= by_extra["train"]


def test_the_wheel_installs_and_its_commands_load(installed, tmp_path):
    programs, clean = installed
    found = json.loads(run(programs / "python", "-c", LOADED, cwd=tmp_path, env=clean).splitlines()[0])
    (packages,) = programs.parent.glob("lib/python*/site-packages")
    assert found == [str(packages / "rljax"), True, ["rljax"]]
    assert all((programs / name).is_file() for name in found[2])


@pytest.mark.harness
def test_the_wheel_stands_alone_in_an_empty_directory(installed, tmp_path):
    """The installed package trains, compares and replays. The configuration and the model are in the wheel."""
    programs, clean = installed

    def rljax(*words):
        return run(programs / "rljax", *words, cwd=tmp_path, env=clean)

    small = ("--data.batch-size", 2, "--rollout.group-size", 4, "--packing.row-tokens", 64, "--eval.every", 0)
    rows = ("--packing.rows-per-micro-batch", 2, "--diagnosis.grad-noise-every", 0, "--run.steps", 2)
    rljax("train", "quickstart", *small, *rows, "--rollout.max-response-tokens", 12)
    log = tmp_path / "runs/quickstart/metrics.jsonl"
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2]
    assert "no surge in 2 steps" in rljax("replay", log)
    assert rljax("plot", log.parent).strip().endswith("report.png")
    assert "jax:bfloat16" in rljax("compare", "--toy", "--toy-prompts", 4, "--no-second-run")
    assert json.loads(rljax("evaluate", "--path", "runs/quickstart", "--n", 1).splitlines()[-1])["step"] == 2
    assert rljax("config", "--show", "rollout.group_size,model.path", "quickstart").split() == ["8", "configs/toy-base"]
    assert "wrote step 2" in rljax("export", "runs/quickstart", "exported")
