"""What eviction costs: every policy and budget on the same observed prompts, by evidence, likelihood and answers."""
