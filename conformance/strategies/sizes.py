"""How large the drawn inputs of the small lane are, each with its reason; what stands beyond is the scale lane's.

Small inputs show rules, ties, thresholds and orders, and shrink to a case that can be read. Oracles in plain Python are
quadratic or worse, and a property runs up to 20 000 times. `conformance/own/conformance/test_scale_widths.py` lists
the sizes of the scale lane.
"""

__all__ = [
    "ALPHABET", "CHUNK", "CROSS", "DEGREES", "EVICTED_SIZE", "EVICTED_TRUNKS", "HEADS_SUMMED", "HOT_TOKENS", "INTRA",
    "KV_HEADS", "LIVE_SIZE", "LIVE_TRUNKS", "NEAR", "PROMPT_TOKENS", "S1_TOKENS", "TEXT_TOKENS", "TRUNK",
]

# S1's oracle takes H n^2 d steps of plain Python: 0.1 s at 26 tokens of 16 heads; 26 cross two to six chunks.
S1_TOKENS = 26
# Every head of every token draws its keys by itself: 80 permutations at 20 tokens of 4 heads.
HOT_TOKENS = 20
# A prompt runs S1's oracle and all stages' behind it; 24 tokens reach the sink, the window and trunks between them.
PROMPT_TOKENS = 24
# S2 and S4 compare every edge with every pair of trunks; 16 tokens hold five sentences and three chunks.
TEXT_TOKENS = 16
# Two KV heads tell grouped from not grouped; three or more, which tell it from modulo, are the scale lane's.
KV_HEADS = 2
# Small enough that a few dozen tokens cross chunks, fill lists and overflow trunks.
CHUNK, HEADS_SUMMED, INTRA, CROSS, TRUNK = 12, 4, 4, 3, 9
# How far from a token its drawn neighbours lie: S2 looks at five tokens on either side.
NEAR = 6
# Ten trunks of up to nine tokens reach every corner of S6 in one of a hundred draws; the brute force is quadratic.
EVICTED_TRUNKS, EVICTED_SIZE = 10, 9
# Degrees of a few trunks: moments are of all of them, however many.
DEGREES = 12
# A breath runs every stage of decode in plain Python, and a machine of states hundreds of them.
LIVE_TRUNKS, LIVE_SIZE = 6, 4
# So few ids that most of them repeat within a dozen tokens.
ALPHABET = 9
