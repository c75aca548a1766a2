"""The two walks through the house: from a step to an HTTP request, and from a publish to bytes on a server.

A run of two steps is watched where asyncio takes work from another thread, httpx sends, and a file is opened.
"""

import asyncio
import builtins
import json
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from toy_runs import TOY_BASE, completed, tiny

import rljax
from rljax.policy.families import read_config
from rljax.policy.hf import load_params
from rljax.policy.score import make_scorer
from rljax.rollout.servers.vllm.client import GENERATE
from rljax.rollout.servers.vllm.server import ROLLOUTS

ROOT = Path(rljax.__file__).parent
SAMPLE_FRAMES, SAMPLE_FILES = 9, 8
PUBLISH_FILES = 9
# Python 3.12 runs a comprehension in the frame of its function.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


class Frame(NamedTuple):
    file: str
    function: str


class Watched(NamedTuple):
    path: str  # the path of the request, or the name of the file
    frames: list[Frame]  # the frames of the package, outermost first, from ``one_step`` on
    threads: list[int]  # the threads of the frames, in order


def own_frames():
    """Returns the package's frames of this thread, outermost first, from ``one_step`` on if that is among them."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and frame.f_code.co_name not in COMPREHENSIONS:
            frames.insert(0, Frame(str(path.relative_to(ROOT)), frame.f_code.co_name))
        frame = frame.f_back
    names = [each.function for each in frames]
    return frames[names.index("one_step") if "one_step" in names else 0 :]


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    """The requests that ``one_step`` led to in a run of two steps, and the files that it opened."""
    from vllm_fake import FakeVllm

    config, lock = read_config(TOY_BASE), threading.Lock()
    params, score = load_params(TOY_BASE, config), make_scorer(config, "float32")

    def draw(prompt, sampling):
        tokens = np.random.default_rng([sampling["seed"] or 0, len(prompt)]).integers(0, 10, sampling["max_tokens"])
        with lock:
            (logprobs,) = score(params, [np.concatenate([prompt, tokens]).astype(np.int32)])
        return tokens.tolist(), logprobs[len(prompt) :].tolist()

    fake = FakeVllm()
    fake.policy = draw
    fake.routes -= {ROLLOUTS}  # there requests of the same moment share a connection, which a task of its own serves
    fake.described = {"shape": json.loads((TOY_BASE / "config.json").read_text())}
    begun, requests, files = {}, [], []
    hop, send, open_file = asyncio.run_coroutine_threadsafe, httpx.AsyncClient.request, builtins.open

    def watched_hop(work, loop):
        begun[work.cr_frame] = own_frames(), threading.get_ident()
        return hop(work, loop)

    async def watched_send(self, method, url, **content):
        frames, outermost = own_frames(), None
        frame = sys._getframe()
        while frame is not None:
            outermost = frame if frame in begun else outermost
            frame = frame.f_back
        if outermost is not None:
            before, thread = begun[outermost]
            requests.append(Watched(httpx.URL(url).path, before + frames, [thread, threading.get_ident()]))
        return await send(self, method, url, **content)

    def watched_open(file, *arguments, **options):
        if str(file).endswith(".safetensors") and "wb" in arguments:
            files.append(Watched(Path(file).name, own_frames(), [threading.get_ident()]))
        return open_file(file, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "run_coroutine_threadsafe", watched_hop)
        patch.setattr(httpx.AsyncClient, "request", watched_send)
        patch.setattr(builtins, "open", watched_open)
        served = ("--rollout.engine", "vllm", "--rollout.urls", fake.url, "--rollout.dtype", "float32")
        precise = ("--precision.compute-dtype", "float32", "--rollout.max-response-tokens", "20")  # as test_prefixes.py
        completed(tiny(TOY_BASE, tmp_path_factory.mktemp("run") / "run", 2, *served, *precise), is_sound=False)
    fake.stop()
    step = Frame("run/step.py", "one_step")
    return [[each for each in found if each.frames[:1] == [step]] for found in (requests, files)]


def test_from_a_step_to_a_request(walks):
    requests, _ = walks
    (walk,) = {tuple(one.frames) for one in requests if one.frames[1].function == "take" and one.path == GENERATE}
    assert len(walk) <= SAMPLE_FRAMES
    assert len({frame.file for frame in walk}) <= SAMPLE_FILES
    assert all(len(set(each.threads)) == 2 for each in requests)


def test_from_a_publish_to_bytes_on_a_server(walks):
    """The tensors are yielded by ``policy/hf`` while the writer asks for them, so that it is on neither stack."""
    requests, files = walks
    loaded = [each for each in requests if each.path == "/update_weights"]
    written = [each for each in files if each.frames[1].function == "publish"]
    assert loaded
    assert written
    passed = {frame.file for each in (*loaded, *written) for frame in each.frames} | {"policy/hf.py"}
    assert len(passed) <= PUBLISH_FILES
