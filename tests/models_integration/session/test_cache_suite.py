"""Tests of the cache suite: kvspec's cache passes, a plain cache passes in part, and each planted error fails."""

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from conformance.cache_suite import judge, oracle
from conformance.cache_suite.abilities import ABILITIES, BATCH, PADDED, SAVED, check_ability
from conformance.cache_suite.conftest import loadable_model
from conformance.cache_suite.judge import BLOCKS, KINDS, LENGTHS, LONG, LONGER, PROMPT, TINY, WHOLE, check, save_tiny
from conformance.cache_suite.oracle import UnknownRotation, check_rotation, frequencies
from conformance.cache_suite.test_eviction import NEW
from conformance.checks.failing_input import code_of
from conformance.checks.refusals import SubjectFailure
from conformance.paths import ROOT, SPEC
from conformance.tolerances import MASKED_LOGITS
from conformance.verify import __main__ as verify_main
from models_integration.pocket import ASSETS
from models_integration.session.verbs import after_eviction

pytestmark = [pytest.mark.law("the-proof-has-teeth"), pytest.mark.usefixtures("one_thread")]

Kept = dict[int, list[list[int]]]
EQUAL, RAGGED = "a set for each KV head", "a set of its own length for each KV head"
FEW, NOTHING, NEARLY = (*KINDS,)[-2], (*KINDS,)[-1], "a twentieth is evicted"
UNEVEN = (RAGGED, FEW, NOTHING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


@cache
def loaded(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    return model


def stored(tensor: Tensor, sets: list[list[int]], longest: int) -> Tensor:
    """Return the kept rows of (1, H_kv, n, d), padded with zeros to the longest head."""
    rows = [tensor[0, head, positions] for head, positions in enumerate(sets)]
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])[None]


def plain(
    prompt: list[int], kept: Kept, following: list[int], folder: str, shift: int = 0, padded: bool = False,
    of_head: Callable[[list[list[int]]], list[list[int]]] = lambda sets: sets,
    turn: Callable[..., Tensor] = lambda keys, *_: keys,
) -> Tensor:
    """Return logits from compacted tensors in a cache of transformers.

    The options add typical mistakes of such a cache.
    """
    model, full, compacted = loaded(folder), DynamicCache(), DynamicCache()
    longest = max(len(places) for sets in kept.values() for places in sets)
    if not padded and any(len(places) < longest for sets in kept.values() for places in sets):
        raise NotImplementedError("sets of different lengths")
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=full)
        for layer, sets in kept.items():
            whole: Any = full.layers[layer]
            keys, values = (stored(tensor, of_head(sets), longest) for tensor in (whole.keys, whole.values))
            compacted.update(turn(keys, of_head(sets), model, layer), values, layer)
        first = len(prompt) - shift * (len(prompt) - longest)
        positions = torch.arange(first, first + len(following))[None]
        logits: Tensor = model(torch.tensor([following]), past_key_values=compacted, position_ids=positions).logits
    return logits[0]


