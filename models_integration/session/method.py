"""Policy prepared for a model, with a budget, and its rules for prompts, later segments and decode steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from models_integration.cache.continuation import Decision, ScorerRecords
from models_integration.cache.dense_layer import RetainedLayer
from models_integration.cache.ragged_layer import RaggedLayer
from models_integration.cache.renumbering import KEPT, Numbering, check_rule, numbering_of
from models_integration.cache.retained_cache import RetainedCache
from models_integration.session.inputs import PASS_MASK
from models_integration.session.observed import ObservedSegment
from models_integration.session.rules import check_same_rule, check_scorer
from reference.backend import BACKEND as REFERENCE
from reference.policies import advance, advance_turn, retain, retain_turn, start
from reference.policies.cadences import append_tokens, join
from reference.policies.kept import excess_tokens
from reference.policies.layers import decides_again
from reference.policies.pieces import PieceScores
from spec.backend import Backend
from spec.budget import Budget
from spec.errors import SpecError
from spec.policy import Needs, Policy, Running, SeparableScorer
from spec.retention import Granularity, Retention
from spec.validate import check_types

__all__ = ["BudgetedPolicy", "Method", "SteppingMethod", "check_layers_agree", "decide", "join_layers", "method_of"]


@dataclass(frozen=True)
class Method:
    """Policy with a budget, prepared for one model. The cache contains the state of the policy.

    This base class is for policies without a state, such as SnapKV and StreamingLLM. They decide at the end of each
    segment from all tokens stored by then.

    Attributes:
        policy: policy without a budget.
        budget: budget of each prompt and of each later segment.
        engine: backend of the policy. If it has functions of tensors, kvspec selects the kept tokens on the device.
        decode: True if the policy can evict after a decode step. Then each token of a stream is a decode step if the
            model processes the token alone.
        positions: rule of rotary positions: "kept" or "renumbered".

    Raises:
        SpecError: if the rule is unknown, or if the scorer supports only positions of the text.
    """

    policy: Policy
    budget: Budget
    engine: Backend = REFERENCE
    decode: bool = False
    positions: str = KEPT

    def __post_init__(self) -> None:
        check_rule(self.positions)
        check_scorer(self.positions, self.policy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings})"

    @property
    def settings(self) -> str:
        """Name of the policy, and the settings that are not the defaults, on one line."""
        positions = f", positions={self.positions!r}" if self.positions != KEPT else ""
        return f"{self.policy.name!r}, budget={self.budget}, backend={self.engine.name!r}{positions}"

    @property
    def step_needs(self) -> Needs:
        """Tensors of a decode step that `after_step` needs."""
        return Needs()

    @property
    def segment_tokens(self) -> int | None:
        """Number of tokens in a segment of a stream. None if the policy is not a stream."""
        return None

    def decide_prompt(self, observed: ObservedSegment) -> Decision:
        """Select the kept tokens of first prompts."""
        policy = self.policy
        prompts = (observed.prompt(row, policy.granularity) for row in observed.prompts)
        return Decision(tuple(retain(policy, self.budget, prompt) for prompt in prompts))

    def check_turn(self, cache: RetainedCache) -> None:
        """Check that the policy can decide about a later segment.

        Raises:
            SpecError: if the policy needs the ids or hidden states of all stored tokens, or evicts in pieces of a
                prompt. Also if layers or heads store different tokens than the policy's sets of kept tokens. Also if
                the scores compare neighbouring tokens, and tokens in between were evicted.
        """
        scorer = self.policy.scorer
        if scorer.needs.token_ids or scorer.needs.hidden or isinstance(scorer, PieceScores):
            reason = "evicts from the first prompt only: read later text inside `with run.reading():`"
            raise SpecError("policy", self.policy.name, reason)
        if cache.layers_differ:
            _check_separate_sets(self.policy, cache)

    def check_blocks(self) -> None:
        """Check that the policy can evict after each block of a prompt.

        Raises:
            SpecError: if the policy evicts from the first block only, or after different numbers of tokens.
        """
        if self.policy.scorer.needs.token_ids or not decides_again(self.policy):
            reason = "evicts from one whole prompt only: leave out block, or use snapkv, keydiff or streamingllm"
            raise SpecError("policy", self.policy.name, reason)

    def check_padded(self, cache: RetainedCache) -> None:
        """Check that the policy accepts a padded turn: the whole model must have one set of kept tokens.

        Raises:
            SpecError: if layers or heads have separate sets, or if the policy decides in decode steps.
        """
        if self.decode or self.policy.granularity is not Granularity.MODEL or cache.layers_differ:
            reason = "padded turns need a policy that keeps one set for the whole model and decides at ends of segments"
            instead = "pass turns of equal length" + (
                "" if self.decode else ", or read padded turns inside `with run.reading():`"
            )
            raise SpecError("attention_mask", "zeros", f"{reason}: {instead}, and {PASS_MASK}")

    def check_padded_reading(self) -> None:
        """Check that texts of different lengths can be read inside `reading()`: no decision may follow in decode steps.

        Raises:
            SpecError: if the policy decides in decode steps.
        """
        if self.decode:
            reason = "must be ones inside reading(), because the policy also evicts while the model generates"
            raise SpecError("attention_mask", "zeros", f"{reason}: pass questions of equal length, or one at a time")

    def flush_pending(self, cache: RetainedCache) -> None:
        """Update the state of the policy in the cache with all tokens seen so far, before a later segment."""

    def decide_turn(self, observed: ObservedSegment) -> Decision:
        """Select the tokens to keep after a later segment, from the tokens that the cache stores."""
        policy, retentions = self.policy, []
        for row in observed.prompts:
            live, shown = observed.kept_sets(row, policy.granularity)
            sets = observed.sets_of_a_layer(policy.granularity)
            retentions.append(retain_turn(policy, self.budget, live, shown, sets))
        return Decision(tuple(retentions))

    def before_step(self, cache: RetainedCache) -> None:
        """Prepare a decode step. Raise a SpecError if no decode step can follow."""

    def after_step(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
        """Update the cache after a decode step of tokens (rows, 1). `observed` has the tensors of `step_needs`."""

    def before_reading(self, cache: RetainedCache) -> None:
        """Prepare tokens after which nothing is evicted. Raise a SpecError if no tokens can follow."""

    def after_reading(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment) -> None:
        """Update the state after tokens (rows, n) were appended to the cache without eviction."""

    def count_sentence_ends(self, observed: ObservedSegment) -> int | None:
        """Return the number of tokens of a segment that end a sentence, or None if the policy has no sentences."""
        return None

    def over_budget(self, retentions: Sequence[Retention]) -> int:
        """Return the mean number of kept tokens minus the user's budget, for the prompt with the largest difference."""
        return max(excess_tokens(self.budget, one) for one in retentions)


