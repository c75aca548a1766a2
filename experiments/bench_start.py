"""Measures where the time from a run's start to the end of its first step goes, with a warm compilation cache.

    python experiments/bench_start.py --json benchmarks/start.json

The policy has Qwen3-0.6B's shape, random weights and the toy's tokenizer; ``--layers`` makes it smaller. The embedded
engine samples 2 x 2 responses of 16 tokens in bfloat16, in rows of 64 tokens. The same command runs twice, each time in
a new process and a new run directory. The first run fills the compilation cache, and the second is measured. The run
takes 20 bytes a parameter. Prints a Markdown table.
"""

from __future__ import annotations

import time

BEGAN, BEGAN_AT = time.perf_counter(), time.time()  # before the imports, whose time is measured, too

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import shlex  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "rljax" / "configs" / "toy-base"
MODEL = "Qwen/Qwen3-0.6B"
SETTINGS = {
    **{"run.steps": "1", "data.batch-size": "2", "rollout.group-size": "2", "rollout.max-response-tokens": "16"},
    **{"rollout.dtype": "bfloat16", "precision.compute-dtype": "bfloat16", "precision.remat": "blocks"},
    **{"packing.row-tokens": "64", "packing.rows-per-micro-batch": "4", "eval.every": "0", "checkpoint.every": "0"},
}
PARTS = {
    "read_inputs": "configuration, tokenizer, mesh",
    "load_problems": "problems",
    "make_shared_engine": "engine",
    "starting_state": "weights read, state made",
    "build": "parts of the run",
    "publish": "first publish",
    "one_step": "first step",
}
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiled, or loaded from the cache",
    "/jax/compilation_cache/cache_retrieval_time_sec": "of it loaded from the cache",
}


def make_model(directory: Path, layers: int) -> None:
    """Writes random weights of the model's shape."""
    from rljax.policy.hf import save_params
    from rljax.policy.hub import KNOWN_SHAPES
    from rljax.policy.model import init_params

    eos = json.loads((TOY / "config.json").read_text())["eos_token_id"]
    shape = dataclasses.replace(KNOWN_SHAPES[MODEL], eos_token_id=eos, bos_token_id=None)
    shape = dataclasses.replace(shape, num_layers=layers or shape.num_layers)
    save_params(directory, init_params(shape, 0), shape, "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TOY / name, directory / name)


def timed_run(directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """Runs one step into the directory in this process, and returns the seconds of each part and of JAX's work."""
    import jax

    import rljax.run.acts
    import rljax.run.loop
    import rljax.train

    times = {"imports": time.perf_counter() - BEGAN}
    work: Counter[str] = Counter()
    programs: Counter[str] = Counter()

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event in EVENTS:
            work[EVENTS[event]] += seconds  # type: ignore[assignment]
            programs[EVENTS[event]] += 1

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                times[PARTS[name]] = times.get(PARTS[name], 0.0) + time.perf_counter() - began

        return timed

    jax.monitoring.register_event_duration_secs_listener(listen)
    for module in (rljax.train, rljax.run.acts, rljax.run.loop, rljax.run.build):
        for name in PARTS:
            if hasattr(module, name):
                setattr(module, name, timing(name, getattr(module, name)))
    made = rljax.train.make_shared_engine

    def make_engine(*arguments: Any) -> Any:
        engine = made(*arguments)
        engine.publish = timing("publish", engine.publish)
        return engine

    rljax.train.make_shared_engine = make_engine
    status = rljax.train.main(words)
    times["to the first row"] = (directory / "metrics.jsonl").stat().st_mtime - BEGAN_AT
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"status": status, "seconds": times, "jax": work, "programs": programs, "peak_bytes": peak}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=0, help="layers of the policy; 0: as many as the model has")
    parser.add_argument("--directory", type=Path, help="a directory to keep model and cache in, and to use again")
    parser.add_argument("--runs", type=int, default=2, help="runs; the last one is shown")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="JSON file for the result")
    options = parser.parse_args(arguments)
    if options.child is not None:
        written, directory, *words = options.child
        found = timed_run(Path(directory), words)
        Path(written).write_text(json.dumps(found))
        return int(found["status"])
    with tempfile.TemporaryDirectory() as name:
        directory = options.directory or Path(name)
        if not (directory / "model/config.json").exists():
            code = (
                "import bench_start, pathlib, sys; bench_start.make_model(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
            )
            made = [sys.executable, "-c", code, str(directory / "model"), str(options.layers)]
            subprocess.run(made, cwd=Path(__file__).parent, check=True)
        cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "cache")}
        for number in range(options.runs):
            settings = SETTINGS | {"model.path": str(directory / "model"), "run.dir": f"{name}/run{number}"}
            words = [word for key, value in settings.items() for word in (f"--{key}", value)]
            child = [
                sys.executable,
                __file__,
                "--child",
                f"{name}/found.json",
                f"{name}/run{number}",
                "quickstart",
                *words,
            ]
            subprocess.run(child, env=os.environ | cache, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(Path(name, "found.json").read_text())
    print("| part | seconds |\n|---|---|")
    for part, seconds in (*found["seconds"].items(), *found["jax"].items()):
        print(f"| {part} | {seconds:.2f} |")
    print(f"\npeak {found['peak_bytes'] / 2**30:.1f} GiB, programs: {found['programs']}")
    if options.json:
        result = {"command": shlex.join(["python", *sys.argv])} | found
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
