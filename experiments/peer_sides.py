"""The training steps of other trainers, for ``bench_peers.py``.

The packages are imported in the functions, because each has an environment of its own. All steps have the gradient of
the same loss: the mean of -log p over the tokens of the responses. It is the policy's loss with advantages of 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from peer_steps import (
    CLIP,
    DECAY,
    EPSILON,
    RATE,
    Built,
    Case,
    compiled_facts,
    first_weights,
    host_weights,
    packed,
    padded,
)

KERNELS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
"""The names of attention's projections in rljax, and in tunix and EasyDeL."""


def optimizer() -> Any:
    """Returns the optimizer of all sides."""
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE, eps=EPSILON, weight_decay=DECAY))


def shape_of(arrays: dict[str, Any]) -> dict[str, int]:
    """Returns the shape of the rows of ``padded``."""
    ids = arrays["prompt_ids"], arrays["completion_ids"]
    return {"rows": len(ids[0]), "row_tokens": sum(x.shape[1] for x in ids)}


def layer_of(params: Any, i: int) -> Any:
    """Returns the weights of one of our blocks."""
    return jax.tree.map(lambda leaf: leaf[i], params["layers"])


def tunix(case: Case, *, learner: bool = True) -> Built:
    """Builds the step of tunix's trainer.

    Args:
      case: The shape of the policy and of the batch.
      learner: Whether to use the loss of tunix's GRPO learner, which also measures the entropy. Otherwise the loss uses
        only its log-probabilities (``compute_per_token_logps``).
    """
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3, RematConfig
    from tunix.rl import algo_core, common, function_registry  # noqa: F401
    from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
    from tunix.rl.trainer import Trainer
    from tunix.sft.peft_trainer import TrainingConfig

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
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
        remat_config=RematConfig.DECODER if case.remat else RematConfig.NONE,
    )
    config = GRPOConfig(num_generations=2, num_iterations=1, beta=0.0, loss_agg_mode="token-mean")
    config.temperature = 1.0
    special = {"pad_id": 0, "eos_id": 2}

    def plain(model: Any, example: Any, algo_config: Any, **ids: int) -> tuple[Any, dict[str, Any]]:
        split, mask = nnx.split(model), example.completion_mask
        logprobs = common.compute_per_token_logps(
            *split, example.prompt_ids, example.completion_ids, stop_gradient=False, **ids
        )
        ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
        return -jnp.sum(example.advantages[:, None] * ratio * mask) / jnp.sum(mask), {}

    loss = function_registry.get_policy_loss_fn(config.policy_loss_fn) if learner else plain

    def trainer_of(params: Any) -> Any:
        model = Qwen3(shape, rngs=nnx.Rngs(0))
        _give_to_tunix(model, params)
        trainer = Trainer(
            model=model,
            optimizer=optimizer(),
            training_config=TrainingConfig(eval_every_n_steps=10**9, max_steps=10**9),
            custom_checkpoint_metadata_fn=dict,
        )
        trainer.with_loss_fn(lambda model, example: loss(model, example, algo_config=config, **special), has_aux=True)
        trainer.with_gen_model_input_fn(lambda example: {"example": example})
        return trainer

    arrays = {name: jnp.asarray(x) for name, x in padded(case).items()}
    example = TrainExample(**arrays, ref_per_token_logps=None, old_per_token_logps=None)
    if case.card:
        run, facts = _tunix_on_card(trainer_of, case, mesh, example)
        return Built(run, facts | shape_of(arrays))
    with mesh:
        trainer = trainer_of(first_weights(case))
        step = nnx.jit(trainer.create_train_step_fn(), donate_argnames=("optimizer",))
        facts = compiled_facts(lambda: step.lower(trainer.model, trainer.optimizer, example))[1]
        cached = trainer.jit_train_and_eval_step(cache_nnx_graph=True)[0]

    def run() -> float:
        with mesh:
            norm = cached(example)[2]
        jax.block_until_ready(nnx.state((trainer.model, trainer.optimizer)))
        return float(norm)

    return Built(run, facts | shape_of(arrays))


def _tunix_on_card(trainer_of: Any, case: Case, mesh: Any, example: Any) -> tuple[Any, dict[str, Any]]:
    """Compiles tunix's step from shapes, as a function of its arrays alone, all of which are donated.

    So no Python code of ``nnx`` runs in a step, and the state can be made later.
    """
    from flax import nnx

    made = {}
    placed = whole(mesh)

    def build(params: Any) -> Any:
        trainer = trainer_of(params)
        made["graph"], state = nnx.split((trainer.model, trainer.optimizer))
        made["step"] = trainer.create_train_step_fn()
        return state

    def train_step(state: Any, example: Any) -> Any:
        model, optimizer = nnx.merge(made["graph"], state)
        norm = made["step"](model, optimizer, example)[2]
        return nnx.state((model, optimizer)), norm

    with mesh:
        shapes = on_mesh(jax.eval_shape(build, host_weights(case)), mesh)
        lowered = on_mesh(example, mesh)
        step = jax.jit(train_step, donate_argnums=0, out_shardings=placed)
        compiled, facts = compiled_facts(lambda: step.lower(shapes, lowered))
    state = None

    def run() -> float:
        nonlocal state
        if state is None:
            with mesh:
                state = jax.jit(build, donate_argnums=0, out_shardings=placed)(first_weights(case))
        state, norm = jax.block_until_ready(compiled(state, example))
        return float(norm)

    return run, facts


