"""Measures on one NVIDIA GPU what rljax states without one, within nine minutes and without a network.

    python tools/first_gpu.py --fetch .whl                     # where a package index is: fetches the wheels
    bash tools/first_gpu.sh --json "${OUT:-.}/first_gpu.json"  # on the GPU machine, which has torch and JAX for CUDA
    python tools/first_gpu.py --tiny --json tiny.json          # tiny shapes on a CPU; their speeds mean nothing

Each section is a process of its own with a deadline. The sections run in the order of their value. The JSON file is
written again after each section, so a program that is killed leaves what it measured. A section that this machine
cannot run says why; that is not an error. ``--model DIR`` compares engines on real weights instead of random ones.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sections import ROOT, Found, Section, run_sections, seconds_of, section_options, yield_to

from rljax.distributed.files import memory_directory
from rljax.errors import run_cli

TOY = ROOT / "configs/toy-base"
MODEL = "Qwen/Qwen3-0.6B"
DTYPES = ("bfloat16", "float16")
GIB = 2**30
NEEDED = (  # packages of rljax[train] that a machine with torch and JAX for CUDA often lacks
    *("pydantic>=2.12,<3", "msgspec>=0.19,<1", "zstandard>=0.23,<1", "tensorboardX>=2.6.4,<3"),
    *("grain>=0.2.18,<0.3", "math-verify>=0.9,<0.10", "starlette>=0.46,<2", "uvicorn>=0.30,<1"),
)
PRESENT = frozenset(  # packages that such a machine has, although one of NEEDED depends on them
    [
        *("absl_py", "anyio", "click", "cloudpickle", "etils", "fsspec", "h11", "idna", "markdown_it_py", "mdurl"),
        *("mpmath", "numpy", "packaging", "protobuf", "pygments", "rich", "sympy", "zipp"),
    ]
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class Size(NamedTuple):
    """The sizes of all sections."""

    tiny: bool
    pinned_bytes: int  # the size of one array in pinned host memory
    row_tokens: int  # the tokens of a row of the measured attention
    repeats: int  # the repetitions of a timed kernel
    steps: int  # the timed steps of a training step
    sequences: int  # the sequences that are scored by several engines
    length: int  # the tokens of each of them
    new_tokens: int  # the tokens of a sampled response
    places: tuple[int, ...]  # the numbers of responses that are decoded together


FULL = Size(False, 18 * GIB, 9216, 5, 4, 8, 256, 256, (8, 64, 256))
TINY = Size(True, 2**20, 1152, 2, 1, 2, 24, 8, (2, 4))


def policy_of(size: Size) -> Any:
    """Returns the shape of Qwen3-0.6B, or a tiny one."""
    from rljax.commands import check
    from rljax.policy.hub import KNOWN_SHAPES

    return check.TINY if size.tiny else KNOWN_SHAPES[MODEL]


def versions(size: Size, model: Path | None) -> Found:
    """Says what the machine is: devices, driver, packages, and what rljax misses."""
    import jax

    from rljax.commands.check_device import nvidia_smi

    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "torch", "transformers", "numpy", "triton")
    here = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            here[name] = importlib.metadata.version(name)
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": nvidia_smi("name,driver_version,memory.total"),
        "device": {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count()},
        "device_memory": (device.memory_stats() or {}).get("bytes_limit"),
        "packages": here,
        "shm_bytes_free": shutil.disk_usage(memory_directory()).free,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))},
    }


def pinned(size: Size, model: Path | None) -> Found:
    """Fills pinned host memory with up to four arrays, and says how much XLA gave."""
    import jax
    import jax.numpy as jnp

    from rljax.sharding import HOST_MEMORY

    device = jax.devices()[0]
    if HOST_MEMORY not in {memory.kind for memory in device.addressable_memories()}:
        return {"skipped": f"the device has no {HOST_MEMORY}"}
    where = jax.sharding.SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    on_device = jnp.ones(size.pinned_bytes // 4, jnp.float32)
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    kept, found = [], {"array_bytes": size.pinned_bytes, "arrays": 0, "allocator": allocator}
    for _ in range(4):
        try:
            took, array = seconds_of(lambda: jax.device_put(on_device, where))
        except jax.errors.JaxRuntimeError as error:
            return found | {"limit_reached": str(error)[:300]}
        kept.append(array)
        found |= {"arrays": len(kept), "last_bytes_per_s": size.pinned_bytes / took}
        print(json.dumps(found), flush=True)
    return found


def kernels(size: Size, model: Path | None) -> Found:
    """Measures attention, also of trees, and the head against float32; looks for leaks between packed sequences."""
    import jax

    from rljax.commands import check_device as check
    from rljax.policy.attention_errors import why_no_trees
    from rljax.policy.head import MAX_CHUNK

    policy, found = policy_of(size), {}

    def trees(dtype: str) -> Found:
        fault = why_no_trees("auto", jax.devices()[0], dtype, policy)
        return {"problems": [fault] if fault else []}

    for dtype in DTYPES:
        for name in ("auto", "xla"):
            given = (name, size.row_tokens, dtype, policy, size.repeats)
            yield_to(found, f"attention {name} {dtype}", check.check_attention, *given)
        yield_to(found, f"trees {dtype}", trees, dtype)
        rows, chunk = (64, 128) if size.tiny else (2048, MAX_CHUNK)
        yield_to(found, f"head {dtype}", check.check_head, rows, dtype, policy, size.repeats, chunk)
    return found


def step(size: Size, model: Path | None, *, dtype: str, remat: str) -> Found:
    """Compiles and times a training step; compares the planned, compiled and used memory."""
    import jax

    from rljax.commands import check_device as check
    from rljax.plan.compile import memory_by_kind
    from rljax.run.training import make_step
    from rljax.sharding import make_mesh

    policy, shape, found = policy_of(size), check.TINY if size.tiny else check.StepSize(), {}

    def compilation() -> Found:
        config = check.step_config(shape, dtype, remat)
        took, program = seconds_of(lambda: make_step(config, policy, make_mesh(config.mesh)).lower().compile())
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # some programs from the cache have no analysis
            return {"seconds": took, "bytes": memory_by_kind(program.memory_analysis())}
        return {"seconds": took}

    yield_to(found, "compilation", compilation)  # the check after it takes the program from the cache
    yield_to(found, "step", check.check_step, MODEL, policy, dtype, size.steps, shape, remat)
    return found


def roomy_directory(version_bytes: int) -> Path:
    """Returns this machine's memory, or the temporary directory if the memory has too little room for publishing."""
    memory = memory_directory()
    return memory if shutil.disk_usage(memory).free > 3 * version_bytes else Path(tempfile.gettempdir())


