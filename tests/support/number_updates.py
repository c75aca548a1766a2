"""An update whose policy is a number."""

from types import SimpleNamespace

import numpy as np

from rljax.policy.head import TokenScores
from rljax.trainer.packing import pack
from rljax.trainer.update import TrainerValues, Updated


class NumberUpdate:
    """An update that raises its policy by one. Its forward gives each token the negative of the number.

    Its own log-probabilities are ``own``; ``asked`` has the arguments of the forwards.
    """

    def __init__(self, own, rows=1):
        self.own, self.rows, self.asked = own, rows, []

    def pack(self, sequences, row=8, rows=None):
        return pack(sequences, row_tokens=row, rows_per_micro_batch=rows or self.rows, micro_batches=8)

    def forward(self, params, batch):
        self.asked.append((params, batch))
        return {}, TokenScores(np.full(batch.tokens.shape, -float(params), np.float32))

    def __call__(self, state, batch, sequences, options):
        values = TrainerValues([np.full(len(s.response), self.own) for s in sequences])
        return Updated(SimpleNamespace(params=state.params + 1), {"policy/loss": 1.0}, {}, lambda: values)

    def counts(self):
        """Returns the number of each forward's policy, and of its response tokens."""
        return [(params, int(batch.response_mask.sum())) for params, batch in self.asked]
