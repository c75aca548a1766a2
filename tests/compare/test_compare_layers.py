"""The layer and operation at which this library's forward differs from transformers' is found, with planted faults."""

import copy
import json

import numpy as np
import pytest

pytest.importorskip("transformers")

from hybrids import hybrid_model
from planted_layers import FAULTS, HYBRID_FAULTS
from toy_runs import outcome, printed
from transformers_models import hf_model, mixture

from rljax.commands import compare
from rljax.compare.layers.differences import LIMITS, compare_layers, precision
from rljax.compare.layers.findings import judge_layers
from rljax.compare.layers.jax_tracer import JaxForm, JaxTracer
from rljax.compare.layers.operations import logprobs, operations
from rljax.compare.layers.torch_tracer import TorchTracer
from rljax.compare.layers.tracers import open_tracer

OTHER_FAULTS = [fault for fault in HYBRID_FAULTS if fault != "state"]
SHAPE = (64, 64, 128, 2, 4, 2, 32, True, 10_000.0)
HYBRID = (64, 64, 128, 8, 4, 2, 32, True, 2, 4, 16, 24, 4, 0.25)
TOKENS = np.random.default_rng(0).integers(2, 62, 48).astype(np.int32)
MORE_TOKENS = np.random.default_rng(0).integers(2, 62, 100).astype(np.int32)  # more than a chunk of a delta net


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    hf_model(SHAPE).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.harness), "bfloat16"])
def reference(request, directory):
    # transformers rounds its logits to the dtype of the model, so the reference rounds them, too.
    return JaxTracer(directory, JaxForm(request.param, logits=request.param), f"jax:{request.param}")


def judged(reference, tested, effects=0, tokens=TOKENS):
    comparison = compare_layers(reference, tested, tokens, effects)
    return comparison, judge_layers(comparison)


def test_a_sound_pair_is_rounding_evenly(reference, directory):
    comparison, verdict = judged(reference, TorchTracer(directory, reference.dtype, "hf"), effects=4)
    assert verdict.passed
    assert verdict.findings == []
    assert [each.operation.name for each in comparison.differences] == [op.name for op in operations(reference.config)]
    assert len(comparison.differences) == 2 * 17 + 3
    assert comparison.logprob_mean < {"float32": 1.1e-6, "bfloat16": 3.8e-2}[reference.dtype]
    assert max(each.ratio for each in comparison.differences) < 1
    effects = [each.effect_mean for each in comparison.differences if each.effect_mean is not None]
    assert len(effects) == 4
    assert 0 < max(effects) < 3 * comparison.logprob_mean
    assert verdict.sentence == "rounding, evenly"


SMALL_SCALES = {"eps": "norm before attention", "projection": "layer 1, up projection", "norm": "layer 1, query norm"}


@pytest.mark.parametrize("fault", SMALL_SCALES)
def test_a_small_scale_is_found_in_the_mean_of_many_numbers(reference, directory, fault):
    """An eps is 1e-5 for 1e-6, a product and a norm are times 1.001 and 0.999. Rounding changes one number by more."""
    tested = TorchTracer(directory, reference.dtype, "hf", "eager")
    layers = tested.model.model.layers
    if fault == "eps":
        for layer in layers:
            layer.input_layernorm.variance_epsilon = 1e-5
    else:
        part, factor = (layers[1].mlp.up_proj, 1.001) if fault == "projection" else (layers[1].self_attn.q_norm, 0.999)
        wide = copy.deepcopy(part).float()
        part.forward = lambda x: (wide(x.float()) * factor).to(x.dtype)
    tokens = np.random.default_rng(0).integers(2, 62, 128).astype(np.int32)
    _, verdict = judged(reference, tested, tokens=tokens)
    (found,) = verdict.findings
    assert found.place.endswith(SMALL_SCALES[fault]), verdict.sentence
    assert "lower precision" not in verdict.sentence


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_place(reference, directory, fault):
    plant, place = FAULTS[fault]
    tested = TorchTracer(directory, reference.dtype, "hf", "eager")
    plant(tested.model)
    if fault == "head" and reference.dtype == "bfloat16":  # this library has a float32 head itself
        _, verdict = judged(TorchTracer(directory, "bfloat16", "plain", "eager"), tested)
        assert not verdict.passed
        assert verdict.sentence == "logits (rounded to bfloat16 in plain only); all else: rounding, evenly"
        return
    _, verdict = judged(reference, tested)
    assert not verdict.passed
    places = {finding.place for finding in verdict.findings}
    assert place in places
    assert len(places) <= 2, places
    if fault == "sum" and reference.dtype == "bfloat16":
        assert verdict.sentence.count("as of a sum in a lower precision") == 2


