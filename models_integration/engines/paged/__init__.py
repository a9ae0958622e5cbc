"""Eviction inside transformers' continuous batching.

    with PagedSession(policy, model) as run:
        outputs = model.generate_batch(prompts, max_new_tokens=32)
    run.kept["req_0"], run.freed_pages, run.peak_pages
"""

from models_integration.engines.paged.session import PagedSession

__all__ = ["PagedSession"]