def publish(size: Size, model: Path | None) -> Found:
    """Times the parts of a publish: transposition, copy, files, checksums; then offload and a checkpoint."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from rljax.commands import check_device as check
    from rljax.policy.hf import hf_tensors
    from rljax.policy.published import hf_checksums
    from rljax.run.checkpoint import Checkpointer
    from rljax.sharding import has_host_memory, make_mesh, on_devices, on_host
    from rljax.weights.publish_config import PublishConfig
    from rljax.weights.store import WeightDirectory

    policy, dtype = policy_of(size), jnp.bfloat16
    mesh = make_mesh(check.Config().mesh)
    state = check.random_state(check.step_config(check.TINY, "bfloat16", "none"), policy, mesh)
    size_bytes = sum(leaf.size for leaf in jax.tree.leaves(state.params)) * 2
    directory = roomy_directory(size_bytes)
    found: Found = {"directory": str(directory)}

    def rate(run: Callable[[], Any]) -> Found:
        run()  # compiles
        return {"bytes": size_bytes, "bytes_per_s": size_bytes / seconds_of(run)[0]}

    def write_alone() -> None:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            for number, array in enumerate(tensors):
                array.tofile(f"{folder}/{number}")

    def published(store: str) -> Found:
        newer = jax.tree.map(lambda leaf: leaf * (1 + 2**-12), state.params)  # other bits in one number of twenty
        with contextlib.closing(WeightDirectory(PublishConfig(store=store), directory)) as versions:
            for number, params in enumerate((state.params, newer)):
                sums = hf_checksums(params, policy, dtype)
                began = time.perf_counter()
                version = versions.write(hf_tensors(params, policy, dtype), number, sums)
                versions.drop_old()
                took = time.perf_counter() - began
        change = {"bytes_for_servers": version.num_bytes, "share_changed": version.changed_fraction}
        return {"bytes": size_bytes, "bytes_per_s": size_bytes / took} | change

    def offload() -> Found:
        nonlocal state
        took, state = seconds_of(lambda: on_host(state))
        back, state = seconds_of(lambda: on_devices(state))
        return {"bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "away_s": took, "back_s": back}

    def checkpoint() -> Found:
        with tempfile.TemporaryDirectory() as folder, contextlib.closing(Checkpointer(folder)) as checkpoints:
            began = time.perf_counter()
            checkpoints.save(1, state, {"step": 1})
            stall = time.perf_counter() - began
            checkpoints.wait()
            return {"stall_s": stall, "complete_s": time.perf_counter() - began}

    cast = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), params))
    yield_to(found, "cast on the device", rate, lambda: cast(state.params))
    yield_to(found, "copy to the host", rate, lambda: jax.device_get(cast(state.params)))
    on_the_way = functools.partial(hf_tensors, config=policy, dtype=dtype)
    yield_to(found, "tensors of the files on the host", rate, lambda: [None for _ in on_the_way(state.params)])
    yield_to(found, "checksums", rate, lambda: hf_checksums(state.params, policy, dtype))
    tensors = [np.array(array) for _, array in on_the_way(state.params)]
    yield_to(found, "write the same bytes", rate, write_alone)
    for store in ("shared", "directory"):
        yield_to(found, f"publish, {store}", published, store)
    if has_host_memory(mesh):
        yield_to(found, "offload", offload)
    yield_to(found, "checkpoint", checkpoint)
    return found


def make_model(directory: Path, policy: Any) -> None:
    """Writes a model with random weights and the toy's tokenizer."""
    from rljax.policy.hf import save_params
    from rljax.policy.model import init_params

    save_params(directory, init_params(policy, 0), policy, "bfloat16", side_files_from=TOY)


