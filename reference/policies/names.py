"""The names of the policies, in one table: what makes each, and which of its constants the served model decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from reference import policies
from spec.policy import Policy
from spec.validate import check_choices

__all__ = [
    "DIVERSE", "NAMES", "POLICIES", "NamedPolicy", "check_name", "constants_of", "constants_of_model", "make_policy",
]

DIVERSE = "diverse-"
"""Before a name: the same policy under set-conditioned selection, with the constants `diversity` and `signature`."""

_DIVERSITY = frozenset({"diversity", "signature", "backend"})


@dataclass(frozen=True)
class NamedPolicy:
    """A row of the table: a maker, the constants that the name decides, and the names of those that the model does."""

    make: Callable[..., Policy]
    decided: Mapping[str, Any] = field(default_factory=dict)
    of_model: frozenset[str] = frozenset()
    diverse: bool = True
    """Whether the name may stand behind DIVERSE: it keeps single tokens by their scores."""

    @property
    def constants(self) -> frozenset[str]:
        """What a caller may give."""
        return frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.of_model


def _triattention(mode: str) -> NamedPolicy:
    return NamedPolicy(policies.triattention, {"mode": mode}, frozenset({"served"}))


POLICIES: Mapping[str, NamedPolicy] = {
    "crystalcache": NamedPolicy(policies.crystalcache, diverse=False),
    "streamingllm": NamedPolicy(policies.streaming_llm),
    "fullcache": NamedPolicy(policies.full_cache, diverse=False),
    "adakv": NamedPolicy(policies.adakv),
    "caote": NamedPolicy(policies.caote),
    "chunkkv": NamedPolicy(policies.chunkkv, diverse=False),
    "chunkkv-described": NamedPolicy(policies.chunkkv_described, diverse=False),
    "defensivekv": NamedPolicy(policies.defensivekv, of_model=frozenset({"W_o"})),
    "expected-attention": NamedPolicy(policies.expected_attention, of_model=frozenset({"inv_freq", "factor"})),
    "h2o": NamedPolicy(policies.h2o, diverse=False),
    "h2o-described": NamedPolicy(policies.h2o_described),
    "keydiff": NamedPolicy(policies.keydiff),
    "knorm": NamedPolicy(policies.knorm),
    "nestedkv": NamedPolicy(policies.nestedkv),
    "nestedkv-without-adaptive": NamedPolicy(policies.nestedkv_without_adaptive),
    "nestedkv-without-both": NamedPolicy(policies.nestedkv_without_both),
    "nestedkv-without-continuum": NamedPolicy(policies.nestedkv_without_continuum),
    "pyramidkv": NamedPolicy(policies.pyramidkv),
    "pyramidkv-described": NamedPolicy(policies.pyramidkv_described),
    "rkv": NamedPolicy(policies.rkv),
    "snapkv": NamedPolicy(policies.snapkv),
    "tova": NamedPolicy(policies.tova),
    "triattention": _triattention("global"),
    "triattention-by-head": _triattention("head"),
    "triattention-by-layer-and-head": _triattention("layer and head"),
}
"""EpiCache is not here: its queries are not the prompt's own.

Chunks and trunks have no signature; H2O's newest half is not protection, `diverse-h2o-described` has its sums; the
full cache selects nothing.
"""

NAMES = (*POLICIES, *(DIVERSE + name for name, policy in POLICIES.items() if policy.diverse))
"""All names."""


def check_name(name: str) -> str:
    """A name of a policy, or DIVERSE and the name of one that keeps single tokens.

    Raises:
        SpecError: for another name; those that look like it are named.
    """
    check_choices("name", (name,), NAMES)
    return name


def constants_of(name: str) -> frozenset[str]:
    """The constants that a caller may give for this name.

    Raises:
        SpecError: as `check_name`.
    """
    constants = POLICIES[check_name(name).removeprefix(DIVERSE)].constants
    return constants | _DIVERSITY if name.startswith(DIVERSE) else constants


def constants_of_model(name: str) -> frozenset[str]:
    """The constants that the served model decides: `W_o`, `inv_freq` and `factor`, or `served`.

    Raises:
        SpecError: as `check_name`.
    """
    return POLICIES[check_name(name).removeprefix(DIVERSE)].of_model


def make_policy(name: str, constants: Mapping[str, Any]) -> Policy:
    """The policy of this name, from the caller's constants and the model's.

    Raises:
        SpecError: as `check_name`; for a value that the policy does not admit.
        BackendUnavailable: when a backend cannot run here, or lacks what the policy needs.
    """
    row = POLICIES[check_name(name).removeprefix(DIVERSE)]
    if not name.startswith(DIVERSE):
        return row.make(**row.decided, **constants)
    taken = row.constants | row.of_model
    host = row.make(**row.decided, **{key: value for key, value in constants.items() if key in taken})
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    return policies.diverse(host, lam, mode, constants.get("backend", "numpy"))
