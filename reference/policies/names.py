"""The names of the policies, in one table: what makes each, and which of its constants the served model decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from reference import policies
from spec.errors import SpecError
from spec.plugins import Plugin, find_plugin
from spec.policy import Policy, Promises

__all__ = [
    "BLOCK", "DIVERSE", "ENTRY_POINTS", "NAMES", "POLICIES", "NamedPolicy", "check_name", "constants_of",
    "constants_of_model", "make_policy", "own_policy",
]

ENTRY_POINTS = "kvspec.policies"

DIVERSE = "diverse-"
"""Before a name: the same policy under set-conditioned selection, with the constants `diversity` and `signature`."""

_DIVERSITY = frozenset({"diversity", "signature", "backend"})

BLOCK = "block"
"""A constant of policies that choose single tokens by their scores: whole blocks of so many stay (PO-BLOCKS)."""

_ALL = Promises("yes", "yes", "yes", "yes", "yes", "yes", "yes")
_NONE_PROTECTED = replace(_ALL, protection_holds="N/A")
_KEYS_ALONE = replace(_ALL, gqa="N/A")


@dataclass(frozen=True)
class NamedPolicy:
    """A row of the table: a maker, the constants that the name decides, and the names of those that the model does."""

    make: Callable[..., Policy]
    decided: Mapping[str, Any] = field(default_factory=dict)
    of_model: frozenset[str] = frozenset()
    diverse: bool = True
    """Whether the name may stand behind DIVERSE: it keeps single tokens by their scores."""
    blocks: bool = True
    """Whether BLOCK, which its maker does not have, makes it one of blocks."""
    promises: Promises = _ALL
    """Of the policy under its own name: the row of the table in spec/policies.md, which says why it is not all."""

    @property
    def constants(self) -> frozenset[str]:
        """What a caller may give."""
        return frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.of_model


def _triattention(mode: str) -> NamedPolicy:
    return NamedPolicy(policies.triattention, {"mode": mode}, frozenset({"served"}), promises=_NONE_PROTECTED)


POLICIES: Mapping[str, NamedPolicy] = {
    "crystalcache": NamedPolicy(policies.crystalcache, diverse=False, blocks=False, promises=Promises(
        protection_holds="yes", no_op_at_full_budget="yes", row_independence="yes",
    )),
    "streamingllm": NamedPolicy(policies.streaming_llm, promises=replace(_KEYS_ALONE, head_permutation="N/A")),
    "fullcache": NamedPolicy(policies.full_cache, diverse=False, blocks=False, promises=Promises(
        "no", "N/A", "yes", "N/A", "yes", "N/A", "N/A",
    )),
    "adakv": NamedPolicy(
        policies.adakv, promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no")
    ),
    "cake": NamedPolicy(policies.cake),
    "caote": NamedPolicy(policies.caote, promises=_NONE_PROTECTED),
    "chunkkv": NamedPolicy(
        policies.chunkkv, diverse=False, blocks=False, promises=replace(_ALL, higher_score_never_loses="no")
    ),
    "chunkkv-described": NamedPolicy(
        policies.chunkkv_described, diverse=False, blocks=False,
        promises=replace(_NONE_PROTECTED, higher_score_never_loses="no"),
    ),
    "critical-adakv": NamedPolicy(
        policies.critical_adakv, of_model=frozenset({"W_o"}), diverse=False,
        promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no"),
    ),
    "criticalkv": NamedPolicy(
        policies.criticalkv, of_model=frozenset({"W_o"}), diverse=False,
        promises=replace(_ALL, higher_score_never_loses="no"),
    ),
    "defensivekv": NamedPolicy(
        policies.defensivekv, of_model=frozenset({"W_o"}), promises=replace(_ALL, head_permutation="no")
    ),
    "expected-attention": NamedPolicy(policies.expected_attention, of_model=frozenset({"inv_freq", "factor"})),
    # Its newest half, as VATP's, hangs on the budget, which a protection is not told: the suite does not see it.
    "h2o": NamedPolicy(
        policies.h2o, diverse=False, promises=replace(_NONE_PROTECTED, higher_score_never_loses="no")
    ),
    "h2o-described": NamedPolicy(policies.h2o_described),
    "keydiff": NamedPolicy(policies.keydiff, promises=replace(_KEYS_ALONE, protection_holds="N/A")),
    "knorm": NamedPolicy(policies.knorm, promises=replace(_KEYS_ALONE, protection_holds="N/A")),
    "kvcrush": NamedPolicy(
        policies.kvcrush, diverse=False, blocks=False,
        promises=replace(_ALL, budget_exact="no", higher_score_never_loses="no"),
    ),
    "kvzip": NamedPolicy(policies.kvzip),
    "kvzip-plus": NamedPolicy(policies.kvzip_plus, of_model=frozenset({"W_o"})),
    "kvzip-uniform": NamedPolicy(policies.kvzip_uniform),
    "lagkv": NamedPolicy(policies.lagkv, promises=_KEYS_ALONE),
    "morphkv": NamedPolicy(policies.morphkv),
    "nestedkv": NamedPolicy(policies.nestedkv, promises=replace(_KEYS_ALONE, higher_score_never_loses="no")),
    "nestedkv-without-adaptive": NamedPolicy(policies.nestedkv_without_adaptive, promises=_KEYS_ALONE),
    "nestedkv-without-both": NamedPolicy(
        policies.nestedkv_without_both, promises=replace(_KEYS_ALONE, protection_holds="N/A")
    ),
    "nestedkv-without-continuum": NamedPolicy(policies.nestedkv_without_continuum, promises=replace(
        _KEYS_ALONE, protection_holds="N/A", higher_score_never_loses="no",
    )),
    "pyramidkv": NamedPolicy(policies.pyramidkv),
    "pyramidkv-described": NamedPolicy(policies.pyramidkv_described),
    "rkv": NamedPolicy(policies.rkv),
    "snapkv": NamedPolicy(policies.snapkv),
    "tova": NamedPolicy(policies.tova, promises=_NONE_PROTECTED),
    "triattention": _triattention("global"),
    "triattention-by-head": _triattention("head"),
    "triattention-by-layer-and-head": _triattention("layer and head"),
    "vase": NamedPolicy(
        policies.vase, diverse=False, blocks=False,
        promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no"),
    ),
    "vatp": NamedPolicy(policies.vatp, diverse=False, promises=replace(_ALL, higher_score_never_loses="no")),
}
"""EpiCache is not here: its queries are not the prompt's own.

