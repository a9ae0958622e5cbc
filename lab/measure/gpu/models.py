"""Models to measure: a Llama of a given shape with random weights, or a checkpoint, with kvspec."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from accelerated.triton_gpu.device import default_device
from conformance.paths import ROOT
from spec.arrays import IntVector
from spec.backend import Backend
from spec.parameters import PAPER, TINY, CrystalCacheParameters
from spec.records import CrystalRetention


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements. The model is a Llama of this shape."""

    dtype: str
    rounds: int
    product: int
    """Rows of the square matrices whose product is the first ceiling."""
    copied: int
    """Number of four-byte numbers that the copy moves."""
    programs: int
    """Number of programs of the kernel of exponentials."""
    H: int
    H_kv: int
    d: int
    layers: int
    inner: int
    vocabulary: int
    checked: int
    """Prompt tokens of the generation whose kept set is compared with the reference."""
    new_tokens: int
    lengths: tuple[int, ...]
    """Prompt lengths for S1 alone."""
    headline: int
    """Prompt length at which S1 is compared with eager torch and with a complete prefill."""
    profiled: tuple[int, ...]
    """Prompt lengths of the time by stage, as in the paper's Table 12."""
    ragged: tuple[int, ...]
    """Mean number of tokens of a head, for heads of different lengths."""
    behind: int
    """Number of prompt tokens before the first decoded token."""
    slots: int
    """Number of slots for the policies that decide at every step."""
    chunk: int
    """Tokens of an archived chunk."""
    tests: tuple[tuple[str, ...], ...]
    """Runs of pytest, all of which must pass."""
    parameters: CrystalCacheParameters

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.H * self.d


OF_TRITON = "tests/accelerated/triton"
# Llama-3.1-8B. The tests are for strides, tiles, bands and half precision, then for stages of triton and of torch.
FULL = Scale(
    dtype="bfloat16", rounds=7, product=8192, copied=2**29, programs=2**15, H=32, H_kv=8, d=128, layers=32,
    inner=14336, vocabulary=128256, checked=2048, new_tokens=50, lengths=(4096, 8192, 16384, 32768, 131072),
    headline=32768, profiled=(4096, 8192, 16384, 32768), ragged=(2048, 8192, 16384),
    behind=32768, slots=1024, chunk=2000,
    tests=(
        ("--backend", "triton", OF_TRITON, f"--ignore={OF_TRITON}/test_aot.py"),
        ("--backend", "triton", "conformance/suite"),
        ("--backend", "torch", "conformance/suite", "tests/accelerated/test_torch.py"),
    ),
    parameters=PAPER,
)
# The dtype is float32, because the interpreter computes bfloat16 wrongly.
DRY = Scale(
    dtype="float32", rounds=1, product=64, copied=2**10, programs=2, H=4, H_kv=2, d=16, layers=2, inner=96,
    vocabulary=64, checked=40, new_tokens=3, lengths=(24,), headline=24, profiled=(24,), ragged=(16,),
    behind=96, slots=12, chunk=12,
    tests=(("--backend", "triton", "conformance/suite/test_activation.py"),), parameters=TINY,
)


class Subject:
    """Causal model of transformers: `prompt(n)`, `forward` with a full cache, `generate` under CrystalCache."""

    def __init__(self, model: Any, name: str, sentence_ends: frozenset[int], text: IntVector | None) -> None:
        self.model, self.name, self.sentence_ends, self._text = model.eval(), name, sentence_ends, text

    @classmethod
    def random(cls, scale: Scale) -> "Subject":
        """Return a Llama with random weights, made on the device."""
        from transformers import LlamaConfig

        config = LlamaConfig(
            hidden_size=scale.hidden, intermediate_size=scale.inner, num_hidden_layers=scale.layers,
            num_attention_heads=scale.H, num_key_value_heads=scale.H_kv, head_dim=scale.d,
            vocab_size=scale.vocabulary, max_position_embeddings=2**17, bos_token_id=0,
            eos_token_id=None, pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )
        ends = frozenset(range(0, scale.vocabulary, 18))  # sentences of about 18 tokens, as in text
        return cls.of_config(config, f"random Llama, {scale.layers} layers", scale, ends)

    @classmethod
    def of_config(cls, config: Any, name: str, scale: Scale, sentence_ends: frozenset[int]) -> "Subject":
        """Return a model with random weights, made on the device."""
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        with default_device():
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, dtype=getattr(torch, scale.dtype))
        return cls(model, name, sentence_ends, None)

    @classmethod
    def loaded(cls, path: str, scale: Scale) -> "Subject":
        """Return a checkpoint, with the text of the specification as prompt."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from models_integration.policies.values import sentence_ends

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
        (actual,) = run.retentions
        assert isinstance(actual, CrystalRetention)
        return actual, dict(run.timings)


def _row(ids: IntVector) -> torch.Tensor:
    return torch.from_numpy(ids)[None].to(default_device())
