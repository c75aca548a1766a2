"""Fast decoding for byte-level vocabularies (GPT-2's, and with it Qwen's): each token's bytes, looked up and joined.

``tokenizers`` makes several strings a token; a response of 8,192 tokens takes it more than twice as long.
"""

from __future__ import annotations

import numpy as np
import tokenizers

# Bytes that stand for themselves in a token's text; the others, in order, are the characters from 256 on.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTED)
_BYTES = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}


class ByteLevelDecoder:
    """``decode`` of a tokenizer whose decoder is ``tokenizers.decoders.ByteLevel``, special tokens left out."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Takes the bytes of each token; tokens added to ``tokenizer`` later are not known."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # Ids of no token give nothing; the last place stands for all that are beyond the vocabulary.
        self._pieces = [b""] * (max(vocabulary.values(), default=-1) + 2)
        special = {place for place, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        for token, place in vocabulary.items():
            if place not in special:
                self._pieces[place] = _bytes_of(token)

    def __call__(self, token_ids: np.ndarray) -> str:
        """The text of int [t] ids; what is no UTF-8 becomes U+FFFD."""
        known = np.minimum(token_ids, len(self._pieces) - 1)
        return b"".join(map(self._pieces.__getitem__, known.tolist())).decode("utf-8", "replace")


def _bytes_of(token: str) -> bytes:
    """Those that its characters stand for; an added token that has others is text as it is."""
    try:
        return bytes(map(_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()
