"""Parameters of the methods, validated when they are made, with their presets."""

from spec.parameters.crystalcache import ESSAY, PAPER, TINY, CrystalCacheParameters

__all__ = ["ESSAY", "PAPER", "TINY", "CrystalCacheParameters"]
