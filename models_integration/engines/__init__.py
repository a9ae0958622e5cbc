"""Eviction in further inference engines: vLLM and llama.cpp."""
