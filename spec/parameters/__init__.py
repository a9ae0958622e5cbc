"""Parameters of CrystalCache and NestedKV, with presets. The constructor of each class checks all values."""

from spec.parameters.crystalcache import ESSAY, PAPER, TINY, CrystalCacheParameters
from spec.parameters.nestedkv import NESTEDKV, NestedKVParameters

__all__ = ["ESSAY", "NESTEDKV", "PAPER", "TINY", "CrystalCacheParameters", "NestedKVParameters"]