Chunks and trunks have no signature; CriticalKV, KVCrush and VaSE select in two stages; H2O's newest half is not
protection, `diverse-h2o-described` has its sums; the full cache selects nothing.
"""

NAMES = (*POLICIES, *(DIVERSE + name for name, policy in POLICIES.items() if policy.diverse))
"""All names of ours; a user's own policy is `module:ATTRIBUTE`, or an entry point of ENTRY_POINTS."""


def check_name(name: str, argument: str = "name") -> str:
    """A name of a policy, of NAMES or a user's own.

    Raises:
        SpecError: for another name, by `argument`, where those that look like it are named; as `own_policy`.
    """
    if name not in NAMES:
        own_policy(name, argument)
    return name


def own_policy(name: str, argument: str = "name") -> Plugin:
    """A user's own policy.

    Raises:
        SpecError: for an unknown name, what cannot be loaded, or what is no Policy.
    """
    found = find_plugin(argument, name, ENTRY_POINTS, NAMES)
    if not isinstance(found.value, Policy):
        kind = type(found.value).__name__
        bound = f"must be a spec.policy.Policy, as reference.policies.policy_from_score makes one; is a {kind}"
        raise SpecError(argument, name, bound)
    return found


def constants_of(name: str) -> frozenset[str]:
    """The constants that a caller may give for this name; a user's own policy has none.

    Raises:
        SpecError: as `check_name`.
    """
    if check_name(name) not in NAMES:
        return frozenset()
    row = POLICIES[name.removeprefix(DIVERSE)]
    if name.startswith(DIVERSE):
        return row.constants | _DIVERSITY
    return row.constants | {BLOCK} if row.blocks else row.constants


def constants_of_model(name: str) -> frozenset[str]:
    """The constants that the served model decides: `W_o`, `inv_freq` and `factor`, or `served`.

    Raises:
        SpecError: as `check_name`.
    """
    return POLICIES[name.removeprefix(DIVERSE)].of_model if check_name(name) in NAMES else frozenset()


def make_policy(name: str, constants: Mapping[str, Any]) -> Policy:
    """The policy of this name, from the caller's constants and the model's.

    Raises:
        SpecError: as `check_name`; for a value that the policy does not admit.
        BackendUnavailable: when a backend cannot run here, or lacks what the policy needs.
    """
    if name not in NAMES:
        given = own_policy(name).value
        assert isinstance(given, Policy)
        return given
    row = POLICIES[name.removeprefix(DIVERSE)]
    if not name.startswith(DIVERSE):
        own = {key: value for key, value in constants.items() if key != BLOCK or not row.blocks}
        policy = replace(row.make(**row.decided, **own), promises=row.promises)
        return policies.in_blocks(policy, constants[BLOCK]) if BLOCK in constants.keys() - own.keys() else policy
    taken = row.constants | row.of_model
    host = row.make(**row.decided, **{key: value for key, value in constants.items() if key in taken})
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    return policies.diverse(host, lam, mode, constants.get("backend", "numpy"))
