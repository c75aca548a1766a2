"""Measures on one TPU host what rljax states without one, and what only a TPU can show of vLLM's TPU backend.

    bash launch/install_vllm.sh --tpu                          # the server's environment, beside the trainer's
    .venv/bin/python tools/first_tpu.py --json first_tpu.json  # on the TPU host; about twenty minutes
    python tools/first_tpu.py --tiny --json tiny.json          # tiny shapes on a CPU; their speeds mean nothing

A server and a trainer cannot share a chip. While a server has the chips, this program uses the CPU alone. Then the
trainer scores the server's tokens on the chips. On a slice of several hosts, start it on all hosts at the same time.
``--model DIR`` takes real weights instead of random ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import first_gpu
from first_gpu import FULL, TINY, Size, make_model, policy_of
from sections import Found, Section, run_sections, seconds_of, section_options, yield_to

from rljax.errors import run_cli

PROMPT, GROUP = 64, 4  # the tokens of a prompt, and the responses to each
PUBLISHES = 3


# Devices of a CPU have no coordinates, by which the server sorts them, and no known memory.
TINY_SERVER = (
    *("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "256"),
    *("--additional-config", '{"sharding": {"sharding_strategy": {"device_indexes": [0]}}}'),
)


def add_device_memory() -> None:
    """Gives the server's worker a method for ``/collective_rpc``. vLLM calls this plugin in each of its processes."""
    from vllm.v1.worker.worker_base import WorkerBase

    def device_memory(worker: Any) -> list[Found]:
        import jax

        return [device.memory_stats() or {} for device in jax.local_devices()]

    WorkerBase.device_memory = device_memory


def write_plugin(folder: Path) -> None:
    """Writes the metadata by which vLLM finds ``add_device_memory``, if ``folder`` is on its PYTHONPATH."""
    (metadata := folder / "first_tpu-0.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: first_tpu\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nfirst_tpu = first_tpu:add_device_memory\n")


def versions(size: Size, model: Path | None) -> Found:
    """Says what the machine is: devices and their coordinates in the slice, hosts, packages on both sides."""
    import jax

    here = first_gpu.versions(size, model) | {"hosts": hosts_of_slice()}
    here["coordinates"] = [getattr(device, "coords", None) for device in jax.local_devices()]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        here["packages"]["libtpu"] = importlib.metadata.version("libtpu")
    return here | {"server": server_packages()}


def hosts_of_slice() -> list[str]:
    """Returns the names of the slice's hosts, as Cloud TPU sets them; none on another machine."""
    return [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]


def server_packages() -> Found:
    """Returns the versions of vLLM's TPU backend in the server's environment, or the reason why there are none."""
    from rljax.rollout.servers.process import environment_python

    try:
        python = environment_python("vLLM")
    except RuntimeError as error:
        return {"skipped": str(error)}
    words = "import importlib.metadata as m, json; print(json.dumps({n: m.version(n) for n in %s}))"
    names = ("vllm-tpu", "tpu-inference", "jax", "libtpu")
    done = subprocess.run([str(python), "-c", words % (names,)], capture_output=True, text=True)
    if done.returncode:
        return {"skipped": f"{python} has no vllm-tpu: run bash launch/install_vllm.sh --tpu"}
    return json.loads(done.stdout)


