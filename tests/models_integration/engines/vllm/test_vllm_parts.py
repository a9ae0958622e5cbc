"""Parts of the vLLM integration that need no vLLM: arguments, plans, pages, statements and decisions."""

import json
import sys
import tracemalloc
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from conformance.paths import SPEC
from conformance.server_suite.reading import policy_of
from conformance.witness.statement import parse_statement
from kvspec.cli import serve
from kvspec.cli.app import app
from kvspec.cli.serve import run_serve, server_settings
from models_integration.engines.vllm.arguments import RequestPolicy, Settings, parse_request
from models_integration.engines.vllm.pages import LAYOUTS, Pages, check_pool
from models_integration.engines.vllm.plan import Plan
from models_integration.engines.vllm.selection import Decider, LayerFacts
from models_integration.engines.vllm.statement import MOST_RANGES, Statement
from models_integration.model.cache_argument import cache_name
from models_integration.model.hub import downloaded
from models_integration.pocket import ASSETS, load_pocket
from models_integration.policies.methods import RetentionPolicy, constants_of, policy_from_name
from reference.policies import names
from reference.policies.composition import PARTS
from spec.errors import SpecError
from spec.witness import make_eviction
from tests.models_integration.engines.vllm import engine
from tests.models_integration.engines.vllm.engine import SHAPE, check_logprobs, cut, read_masked, row_of

pytestmark = pytest.mark.law("as-it-is-described")

OPEN = Settings(on_unserved="full")
DEFAULT = Settings({"policy": "snapkv", "budget": 0.3, "W": 16}, "0.2:1", ("snapkv", "knorm"))


def request(given: Any, settings: Settings = OPEN) -> RequestPolicy:
    actual = parse_request(given, settings)
    assert actual is not None
    return actual


def plan(n: int = 100, **asked: Any) -> Plan:
    return Plan(request({"policy": "snapkv", "budget": 0.3, "W": 16, **asked}), n)


def hostile(policy: str, asked: Mapping[str, object] = {}) -> str:
    return json.dumps({"policy": policy, "budget": 0.3, **asked})


HOSTILE = {
    "a long name": hostile("a" * 60_000), "a name with lines": hostile("snapkv" + "_" * 60_000),
    "constants": hostile("snapkv" + ":W=1" * 15_000),
    "parts": hostile("snapkv" + "".join(map("/p{}=a".format, range(8000)))),
    "deep": hostile("snapkv(W=" + "[" * 30_000 + "]" * 30_000 + ")"),
    "list": hostile("knorm", {"W": list(range(10_000))}),
    "shares": hostile("knorm/layers=table:shares=" + "_".join("1" * 30_000)),
    "object": hostile("knorm", {"W": {"a": "b" * 60_000}}),
    "key": hostile("knorm", {"k" * 60_000: 1}), "keys": hostile("knorm", {f"budge{at}": 1 for at in range(4_000)}),
    "extreme": hostile("knorm", {"sentence_ends": [10**7] * 6_000}),
    "no object": ["snapkv"] * 100_000, "no JSON": "[" * 60_000,
}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("given", HOSTILE.values(), ids=HOSTILE)
def test_a_refusal_is_short_and_takes_little_memory(given: Any) -> None:
    """Check the cost of an error. Errors once repeated 130 000 characters, and 8 000 parts took 0.4 s and 4 MB."""
    with suppress(SpecError):
        parse_request(given, OPEN)  # the tables of names are made once
    tracemalloc.start()
    try:
        with pytest.raises(SpecError) as refused:
            parse_request(given, OPEN)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(str(refused.value)) < 300


