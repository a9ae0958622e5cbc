"""Eviction in further inference engines: continuous batching of transformers, and llama.cpp."""
