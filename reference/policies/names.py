"""The names of the policies, in one table: what makes each, and which of its constants the served model decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
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

    paper: str
    """Where the method is published; "" for none."""
    keeps: str
    """What is kept, as a noun phrase."""
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
        """What a caller may give: the maker's arguments, and each field of its `parameters` by its own name."""
        taken = frozenset(signature(self.make).parameters) - frozenset(self.decided) - self.of_model
        return taken | frozenset(self.parameters)

    @property
    def parameters(self) -> dict[str, object]:
        """The fields of its `parameters` with their defaults; {} if it has none."""
        given = signature(self.make).parameters.get("parameters")
        return {} if given is None else {one.name: getattr(given.default, one.name) for one in fields(given.default)}

    def policy(self, constants: Mapping[str, Any]) -> Policy:
        """The policy with these constants."""
        own = dict(constants)
        if changed := {key: own.pop(key) for key in self.parameters.keys() & own.keys()}:
            default = signature(self.make).parameters["parameters"].default
            own["parameters"] = replace(own.get("parameters", default), **changed)
        return self.make(**self.decided, **own)


def _triattention(paper: str, keeps: str, mode: str) -> NamedPolicy:
    of_model = frozenset({"served"})
    return NamedPolicy(paper, keeps, policies.triattention, {"mode": mode}, of_model, promises=_NONE_PROTECTED)


