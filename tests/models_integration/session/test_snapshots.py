"""A saved cache: a second process continues from the file, and a file of a different model raises an error.

The state machine of the suite also uses files, for any backend.
"""

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test
from torch import Tensor
from transformers import PreTrainedModel

from conformance.checks import decode_checks
from conformance.checks.decode_checks import Life
from conformance.strategies.trunks import frozen_state
from lab.faults import LAST, Killed, faults
from models_integration import RetainedCache, RetentionPolicy
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import computed, splice, upper_half
from models_integration.cache import snapshot as snapshot_module
from models_integration.cache.continuation import Pending
from models_integration.cache.positions import EMPTY
from models_integration.cache.retained_cache import storage_bytes
from models_integration.cache.snapshot import load_cache, packed, save_cache, unpacked
from models_integration.cache.tensor_file import read, write
from models_integration.model.identity import identify
from models_integration.model.rotation import recognise
from spec.backend import Backend
from spec.errors import SpecError
from tests.models_integration.session.families import (
    _GQA,
    METHODS,
    WHOLE,
    at_once,
    build,
    prepared,
    prompt,
    states_of,
    step_by_step,
)
from tests.models_integration.session.saved import N, differing, gapped, go_on, lived, same
from tests.models_integration.session.sessions import (
    T,
    batch,
    breathing,
    method,
    prompts,
    read_prompt,
    tokens,
)
from tests.processes import started

pytestmark = pytest.mark.law("saved-is-what-was")

Lived = tuple[PreTrainedModel, RetainedCache]
GoesOn = Callable[[PreTrainedModel, RetainedCache], list[Tensor]]


def waiting(decode: bool) -> Lived:
    """Return a cache of padded rows with tokens that wait for a decode-time eviction or a segment."""
    model, (ids, mask) = build("llama", dtype=torch.bfloat16), batch(prompts())
    cache = RetainedCache(model.config)
    with breathing(decode=decode)(model):
        at_once(model, ids, cache, attention_mask=mask)
        step_by_step(model, tokens(3, rows=3), cache)
    assert bool((cache.full_layers[0].stored_positions() == EMPTY).any())
    assert states_of(cache).pending_tokens == 3
    assert states_of(cache).kind is (Pending.DECODED if decode else Pending.GENERATED)
    return model, cache


def differing_beside_holes(name: str) -> Lived:
    """Return a cache whose rows have read different numbers of tokens, and whose layers or heads differ.

    The padded second turn left columns without a token.
    """
    model, (ids, mask), (more, shown) = build("llama"), batch(prompts()), batch([prompt(n) for n in (9, 5, 7)])
    cache = RetainedCache(model.config)
    with METHODS["fullcache"]()(model):
        at_once(model, ids, cache, attention_mask=mask)
        at_once(model, more, cache, attention_mask=torch.cat([mask, shown], dim=1))
    with method(name)(model):
        at_once(model, torch.cat([prompt(20, seed=row) for row in range(3)]), cache)
    assert cache.layers_differ
    assert bool(cache.full_layers[0].rows.holes.numel())
    return model, cache


def unread(family: str) -> Lived:
    """Return a cache with layers that have no keys and no dtype yet.

    At the start of a session, these are the layers that a chunk lacks and the sliding layers.
    """
    model = build(family)
    cache, rotary = RetainedCache(model.config), recognise(model)
    chunk = computed(model, prompt(9, seed=5)[0].tolist(), rotary)
    if family == "llama":
        chunk = replace(chunk, layers=upper_half(chunk.layers, len(cache.layers)))
    splice(cache, [chunk], rotary)
    assert cache.layers[0].keys is None  # type: ignore[union-attr]
    return model, cache


def under(policy: Callable[[], RetentionPolicy], *texts: Tensor) -> GoesOn:
    def go_on(model: PreTrainedModel, cache: RetainedCache) -> list[Tensor]:
        with policy()(model):
            return [at_once(model, ids, cache) for ids in texts]

    return go_on


