"""The tests that judge a backend, anybody's; they need spec, reference, NumPy, pytest and Hypothesis alone."""
