"""ChunkKVPress keeps the first sequence's chunks in every sequence of a batch

Package: kvpress 0.5.5
Prints: AssertionError: the second sequence keeps the chunks of the first one
Expected: what the second sequence keeps alone. `compress` reads `top_chunks.indices[0]` for all rows, without a
word.
Change: Gather with the indices of each row, which hold equally many chunks, or refuse a batch.
"""

from types import SimpleNamespace

import torch
from kvpress import ChunkKVPress, KnormPress

torch.manual_seed(0)
keys, press = torch.randn(2, 1, 80, 8), ChunkKVPress(KnormPress(0.5), chunk_length=20)
both, _ = press.compress(SimpleNamespace(head_dim=8), None, keys, keys, None, {})
alone, _ = press.compress(SimpleNamespace(head_dim=8), None, keys[1:], keys[1:], None, {})
assert torch.equal(both[1:], alone), "the second sequence keeps the chunks of the first one"
