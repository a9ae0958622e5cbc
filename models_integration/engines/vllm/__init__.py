"""Eviction inside vLLM: a scheduler, a worker and a cache manager that store fewer tokens than a request has seen.

    kvspec serve MODEL --policy snapkv --budget 0.3

The modules `arguments`, `plan`, `pages`, `selection` and `statement` do not import vLLM. All other modules do.
"""
