"""Sound inputs, from which malformed ones begin.

They are a tiny policy of each family, adapters, and a run with three checkpoints. The state of the run is saved as the
training loop saves it. The steps between the checkpoints are made by hand, without sampling or training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rljax.data.tokenizer import load_tokenizer
from rljax.errors import ConfigError, caller_errors
from rljax.policy.config import PolicyConfig
from rljax.policy.families import read_config
from rljax.policy.hf import save_params
from rljax.policy.lora import LoraConfig, init_adapters
from rljax.policy.model import init_params
from rljax.policy.peft import CONFIG_NAME, WEIGHTS_NAME, save_adapters
from rljax.run.build import Inputs, build, load_problems, make_run_engine, starting_point
from rljax.run.checkpoint import Checkpointer
from rljax.run.config import Config
from rljax.run.config_file import load_config
from rljax.run.directory import prepare_directory
from rljax.run.fingerprint import array_checksums
from rljax.run.step import RunParts
from rljax.run.stop import StopRequest
from rljax.sharding import make_mesh

ROOT = Path(__file__).resolve().parents[2]
SHAPE: dict[str, Any] = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
SHAPE |= {"num_kv_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
POLICIES = {
    "qwen3": PolicyConfig(**SHAPE),
    "qwen2": PolicyConfig(**SHAPE, family="qwen2"),
    "qwen3_moe": PolicyConfig(**SHAPE, family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=8),
}
LORA = LoraConfig(rank=2, targets=("q_proj", "o_proj"))
RUN = "run"
STEPS = (1, 2, 3)
WORDS = (
    *(str(ROOT / "configs" / "quickstart.yaml"), "--model.path", str(ROOT / "configs" / "toy-base"), "--run.dir", RUN),
    *("--run.steps", str(STEPS[-1]), "--data.batch-size", "2", "--rollout.group-size", "2", "--eval.every", "0"),
)


@functools.cache
def sound_model(family: str) -> tuple[dict[str, Any], bytes]:
    """Returns config.json and model.safetensors of a tiny policy."""
    config = POLICIES[family]
    with tempfile.TemporaryDirectory() as made:
        save_params(made, init_params(config, 0), config)
        return _read(Path(made), "config.json", "model.safetensors")


@functools.cache
def sound_adapters() -> tuple[dict[str, Any], bytes]:
    """Returns adapter_config.json and adapter_model.safetensors."""
    config = POLICIES["qwen3"]
    with tempfile.TemporaryDirectory() as made:
        save_adapters(made, init_adapters(config, LORA, 0), config, LORA, "model")
        return _read(Path(made), CONFIG_NAME, WEIGHTS_NAME)


def _read(folder: Path, config: str, weights: str) -> tuple[dict[str, Any], bytes]:
    return json.loads((folder / config).read_text()), (folder / weights).read_bytes()


class SoundRun(NamedTuple):
    """The files that a run left, and the states that it saved."""

    files: dict[str, bytes]  # content by path in the run directory
    arrays: dict[int, dict[str, str]]  # checksums of the device state by step
    hosts: dict[int, dict[str, Any]]  # host state by step


@functools.cache
def _make() -> Any:
    """Returns a function from a checkpointer to the components of the run, and the mesh."""
    config = load_config(Config, list(WORDS), prog="sound_run", description="")
    policy, tokenizer = read_config(config.model.path), load_tokenizer(config.model.path)
    mesh = make_mesh(config.mesh)
    problems = load_problems(config, tokenizer)
    inputs = Inputs(config, policy, tokenizer, mesh)
    engine = make_run_engine(inputs, StopRequest(config.run.grace_s))
    return functools.partial(build, inputs, engine, problems=problems), mesh


@functools.cache
def sound_run() -> SoundRun:
    """Makes the run, once."""
    make, mesh = _make()
    arrays, hosts = {}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        directory = Path(folder)
        with contextlib.closing(Checkpointer(directory / "checkpoints", keep=len(STEPS))) as checkpointer:
            run = make(checkpointer=checkpointer)
            state, progress = starting_point(run, mesh)
            for step in STEPS:
                make.keywords["problems"].stream.take()
                run.controller.step(10.0 + step, 0.0)
                progress = dataclasses.replace(progress, step=step, policy_version=step, grad_norm_ema=0.5 * step)
                state = jax.tree.map(lambda x: x + jnp.ones_like(x), state)
                arrays[step], hosts[step] = array_checksums(state), run.state_dict(progress)
                checkpointer.save(step, state, hosts[step])
        files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    rows = "".join(json.dumps({"step": step, "time/step_s": 0.1}) + "\n" for step in STEPS)
    return SoundRun(dict(sorted(files.items())) | {"metrics.jsonl": rows.encode()}, arrays, hosts)


def go_on(words: Sequence[str]) -> int:
    """Resumes in the run directory ``words[0]`` as training does, up to the first step.

    Raises:
      ConfigError: The run is refused.
      AssertionError: If other values were restored than saved, a file is gone, a checkpoint was moved without a
      message, or a whole checkpoint was passed over.
    """
    run_dir, said = Path(words[0]), io.StringIO()
    make, mesh = _make()
    before = _files(run_dir)
    try:
        with contextlib.redirect_stderr(said), contextlib.ExitStack() as stack:
            with caller_errors():
                prepare_directory(make.args[0].config, run_dir)
                checkpointer = Checkpointer(run_dir / "checkpoints", keep=99)
            stack.callback(checkpointer.close)
            run = make(checkpointer=checkpointer)
            stack.callback(run.source.close)
            state, progress = starting_point(run, mesh)
            checkpointer.last_save_s()
            _check_restored(run, state, progress)
            _check_files(before, _files(run_dir), progress.step, said.getvalue())
            following = dataclasses.replace(progress, step=progress.step + 1)
            checkpointer.save(following.step, state, run.state_dict(following))
            checkpointer.wait()
            assert following.step in checkpointer.all_steps(), f"step {following.step} was not saved"
    except ConfigError:
        after = _files(run_dir)
        changed = [name for name in before if after.get(name) != before[name]]
        assert not changed, f"changed by a run that was refused: {changed}"
        raise
    finally:
        print(said.getvalue(), file=sys.stderr, end="")
    return 0


def _check_restored(run: RunParts, state: Any, progress: Any) -> None:
    """Checks that one of the saved states was restored completely."""
    sound, step = sound_run(), progress.step
    assert step in STEPS, f"begun anew at step {step}"
    assert array_checksums(state) == sound.arrays[step], f"other arrays than those of step {step}"
    assert run.state_dict(progress) == sound.hosts[step], f"another host state than that of step {step}"


def _check_files(before: dict[str, str], after: dict[str, str], step: int, said: str) -> None:
    """Checks that nothing is gone, moved files are named, and no whole checkpoint was passed over."""
    for name in (name for name, content in before.items() if after.get(name) != content):
        aside, folder = name.replace("checkpoints/", "damaged/", 1), name.removeprefix("checkpoints/").split("/")[0]
        assert after.get(aside) == before[name], f"{name} is gone"
        line = next((line for line in said.splitlines() if f"checkpoint {folder} in " in line), "")
        named = line.startswith("warning: ") and " is damaged: " in line and line.endswith(f"damaged/{folder}")
        assert named, f"moved without a word: {folder}: {line}"
    assert step >= max(_whole(before), default=0), f"step {step} restored, though {_whole(before)} are whole"


def _whole(found: dict[str, str]) -> list[int]:
    """Returns the steps of the checkpoints whose files are all as they were saved."""
    sums = {name: hashlib.sha1(content).hexdigest() for name, content in sound_run().files.items()}
    names = {step: [name for name in sums if name.startswith(f"checkpoints/{step}/")] for step in STEPS}
    return [step for step in STEPS if all(found.get(name) == sums[name] for name in names[step])]


def _files(folder: Path) -> dict[str, str]:
    """Returns the content of each path, without folders and the remains of an interrupted save."""
    paths = [path for path in sorted(folder.rglob("*")) if "orbax-checkpoint-tmp" not in str(path)]
    linked = {str(path.relative_to(folder)): f"link to {path.readlink()}" for path in paths if path.is_symlink()}
    plain = [path for path in paths if path.is_file() and not path.is_symlink()]
    return linked | {str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest() for path in plain}