def rotated(
    keys: Tensor, sets: list[list[int]], model: PreTrainedModel, layer: int, end: int = 0,
    layers: Sequence[int] = range(3), part: range = range(PROMPT),
) -> Tensor:
    """Rotate keys from their positions in the text to positions 0, 1, ..., or before `end`, as the model does.

    Only keys of the layers `layers` and of the tokens in `part` are rotated.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    at = torch.tensor(sets)
    first = end - at.shape[1] if end else 0
    to = torch.arange(first, first + at.shape[1]).expand_as(at)
    moves = torch.tensor([[layer in layers and position in part for position in kept] for kept in sets])
    cos, sin = model.model.rotary_emb(keys, torch.where(moves, at - to, 0))
    back: Tensor = apply_rotary_pos_emb(keys[0][:, None], keys[0][:, None], cos, -sin)[0]
    return back[:, 0][None]


def test_a_cache_that_renumbers_is_judged_by_its_rule(folder: str) -> None:
    """Check the rule if it is declared, and that keys that were not rotated again fail under both rules."""
    renumbered, untouched = partial(plain, shift=1, turn=rotated), partial(plain, shift=1)
    for kind in (WHOLE, "one set for all", "a set for each layer", EQUAL):
        check(renumbered, folder, kind, 5, renumbered=True)
    for engine, rule in ((renumbered, False), (untouched, False), (untouched, True), (plain, True)):
        with pytest.raises(AssertionError, match="away from"):
            check(engine, folder, EQUAL, 5, renumbered=rule)


@pytest.mark.parametrize(("layers", "part", "rule", "words"), [
    ((0, 1, 2), range(PROMPT), False, "all kept tokens had renumbered positions, and the rest positions of the text"),
    ((), range(PROMPT), True, "all kept tokens had positions of the text, and the rest renumbered positions"),
    ((1,), range(PROMPT), False, "layer 1 had renumbered positions, and the rest positions of the text"),
    ((0, 2), range(PROMPT), True, "layer 1 had positions of the text, and the rest renumbered positions"),
    ((0,), range(PROMPT), True, "layers 1 and later had positions of the text, and the rest renumbered positions"),
    ((0, 1, 2), range(20), True, "kept tokens from position 20 on had positions of the text"),
    ((1,), range(30), False, "kept tokens of layer 1 before position 30 had renumbered positions"),
])
def test_a_mixture_of_both_rules_is_told_by_layer_and_position(
    layers: Sequence[int], part: range, rule: bool, words: str, folder: str,
) -> None:
    """A cache turns the keys of some layers and tokens to the positions before the next token, and no query."""
    mixed = partial(plain, turn=partial(rotated, end=PROMPT, layers=layers, part=part))
    with pytest.raises(AssertionError, match="away from") as caught:
        check(mixed, folder, EQUAL, 5, renumbered=rule)
    message = str(caught.value)
    position = next(iter(re.findall(r"position (\d+)", words)), "0")
    nearest = next(iter(re.findall(r"position (\d+)", message)), "0")
    assert words.replace(f"position {position}", f"position {nearest}") in message
    assert 0 <= int(nearest) - int(position) < 5  # the next position that a head keeps


@pytest.mark.parametrize(("shift", "turn", "rule", "words"), [
    (1, lambda keys, *_: keys, True, "all kept tokens had keys that were not rotated, and the rest renumbered"),
    (0, rotated, False, "all kept tokens had the positions 0, 1, ..., and the rest positions of the text"),
])
def test_keys_and_queries_of_different_rules_are_told(
    shift: int, turn: Callable[..., Tensor], rule: bool, words: str, folder: str,
) -> None:
    """The next token has the number of stored tokens as its position, or only the keys are rotated."""
    engine = partial(plain, shift=shift, turn=turn)
    with pytest.raises(AssertionError, match=words) as caught:
        check(engine, folder, EQUAL, 5, renumbered=rule)
    again: dict[str, Any] = {}
    exec(code_of(caught.value), again)
    case = again["case"]
    with pytest.raises(AssertionError, match=words):
        judge.compare(
            case, torch.as_tensor(engine(case.prompt, case.kept, case.following, again["model"])), EQUAL, folder, rule,
        )


@pytest.mark.parametrize("family", TINY)
def test_the_judge_knows_how_each_family_rotates(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded(str(save_tiny(family, tmp_path)))
    check_rotation(model)
    monkeypatch.setattr(oracle, "frequencies", lambda model: 1.5 * frequencies(model))
    with pytest.raises(UnknownRotation, match="does not know how this model rotates"):
        check_rotation(model)
    with pytest.raises(UnknownRotation, match="finds no rotary frequencies"):
        frequencies(torch.nn.Linear(1, 1))


@pytest.mark.law("eviction-equals-masking")
@pytest.mark.parametrize("kind", KINDS)
def test_our_cache_holds(kind: str, folder: str) -> None:
    check(after_eviction, folder, kind, 5)
    check(lambda *given: after_eviction(*given).log_softmax(-1).tolist(), folder, kind, 1)


def test_a_plain_cache_holds_where_it_serves(folder: str) -> None:
    for kind in KINDS:
        if kind not in UNEVEN:
            check(plain, folder, kind, 5)
    with pytest.raises(pytest.skip.Exception, match=rf"^{RAGGED}: not served \(sets of different lengths\)$"):
        check(plain, folder, RAGGED, 5)


def test_an_error_of_the_subject_has_its_file_and_line(folder: str) -> None:
    """Check the error of an engine. Layers that are not in `kept` are sliding layers, and layer 7 does not exist."""
    def engine(prompt: list[int], kept: Kept, *rest: Any) -> Any:
        return [sets[0] for sets in (kept.get(layer) for layer in (0, 7))]  # type: ignore[index]

    with pytest.raises(SubjectFailure, match=r"function raised TypeError at \S+test_cache_suite\.py:\d+\n"):
        check(engine, folder, EQUAL, 5)


def everything(prompt: list[int], kept: Kept) -> Kept:
    return {layer: [list(range(len(prompt)))] * len(sets) for layer, sets in kept.items()}


def with_sets(change: Callable[[list[int], Kept], Kept]) -> Callable[..., Tensor]:
    """Return an engine that reads with changed kept sets."""
    return lambda prompt, kept, *rest: after_eviction(prompt, change(prompt, kept), *rest)


def whole_if(holds: Callable[[list[int], Kept], bool]) -> Callable[..., Tensor]:
    """Return an engine that evicts nothing if the prompt and the kept sets satisfy `holds`."""
    return with_sets(lambda prompt, kept: everything(prompt, kept) if holds(prompt, kept) else kept)


def fewest(kept: Kept) -> int:
    return min(len(positions) for sets in kept.values() for positions in sets)


def eight_at_a_time(prompt: list[int], kept: Kept, following: list[int], folder: str) -> Tensor:
    """Let the ninth token after the prompt, and all later tokens, attend to the whole prompt."""
    actual = after_eviction(prompt, kept, following, folder)
    if len(following) > 8:
        actual[8:] = after_eviction(prompt, everything(prompt, kept), following, folder)[8:]
    return actual


def sixteen_by_sixteen(prompt: list[int], kept: Kept, following: list[int], folder: str) -> Tensor:
    """Hide the previous sixteen tokens from the next sixteen tokens."""
    starts = range(0, len(following), 16)
    return torch.cat([
        after_eviction([*prompt, *following[:at]], kept, following[at : at + 16], folder) for at in starts
    ])


def the_last_1500(prompt: list[int], kept: Kept, *rest: Any) -> Tensor:
    cut = max(0, len(prompt) - 1500)
    later = {layer: [[at - cut for at in positions if at >= cut] for positions in sets] for layer, sets in kept.items()}
    return after_eviction(prompt[cut:], later, *rest)


def short_ids(prompt: list[int], kept: Kept, following: list[int], folder: str) -> Tensor:
    return after_eviction([one % 2**16 for one in prompt], kept, [one % 2**16 for one in following], folder)


Call = tuple[str, int, int]
SMALL: list[Call] = [
    (RAGGED, 5, PROMPT), (RAGGED, NEW[-1], PROMPT), (RAGGED, 3, LENGTHS[1]), (NEARLY, NEW[0], PROMPT),
    (FEW, NEW[0], PROMPT), (NOTHING, NEW[0], PROMPT), ("one set for all", 3, LONG),
]
ALL_BLOCKS: list[Call] = [(EQUAL, 3, length) for length in BLOCKS]
ONE, AWAY = (EQUAL, 5, PROMPT), "away from"
# Engine, family, calls of the suite (kind of kept sets, next tokens, tokens of the prompt), words of the failure.
MISTAKES: list[tuple[Callable[..., Any], str, list[Call], str]] = [
    (partial(plain, shift=1), "llama", [("one set for all", 5, PROMPT)], AWAY),
    (partial(plain, padded=True), "llama", [(RAGGED, 5, PROMPT)], AWAY),
    (partial(plain, of_head=lambda sets: [sets[0], sets[0]]), "llama", [ONE], AWAY),
    (partial(plain, of_head=lambda sets: sets[::-1]), "llama", [ONE], AWAY),
    (lambda prompt, kept, *rest: plain(prompt, everything(prompt, kept), *rest), "llama", [ONE],
     "as if nothing were evicted"),
    (lambda *given: plain(*given)[-1:], "llama", [ONE], r"logits are \(1, 256\)"),
    (lambda *given: plain(*given) * float("nan"), "llama", [ONE], "inf of the largest"),
    # Engines that are right on small inputs. The second reads the last four tokens where a head keeps fewer than four.
    *((engine, "llama", SMALL, "") for engine in (
        whole_if(lambda prompt, kept: len(prompt) > 64),
        with_sets(lambda prompt, kept: {
            at: [heads if len(heads) > 3 else list(range(len(prompt)))[-4:] for heads in kept[at]] for at in kept
        }),
        eight_at_a_time, sixteen_by_sixteen, whole_if(lambda prompt, kept: fewest(kept) > 0.9 * len(prompt)),
    )),
    (with_sets(lambda _, kept: {at: sets[::-1] if len(sets) > 4 else sets for at, sets in kept.items()}),
     "qwen3", SMALL, ""),
    (with_sets(lambda prompt, kept: {
        at: heads if any(heads) else everything(prompt, kept)[at] for at, heads in kept.items()
    }), "gemma3_text", SMALL, ""),
    (whole_if(lambda prompt, kept: kept[min(kept)] == everything(prompt, kept)[min(kept)]), "gemma3_text", SMALL, ""),
    (the_last_1500, "gpt_neox", SMALL, ""),
    (with_sets(lambda prompt, kept: {  # as if tokens with the id of padding were padding
        at: [[place for place in heads if prompt[place]] for heads in sets] for at, sets in kept.items()
    }), "llama", [ONE], AWAY),
    # Engines that are wrong on shapes of real models.
    (whole_if(lambda prompt, kept: len(prompt) % 16 == 0), "llama", ALL_BLOCKS, AWAY),
    (whole_if(lambda prompt, kept: len(prompt) == 512), "llama", ALL_BLOCKS, AWAY),
    (whole_if(lambda prompt, kept: len(prompt) % 128 == 1), "llama", ALL_BLOCKS, AWAY),
    *((engine, "gemma2", [ONE], AWAY) for engine in (
        whole_if(lambda prompt, kept: len(kept[0]) == 1),
        with_sets(lambda _, kept: {layer: kept[min(layer, 2)] for layer in kept}), short_ids,
        with_sets(lambda _, kept: dict(zip(sorted(kept, key=str), kept.values(), strict=True))),
    )),
    (whole_if(lambda prompt, kept: len(prompt) > 4096), "llama", [("one set for all", 3, LONGER)], AWAY),
    (with_sets(lambda prompt, kept: dict.fromkeys(kept, kept[0]) if len(prompt) > 1024 else kept),
     "llama", [(EQUAL, 3, LONG)], AWAY),
]


@pytest.mark.parametrize(("engine", "family", "calls", "words"), MISTAKES)
def test_each_mistake_is_found(
    engine: Callable[..., Any], family: str, calls: list[Call], words: str, tmp_path: Path, folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that at least one call of the suite detects the mistake. Other tests check the explanations of `site`."""
    monkeypatch.setattr(judge, "site", lambda *given: "")
    place = folder if family == "llama" else str(save_tiny(family, tmp_path))
    with pytest.raises(AssertionError, match=words or None):
        for kind, new, length in calls:
            check(engine, place, kind, new, length=length)


