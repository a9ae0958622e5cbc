"""Tests of a cache or an engine: the logits after eviction equal those of a full cache with evicted tokens masked.

    python -m pytest -p conformance.plugin --pyargs conformance.cache_suite --kvspec-cache module:ATTRIBUTE
    python -m pytest ... --kvspec-model FOLDER_OR_NAME      this model instead of tiny random models

The attribute is a function `run(prompt_ids, kept, next_ids, model)`. docs/guide/judge.md describes its arguments.
"""
