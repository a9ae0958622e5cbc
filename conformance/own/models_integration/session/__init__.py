"""The integration with `transformers`: eviction equals masking, on tiny random models of every family served."""