def test_numbers_that_are_not_finite_name_their_side(directory):
    broken, sound = (TorchTracer(directory, "float32", label, "eager") for label in ("broken", "sound"))
    # With one fault in float32, the effect of its operation is the whole difference of the log-probabilities.
    layer = broken.model.model.layers[0]
    layer.self_attn.o_proj.weight.data.mul_(1.01)
    comparison, _ = judged(sound, broken, effects=1)
    (found,) = [each for each in comparison.differences if each.effect_mean is not None]
    assert found.operation.name == "0/attention_output"
    assert found.own == pytest.approx(0.01, rel=1e-3)
    assert found.effect_mean == pytest.approx(comparison.logprob_mean, rel=1e-2)
    layer.mlp.up_proj.weight.data.fill_(np.inf)
    for pair, side in (((broken, sound), "the reference"), ((sound, broken), "the tested scorer")):
        comparison, verdict = judged(*pair)
        (up,) = (each for each in comparison.differences if each.operation.name == "0/up")
        assert (up.ratio, up.hint) == (np.inf, f"{side} gave numbers that are not finite")
        assert up.hint in verdict.sentence


@pytest.mark.parametrize(("family", "more"), [("Qwen2", {}), ("Qwen3Moe", mixture(4, 2, 32, True))])
def test_other_families_have_their_operations(family, more, tmp_path):
    hf_model((*SHAPE[:6], 16, *SHAPE[7:]), family, **more).save_pretrained(tmp_path)
    reference = JaxTracer(tmp_path, JaxForm("float32"), "jax")
    comparison, verdict = judged(reference, TorchTracer(tmp_path, "float32", "hf"))
    assert verdict.sentence == "rounding, evenly"
    assert len(comparison.differences) == 2 * {"Qwen2": 15, "Qwen3Moe": 14}[family] + 3


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.harness)])
def hybrid(request, tmp_path_factory):
    """Returns a hybrid of two periods whose heads forget slowly, in a directory and as a reference."""
    path = tmp_path_factory.mktemp("hybrid")
    hybrid_model(HYBRID).save_pretrained(path)
    return path, JaxTracer(path, JaxForm(request.param, logits=request.param), f"jax:{request.param}")


def test_a_hybrid_has_the_operations_of_its_blocks(hybrid):
    path, reference = hybrid
    comparison, verdict = judged(reference, TorchTracer(path, reference.dtype, "hf", "eager"), tokens=MORE_TOKENS)
    assert verdict.sentence == "rounding, evenly"
    names = [each.operation.name for each in comparison.differences]
    assert names == [op.name for op in operations(reference.config)]
    mixers = [[name[2:] for name in names if name.startswith(f"{layer}/")][1:-7] for layer in (2, 3)]
    assert [" ".join(kinds) for kinds in mixers] == [
        "delta_qkv delta_gate delta_rate delta_step convolution delta_rule gated_norm attention_output",
        "query key value query_norm key_norm query_rope key_rope attention gated_attention attention_output",
    ]


@pytest.mark.parametrize("fault", ["state", *(pytest.param(f, marks=pytest.mark.harness) for f in OTHER_FAULTS)])
def test_a_fault_in_a_hybrid_is_found_at_its_place(hybrid, fault, monkeypatch):
    path, reference = hybrid
    plant, place = HYBRID_FAULTS[fault]
    tested = TorchTracer(path, reference.dtype, "hf", "eager")
    plant(tested.model, monkeypatch)
    _, verdict = judged(reference, tested, tokens=MORE_TOKENS)
    places = [finding.place for finding in verdict.findings]
    assert place in places, verdict.sentence
    assert len(places) <= (2 if fault == "swapped" else 1), verdict.sentence


def test_a_hidden_operation_is_compared_with_the_next_one(hybrid, monkeypatch):
    """The tested scorer does not show its convolution. Another one is found in the delta rule."""
    path, reference = hybrid
    tested = TorchTracer(path, reference.dtype, "hf", "eager")
    comparison, verdict = judged(reference, Hiding(tested, "convolution"), tokens=MORE_TOKENS)
    assert verdict.sentence == "rounding, evenly"
    known = {each.operation.name: each for each in comparison.differences}
    assert "0/convolution" not in known
    assert known["0/delta_rule"].hint == "with the short convolution"
    assert known["0/delta_rule"].limit == 2 * LIMITS[reference.dtype]
    HYBRID_FAULTS["taps"][0](tested.model, monkeypatch)
    for pair in ((reference, Hiding(tested, "convolution")), (Hiding(reference, "convolution"), tested)):
        _, verdict = judged(*pair, tokens=MORE_TOKENS)
        assert [finding.place for finding in verdict.findings] == ["layer 1, delta rule"]
        assert "with the short convolution" in verdict.sentence


class Hiding:
    """A scorer that neither shows an operation nor takes given values for it, as an engine's kernel."""

    def __init__(self, tracer, kind):
        self.label, self.dtype, self.config = tracer.label, tracer.dtype, tracer.config
        self._tracer, self._kind = tracer, kind

    def run(self, tokens, given):
        return self._shown(self._tracer.run(tokens, self._shown(given)))

    def _shown(self, values):
        return {name: value for name, value in values.items() if not name.endswith(self._kind)}


