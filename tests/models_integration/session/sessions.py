"""Helpers for tests of sessions: policies for short prompts, batches of rows, probes, and checks of the results."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from conformance.checks.decode_checks import same_bits
from conformance.strategies.policy_inputs import random_gates, random_networks
from models_integration import (
    CrystalCache,
    CustomPolicy,
    NamedPolicy,
    RetainedCache,
    RetentionPolicy,
    Session,
    calibrate,
)
from models_integration.archive.layer_masks import layer_masks
from models_integration.archive.splice import computed, splice
from models_integration.attention.capture import observing
from models_integration.cache.continuation import CrystalStates
from models_integration.cache.dense_layer import DenseLayer
from models_integration.cache.fixed_size_layers import GappedSlidingLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.snapshot import load_cache, save_cache
from models_integration.model.architecture import attention_modules, describe
from models_integration.model.rotation import recognise
from models_integration.policies.methods import policy_from_name
from models_integration.session.crystal import CrystalMethod
from reference.calibration import Calibration
from reference.crystalcache import decode_step, empty_state, extend
from reference.crystalcache.activation import inverse_key_norms
from reference.crystalcache.tail import append
from reference.policies import full_cache
from reference.policies.describe import list_policies
from reference.policies.names import DIVERSE, POLICIES, constants_of, make_policy
from spec.arrays import BoolVector
from spec.backend import resolve
from spec.budget import parse_budget
from spec.decode import DecodeState, check_state
from spec.parameters import TINY
from spec.policy import Needs, Observation, Policy, Scores
from spec.retention import Granularity
from tests.models_integration.session.families import (
    ENDS,
    METHODS,
    at_once,
    build,
    prompt,
    relative,
    states_of,
    step_by_step,
)
from tests.models_integration.session.masked import HeadSets, Masked

PROMPT, NEW = 64, 8
"""Number of tokens of a prompt, and of the tokens that follow the prompt."""
TURN, T = 12, 8
"""Number of tokens of a turn, and number of tokens between two decode-time evictions."""
TOLERANCE, VISIBLE_EFFECT = 1e-5, 1e-2
LENGTHS = (61, 44, 52)
REHEARSED: dict[str, Any] = {"template": ((5, 6, 7), (8, 9), (10,)), "chunk": 25}
_FIT = {"W": 8, "lag": 8, "block": 4, "N_sink": 2, "N_recent": 4, "every": 3}
"""Values that replace larger defaults."""


def skip_without_attention(dtype: torch.dtype) -> None:
    """Skip a test if PyTorch's own attention fails in this dtype.

    On a processor with AMX, PyTorch 2.13 with ATEN_CPU_CAPABILITY=default raises for 64 or more queries in bfloat16.
    """
    x = torch.zeros(1, 1, 64, 16, dtype=dtype)
    try:
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    except RuntimeError as error:
        pytest.skip(f"attention of PyTorch {torch.__version__} in {dtype}: {error}")


def small(name: str) -> dict[str, Any]:
    """Return constants of a policy that are small enough for a prompt of 64 tokens."""
    row = POLICIES[name]
    if "template" in row.constants:
        return REHEARSED
    given = {key: one.default for key, one in signature(row.make).parameters.items() if key not in row.decided}
    return {key: fit for key, fit in _FIT.items() if isinstance(given.get(key), int) and given[key] > 8}


def method(name: str, budget: float | int | None = None) -> RetentionPolicy:
    """Return a policy with constants that are small enough for a prompt of 64 tokens."""
    if name in METHODS and budget is None:
        return METHODS[name]()
    row, budget = POLICIES[name], 0.3 if budget is None else budget
    if row.model_constants or "template" in row.constants:
        return NamedPolicy(name, budget, **small(name))
    return CustomPolicy(make_policy(name, small(name)), parse_budget(budget))


def live_sets(cache: RetainedCache | None, row: int = 0) -> HeadSets:
    """Return the positions that each head of each full-attention layer stores now."""
    assert cache is not None
    return {
        index: [layer.head_positions(row, head).tolist() for head in range(layer.heads)]
        for index, layer in enumerate(cache.layers) if layer in cache.full_layers
    }


def read_prompt(model: PreTrainedModel, chosen: RetentionPolicy, n: int = PROMPT) -> tuple[Session, RetainedCache]:
    """Read a prompt under a policy, and return the finished session and its cache."""
    with chosen(model) as run, torch.no_grad():
        model(input_ids=prompt(n))
    assert run.cache is not None
    return run, run.cache


def prompts(lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    return [prompt(n, seed=40 + n) for n in lengths]


def batch(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return left-padded ids and their mask."""
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - row.shape[1] for row in rows]).long()
    return ids, mask


