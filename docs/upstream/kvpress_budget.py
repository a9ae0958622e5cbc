"""A budget is one token short if floats round down

Package: kvpress 0.5.5
Prints: AssertionError: 9 of 100 tokens are kept at ratio 0.9
Expected: 10: `compression_ratio` is the fraction of pairs to remove, and a tenth of 100 is 10. `compute_n_kept`
truncates 100 * (1 - 0.9), which is 9.999999999999998 in floating point.
Change: Round to nine places before `int`, or take a number of tokens.
"""

from types import SimpleNamespace

import torch
from kvpress import KnormPress

keys = torch.randn(1, 1, 100, 8)
kept, _ = KnormPress(0.9).compress(SimpleNamespace(head_dim=8), None, keys, keys, None, {})
assert kept.shape[2] == 10, f"{kept.shape[2]} of 100 tokens are kept at ratio 0.9"
