"""The README's example of a quantized cache raises TypeError

Package: kvpress 0.5.5
Prints: TypeError: QuantizedCache.__init__() missing 1 required positional argument: 'config'
Expected: a cache. `config` is required in transformers 5.2.0, the newest that kvpress 0.5.5 admits.
Change: Write `QuantizedCache(backend="quanto", config=model.config, nbits=4)`.
"""

from transformers import QuantizedCache

QuantizedCache(backend="quanto", nbits=4)
