"""Checksums of arrays (on their devices) and of JSON, and checks that a checkpoint belongs to the run that reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.errors import name_changes
from rljax.policy.config import SIZES, PolicyConfig
from rljax.sharding import fetch, on_devices
from rljax.weights.sums import mixed


def array_checksums(tree: Any) -> dict[str, str]:
    """Computes a checksum of each array of a pytree, the same for any sharding.

    The 64 bits are two sums over all elements, each mixed with its position; one changed element always changes them.
    Arrays are summed on their devices, one after the other in the order of the tree. So no two devices wait for each
    other in different sums. An array in the host's memory is first copied to the devices. The result has the dtype,
    shape and checksum of each array by tree path, such as ``float32[2, 3] 0123456789abcdef``.
    """
    sums = [fetch(_sums(on_devices(leaf))) for leaf in jax.tree.leaves(tree)]
    forms = array_forms(tree).items()
    return {path: f"{form} {first:08x}{second:08x}" for (path, form), (first, second) in zip(forms, sums, strict=True)}


def array_forms(tree: Any) -> dict[str, str]:
    """Returns dtype and shape of each leaf, an array or ``jax.ShapeDtypeStruct``, by path such as ``params/gate``."""
    leaves = jax.tree.leaves_with_path(tree)
    texts = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}
    return {jax.tree_util.keystr(path, simple=True, separator="/"): text for path, text in texts.items()}


def json_checksum(value: Any) -> str:
    """Computes the SHA-256 of a JSON value in its canonical form: sorted keys, no spaces.

    Values that JSON does not know, such as the dates of a Parquet file, count by their texts.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@jax.jit
def _sums(x: jax.Array) -> jax.Array:
    """Computes the two sums of an array of any shape, with elements of 1, 2 or 4 bytes: uint32 [2]."""
    unsigned = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    word = jax.lax.bitcast_convert_type(unsigned, f"uint{8 * unsigned.dtype.itemsize}").astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * stride
    placed = jax.lax.bitcast_convert_type(word ^ position * np.uint32(0x9E3779B1), jnp.int32)
    parts = (jax.lax.bitcast_convert_type(each, jnp.uint32) for each in mixed(placed))
    return jnp.stack([jnp.sum(each, dtype=jnp.uint32) for each in parts])


def policy_record(policy: PolicyConfig) -> dict[str, Any]:
    """Returns the fields of the policy's configuration as a JSON object, for a checkpoint."""
    return json.loads(json.dumps(dataclasses.asdict(policy)))


def check_policy(recorded: dict[str, Any], policy: PolicyConfig, path: str) -> None:
    """Raises ValueError if a checkpoint's ``policy_record`` differs from the record of ``policy``, read at ``path``.

    An older checkpoint lacks fields that came later. They count with their defaults.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(policy) if field.name not in SIZES}
    if changes := name_changes(defaults | recorded, policy_record(policy)):
        raise ValueError(f"the checkpoint is of another model than {path}: {changes}")


def check_fingerprints(recorded: dict[str, str], now: dict[str, str], names: dict[str, str]) -> None:
    """Raises ValueError if frozen weights, tokenizer, template or problems are not the checkpoint's.

    ``recorded`` (of the checkpoint) and ``now`` have checksums by kind; only kinds that both have are compared.
    ``names`` has the path or task of each kind, for the message.
    """
    began = "the run began with"
    model = "has other weights than before: give the model that the run began with as model.path"
    faults = {
        "reference": f"the reference policy of loss.kl {model}",
        "base": f"the frozen model under the adapters {model}",
        "tokenizer": f"the tokenizer reads or writes texts otherwise than before: put back the tokenizer that {began}",
        "chat_template": f"the chat template is not the one before: put back the template that {began}",
        "problems": f"the training problems or their order are not those before: put back the data that {began}",
        "extra_info": "the extra_info of the training problems, or another entry for the reward, is not as before: put "
        f"back the data that {began}",
    }
    for kind, fault in faults.items():
        if kind in recorded and kind in now and recorded[kind] != now[kind]:
            raise ValueError(f"{names[kind]}: {fault}, or give another run.dir")
