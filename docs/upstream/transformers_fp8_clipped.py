"""QuantizedCache("fp8") clips later keys to the largest of its first update

Package: transformers 5.23.0
Prints: AssertionError: a key of 2.0 is read back as 1.0
Expected: 2. The scale is "frozen after the first update, so new states are appended as-is": whatever is larger than
the first prompt's largest is cut to it. A first turn of a few tokens sets the range of the whole conversation.
Change: Leave headroom, store a scale for each update, or quantize again with a larger one.
"""

import torch
from transformers.cache_utils import Fp8QuantizedLayer

layer, ones = Fp8QuantizedLayer(), torch.ones(1, 1, 1, 4)
layer.update(ones, ones)
keys, _ = layer.update(2 * ones, 2 * ones)
assert torch.equal(keys[0, 0, 1], 2 * ones[0, 0, 0]), f"a key of 2.0 is read back as {keys[0, 0, 1, 0]:.1f}"
