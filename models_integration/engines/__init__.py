"""Eviction in vLLM, and the selection of tokens for other engines."""
