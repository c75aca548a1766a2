"""Trains a policy: ``rljax train CONFIG.yaml [--a.b value ...] [--dry-run]``.

The program builds a run from its configuration, goes on from a checkpoint if there is one, and calls the loop. SIGINT
or SIGTERM ends the run after the current step, and the state is saved. The step is given up if it waits for lost
servers, or would not end within ``run.grace_s``. The same command then goes on from there. A stop rule of the guard
ends a run with exit status 3. So do several skipped updates in a row whose gradients are not finite.

``--dry-run`` only prints the memory and the work of the run, from shapes. With it, ``--compile MACHINE`` compiles the
step for another machine (h100:1x8, tpu:v5p:2x2x4), ``--json FILE`` writes the results and ``--hlo FILE`` the compiled
program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljax.data.tokenizer import load_tokenizer
from rljax.distributed.acts import follow
from rljax.distributed.files import write_whole
from rljax.distributed.gpus import unused_gpus
from rljax.distributed.ownership import Ownership
from rljax.distributed.processes import Processes, start_processes
from rljax.errors import ConfigError, OwnedError, caller_errors, full_disk_errors, run_cli, writing
from rljax.plan.dry_run import check_shapes, dry_run, lacks_at_start
from rljax.policy.attention import find_implementation
from rljax.policy.attention_errors import why_no_trees
from rljax.policy.families import read_config
from rljax.policy.hub import model_directory
from rljax.policy.kernels import choose_kernels
from rljax.record.rows import format_summary, summarize
from rljax.record.trackers import Trackers
from rljax.record.writers import Recorder
from rljax.rollout.build import check_engine
from rljax.run.acts import join, make_shared_engine, restore
from rljax.run.after_save import AfterSave
from rljax.run.build import Inputs, load_problems, look_at_data
from rljax.run.config import Config
from rljax.run.config_file import config_to_yaml, dotted, load_config
from rljax.run.directory import check_new, check_owner, own_directory, prepare_directory, recorded_rows
from rljax.run.loop import train
from rljax.run.options import read_options
from rljax.run.packing import settle_prefixes
from rljax.run.stop import StopRequest
from rljax.run.training import check_offload
from rljax.sharding import make_mesh

log = logging.getLogger(__name__)

PROG = "rljax train"
COMMON_OPTIONS = (
    *("run.dir", "run.steps", "run.seed", "run.resume", "model.path", "data.task", "data.path", "data.reward"),
    *("data.batch_size", "data.max_prompt_tokens", "rollout.engine", "rollout.urls", "rollout.dtype"),
    *("rollout.group_size", "rollout.max_response_tokens", "rollout.temperature", "rollout.max_staleness"),
    "rollout.trajectories",
    *("precision.compute_dtype", "precision.remat", "packing.row_tokens", "packing.rows_per_micro_batch"),
    *("mesh.fsdp", "optimizer.learning_rate", "schedule.kind", "schedule.decay_period", "correction.preset"),
    *("lora.rank", "eval.every", "eval.datasets", "checkpoint.every"),
)
"""The options that most runs set, and that ``--help`` prints."""
GUARD_STATUS = 3


def main(argv: Sequence[str]) -> int:
    """Runs training; returns the exit status."""
    if os.getpid() == 1:  # the first process of a container, which SIGTERM does not end without a handler
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    words, options = own_options(argv)
    config = load_config(
        Config, words, prog=PROG, description=__doc__ or "", example="quickstart", common=COMMON_OPTIONS
    )
    run_dir = Path(config.run.dir)
    with caller_errors():
        check_engine(config.rollout)
        if options.dry_run:
            config.check_start()
            describe_run(config, options)
            return 0
        check_new(config)
    given = config.run
    with start_processes(given.processes, given.process_id, given.coordinator, stuck_s=given.stuck_s) as processes:
        with contextlib.ExitStack() as stack:
            if not processes.is_leader:  # it runs every act (joint operation) that process 0 announces
                stack.enter_context(processes.reported_signals())
                status = follow(processes, *join(processes, run_dir, lambda: read_inputs(config), stack))
            else:
                with caller_errors():
                    owner = stack.enter_context(own_directory(run_dir))
                    trackers = stack.enter_context(Trackers(config.record))
                status = run(config, owner, processes, trackers)
        processes.end(status)
        return status


@dataclass(frozen=True)
class Options:
    """The command-line options that are not part of the configuration."""

    dry_run: bool = False
    """Whether to print the memory and the work that the run would take, and not to train."""
    compile: str | None = None
    """The machine to compile the step for, such as h100:1x8; None: the step is not compiled."""
    json: str | None = None
    """The file for the results of ``compile``; None: no file."""
    hlo: str | None = None
    """The file for the compiled program; None: no file."""


def own_options(argv: Sequence[str]) -> tuple[list[str], Options]:
    """Splits a command line into the words of the configuration and the options of this program.

    Raises ConfigError if an option lacks its value, or needs another option that is not given.
    """
    found, words = read_options(Options, argv)
    options = Options(**found)
    if options.compile and not options.dry_run:
        raise ConfigError("--compile goes with --dry-run")
    if (options.json or options.hlo) and not options.compile:
        raise ConfigError("--json and --hlo go with --compile")
    return words, options


def describe_run(config: Config, options: Options) -> None:
    """Prints the dry run and, with ``--compile``, the memory and the work of the compiled step.

    Raises OSError or ValueError if a file cannot be written, or the configuration does not fit model or machine.
    """
    if options.compile is None:
        print(dry_run(config))
        return
    from rljax.plan.compile import compile_step, describe, parse_machine, report  # only ``--compile`` needs them

    compiled = compile_step(config, parse_machine(options.compile))
    if options.hlo:
        Path(options.hlo).write_text(compiled.text)
    found = report(compiled)
    print(dry_run(compiled.config, compiled.machine.card))
    print(describe(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


def read_inputs(config: Config) -> Inputs:
    """Reads the inputs of a run: configuration, shape of the policy, tokenizer and mesh. It logs what may be wrong.

    Raises ConfigError if the model cannot be read, or if model, tokenizer and devices do not fit together.
    """
    with caller_errors():
        model = dataclasses.replace(config.model, path=model_directory(config.model.path))
        config = dataclasses.replace(config, model=model)
        policy = read_config(config.model.path)
        tokenizer = load_tokenizer(config.model.path)
        mesh = make_mesh(config.mesh)
        if line := unused_gpus(sum(device.platform == "gpu" for device in mesh.local_devices)):
            log.warning(line)
        if len(tokenizer) > policy.vocab_size:
            sizes = f"the tokenizer has {len(tokenizer)} tokens, the model only {policy.vocab_size}"
            raise ConfigError(f"{config.model.path}: {sizes}")
        here = (config.policy.attention, mesh.local_devices[0], config.precision.compute_dtype)
        config = settle_prefixes(config, policy, lambda: why_no_trees(*here, policy))
        check_shapes(config, policy, mesh)
        check_offload(config, mesh)
        for line in lacks_at_start(config, policy, mesh):
            log.warning(line)
        _, device, dtype = here
        if device.platform == "gpu" and find_implementation(*here, policy.head_dim) == "xla":
            log.warning("attention is XLA's on %s, several times slower than cuDNN's kernel", device.device_kind)
        # This call refuses kernels that the devices lack.
        choose_kernels(config.policy, policy, dtype, mesh)
    return Inputs(config, policy, tokenizer, mesh)


def run(config: Config, owner: Ownership, processes: Processes, trackers: Trackers) -> int:
    """Trains as process 0, which owns the run directory, and starts the trackers; returns the exit status."""
    run_dir = Path(config.run.dir)
    inputs = read_inputs(config)
    config = inputs.config
    stop = StopRequest(config.run.grace_s, processes)
    with caller_errors():
        problems = load_problems(config, inputs.tokenizer)
        prepare_directory(config, run_dir)
        looked = look_at_data(config, problems)
        engine = make_shared_engine(inputs, stop, processes, problems.prompts)
    with full_disk_errors(), contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        parts, state, progress = restore(processes, inputs, engine, problems, stop, stack)
        with caller_errors(RuntimeError):  # the rows before the next step are damaged or gone
            recorder = Recorder(run_dir, config.run.steps, first_step=progress.step + 1, compiles=True, more=[trackers])
        stack.callback(recorder.close)
        # When the run is continued, its settings are compared with this file.
        write_whole(run_dir / "config.yaml", config_to_yaml(config))
        trackers.start(run_dir, *settings_of(config), stop.left_s)
        if looked:
            write_whole(run_dir / "data.txt", looked + "\n")
        parts.check_owner = functools.partial(check_owner, owner)
        with caller_errors():
            command = config.checkpoint.after_save
            after_save = AfterSave(command, run_dir, config.run.grace_s, parts.check_owner, stop)
        with stop, after_save:
            rows = recorded_rows(run_dir)
            parts.watch.read(rows, config.run.fork_step)
            parts.word.read(rows)
            del rows[:-1]  # a long run has many
            try:
                train(parts, state, progress, recorder, rows[-1] if rows else None)
                parts.check_owner()
                recorder.sync()
            except OwnedError as error:
                raise ConfigError(error) from error
    with full_disk_errors(), writing(run_dir):
        finish(run_dir)
    for line in progress.stopped_by:
        print(f"guard: {line}; stopped, saved", file=sys.stderr)
    if progress.stopped_by:
        return GUARD_STATUS
    if stop.signal is not None:
        done = f"stopped after step {progress.step}, saved" if progress.step else "stopped before the first step"
        print(f"{done}; the same command goes on from there", file=sys.stderr)
        return 128 + stop.signal
    return 0


def settings_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings twice: as nested dictionaries, and as one flat dictionary by dotted key."""
    values = dataclasses.asdict(config)
    return values, {key: value for key, value in dotted(values) if not isinstance(value, dict)}


def finish(run_dir: Path) -> None:
    """Writes summary.json and report.png and prints the summary. Does nothing if no row was recorded."""
    from rljax.record.figure import plot_report  # matplotlib, which only the end needs

    rows = recorded_rows(run_dir)
    if not rows:
        return
    summary = summarize(rows)
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    plot_report([run_dir], run_dir / "report.png")
    print(format_summary(summary))
    print(json.dumps({"run_dir": str(run_dir), "report": str(run_dir / "report.png")}))


if __name__ == "__main__":
    sys.exit(run_cli(main))
