"""CrystalCache: S1 co-attention, S2 trunks, S3 impact, S4 trunk graph, S5 score, S6 dissolution, and decoding.

In this package the paper is Lin, "CrystalCache: Cross-Domain Transfer from Cognitive Memory Crystallization to KV Cache
Eviction in Long-Context LLMs". The essay is "CrystalCache: Borrowing from Memory Psychology to Manage the KV Cache" by
the same author. Sections, equations, tables and algorithms without a name are those of the paper. spec/errata.md lists
the errors of both texts.

`prefill` evicts tokens of a prompt. To decode, first make a state with `start_state`. Then call `decode_step` for each
generated token, and `extend` for each later segment.
"""

from reference.crystalcache.breath import decode_step
from reference.crystalcache.live import empty_state, start_state
from reference.crystalcache.pipeline import prefill
from reference.crystalcache.segments import extend

__all__ = ["decode_step", "empty_state", "extend", "prefill", "start_state"]
