"""The training steps that ``bench_peers.py`` compares, one side in each process.

The process reads one JSON object a line: ``{"build": {...}}`` compiles the step of a ``Case`` and makes two steps, and
``{"run": true}`` makes one step. ``{"compile": {...}}`` only compiles, and the first step after it makes the weights
and moments. The process answers each with one JSON object. All sides get the same tokens, advantages and
first weights, and a peer's side is in ``peer_sides.py``. Every advantage is 1, which makes the loss the mean of -log p.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

PACKED = "maxtext, packed"  # packed rows on a card, where "maxtext" gives each sequence a row
RATE, CLIP, DECAY, EPSILON = 1e-6, 1.0, 0.01, 1e-8
SCALE = 4
PROMPT = 8
RECORDED = (4, 4, 33, 33, 5, 5, 33, 5, 5, 5, 17, 5, 5, 33, 5, 5, 4, 4, 5, 5, 5, 33, 5, 5, 4, 4, 5, 5, 4, 4, 5, 5)
"""The tokens of 32 responses of step 42 of a run of the quickstart's task, in which the lengths surge.

Its prompts have ``PROMPT`` tokens.
"""


class Case(NamedTuple):
    """The shape of a policy and of a batch."""

    width: int = 256
    layers: int = 4
    vocab: int = 4096
    sequences: int = 8
    tokens: int = 256  # the length of each sequence, or 0 for the recorded lengths times ``scale``
    remat: bool = False
    dtype: str = "float32"
    head_dim: int = 64
    scale: int = SCALE
    recorded: int = len(RECORDED)  # how many of the recorded lengths are taken
    card: bool = False  # whether the peers take the settings for a GPU

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads and the key-value heads."""
        return self.width // 64, max(1, self.width // 128)

    def lengths(self) -> list[tuple[int, int]]:
        """Returns the tokens of each prompt and response."""
        if self.tokens:
            return [(self.tokens // 8, self.tokens - self.tokens // 8)] * self.sequences
        return [(self.scale * PROMPT, self.scale * response) for response in RECORDED[: self.recorded]]


class Sequence(NamedTuple):
    """One prompt and its response."""

    prompt: np.ndarray
    response: np.ndarray


class Built(NamedTuple):
    """A step that is ready to run."""

    run: Callable[[], float]  # makes a step, first the state if there is none; returns the norm of the gradient
    facts: dict[str, Any]  # seconds of compilation, bytes of temporaries, versions


def sequences_of(case: Case) -> list[Sequence]:
    """Returns random tokens of the case's lengths."""
    rng = np.random.default_rng(0)
    return [Sequence(*(rng.integers(3, case.vocab, n).astype(np.int32) for n in each)) for each in case.lengths()]


def padded(case: Case) -> dict[str, np.ndarray]:
    """Returns the sequences padded to the longest: prompts on the left, responses on the right, with masks."""
    sequences = sequences_of(case)
    widths = [max(n) for n in zip(*case.lengths(), strict=True)]

    def rows(name: str, width: int, left: bool, ones: bool) -> np.ndarray:
        each = [getattr(s, name) for s in sequences]
        missing = [(width - len(x), 0) if left else (0, width - len(x)) for x in each]
        return np.stack([np.pad(np.ones_like(x) if ones else x, pad) for x, pad in zip(each, missing, strict=True)])

    return {
        "prompt_ids": rows("prompt", widths[0], True, False),
        "prompt_mask": rows("prompt", widths[0], True, True),
        "completion_ids": rows("response", widths[1], False, False),
        "completion_mask": rows("response", widths[1], False, True),
        "advantages": np.ones(len(sequences), np.float32),
    }


def policy_of(case: Case) -> Any:
    """Returns the configuration of a tied Qwen3 policy of the case's shape."""
    from rljax.policy.config import PolicyConfig

    shape = (case.vocab, case.width, 3 * case.width, case.layers, *case.heads, case.head_dim)
    return PolicyConfig(*shape, rope_theta=1_000_000.0, rms_norm_eps=1e-6, tie_word_embeddings=True)


@functools.lru_cache(maxsize=1)
def host_weights(case: Case) -> Any:
    """Returns the first weights, which are the same on all sides, as arrays of the host."""
    rng, (heads, kv_heads) = np.random.default_rng(1), case.heads

    def matrices(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    def norm(*shape: int) -> dict[str, np.ndarray]:
        return {"scale": np.ones(shape, np.float32)}

    block, inner, dim = (case.layers, case.width), 3 * case.width, case.head_dim
    heads_of = {"query": heads, "key": kv_heads, "value": kv_heads}
    attention = {name: matrices(*block, n, dim) for name, n in heads_of.items()}
    attention |= {"output": matrices(case.layers, heads, dim, case.width)}
    attention |= {name: norm(case.layers, dim) for name in ("query_norm", "key_norm")}
    mlp = {
        "gate": matrices(*block, inner),
        "up": matrices(*block, inner),
        "down": matrices(case.layers, inner, case.width),
    }
    layers = {"attention": attention, "attention_norm": norm(*block), "mlp": mlp, "mlp_norm": norm(*block)}
    return {"embed": matrices(case.vocab, case.width), "final_norm": norm(case.width), "layers": layers}


def first_weights(case: Case) -> Any:
    """Returns the first weights as arrays of JAX."""
    import jax

    return jax.tree.map(jax.numpy.asarray, host_weights(case))


def packed(case: Case, *, alone: bool = False) -> Any:
    """Returns the sequences packed in rows as long as the longest, [1, rows, tokens].

    With ``alone`` each sequence has a row of its own. The fields that are no arrays of tokens are then None.
    """
    from rljax.trainer.packing import PackedBatch, TrainSequence, pack
    from rljax.trainer.rows import first_fit

    sequences = [
        TrainSequence.of(*s, {"rollout_logprobs": np.full(len(s.response), -np.log(case.vocab))}, advantage=1.0)
        for s in sequences_of(case)
    ]
    each = [sum(n) for n in case.lengths()]
    if alone:
        one_row = [pack([s], row_tokens=max(each), rows_per_micro_batch=1, micro_batches=1) for s in sequences]
        parts = zip(*one_row, strict=True)
        return PackedBatch(*(np.concatenate(part, 1) if np.ndim(part[0]) else None for part in parts))
    rows = len(first_fit(each, sorted(range(len(each)), key=lambda i: -each[i]), max(each)))
    return pack(sequences, row_tokens=max(each), rows_per_micro_batch=rows, micro_batches=1)


def compiled_facts(lower: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Traces and compiles a step.

    Returns the executable, and its facts: the seconds of all cores and of the clock, and the bytes of temporaries. The
    seconds are absent if the compiled program was in the directory of programs.
    """
    import jax

    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    before = np.array([time.process_time(), time.perf_counter()])
    compiled = lower().compile()
    seconds, wall = (float(x) for x in np.array([time.process_time(), time.perf_counter()]) - before)
    analysis = getattr(compiled, "compiled", compiled).memory_analysis()
    facts = {"temporary_bytes": analysis.temp_size_in_bytes, "jax": jax.__version__}
    if any(event.endswith("/cache_hits") for event in events):
        return compiled, facts
    return compiled, facts | {"compile_core_s": seconds, "compile_s": wall}


def rljax(case: Case, *, mismatch: bool = True) -> Built:
    """Builds our step: sequences packed in rows, mismatch and entropies measured in it."""
    import jax

    from rljax.algorithms.correction_choice import CorrectionConfig
    from rljax.algorithms.losses import LossConfig
    from rljax.sharding import MeshConfig, make_mesh
    from rljax.trainer.measure import DiagnosisConfig
    from rljax.trainer.objective import Objective
    from rljax.trainer.precision import PrecisionConfig
    from rljax.trainer.state import OptimizerConfig, create_state, make_optimizer
    from rljax.trainer.step import TrainStep

    policy, mesh, batch, lengths = policy_of(case), make_mesh(MeshConfig(1, 1)), packed(case), case.lengths()
    tx = make_optimizer(OptimizerConfig(learning_rate=RATE, clip_norm=CLIP))
    step = TrainStep(
        policy,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype=case.dtype, remat="blocks" if case.remat else "none"),  # type: ignore[arg-type]
        objective=Objective(LossConfig(), CorrectionConfig(), len(lengths), max(n[1] for n in lengths)),
        batch_shape=batch.tokens.shape,
        diagnosis=DiagnosisConfig() if mismatch else None,
    )
    facts = compiled_facts(step.lower)[1]
    state = None

    def run() -> float:
        nonlocal state
        if state is None:
            state = create_state(first_weights(case), policy, tx, mesh, dynamic_scale=False)
        state, metrics, _ = jax.block_until_ready(step(state, batch, RATE, True))
        return float(metrics["optimizer/grad_norm"])

    _, rows, tokens = batch.tokens.shape
    if mismatch and not case.card:
        facts |= mismatch_alone(case)
    return Built(run, facts | {"rows": rows, "row_tokens": tokens})


def mismatch_alone(case: Case) -> dict[str, float]:
    """Measures the mismatch of the case's batch as the step does, from log-probabilities that are there already.

    Returns the median seconds of 31 runs as ``mismatch_s``.
    """
    import jax

    from rljax.trainer.measure import DiagnosisConfig, finalize_measured, measure

    config, count = DiagnosisConfig(), len(case.lengths())
    batch = jax.tree.map(lambda x: jax.numpy.asarray(x[0] if x.ndim else x), packed(case))

    def metrics(logprobs: Any, entropy: Any, micro: Any) -> Any:
        stats = SimpleNamespace(activation_max=jax.numpy.max(logprobs), router=None)
        scores = SimpleNamespace(logprobs=logprobs, entropy=entropy, stats=stats)
        return finalize_measured(measure(scores, micro, count, config), config)

    values = jax.random.uniform(jax.random.key(0), (2, *batch.tokens.shape), minval=0.0, maxval=5.0)
    given = (-values[0], values[1], batch)
    compiled = jax.jit(metrics).lower(*given).compile()
    seconds = []
    for _ in range(31):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*given))
        seconds.append(time.perf_counter() - began)
    return {"mismatch_s": statistics.median(seconds)}


def peer(name: str, case: Case, **options: Any) -> Built:
    """Builds the step of the function ``name`` of ``peer_sides.py``, which imports a peer's packages."""
    import peer_sides

    return getattr(peer_sides, name)(case, **options)


SIDES: dict[str, Callable[[Case], Built]] = {
    "rljax": rljax,
    "rljax without mismatch": functools.partial(rljax, mismatch=False),
    "tunix": functools.partial(peer, "tunix"),
    "tunix, log-probabilities alone": functools.partial(peer, "tunix", learner=False),
    "maxtext": functools.partial(peer, "maxtext"),
    PACKED: functools.partial(peer, "maxtext", attention="flash"),
    "easydel": functools.partial(peer, "easydel"),
}
"""The sides by name. The first word of a name is the package whose environment it needs."""


def device_kind() -> dict[str, str]:
    """Returns the name of the device that computes. Raises RuntimeError if it is a CPU instead of the wanted card."""
    import jax

    device = jax.devices()[0]
    if os.environ.get("JAX_PLATFORMS", "").startswith("cuda") and device.platform != "gpu":
        raise RuntimeError(f"JAX finds no GPU, only {device.device_kind}")
    return {"device": device.device_kind}


def memory_of_card() -> dict[str, int]:
    """Returns the most bytes that were in use on a card; nothing on the CPU."""
    import jax

    statistics_of = jax.devices()[0].memory_stats() or {}
    return {"peak_bytes": statistics_of["peak_bytes_in_use"]} if "peak_bytes_in_use" in statistics_of else {}


def serve(side: str) -> None:
    """Answers the lines of the standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages may print
    built: Built | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "build" in message:
                built = None
                built = SIDES[side](Case(**message["build"]))
                answer = built.facts | {"norm": built.run()}
                built.run()  # tunix compiles a second time
            elif "compile" in message:
                case = Case(**message["compile"])
                kind = device_kind()
                host_weights(case)  # so that a turn on the card does not wait for them
                built = SIDES[side](case)
                answer = built.facts | kind
            elif built is not None:
                began = time.perf_counter()
                norm = built.run()
                answer = {"seconds": time.perf_counter() - began, "norm": norm} | memory_of_card()
        except Exception as error:  # a peer may fail in any way; the report shows the error
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