def sets(run: Session) -> list[list[int]]:
    return [one.positions.tolist() for one in run.retentions]


CLASSES = ("crystalcache", "streamingllm", "fullcache")


@lru_cache(1)
def calibration(model: PreTrainedModel) -> Calibration:
    """Return a calibration of the model with head scores, covariances, networks of KVzap and gates of Fast KVzip.

    The calibration text differs from the prompts of the tests.
    """
    taken = calibrate(model, prompt(256, seed=9), template=REHEARSED["template"], covariance=True)
    assert taken.head_scores is not None
    shape = (*taken.head_scores.shape, model.config.hidden_size)
    gates = random_gates(*shape, taken.mean.shape[1] // shape[1])
    return replace(taken, networks=random_networks(*shape, 6), gates=gates)


ONE_SEGMENT = [one.name for one in list_policies() if not one.later_turns]


def published(name: str, model: Any, budget: float = 0.3, **more: Any) -> RetentionPolicy:
    """Return a published policy with constants that are small enough for a prompt of 64 tokens, and `more` constants.

    If the kept sets of a `diverse` policy are per head, the signatures are per head too.
    """
    host = name.removeprefix(DIVERSE)
    constants = {**small(host), **({"calibration": calibration(model)} if "calibration" in constants_of(host) else {})}
    policy = policy_from_name(host, budget, **constants)
    constants |= more
    if name.startswith(DIVERSE) and policy.on(model).policy.granularity is Granularity.HEAD:
        constants["signature"] = "head"
    return policy_from_name(name, budget, **constants)


@dataclass
class Looking:
    """Scorer that records its observations and returns zeros."""

    needs: Needs
    shown: list[Observation] = field(default_factory=list)

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        self.shown.append(observation)
        n = observation.seen if observation.positions is None else len(observation.positions)
        return Scores(np.zeros((observation.groups, n)), np.arange(n + 1))


@dataclass
class Failing:
    """Scorer that raises an error."""

    error: BaseException
    needs: Needs = Needs()

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        raise self.error


def method_of(scorer: Looking | Failing) -> RetentionPolicy:
    """Return a policy that calls the scorer and evicts no token."""
    full = full_cache()
    policy = Policy("probe", scorer, full.budgets, full.selector, full.protection)
    return CustomPolicy(policy, parse_budget(1.0))


def shown(model: PreTrainedModel, ids: Tensor, needs: Needs, **options: Tensor) -> Observation:
    """Return the observation of the last row of a prompt that a scorer with these needs receives."""
    scorer = Looking(needs)
    with method_of(scorer)(model):
        at_once(model, ids, RetainedCache(model.config), **options)
    return scorer.shown[-1]


@contextmanager
def outputs_of(modules: Iterable[torch.nn.Module]) -> Iterator[list[Any]]:
    """Record the outputs of these modules inside the block, in the order of the calls."""
    seen = list[Any]()
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(lambda _, args, output: seen.append(output)))
        yield seen


