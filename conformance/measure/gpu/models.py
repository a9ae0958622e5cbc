"""Models that are measured: a Llama of a given shape with random weights, or a checkpoint, under the integration."""

from typing import Any

import numpy as np
import torch

from accelerated.triton_gpu.device import default_device
from conformance.measure.gpu.scale import Scale
from conformance.paths import ROOT
from spec.arrays import IntVector
from spec.backend import Backend
from spec.records import CrystalRetention


class Subject:
    """A causal model of transformers: `prompt(n)`, `forward` with a full cache, `generate` under CrystalCache."""

    def __init__(self, model: Any, name: str, sentence_ends: frozenset[int], text: IntVector | None) -> None:
        self.model, self.name, self.sentence_ends, self._text = model.eval(), name, sentence_ends, text

    @classmethod
    def random(cls, scale: Scale) -> "Subject":
        """A Llama made on the device."""
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=scale.hidden, intermediate_size=scale.inner, num_hidden_layers=scale.layers,
            num_attention_heads=scale.H, num_key_value_heads=scale.H_kv, head_dim=scale.d,
            vocab_size=scale.vocabulary, max_position_embeddings=2**17, bos_token_id=0,
            eos_token_id=None, pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
        torch.manual_seed(0)
        with default_device():
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, dtype=getattr(torch, scale.dtype))
        return cls(model, f"random Llama, {scale.layers} layers", _every_eighteenth(scale), None)

    @classmethod
    def loaded(cls, path: str, scale: Scale) -> "Subject":
        """A checkpoint, whose prompt is the text of the specification."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from models_integration.policies.tokenizer_values import sentence_ends

        tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, scale.dtype))
        pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "spec").glob("*.md")))
        text = np.array(tokenizer(pages, add_special_tokens=False)["input_ids"], dtype=np.int64)
        return cls(model.to(default_device()), path, sentence_ends(tokenizer), text)

    def prompt(self, n: int) -> IntVector:
        if self._text is not None:
            return np.resize(self._text, n)
        return np.random.default_rng(n).integers(0, self.model.config.vocab_size, n)

    @torch.no_grad()
    def forward(self, ids: IntVector) -> None:
        self.model(input_ids=_row(ids), use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def generate(
        self, ids: IntVector, backend: Backend, scale: Scale, new_tokens: int,
    ) -> tuple[CrystalRetention, dict[str, float]]:
        from models_integration import CrystalCache

        method = CrystalCache(0.5, self.sentence_ends, scale.parameters, backend)
        with method(self.model) as run:
            if new_tokens:
                self.model.generate(
                    _row(ids), attention_mask=torch.ones_like(_row(ids)), max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
                )
            else:
                self.forward(ids)
        assert isinstance(run.retention, CrystalRetention)
        return run.retention, dict(run.timings)


def subject(scale: Scale, checkpoint: str | None) -> Subject:
    """The model to measure: random weights, or a checkpoint."""
    return Subject.random(scale) if checkpoint is None else Subject.loaded(checkpoint, scale)


def _every_eighteenth(scale: Scale) -> frozenset[int]:
    """Sentence ends of a vocabulary without words: sentences of some 18 tokens, as text has them."""
    return frozenset(range(0, scale.vocabulary, 18))


def _row(ids: IntVector) -> torch.Tensor:
    return torch.from_numpy(ids)[None].to(default_device())