def precision(size: Size, model: Path | None) -> Found:
    """Measures products of float32 matrices at each precision, against float64 and against one pass of bfloat16."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

    from rljax.commands.check_device import median_ms

    n, found = 128 if size.tiny else 4096, {}
    a, b = (np.random.default_rng(seed).standard_normal((n, n), np.float32) for seed in (0, 1))
    exact = a.astype(np.float64) @ b
    one_pass = np.matmul(*(x.astype(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b)))

    def measure(name: str) -> Found:
        run = jax.jit(functools.partial(jnp.dot, precision=name))
        result = np.asarray(run(a, b), np.float64)
        gaps = {"from_float64": result - exact, "from_one_pass": result - one_pass}
        found = {what: float(np.sqrt(np.mean(gap**2) / np.mean(exact**2))) for what, gap in gaps.items()}
        on_device = jnp.asarray(a), jnp.asarray(b)
        return found | {"ms": median_ms(lambda: run(*on_device), size.repeats)}

    for name in ("default", "high", "highest"):
        yield_to(found, name, measure, name)
    return found


def collective(size: Size, model: Path | None) -> Found:
    """Measures a sum over all chips of this host."""
    from rljax.commands.check_device import check_collective

    return check_collective(1 if size.tiny else 256, size.repeats)


def hosts(size: Size, model: Path | None) -> Found:
    """Joins the hosts of the slice, and times a sum over all chips of all hosts."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    if len(names := hosts_of_slice()) < 2:
        return {"skipped": "this slice has one host"}
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("chips",))
    split = NamedSharding(mesh, PartitionSpec("chips"))
    x = jax.jit(lambda: jnp.ones(jax.device_count() * 2**24, jnp.float32), out_shardings=split)()
    total = jax.jit(jnp.sum)
    total(x)  # compiles
    took, value = seconds_of(lambda: total(x))
    return {"hosts": len(names), "processes": jax.process_count(), "seconds": took, "right": int(value) == x.size}


def server(size: Size, model: Path | None, *, dtype: str) -> Found:
    """Publishes to a vLLM server on the chips and samples from it, then compares its log-probabilities on the chips.

    With other than tiny shapes the server may compile nothing after its start, so a request that compiles fails.
    """
    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")  # the chips are the server's

    from rljax.policy.families import read_config
    from rljax.policy.hf import load_params, save_params
    from rljax.record.token_dumps import ColumnSource, make_dump, write_dump

    if "skipped" in (packages := server_packages()):
        return packages
    found: Found = {"packages": packages}
    with tempfile.TemporaryDirectory() as folder:
        write_plugin(plugin := Path(folder, "plugin"))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ["PYTHONPATH"]])
        if model is None:
            shape = policy_of(size)  # heads of 128, as of the large shape, also where shapes are tiny
            make_model(model := Path(folder, "model"), dataclasses.replace(shape, head_dim=128))
        policy = read_config(model)
        params = load_params(model, policy)
        rng, last = np.random.default_rng(0), Path(folder, "last")
        prompts = [rng.integers(3, policy.vocab_size, PROMPT, dtype=np.int32) for _ in range(size.sequences)]
        params, ids, sides = sampled(found, size, model, dtype, params, prompts)
        save_params(last, params, policy, dtype, side_files_from=model)
        masks = [np.arange(len(each)) >= PROMPT for each in ids]
        source = ColumnSource(f"vllm {packages['vllm-tpu']}", dtype, "", 1.0, "rollout", "")
        names, columns = [str(number) for number in range(len(ids))], {"server": sides}
        write_dump(Path(folder, "tokens.parquet"), make_dump(names, ids, masks, columns, {"server": source}))
        words = ["compare", f"{folder}/tokens.parquet", "--model", str(last), "--out", f"{folder}/out"]
        words += ["--scorer", f"jax:{dtype}", "--scorer", "jax:float32", "--second-run", "false"]
        done = subprocess.run([sys.executable, "-m", "rljax.cli", *words], capture_output=True, text=True)
        report = Path(folder, "out/report.json")
        found["gaps"] = json.loads(report.read_text())["pairs"] if report.exists() else {"error": done.stderr[-500:]}
    return found