_STOCK = ("sdpa", "eager", "flash_attention_2", "flex_attention")


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's weights, configs and module attributes, and the functions of the stock attention names."""
    assert model.generation_config is not None
    return {
        "config": copy.deepcopy(vars(model.config)),
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "modules": {name: _attributes(module) for name, module in model.named_modules()},
        "attention": {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in _STOCK},
        "masks": {name: ALL_MASK_ATTENTION_FUNCTIONS.get(name) for name in _STOCK},
        "local": [dict(mapping._local_mapping) for mapping in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)],
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the identities of a module's attributes, and copies of its hook tables."""
    return {
        name: (dict(value) if name.endswith(("_hooks", "_kwargs", "_called")) else id(value))
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    } | {"forward": module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward}


def check_as_it_was(before: dict[str, Any], model: PreTrainedModel) -> None:
    """Check that the model equals its snapshot. Weights are compared bit for bit, including NaN."""
    after = snapshot(model)
    for name, tensor in before["weights"].items():
        assert torch.equal(tensor.view(torch.uint8), after["weights"][name].view(torch.uint8))
    assert {**before, "weights": None} == {**after, "weights": None}


def turn(number: int, n: int = TURN) -> Tensor:
    return prompt(n, seed=100 + number)


def same_state(actual: DecodeState, expected: DecodeState, rtol: float = 1e-9) -> None:
    assert actual.stored.tolist() == expected.stored.tolist()
    assert (actual.seen, actual.step, actual.tail_ids) == (expected.seen, expected.step, expected.tail_ids)
    np.testing.assert_array_equal(actual.live.offsets, expected.live.offsets)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.counts, expected.counts)
    np.testing.assert_array_equal(actual.W.indices, expected.W.indices)
    for a, b in (
        (actual.D, expected.D), (actual.live.impact, expected.live.impact), (actual.W.weights, expected.W.weights),
        (actual.live.trunk_impact, expected.live.trunk_impact),
        (actual.live.inverse_norms, expected.live.inverse_norms),
    ):
        np.testing.assert_allclose(a, b, rtol=rtol)
    check_state(actual)


SHORT = replace(TINY, T_breath=T, breath_protection="sink+recent")


def breathing(budget: float | int = 0.5, **options: Any) -> CrystalCache:
    return CrystalCache(budget, ENDS, SHORT, backend="numpy", **{"decode": True, **options})


def now(cache: RetainedCache) -> tuple[DecodeState, ...]:
    """Return the states after the tokens in the queue were processed."""
    rule = breathing().method
    assert isinstance(rule, CrystalMethod)
    flushed = rule.flushed(states_of(cache), cache.keys_of(0)).rows
    return tuple(replace(new, budget=old.budget) for new, old in zip(flushed, states_of(cache).rows, strict=True))


def tokens(n: int, rows: int = 1) -> Tensor:
    return torch.cat([prompt(n, seed=200 + row) for row in range(rows)])


@dataclass
class Seen:
    """Attention inputs of the observed forward passes: q (H, n, d) and the new keys (H_kv, n, d)."""

    q: Any = None
    new_k: Any = None


@dataclass
class Observed:
    """Observer of the first row of one layer of a Llama. The observer records every key that the layer computes."""

    model: PreTrainedModel
    layer: int = 0
    keys: list[Any] = field(default_factory=list)

    @contextmanager
    def forward(self) -> Iterator[Seen]:
        """Record the attention inputs of all forward passes inside the block, concatenated in order."""
        seen = Seen()
        attention: Any = self.model.get_submodule(f"model.layers.{self.layer}.self_attn")

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            shape = (*hidden.shape[:-1], -1, module.head_dim)
            with torch.no_grad():
                q, k = module.q_proj(hidden).view(shape), module.k_proj(hidden).view(shape)
                q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            new = [tensor[0].numpy() for tensor in (q, k)]
            seen.q = new[0] if seen.q is None else np.concatenate([seen.q, new[0]], axis=1)
            seen.new_k = new[1] if seen.new_k is None else np.concatenate([seen.new_k, new[1]], axis=1)
            self.keys.extend(new[1].transpose(1, 0, 2))

        with attention.register_forward_pre_hook(look, with_kwargs=True):
            yield seen

    def stored(self, positions: Any, seen: Seen) -> Any:
        """Return the keys of stored positions, followed by the keys of the observed forward passes."""
        old = [self.keys[i][:, None] for i in positions.tolist()]
        return np.concatenate([*old, seen.new_k], axis=1)


