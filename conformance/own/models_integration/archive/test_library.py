"""One call each way: what a library puts, it splices as if the chunk had just been computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from conformance.assurance.item_vectors.adapters import vocabulary
from conformance.own.models_integration.archive.block_mask import ROTATIONS, block_masked, build, ids
from conformance.own.models_integration.archive.test_splice import BOUND, QUERY, SYSTEM, read
from conformance.own.models_integration.session.families import relative
from models_integration.archive.errors import NoSuchChunk, OtherDtype, OtherFrequencies, WrongModel
from models_integration.archive.library import Library
from models_integration.archive.store import Archive
from models_integration.model.rotation import plain_layers, prefilled
from reference.injection.quantisers import ARMS
from reference.injection.wrappers import FORMS, wrap
from spec.errors import SpecError

pytestmark = pytest.mark.law("a-splice-equals-a-block-mask")

VOCABULARY = vocabulary({
    "<|im_start|>": [127], "<|im_end|>": [128], "<|end|>": [129], "<｜User｜>": [3, 4, 5], "\n": [4], "user\n": [5, 4],
    "system\nYou are a helpful assistant.": [6, 7, 8],
})
PARTS = [ids(7, 3), ids(6, 5)]


@pytest.fixture
def archive(quick_path: Path) -> Iterator[Archive]:
    with Archive(quick_path) as opened:
        yield opened


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "DeepseekV2"])
@pytest.mark.parametrize("form", ["raw", "full_hidden_preamble", "markers"])
def test_put_and_inject_equal_the_block_mask(archive: Archive, family: str, form: str) -> None:
    model = build(family)
    library = Library(archive, model, VOCABULARY, "alice")
    keys = [library.put(part, form) for part in PARTS]
    assert len(archive.entries("alice")) == 2
    assert [library.put(part, form) for part in PARTS] == keys
    cache, markers = library.inject(read(model, SYSTEM)[1], keys)
    wrapped = [wrap(FORMS[form], part, VOCABULARY) for part in PARTS]
    tokens = SYSTEM + [token for one in wrapped for token in one.ids[one.hidden :]]
    assert [tokens[at] in (127, 128) for at in range(len(tokens))] == [at in markers for at in range(len(tokens))]
    window = model.config.sliding_window if family == "Gemma3Text" else None
    oracle = block_masked(model, SYSTEM, [(list(one.ids), one.hidden) for one in wrapped], QUERY, window=window)
    assert relative(read(model, QUERY, cache)[0], oracle.logits) < BOUND


@pytest.mark.law("saved-is-what-was")
@pytest.mark.parametrize("codec", ARMS)
def test_every_codec_comes_back_within_its_step(archive: Archive, codec: str) -> None:
    model = build("Llama")
    library = Library(archive, model, VOCABULARY, "alice")
    chunk = library.get(library.put(PARTS[0], codec=codec))
    assert chunk is not None
    for (keys, values), layer in zip(chunk.layers.values(), plain_layers(prefilled(model, PARTS[0])), strict=True):
        for found, computed in ((keys, layer.keys[0]), (values, layer.values[0])):
            assert relative(found, computed) <= (0 if codec == "none" else 1 / 127)
    assert chunk.ids == tuple(PARTS[0])


@pytest.mark.law("an-identity-tells-apart")
def test_half_of_the_layers_and_each_input_make_another_key(archive: Archive) -> None:
    library = Library(archive, build("Llama"), VOCABULARY, "alice")
    other = Library(archive, build("Llama"), VOCABULARY, "bob")
    keys = {
        library.put(PARTS[0]), library.put(PARTS[1]), library.put(PARTS[0], "markers"),
        library.put(PARTS[0], codec="kivi"), library.put(PARTS[0], upper=True), other.put(PARTS[0]),
    }
    assert len(keys) == 6
    half = library.get(library.put(PARTS[0], upper=True))
    assert half is not None
    assert sorted(half.layers) == [1]
    with pytest.raises(SpecError, match="upper half of this model has no full-attention layer"):
        Library(archive, build("Gemma3Text", layer_types=["full_attention", "sliding_attention"]), VOCABULARY, "a").put(
            PARTS[0], upper=True
        )


@pytest.mark.law("refused-before-anything-changes")
def test_a_chunk_of_another_model_or_tenant_is_refused_by_name(archive: Archive) -> None:
    model = build("Llama")
    library = Library(archive, model, VOCABULARY, "alice")
    key = library.put(PARTS[0])
    cache = read(model, SYSTEM)[1]
    with pytest.raises(NoSuchChunk, match="bob"):
        Library(archive, model, VOCABULARY, "bob").inject(cache, [key])
    other = build("Llama")
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    with pytest.raises(WrongModel):
        Library(archive, other, VOCABULARY, "alice").inject(cache, [key])
    with pytest.raises(OtherFrequencies):
        Library(archive, build("Llama", rope_parameters=ROTATIONS["yarn"]), VOCABULARY, "alice").inject(cache, [key])
    rounded = build("Llama")
    inner = rounded.get_submodule("model.rotary_emb")
    inner.register_buffer("inv_freq", inner.get_buffer("inv_freq").bfloat16(), persistent=False)
    with pytest.raises(OtherDtype):
        Library(archive, rounded, VOCABULARY, "alice").inject(cache, [key])
    assert cache.get_seq_length() == len(SYSTEM)


@pytest.mark.law("refused-before-anything-changes")
def test_names_and_markers_are_checked(archive: Archive) -> None:
    library = Library(archive, build("Llama"), VOCABULARY, "alice")
    with pytest.raises(SpecError, match="form = 'E'"):
        library.put(PARTS[0], "E")
    with pytest.raises(SpecError, match="codec = 'int8'"):
        library.put(PARTS[0], codec="int8")
    with pytest.raises(SpecError, match="must be one token id"):
        library.put(PARTS[0], "markers_deepseek")
    with pytest.raises(SpecError, match="at least one token"):
        library.put([])
    assert archive.entries() == []


def test_a_long_chunk_is_archived_under_the_long_frequencies(archive: Archive) -> None:
    """longrope, a chunk beyond the first range: it is re-based into a shorter session and back into a longer one."""
    model = build("Llama", rope_parameters=dict(ROTATIONS["longrope"]))
    library = Library(archive, model, VOCABULARY, "alice")
    long = ids(70, 6)
    key = library.put(long)
    cache, _ = library.inject(None, [key], room=len(QUERY))
    assert relative(read(model, QUERY, cache)[0], block_masked(model, [], [(long, 0)], QUERY).logits) < BOUND
    chunk = library.get(key)
    assert chunk is not None
    (name,) = library.rotary.used()
    assert not torch.equal(chunk.rotary.frequencies[name], library.rotary.frequencies[name])
