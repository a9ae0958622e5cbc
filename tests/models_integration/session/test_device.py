"""Values that the host reads of a device, the choice of the backend "auto", and the backends that a run reports."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from accelerated.torch_device import device as copies
from accelerated.torch_device.backend import BACKEND
from conformance.paths import DOCS
from lab.measure.gpu.counts import (
    DEVICE,
    LAYERS,
    VOCABULARY,
    DeviceTensor,
    HostReads,
    Shapes,
    constants,
    deep_llama,
    host_reads,
    method_on,
    on_device,
    text,
)
from models_integration import CrystalCache, NamedPolicy, RetainedCache, Session, policy_from_name
from models_integration.cache import device_compaction
from models_integration.cache.device_compaction import Chosen, read_retentions
from models_integration.policies import fastest
from models_integration.session.crystal import CrystalMethod
from models_integration.session.device_choice import policy_on_device
from models_integration.session.inputs import device_step
from reference.backend import BACKEND as REFERENCE
from reference.crystalcache import prefill as reference_prefill
from reference.policies.budgets import even
from reference.policies.layers import is_layerwise
from reference.policies.names import POLICIES, with_twins
from reference.policies.protections import SinkAndRecent
from reference.policies.scorers import LayerScorer
from reference.policies.selectors import top_units
from spec.backend import Backend, NestedKVStages, resolve
from spec.composition import ANY_SETS
from spec.errors import BackendUnavailable, SpecError
from spec.parameters import TINY
from spec.policy import LayerView, Needs, Policy
from spec.retention import Granularity, Retention
from tests.models_integration.session.families import ENDS, build, greedy, prompt

pytestmark = pytest.mark.law("as-it-is-described")

L, N = 2, 126
IDS_AND_MASK = 1
"""Number of host reads of a prompt before the first layer."""
ROWS = [row.strip("|").split("|") for row in Path(DOCS, "results/device.md").read_text().splitlines() if "| " in row]
MOST_ADDED = {"criticalkv": 14, "rkv": 8, "defensivekv": 18, "cake": 5}
"""Most processor time that policies may add to a prompt of 2 048 tokens under "auto", in percent."""
COMMITTED = {name.strip(): [int(count) for count in counts] for name, _, *counts in ROWS if counts[0].strip().isdigit()}


@cache
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return the same model on the host and on the device."""
    return deep_llama(L), on_device(deep_llama(L))


def same(actual: Session, expected: Session) -> bool:
    """Return whether two sessions keep the same tokens, store them in the same form, and report the same values."""
    assert actual.cache is not None
    assert expected.cache is not None
    pairs = list(zip(actual.cache.full_layers, expected.cache.full_layers, strict=True))
    agree = [
        np.array_equal(one.positions, other.positions) and np.array_equal(one.offsets, other.offsets)
        for one, other in zip(actual.retentions, expected.retentions, strict=True)
    ]
    stored = [
        type(one) is type(other) and one.stored_length == other.stored_length and one.uniform == other.uniform
        and torch.equal(one.head_positions(row, head), other.head_positions(row, head))
        for one, other in pairs for row in range(one.batch) for head in range(one.heads)
    ]
    reports = [getattr(actual, name) == getattr(expected, name) for name in ("bytes_freed", "over_budget", "seen")]
    return all([*agree, *stored, *reports, actual.cache.layers_differ == expected.cache.layers_differ])


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("name", POLICIES)
def test_a_session_on_a_device_is_the_session_on_the_host(name: str) -> None:
    """The committed counts of a deeper model differ by a whole number of reads for each layer."""
    host, device = models()
    method = method_on(name, host)
    actual, reads, session = host_reads(method, device, N)
    on_host = method if isinstance(method, CrystalMethod) else replace(method, engine=REFERENCE)
    with Session(on_host, host) as run, torch.no_grad():
        given: dict[str, Any] = {"input_ids": text(N), "logits_to_keep": 1}
        for logits in actual:
            torch.testing.assert_close(logits, host(**given, past_key_values=run.cache).logits, atol=1e-5, rtol=1e-5)
            given["input_ids"] = text(N)[:, -1:]
    assert same(session, run)
    counts = reads[0], max(reads[1:])
    if name in COMMITTED:
        more = [count - reading for count, reading in zip(COMMITTED[name], counts, strict=True)]
        assert [difference % (LAYERS - L) for difference in more] == [0, 0]
    if method.policy.cadence.every is None:
        assert reads[1:] == [0, 0]
    if is_layerwise(method.policy) and policy_on_device(method.policy, BACKEND) is not None:
        assert reads[0] == IDS_AND_MASK + 1


