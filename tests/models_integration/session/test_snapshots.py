"""A saved cache: a second process continues from the file, and a file of a different model raises an error.

A file with a valid digest that `save_cache` never wrote raises an error before any object is created. The state machine
of sessions saves all other caches.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab.faults import LAST, Killed, faults
from models_integration import RetainedCache
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import computed, splice, upper_half
from models_integration.cache import snapshot
from models_integration.cache.positions import EMPTY
from models_integration.cache.retained_cache import storage_bytes
from models_integration.cache.snapshot import FORMAT, load_cache, save_cache
from models_integration.cache.tensor_file import TENSORS_MOST, read, write
from models_integration.model.identity import identify
from models_integration.model.rotation import recognise
from spec.errors import SpecError
from tests.models_integration.session.families import (
    _GQA,
    METHODS,
    VOCABULARY,
    WHOLE,
    at_once,
    build,
    prepared,
    prompt,
    step_by_step,
)
from tests.models_integration.session.sessions import (
    PROMPT,
    T,
    batch,
    breathing,
    differing,
    gapped,
    go_on,
    lived,
    method,
    prompts,
    read_prompt,
    same,
    tokens,
)
from tests.processes import started

pytestmark = pytest.mark.law("saved-is-what-was")

Lived = tuple[PreTrainedModel, RetainedCache]


def unread(family: str) -> Lived:
    """Return a cache with layers without keys: those that a chunk lacks, and sliding layers."""
    model = build(family)
    cache, rotary = RetainedCache(model.config), recognise(model)
    chunk = computed(model, prompt(9, seed=5)[0].tolist(), rotary)
    if family == "llama":
        chunk = replace(chunk, layers=upper_half(chunk.layers, len(cache.layers)))
    splice(cache, [chunk], rotary)
    assert cache.layers[0].keys is None  # type: ignore[union-attr]
    return model, cache


LIVES: dict[str, Callable[[], Lived]] = {
    "a window with a gap": gapped,
    **{f"layers that have read nothing, {family}": partial(unread, family) for family in WHOLE},
}


@pytest.mark.parametrize("name", LIVES)
def test_a_loaded_cache_is_the_saved_one_and_goes_on_as_it_does(name: str, tmp_path: Path) -> None:
    """Check layers that no program of the state machine has. The machine saves and loads all other caches."""
    model, cache = LIVES[name]()
    save_cache(cache, model, tmp_path / "cache")
    again, logits = load_cache(tmp_path / "cache", model), list[Tensor]()
    same(again, cache)
    assert storage_bytes(again.layers) <= storage_bytes(cache.layers)
    for one in (cache, again):
        with layer_masks(model, one):
            logits.append(at_once(model, prompt(4, seed=6), one))
    assert torch.equal(*logits)
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
    at = [*range(120), *range(head - 9, head + 9), *random.Random(0).sample(range(len(whole)), 20), len(whole) - 1]
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


# Words of the error, the model that loads, and constants of the module that saves.
OTHERS: dict[str, tuple[str, Callable[[], PreTrainedModel], dict[str, str]]] = {
    "weights": ("was saved with weights .*: load the model with which the cache was saved$", other_weights, {}),
    "config": ("was saved with config", other_heads, {}),
    "rotation": ("was saved with rotation", partial(
        prepared, "Llama", **_GQA, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ), {}),
    "specification": (
        r"was saved with spec 0\.0\.9, not with .*: save the cache again$", partial(build, "llama"),
        {"SPEC_VERSION": "0.0.9"},
    ),
    "format": (
        "has format kvspec-cache/1, not kvspec-cache/3: read the text again", partial(build, "llama"),
        {"FORMAT": "kvspec-cache/1"},
    ),
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_model_or_rotation_is_refused_by_name(name: str, tmp_path: Path) -> None:
    words, make, constants = OTHERS[name]
    model, cache = lived("llama")
    with pytest.MonkeyPatch.context() as patch:
        for constant, value in constants.items():
            patch.setattr(snapshot, constant, value)
        save_cache(cache, model, tmp_path / "cache")
    with pytest.raises(SpecError, match=words):
        load_cache(tmp_path / "cache", make())


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
        with faults(len(actual) + 1, LAST) as done, suppress(Killed):
            save_cache(second, model, path, known)
        calls, cache = len(done.calls), load_cache(path, model, known)
        actual.append(cache.get_seq_length())
        same(cache, {PROMPT + 1: first, PROMPT + T + 3: second}[actual[-1]])
    assert set(actual) == {PROMPT + 1, PROMPT + T + 3}
    for left in tmp_path.glob(".tmp-*"):
        os.utime(left, (1, 1))
    save_cache(first, model, path)
    assert [left.name for left in tmp_path.iterdir()] == ["cache"]


Parts = tuple[dict[str, Any], dict[str, Tensor]]
Craft = Callable[[dict[str, Any], dict[str, Tensor]], object]


def _setting(*path: Any) -> Craft:
    """Replace a value of the manifest. The arguments are the names that lead to the value, then the new value."""
    *names, last, value = path

    def craft(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        where: Any = manifest
        for name in names:
            where = where[name]
        where[last] = value

    return craft


def _with(name: str, change: Callable[[Tensor], Tensor]) -> Craft:
    """Change all tensors whose name ends with `name`."""

    def craft(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for one in [one for one in tensors if one.endswith(name)]:
            tensors[one] = change(tensors[one]).contiguous()

    return craft


def _at(name: str, place: Any, value: float) -> Craft:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return _with(name, change)


def _all(*crafts: Craft) -> Craft:
    def craft(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for one in crafts:
            one(manifest, tensors)

    return craft


def _without(name: str) -> Craft:
    return lambda manifest, tensors: tensors.pop(name)


def _more(name: str, tensor: Tensor) -> Craft:
    return lambda manifest, tensors: tensors.update({name: tensor})


def _twice(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write two states for one row."""
    manifest["states"] *= 2
    row_tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("row 0.")}
    tensors.update({name.replace("row 0", "row 1"): tensor for name, tensor in row_tensors.items()})


