"""Opens the scorer that a spec such as ``jax:bfloat16,tp=2`` names as a tracer, which shows its operations' values."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import get_args

from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer
from rljax.compare.layers.operations import Tracer
from rljax.compare.layers.torch_tracer import TorchTracer
from rljax.compare.layers.vllm_tracer import VllmTracer
from rljax.compare.scorers import DTYPES
from rljax.policy.config import AttentionName

_DTYPE = f"(?P<dtype>{'|'.join(DTYPES)})"
_SPEC = re.compile(rf"(?P<kind>jax|hf):{_DTYPE}(?P<options>(,\w+=[\w.-]+)*)(@(?P<directory>.+))?", re.DOTALL)
_KEYS = {"jax": ("attention", "head", "logits", "fsdp", "tp", "rows", "width"), "hf": ("attention", "rows")}
_NAMES = {"attention": get_args(AttentionName), "head": DTYPES, "logits": DTYPES}
_FORMS = "jax:DTYPE[,KEY=VALUE...][@DIR], hf:DTYPE[,KEY=VALUE...][@DIR] or vllm:URL"


def check_traced(spec: str) -> None:
    """Raises ValueError if a spec names no scorer whose operations can be compared. It opens nothing."""
    if spec.startswith("sglang:"):
        said = "SGLang has no hooks that can be put into a running server; compare it without --layers"
        raise ValueError(f"--layers cannot look into the scorer {spec!r}: {said}")
    if not (spec.startswith("vllm:http") or _SPEC.fullmatch(spec)):
        raise ValueError(f"--layers cannot look into the scorer {spec!r}, expected {_FORMS}")


def open_tracer(spec: str, model: str | os.PathLike[str] | None) -> contextlib.AbstractContextManager[Tracer]:
    """Opens a scorer whose operations can be compared; the end of a ``with`` closes it.

    The keys of ``jax:`` are attention (auto, xla, cudnn or splash), head (the dtype of the LM head's products), logits
    (the dtype that logits are rounded to), fsdp, tp, rows and width (the batch, in rows and tokens). The keys of
    ``hf:`` are attention (a name of transformers) and rows. Each row of a batch holds the same sequence. ``vllm:`` is a
    running server. ``model`` is the Hugging Face directory, if the spec names none.

    Raises:
      ValueError: The spec is unknown, or the scorer cannot be made here.
      ServerError: A server does not answer.
    """
    check_traced(spec)
    found = _SPEC.fullmatch(spec)
    if found is None:
        return contextlib.closing(VllmTracer(spec.removeprefix("vllm:"), model))
    kind, dtype = found["kind"], found["dtype"]
    directory = Path(found["directory"] or model or "")
    if not found["directory"] and model is None:
        raise ValueError(f"scorer {spec!r} needs a model directory")
    options = dict(pair.split("=") for pair in found["options"].split(",")[1:])
    numbers = {key: _number(spec, key, value) for key, value in options.items() if key not in _NAMES}
    if unknown := sorted(set(options) - set(_KEYS[kind])):
        raise ValueError(f"scorer {spec!r} has the key {unknown[0]!r}, expected {', '.join(_KEYS[kind])}")
    if kind == "hf":
        torch_tracer = TorchTracer(directory, dtype, spec, options.get("attention"), numbers.get("rows", 1))
        return contextlib.nullcontext(torch_tracer)
    for key, names in _NAMES.items():
        if options.get(key, names[0]) not in names:
            raise ValueError(f"scorer {spec!r} has {key}={options[key]}, expected one of {', '.join(names)}")
    form = JaxForm(dtype, **(options | numbers))  # type: ignore[arg-type]
    return contextlib.nullcontext(JaxTracer(directory, form, spec))


def _number(spec: str, key: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"scorer {spec!r} has {key}={value}, expected a number of at least 1")
    return int(value)