@pytest.mark.law("the-model-stays-as-it-was")
def test_a_breath_reads_ids_and_norms_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two rows: a prompt, two breaths with three steps before each, and a turn. NumPy arrays go to the device.

    The prompt reads the results of all rows at once. The turn reads whether a step was wrong, and S1 and norms of each.
    """
    (host, device), parameters = models(), replace(TINY, T_breath=4)
    method = CrystalCache(0.5, frozenset(range(3, VOCABULARY, 9)), parameters, "torch", decode=True).on(host)
    ids, counts, stored = torch.cat([text(60), text(60).flip(1)]), list[int](), []
    for model, given in ((host, ids), (device, DeviceTensor(ids))):
        watch: AbstractContextManager[HostReads | None] = HostReads() if model is device else nullcontext()
        with watch as reads, torch.no_grad(), Session(method, model) as run:
            for part in (given, *[given[:, -1:]] * 8, given[:, :9]):
                model(input_ids=part, past_key_values=run.cache, logits_to_keep=1)
                counts += [reads.of_kvspec()] if reads else []
            assert run.cache is not None
            stored.append([run.cache.stored_positions(row).tolist() for row in (0, 1)])
        monkeypatch.setattr(copies, "default_device", lambda: DEVICE)
    assert counts == [IDS_AND_MASK + 1, *[0, 0, 0, 1] * 2, IDS_AND_MASK + 1 + 2 * 2]
    assert stored[0] == stored[1]
    assert max(map(len, stored[0])) < 40


@pytest.mark.law("the-model-stays-as-it-was")
def test_crystalcache_reads_a_prompt_with_attention_sinks_once() -> None:
    """Read the results of S1 to S6 and the check of all values together. A value that is not finite is named."""
    rng, at, prefill = np.random.default_rng(0), np.arange(40), BACKEND.prefill
    q, k, sinks = (torch.from_numpy(rng.normal(size=shape)) for shape in ((4, 40, 8), (2, 40, 8), (4,)))
    given = at % 9, at % 7 == 0, at > 35, 20, TINY, 0.25, None, None
    assert prefill is not None
    expected = prefill(q, k, *given, sinks)
    assert 10 < len(expected.kept) <= 20
    with HostReads() as reads:
        on = [DeviceTensor(tensor) for tensor in (q, k, sinks)]
        assert prefill(*on[:2], *given, on[2]).kept.tolist() == expected.kept.tolist()
        assert reads.of_kvspec() == 1
        with pytest.raises(SpecError, match=r"sinks = .*inf.*: must be finite"):
            prefill(*on[:2], *given, DeviceTensor(sinks / 0))


@pytest.mark.law("parts-equal-the-whole")
@pytest.mark.parametrize("budget", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("name", ["snapkv", "adakv", "adakv block", "nestedkv-without-continuum", "pyramidkv", "tova"])
def test_padded_rows_that_are_chosen_on_the_device_are_those_of_the_host(name: str, budget: float) -> None:
    """Compare device and host for two prompts of different lengths, with two rows each, and for a step after them."""
    host, runs = models()[0], []
    ids = torch.cat([text(N), text(N).flip(1)]).repeat_interleave(2, dim=0)
    mask = torch.ones_like(ids)
    mask[2:, :17] = 0
    name, *block = name.split()
    for engine in (BACKEND, REFERENCE):
        constants: dict[str, Any] = {"block": 8} if block else {}
        method = replace(policy_from_name(name, budget, backend="torch", **constants).on(host), engine=engine)
        with Session(method, host) as run, torch.no_grad():
            logits = host(input_ids=ids, attention_mask=mask).logits[:, -1]
            step = host(input_ids=ids[:, -1:], past_key_values=run.cache).logits
        runs.append((run, logits, step))
    (first, *actual), (other, *expected) = runs
    assert same(first, other)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@cache
def large_llama() -> LlamaForCausalLM:
    """Return a model with 4 layers of the shape of a Llama with 8 B parameters, without values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            hidden_size=4096, intermediate_size=14_336, num_hidden_layers=4, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=16_384,
        ))
    model.train(False)
    return on_device(model)


