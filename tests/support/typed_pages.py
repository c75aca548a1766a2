"""Types the bash blocks of a walk-through page into one shell.

Stand-ins take the place of commands that need a GPU, a cluster or the hub.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from programs import program

ROOT = Path(__file__).parents[2]

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
    """Returns the contents of the fenced blocks of one language."""
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
    """Returns the commands of a script that have no rule."""
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
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    done = subprocess.run(["cksum"], input=pyproject, capture_output=True, check=True, timeout=30)
    (trainer / f".rljax-gpu-{done.stdout.split()[0].decode()}").touch()
    # This interpreter accepts no -m, so pip installs nothing. It finds Python.h on every machine.
    program(place / "include/Python.h", "")
    header = f'case "$*" in *get_path*) echo {place}/include; exit ;; esac'
    program(place / ".venv-vllm/bin/python", f'{header}\n[ "$1" = -m ] || exec {sys.executable} "$@"')
    (place / ".venv-vllm/.rljax-vllm").write_text("vllm>=0.32,<0.33\n")


def type_page(text, place):
    """Types all blocks of a page in order; returns (status, output, the arguments of the stand-ins)."""
    make_checkout(place / "checkout")
    record = place / "record"
    for name in (record, Path(f"{record}.planned"), Path(f"{record}.manifests")):
        name.touch()
    for name, body in STAND_INS.items():
        program(place / "bin" / name, f'printf "%q " {name} "$@" >> "$RECORD"; echo >> "$RECORD"\n{body}')
    home = place / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RLJAX_", "SLURM_"))}
    variables = {
        **{"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "PYTHON": sys.executable},
        **{"CHECKOUT": str(place / "checkout"), "RECORD": str(record), "REAL_GIT": shutil.which("git") or "git"},
        **{"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    }
    done = subprocess.run(
        ["bash", "-c", SESSION + "\n".join(blocks(text, "bash"))],
        cwd=home,
        env=kept | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout.replace(str(home / "rljax"), "CHECKOUT"), record.read_text()
