"""NonCausalAttnPress lets padded keys take attention: -1e-9 for minus infinity

Package: kvpress 0.5.5
Prints: AssertionError: the last chunk's two keys are given 2.9 in sum, not 2
Expected: 2, since each of the two queries of the last chunk gives its two keys 1 in sum. Padded keys are filled with
-1e-9, a logit of zero, so they take part; what the softmax gives them is cut off.
Change: Fill with `-inf` (padded queries are dropped anyway).
"""

import torch
from kvpress import NonCausalAttnPress

torch.manual_seed(0)
q, k = torch.randn(1, 1, 10, 8), torch.randn(1, 1, 10, 8)
last = NonCausalAttnPress.non_causal_chunked_attn(q, k, chunk_size=8)[0, 0, 8:]
exact = (q[0, 0, 8:] @ k[0, 0, 8:].T).softmax(-1).sum(0)
assert torch.allclose(exact.sum(), torch.tensor(2.0))
assert torch.allclose(last, exact, atol=0.01), f"the last chunk's two keys are given {last.sum():.1f} in sum, not 2"
