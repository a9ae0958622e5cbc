"""Brute force: each stage in plain Python, as literal as the paper allows, and slow on purpose.

Nothing here imports NumPy or `reference`: an oracle that shared code with what it judges would share its mistakes.
Sums that the specification orders run left to right; sums that it leaves open are rounded once (`math.fsum`).
"""