def test_policies_with_many_sentence_ends_are_not_stored() -> None:
    many = [{"policy": "crystalcache", "budget": 0.3, "sentence_ends": list(range(at, 9000))} for at in range(2)]
    assert request(many[0]) is not request(many[0])
    assert len(request(many[1]).constants["sentence_ends"]) == 8999
    assert request({"policy": "snapkv", "budget": 0.3}) is request('{"budget": 0.3, "policy": "snapkv"}')


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("given", "message"), [
    ({"policy": "nosuch", "budget": 0.3}, "policy"), ({"policy": "snapkv", "budget": 3.0}, "budget"),
    ({"policy": "snapkv", "budget": 0.1}, "between 0.2 and 1.0"), ({"policy": "snapkv", "budget": 64}, "between"),
    ({"policy": "tova", "budget": 0.5}, "allowed are snapkv, knorm"), ({"policy": "os:system"}, "built-in"),
    ({"policy": "snapkv", "backend": "os:system"}, "server"), ({"policy": "snapkv", "W": "x"}, "W = 'x'"),
    ({"policy": "triattention", "calibration": "/etc/passwd"}, "server"), ({"policy": "knorm"}, "budget"),
    ({"policy": "knorm", "budget": None}, "budget = None: is needed: a share"),
    ({"policy": "snapkv", "Back_end": "os:system"}, "is chosen by the server"), ("{", "JSON"),
    ("[]", r"""kvspec = '\[\]': must be an object or its JSON text, such as {"policy": "snapkv", "budget": 0.3}"""),
    ({"policy": "snapkv", "windows": 3}, "constants"),
    ("policy=knorm", 'must be JSON, such as {"policy": "snapkv"'),
    ({"policy": "snapkv:W=16", "window": 8, "budget": 0.3}, "W = 8: is also in 'snapkv:W=16', with the value 16"),
    ({"polcy": "knorm"}, "polcy = 'knorm': .*did you mean policy"),
    ({"policy": "knorm", "bugdet": 0.3}, "bugdet = 0.3: .*did you mean budget"),
    ({"policy": "snapvk", "budget": 0.3}, "did you mean snapkv"),
    ({"policy": "snapvk:W=8/every=64", "budget": 0.3}, "did you mean snapkv"),
    ({"policy": "snapkv", "positions": "renumbered"}, "vLLM keeps positions of the text: type 'kept'"),
    ({"policy": "snapkv", "positions": "x"}, "positions = 'x'"), ({"policy": 3, "budget": 0.3}, "built-in"),
    ("[" * 9999, "JSON"), ("1" * 5000, "JSON"), ({"policy": "snapkv", "W": 10**8}, "a million"),
    ({"policy": "streamingllm:N_sink=100000000"}, "a million"),
    ({"policy": "streamingllm:N_sink=100_000_000"}, "must be a value"),
    ({"policy": "adakv:safeguard=1e999_999_999"}, "a million"),
    ({"policy": "snapkv/layers=table:shares=1_1e-9999"}, "exponent below -99"),
    ({"policy": "snapkv", "k_ernel": 1025}, "at most 1024"), ({"policy": "snapkv", "W": 8.5}, "whole number"),
    ({"policy": "snapkv(backend='torch')"}, "is chosen by the server"),
    ({"policy": "snapkv(W=0xFFFFFF)"}, "must be below 1000000"), ({"policy": "snapkv(W=1025)"}, "W = 1025"),
    ({"policy": "os:system(W=1)"}, "must be a built-in policy"),
    ({"policy": "h2o:backend=triton/every=64"}, "is chosen by the server"),
    ({"policy": "knorm/steps=h2o:backend=triton/every=64"}, "is chosen by the server"),
    ({"policy": "score=h2o:backend=triton/every=64"}, "is chosen by the server"),
])
def test_bad_arguments_are_one_sentence(given: Any, message: str) -> None:
    """A window of 100 million tokens once took the memory of the server, and deep JSON was an HTTP 500."""
    with pytest.raises(SpecError, match=message):
        parse_request(given, DEFAULT)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("given", "message"), [
    ({"polcy": "knorm"}, "did you mean policy"), ({"W": 8}, "must have a policy, because the server has no default"),
    ({}, "must have a policy"), ("{}", 'send {"policy": "snapkv", "budget": 0.3}$'),
    *((given, "must be an object or its JSON text") for given in ("null", [1], 3)),
])
def test_a_server_without_a_default_says_that_a_policy_is_needed(given: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as refused:
        parse_request(given, OPEN)
    assert "None" not in str(refused.value)


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("pool", "message"), [
    ((0, 10, 16, 1), "pool = 'no memory': is left for the cache .* raise --gpu-memory-utilization"),
    ((10, 10, 16, 16), "pool = '0 tokens': one request can have 16 tokens: type --kv-cache-memory-bytes 20$"),
    ((59, 10, 16, 65), "pool = '64 tokens': .* type --kv-cache-memory-bytes 60, or --max-model-len 64$"),
    ((900, 10, 16, 65, 5), "pool = '64 tokens': .* type --num-gpu-blocks-override 6, or --max-model-len 64$"),
])
def test_a_pool_that_is_too_small_is_named_with_what_to_type(pool: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_pool(*pool)


@pytest.mark.parametrize("pool", [(20, 10, 16, 16), (60, 10, 16, 65), (0, 10, 16, 64, 5)])
def test_a_pool_for_one_request_is_accepted(pool: tuple[int, ...]) -> None:
    check_pool(*pool)


CRYSTAL = {"policy": "crystalcache", "sentence_ends": [5]}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("given", "message"), [
    *(({**CRYSTAL, key: value}, message) for key, value, message in (
        ("sentence_ends", 5, "token ids"), ("parameters", "x", "'paper' or 'essay'"), ("alpha", [], "alpha"),
        ("decode", 1, "decode"), ("stream", True, "leave stream out"), ("C", 1025, "C = 1025"),
    )),
    *(({"policy": name, key: value}, f"cannot be sent as text: leave {key} out") for name, key, value in (
        ("kvzip", "template", 5), ("kvzip/layers=even", "template", None), ("nestedkv", "parameters", {}),
    )),
    ({"policy": "score=snapkv:W=1025/recent=1025"}, "W = 1025: must be at most 1024"),
    ({"policy": "diverse-snapkv:window=1025"}, "W = 1025"), ({"policy": "noncausal", "c": 99999}, "c = 99999"),
    ({"policy": "knorm/pieces=15"}, "at least 16"),
])
def test_bad_constants_are_one_sentence(given: dict[str, Any], message: str) -> None:
    """A constant of a wrong type, also a template, was once an HTTP 500. Costly constants are bounded in every form."""
    with pytest.raises(SpecError, match=message):
        parse_request({"budget": 0.3, **given}, OPEN)


