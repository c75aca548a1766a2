"""The first runs of five pages are typed unchanged into one shell each.

Stand-ins take the place of commands that need a GPU, a cluster or the hub.
"""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from programs import program
from toy_runs import ROOT

from rljax import cli

NAMES = ("walkthroughs/one_gpu", "walkthroughs/one_machine", "slurm", "kubernetes", "tpu")
PAGES = [ROOT / f"docs/{name}.md" for name in NAMES]
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
# Each command of a page needs a rule: it runs unchanged, or a stand-in takes its place and records its arguments.
AS_IT_STANDS = {"cd", "cp", "sed", "df", "export", "python3", "gcc", "install", "openssl"}
STAND_INS = {
    "git": 'if [ "$1" = clone ]; then cp -r "$CHECKOUT" "$3"; else exec "$REAL_GIT" "$@"; fi',
    "nvidia-smi": 'case "$*" in -L*) echo "GPU 0: H100" ;; *) echo 580.65.06 ;; esac',
    "gcc": "true",
    "gcloud": 'case "$*" in *describe*) echo 1 ;; esac',  # a slice has one host
    "kubectl": """for word; do case "$word" in *.yaml) [ -f "$word" ] ;; esac || exit 1; done
        case "$*" in *"--filename -") cat >> "$RECORD.manifests"; echo --- >> "$RECORD.manifests" ;; esac""",
    "docker": """[ "$1" != build ] || {
        while [ "$1" != --file ]; do shift; done; tar -t | grep -x "$2" > "$RECORD.found"; }""",
    "squeue": "true",
    "scancel": "true",
    "hf": '[ "$1" = download ]',
    "rljax": 'case "$*" in *--dry-run*) exec "$PYTHON" -m rljax.cli "$@" ;; esac',
}
# A dry run with the same arguments is made once. A script without a dry run must have each option in its text.
SESSION = """
set -euo pipefail
plan() {
  local words=() word
  for word; do [ "$word" = --dry-run ] || words+=("$word"); done
  grep -qxF "${words[*]}" "$RECORD.planned" && return
  echo "${words[*]}" >> "$RECORD.planned"
  command bash "${words[0]}" --dry-run "${words[@]:1}"
}
bash() {
  local word help
  case "$1" in
    launch/dapo.sh | launch/paper_*.sbatch | launch/single_node.sh) plan "$@" ;;
    -c | launch/install_vllm.sh | launch/tpu.sh | launch/kubernetes/run.sh) command bash "$@" ;;
    launch/check_accelerator.sh | tools/test_images.sh)
      command bash -n "$1"
      for word in "${@:2}"; do grep -q -- "$word" "$1"; done
      ;;
    *) echo "no rule for bash $*" >&2; return 1 ;;
  esac
}
sbatch() {
  while [[ "$1" == -* ]]; do shift; done
  plan "$@"
}
tail() {
  case "${@: -1}" in runs/paper/qwen3_4b_length_triggered* | runs/one_gpu* | slurm-17.log) ;; *) return 1 ;; esac
}
"""
FUNCTIONS = {"bash", "sbatch", "tail"}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def first_words(script):
    """Returns the names of the commands of a script, without the functions that the script defines."""
    script = re.sub(r"<<(\w+)\n.*?^\1$", "", script.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
    lexer = shlex.shlex(script.replace("\n", " ;\n"), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found, defined, begins = [], set(), True
    for word in lexer:
        if word == "()":
            defined.add(found.pop())
            begins = True
        elif word in {"{", "}"} or re.fullmatch(r"[;&|]+", word):
            begins = True
        elif begins and not re.match(r"\w+=", word):
            found.append(word)
            begins = False
    return [word for word in found if word not in defined]


def uncovered(script):
    return {Path(word).name for word in first_words(script)} - AS_IT_STANDS - set(STAND_INS) - FUNCTIONS


def make_checkout(place):
    """Creates a checkout whose environments look installed to the launch scripts."""
    for name in ("launch", "tools"):
        shutil.copytree(ROOT / name, place / name)
    for name in ("configs", "rljax", "pyproject.toml", ".git"):
        (place / name).symlink_to(ROOT / name)
    trainer = place / ".venv-gpu"
    program(trainer / "bin/python", f'exec {sys.executable} "$@"')
    for name in ("hf", "rljax"):
        program(trainer / "bin" / name, f'exec {name} "$@"')
    done = subprocess.run(["cksum"], input=(ROOT / "pyproject.toml").read_bytes(), capture_output=True, check=True)
    (trainer / f".rljax-gpu-{done.stdout.split()[0].decode()}").touch()
    # This interpreter accepts no -m, so pip installs nothing. It finds Python.h on every machine.
    program(place / "include/Python.h", "")
    header = f'case "$*" in *get_path*) echo {place}/include; exit ;; esac'
    program(place / ".venv-vllm/bin/python", f'{header}\n[ "$1" = -m ] || exec {sys.executable} "$@"')
    (place / ".venv-vllm/.rljax-vllm").write_text("vllm>=0.32,<0.33\n")


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Returns a function that types all blocks of a page once; it returns the output, the calls and the manifests."""

    @functools.cache
    def typing(page):
        place = tmp_path_factory.mktemp(page)
        make_checkout(place / "checkout")
        record, home = place / "record", place / "home"
        home.mkdir()
        for name in (record, Path(f"{record}.planned"), Path(f"{record}.manifests")):
            name.touch()
        for name, text in STAND_INS.items():
            program(place / "bin" / name, f'printf "%q " {name} "$@" >> "$RECORD"; echo >> "$RECORD"\n{text}')
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLJAX_", "SLURM_"))}
        kept |= {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "PYTHON": sys.executable}
        kept |= {"CHECKOUT": str(place / "checkout"), "RECORD": str(record), "REAL_GIT": shutil.which("git") or "git"}
        kept |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = ["bash", "-c", SESSION + "\n".join(blocks(TEXTS[page], "bash"))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=home, env=kept, timeout=300, **pipes)
        printed = done.stdout.replace(str(home / "rljax"), "CHECKOUT")
        assert done.returncode == 0, printed
        return printed, record.read_text(), Path(f"{record}.manifests").read_text()

    return typing


def test_every_command_has_a_rule():
    for text in TEXTS.values():
        assert uncovered("\n".join(blocks(text, "bash"))) == set()
    script = "A=1 curl x | cd y && f 'a; b' \\\n  wget\nf() { nmap; }\ncat - <<END\nssh\nEND\n"
    assert first_words(script) == ["curl", "cd", "nmap", "cat"]
    assert uncovered(script) == {"curl", "nmap", "cat"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.harness] * (page in ("one_gpu", "slurm", "tpu"))) for page in TEXTS]
)
def test_a_page_is_typed_and_prints_what_it_shows(page, typed):
    printed = typed(page)[0].splitlines()
    shown = [line for block in blocks(TEXTS[page], "text") for line in block.splitlines() if line]
    assert [line for line in shown if line not in printed] == []


@pytest.mark.slow
def test_the_objects_of_the_kubernetes_page_are_there(typed):
    """Everything that the page deletes must be created before under this name, by a file or on the page."""
    _, words, manifests = typed("kubernetes")
    files = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "launch/kubernetes").rglob("*.yaml"))]
    objects = [one for text in [manifests, *files] for one in yaml.safe_load_all(text) if one and "kind" in one]
    names = {(one["kind"].lower(), one.get("metadata", {}).get("name")) for one in objects}
    deleted = re.findall(r" delete (\w+) (\w+)", words)
    assert len(deleted) == 3
    assert set(deleted) < names


def test_the_options_of_rljax_prepare_are_there(capsys):
    lines = [line for text in TEXTS.values() for line in re.findall(r"rljax prepare (.*)", text)]
    used = {option for line in lines for option in re.findall(r"--[a-z][\w-]*", line)}
    with pytest.raises(SystemExit) as ended:
        cli.main(["prepare", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert used == {"--model", "--max-prompt-tokens"}
    assert [option for option in used if option not in told] == []
