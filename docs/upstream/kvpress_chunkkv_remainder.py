"""ChunkKVPress counts a rest of one token as a whole chunk

Package: kvpress 0.5.5
Prints: AssertionError: 1 of 41 tokens is kept at ratio 0.6
Expected: some 16 tokens, two fifths of 41. Here the rest, a chunk of one token, wins one of int(3 * 0.4) = 1 chunks,
and the whole prompt is gone: 98 % are removed where 60 % were asked for.
Change: Spend the budget in tokens: take chunks by score while they fit, and cut the last one.
"""

from types import SimpleNamespace

import torch
from kvpress import ChunkKVPress, KnormPress

keys = torch.randn(1, 1, 41, 8)
keys[:, :, 40] = 0  # the last token has the smallest norm, which Knorm keeps first
press = ChunkKVPress(KnormPress(0.6), chunk_length=20)
kept, _ = press.compress(SimpleNamespace(head_dim=8), None, keys, keys, None, {})
assert kept.shape[2] > 1, f"{kept.shape[2]} of 41 tokens is kept at ratio 0.6"