WRONG: tuple[Any, ...] = (
    None, True, "x", 1.5, -1, 0, float("nan"), float("inf"), [], {}, [1], [[1]], [["a"]], ["a", "b", "c"],
)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", [*names.POLICIES, "diverse-snapkv", "knorm/steps=rkv/every=64", "snapkv/layers=even"])
def test_a_wrong_value_of_any_constant_is_a_sentence_or_accepted(name: str) -> None:
    ends = {"sentence_ends": [5]} if name == "crystalcache" else {}
    for key in constants_of(name):
        for value in WRONG:
            with suppress(SpecError):
                str(parse_request({"policy": name, "budget": 0.3, **ends, key: value}, OPEN))


VALUES = {
    "sink": "4", "recent": "32", "select": "half", "layers": "pyramid", "heads": "adaptive", "threshold": "0.5",
    "steps": "rkv", "every": "64", "sets": "head", "floor": "40", "values": "4", "critical": "0.5", "crush": "0.25",
    "diverse": "0.5", "chunks": "10", "block": "16", "pieces": "64",
}
COSTLY = ("C", "N_future", "W", "c", "k_cross", "k_intra", "kernel", "window")


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("part", PARTS)
def test_no_part_of_a_text_has_a_larger_constant(part: str) -> None:
    """A kernel of 99 999 was once refused in the name of a policy, and accepted in the part `steps`."""
    head, every = f"snapkv/{part}={VALUES[part]}", "/every=64" if part == "steps" else ""
    assert request({"policy": head + every, "budget": 0.3}).name.startswith("snapkv/")
    for key in COSTLY:
        with pytest.raises(SpecError, match=key):
            parse_request({"policy": f"{head}:{key}=99999{every}", "budget": 0.3}, OPEN)


def test_the_largest_constants_are_accepted() -> None:
    asked = request({"policy": "snapkv/recent=5000/steps=rkv:W=1024:kernel=1023/every=64", "budget": 0.3, "W": 1024})
    assert asked.window == 1024
    assert request({"policy": "knorm/pieces=16", "budget": 0.3}).name == "knorm/pieces=16"


def test_a_request_inherits_from_the_default() -> None:
    default, custom = request(None, DEFAULT), request('{"budget": 0.5}', DEFAULT)
    assert (default.name, default.window, str(default.budget)) == ("snapkv", 16, "0.3")
    assert request(None, DEFAULT) is default  # requests with equal arguments share one policy
    assert (custom.name, custom.window, str(custom.budget)) == ("snapkv", 16, "0.5")
    other = request({"policy": "knorm", "budget": 0.5}, DEFAULT)
    assert (other.name, other.window) == ("knorm", 0)
    assert parse_request({"policy": "fullcache"}, DEFAULT) is None
    assert parse_request(None, OPEN) is None
    assert Settings.read(DEFAULT.text()) == DEFAULT
    assert str(request(None, Settings({"policy": "snapkv", "budget": 0.3, "backend": "numpy"}))) == "snapkv"
    in_text = Settings({"policy": "h2o:backend=numpy/every=64", "budget": 0.3}, on_unserved="full")
    assert request({"budget": 0.5}, in_text).every == 64


