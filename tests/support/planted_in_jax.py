"""Faults planted into this library's forward: into its weights, configuration, options or values."""

import json

import ml_dtypes
import numpy as np
from planted_layers import FAULTS
from transformers_models import hf_model

from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer

IN_WEIGHTS = ("projection", "one element", "swapped", "stale")


def faulty(fault, shape, directory, dtype):
    """Returns a tracer with a fault of ``planted_layers``; the faulty model is saved in ``directory``."""
    model = hf_model(shape)
    if fault in IN_WEIGHTS:
        FAULTS[fault][0](model)
    model.save_pretrained(directory)
    if fault in ("rope base", "eps"):
        _change_config(directory / "config.json", fault)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    # A head in bfloat16 rounds the operands of its products; a head in float32 does not round its logits.
    head = {"head": other, "logits": "" if dtype == "bfloat16" else dtype} if fault == "head" else {"logits": dtype}
    tracer = JaxTracer(directory, JaxForm(dtype, **head), f"jax with another {fault}")
    changes = {"no norms": without_norms, "cache": in_eight_bits}
    return Changed(tracer, changes[fault]) if fault in changes else tracer


def _change_config(path, fault):
    config = json.loads(path.read_text())
    if fault == "eps":
        config["rms_norm_eps"] = 1e-3
    else:
        config["rope_parameters"]["rope_theta"] = 11_000.0
    path.write_text(json.dumps(config))


class Changed:
    """A tracer in which some operations compute something else; later operations use the changed values.

    Args:
      tracer: The sound tracer.
      change: A function of (layer, inputs by name, run) that returns the values of the changed operations. Its argument
      ``run(given)`` computes without the fault.
    """

    def __init__(self, tracer, change):
        self.label, self.dtype, self.config = tracer.label, tracer.dtype, tracer.config
        self._tracer, self._change = tracer, change

    def run(self, tokens, given):
        wrong = {}

        def run(more):
            return self._tracer.run(tokens, wrong | dict(given) | more)

        for layer in range(self.config.num_layers):
            wrong |= self._change(layer, run({}) | wrong | dict(given), run)
        return run({}) | wrong


def without_norms(layer, inputs, run):
    return {f"{layer}/{name}_norm": inputs[f"{layer}/{name}"] for name in ("query", "key")}


def in_eight_bits(layer, inputs, run):
    names = (f"{layer}/key_rope", f"{layer}/value")
    rounded = {name: inputs[name].astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for name in names}
    return {f"{layer}/attention": run(rounded)[f"{layer}/attention"]}