def whole(mesh: Any) -> Any:
    """Returns the sharding of an array that is not split over the mesh."""
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def on_mesh(tree: Any, mesh: Any) -> Any:
    """Returns the shapes of arrays, each whole on the mesh."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole(mesh)), tree)


def _give_to_tunix(model: Any, params: Any) -> None:
    """Copies our weights into tunix's model."""
    model.embedder.input_embedding.value = params["embed"]
    model.final_norm.w.value = params["final_norm"]["scale"]
    for i, layer in enumerate(model.layers):
        ours = layer_of(params, i)
        for name, theirs in KERNELS.items():
            getattr(layer.attn, theirs).w.value = ours["attention"][name]
        _give_norms_and_mlp(layer, layer.attn, ours, "w")


def _give_norms_and_mlp(layer: Any, attention: Any, ours: Any, scale: str) -> None:
    """Copies the norms and the MLP of our block into tunix's or EasyDeL's.

    Their norms call their weight ``scale``.
    """
    for norm, own in (
        (attention.q_norm, ours["attention"]["query_norm"]),
        (attention.k_norm, ours["attention"]["key_norm"]),
        (layer.input_layernorm, ours["attention_norm"]),
        (layer.post_attention_layernorm, ours["mlp_norm"]),
    ):
        getattr(norm, scale).value = own["scale"]
    for name in ("gate", "up", "down"):
        getattr(layer.mlp, f"{name}_proj").kernel.value = ours["mlp"][name]


def easydel(case: Case) -> Built:
    """Builds the step of EasyDeL's GRPO trainer, ``grpo_step``. It measures no entropy."""
    import easydel
    from easydel.trainers.group_relative_policy_optimization._fn import grpo_step
    from flax import nnx
    from jax.sharding import PartitionSpec

    shape = easydel.Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=case.width,
        intermediate_size=3 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads[0],
        num_key_value_heads=case.heads[1],
        head_dim=case.head_dim,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        use_sliding_window=False,
        max_position_embeddings=sum(map(max, zip(*case.lengths(), strict=True))),
        attn_mechanism="vanilla",
        gradient_checkpointing="nothing_saveable" if case.remat else "",
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    dtypes = {"dtype": jnp.dtype(case.dtype), "param_dtype": jnp.float32}
    model = easydel.Qwen3ForCausalLM(config=shape, rngs=nnx.Rngs(0), **dtypes)
    params = first_weights(case)
    core = model.model
    core.embed_tokens.embedding.value = params["embed"]
    core.norm.kernel.value = params["final_norm"]["scale"]
    for i, layer in enumerate(core.layers):
        ours = layer_of(params, i)
        for name, theirs in KERNELS.items():
            kernel = getattr(layer.self_attn, theirs).kernel
            kernel.value = ours["attention"][name].reshape(kernel.value.shape)
        _give_norms_and_mlp(layer, layer.self_attn, ours, "kernel")
    state = easydel.EasyDeLState.create(model=model, tx=optimizer(), step=0, init_opt_state=True)
    batch = {name: jnp.asarray(x) for name, x in padded(case).items()}

    def train(state: Any, batch: Any) -> Any:
        return grpo_step(state, batch, 1, 0.0, partition_spec=PartitionSpec(), learning_rate_fn=lambda step: RATE)

    step = jax.jit(train, donate_argnums=0)
    with model.mesh:
        facts = compiled_facts(lambda: step.lower(state, batch))[1]

    def run() -> float:
        nonlocal state
        with model.mesh:
            state, metrics = jax.block_until_ready(step(state, batch))
        return float(optax.tree.norm(metrics.grad_norms))

    return Built(run, facts | shape_of(batch))