@pytest.mark.parametrize(("text", "stated"), [
    ("h2o:backend=numpy/every=64", "h2o/every=64"),
    ("score=h2o:backend=numpy/sink=4", "score=h2o/sink=4"), ("snapkv:backend=numpy:W=8", "snapkv(W=8)"),
    ("knorm/sink=4", "knorm/sink=4"),
])
def test_a_statement_has_no_backend_so_that_rule_4_is_decided(text: str, stated: str) -> None:
    policy = request(None, Settings({"policy": text, "budget": 0.3}, on_unserved="full"))
    assert str(policy) == stated
    example = {"witness": 1, "positions": "kept", "reason": "-", "evictions": []}
    answer = {"prompt_ids": [5], "answer_ids": [7], "logprobs": [-0.5]}
    read = policy_of(parse_statement({**example, "policy": str(policy), "budget": "0.3"}, answer))
    assert isinstance(read, RetentionPolicy)


UNEQUAL = {
    "adakv", "cake", "critical-adakv", "defensivekv", "nestedkv", "nestedkv-without-continuum", "pyramidkv",
    "pyramidkv-described", "simlayerkv",
}
TWICE = {"kvzip", "kvzip-plus", "kvzip-uniform"}


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", [
    name for name in names.NAMES if name != "fullcache" and "calibration" not in names.constants_of(name)
])
def test_each_policy_is_served_or_refused_with_the_reason(name: str) -> None:
    host = name.removeprefix(names.DIVERSE)
    given = {"policy": name, "budget": 0.3, **({"sentence_ends": [5]} if name == "crystalcache" else {})}
    actual = request(given)
    if host not in UNEQUAL | TWICE:
        assert actual.unserved is None
        return
    reason = "reads each prompt twice" if host in TWICE else "keeps more tokens in some"
    with pytest.raises(SpecError, match=f"{name} {reason}"):
        parse_request(given, Settings())
    if host in UNEQUAL:
        equal = request({"policy": str(actual.unserved).rpartition("; type ")[2], "budget": 0.3}, Settings())
        assert equal.name.startswith(f"{name}/")


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("given", "message"), [
    ("snapkv", r"additional_config\['kvspec'\] = 'snapkv': must be JSON"),
    ({"policy": "snapkv"}, r"= 'policy': must be one of allow_budget, .*, as in {.default.: {.policy.: "),
    ({"default": "snapkv"}, "default = 'snapkv': must be JSON"), ({"default": {"policy": "snapkv"}}, "budget = None"),
    ({"default": ["snapkv"]}, "default = 'list': must be an object or its JSON text, such as .*snapkv"),
])
def test_bad_settings_are_one_sentence(given: Any, message: str) -> None:
    """The default "snapkv" was an AttributeError."""
    with pytest.raises(SpecError, match=message):
        Settings.read(given)


def test_bounds_apply_to_budgets_of_requests() -> None:
    settings = Settings({"policy": "snapkv", "budget": 512}, allow_budget="0.2:0.6")
    assert request({"W": 16}, settings).budget.count == 512  # the request did not ask for this budget
    assert request({"policy": "snapkv"}, settings).budget.count == 512
    for asked in ({"W": 16, "budget": 512}, {"policy": "snapkv", "budget": 0.7}, {"policy": "fullcache"}):
        with pytest.raises(SpecError, match=r"must be a share between 0\.2 and 0\.6"):
            parse_request(asked, settings)


def test_a_memory_is_the_number_of_tokens_that_the_layers_store() -> None:
    typed = Settings({"policy": "snapkv", "budget": "64KiB", "W": 16}, allow_budget="0.2:0.6")
    settings = replace(Settings.read(typed.text()), token_bytes=1000)
    assert {(str(one.budget), one.typed) for one in (request(None, settings), request({"W": 8}, settings))} == {
        ("65", "65")}
    assert request({"policy": "knorm", "budget": "0.5 MB"}, replace(settings, allow_budget=None)).typed == "500"
    for budget, message in (
        ("64KiB", "= '65': must be a share between 0.2 and 0.6"),
        ("15999B", "stores 15 tokens of 1000 bytes, and the policy keeps at least 16: give at least 16000B"),
        ("9" * 80 + "B", "64 char"),
    ):
        with pytest.raises(SpecError, match=message):
            parse_request({"budget": budget}, settings)


def test_settings_name_the_allowed_policies_that_are_not_served() -> None:
    actual = Settings(sentence_ends=[5]).unserved
    named = {name for name in names.NAMES if "calibration" in names.constants_of(name)}
    assert {name for name in actual if name not in named} == UNEQUAL | TWICE
    for name in named:
        start = f"{name}: calibration is a file of the server: start `kvspec serve` with --policy '{name}(calibration="
        assert name.startswith(names.DIVERSE) or actual[name].startswith(start)
    assert Settings({"policy": "adakv", "budget": 0.3}, on_unserved="full", allow_policies=["adakv"]).unserved == {}
    assert "sentence_ends" in Settings(allow_policies=["crystalcache"]).unserved["crystalcache"]


