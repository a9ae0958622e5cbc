"""kvpress on a real model's prompts, beside ours: `python -m conformance.measure.peers.prompts ours`, `theirs`, `page`.

The halves run in environments of their own and share files alone: `ours` writes prompts, kept sets and answers,
`theirs` reads the same tokens under kvpress's presses, and `page` compares what both have written.
"""