def maxtext(case: Case, *, attention: str | None = None) -> Built:
    """Builds MaxText's ``train_step``: cross-entropy on packed rows. It measures no entropy.

    Args:
      case: The shape of the policy and of the batch.
      attention: The kernel on a card; "flash" is a Triton kernel that keeps packed sequences apart. None stands for
        cuDNN's, which does not: each sequence then has a row of its own. On the CPU it is always ``dot_product``.
    """
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile

    rows = packed(case, alone=case.card and attention is None)
    on_gpu = jax.devices()[0].platform == "gpu"
    batch, length = rows.tokens.shape[1:]
    settings = {
        **{"run_name": "peers", "base_output_directory": "/tmp", "enable_checkpointing": "false"},
        **{"dataset_type": "synthetic", "hardware": "gpu" if on_gpu else "cpu", "skip_jax_distributed_system": "true"},
        **{"decoder_block": "qwen3", "use_qk_norm": "true", "logits_via_embedding": "true"},
        **{"normalize_embedding_logits": "false", "enable_dropout": "false", "mlp_activations": "['silu','linear']"},
        **{"attention": (attention or "cudnn_flash_jax") if on_gpu else "dot_product"},
        **{"scan_layers": str(case.card).lower(), "remat_policy": "full" if case.remat else "minimal"},
        **{
            "base_emb_dim": case.width,
            "base_mlp_dim": 3 * case.width,
            "head_dim": case.head_dim,
            "vocab_size": case.vocab,
        },
        **{"base_num_query_heads": case.heads[0], "base_num_kv_heads": case.heads[1]},
        **{"base_num_decoder_layers": case.layers, "normalization_layer_epsilon": 1e-6, "rope_max_timescale": 1000000},
        **{"per_device_batch_size": batch, "max_target_length": length, "packing": "true"},
        **{"dtype": case.dtype, "weight_dtype": "float32", "gradient_clipping_threshold": CLIP},
        **{"learning_rate": RATE, "adam_eps": EPSILON, "adam_weight_decay": DECAY, "adam_b2": 0.999},
    }
    base = str(Path(maxtext.__file__).parent / "configs/base.yml")
    config = pyconfig.initialize(["", base, *(f"{key}={value}" for key, value in settings.items())])
    grid = np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes))
    mesh = jax.sharding.Mesh(grid, config.mesh_axes)
    places = train_compile.get_shaped_inputs(mesh, config)
    (abstract, _), shardings, graphdef = places[0], places[2], places[4]

    def next_of(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.pad(x[0][:, 1:], ((0, 0), (0, 1))))

    data = {
        "inputs": jnp.asarray(rows.tokens[0]),
        "inputs_position": jnp.asarray(rows.positions[0]),
        "inputs_segmentation": jnp.asarray(rows.segment_ids[0]),
        "targets": next_of(rows.tokens),
        "targets_position": jnp.asarray(rows.positions[0]),
        "targets_segmentation": next_of(rows.response_mask.astype(np.int32)),
    }

    def train_step(state: Any, data: Any) -> Any:
        return train.train_step(graphdef, config, shardings, None, state, dict(data))

    step = jax.jit(train_step, donate_argnums=0)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        given = (
            on_mesh((abstract, data), mesh) if case.card else (_state_of_maxtext(abstract, first_weights(case)), data)
        )
        compiled, facts = compiled_facts(lambda: step.lower(*given))
    state = None if case.card else given[0]

    def run() -> float:
        nonlocal state
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            if state is None:
                state = _state_of_maxtext(abstract, first_weights(case), scanned=True)
            state, metrics = jax.block_until_ready((compiled if case.card else step)(state, data))
        return float(metrics["scalar"]["learning/raw_grad_norm"])

    return Built(run, facts | {"rows": batch, "row_tokens": length})


def _state_of_maxtext(abstract: Any, params: Any, *, scanned: bool = False) -> Any:
    """Returns the first state of MaxText, with our weights and moments of zero.

    The axis of scanned layers is MaxText's second one.
    """
    given = {
        "token_embedder/embedding": params["embed"],
        "decoder/decoder_norm/scale": params["final_norm"]["scale"],
    }
    if scanned:
        given |= _block_of_maxtext("decoder/layers", jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), params["layers"]))
    else:
        for i in range(len(params["layers"]["mlp_norm"]["scale"])):
            given |= _block_of_maxtext(f"decoder/layers_{i}", layer_of(params, i))

    def leaf(path: tuple[Any, ...], shape: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), shape.shape)
        weights = given.pop(name.removeprefix("model/"), None) if name.startswith("model/") else None
        return jnp.zeros(shape.shape, shape.dtype) if weights is None else weights.reshape(shape.shape)

    state = jax.tree_util.tree_map_with_path(leaf, abstract)
    if given:
        raise RuntimeError(f"MaxText has no weights of the names {sorted(given)}")
    return state


def _block_of_maxtext(layer: str, ours: Any) -> dict[str, jax.Array]:
    """Returns the weights of one of our blocks by their names in MaxText."""
    norms = {"pre_self_attention_layer_norm": "attention_norm", "post_self_attention_layer_norm": "mlp_norm"}
    attention = {"query": "query", "key": "key", "value": "value", "out": "output"}
    mlp = {"wi_0": "gate", "wi_1": "up", "wo": "down"}
    given = {f"{layer}/{theirs}/scale": ours[name]["scale"] for theirs, name in norms.items()}
    given |= {f"{layer}/mlp/{theirs}/kernel": ours["mlp"][name] for theirs, name in mlp.items()}
    given |= {f"{layer}/self_attention/{theirs}/kernel": ours["attention"][n] for theirs, n in attention.items()}
    for name in ("query_norm", "key_norm"):
        given[f"{layer}/self_attention/{name}/scale"] = ours["attention"][name]["scale"]
    return given
