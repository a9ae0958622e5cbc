"""One family under one policy: a prompt, a step, a turn and a step, beside the oracle; or the words of its refusal."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.cache_suite.oracle import Masked, full_layers
from conformance.measure.families.models import VOCABULARY, Family, NotBuilt
from models_integration import CrystalCache, Published, RetentionPolicy, Session, StreamingLLM
from models_integration.model.cache_argument import CACHE
from spec.errors import SpecError
from spec.parameters import TINY
from spec.records import CrystalRetention
from spec.retention import Granularity

__all__ = ["BOUND", "POLICIES", "Outcome", "outcomes"]

BOUND = 1e-5
"""Of the largest logit."""
VISIBLE_EFFECT = 1e-3
PROMPT, TURN = 48, 12

POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "model: StreamingLLM": lambda: StreamingLLM(0.4, N_sink=2),
    "model: CrystalCache": lambda: CrystalCache(0.5, frozenset(range(3, VOCABULARY, 9)), TINY, backend="numpy"),
    "layer: ChunkKV": lambda: Published("chunkkv", 0.4, c=3, W=4),
    "head: Ada-KV": lambda: Published("adakv", 0.4, W=4),
}
"""By what they keep a set for, and whether they look at attention: StreamingLLM asks for nothing."""


@dataclass(frozen=True)
class Outcome:
    """What a policy does on a family."""

    family: str
    policy: str
    verdict: str
    """holds, refused, fails, or not built."""
    detail: str
    """The reason, where there is one."""
    worst: float = 0.0
    """The largest relative difference from the oracle."""


def outcomes(family: Family) -> Iterator[Outcome]:
    """One for each policy."""
    try:
        model = family.build()
    except NotBuilt as error:
        yield from (Outcome(family.name, policy, "not built", str(error)) for policy in POLICIES)
        return
    for policy, make in POLICIES.items():
        yield _outcome(family.name, policy, model, make())


def _outcome(family: str, name: str, model: PreTrainedModel, policy: RetentionPolicy) -> Outcome:
    """Whatever is raised behind the door, or is not finite, or hides nothing, is a failure."""
    try:
        session = policy(model)
    except SpecError as error:
        verdict = "refused" if error.argument == "model" else "fails"
        return Outcome(family, name, verdict, error.bound if verdict == "refused" else str(error))
    except Exception as error:
        return Outcome(family, name, "fails", f"{type(error).__name__} at the door: {error}")
    try:
        worst, effect = _compared(model, session)
    except Exception as error:
        return Outcome(family, name, "fails", f"{type(error).__name__}: {error}")
    if not worst <= BOUND:
        return Outcome(family, name, "fails", f"is off by {worst:.1e}", worst)
    if not effect > VISIBLE_EFFECT:
        return Outcome(family, name, "fails", f"eviction changes no more than {effect:.1e}: this says nothing", worst)
    return Outcome(family, name, "holds", "", worst)


def _compared(model: PreTrainedModel, session: Session) -> tuple[float, float]:
    """The worst difference from the oracle over all that is read, and how far eviction moved the last step."""
    ids = torch.randint(3, VOCABULARY, (1, PROMPT + TURN + 2), generator=torch.Generator().manual_seed(3))
    parts = torch.split(ids, [PROMPT, 1, TURN, 1], dim=1)
    masked, full, worst = Masked(model), Masked(model), 0.0
    with session, torch.no_grad():
        for part in parts:
            found = model(input_ids=part, **{CACHE: session.cache}, use_cache=True).logits
            expected, untouched = masked.read(part), full.read(part)
            worst = max(worst, _relative(found, expected))
            if part.shape[1] > 1:
                masked.keep(_kept(model, session))
    return worst, _relative(untouched, expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Infinite where either is not finite."""
    n = min(found.shape[1], expected.shape[1])
    off = (found[:, -n:] - expected[:, -n:]).abs().max() / expected.abs().max()
    return float(off) if bool(torch.isfinite(found).all()) and bool(torch.isfinite(off)) else float("inf")


def _kept(model: PreTrainedModel, session: Session) -> list[list[list[int]]]:
    """What the session says it keeps, by full-attention layer and set."""
    retention = session.retention.retention if isinstance(session.retention, CrystalRetention) else session.retention
    assert retention is not None
    assert not isinstance(retention, tuple)
    layers = full_layers(model)
    if retention.granularity is Granularity.MODEL:
        return [[retention.positions.tolist()]] * len(layers)
    sets = [retention.group(group).tolist() for group in range(retention.groups)]
    size = len(sets) // len(layers)
    return [sets[size * ordinal : size * (ordinal + 1)] for ordinal in range(len(layers))]
