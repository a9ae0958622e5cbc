"""Presses of the comparison: kvspec's kept sets, and the readings that explain the press."""

from collections.abc import Callable, Set
from functools import partial
from itertools import combinations

from lab.measure.peers import composed, learned
from lab.measure.peers import differences as of
from lab.measure.peers.differences import (
    AVERAGE,
    BEHIND_PREFIX,
    BLEND,
    BY_LAYER,
    DRAWN,
    EACH_LAYER,
    EACH_PIECE,
    EQUAL_ENDS,
    FEWER,
    FILLED,
    FLAT,
    FLOORED,
    FROM_BUDGET,
    FROM_PROMPT,
    GIVEN_HEADS,
    IN_CHUNKS,
    IN_FIRST,
    INNER,
    LAST,
    LINE,
    NO_RECENT,
    OF_ALL,
    PER_QUERY,
    PINNED,
    QUOTA,
    SAFE_FIRST,
    SHORT,
    SKETCH,
    TIES,
    TRUNCATED,
    TWO_BUDGETS,
    UNSCALED,
    WHOLE_PROMPT,
    WITHIN,
    Kept,
)
from lab.measure.peers.inputs import Inputs
from reference import policies

# Function that returns kvspec's kept sets, and the readings that explain the press.
OURS: dict[str, tuple[Callable[[Inputs, Set[str]], Kept], tuple[str, ...]]] = {
    "StreamingLLM": (of.streaming, (FLOORED, TRUNCATED, TIES)),
    "SnapKV": (of.snapkv, (FLOORED, TRUNCATED, AVERAGE, TIES)),
    "PyramidKV": (of.pyramidkv, (FLOORED, TRUNCATED, AVERAGE, TIES, LINE, FLAT)),
    "ChunkKV": (of.chunkkv, (FLOORED, TRUNCATED, INNER, IN_CHUNKS)),
    "TOVA": (of.tova, (FLOORED, TRUNCATED, PINNED)),
    "KeyDiff": (of.plain(policies.keydiff), (FLOORED, TRUNCATED)),
    "Knorm": (of.plain(policies.knorm), (FLOORED, TRUNCATED)),
    "AdaKV": (of.adakv, (FLOORED, TRUNCATED, AVERAGE, QUOTA, TIES)),
    "ExpectedAttention": (of.expected, (FLOORED, TRUNCATED, TIES)),
    "CriticalKV": (of.critical, (FLOORED, TRUNCATED, AVERAGE, IN_FIRST)),
    "CriticalAdaKV": (of.critical_ada, (FLOORED, TRUNCATED, AVERAGE, SAFE_FIRST)),
    "LagKV": (of.lagkv, (FLOORED, TRUNCATED, TIES)),
    "ObservedAttention": (of.observed, (FLOORED, TRUNCATED, PER_QUERY, NO_RECENT)),
    "Chunk of KeyDiff": (of.chunk, (FLOORED, TRUNCATED, EACH_PIECE, TIES)),
    "EntropyGatedChunkKV of Knorm": (of.gated, (FLOORED, TRUNCATED)),
    "KVzip": (of.kvzip, (BEHIND_PREFIX, OF_ALL, TIES)),
    "KVzip by layer": (partial(of.kvzip, uniform=True), (BEHIND_PREFIX, OF_ALL, BY_LAYER, TIES)),
    "KVzip+": (partial(of.kvzip, plus=True), (BEHIND_PREFIX, OF_ALL, TIES)),
    "DMS of Knorm": (of.dms, ()),
    "QFilter": (learned.q_filters, (FLOORED, TRUNCATED)),
    "ExpectedAttentionStats": (learned.expected_attention_stats, (FLOORED, TRUNCATED, TIES)),
    "KVzap": (learned.kvzap, (FLOORED, TRUNCATED)),
    "FastKVzip": (learned.fast_kvzip, (OF_ALL, TIES)),
    "CUR": (composed.curdkv, (FLOORED, TRUNCATED, TIES)),
    "Cap": (composed.capkv, (FLOORED, TRUNCATED, TIES)),
    "NonCausalAttn": (composed.noncausal, (FLOORED, TRUNCATED, UNSCALED, FILLED)),
    "LeverageScore": (composed.leverage, (FLOORED, TRUNCATED, SKETCH)),
    "Compactor": (composed.compactor, (FLOORED, TRUNCATED, UNSCALED, FILLED, SKETCH, BLEND, EQUAL_ENDS)),
    "Random": (composed.random_tokens, (FLOORED, TRUNCATED, DRAWN)),
    "SimLayerKV": (composed.simlayerkv, (LAST, FEWER, SHORT)),
    "PerLayerCompression of Knorm": (composed.per_layer, (EACH_LAYER,)),
    "LUKV of Knorm": (composed.lu_kv, (WITHIN,)),
    "Block of KeyDiff": (composed.blocks, (FLOORED, TRUNCATED, FROM_BUDGET, TIES)),
    "DuoAttention": (composed.full_heads, (GIVEN_HEADS,)),
    "Decoding of KeyDiff": (composed.decoding, (FROM_PROMPT, WHOLE_PROMPT)),
    "CompressionRatioDecoding of Knorm": (
        composed.ratio_decoding, (FLOORED, TRUNCATED, FROM_PROMPT, WHOLE_PROMPT),
    ),
    "PrefillDecoding of Knorm": (composed.prefill_decoding, (FROM_PROMPT, TWO_BUDGETS)),
}


def needed(press: str, inputs: Inputs, theirs: Kept, readings: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the smallest set of readings that makes the kept sets equal, or None if no set does."""
    ours, _ = OURS[press]
    for number in range(len(readings) + 1):
        for some in combinations(readings, number):
            if ours(inputs, frozenset(some)) == theirs:
                return some
    return None
