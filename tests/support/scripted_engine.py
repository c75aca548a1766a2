"""A rollout engine whose responses follow a script, and a record in memory: whole loops take moments."""

from records import response

from rljax.errors import StoppedWaitingError
from rljax.rollout.engine import Samples


class RowList(list):
    def write(self, row, histograms):
        self.append(row)

    def sync(self):
        pass


class ScriptedEngine:
    """An engine that answers each prompt from a script, and keeps what was published and asked.

    ``script`` is a function of (prompt, sample index, seed) that returns the response's text with its end-of-sequence
    token. The servers are gone at the publish of ``gone_at_version``; the engine then says that the run is to stop.
    """

    def __init__(self, tokenizer, script, *, gone_at_version=None):
        self.tokenizer, self.script = tokenizer, script
        self.gone_at_version, self.is_gone = gone_at_version, False
        self.published, self.asked = [], []

    def generate(self, prompts, n, sampling, *, seed):
        self.metrics = {"rollout/requests": 0.0}
        return Samples(self.respond(prompts, n, sampling, seed, self.metrics), self.metrics)

    def respond(self, prompts, n, sampling, seed, metrics):
        self._check()
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.asked.append(texts)
        for i, prompt in reversed(list(enumerate(texts))):
            for j in range(n):
                metrics["rollout/requests"] += 1
                tokens = self.tokenizer.encode(self.script(prompt, j, seed))[: sampling.max_response_tokens]
                truncated = tokens[-1] not in sampling.stop_token_ids
                yield response((i, j), tokens, version=self.published[-1], prompt=prompts[i], truncated=truncated)

    def prepare(self, params, policy_version):
        pass

    def publish(self, params, policy_version):
        self.is_gone |= policy_version == self.gone_at_version
        self._check()
        self.published.append(policy_version)
        return {}

    def close(self):
        pass

    def _check(self):
        if self.is_gone:
            raise StoppedWaitingError("no server answers, and the run is to stop")
