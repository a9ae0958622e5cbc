"""Judges anybody's cache or engine: after eviction a model says what it says where the evicted tokens are masked.

    python -m pytest -p conformance.plugin --pyargs conformance.cache_suite --kvspec-cache module:ATTRIBUTE
    python -m pytest ... --kvspec-model FOLDER_OR_NAME      another model than tiny random ones

The attribute is a function `run(prompt_ids, kept, next_ids, model)`; docs/guide/judge.md says what it is given.
"""
