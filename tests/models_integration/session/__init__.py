"""Sessions: eviction equals masking, on tiny random models of every supported family."""
