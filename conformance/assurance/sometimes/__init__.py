"""What a good run of the suite must have met, sometimes: states of the decisions, counted where stages are called."""
