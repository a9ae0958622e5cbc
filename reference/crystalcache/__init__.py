"""CrystalCache, prefill: S1 co-attention, S2 trunks, S3 impact, S4 trunk graph, S5 score, S6 dissolution."""

from reference.crystalcache.pipeline import prefill

__all__ = ["prefill"]