@dataclass(frozen=True, repr=False)
class SteppingMethod(Method):
    """Policy that can evict after each decode step, such as H2O, TOVA and R-KV. The scorer has a method `step`."""

    decode: bool = True

    @property
    def step_needs(self) -> Needs:
        """Tensors that the scorer needs in a decode step."""
        return self.policy.scorer.needs

    def decide_prompt(self, observed: ObservedSegment) -> Decision:
        """Decide about first prompts, and make the records of the kept tokens."""
        policy = self.policy
        return self._decision([
            start(policy, self.budget, observed.prompt(row, policy.granularity)) for row in observed.prompts
        ])

    def check_turn(self, cache: RetainedCache) -> None:
        """Check that the records belong to this policy, and include all tokens that the cache stores.

        Raises:
            SpecError: if a condition fails.
        """
        records, name = cache.continuation, self.policy.name
        if not isinstance(records, ScorerRecords) or records.policy != name:
            raise SpecError("past_key_values", "tokens without records", f"{name} needs a cache that {name} has made")
        stored = [len(cache.full_layers[0].head_positions(row, 0)) for row in range(len(records.rows))]
        if stored != [running.live.shape[1] for running in records.rows]:
            raise SpecError("past_key_values", "tokens without records", f"{name} has not read the last tokens")

    before_step = before_reading = check_turn

    def decide_turn(self, observed: ObservedSegment) -> Decision:
        """Decide about later segments. Each token changes the records as in a decode step."""
        policy, rows = self.policy, _records(observed.cache)
        return self._decision([
            advance_turn(
                policy, self.budget, rows[row], observed.stored(row, policy.granularity), observed.columns
            ) for row in observed.prompts
        ])

    def after_step(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment | None) -> None:
        """Finish a decode step: decide for each row separately, then compact the cache."""
        policy = self.policy
        assert observed is not None
        retentions, after, due = [], [], False
        for row, running in enumerate(_records(cache)):
            observation = observed.stored(row, policy.granularity)
            retention, now = advance(policy, self.budget, running, observation)
            retentions.append(retention or _all_live(policy, now, observation.seen))
            after.append(now)
            due |= retention is not None
        if due:
            cache.compact(retentions)
        cache.continuation = ScorerRecords(policy.name, tuple(after))

    def after_reading(self, cache: RetainedCache, ids: Tensor, observed: ObservedSegment) -> None:
        """Add tokens (rows, n) to the records as in decode steps, without eviction."""
        policy = self.policy
        cache.continuation = ScorerRecords(policy.name, tuple(
            append_tokens(policy, self.budget, running, observed.stored(row, policy.granularity), ids.shape[1])
            for row, running in enumerate(_records(cache))
        ))

    def _decision(self, rows: Sequence[tuple[Retention, Running]]) -> Decision:
        retentions, running = zip(*rows, strict=True)
        return Decision(retentions, ScorerRecords(self.policy.name, running))


def method_of(policy: Policy, budget: Budget, engine: Backend = REFERENCE, positions: str = KEPT) -> Method:
    """Return the `Method` of a policy and a budget. If the cadence has steps, the scorer's state lasts across steps."""
    kind = Method if policy.cadence.every is None else SteppingMethod
    return kind(policy, budget, engine, positions=positions)


class BudgetedPolicy(Protocol):
    """Policy with a budget, such as `policy_from_name` returns."""

    def on(self, model: PreTrainedModel, /) -> Method:
        """Prepare the policy for a model."""
        ...