POLICIES: Mapping[str, NamedPolicy] = {
    "crystalcache": NamedPolicy(
        "Lin, CrystalCache",
        "trunks, runs of tokens up to a sentence, by a graph of one layer's attention and by rare tokens",
        policies.crystalcache, diverse=False, blocks=False,
        promises=Promises(protection_holds="yes", no_op_at_full_budget="yes", row_independence="yes"),
    ),
    "streamingllm": NamedPolicy(
        "Xiao et al., StreamingLLM (arXiv 2309.17453)",
        "the first tokens, the attention sinks, and the most recent ones",
        policies.streaming_llm, promises=replace(_KEYS_ALONE, head_permutation="N/A"),
    ),
    "fullcache": NamedPolicy(
        "",
        "every token: the upper bound of a comparison",
        policies.full_cache, diverse=False, blocks=False,
        promises=Promises("no", "N/A", "yes", "N/A", "yes", "N/A", "N/A"),
    ),
    "adakv": NamedPolicy(
        "Feng et al., Ada-KV (arXiv 2407.11550)",
        "SnapKV's tokens; the heads of a layer share its budget by their scores",
        policies.adakv, promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no")
    ),
    "cake": NamedPolicy(
        "Qin et al., CAKE (arXiv 2503.12491)",
        "what the window attends to, in the mean and in variance; layers share the budget by preference",
        policies.cake,
    ),
    "caote": NamedPolicy(
        "Goel et al., CAOTE (arXiv 2504.14051)",
        "tokens whose eviction would change the attention output most",
        policies.caote, promises=_NONE_PROTECTED,
    ),
    "chunkkv": NamedPolicy(
        "Liu et al., ChunkKV (arXiv 2502.00299)",
        "whole chunks of tokens with the largest sums of the window's attention",
        policies.chunkkv, diverse=False, blocks=False, promises=replace(_ALL, higher_score_never_loses="no")
    ),
    "chunkkv-described": NamedPolicy(
        "Lin, CrystalCache, Eq. 6",
        "whole chunks by the attention of all queries, without a window",
        policies.chunkkv_described, diverse=False, blocks=False,
        promises=replace(_NONE_PROTECTED, higher_score_never_loses="no"),
    ),
    "critical-adakv": NamedPolicy(
        "Feng et al., CriticalKV (arXiv 2502.03805)",
        "Ada-KV's budgets; two stages in each head, the second by projected values",
        policies.critical_adakv, of_model=frozenset({"W_o"}), diverse=False,
        promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no"),
    ),
    "criticalkv": NamedPolicy(
        "Feng et al., CriticalKV (arXiv 2502.03805)",
        "SnapKV's tokens in two stages, the second by projected values",
        policies.criticalkv, of_model=frozenset({"W_o"}), diverse=False,
        promises=replace(_ALL, higher_score_never_loses="no"),
    ),
    "defensivekv": NamedPolicy(
        "Feng et al., DefensiveKV (arXiv 2510.13334)",
        "the largest attention in the window, times the projected values; heads compete",
        policies.defensivekv, of_model=frozenset({"W_o"}), promises=replace(_ALL, head_permutation="no")
    ),
    "expected-attention": NamedPolicy(
        "Devoto et al., Expected Attention (arXiv 2510.00636)",
        "what future queries would attend to, if they are Gaussian",
        policies.expected_attention, of_model=frozenset({"inv_freq", "factor"}),
    ),
    # Its newest half, as VATP's, hangs on the budget, which a protection is not told: the suite does not see it.
    "h2o": NamedPolicy(
        "Zhang et al., H2O (arXiv 2306.14048)",
        "half the newest tokens, half those with the largest sums of attention",
        policies.h2o, diverse=False, promises=replace(_NONE_PROTECTED, higher_score_never_loses="no")
    ),
    "h2o-described": NamedPolicy(
        "Lin, CrystalCache, Eq. 5",
        "tokens with the largest sums of attention and a recent window, once",
        policies.h2o_described,
    ),
    "keydiff": NamedPolicy(
        "Park et al., KeyDiff (arXiv 2504.15364)",
        "keys that differ most from the mean direction of all keys",
        policies.keydiff, promises=replace(_KEYS_ALONE, protection_holds="N/A"),
    ),
    "knorm": NamedPolicy(
        "Devoto et al., L2 norm (arXiv 2406.11430)",
        "keys with the smallest norm",
        policies.knorm, promises=replace(_KEYS_ALONE, protection_holds="N/A"),
    ),
    "kvcrush": NamedPolicy(
        "Jha et al., KVCrush (arXiv 2503.00022)",
        "SnapKV's whole blocks, some of which represent evicted ones",
        policies.kvcrush, diverse=False, blocks=False,
        promises=replace(_ALL, budget_exact="no", higher_score_never_loses="no"),
    ),
    "kvzip": NamedPolicy(
        "Kim et al., KVzip (arXiv 2505.23416)",
        "what the model attends to while it repeats the prompt; one budget for all heads",
        policies.kvzip,
    ),
    "kvzip-heads": NamedPolicy(
        "Kim et al., KVzip (arXiv 2505.23416); DuoAttention",
        "every token in the heads that a calibration names, first and recent tokens in the others",
        policies.kvzip_heads, of_model=frozenset({"served"}), diverse=False,
        promises=replace(_KEYS_ALONE, head_permutation="N/A"),
    ),
    "kvzip-plus": NamedPolicy(
        "Jegou and Jeblick, KVzap; kvpress",
        "KVzip's scores times the norm of the attention output",
        policies.kvzip_plus, of_model=frozenset({"W_o"}),
    ),
    "kvzip-uniform": NamedPolicy(
        "Kim et al., KVzip (arXiv 2505.23416)",
        "KVzip's scores, the same number of tokens in each head",
        policies.kvzip_uniform,
    ),
    "lagkv": NamedPolicy(
        "Liang et al., LagKV (arXiv 2504.04704)",
        "tokens whose keys and values stand out against the next partition of the prompt",
        policies.lagkv, promises=_KEYS_ALONE,
    ),
    "morphkv": NamedPolicy(
        "Ghadia et al., MorphKV (arXiv 2503.00979)",
        "the last tokens, and what their queries attend to",
        policies.morphkv,
    ),
    "nestedkv": NamedPolicy(
        "NestedKV",
        "keys that three memories (whole prompt, block, recent window) explain least; heads compete",
        policies.nestedkv, promises=replace(_KEYS_ALONE, higher_score_never_loses="no", head_permutation="no"),
    ),
    "nestedkv-without-adaptive": NamedPolicy(
        "NestedKV, ablation",
        "NestedKV's score, the same number of tokens in each head",
        policies.nestedkv_without_adaptive, promises=_KEYS_ALONE,
    ),
    "nestedkv-without-both": NamedPolicy(
        "NestedKV, ablation",
        "KeyDiff's score, the same number of tokens in each head",
        policies.nestedkv_without_both, promises=replace(_KEYS_ALONE, protection_holds="N/A")
    ),
    "nestedkv-without-continuum": NamedPolicy(
        "NestedKV, ablation",
        "KeyDiff's score under NestedKV's budgets",
        policies.nestedkv_without_continuum,
        promises=replace(_KEYS_ALONE, protection_holds="N/A", higher_score_never_loses="no"),
    ),
    "pyramidkv": NamedPolicy(
        "Cai et al., PyramidKV (arXiv 2406.02069)",
        "SnapKV's tokens, more in lower layers than in higher ones",
        policies.pyramidkv,
    ),
    "pyramidkv-described": NamedPolicy(
        "Lin, CrystalCache, Section 4.1",
        "tokens with the largest sums of attention, more in lower layers",
        policies.pyramidkv_described,
    ),
    "rkv": NamedPolicy(
        "Cai et al., R-KV (arXiv 2505.24133)",
        "what the last queries attend to, less what is redundant",
        policies.rkv,
    ),
    "snapkv": NamedPolicy(
        "Li et al., SnapKV (arXiv 2404.14469)",
        "the last tokens, and what their queries attend to",
        policies.snapkv,
    ),
    "tova": NamedPolicy(
        "Oren et al., TOVA (arXiv 2401.06104)",
        "what the newest query attends to",
        policies.tova, promises=_NONE_PROTECTED,
    ),
    "triattention": _triattention(
        "TriAttention (arXiv 2604.04921)",
        "keys that later queries would attend to, by calibrated statistics of queries",
        "global",
    ),
    "triattention-by-head": _triattention(
        "TriAttention (arXiv 2604.04921)",
        "TriAttention's score, one set for each head of all layers",
        "head",
    ),
    "triattention-by-layer-and-head": _triattention(
        "TriAttention (arXiv 2604.04921)",
        "TriAttention's score, one set for each layer and head",
        "layer and head",
    ),
    "vase": NamedPolicy(
        "Chang et al., VaSE",
        "wide values and a random sample, beside the first and the last tokens",
        policies.vase, diverse=False, blocks=False,
        promises=replace(_ALL, higher_score_never_loses="no", head_permutation="no"),
    ),
    "vatp": NamedPolicy(
        "Guo et al., VATP (arXiv 2406.12335)",
        "H2O's sums of attention, times the norm of the values",
        policies.vatp, diverse=False, promises=replace(_ALL, higher_score_never_loses="no"),
    ),
}
"""EpiCache is not here: its queries are not the prompt's own.

Chunks and trunks have no signature; CriticalKV, KVCrush and VaSE select in two stages; H2O's newest half is not
protection, `diverse-h2o-described` has its sums; the full cache and full heads select nothing.
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
        policy = replace(row.policy(own), promises=row.promises)
        return policies.in_blocks(policy, constants[BLOCK]) if BLOCK in constants.keys() - own.keys() else policy
    taken = row.constants | row.of_model
    host = row.policy({key: value for key, value in constants.items() if key in taken})
    lam, mode = constants.get("diversity", 0.5), constants.get("signature", "flat")
    return policies.diverse(host, lam, mode, constants.get("backend", "numpy"))
