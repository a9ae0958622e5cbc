"""The codec of the archive on tensors equals the reference on arrays."""

import pytest
import torch

from models_integration.archive.codec import decode, encode
from reference.injection.quantisers import ARMS, SCHEMES, codes, scale
from spec.errors import SpecError


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize("arm", ARMS)
def test_a_codec_on_tensors_is_the_reference_s(arm: str) -> None:
    generator = torch.Generator().manual_seed(4)
    layers = {
        at: (torch.randn(2, 12, 4, generator=generator), torch.randn(2, 12, 6, generator=generator)) for at in range(4)
    }
    layers[2][0][1] = 0.0
    tensors = encode(layers, arm, 4)
    for at, given in layers.items():
        for name, x, found, scheme in zip(
            "kv", given, decode(tensors, at, torch.float32), (ARMS[arm].keys, ARMS[arm].values), strict=True
        ):
            if f"{at}.{name}" in tensors:
                assert torch.equal(found, x)
                continue
            part = x[:, ARMS[arm].first : 12 - ARMS[arm].last].double().numpy()
            step = scale(part, SCHEMES[str(scheme)], 8)
            assert tensors[f"{at}.{name}.q"].tolist() == codes(part, step, 8).tolist()
            assert tensors[f"{at}.{name}.s"].double().numpy().tolist() == step.tolist()
            assert (found - x).abs().max() <= 0.51 * step.max()


@pytest.mark.law("refused-before-anything-changes")
def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(SpecError, match="codec = 'int8'"):
        encode({}, "int8", 1)