def test_a_text_with_shares_is_refused_without_a_form() -> None:
    with pytest.raises(SpecError, match=r"has equally many$"):
        parse_request({"policy": "snapkv/layers=pyramid/heads=adaptive", "budget": 0.3}, Settings())


def test_settings_accept_names_as_people_write_them() -> None:
    """A server with `--allow-policies SnapKV` once refused every request, and a request for SnapKV was refused."""
    settings = Settings({"policy": "SnapKV", "budget": 0.3, "W": 16}, None, ("Snap-KV", "Knorm"))
    assert settings.allow_policies == ("snapkv", "knorm")
    for asked in ({}, {"policy": "snapkv"}, {"policy": "SnapKV"}, {"policy": "Snap-KV:window=16"}, {"Window": 16}):
        custom = request({**asked, "budget": 0.5}, settings)
        assert (custom.name, custom.window, str(custom)) == ("snapkv", 16, "snapkv(W=16)")
    for text in ("snapkv(W=16)", "SnapKV(window=16)"):
        assert request({"policy": text, "budget": 0.3}).window == 16
    assert names.is_built_in("snapkv/every=64(W=16)")
    with pytest.raises(SpecError, match="must have no constants: type snapkv"):
        Settings(allow_policies=["snapkv:W=16"])


def test_sentence_ends_of_the_tokenizer_are_a_default() -> None:
    asked: dict[str, Any] = {"policy": "CrystalCache", "budget": 0.3, "decode": True, "T_breath": 8}
    started = Settings(asked)
    assert started.lacks_sentence_ends
    assert not Settings(allow_policies=["snapkv"]).lacks_sentence_ends
    settings = Settings.read(replace(started, sentence_ends=[7, 5]).text())
    assert not settings.lacks_sentence_ends
    for typed, ends, text in ((None, {5, 7}, ""), ({"sentence_ends": [9, 6]}, {6, 9}, ", sentence_ends=[6, 9]")):
        custom = request(typed, settings)
        method = custom.crystal("numpy")
        assert method is not None
        assert method.sentence_ends == ends
        assert (str(custom), custom.every) == (f"crystalcache(T_breath=8, decode=true{text})", 8)
        assert [at for at in range(40) if Plan(custom, 20).is_event(at)] == [20, 28, 36]
    with pytest.raises(SpecError, match="sentence_ends"):
        replace(started, sentence_ends=[])
    with pytest.raises(SpecError, match="sentence_ends"):
        parse_request(asked, Settings())


def test_steps_end_at_each_decision() -> None:
    one = plan()
    assert (one.limit(0, 512), one.limit(60, 64), one.limit(100, 8)) == (100, 40, 8)
    assert [at for at in range(130) if one.is_event(at)] == [100]
    one.carry_out(100, 30)
    assert (one.shift, one.slots(101), one.peak(110)) == (70, 31, 100)
    assert (one.reusable_blocks(32), plan(policy="h2o-described").reusable_blocks(32)) == (2, 0)
    one.restart()
    assert (one.shift, one.slots(101)) == (0, 101)


def test_the_peak_counts_the_whole_trunks_of_protected_tokens() -> None:
    """Decode after a prompt of two trunks of 20 tokens. Protected tokens are in both, so all 40 tokens are kept."""
    constants: dict[str, Any] = {"decode": True, "T_breath": 8, "W_recent": 8, "N_sink": 2, "sentence_ends": [99]}
    one = Plan(request({"policy": "crystalcache", "budget": 20, **constants}), 40)
    model, ids = load_pocket()[0], torch.arange(100, 180)[None]
    with torch.no_grad(), policy_from_name("crystalcache", 20, **constants, backend="numpy")(model) as run:
        model(input_ids=ids[:, :40])
        slots = list[int]()
        for seen in range(41, 81):
            assert run.cache is not None
            slots.append(len(run.cache.full_layers[0].head_positions(0, 0)) + 1)
            assert slots[-1] <= one.peak(seen)
            model(input_ids=ids[:, seen - 1 : seen], **{cache_name(model): run.cache})
    assert max(slots) == 48


@given(n=st.integers(2, 90), budget=st.integers(20, 60), every=st.integers(1, 40), new=st.integers(1, 150))
def test_replayed_decisions_are_those_of_the_first_pass(n: int, budget: int, every: int, new: int) -> None:
    """A plan that was preempted after all tokens makes the same decisions, for any number of tokens per step."""
    one = plan(n, policy="rkv", W=8, budget=budget, every=every)

    def read(step: int) -> list[tuple[int, int]]:
        done, actual = 0, []
        while done < n + new:
            done += one.limit(done, min(step, n + new - done))
            one.observed = max(one.observed, done)
            if one.is_event(done):
                one.carry_out(done, one.budget(done))
                actual.append((done, one.shift))
        return actual

    first = read(1)
    assert all(done in (n, *range(every, n + new + 1, every)) for done, _ in first)
    one.restart()
    assert read(64) == first