def constant_changed(
    keys: Tensor, sets: list[list[int]], model: PreTrainedModel, layer: int, name: str, change: Callable[[Any], Any],
) -> Tensor:
    """Change a constant of a layer's attention after the prompt is read."""
    attention = model.get_submodule(f"model.layers.{layer}.self_attn")
    setattr(attention, name, change(getattr(attention, name)))
    return keys


@pytest.mark.parametrize(("family", "name", "change"), [
    ("gemma2", "attn_logit_softcapping", lambda cap: None), ("gemma2", "scaling", lambda scaling: 32**-0.5),
    ("gpt_oss", "sinks", lambda sinks: nn.Parameter(sinks / 8)),
])
def test_attention_with_another_constant_after_the_prompt_is_found(
    family: str, name: str, change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Failures are not explained, because an explanation takes half a minute."""
    monkeypatch.setattr(judge, "site", lambda *given: "")
    place = str(save_tiny(family, tmp_path))
    for engine in (after_eviction, plain):
        check(engine, place, EQUAL, 5)
    with pytest.raises(AssertionError, match="away from"):
        check(partial(plain, turn=partial(constant_changed, name=name, change=change)), place, EQUAL, 5)


def rows_share_sets(prompt: Any, kept: Any, following: Any, folder: str, batch: bool = False, **more: Any) -> Tensor:
    return after_eviction(prompt, [kept[0]] * 3 if batch else kept, following, folder, batch, **more)


def padding_counts(prompt: Any, kept: Any, following: Any, folder: str, batch: bool = False) -> Tensor:
    """Treat padding tokens as tokens of the text."""
    longest = max(map(len, prompt)) if batch else 0
    prompt = [[0] * (longest - len(row)) + row for row in prompt] if batch else prompt
    if batch:
        kept = [{layer: [[at + longest - 40 for at in positions] if row == 0 else positions for positions in sets]
                 for layer, sets in of_row.items()} for row, of_row in enumerate(kept)]
    return after_eviction(prompt, kept, following, folder, batch)


def padding_of_whole_rows(prompt: Any, kept: Any, following: Any, folder: str, batch: bool = False) -> Tensor:
    """Treat padding tokens as tokens of the text in rows of which no token is evicted."""
    longest = max(map(len, prompt)) if batch else 0
    for row in range(len(prompt) if batch else 0):
        if all(len(positions) == len(prompt[row]) for sets in kept[row].values() for positions in sets):
            prompt[row] = [0] * (longest - len(prompt[row])) + prompt[row]
            kept[row] = {layer: [list(range(longest))] * len(sets) for layer, sets in kept[row].items()}
    return after_eviction(prompt, kept, following, folder, batch)


def loaded_at_the_last_kept(
    prompt: Any, kept: Any, following: Any, folder: str, save_to: str | None = None, load_from: str | None = None,
) -> Tensor:
    """Write a file with the kept tokens but without the number of read tokens."""
    if load_from:
        assert (prompt, kept) == ([], {})  # docs/guide/judge.md states both
        prompt, sets = json.loads(Path(load_from).read_text(encoding="utf-8"))
        kept = {int(layer): heads for layer, heads in sets.items()}
        prompt = prompt[: 1 + max(at for heads in kept.values() for head in heads for at in head)]
    if save_to:
        Path(save_to).write_text(json.dumps([prompt, kept]), encoding="utf-8")
    return after_eviction(prompt, kept, following, folder)


def nothing_saved(
    prompt: Any, kept: Any, following: Any, folder: str, save_to: str | None = None, load_from: str | None = None,
) -> Tensor:
    return after_eviction(prompt, kept, following, folder)


def loaded_at_one_length(
    prompt: Any, kept: Any, following: Any, folder: str, batch: bool = False, save_to: str | None = None,
    load_from: str | None = None,
) -> Tensor:
    """Write a file with one number of read tokens for all rows of a batch."""
    if load_from:
        prompt, sets = json.loads(Path(load_from).read_text(encoding="utf-8"))
        kept = [{int(layer): heads for layer, heads in one.items()} for one in sets]
        if batch:
            prompt = [row + [0] * (len(prompt[0]) - len(row)) for row in prompt]
        else:
            prompt, kept = prompt[0], kept[0]
    if save_to:
        content = [prompt, kept] if batch else [[prompt], [kept]]
        Path(save_to).write_text(json.dumps(content), encoding="utf-8")
    return after_eviction(prompt, kept, following, folder, batch)


@pytest.mark.parametrize(("engine", "ability", "words"), [
    (rows_share_sets, BATCH, "a batch, row 1 of"), (padding_counts, PADDED, "left padding, row 0 of"),
    (padding_of_whole_rows, PADDED, "left padding, row 1 of"),
    (loaded_at_the_last_kept, SAVED, "a cache that was loaded"), (nothing_saved, SAVED, "there is no file"),
    (loaded_at_one_length, SAVED, r"a batch that was loaded, row 1 of \[40, 7\]"),
])
def test_a_mistake_in_what_a_cache_offers_is_found(
    engine: Callable[..., Any], ability: str, words: str, folder: str, tmp_path: Path,
) -> None:
    with pytest.raises(AssertionError, match=words):
        check_ability(engine, folder, ability, tmp_path)


@pytest.mark.parametrize("ability", ABILITIES)
def test_our_cache_offers_it_and_a_plain_one_need_not(ability: str, folder: str, tmp_path: Path) -> None:
    check_ability(after_eviction, folder, ability, tmp_path)
    with pytest.raises(pytest.skip.Exception, match=rf"^{ability}: not served \(the function has no parameter"):
        check_ability(plain, folder, ability, tmp_path)


@pytest.mark.parametrize(("change", "words"), [
    (lambda kept: {**kept, 1: [kept[1][0], list(range(PROMPT))]}, "as if layer 1, KV head 1 kept all"),
    (lambda kept: {**kept, 2: [kept[2][0], kept[2][0]]}, "as if layer 2, KV head 1 kept what head 0 keeps"),
    (lambda kept: {0: kept[0], **dict.fromkeys((1, 2), [list(range(PROMPT))] * 2)}, "layers 1 and later kept all"),
    (lambda kept: {**kept, 1: kept[0]}, "as if layer 1 kept what layer 0 keeps"),
    (lambda kept: {layer: [one[:16] for one in sets] for layer, sets in kept.items()},
     "as if every layer lost the last block of 16"),
    (lambda kept: {**kept, 1: [[*one[:16], *one[17:]] for one in kept[1]]}, r"none of \d+ mistakes .* explains it"),
    (lambda kept: {**kept, 2: [kept[2][0], [at for at in kept[2][1] if not 16 <= at < 32]]},
     "as if layer 2, KV head 1 lost the positions 16 to 31 of the text"),
])
def test_a_mistake_is_told_with_its_layer_head_and_step(
    change: Callable[[Kept], Kept], words: str, folder: str,
) -> None:
    with pytest.raises(AssertionError, match=rf"{words}\nfirst at next token 0, id \d+: expected"):
        check(lambda prompt, kept, *rest: after_eviction(prompt, change(kept), *rest), folder, EQUAL, 5)


def test_two_mistakes_with_equal_results_are_both_told(folder: str) -> None:
    """Lose the last block of a head that keeps all 40 tokens, after a head that keeps none."""
    case = judge.visible_case(folder, RAGGED, 5, 0, False, PROMPT, 0)
    layer = next(layer for layer, sets in case.kept.items() if not sets[0])
    lost = after_eviction(case.prompt, {**case.kept, layer: [[], []]}, case.following, folder)
    both = f"layer {layer} lost the last block of 64, or as if layer {layer}, KV head 1 kept what head 0 keeps"
    with pytest.raises(AssertionError, match=f"it is as if {both}"):
        judge.compare(case, lost, RAGGED, folder, False)


def test_a_mistake_that_is_hardly_closer_is_not_told(folder: str) -> None:
    """Check a result halfway between the bound of the right kept sets and those of a mistake."""
    case = judge.visible_case(folder, EQUAL, 5, 0, False, PROMPT, 0)
    _, masked = judge.masked_model(loaded(folder), case.prompt, case.following, False)
    wrong = masked({**case.kept, 2: [case.kept[2][0]] * 2})
    share = 1.5 * MASKED_LOGITS * float(case.expected.abs().max()) / float((wrong - case.expected).abs().max())
    with pytest.raises(AssertionError, match="mistakes that were tried explains it"):
        judge.compare(case, case.expected + share * (wrong - case.expected), EQUAL, folder, False)


def test_a_prompt_that_is_read_again_is_found(folder: str) -> None:
    """Check an engine that, if a prompt occurs again, evicts from the compacted cache of this prompt."""
    known: dict[tuple[int, ...], Kept] = {}

    def engine(prompt: list[int], kept: Kept, *rest: Any) -> Tensor:
        before = known.setdefault(tuple(prompt), kept)
        common = {layer: [sorted({*positions} & {*old}) for positions, old in zip(sets, before[layer], strict=True)]
                  for layer, sets in kept.items()}
        return after_eviction(prompt, common, *rest)

    check(engine, folder, EQUAL, 4, again=1)
    with pytest.raises(AssertionError, match="away from"):
        check(engine, folder, EQUAL, 4, again=2)


ENGINES = """
from functools import partial
from tests.models_integration.session.test_cache_suite import plain

PADDED = partial(plain, padded=True)
def SHY(prompt, kept, *rest):
    if any(len(own) < len(prompt) for sets in kept.values() for own in sets):
        raise NotImplementedError("eviction")
    return plain(prompt, kept, *rest)
"""
EXPECTED = {
    "plain": (0, [*["pass"] * 3, "not served", "pass", "pass", *["not served"] * 5]),
    "PADDED": (1, [*["pass"] * 3, "fail", "pass", "pass", "fail", "fail", *["not served"] * 3]),
    "SHY": (1, ["not served"] * 11),
}


@pytest.mark.usefixtures("same_seeds")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "SHY" else pytest.mark.nightly) for name in EXPECTED],
)
def test_a_certificate_names_the_row_of_the_mistake_and_what_is_not_served(
    name: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that an engine that runs only cases without eviction certifies nothing."""
    def asked(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["verify", *words, "--out", "found"])
        return verify_main.main()

    (tmp_path / "caches.py").write_text(ENGINES, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "caches", raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "short" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}), "utf-8")
    code, expected = EXPECTED[name]
    assert asked("--cache", f"caches:{name}", "--model", "short") == code
    written = tomllib.loads(Path("found/certificate.toml").read_text(encoding="utf-8"))
    kinds = [kind for kind in KINDS if kind != WHOLE]
    assert {row: entry["verdict"] for row, entry in written["items"].items()} == dict(
        zip((f"llama: {row}" for row in (*kinds, *ABILITIES)), expected, strict=True)
    )
    assert written["families"] == ([] if name == "SHY" else ["llama"])
    schema = json.loads((SPEC / "certificate.schema.json").read_text(encoding="utf-8"))
    pytest.importorskip("jsonschema").validate(json.loads(json.dumps(written, default=str)), schema)

    (tmp_path / "caches.py").write_text(f"{ENGINES}\n", encoding="utf-8")
    assert asked("--check", "found/certificate.toml", "--yes") == 2
    assert "so nothing was run; restore the files, or make a new certificate: " in capsys.readouterr().err


@pytest.mark.law("one-line-with-the-way-out")
def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("absent", str(tmp_path)):
        with pytest.raises(pytest.UsageError, match=f"^model = '{name}': must be the folder of a [^:]*$"):
            loadable_model(name)
    assert loadable_model("pocket") == {"llama": str(ASSETS)}
