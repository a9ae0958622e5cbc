"""Parameters of the methods, validated when they are made, with their presets."""

from spec.parameters.crystalcache import PAPER, TINY, CrystalCacheParameters

__all__ = ["PAPER", "TINY", "CrystalCacheParameters"]
