"""Published eviction policies. `retain` applies a policy to a prompt. `start` and `advance` decode with a policy."""

from reference.policies.adakv import adakv, with_adaptive_budgets
from reference.policies.blocks import in_blocks
from reference.policies.cadences import advance, advance_turn, start
from reference.policies.cake import cake
from reference.policies.caote import caote
from reference.policies.capkv import capkv
from reference.policies.chunkkv import chunkkv, chunkkv_described
from reference.policies.chunks import in_chunks
from reference.policies.compactor import compactor, leverage, noncausal
from reference.policies.composition import compose, named_policy, plain_policy
from reference.policies.criticalkv import critical_adakv, criticalkv, with_critical_selection
from reference.policies.crystalcache import crystalcache
from reference.policies.curdkv import curdkv
from reference.policies.defensivekv import defensivekv
from reference.policies.diversity import diverse, scheduled, toward_mean_values
from reference.policies.epicache import epicache
from reference.policies.expected_attention import expected_attention
from reference.policies.expected_attention_stats import expected_attention_stats
from reference.policies.fast_kvzip import fast_kvzip
from reference.policies.finch import finch
from reference.policies.full_cache import full_cache
from reference.policies.h2o import h2o, h2o_described
from reference.policies.keydiff import keydiff
from reference.policies.knorm import knorm
from reference.policies.kvcrush import kvcrush, with_representatives
from reference.policies.kvzap import kvzap
from reference.policies.kvzip import kvzip, kvzip_plus, kvzip_uniform
from reference.policies.kvzip_heads import kvzip_heads
from reference.policies.lagkv import lagkv
from reference.policies.morphkv import morphkv
from reference.policies.nestedkv import (
    eviction_budget,
    nestedkv,
    nestedkv_without_adaptive,
    nestedkv_without_both,
    nestedkv_without_continuum,
)
from reference.policies.parts import apply_transforms
from reference.policies.pieces import in_pieces
from reference.policies.pyramidkv import pyramidkv, pyramidkv_described
from reference.policies.qfilters import q_filters
from reference.policies.random_tokens import random_tokens
from reference.policies.retain import retain, retain_turn
from reference.policies.rkv import rkv
from reference.policies.scored import policy_from_score
from reference.policies.simlayerkv import simlayerkv
from reference.policies.snapkv import snapkv
from reference.policies.streaming_llm import streaming_llm
from reference.policies.texts import policy_from_text
from reference.policies.tova import tova
from reference.policies.triattention import triattention
from reference.policies.vase import vase
from reference.policies.vatp import vatp, with_value_norms

__all__ = [
    "adakv", "advance", "advance_turn", "apply_transforms", "cake", "caote", "capkv", "chunkkv", "chunkkv_described",
    "compactor", "compose", "critical_adakv", "criticalkv", "crystalcache", "curdkv", "defensivekv", "diverse",
    "epicache", "eviction_budget", "expected_attention", "expected_attention_stats", "fast_kvzip", "finch",
    "full_cache", "h2o", "h2o_described", "in_blocks", "in_chunks", "in_pieces", "keydiff", "knorm", "kvcrush", "kvzap",
    "kvzip", "kvzip_heads", "kvzip_plus", "kvzip_uniform", "lagkv", "leverage", "morphkv", "named_policy", "nestedkv",
    "nestedkv_without_adaptive", "nestedkv_without_both", "nestedkv_without_continuum", "noncausal", "plain_policy",
    "policy_from_score", "policy_from_text", "pyramidkv", "pyramidkv_described", "q_filters", "random_tokens", "retain",
    "retain_turn", "rkv", "scheduled", "simlayerkv", "snapkv", "start", "streaming_llm", "tova", "toward_mean_values",
    "triattention", "vase", "vatp", "with_adaptive_budgets", "with_critical_selection", "with_representatives",
    "with_value_norms",
]
