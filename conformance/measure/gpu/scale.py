"""Sizes of a run: the real ones, and those of a dry run, which says nothing about speed."""

from dataclasses import dataclass

from spec.parameters import PAPER, TINY, CrystalCacheParameters

ON_DEVICE = "accelerated.triton_gpu.backend:ON_DEVICE"


@dataclass(frozen=True)
class Scale:
    """What is measured at which size; the model is a Llama of this shape."""

    dtype: str
    rounds: int
    product: int
    """Rows of the square matrices whose product is the first ceiling."""
    copied: int
    """Numbers of four bytes that the copy moves."""
    programs: int
    """Of the kernel of exponentials."""
    H: int
    H_kv: int
    d: int
    layers: int
    inner: int
    vocabulary: int
    checked: int
    """Prompt tokens of the generation whose kept set is compared with the reference's."""
    new_tokens: int
    lengths: tuple[int, ...]
    """Of S1 alone."""
    headline: int
    """Where S1 is compared with eager torch, and with a whole prefill."""
    profiled: tuple[int, ...]
    """Of the time by stage: the paper's Table 12."""
    ragged: tuple[int, ...]
    """Mean tokens of a head, of heads of different lengths."""
    behind: int
    """Prompt tokens that decoding goes on from."""
    slots: int
    """Of the policies that decide at every step."""
    chunk: int
    """Tokens of an archived chunk."""
    load: tuple[int, ...]
    """Of continuous batching: requests, tokens, new ones, requests that fit, tokens of a page and of a forward."""
    tests: tuple[tuple[str, ...], ...]
    """Runs of pytest, all of which must pass."""
    parameters: CrystalCacheParameters

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.H * self.d


# Llama-3.1-8B. All of S1 to S6 as kernels, then the tests of strides, tiles, bands and half precision.
FULL = Scale(
    dtype="bfloat16", rounds=7, product=8192, copied=2**29, programs=2**15, H=32, H_kv=8, d=128, layers=32,
    inner=14336, vocabulary=128256, checked=2048, new_tokens=50, lengths=(4096, 8192, 16384, 32768, 131072),
    headline=32768, profiled=(4096, 8192, 16384, 32768), ragged=(2048, 8192, 16384),
    behind=32768, slots=1024, chunk=2000, load=(32, 2048, 64, 8, 16, 8192),
    tests=(("--backend", ON_DEVICE), ("--backend", "triton", "conformance/own/accelerated/triton")), parameters=PAPER,
)
# The interpreter computes bfloat16 wrongly.
DRY = Scale(
    dtype="float32", rounds=1, product=64, copied=2**10, programs=2, H=4, H_kv=2, d=16, layers=2, inner=96,
    vocabulary=64, checked=40, new_tokens=3, lengths=(24,), headline=24, profiled=(24,), ragged=(16,),
    behind=96, slots=12, chunk=12, load=(3, 24, 3, 2, 4, 32),
    tests=(("--backend", ON_DEVICE, "conformance/suite/test_score.py"),), parameters=TINY,
)