def decide(policy: BudgetedPolicy | Method, observed: ObservedSegment) -> Decision:
    """Select the tokens that a policy keeps of each prompt. Several policies can decide from one `observed`.

        decision = kvspec.decide(policy, observed)
        decision.retentions[0].group(0)     # kept positions of the first kept set

    Args:
        policy: policy with a budget. If you decide often, pass `policy.on(model)`, which prepares the policy once.
        observed: result of `observe`.

    Returns:
        Decision with the sets of kept tokens of each prompt. Pass the decision to `compact`.

    Raises:
        SpecError: if the policy needs a tensor that `observe` did not capture. The error is also raised if the policy
            does not support the model, the prompt or the positions of the cache.
    """
    method = _prepared(policy, observed)
    numbering = _numbering(method, observed)
    shown = observed.narrowed(method.policy.scorer.needs)
    with shown.watch.stage("decision"):
        decision = (method.decide_turn if shown.later else method.decide_prompt)(shown)
    over = method.over_budget(decision.retentions)
    return replace(decision, over_budget=over, padding=None if shown.later else shown.padding, numbering=numbering)


def _prepared(policy: object, observed: object) -> Method:
    if isinstance(policy, Policy):
        raise SpecError("policy", policy.name, "has no budget: type kvspec.CustomPolicy(policy, 0.3)")
    check_types("decide(policy, observed)", observed=(observed, ObservedSegment))
    assert isinstance(observed, ObservedSegment)  # For mypy: check_types raised for any other type.
    if not hasattr(policy, "on") and not isinstance(policy, Method):
        bound = 'must be a policy with a budget, such as policy_from_name("snapkv", 0.3)'
        raise SpecError("policy", type(policy).__name__, f"{bound}; type kvspec.decide(policy, observed)")
    if isinstance(policy, Method):
        return policy
    if observed.model is None:
        raise SpecError("policy", type(policy).__name__, "is not prepared for a model: pass policy.on(model)")
    method: Method = policy.on(observed.model)
    return method


def _numbering(method: Method, observed: ObservedSegment) -> Numbering | None:
    """Return the numbering of the cache of a decision. If None, each key has the rotary position of the text.

    Raises:
        SpecError: if the tokens of the cache have a different rule, or if the model does not support the rule.
    """
    if observed.later:
        check_same_rule(method.positions, observed.cache)
    if method.positions == KEPT or observed.cache.numbering is not None:
        return observed.cache.numbering
    assert observed.model is not None
    return numbering_of(observed.model, observed.architecture)


def join_layers(method: Method, parts: Sequence[Decision]) -> Decision:
    """Join the decisions about single layers of a prompt, in ascending order of layers, into one decision."""
    retentions = tuple(map(Retention.join, zip(*(part.retentions for part in parts), strict=True)))
    on_device = all(part.on_device for part in parts)
    joined = Decision(
        retentions, over_budget=method.over_budget(retentions), padding=parts[0].padding, on_device=on_device
    )
    records = [part.continuation for part in parts if isinstance(part.continuation, ScorerRecords)]
    if not records:
        return joined
    policy, rows = method.policy, zip(*(one.rows for one in records), strict=True)
    return replace(joined, continuation=ScorerRecords(policy.name, tuple(join(policy, row) for row in rows)))


def check_layers_agree(policy: Policy, cache: RetainedCache) -> None:
    """Check that all layers and heads store the same tokens.

    Raises:
        SpecError: if layers or heads store different tokens.
    """
    if cache.layers_differ:
        bound = f"{policy.name} needs the same tokens in all layers and heads"
        raise SpecError("past_key_values", "layers that differ", bound)


def _check_separate_sets(policy: Policy, cache: RetainedCache) -> None:
    """Check that each set of kept tokens can be scored alone, if layers store different tokens."""
    scorer = policy.scorer
    if policy.granularity is Granularity.MODEL:
        check_layers_agree(policy, cache)
    if policy.granularity is Granularity.LAYER and any(map(_heads_differ, cache.full_layers)):
        raise SpecError("past_key_values", "heads that differ", f"{policy.name} needs the same tokens in all heads")
    if not (isinstance(scorer, SeparableScorer) and scorer.separable):
        reason = (
            "evicts from the first prompt only, because the policy compares the tokens of different layers or heads:"
            " read later text inside `with run.reading():`"
        )
        raise SpecError("policy", policy.name, reason)


def _heads_differ(layer: RetainedLayer) -> bool:
    if not isinstance(layer, RaggedLayer):
        return False
    sets = ([layer.head_positions(row, head).tolist() for head in range(layer.heads)] for row in range(layer.batch))
    return any(positions != heads[0] for heads in sets for positions in heads)


def _records(cache: RetainedCache) -> tuple[Running, ...]:
    assert isinstance(cache.continuation, ScorerRecords)
    return cache.continuation.rows


def _all_live(policy: Policy, running: Running, seen: int) -> Retention:
    groups, live = running.live.shape
    return Retention(running.live.ravel(), live * np.arange(groups + 1), seen, policy.granularity)