def first_tokens(row: Chosen, unscored: int, at: Any, ordinal: int, granularity: Granularity) -> Retention:
    """Return a retention with as many tokens as were chosen. The chosen positions have no values."""
    share = len(at) // row.groups
    return Retention(np.tile(np.arange(share), row.groups), share * np.arange(row.groups + 1), row.n, granularity)


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("name", ["streamingllm", "snapkv", "keydiff"])
def test_a_session_with_layers_of_8_b_parameters_needs_no_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 8 192 tokens and decode one. The host reads the ids and, if scores decide, the positions."""
    monkeypatch.setattr(device_compaction, "_retention", first_tokens)
    prompt, model, counts = torch.zeros(1, 8_192, dtype=torch.int64, device="meta"), large_llama(), []
    with Shapes() as reads, torch.no_grad(), Session(method_on(name, model), model) as run:
        reads.counts.clear()
        for ids in (prompt, prompt[:, :1]):
            output = model(input_ids=DeviceTensor(ids), past_key_values=run.cache, logits_to_keep=1)
            assert output.logits.shape == (1, 1, 128_256)
            counts.append(reads.of_kvspec())
        assert run.cache is not None
        for layer in run.cache.full_layers:
            assert layer.keys is not None
            assert layer.keys.shape == (1, 8, 2_458 + 1, 128)
    assert counts == [1 if name == "streamingllm" else 2, 0]


@pytest.mark.law("refused-before-anything-changes")
def test_a_score_that_is_no_number_is_named() -> None:
    chosen = Chosen(torch.arange(4), torch.tensor([7]), 2, 5)
    with pytest.raises(SpecError, match="layer 1, kept set 1, token 2"):
        read_retentions([[chosen._replace(unscored=torch.tensor([-1]))], [chosen]], Granularity.HEAD)


WRONG: dict[str, dict[str, Any]] = {
    "an id past the vocabulary": {"input_ids": torch.tensor([[VOCABULARY]])},
    "a negative id": {"input_ids": torch.tensor([[-1]])},
    "a mask that hides a token": {"attention_mask": (torch.arange(N + 1) > 3).long()[None]},
    "a mask of other numbers": {"attention_mask": torch.full((1, N + 1), 2)},
    "a position before": {"position_ids": torch.tensor([[N - 1]])},
}
RIGHT = {
    "input_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, N + 1), "position_ids": torch.tensor([[N]]),
}


def on_the_device(given: dict[str, Any]) -> Any:
    return {name: DeviceTensor(tensor) for name, tensor in given.items()}


@contextmanager
def session() -> Iterator[tuple[RetainedCache, LlamaForCausalLM]]:
    """Yield cache and model after a prompt was read on the device."""
    host, device = models()
    with HostReads(), torch.no_grad(), Session(method_on("snapkv", host), device) as run:
        device(input_ids=DeviceTensor(text(N)), logits_to_keep=1)
        assert run.cache is not None
        yield run.cache, device


@pytest.mark.law("refused-before-anything-changes")
def test_whether_a_step_is_wrong_is_known_on_the_device() -> None:
    with session() as (cache, _):
        for given in [RIGHT, *WRONG.values()]:
            step, _, wrong = device_step(VOCABULARY, on_the_device(RIGHT | given), cache)
            assert isinstance(wrong, DeviceTensor)
            assert bool(wrong.held) == (given is not RIGHT)
            assert "attention_mask" not in step
        for name in ("attention_mask", "position_ids"):
            with pytest.raises(SpecError, match=rf"{name} = \(1, 3\)"):
                device_step(VOCABULARY, on_the_device(RIGHT | {name: torch.ones(1, 3)}), cache)


@pytest.mark.law("unusable-after-a-failure")
@pytest.mark.parametrize("when", ["next segment", "end"])
def test_a_wrong_step_raises_at_the_next_segment_or_at_the_end(when: str) -> None:
    with pytest.raises(SpecError, match="input_ids = 'a decode step'"), session() as (cache, device):
        device(**on_the_device(RIGHT | WRONG["a mask that hides a token"]), past_key_values=cache)
        if when == "next segment":
            with pytest.raises(SpecError, match="input_ids = 'a decode step'"):
                device(input_ids=DeviceTensor(text(4)), past_key_values=cache)
            assert cache.failure == "a decode step was wrong"
            raise SpecError("input_ids", "a decode step", "was noticed")
    assert cache.failure == "a decode step was wrong"


def loaded_as(name: str | Backend) -> Backend:
    """Return the reference under the name of a backend, or raise for numba. The backend torch has only a part."""
    if name == "numba":
        raise BackendUnavailable("no numba here")
    return replace(REFERENCE, name=str(name), crystal=None if name == "torch" else REFERENCE.crystal)


@pytest.mark.parametrize(
    ("device", "name", "taken"),
    [
        ("cpu", "crystalcache", "numpy"), ("cuda", "crystalcache", "triton"), ("cpu", "tova", "torch"),
        ("cuda", "tova", "torch"), ("cpu", "snapkv", "torch"), ("cuda", "snapkv", "torch"), ("mps", "snapkv", "torch"),
        ("cpu", "diverse-tova", "torch"), ("cuda", "diverse-snapkv", "torch"),
    ],
)
def test_auto_takes_a_backend_that_can_run_and_has_the_stages(
    device: str, name: str, taken: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "resolve", loaded_as)
    assert fastest.fastest(name, device).name == taken


@pytest.mark.parametrize(
    ("row", "taken"), [({}, "numba"), ({"numba": 0.2, "torch": 0.1}, "torch"), ({"numpy": 0.1, "numba": 0.2}, "numpy")],
)
def test_auto_follows_the_measurement_and_without_a_row_the_code_of_numba(
    row: dict[str, float], taken: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fastest, "_measured", lambda: {"cpu": {"h2o": row}})
    assert NamedPolicy("h2o").on(build("llama")).engine.name == taken
    assert fastest.fastest("diverse-h2o-described", "cpu").name == "numba"
    assert fastest.fastest("snapkv", "cpu").name == "torch"


def test_auto_is_the_fastest_measured_backend_of_each_policy() -> None:
    rows = json.loads(Path(fastest.__file__).with_name(fastest.MEASURED).read_text())["cpu"]["added"]
    assert {name: fastest.fastest(name, "cpu").name for name in rows} == {
        name: min(row, key=lambda backend: row[backend]) for name, row in rows.items()
    }


def test_the_page_has_the_times_from_which_auto_chooses() -> None:
    rows = json.loads(Path(fastest.__file__).with_name(fastest.MEASURED).read_text())["cpu"]["added"]
    lines = [[cell.strip() for cell in row] for row in ROWS if len(row) == 4]
    times = {name: cells for name, *cells in lines if cells[0].endswith(" %")}
    assert list(times) == list(POLICIES)
    for name, (_, *cells) in times.items():
        stored = [rows.get(name, {}).get(backend) for backend in ("numba", "torch")]
        assert cells == ["-" if one is None else f"{100 * one:.1f} %" for one in stored]
    auto = {name: float(cells[0].removesuffix(" %")) for name, cells in times.items()}
    assert all(auto[name] <= most for name, most in MOST_ADDED.items())
    assert all(auto[name] <= 100 * min(row.values()) + 1 for name, row in rows.items())


class Shifted(type(REFERENCE.crystal)):  # type: ignore[misc]
    """Stages of the reference with a separate attention function."""

    def coattention(self, *args: Any) -> Any:
        """Return the attention of the reference."""
        return REFERENCE.require_crystal().coattention(*args)


class Wrong(NestedKVStages):
    """Stages with wrong scores."""

    def anomaly_score(self, *args: Any) -> Any:
        """Return the negative scores of the reference."""
        return -REFERENCE.require_nestedkv().anomaly_score(*args)


def test_auto_leaves_a_kernel_out_that_differs_on_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str | Backend) -> Backend:
        return replace(loaded_as(name), nestedkv=Wrong()) if name == "triton" else loaded_as(name)

    monkeypatch.setattr(fastest, "resolve", load)
    with pytest.warns(UserWarning, match=r"'triton': the stage 'nestedkv.anomaly_score' differs from the reference"):
        assert fastest.fastest("crystalcache", "cuda").name == "numpy"
    monkeypatch.setattr(fastest, "resolve", lambda name: Backend("bare"))
    with pytest.raises(BackendUnavailable, match="no backend with the stages of crystalcache"):
        CrystalCache(0.5, ENDS)


def test_auto_does_not_use_torch_for_the_stages_that_failed_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that both backends are left out on a GPU, because they share the stages. On a CPU torch is not checked."""
    def no_result(*args: Any) -> Any:
        raise RuntimeError

    def shared(name: str | Backend) -> Backend:
        return replace(REFERENCE, name=str(name), prefill=no_result if name in ("triton", "torch") else None)

    monkeypatch.setattr(fastest, "resolve", shared)
    with pytest.warns(UserWarning, match="the stage 'prefill' differs") as caught:
        assert fastest.fastest("crystalcache", "cuda").name == "numba"
    assert {str(one.message).split("'")[1] for one in caught} == {"triton", "torch"}
    monkeypatch.setattr(fastest, "_order", lambda *_: ["torch"])
    assert fastest.fastest("crystalcache", "cpu").name == "torch"