def sampled(
    found: Found, size: Size, model: Path, dtype: str, params: Any, prompts: Sequence[Any]
) -> tuple[Any, list[Any], list[Any]]:
    """Starts a server, publishes to it and samples from it, and puts the measurements into ``found``.

    Returns the weights that were published last, and the ids and the server's log-probabilities of each sequence.
    """
    import jax
    import jax.numpy as jnp

    from rljax.policy.families import read_config
    from rljax.policy.hf import hf_tensors
    from rljax.policy.published import hf_checksums
    from rljax.policy.score import make_scorer
    from rljax.record.token_dumps import after_prompts
    from rljax.rollout.servers.engine import PolicyFunctions, ServedEngine
    from rljax.rollout.servers.handshake import Expectation
    from rljax.rollout.servers.process import environment_python
    from rljax.rollout.servers.vllm.client import VllmBackend
    from rljax.rollout.servers.vllm.server import VllmConfig, start
    from rljax.rollout.types import RolloutConfig, SamplingParams

    policy, wide = read_config(model), jnp.dtype(dtype)
    functions = PolicyFunctions(
        functools.partial(hf_tensors, config=policy, dtype=wide),
        functools.partial(hf_checksums, config=policy, dtype=wide),
        make_scorer(policy, wide),
    )
    environment = {} if size.tiny else {"VLLM_XLA_CHECK_RECOMPILATION": "1"}
    if dtype == "float32":  # in one pass of bfloat16 the first publish is refused
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    longest = max(512, PROMPT + size.new_tokens)  # the probes of a publish are up to 512 tokens long
    config = VllmConfig(
        model=str(model),
        python=str(environment_python("vLLM")),
        dtype=dtype,
        max_model_len=longest,
        max_num_seqs=64,
        extra_args=TINY_SERVER if size.tiny else (),
        extra_env=environment,
    )
    found["start_s"], running = seconds_of(lambda: start(config, timeout_s=540.0))
    with running:
        hf_config = json.loads((model / "config.json").read_text())
        rollout = RolloutConfig(engine="vllm", urls=(running.url,), dtype=dtype, group_size=GROUP)
        made = ServedEngine(Expectation(rollout, hf_config, longest), VllmBackend(), functions)
        with contextlib.closing(made) as engine:
            for version in range(PUBLISHES):
                params = jax.tree.map(lambda leaf: leaf * 1.001, params)  # in place of a step of the optimizer
                before = device_memory(engine)
                took, metrics = seconds_of(functools.partial(engine.publish, params, version))
                memory = {"memory_before": before, "memory_after": device_memory(engine)}
                found[f"publish {version}"] = {"seconds": took, **metrics, **memory}
                print(json.dumps(found), flush=True)
            run = functools.partial(engine.generate, prompts, GROUP, SamplingParams(size.new_tokens), seed=0)
            took, responses = seconds_of(lambda: list(run()))
    tokens = sum(one.length for one in responses)
    found["rollouts"] = {"tokens": tokens, "seconds": took, "tokens_per_s": tokens / took}
    ids = [one.ids for one in responses]
    return params, ids, after_prompts([one.prompt for one in responses], [one["rollout_logprobs"] for one in responses])


def device_memory(engine: Any) -> list[Found]:
    """Returns the memory of each chip of the server (bytes): in use, at its peak, and the limit."""
    from rljax.rollout.servers.vllm.client import VllmBackend

    (remote,), names = engine.fleet.servers, ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")
    (devices,) = engine.fleet.wait(VllmBackend().ask_plugin(remote, "device_memory"))
    return [{name: device.get(name) for name in names} for device in devices]


SECTIONS: dict[str, Section] = {
    "versions": Section(versions, 60),
    "matmul precision": Section(precision, 60),
    "server bfloat16": Section(functools.partial(server, dtype="bfloat16"), 900),
    "kernels": Section(first_gpu.kernels, 180),
    "step bfloat16, remat blocks": first_gpu.SECTIONS["step bfloat16, remat blocks"],
    "publish": Section(first_gpu.publish, 120),
    "rollouts": Section(first_gpu.rollouts, 120),
    "server float32": Section(functools.partial(server, dtype="float32"), 900),
    "collective": Section(collective, 60),
    "several hosts": Section(hosts, 60),
}


def main(argv: Sequence[str]) -> int:
    """Runs the sections, or one of them; returns the exit status."""
    parser = section_options(__doc__, SECTIONS, "first_tpu.json")
    parser.set_defaults(limit_s=2400.0)
    options = parser.parse_args(argv)
    return run_sections(__file__, SECTIONS, TINY if options.tiny else FULL, options, argv)


if __name__ == "__main__":
    sys.exit(run_cli(main))