def with_fewer_rows(name: str, crop: int) -> GoesOn:
    """Return a continuation: steps, then a row is removed, tokens are cropped, and text is read inside `reading()`."""
    def go_on(model: PreTrainedModel, cache: RetainedCache) -> list[Tensor]:
        with method(name)(model) as session:
            logits = step_by_step(model, tokens(2, rows=2), cache)
            cache.batch_select_indices(torch.tensor([1]))
            cache.crop(-crop)
            with session.reading():
                return [logits, at_once(model, prompt(4, seed=5), cache)]

    return go_on


def through_masks(model: PreTrainedModel, cache: RetainedCache) -> list[Tensor]:
    with layer_masks(model, cache):
        return [at_once(model, prompt(4, seed=6), cache)]


BREATHS = (*torch.split(tokens(T), 1, dim=1), prompt(9, seed=5))
ROWS = torch.cat([prompt(7, seed=row) for row in range(3)])
LIVES: dict[str, tuple[Callable[[], Lived], GoesOn]] = {
    **{f"breaths, {family}": (partial(lived, family), under(breathing, *BREATHS)) for family in WHOLE},
    **{
        f"padded rows and waiting tokens, {decode}": (partial(waiting, decode), under(
            partial(breathing, decode=decode), ROWS
        )) for decode in (True, False)
    },
    "heads that differ": (partial(differing, "adakv", "llama"), with_fewer_rows("adakv", 2)),
    "layers that differ, and windows": (partial(differing, "chunkkv", "gemma3"), with_fewer_rows("chunkkv", 0)),
    "a rehearsed prompt": (partial(differing, "kvzip", "llama"), with_fewer_rows("kvzip", 2)),
    **{
        f"padded rows that differ, {name}": (partial(differing_beside_holes, name), under(
            partial(method, name), tokens(3, rows=3)[:, :1]
        )) for name in ("adakv", "chunkkv")
    },
    "a window with a gap": (gapped, through_masks),
    **{f"layers that have read nothing, {family}": (partial(unread, family), through_masks) for family in WHOLE},
}


@pytest.mark.parametrize("name", LIVES)
def test_a_loaded_cache_is_the_saved_one_and_goes_on_as_it_does(name: str, tmp_path: Path) -> None:
    make, go_on = LIVES[name]
    model, cache = make()
    save_cache(cache, model, tmp_path / "cache")
    again = load_cache(tmp_path / "cache", model)
    same(again, cache)
    assert storage_bytes(again.layers) <= storage_bytes(cache.layers)
    assert all(map(torch.equal, go_on(model, cache), go_on(model, again)))
    same(again, cache)


def test_prefill_and_decode_in_different_processes(tmp_path: Path) -> None:
    model, cache = lived("gemma3")
    path, out = tmp_path / "cache.safetensors", tmp_path / "logits"
    save_cache(cache, model, path)
    other = started(go_on, "gemma3", path, out, torch.get_num_threads())
    with breathing()(model):
        expected = step_by_step(model, tokens(2 * T), cache)
    other.join()
    assert other.exitcode == 0
    assert torch.equal(torch.load(out), expected)
    same(load_cache(path, model), cache)


@pytest.mark.law("an-object-proves-itself")
def test_a_flipped_byte_is_refused_wherever_it_is(tmp_path: Path) -> None:
    model, cache = lived("llama", steps=1)
    path = tmp_path / "cache"
    save_cache(cache, model, path)
    whole = path.read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    at = [*range(120), *range(head - 9, head + 9), *random.Random(0).sample(range(len(whole)), 60), len(whole) - 1]
    for place in at:
        for flip in (1, 0x80):
            data = bytearray(whole)
            data[place] ^= flip
            path.write_bytes(data)
            with pytest.raises(SpecError, match="is damaged: the content differs from the saved content"):
                load_cache(path, model)
    for torn in (b"", whole[:50], whole[:-1], whole + b" ", whole[: head + 3]):
        path.write_bytes(torn)
        with pytest.raises(SpecError, match="is damaged: the content differs from the saved content"):
            load_cache(path, model)
    path.write_bytes(whole)
    same(load_cache(path, model), cache)


