"""The training steps that ``bench_peers.py`` compares, one side in each process.

All sides get the same tokens and first weights. Every advantage is 1, which makes the loss the mean of -log p. The
process answers each line of its input with one JSON object: a case is compiled, and null makes one step. The first step
makes the weights and moments.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

RATE, CLIP, DECAY, EPSILON = 1e-6, 1.0, 0.01, 1e-8
PROMPT = 8
RECORDED = (4, 4, 33, 33, 5, 5, 33, 5)
"""The tokens of eight responses of step 42 of a run of the quickstart's task, in which the lengths surge."""
KERNELS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
"""The names of attention's projections in rljax and in tunix."""


class Case(NamedTuple):
    """The shape of a policy and of a batch."""

    width: int = 256
    layers: int = 4
    vocab: int = 4096
    sequences: int = 8
    tokens: int = 256  # the length of each sequence, or 0 for the recorded lengths times ``scale``
    head_dim: int = 64
    scale: int = 4
    dtype: str = "bfloat16"
    remat: str = "blocks"  # which activations rljax computes again; tunix computes each block again
    prompt: int = 0  # tokens before those of ``tokens``, which each ``group`` sequences share; 0: an eighth of them
    group: int = 1

    @property
    def heads(self) -> tuple[int, int]:
        """The query heads and the key-value heads."""
        return self.width // 64, max(1, self.width // 128)

    def lengths(self) -> list[tuple[int, int]]:
        """Returns the tokens of each prompt and response."""
        if self.prompt:
            return [(self.prompt, self.tokens)] * self.sequences
        if self.tokens:
            return [(self.tokens // 8, self.tokens - self.tokens // 8)] * self.sequences
        return [(self.scale * PROMPT, self.scale * response) for response in RECORDED]


class Built(NamedTuple):
    """A step that is compiled."""

    run: Callable[[], float]  # makes a step, first the state if there is none; returns the norm of the gradient
    facts: dict[str, Any]  # seconds of compilation, bytes of temporaries, version of jax


def sequences_of(case: Case) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns random tokens of the case's lengths: a prompt and a response for each sequence."""
    rng = np.random.default_rng(0)
    prompts_and_responses = []
    for lengths in case.lengths():
        prompt, response = (rng.integers(3, case.vocab, n).astype(np.int32) for n in lengths)
        shares = len(prompts_and_responses) % case.group
        prompts_and_responses.append((prompts_and_responses[-1][0] if shares else prompt, response))
    return prompts_and_responses


def padded(case: Case) -> dict[str, np.ndarray]:
    """Returns the sequences padded to the longest: prompts on the left, responses on the right, with masks."""
    widths = [max(n) for n in zip(*case.lengths(), strict=True)]
    arrays: dict[str, Any] = {}
    for name, place, width in zip(("prompt", "completion"), (0, 1), widths, strict=True):
        tokens = [sequence[place] for sequence in sequences_of(case)]
        pads = [(width - len(x), 0) if name == "prompt" else (0, width - len(x)) for x in tokens]
        arrays[f"{name}_ids"] = np.stack([np.pad(x, pad) for x, pad in zip(tokens, pads, strict=True)])
        arrays[f"{name}_mask"] = np.stack([np.pad(np.ones_like(x), p) for x, p in zip(tokens, pads, strict=True)])
    return arrays | {"advantages": np.ones(len(case.lengths()), np.float32)}


def packed(case: Case) -> Any:
    """Returns the sequences packed in rows as long as the longest, [1, rows, tokens]; or single rows of trees."""
    import bench_trees

    from rljax.run.packing import make_pack
    from rljax.trainer.packing import TrainSequence, first_fit, pack

    sequences = [
        TrainSequence.of(p, r, {"rollout_logprobs": np.full(len(r), -np.log(case.vocab))}, advantage=1.0)
        for p, r in sequences_of(case)
    ]
    each = [sum(n) for n in case.lengths()]
    if case.prompt:
        sizes = bench_trees.Case(case.prompt, case.group, case.tokens, case.sequences // case.group)
        return make_pack(bench_trees.config_of(sizes), policy_of(case), case.sequences)(sequences)
    rows = len(first_fit(each, sorted(range(len(each)), key=lambda i: -each[i]), max(each)))
    return pack(sequences, row_tokens=max(each), rows_per_micro_batch=rows, micro_batches=1)


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
    attention = {name: matrices(*block, n, dim) for name, n in zip(KERNELS, (heads, kv_heads, kv_heads), strict=False)}
    attention |= {"output": matrices(case.layers, heads, dim, case.width)}
    attention |= {name: norm(case.layers, dim) for name in ("query_norm", "key_norm")}
    mlp = {"gate": matrices(*block, inner), "up": matrices(*block, inner)}
    mlp |= {"down": matrices(case.layers, inner, case.width)}
    layers = {"attention": attention, "attention_norm": norm(*block), "mlp": mlp, "mlp_norm": norm(*block)}
    return {"embed": matrices(case.vocab, case.width), "final_norm": norm(case.width), "layers": layers}


def first_weights(case: Case) -> Any:
    """Returns the first weights as arrays of JAX."""
    import jax

    return jax.tree.map(jax.numpy.asarray, host_weights(case))


def compiled_facts(lower: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Traces and compiles a step; returns the executable, the seconds of the clock, and the bytes of temporaries."""
    import jax

    began = time.perf_counter()
    compiled = lower().compile()
    seconds = time.perf_counter() - began
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return compiled, {"compile_s": seconds, "temporary_bytes": temporary, "jax": jax.__version__}


def rljax(case: Case) -> Built:
    """Builds rljax's step: sequences packed in rows, mismatch and entropies measured in it."""
    import jax

    from rljax.algorithms.correction_choice import CorrectionConfig
    from rljax.algorithms.losses import LossConfig
    from rljax.sharding import MeshConfig, make_mesh
    from rljax.trainer.measure import DiagnosisConfig
    from rljax.trainer.objective import Objective
    from rljax.trainer.state import OptimizerConfig, PrecisionConfig, create_state, make_optimizer
    from rljax.trainer.step import TrainStep

    policy, mesh, batch, lengths = policy_of(case), make_mesh(MeshConfig(1, 1)), packed(case), case.lengths()
    tx = make_optimizer(OptimizerConfig(learning_rate=RATE, clip_norm=CLIP))
    step = TrainStep(
        policy,
        tx,
        mesh,
        precision=PrecisionConfig(compute_dtype=case.dtype, remat=case.remat),  # type: ignore[arg-type]
        objective=Objective(LossConfig(), CorrectionConfig(), len(lengths), max(n[1] for n in lengths)),
        batch_shape=(batch if batch.trees is None else batch.trees).tokens.shape,
        diagnosis=DiagnosisConfig(),
        flat_tokens=0 if batch.trees is None else batch.tokens.shape[2],
    )
    facts = compiled_facts(step.lower)[1]
    state = None

    def run() -> float:
        nonlocal state
        if state is None:
            state = create_state(first_weights(case), policy, tx, mesh, dynamic_scale=False)
        state, metrics, _ = jax.block_until_ready(step(state, batch, RATE, True))
        return float(metrics["optimizer/grad_norm"])

    return Built(run, facts)


def tunix_trainer(case: Case, params: Any) -> Any:
    """Returns tunix's trainer with the loss of its GRPO learner, and with these weights."""
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3, RematConfig
    from tunix.rl import function_registry
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    shape = ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocab,
        embed_dim=case.width,
        hidden_dim=3 * case.width,
        num_heads=case.heads[0],
        head_dim=case.head_dim,
        num_kv_heads=case.heads[1],
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=jnp.dtype(case.dtype),
        param_dtype=jnp.float32,
        remat_config=RematConfig.DECODER,
    )
    config = GRPOConfig(num_generations=2, num_iterations=1, beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0
    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn)
    special = {"pad_id": 0, "eos_id": 2}
    model = Qwen3(shape, rngs=nnx.Rngs(0))
    give_to_tunix(model, params)
    trainer = Trainer(
        model=model,
        optimizer=optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, eps=EPSILON, weight_decay=DECAY)),
        training_config=TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9),
        custom_checkpoint_metadata_fn=dict,
    )
    trainer.with_loss_fn(lambda model, example: loss(model, example, algo_config=config, **special), has_aux=True)
    trainer.with_gen_model_input_fn(lambda example: {"example": example})
    return trainer