@given(blocks=st.integers(2, 4), heads=st.integers(1, 3), size=st.sampled_from([16, 32]), seed=st.integers(0, 99))
def test_every_layout_reads_what_it_writes(blocks: int, heads: int, size: int, seed: int) -> None:
    d, random = 8, torch.Generator().manual_seed(seed)
    table = torch.randperm(blocks, generator=random)
    for backend in LAYOUTS:
        pages = Pages(torch.zeros(blocks, heads, size, 2 * d), backend)
        keys, values = (torch.randn(heads, blocks * size, d, generator=random) for _ in range(2))
        pages.write(table, torch.arange(blocks * size), keys, values)
        slots = torch.stack([torch.randperm(blocks * size, generator=random)[:7] for _ in range(heads)])
        actual = pages.read(table, slots)
        for tensor, whole in zip(actual, (keys, values), strict=True):
            assert torch.equal(tensor, torch.stack([row[at] for row, at in zip(whole, slots, strict=True)]))
    with pytest.raises(SpecError, match="attention_backend"):
        Pages(torch.zeros(blocks, heads, size, 2 * d), "FLEX_ATTENTION")


NEWS = {"policy": "knorm", "budget": "3", "evictions": [make_eviction(6, [[np.array([0, 1, 5])]])]}
WITNESS = json.loads((SPEC / "witness.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kept", "layers"), [
    ([[[0, 1, 5]]], [[0]]), ([[[0, 1, 5]], [[2, 3, 4]]], [[0], [1]]),
    ([[[0, 1, 5], [0, 3, 4]], [[0, 1, 5], [2, 3, 4]]], [[0, 1], [0, 2]]),
])
def test_an_eviction_gives_back_the_sets(kept: list[list[list[int]]], layers: list[Any]) -> None:
    entry = make_eviction(6, [[np.array(places) for places in heads] for heads in kept])
    assert entry["layers"] == layers
    body = {**NEWS, "witness": 1, "positions": "kept", "evictions": [entry]}
    jsonschema.validate(body, WITNESS)
    statement = parse_statement(body, {"prompt_ids": [1] * 6, "answer_ids": [], "logprobs": []})
    each = statement.evictions[0].positions(2, 2)
    assert each == [heads * (2 // len(heads)) for heads in kept * (2 // len(kept))]


@pytest.mark.parametrize(("asked", "n", "reason"), [
    ({"budget": 1.0}, 100, "the budget keeps all tokens"), ({"budget": 0.9}, 8, "the budget keeps all tokens"),
    ({}, 12, "the policy keeps all tokens: snapkv always keeps the last 16 tokens"),
    ({}, 100, "the policy keeps all tokens"),
])
def test_a_full_cache_has_the_right_reason(asked: dict[str, Any], n: int, reason: str) -> None:
    """The window of SnapKV was once stated as the budget. 0.9 of 8 tokens are 8 tokens."""
    assert plan(n, **asked).full_reason(n) == reason


@pytest.mark.law("the-proof-has-teeth")
def test_the_tests_of_vllm_allow_the_rounding_of_float32_and_no_exchanged_token(monkeypatch: Any) -> None:
    """Check the tokens with the largest rounding after 300 rare tokens. The limits are the same on each processor."""
    n, layers = 100, range(SHAPE[0])
    kept = [[[*range(4), *range(40, n)] for _ in range(SHAPE[1])] for _ in layers]
    wrong = [[[20 if at == 50 else at for at in places] for places in heads] for heads in kept[:1]] + kept[1:]
    ids = cut(n) + torch.randint(8, 400, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    row, other = (
        row_of(ids, [SimpleNamespace(seen=n, positions=lambda *_, sets=sets: sets)]) for sets in (kept, wrong)
    )
    exact, rounded = read_masked(row), read_masked(row, dtype=torch.float32)
    tokens = (rounded - exact).abs().argmax(dim=-1).tolist()

    def check(rows: torch.Tensor) -> None:
        check_logprobs(row, n - 1, [{tokens[at]: float(rows[at, tokens[at]])} for at in range(n - 1, len(ids))])

    check(rounded)
    with pytest.raises(AssertionError, match="from masking, and"):
        check(read_masked(other, dtype=torch.float32))
    monkeypatch.setattr(engine, "TOLERANCE", 0.0)
    check(exact + 1.9 * (rounded - exact))
    with pytest.raises(AssertionError, match="from masking, and"):
        check(exact + 2.1 * (rounded - exact))


@pytest.mark.parametrize(("news", "reason"), [
    ([NEWS, {}], None), ([{**NEWS, "evictions": []}, {"evictions": NEWS["evictions"]}], "no token was processed"),
    ([{"policy": "knorm", "budget": "3"}, {}], "ended before its decision"),
    ([{**NEWS, "evictions": [], "reason": "the budget keeps all tokens"}, {}], "keeps all"),
    ([{**NEWS, "evictions": [], "failed": "ArithmeticError: x"}, {}], "ArithmeticError: x"),
    ([NEWS, {"reason": "the budget keeps all tokens"}], None), ([NEWS, {"failed": "ArithmeticError: x"}], "Arithmetic"),
])
def test_a_statement_grows_with_the_answer(news: list[dict[str, Any]], reason: str | None) -> None:
    one = Statement()
    for at, part in enumerate(news):
        one.take(part, at == len(news) - 1)
    jsonschema.validate(one.body, WITNESS)
    assert one.finished
    assert one.digests == [each["digest"] for each in one.body["evictions"]]
    assert one.evicted == (3 if one.digests else 0)
    assert (reason or "") in one.body.get("reason", "")
    assert ("reason" in one.body) == (reason is not None)


def test_a_long_statement_says_where_it_ends() -> None:
    one, kept = Statement(), [[np.arange(0, 4 * MOST_RANGES // 5, 2)]]
    for seen in (MOST_RANGES, MOST_RANGES + 1, MOST_RANGES + 2, MOST_RANGES + 3):
        one.take({**NEWS, "evictions": [make_eviction(seen, kept)]}, False)
    one.take({}, True)
    assert [each["seen"] for each in one.body["evictions"]] == [MOST_RANGES, MOST_RANGES + 1]
    assert one.body["until"] == MOST_RANGES + 2
    fields = {"prompt_ids": [1] * MOST_RANGES, "answer_ids": [2] * 9, "logprobs": [-0.5] * 9}
    assert parse_statement(one.body, fields).answer_ids == [2] * 3


def test_a_decision_is_made_once() -> None:
    asked = request({"policy": "tova", "budget": 16})
    one = Decider(asked, asked.policy, np.arange(20), [LayerFacts(0.5, None, None)] * 2, 2)
    random = torch.Generator().manual_seed(0)

    def decide(seen: int, slots: int) -> Any:
        for layer in one.watched:
            one.queries[layer] = [torch.randn(1, 4, 8, generator=random)]
        tensors = torch.randn(2, slots, 8, generator=random)
        return one.decide(seen, slots, lambda _: (tensors, tensors), torch.tensor(3))

    assert sum(b - a for a, b in decide(20, 20)["sets"][0]) == 16
    kept = one.kept[20]
    assert decide(20, 20) is None
    assert one.kept[20] is kept
    assert sum(b - a for a, b in decide(21, 17)["sets"][0]) == 16
    assert one.kept[21].evicted.shape[1] == 1  # A list of 16 kept slots for each token filled the memory.
    with pytest.raises(AssertionError):
        decide(23, 17)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("observed", [3, 7, -4])
def test_a_layer_that_the_model_lacks_is_refused_before_the_prompt(observed: int) -> None:
    """Check against a defect: a worker detected the layer in the middle of a step, and the engine stopped."""
    given = {"policy": "crystalcache", "budget": 0.3, "sentence_ends": [5], "observed_layer": observed}
    asked = request(given)
    with pytest.raises(SpecError, match=f"observed_layer = {observed}: must be from -3 to 2: the model has 3"):
        Decider(asked, asked.policy, np.arange(20), [LayerFacts(0.5, None, None)] * 3, 2)


@pytest.mark.law("one-line-with-the-way-out")
def test_the_command_refuses_before_vllm_starts() -> None:
    for policy, budget, bounds, allowed, unserved, message in (
        ("snapkv(W=16", "0.3", None, None, "refuse", "constants"), ("snapkv", "3.0", None, None, "refuse", "budget"),
        *(("snapkv", "0.3", one, None, "refuse", f"allow_budget = '{one}': must be two ascending shares, such as 0.2:1")
          for one in ("0.5:0.2", "0.2", "0.2:", "0.2:64", "lots:1", "0.2:0.5:1", "")),
        ("adakv", "0.3", None, None, "refuse", "adakv"),
        ("snapkv", "0.3", None, "snap", "refuse", "allow_policies"), ("snapkv", "0.3", None, None, "x", "on_unserved"),
        ('snapkv(positions="renumbered")', "0.3", None, None, "full", "positions = 'renumbered': vLLM keeps"),
    ):
        with pytest.raises(SpecError, match=message):
            server_settings(policy, budget, bounds, allowed, unserved)
    settings = server_settings("snapkv(W=16)", "0.3", "0.2:1", "snapkv, knorm", "full")
    assert settings.default == {"policy": "snapkv", "budget": "0.3", "W": 16}
    with pytest.raises(SpecError, match=r"vllm|--scheduler-cls"):
        run_serve("model", settings, ["--scheduler-cls", "mine"])


def test_the_help_of_the_command_has_a_request_that_the_server_accepts() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"])
    assert shown.exit_code == 0
    body = json.loads(shown.output.split("-d '")[1].split("'")[0])
    assert request(body["vllm_xargs"]["kvspec"], DEFAULT).name == "knorm"
    assert "--download" in shown.output


@pytest.mark.law("one-line-with-the-way-out")
def test_no_spelling_of_an_option_replaces_the_settings_of_kvspec_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    for option in (
        "--additional-config={}", "--additional_config={}", "--additional-config.kvspec.default=null",
        "--additional_conf={}", "--scheduler_cls=mine", "--worker-cls=mine",
    ):
        with pytest.raises(SpecError, match="is set by kvspec serve; leave this option out"):
            run_serve("model", DEFAULT, ["--port", "1", option])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace vLLM's command and the module `seams`. Return the object with the calls of both."""
    vllm = Mock()
    for name in ("vllm.entrypoints.cli.main", "models_integration.engines.vllm.seams"):
        monkeypatch.setitem(sys.modules, name, vllm)
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(serve, "register", lambda: None)
    monkeypatch.setattr(serve, "downloaded", lambda name, revision: Path("/cache", name, revision or "main"))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    return vllm


def test_a_model_of_kvspec_has_the_same_name_in_the_server(vllm: Mock) -> None:
    started: list[list[str]] = []
    vllm.main.side_effect = lambda: started.append(sys.argv)
    for options in (["--port", "1"], ["--served-model-name=mine"]):
        run_serve("pocket", DEFAULT, options)
    assert [one[0] for one in vllm.method_calls] == ["check_version", "end_promptly", "main"] * 2
    assert [one[2] for one in started] == [str(ASSETS)] * 2
    assert started[0][5:] == ["--served-model-name", "pocket", "--port", "1"]
    assert started[1][5:] == ["--served-model-name=mine"]
    for options, download in ([], False), (["--revision", "r"], False), (["--revision=r"], False), ([], True):
        run_serve("org/name", DEFAULT, options, download)
    run_serve("s3://bucket/name", DEFAULT, [])
    folders = ["/cache/org/name/main", *["/cache/org/name/r"] * 2, "org/name", "s3://bucket/name"]
    assert [one[2] for one in started[2:]] == folders
    assert started[2][5:] == ["--served-model-name", "org/name"]
    assert started[5][5:] == []


@pytest.mark.law("one-line-with-the-way-out")
def test_an_engine_that_does_not_start_is_one_line(vllm: Mock) -> None:
    vllm.main.side_effect = RuntimeError("Engine core initialization failed. See above."), RuntimeError("a bug")
    with pytest.raises(SpecError, match="MODEL = 'pocket': the engine did not start; the log above has the reason"):
        run_serve("pocket", DEFAULT, [])
    with pytest.raises(RuntimeError, match="a bug"):
        run_serve("pocket", DEFAULT, [])


@pytest.mark.law("one-line-with-the-way-out")
@pytest.mark.parametrize(("model", "message"), [
    ("no/model", "is neither a folder nor a whole model in the cache of the hub; to download .* add --download"),
    ("part/model", "is neither a folder nor a whole model in the cache"), ("./no", "is no folder on this machine"),
    ("no/such/model", "is no folder on this machine"), ("empty", "is a folder without config.json"),
])
def test_a_model_that_is_not_on_this_machine_is_named_at_once(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a cache with a model without weights, and a whole model. Neither is the hub asked, nor vLLM started."""
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    for name, file in (("part", "config.json"), ("whole", "model.safetensors")):
        folder = tmp_path / f"models--{name}--model"
        (folder / "snapshots" / "abc").mkdir(parents=True)
        (folder / "snapshots" / "abc" / file).write_text("{}", encoding="utf-8")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc", encoding="utf-8")
    assert downloaded("whole/model") == tmp_path / "models--whole--model" / "snapshots" / "abc"
    assert downloaded("whole/model", "other") is None
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"MODEL = '{model}': {message}"):
        run_serve(model, DEFAULT, [])
