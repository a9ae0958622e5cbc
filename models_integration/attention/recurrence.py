"""Test, with nine tokens, that a model's recurrent layers continue correctly from their states.

In some releases of transformers, recurrent layers lose the state if several tokens follow earlier tokens, or process
padding as tokens. The full cache of such a model is wrong, and a comparison with the same code cannot detect the error.
"""

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import Architecture, device_of
from models_integration.model.cache_argument import cache_name
from models_integration.model.isolated_forward import FORWARD_ERRORS, isolated_forward, states_agree
from spec.errors import SpecError

__all__ = ["check_recurrence", "check_turns"]

_TOKENS, _PADDING = 8, 3

_NUMBERS = "the decoder also numbers padding positions: pass rows of equal length"
_TURN = "the recurrent layers lose the state if a later forward pass has several tokens: pass later text token by token"
_PADDED = "the recurrent layers process padding like tokens: pass rows of equal length"
_PADDED_TURN = "in later forward passes, the recurrent layers process padding like tokens: pass rows of equal length"

# Tests that each decoder has passed.
_PASSED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def check_recurrence(architecture: Architecture, arguments: Mapping[str, object], cache: object) -> None:
    """Check that the model processes these arguments after the cached tokens as in a single forward pass.

    Raises:
        SpecError: if the results differ.
    """
    if architecture.takes_positions and not architecture.recurrent:
        return
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    several = isinstance(ids, Tensor) and ids.ndim == 2 and ids.shape[1] > 1
    seen = cache.get_seq_length() if isinstance(cache, RetainedCache) else 0
    padded = (isinstance(mask, Tensor) and bool((mask == 0).any())) or (
        isinstance(cache, RetainedCache) and seen > 0 and not bool(cache.is_token.all())
    )
    if padded and not architecture.takes_positions:
        raise SpecError("attention_mask", "zeros", _NUMBERS)
    if not architecture.recurrent:
        return
    if seen and several:
        check_turns(architecture)
    if padded:
        _check(architecture, _PADDED, "attention_mask", [_TOKENS, 1])
    if padded and seen and several:
        _check(architecture, _PADDED_TURN, "attention_mask", [2, 4, 3])


def check_turns(architecture: Architecture) -> None:
    """Check that the model can process several tokens after earlier tokens.

    Raises:
        SpecError: if recurrent layers lose their states.
    """
    if architecture.recurrent:
        _check(architecture, _TURN, "input_ids", [5, 3])


def _check(architecture: Architecture, reason: str, argument: str, pieces: Sequence[int]) -> None:
    passed = _PASSED.setdefault(architecture.decoder, set())
    if reason in passed:
        return
    padding = 0 if argument == "input_ids" else _PADDING
    tokens = sum(pieces) - padding
    try:
        with isolated_forward(architecture):
            found, expected = _hidden(architecture, pieces, padding), _hidden(architecture, [tokens], 0)
    except FORWARD_ERRORS as error:
        raise SpecError("model", architecture.name, f"{reason} ({type(error).__name__}: {error})") from error
    if not states_agree(found, expected):
        raise SpecError("model", architecture.name, reason)
    passed.add(reason)


def _hidden(architecture: Architecture, pieces: Sequence[int], padding: int) -> Tensor:
    """Return the last hidden states of tokens after padding, (tokens, width), processed piece by piece."""
    decoder, cache = architecture.decoder, RetainedCache(architecture.config)
    device, columns = device_of(decoder), sum(pieces)
    mask = torch.arange(columns, device=device)[None] >= padding
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    ids = positions * 37 % architecture.vocabulary
    outputs, start = [], 0
    for stop in torch.tensor(pieces).cumsum(dim=0).tolist():
        given = {cache_name(decoder): cache, "attention_mask": mask[:, :stop].long()} if padding else {
            cache_name(decoder): cache,
        }
        output = decoder.forward(
            input_ids=ids[:, start:stop], position_ids=positions[:, start:stop], use_cache=True, **given,
        )
        outputs.append(output.last_hidden_state[0])
        start = stop
    return torch.cat(outputs)[padding:]