def give_to_tunix(model: Any, params: Any) -> None:
    """Copies our weights into tunix's model."""
    import jax

    model.embedder.input_embedding.value = params["embed"]
    model.final_norm.w.value = params["final_norm"]["scale"]
    for i, layer in enumerate(model.layers):
        ours = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        for name, theirs in KERNELS.items():
            getattr(layer.attn, theirs).w.value = ours["attention"][name]
        layer.attn.q_norm.w.value = ours["attention"]["query_norm"]["scale"]
        layer.attn.k_norm.w.value = ours["attention"]["key_norm"]["scale"]
        layer.input_layernorm.w.value = ours["attention_norm"]["scale"]
        layer.post_attention_layernorm.w.value = ours["mlp_norm"]["scale"]
        for name in ("gate", "up", "down"):
            getattr(layer.mlp, f"{name}_proj").kernel.value = ours["mlp"][name]


def tunix(case: Case) -> Built:
    """Compiles tunix's step from shapes, as a function of its arrays alone, all of which are donated.

    So no Python code of ``nnx`` runs in a step, and the state can be made later.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import TrainExample

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = {name: jnp.asarray(x) for name, x in padded(case).items()}
    example = TrainExample(**arrays, ref_per_token_logps=None, old_per_token_logps=None)
    made = {}

    def on_mesh(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tree)

    def build(params: Any) -> Any:
        trainer = tunix_trainer(case, params)
        made["graph"], state = nnx.split((trainer.model, trainer.optimizer))
        made["step"] = trainer.create_train_step_fn()
        return state

    def train_step(state: Any, example: Any) -> Any:
        model, optimizer = nnx.merge(made["graph"], state)
        norm = made["step"](model, optimizer, example)[2]
        return nnx.state((model, optimizer)), norm

    with mesh:
        shapes = on_mesh(jax.eval_shape(build, host_weights(case)))
        step = jax.jit(train_step, donate_argnums=0, out_shardings=whole)
        compiled, facts = compiled_facts(lambda: step.lower(shapes, on_mesh(example)))
    state = None

    def run() -> float:
        nonlocal state
        if state is None:
            with mesh:
                state = jax.jit(build, donate_argnums=0, out_shardings=whole)(first_weights(case))
        state, norm = jax.block_until_ready(compiled(state, example))
        return float(norm)

    return Built(run, facts)


SIDES: dict[str, Callable[[Case], Built]] = {"rljax": rljax, "tunix": tunix}


def serve(side: str) -> None:
    """Answers the lines of the standard input until it ends."""
    import jax

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # packages may print
    built: Built | None = None
    for line in sys.stdin:
        try:
            if fields := json.loads(line):
                device = jax.devices()[0]
                if os.environ["JAX_PLATFORMS"].startswith("cuda") and device.platform != "gpu":
                    raise RuntimeError(f"JAX finds no GPU, only {device.device_kind}")
                host_weights(Case(**fields))  # so that a turn on the card does not wait for them
                built = SIDES[side](Case(**fields))
                answer = built.facts | {"device": device.device_kind}
            elif built is not None:
                began = time.perf_counter()
                norm = built.run()
                memory = jax.devices()[0].memory_stats() or {}
                answer = {"seconds": time.perf_counter() - began, "norm": norm}
                answer |= {"peak_bytes": memory["peak_bytes_in_use"]} if memory else {}
        except Exception as error:  # a peer may fail in any way; the report shows the error
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