def test_the_form_of_a_scorer_is_seen(directory):
    """A batch of another shape passes. The logits are float32 also in bfloat16, but transformers rounds its own."""
    reference = JaxTracer(directory, JaxForm("bfloat16"), "jax")
    with open_tracer("jax:bfloat16,rows=4,width=128", directory) as tested:
        comparison, verdict = judged(reference, tested)
    assert verdict.passed
    assert max(each.own for each in comparison.differences) < 9e-5
    with pytest.raises(ValueError, match="width must be at least the 48 tokens"):
        JaxTracer(directory, JaxForm("bfloat16", width=32), "narrow").run(TOKENS, {})
    _, verdict = judged(reference, TorchTracer(directory, "bfloat16", "hf"))
    assert not verdict.passed
    assert verdict.sentence == "logits (rounded to bfloat16 in hf only); all else: rounding, evenly"
    assert [finding.operations for finding in verdict.findings] == [["logits"]]
    # The precision of numbers, and log-probabilities by hand.
    found = [precision(np.float32([1 + 2.0**-n, 0])) for n in (7, 10, 11)]
    assert found == ["bfloat16", "float16", "float32"]
    logits = np.log(np.float32([[3, 1], [3, 1]]))  # the probabilities 3/4 and 1/4
    np.testing.assert_allclose(logprobs(logits, np.int32([0, 0, 1])), np.log([0.75, 0.25]), rtol=1e-6)


@pytest.mark.harness
@pytest.mark.mesh
def test_a_sum_over_devices_in_bfloat16_is_named(directory):
    """The parts of a sum over ``tp`` are rounded to the dtype before they are sent; float32 rounds nothing."""
    reference = {dtype: JaxTracer(directory, JaxForm(dtype), dtype) for dtype in ("bfloat16", "float32")}
    places = {}
    for dtype, one in reference.items():
        tested = JaxTracer(directory, JaxForm(dtype, tp=2), "tp")
        places[dtype] = {finding.place for finding in judged(one, tested)[1].findings}
    named = {"every layer, output projection", "every layer, down projection"}
    assert places == {"bfloat16": named, "float32": set()}


@pytest.fixture
def words(tmp_path, directory):
    """Returns the words of a comparison of layers with one scorer, which writes into ``tmp_path / "out"``."""
    path = tmp_path / "tokens.jsonl"
    path.write_text(json.dumps({"sequence_id": "a", "token_ids": TOKENS.tolist(), "response_mask": [1] * 48}) + "\n")
    of_model = ["--model", str(directory), "--layers", "--scorer", "jax:float32"]
    return [str(path), *of_model, "--out", str(tmp_path / "out")]


def test_the_program_writes_its_reports(words, tmp_path):
    more = ["--layer-tokens", "20", "--scorer", "hf:float32", "--picture", str(tmp_path / "layers.png")]
    assert "verdict: rounding, evenly" in printed(compare.main, [*words, *more])
    (document,) = json.loads((tmp_path / "out" / "layers.json").read_text())
    assert (document["passed"], document["tokens"], document["tested"]) == (True, 20, "hf:float32")
    assert document["differences"][1]["operation"] == "0/attention_norm"
    assert "| layer 1, attention |" in (tmp_path / "out" / "layers.md").read_text()
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    model = hf_model(SHAPE)
    FAULTS["projection"][0](model)
    model.save_pretrained(tmp_path / "other")
    status, out, _ = outcome(compare.main, [*words, "--scorer", f"jax:float32@{tmp_path / 'other'}"])
    assert status == 1
    assert "verdict: layer 1, key projection (own error 0.01, limit 2e-06" in out


def test_the_program_refuses_what_it_cannot_compare(words, tmp_path, fake):
    hf_model((64, 64, 192, *SHAPE[3:])).save_pretrained(tmp_path / "wide")
    sglang = f"sglang:{fake.url}"  # SGLang has no hooks that can be put into a running server
    for arguments, message in (
        ([], "compares the first --scorer with each other one, got 1"),
        (["hf:float32", "--sequence", "b"], "no sequence 'b' among the 1 there"),
        (["hf:float32", "--layer-tokens", "1"], "--layer-tokens must be at least 2, got 1"),
        ([f"hf:float32@{tmp_path / 'wide'}"], "has intermediate_size = 192, expected 128"),
        ([sglang], f"cannot look into the scorer '{sglang}': SGLang has no hooks"),
        (["jax-decode:float32"], "cannot look into the scorer 'jax-decode:float32'"),
        (["jax:float32,tq=2"], "has the key 'tq', expected attention, head, logits, fsdp, tp, rows, width"),
        (["jax:float32,tp=0"], "tp=0, expected a number of at least 1"),
        (["jax:float32,head=int8"], "head=int8, expected one of float32, bfloat16, float16"),
        (["hf:float32,tp=2"], "has the key 'tp', expected attention, rows"),
    ):
        status, _, error = outcome(compare.main, [*words, *(["--scorer"] if arguments else []), *arguments])
        assert (status, message in error) == (2, True), error
    assert not fake.seen