def other_weights() -> PreTrainedModel:
    model = build("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.2.mlp.up_proj.weight")[0, 0] += 1
    return model


def other_heads() -> PreTrainedModel:
    """Return a model with the same weights and a different number of KV heads."""
    model = build("llama")
    model.config.num_key_value_heads = 4
    return model


OTHERS: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "weights": ("was saved with weights", other_weights),
    "config": ("was saved with config", other_heads),
    "rotation": ("was saved with rotation", partial(
        prepared, "Llama", **_GQA, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_model_or_rotation_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words, make = OTHERS[name]
    model, cache = lived("llama")
    save_cache(cache, model, tmp_path / "cache")
    with pytest.raises(SpecError, match=words):
        load_cache(tmp_path / "cache", make())


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("name", "value", "words"), [
    ("SPEC_VERSION", "0.0.9", r"was saved with spec 0\.0\.9, not with"),
    ("FORMAT", "kvspec-cache/1", "has format kvspec-cache/1, not kvspec-cache/3: read the text again"),
])
def test_a_file_of_another_specification_or_format_is_refused_by_name(
    name: str, value: str, words: str, tmp_path: Path,
) -> None:
    model, cache = lived("llama")
    with patch.object(snapshot_module, name, value):
        save_cache(cache, model, tmp_path / "cache")
    with pytest.raises(SpecError, match=words):
        load_cache(tmp_path / "cache", model)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("name", "spoil", "words"), [
    ("streamingllm", RetainedCache.reset, "a cache without tokens cannot be saved"),
    ("streamingllm", lambda cache: cache.fail("gone"), "gone"),
    ("streamingllm", lambda cache: cache.full_layers[1].values.fill_(float("nan")), r"be saved: 1\.values holds NaN"),
    ("h2o", lambda cache: None, "cache = 'h2o': keeps scores of single tokens, .* such as snapkv or"),
])
def test_what_could_not_be_loaded_is_not_saved(
    name: str, spoil: Callable[[Any], object], words: str, tmp_path: Path,
) -> None:
    model = build("llama")
    _, cache = read_prompt(model, method(name))
    spoil(cache)
    with pytest.raises(SpecError, match=words):
        save_cache(cache, model, tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_killed_while_saving_it_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    """Kill the process at each system call. The next save removes the remaining temporary files."""
    (model, first), (_, second) = lived("llama", steps=1), lived("llama", steps=T + 3)
    path, known, actual, calls = tmp_path / "cache", identify(model), list[int](), 0
    while len(actual) <= calls:
        save_cache(first, model, path, known)
        with faults(len(actual) + 1, LAST) as made, suppress(Killed):
            save_cache(second, model, path, known)
        calls, cache = len(made.calls), load_cache(path, model, known)
        actual.append(cache.get_seq_length())
        same(cache, {N + 1: first, N + T + 3: second}[actual[-1]])
    assert set(actual) == {N + 1, N + T + 3}
    for left in tmp_path.glob(".tmp-*"):
        os.utime(left, (1, 1))
    save_cache(first, model, path)
    assert [left.name for left in tmp_path.iterdir()] == ["cache"]


class SavedLife(Life):
    """Life of a cache that also goes through files, like the states of a cache."""

    @rule()
    def save_and_load(self) -> None:
        """Check that a state that was written to a file and read again is the same state."""
        numbers, arrays = packed(self.state)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "state"
            write(path, {"format": "state", "manifest": json.dumps(numbers)}, arrays)
            said, arrays = read(path)
            again = unpacked(json.loads(said["manifest"]), arrays)
        assert decode_checks.same_bits(again, self.state)
        self.state = frozen_state(again)


def test_a_sequence_lives_on_from_files(decoder: Backend) -> None:
    """Run prompts, steps, turns, chunks, evictions, copies and files in any order."""
    profile = settings.default or settings()
    lives = settings(profile, max_examples=max(20, profile.max_examples // 3), stateful_step_count=20)
    run_state_machine_as_test(partial(SavedLife, decoder), settings=lives)  # type: ignore[arg-type]
