"""The methods of the field, each a record of five parts; and `retain`, which runs one."""

from reference.policies.crystalcache import crystalcache
from reference.policies.full_cache import full_cache
from reference.policies.retain import retain
from reference.policies.streaming_llm import streaming_llm

__all__ = ["crystalcache", "full_cache", "retain", "streaming_llm"]
