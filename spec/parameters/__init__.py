"""Parameters of the methods, validated when they are made, with their presets."""

from spec.parameters.crystalcache import ESSAY, PAPER, TINY, CrystalCacheParameters
from spec.parameters.nestedkv import NESTEDKV, NestedKVParameters

__all__ = ["ESSAY", "NESTEDKV", "PAPER", "TINY", "CrystalCacheParameters", "NestedKVParameters"]
