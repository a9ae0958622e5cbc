"""DuoAttentionPress has no pattern for two models that it lists: a slash too many

Package: kvpress 0.5.5
Prints: AssertionError: unknown: gradientai/Llama-3-8B-Instruct-Gradient-1048k; there is
['gradientai//Llama-3-8B-Instruct-Gradient-1048k']
Expected: the pattern. The keys of `PATTERNS_DICT` begin with `gradientai//`, and no name on the Hub has two slashes.
Change: Write `gradientai/`.
"""

from kvpress.presses.duo_attention_press import PATTERNS_DICT

name = "gradientai/Llama-3-8B-Instruct-Gradient-1048k"
assert name in PATTERNS_DICT, f"unknown: {name}; there is {[key for key in PATTERNS_DICT if '1048k' in key]}"