def engines(size: Size, model: Path | None) -> Found:
    """Compares log-probabilities of the same tokens: decode, prefill and Hugging Face's forward against the trainer."""
    import numpy as np

    from rljax.compare.scorers import score_column
    from rljax.mismatch import mismatch_metrics
    from rljax.policy.families import read_config
    from rljax.record.token_dumps import TokenDump

    found: Found = {"weights": str(model) if model else "random"}
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            model = Path(folder)
            make_model(model, policy_of(size))
        rng, vocabulary = np.random.default_rng(0), read_config(model).vocab_size
        ids = tuple(rng.integers(3, vocabulary, size.length, dtype=np.int32) for _ in range(size.sequences))
        masks = tuple(np.arange(size.length) >= size.length // 4 for _ in ids)
        dump = TokenDump(tuple(map(str, range(len(ids)))), ids, masks)

        @functools.cache
        def scores(spec: str) -> np.ndarray:
            return np.stack(score_column(spec, dump, model, batch_size=size.sequences)[0])

        def compare(kind: str, dtype: str) -> Found:
            trainer, began = scores(f"jax:{dtype}"), time.perf_counter()
            other = scores(f"{kind}:{dtype}")
            return mismatch_metrics(trainer, other, np.stack(masks)) | {"seconds": time.perf_counter() - began}

        for dtype in DTYPES:
            for kind in ("jax-decode", "jax-prefill", "hf"):
                yield_to(found, f"{kind} {dtype}", compare, kind, dtype)
    return found


def rollouts(size: Size, model: Path | None) -> Found:
    """Times the embedded engine at several numbers of places."""
    import jax.numpy as jnp
    import numpy as np

    from rljax.policy.model import init_params
    from rljax.rollout.embedded import JaxEngine
    from rljax.rollout.types import SamplingParams
    from rljax.sharding import MeshConfig, make_mesh

    def sample(engine: JaxEngine, prompts: Sequence[np.ndarray]) -> Found:
        for seed in (0, 1):  # the first call compiles
            began = time.perf_counter()
            responses = list(engine.generate(prompts, 1, SamplingParams(size.new_tokens), seed=seed))
            took, tokens = time.perf_counter() - began, sum(one.length for one in responses)
        return {"tokens": tokens, "seconds": took, "tokens_per_s": tokens / took}

    policy, prompt, found = policy_of(size), 64 if not size.tiny else 8, {}
    params, mesh, rng = init_params(policy, 0), make_mesh(MeshConfig()), np.random.default_rng(0)
    for places in size.places:
        prompts = [rng.integers(3, policy.vocab_size, prompt, dtype=np.int32) for _ in range(places)]
        room = places * (prompt + size.new_tokens)
        engine = JaxEngine(policy, jnp.bfloat16, prompt, mesh=mesh, decode_tokens=room)

        engine.publish(params, 0)
        yield_to(found, f"{places} places", sample, engine, prompts)
    return found


def exact(size: Size, model: Path | None) -> Found:
    """Trains two steps with the exact engine, whose mismatch must be 0."""
    small = ("--data.batch-size", "2", "--rollout.group-size", "4", "--packing.row-tokens", "64", "--eval.every", "0")
    more = ("--packing.rows-per-micro-batch", "2", "--diagnosis.grad-noise-every", "0", "--run.steps", "2")

    def trained(dtype: str) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            options = ("--rollout.engine", "exact", "--rollout.dtype", dtype, "--precision.compute-dtype", dtype)
            words = ["quickstart", *options, *small, *more, "--rollout.max-response-tokens", "12", "--run.dir", folder]
            done = subprocess.run([sys.executable, "-m", "rljax.train", *words], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
            rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        largest = [row["mismatch/logprob_abs_diff_max"] for row in rows]
        problems = [] if largest == [0.0, 0.0] else ["expected 0 in both steps"]
        return {"logprob_abs_diff_max": largest, "problems": problems}

    found: Found = {}
    for dtype in DTYPES:
        yield_to(found, dtype, trained, dtype)
    return found


def beside_tunix(size: Size, model: Path | None) -> Found:
    """Times the training step beside tunix's, if tunix is installed."""
    if importlib.util.find_spec("tunix") is None:
        return {"skipped": "tunix is not installed here"}
    with tempfile.TemporaryDirectory() as folder:
        words = ["--rounds", "5", "--json", f"{folder}/peers.json"]
        program = [sys.executable, str(ROOT / "experiments/bench_peers.py"), *words]
        done = subprocess.run([*program, "--only", "Qwen3-0.6B, 4 x 2,304 tokens"], capture_output=True, text=True)
        file = Path(folder, "peers.json")
        return json.loads(file.read_text()) if file.exists() else {"error": done.stderr[-500:]}


SECTIONS: dict[str, Section] = {
    "versions": Section(versions, 40),
    "kernels": Section(kernels, 150),
    "step bfloat16": Section(functools.partial(step, dtype="bfloat16", remat="none"), 150),
    "engines": Section(engines, 120),
    "exact": Section(exact, 90),
    "publish": Section(publish, 90),
    "rollouts": Section(rollouts, 90),
    "step float16": Section(functools.partial(step, dtype="float16", remat="none"), 120),
    "pinned memory": Section(pinned, 60),
    "pinned memory, platform allocator": Section(pinned, 60, (("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),)),
    "step bfloat16, remat blocks": Section(functools.partial(step, dtype="bfloat16", remat="blocks"), 120),
    "step beside tunix": Section(beside_tunix, 90),
}


def fetch(directory: Path) -> int:
    """Downloads the wheels that the GPU machine lacks, for Python 3.12 on x86-64, and builds rljax's own."""
    directory.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "-qq"]
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    only = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    subprocess.run([*pip, "download", *only, "-d", str(directory), *NEEDED], check=True)
    for wheel in directory.glob("*.whl"):
        if wheel.name.partition("-")[0].lower() in PRESENT:
            wheel.unlink()
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(directory), str(ROOT)], check=True)
    names = sorted(path.name for path in directory.glob("*.whl"))
    total = sum(path.stat().st_size for path in directory.glob("*.whl"))
    print("\n".join(names), f"\n{len(names)} wheels, {total / 2**20:.1f} MiB in {directory}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the sections, or one of them, or fetches the wheels; returns the exit status."""
    parser = section_options(__doc__, SECTIONS, "first_gpu.json")
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="only fetch the wheels for the GPU machine into DIR")
    options = parser.parse_args(argv)
    if options.fetch:
        return fetch(options.fetch)
    return run_sections(__file__, SECTIONS, TINY if options.tiny else FULL, options, argv)


if __name__ == "__main__":
    sys.exit(run_cli(main))
