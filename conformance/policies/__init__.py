"""The published policies: what they must do (oracles), what they promise (the table), and how kvpress differs."""