def check_states(policy: CrystalCache, texts: Iterable[Sequence[Tensor]]) -> DecodeState:
    """Check states and stored tokens against the reference after each text. The reference receives the same q and k.

    Each text is read in pieces.

    Returns:
        The state after the last text.
    """
    rule, model = policy.method, build("llama", dtype=torch.float64)
    assert isinstance(rule, CrystalMethod)
    parameters, expected = rule.parameters, empty_state(policy.method.budget)
    observed = Observed(model, layer=parameters.observed_layer % 3)
    with policy(model) as run:
        cache = RetainedCache(model.config)
        for pieces in texts:
            with observed.forward() as seen:
                for piece in pieces:
                    at_once(model, piece, cache)
            ids = torch.cat([*pieces], dim=1)[0].numpy()
            if len(ids) > 1:
                expected = extend(expected, seen.q, observed.stored(expected.stored, seen), ids, ENDS, parameters)
                assert run.kept is not None
                assert run.kept.tolist() == expected.stored.tolist()
            elif rule.decode:
                norm = float(inverse_key_norms(seen.new_k)[0])
                expected = decode_step(expected, int(ids[0]), norm, ENDS, parameters, resolve("numpy"))
            else:
                expected = append(expected, int(ids[0]), float(inverse_key_norms(seen.new_k)[0]))
            (state,) = now(cache)
            same_state(state, expected)
            assert cache.stored_positions().tolist() == expected.stored.tolist()
    return expected


def check_continuation(model: PreTrainedModel, policy: RetentionPolicy) -> None:
    """Check that eviction equals masking for the next 8 tokens, in single steps and in one forward pass."""
    _, cache = read_prompt(model, policy)
    kept, following = live_sets(cache), prompt(NEW, seed=9)
    expected = Masked(model, prompt(PROMPT), kept).read(following)
    for read in (at_once, step_by_step):
        copied = copy.deepcopy(cache)
        with observing(describe(model), copied):
            assert relative(read(model, following, copied), expected) < TOLERANCE
        assert copied.get_seq_length() == PROMPT + NEW
        grown = {layer: [[*one, *range(PROMPT, PROMPT + NEW)] for one in sets] for layer, sets in kept.items()}
        assert live_sets(copied) == grown
    assert relative(Masked(model, prompt(PROMPT), range(PROMPT)).read(following), expected) > VISIBLE_EFFECT


_CACHE, _SESSION = "models_integration.cache", "models_integration.session"
PLACES: dict[str, tuple[str, ...]] = {
    "before a layer": (),
    "after a layer": (),
    "decision": (
        f"{_SESSION}.segment.decide", f"{_SESSION}.crystal.decode_step", f"{_SESSION}.crystal.append",
        f"{_SESSION}.method.advance", f"{_SESSION}.method.append_tokens",
    ),
    "compaction": (
        f"{_CACHE}.dense_layer.gathered", f"{_CACHE}.ragged_layer._flattened",
        f"{_CACHE}.ragged_layer._shared_by_heads",
    ),
}


class Tripped(BaseException):
    """Exception that, like KeyboardInterrupt, does not inherit from Exception."""


class Trip(NamedTuple):
    """Planned exception: the place and the call number, counted from 0, at which it is raised.

    An empty place raises no exception.
    """

    place: str = ""
    at: int = 0

    @contextmanager
    def raised(self, model: PreTrainedModel) -> Iterator[None]:
        """Raise `Tripped` inside the block when the call with the given number begins."""
        calls = 0

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > self.at:
                raise Tripped

        def before(real: Callable[..., Any]) -> Callable[..., Any]:
            def tripped(*args: Any, **kwargs: Any) -> Any:
                count()
                return real(*args, **kwargs)

            return tripped

        with ExitStack() as stack:
            for module in attention_modules(model).values() if self.place.endswith("layer") else ():
                first = self.place == "before a layer"
                hooked = module.register_forward_pre_hook if first else module.register_forward_hook
                stack.callback(hooked(count).remove)
            for name in PLACES.get(self.place, ()):
                stack.enter_context(patch(name, before(resolve_name(name))))
            yield


