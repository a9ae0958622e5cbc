"""crop on an unused sliding cache raises AttributeError

Package: transformers 5.23.0
Prints: AttributeError: 'NoneType' object has no attribute 'shape'
Expected: nothing, as for full attention: "nothing to do [if] the layer is not initialized (can happen with KV
sharing)" (`DynamicLayer.crop`). The sliding layer reads `self.keys.shape` afterwards.
Change: Return early where the layer is not initialized.
"""

from transformers import DynamicCache, LlamaConfig, MistralConfig

for config in (LlamaConfig(num_hidden_layers=1), MistralConfig(num_hidden_layers=1, sliding_window=8)):
    DynamicCache(config=config).crop(-1)