def _stateless(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Remove the states of the policy, but not the number of columns for which the states were made."""
    manifest["states"] = []
    for name in [name for name in tensors if name.startswith("row 0.")]:
        del tensors[name]


def _both(change: Callable[[Tensor], Tensor]) -> Craft:
    return _all(_with("keys", change), _with("values", change))


def _unread(layer: str) -> Craft:
    return _all(_without(f"{layer}.keys"), _without(f"{layer}.values"))


_ONE = torch.ones(2, 1, dtype=torch.int64)
_WIDE = _with("keys", lambda keys: keys.double())
CRAFTED: dict[str, tuple[str, Craft]] = {
    # Files that raised KeyError, TypeError, RecursionError and similar errors.
    "a layer too few": ("it has 2 layers, the model 3", lambda manifest, tensors: manifest["layers"].pop()),
    "a layer too many": ("it has 4 layers", lambda manifest, tensors: manifest["layers"].append({"evicted": 1})),
    "a layer that slides": ("layer 1 says .*seen", _setting("layers", 1, {"seen": 70})),
    "chunks that are not there": ("chunk 0.ids", _setting("chunks", [1])),
    "chunks out of order": ("chunks stand after", _setting("chunks", [3, 1])),
    "a state that is a list": ("row 0 must say", _setting("states", 0, [])),
    "a state without sigma": ("row 0 must say", lambda manifest, tensors: manifest["states"][0].pop("sigma")),
    "a share of nothing": ("is no budget", _setting("states", 0, "fraction", "1/0")),
    "a share that never ends": ("is no budget", _setting("states", 0, "fraction", "1e999999999")),
    "two budgets": ("is no budget", _setting("states", 0, "count", 7)),
    "a share above 1": ("fraction must lie", _setting("states", 0, "fraction", "3/2")),
    "steps below 0": ("seen and step", _setting("states", 0, "step", -1)),
    "mu as text": ("mu and sigma", _setting("states", 0, "mu", "0")),
    "sigma of NaN": ("mu and sigma", _setting("states", 0, "sigma", float("nan"))),
    "sigma of 0": ("mu and sigma", _setting("states", 0, "sigma", 0.0)),
    "tail ids of text": ("tail_ids", _setting("states", 0, "tail_ids", ["a"])),
    "a tail beyond the vocabulary": ("tail_ids", _setting("states", 0, "tail_ids", [VOCABULARY])),
    # Files that were loaded.
    "keys of another dtype, which it says": ("are said to be", _all(_WIDE, _setting("dtypes", ["float64", "float32"]))),
    "half of the dtypes": ("are said to be", _setting("dtypes", ["float32"])),
    "one head": ("0.keys has the shape", _with("keys", lambda keys: keys[:, :1])),
    "other heads": ("has the shape", _with("s", lambda x: x.flatten(1, 2)[:, None] if x.ndim == 4 else x)),
    "fewer values": ("0.values has the shape", _with("values", lambda values: values[:, :, 1:])),
    "a batch": ("it has 1 states of 2 rows", _both(lambda x: torch.cat([x, x]))),
    "no batch": ("it has no rows", _both(lambda x: x[:0])),
    "layers of different batches": ("1.keys has the shape", _with("1.keys", lambda keys: torch.cat([keys, keys]))),
    "positions of two rows": ("positions of other rows", _with("kept", lambda kept: torch.cat([kept, kept]))),
    "more positions than keys": ("other rows or slots", _with("kept", lambda kept: torch.arange(99)[None])),
    "more seen than columns": ("do not rise", _with("seen_at_compaction", lambda seen: seen + 50)),
    "seen below 0": ("do not rise", _with("seen_at_compaction", lambda seen: seen * 0 - 1)),
    "holes that fall": ("its holes do not rise", _with("holes", lambda holes: torch.tensor([[3, 1]]))),
    "holes beyond all": ("its holes do not rise", _with("holes", lambda holes: torch.tensor([[4000]]))),
    "more holes than columns": ("more than its", _with("holes", lambda holes: torch.zeros(1, 9).long())),
    "layers of different positions": ("different positions", _at("1.kept", (0, 16), 25)),
    "layers of different length": ("its layers have seen", _setting("layers", 1, "evicted", 999)),
    "layers that differ, and states": ("its layers differ, and states know of one set", _setting("differ", True)),
    "a layer of heads": ("too many: 1.kept, 1.lengths", _setting("layers", 1, {"padded_seen": 70})),
    "a layer of two kinds": ("layer 1 says", _setting("layers", 1, {"padded_seen": 70, "evicted": 3})),
    "a gap in what does not slide": ("layer 1 says", _setting("layers", 1, {"seen": 70, "first_kept": 3})),
    "a layer that stores what it has not read": ("other rows or slots", _unread("1")),
    "layers that have read nothing": ("it has no rows", _all(_unread("0"), _unread("1"), _unread("2"))),
    # Continuations that do not match the cache.
    "states of another row": ("it has 2 states", _twice), "no states, and columns": ("no states", _stateless),
    "a state of more tokens": ("counts|positions|tokens", _setting("states", 0, "seen", 999)),
    "columns that were never seen": ("its states know of", _setting("columns", 9999)),
    "a state of other positions": ("knows of other tokens", _at("positions", 16, 25)),
    "a trunk of no tokens": ("offsets", _at("offsets", 1, 0)),
    "no trunks": ("offsets", _with("offsets", lambda offsets: offsets[:0])),
    "impacts of NaN": ("impact", _at(".impact", 0, float("nan"))), "D of NaN": ("D = ", _at(".D", 0, float("nan"))),
    "norms of NaN": ("inverse_norms", _at(".inverse_norms", 0, float("nan"))),
    "weights of NaN": ("W = ", _with(".weights", lambda weights: weights * float("nan"))),
    "ids beyond the vocabulary": ("row 0.ids must lie", _at(".ids", -1, VOCABULARY)),
    "ids twice": ("counts", _at(".ids", 1, 3)), "counts of other tokens": ("counts", _at(".counts", 0, 99)),
    "counts of 0": ("counts", _at(".counts", 0, 0)),
    "pending ids beyond the vocabulary": ("pending must lie", _more("pending", _ONE[:1] * VOCABULARY)),
    "pending ids of two rows": ("pending has the shape", _more("pending", _ONE)),
    "pending tokens that were never read": ("its states know of", _more("pending", _ONE[:1].expand(1, 5).clone())),
}


HEADS: dict[str, tuple[str, Craft]] = {
    "no keys and values": ("0.keys, 0.values", _unread("0")),
    "layers that agree": ("store different positions", _setting("differ", False)),
    "layers of different length": ("its layers have seen", _setting("layers", 1, "padded_seen", 999)),
    "rows of different length": (
        "its layers have seen different tokens",
        _all(*(_setting("layers", at, "padded_seen", 68) for at in range(3)), _with("1.seen", lambda seen: seen + 1)),
    ),
    "fewer values": ("0.values has the shape", _with("values", lambda values: values[1:])),
    "fewer slots": ("layer 0 has lengths that are not those of 4 heads", _both(lambda x: x[1:])),
    "fewer positions": ("lengths that are not", _with("positions", lambda positions: positions[1:])),
    "fewer heads": ("lengths that are not", _with("lengths", lambda lengths: lengths[:-1])),
    "longer heads": ("lengths that are not", _with("lengths", lambda lengths: lengths + 1)),
    "a length below 0": ("lengths that are not", _with("lengths", lambda x: x + torch.tensor([-99, 99, 0, 0]))),
    "lengths of other heads": (
        "layer 0, row 0, head 0: its positions", _with("lengths", lambda x: x + torch.tensor([1, -1, 0, 0])),
    ),
    "positions beyond what was seen": ("row 1, head 1: its positions do not rise", _at("positions", -1, 67)),
    "one row in one layer": ("layer 1 has positions of other rows", _with("1.seen", lambda seen: seen[:1])),
    "one row": ("lengths that are not those of 2 heads", _with("seen", lambda seen: seen[:1])),
    "no rows": ("it has no rows", _with("seen", lambda seen: seen[:0])),
    "more seen than columns": ("do not rise inside its 68", _with("seen", lambda seen: seen + 1)),
    "holes of three rows": ("positions of other rows", _with("holes", lambda holes: holes.expand(3, -1))),
    "more holes than columns": ("more than its 67", _with("holes", lambda holes: torch.zeros(1, 1).long())),
    "a chunk": (
        "its layers differ, and states know of one set",
        _all(_setting("chunks", [0]), _more("chunk 0.ids", _ONE[0]), _more("chunk 0.kept", _ONE[0] * 0)),
    ),
}
GAPS: dict[str, tuple[str, Craft]] = {
    "no gap": ("too many: 0.positions", _setting("layers", 0, {"seen": 75})),
    "no gap and no positions": (
        "layer 0 stores 6 of the 15 tokens", _all(_setting("layers", 0, {"seen": 75}), _without("0.positions")),
    ),
    "positions of no gap": ("1.positions", _more("1.positions", _ONE[0])),
    "freed what it sees": ("has freed the tokens before 61", _setting("layers", 0, "first_kept", 61)),
    "freed without tokens": ("layer 0 says", _setting("layers", 0, {"first_kept": 60})),
    "another length": ("do not rise inside its window", _setting("layers", 0, "seen", 76)),
    "fewer positions": ("do not rise inside its window", _with("0.positions", lambda x: x[1:])),
    "positions before the window": (r"inside its window, \[60, 75\)", _at("0.positions", 0, 59)),
    "positions beyond what was seen": ("do not rise inside its window", _at("0.positions", -1, 75)),
    "fewer slots": ("do not rise inside its window", _both(lambda x: x[:, :, 1:])),
    "more slots than it sees": ("do not rise", _both(lambda x: x.repeat(1, 1, 4, 1))),
    "nothing read": ("do not rise inside its window", _unread("0")),
    "one head": ("0.keys has the shape", _with("0.keys", lambda keys: keys[:, :1])),
    "a batch": ("0.keys has the shape", _with("0.keys", lambda keys: torch.cat([keys, keys]))),
}
WINDOWS: dict[str, tuple[str, Craft]] = {
    "fewer slots": ("layer 0 stores 14 of the 15", _both(lambda x: x[:, :, 1:])),
    "another length": ("its layers have seen", _setting("layers", 0, "seen", 4000)),
    "a layer that does not slide": ("layer 0 says", _setting("layers", 0, {"evicted": 3})),
    "nothing read": ("layer 0 stores 0 of the 15", _unread("0")),
}
TABLES: dict[str, tuple[Callable[[], Any], dict[str, tuple[str, Craft]]]] = {
    "one set": (lambda: lived("llama", steps=T + 3), CRAFTED), "windows": (lambda: lived("gemma3"), WINDOWS),
    "heads": (lambda: differing("adakv", "llama"), HEADS), "gaps": (gapped, GAPS),
}
identity_of = cache(identify)
LISTS, FIELDS = ("layers", "states", "chunks", "dtypes"), ("columns", "pending", "differ")
Saved = Callable[[str], tuple[PreTrainedModel, Path]]


def saving(folder: Path) -> Saved:
    """Return a function that saves the cache for a table in the folder, and returns model and file."""

    @cache
    def save(table: str) -> tuple[PreTrainedModel, Path]:
        (model, cache_of_table), path = TABLES[table][0](), folder / table
        save_cache(cache_of_table, model, path)
        return model, path

    return save


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return saving(tmp_path_factory.mktemp("saved"))


def parts_of(path: Path) -> Parts:
    metadata, tensors = read(path)
    return json.loads(metadata["manifest"]), {name: tensor.clone() for name, tensor in tensors.items()}


def mistakes(manifest: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Craft]]:
    """Yield wrong values for every field and every tensor of a file, each after the words of the error."""
    yield from (("lacks one of layers", _setting(name, value)) for name in LISTS for value in (None, {"0": 1}))
    yield from ((f"{name} is", _setting(name, value)) for name in FIELDS for value in (None, -1, "7", ["read"]))
    for at, name in ((at, name) for at, numbers in enumerate(manifest["layers"]) for name in numbers):
        yield from ((f"layer {at} says", _setting("layers", at, name, value)) for value in ("3", True, -1))
    yield "too many: extra", _more("extra", _ONE)
    for name, tensor in tensors.items():
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        if name != "pending":
            yield f"missing or too many: .*{name}", _without(name)
        yield f"{name} has the dtype", _with(name, partial(Tensor.to, dtype=other))
        yield f"{name} has the shape", _with(name, lambda x: x[None])
        if name.endswith((".keys", ".values")):
            place = tuple(size // 2 for size in tensor.shape)
            yield f"{name} has the shape", _with(name, lambda x: x[..., :6])
            yield from ((f"{name} holds NaN or inf", _at(name, place, bad)) for bad in (float("nan"), float("inf")))
        elif name.endswith((".kept", ".positions")) and name[0] != "r" and tensor.numel():
            yield "positions do not rise", _with(name, lambda x: x.flip(-1))
            yield "positions do not rise", _with(name, lambda x: torch.cat([x[..., 1:2], x[..., 1:]], dim=-1))
            yield from (("positions do not rise", _at(name, (..., at), bad)) for at, bad in ((0, -7), (-1, 4000)))


def check_refused(saved: tuple[PreTrainedModel, Path], words: str, craft: Craft, path: Path) -> None:
    """Check that a file is refused that is crafted from a saved file."""
    model, whole = saved
    manifest, tensors = parts_of(whole)
    craft(manifest, tensors)
    write(path, {"format": FORMAT, "manifest": json.dumps(manifest)}, tensors)
    with pytest.raises(SpecError, match=words) as caught:
        load_cache(path, model, identity_of(model))
    assert caught.value.argument == "path"
    assert "does not contain a cache of this model" in str(caught.value)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("table", TABLES)
def test_each_field_and_each_tensor_is_checked(table: str, saved: Saved, tmp_path: Path) -> None:
    for words, craft in [*mistakes(*parts_of(saved(table)[1]))]:
        check_refused(saved(table), words, craft, tmp_path / "crafted")


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in TABLES[table][1]])
def test_a_crafted_file_is_refused_by_name(table: str, name: str, saved: Saved, tmp_path: Path) -> None:
    check_refused(saved(table), *TABLES[table][1][name], tmp_path / "crafted")


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "7", '"a"', "{", ""])
def test_a_manifest_that_is_none_is_refused(text: str, saved: Saved, tmp_path: Path) -> None:
    model, path = saved("one set")
    write(tmp_path / "crafted", {"format": FORMAT, "manifest": text}, parts_of(path)[1])
    with pytest.raises(SpecError, match="must have a readable manifest"):
        load_cache(tmp_path / "crafted", model)


_NONE = torch.zeros(0, dtype=torch.int64)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("words", "craft"), [
    ("is damaged", lambda _, tensors: tensors.update({f"x{at}": _NONE for at in range(TENSORS_MOST)})),
    ("its states and chunks need 36000000", _setting("states", [0] * 3_000_000)),
    ("its states and chunks need", _setting("chunks", [0] * 3_000_000)),
    ("columns is", _setting("columns", "\x1b[2J" * 100_000)),
    ("was saved with weights", _setting("weights", "\x1b[2J\n" * 100_000)),
])
def test_a_large_header_costs_little(words: str, craft: Craft, saved: Saved, tmp_path: Path) -> None:
    """Check that neither time, memory nor the error grows with a header whose digest is right."""
    model, path = saved("one set")
    manifest, tensors = parts_of(path)
    craft(manifest, tensors)
    write(tmp_path / "crafted", {"format": FORMAT, "manifest": json.dumps(manifest)}, tensors)
    begun = time.process_time()
    with pytest.raises(SpecError, match=words) as caught:
        load_cache(tmp_path / "crafted", model, identity_of(model))
    assert time.process_time() - begun < 5  # Before: 1.3 to 7.8 s.
    assert len(str(caught.value)) < 700
    assert str(caught.value).isprintable()


def test_a_file_that_is_written_again_is_loaded(saved: Saved, tmp_path: Path) -> None:
    model, path = saved("one set")
    manifest, tensors = parts_of(path)
    write(tmp_path / "again", {"format": FORMAT, "manifest": json.dumps(manifest)}, tensors)
    same(load_cache(tmp_path / "again", model), load_cache(path, model))


def test_what_holds_no_token_may_hold_anything(tmp_path: Path) -> None:
    """Check that slots of padding may contain NaN, because they are masked."""
    model, (ids, mask) = build("llama"), batch(prompts())
    cache = RetainedCache(model.config)
    with breathing()(model):
        at_once(model, ids, cache, attention_mask=mask)
    empty = cache.full_layers[0].stored_positions() == EMPTY
    assert bool(empty.any())
    for layer in cache.full_layers:
        layer.keys[empty[:, None].expand(layer.keys.shape[:3])] = float("nan")  # type: ignore[index, union-attr]
    save_cache(cache, model, tmp_path / "cache")
    assert load_cache(tmp_path / "cache", model).get_seq_length() == cache.get_seq_length()


def test_keys_of_autocast_are_saved_as_they_are(tmp_path: Path) -> None:
    model = build("llama")
    cache = RetainedCache(model.config)
    with torch.autocast("cpu", torch.bfloat16), METHODS["streamingllm"]()(model):
        at_once(model, prompt(40), cache)
    save_cache(cache, model, tmp_path / "cache")
    same(load_cache(tmp_path / "cache", model), cache)


def _attempt(act: Callable[[], object], refused: list[str]) -> None:
    try:
        act()
    except SpecError as error:
        refused.append(error.bound)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """Check that a FIFO, a link to a FIFO and a folder are neither read nor replaced by a file."""
    model, cache = lived("llama", steps=1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / name for name in ("pipe", "link", "folder")):
        for act in (partial(load_cache, path, model), partial(save_cache, cache, model, path)):
            refused = list[str]()
            attempt = threading.Thread(target=_attempt, args=(act, refused), daemon=True)
            attempt.start()
            attempt.join(120)
            assert refused == ["must be a file, and is a folder, FIFO, socket or device"]