NOWHERE = Trip()


def lived(family: str, steps: int = T + 3) -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache after decode-time evictions, with tokens in its tail."""
    model = build(family)
    cache = RetainedCache(model.config)
    with breathing()(model):
        at_once(model, prompt(PROMPT), cache)
        step_by_step(model, tokens(steps), cache)
    return model, cache


def go_on(family: str, path: Path, out: Path, threads: int) -> None:
    """Read tokens after a saved cache, and save the cache again.

    A different number of threads changes the last bits.
    """
    torch.set_num_threads(threads)
    model = build(family)
    cache = load_cache(path, model)
    with breathing()(model):
        logits = step_by_step(model, tokens(2 * T), cache)
    save_cache(cache, model, path)
    torch.save(logits, out)


def differing(name: str, family: str) -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache of two rows that keep different tokens in layers or heads, and that have read further tokens."""
    model = build(family)
    cache = RetainedCache(model.config)
    with method(name)(model) as run:
        at_once(model, torch.cat([prompt(PROMPT), prompt(PROMPT, seed=4)]), cache)
        step_by_step(model, tokens(3, rows=2), cache)
    assert run.cache is cache
    return model, cache


def gapped() -> tuple[PreTrainedModel, RetainedCache]:
    """Return a cache whose sliding windows have not read a spliced chunk. Two tokens follow the chunk."""
    model = build("gemma3")
    cache, rotary = RetainedCache(model.config), recognise(model)
    at_once(model, prompt(PROMPT), cache)
    splice(cache, [computed(model, prompt(9, seed=5)[0].tolist(), rotary)], rotary)
    with layer_masks(model, cache):
        step_by_step(model, tokens(2), cache)
    return model, cache


def parts(layer: Any) -> list[Tensor]:
    """Return all tensors of a cache layer. If heads keep different tokens, tensors are listed by head."""
    tensors = [layer.keys, layer.values] if layer.is_initialized else []
    if isinstance(layer, RaggedLayer):
        heads = [divmod(segment, layer.heads) for segment in range(layer.batch * layer.heads)]
        positions = [layer.head_positions(*head) for head in heads]
        tensors = [tensor for row, head in heads for tensor in layer.held(row, slice(head, head + 1))]
        return [*tensors, *positions, layer.next_positions(1), layer.rows.holes]
    if isinstance(layer, DenseLayer):
        return [*tensors, layer.stored_positions(), layer.next_positions(1), layer.rows.holes]
    return [*tensors, layer.positions] if isinstance(layer, GappedSlidingLayer) else tensors


def same(a: RetainedCache, b: RetainedCache) -> None:
    assert (a.get_seq_length(), a.layers_differ) == (b.get_seq_length(), b.layers_differ)
    layers: Any = zip(a.layers, b.layers, strict=True)
    for one, other in layers:
        assert (type(one), one.is_initialized) == (type(other), other.is_initialized)
        assert one.get_seq_length() == other.get_seq_length()
        assert getattr(one, "first_kept", None) == getattr(other, "first_kept", None)
        assert all(torch.equal(*pair) for pair in zip(parts(one), parts(other), strict=True))
    assert type(a.continuation) is type(b.continuation)
    if not isinstance(a.continuation, CrystalStates):
        return
    assert all(same_bits(x, y) for x, y in zip(states_of(a).rows, states_of(b).rows, strict=True))
    assert states_of(a).columns == states_of(b).columns
    assert states_of(a).ids() == states_of(b).ids()
    # Without pending tokens, a file does not contain their kind.
    assert states_of(a).kind == states_of(b).kind or not states_of(a).pending_tokens
