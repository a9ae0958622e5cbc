"""CriticalAdaKVPress does not initialise the press in it

Package: kvpress 0.5.5
Prints: AssertionError: CriticalAdaKVPress does not initialise its press
Expected: `post_init_from_model` of the wrapped press is called, as `AdaKVPress` does. Without it, presses that load
filters there (`QFilterPress`, `KVzapPress`) have none. `PerLayerCompressionPress` does not forward it either.
Change: Forward `post_init_from_model` in both.
"""

from dataclasses import dataclass

from kvpress import AdaKVPress, CriticalAdaKVPress, KnormPress
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Asked(KnormPress):
    asked: bool = False

    def post_init_from_model(self, model):
        self.asked = True


config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
for wrapper in (AdaKVPress, CriticalAdaKVPress):
    with wrapper(press := Asked(0.5))(LlamaForCausalLM(config)):
        assert press.asked, f"{wrapper.__name__} does not initialise its press"