def test_auto_is_numba_where_there_is_no_cuda_and_the_reference_does_not_know_it() -> None:
    if not torch.cuda.is_available():
        assert CrystalCache(0.5, ENDS).backend == "numba"
    q = np.ones((1, 4, 2))
    with pytest.raises(SpecError, match="backend = 'auto': must be one of numpy"):
        reference_prefill(q, q, np.arange(4), ENDS, backend="auto")


@pytest.mark.law("figures-are-counted-right")
def test_a_run_says_which_backend_decided() -> None:
    model = build("llama")
    with CrystalCache(0.5, ENDS, TINY, backend="numpy")(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "numpy"
    with CrystalCache(0.5, ENDS, TINY, backend=Backend("mine", Shifted()))(model) as run:
        greedy(model, prompt(40), 2)
    assert run.backend == "scores: mine + numpy, selection: numpy"


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(
    ("name", "asked", "ran"),
    [
        ("snapkv", "numba", "numpy"), ("chunkkv", "numba", "numpy"), ("snapkv", "torch", "torch"),
        ("tova", "numba", "numba"), ("nestedkv", "numba", "scores: numba, selection: numpy"),
        ("rkv", "numba", "scores: numba, selection: numpy"),
        ("diverse-snapkv", "torch", "scores: torch, selection: numba"),
        ("kvzip-heads", "numba", "numpy"), ("vatp", "numba", "scores: numba + numpy, selection: numba"),
    ],
)
def test_a_run_states_by_stage_which_backend_ran(name: str, asked: str, ran: str) -> None:
    model = deep_llama(2)
    with policy_from_name(name, 0.5, backend=asked, **constants(name, model))(model) as run:
        assert run.backend == ran
        model(input_ids=text(150))
    assert run.backend == ran


@pytest.mark.law("figures-are-counted-right")
def test_a_later_turn_is_selected_on_the_host() -> None:
    model = deep_llama(2)
    with policy_from_name("snapkv", 0.5, backend="torch")(model) as run:
        model(input_ids=text(150))
        model(input_ids=text(20), past_key_values=run.cache)
    assert run.backend == "scores: torch, selection: numpy"


def snapkv_score(view: LayerView) -> Any:
    """Return the user's scores from a function that has the name of a function of the reference."""
    return -np.arange(len(view.k) * view.k.shape[1], dtype=np.float64).reshape(len(view.k), -1)


def test_a_score_of_the_user_s_own_is_not_replaced_by_a_function_of_equal_name() -> None:
    scorer = LayerScorer(Needs("all", 0), snapkv_score, sets=ANY_SETS)
    policy = Policy("mine", scorer, even, top_units, SinkAndRecent(0, 0))
    assert with_twins(policy, resolve("torch")) is policy
