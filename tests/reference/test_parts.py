"""Parts of a text: kept sets of the oracle of parts, chunks, pieces, later scores, tables of weights, lazy layers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.methods import brutes
from conformance.methods.chunks import chunk_sets, entropy
from conformance.methods.method import method_of
from conformance.methods.tables import table_shares
from conformance.oracles.choices import fits
from conformance.plugin import fewer_examples
from conformance.strategies.policy_inputs import Inputs, decided, drawn, model_constants
from conformance.tolerances import close, scores_agree
from reference.policies import in_chunks, keydiff, policy_from_text, simlayerkv
from reference.policies.chunks import HeadSums, best_chunks, chunk_entropy
from reference.policies.later import FirstAndLater, with_later_scores
from reference.policies.layers import decides_again, is_layerwise, policy_of_layer
from reference.policies.names import make_policy
from reference.policies.parts import equal_parts
from reference.policies.pieces import piece_shares
from reference.policies.rkv import QueryCache
from reference.policies.scorers import LayerScorer
from reference.policies.simlayerkv import lazy_mass
from reference.policies.tables import Table
from reference.policies.texts import text_of
from spec.errors import SpecError
from spec.policy import LayerView, Needs, Scores
from spec.retention import Granularity

pytestmark = pytest.mark.usefixtures("reference_items")

STEPS = 8
TABLE = "snapkv:W=3/layers=table:shares=3_2_1"


class Case(NamedTuple):
    """Texts of policies that test an item, and the sizes of inputs. B depends on the protected tokens and the seed."""

    item: str
    n: int
    L: int
    seeds: Sequence[int]
    B: Callable[[int, int], int]
    texts: Sequence[str]


CASES = [
    Case("PO-CHUNKS", 23, 2, range(3), lambda held, seed: 9 + seed, [
        "snapkv:W=3/chunks=4:gate=2", "keydiff/chunks=5", "knorm/sink=1/recent=2/chunks=4:gate=1",
        "tova/every=none/chunks=3", "snapkv:W=2/values=2/chunks=4/floor=9",
        "nestedkv:N_sink=1:W=2:beta=3.0/heads=even/chunks=4:gate=1", "snapkv:W=3:kernel=1/chunks=4",
        "snapkv:W=3/chunks=4/layers=pyramid:beta=3", "random-tokens/chunks=3:gate=1",
        "snapkv:W=2/chunks=3:gate=1/pieces=9", "streamingllm:N_sink=1/chunks=4",
        "expected-attention:N_sink=1:N_future=5/chunks=4:gate=3",
    ]),
    Case("PO-PIECES", 23, 2, range(3), lambda held, seed: max(1, held) + seed, [
        "snapkv:W=3/pieces=7", "knorm/pieces=9/layers=pyramid:beta=3", "snapkv:W=3/pieces=23", "snapkv:W=3/pieces=99",
        "keydiff/sink=1/recent=2/pieces=10/heads=quota:safeguard=0.5",
        "criticalkv:W=2/pieces=6", "snapkv:W=2/diverse=0.5:signature=head/pieces=8",
        "capkv:N_sink=1:N_future=5/pieces=6", "adakv:W=2/pieces=11/values=1",
        "streamingllm:N_sink=1/sets=layer/pieces=6", "tova/every=none/pieces=5/recent=1",
        "expected-attention:N_sink=1:N_future=5/pieces=12", "random-tokens/pieces=5", "leverage/recent=3/pieces=9",
        "q-filters/pieces=6", "kvzap/pieces=5", "expected-attention-stats:N_sink=1:N_future=5/pieces=12",
    ]),
    Case("PO-LATER-SCORES", 23, 2, range(3), lambda held, seed: 8, [
        "snapkv:W=3/steps=keydiff/every=2", "knorm/steps=h2o", "h2o/steps=h2o", "knorm/steps=knorm/every=2",
        "keydiff/recent=3/steps=snapkv:W=3:kernel=1/every=3", "snapkv:W=3/steps=snapkv:W=3/every=2",
        "expected-attention:N_sink=1:N_future=5/steps=knorm/every=2:excess=2",
        "random-tokens/steps=rkv:W=2:kernel=1/recent=2/every=1",
        "h2o/steps=keydiff", "snapkv:W=2/steps=morphkv:W=2/values=1", "snapkv:W=2/steps=h2o/block=3",
        "snapkv:W=3/steps=keydiff/every=2/diverse=0.5:signature=head",
    ]),
    Case("PO-STEP", 23, 2, range(3), lambda held, seed: 5 + seed, [
        "rkv:W=3:kernel=3:every=4/sink=0", "morphkv:W=2:fusion=max/sink=0", "snapkv:W=3/every=2",
    ]),
    Case("PO-TABLE-BUDGET", 20, 3, range(4), lambda held, seed: 8, [
        TABLE, f"{TABLE}/heads=adaptive:safeguard=0.2", "knorm/layers=table:shares=0.5_0_0.25", f"{TABLE}/block=4",
        "keydiff/recent=2/layers=table:shares=1_2_3_4_5_6",
    ]),
    Case("PO-THRESHOLD", 23, 2, range(4), lambda held, seed: 20, ["kvzap/threshold=-0.5/recent=3"]),
    Case("PO-FAST-KVZIP", 18, 2, range(4), lambda held, seed: 6, ["score=fast-kvzip/recent=2"]),
    # Budgets whose layers have sums that the heads cannot divide, and shares that blocks do not fill.
    Case("PO-COMPOSE", 24, 3, (1, 9, 17, 25, 33), lambda held, seed: (7, 8, 10, 11, 13)[seed // 8], [
        "snapkv:W=3/layers=global/heads=adaptive:safeguard=1of3", "snapkv:W=3/layers=global/heads=quota:safeguard=0.5",
        "kvzip:N_sink=1:N_recent=2:chunk=5/heads=adaptive:safeguard=0.5", "adakv:W=3:safeguard=0.5/block=4",
        "snapkv:W=3/layers=pyramid:beta=3/heads=quota:safeguard=0.2/block=3", "cake:W=3/heads=adaptive/sink=0",
        "adakv:W=3:safeguard=0.5/critical=0.5/block=4",
    ]),
]


@pytest.mark.parametrize(("case", "text"), [
    pytest.param(case, text, id=text, marks=pytest.mark.spec(case.item)) for case in CASES for text in case.texts
])
def test_kept_sets_are_those_of_the_oracle_of_parts(case: Case, text: str) -> None:
    """Check a prompt and, for a policy that decides in decode steps, the last tokens as decoded tokens too."""
    method = method_of(text)
    for seed in case.seeds:
        whole = drawn(seed, case.n, case.L, (2, 2))
        policy = method.reference(whole)
        B = case.B(int(policy.protection(case.n).sum()), seed)
        for steps in (0, STEPS) if method.decodes else (0,):
            inputs = replace(whole, steps=steps)
            wanted = method.brute.kept(inputs, B, **method.constants, **method.readings)
            kept = decided(policy, inputs, B)
            wanted = wanted * (len(kept) // len(wanted))  # The oracle has one set of positions for all layers.
            assert all(fits(*pair) for pair in zip(kept, wanted, strict=True)), (seed, steps, B)
    data = model_constants(text, whole)
    assert equal_parts(policy_from_text(text_of(policy, data), data), policy)
    assert ("/steps=" in policy.name) is ("/steps=" in text)


REFUSED: Mapping[str, Sequence[tuple[str, str]]] = {
    "PO-CHUNKS": [
        ("keydiff/chunks=0", "at least 1"), ("keydiff/chunks=4:gate=4", "below the 4 tokens of a chunk"),
        ("keydiff/chunks=4:gate=-1", "at least 0"), ("chunkkv/chunks=4", "a scorer of tokens"),
        ("h2o/every=none/chunks=4", "a scorer of tokens"),
        ("keydiff/every=16/chunks=4", "leave chunks= or the cadence out"),
        ("adakv/chunks=4", "use even"), ("snapkv/chunks=4/block=16", "single tokens"),
        ("streamingllm/sets=head/chunks=4", "use sets=layer"), ("snapkv/chunks=4/diverse=0.5", "their scores alone"),
    ],
    "PO-PIECES": [
        ("keydiff/pieces=0", "at least 1"), ("chunkkv/pieces=64", "a scorer of tokens"),
        ("streamingllm/pieces=64", "sets=layer"), ("kvzip/pieces=64", "a different scorer"),
        ("defensivekv/pieces=64", "a different scorer"), ("snapkv/block=16/pieces=64", "leave block= and crush= out"),
        ("kvcrush/pieces=64", "leave block= and crush= out"),
        ("keydiff/every=64/pieces=64", "leave pieces= or the cadence out"),
        ("pyramidkv/pieces=64", "layers=even"), ("cake/pieces=64", "layers=even"),
        ("crystalcache/pieces=64", "accepts no parts"), ("nestedkv/pieces=64:c=3", "not a constant"),
    ],
    "PO-LATER-SCORES": [
        ("snapkv/steps=keydiff", "add every=64"), ("snapkv/steps=tova", "each layer and KV head: type steps=h2o"),
        ("tova/steps=keydiff", "each layer: type steps=tova"),
        ("snapkv/steps=nothing", "the name of a scorer"), ("snapkv/steps=crystalcache", "the name of a scorer"),
        ("snapkv/steps=triattention", "the name of a scorer"),
        ("keydiff/steps=snapkv:W=8/every=4", "SinkAndRecent(0, 8)"),
        ("keydiff/steps=h2o-described/every=4", "scorer of h2o"),
        ("chunkkv/steps=h2o", "two scorers of single tokens"), ("snapkv/heads=adaptive/steps=h2o", "use even"),
        ("kvzip/steps=h2o", "read the prompt once"), ("snapkv/steps=keydiff:W=3/every=4", "not a constant"),
        ("snapkv/steps=keydiff/every=4/pieces=64", "leave pieces="),
    ],
    "PO-TABLE-BUDGET": [
        (f"knorm/layers=table:shares={shares}", "must be weights of at least 0")
        for shares in ("x", "1__2", "-1_2", "0_0", "1of0")
    ],
    "PO-KVZAP": [
        ("kvzap/every=4", "leave the cadence out"),
        ("kvzap/every=4/steps=knorm", "needs scorers that use no hidden states"),
    ],
    "PO-FAST-KVZIP": [("fast-kvzip/layers=even/every=4", "leave the cadence out")],
}


@pytest.mark.parametrize(("text", "way_out"), [
    pytest.param(*row, marks=pytest.mark.spec(item)) for item, rows in REFUSED.items() for row in rows
])
def test_a_part_that_does_not_fit_is_refused_when_the_policy_is_made(text: str, way_out: str) -> None:
    with pytest.raises(SpecError) as refused:
        make_policy(text, model_constants(text, drawn(0, 9)))
    assert way_out in refused.value.bound
    if (typed := way_out.partition("type steps=")[2]):
        assert make_policy(f"{text.partition('/')[0]}/steps={typed}", {}).cadence.every


@pytest.mark.parametrize(("text", "layerwise", "again", "rows"), [
    pytest.param("keydiff/chunks=4:gate=2", True, True, 0, marks=pytest.mark.spec("PO-CHUNKS")),
    pytest.param("snapkv:W=3/pieces=8", True, False, None, marks=pytest.mark.spec("PO-PIECES")),
    pytest.param("keydiff/pieces=8", True, False, 0, marks=pytest.mark.spec("PO-PIECES")),
    pytest.param("snapkv:W=5/steps=keydiff/every=4", True, True, 5, marks=pytest.mark.spec("PO-LATER-SCORES")),
    pytest.param("snapkv:W=5/steps=h2o", True, True, None, marks=pytest.mark.spec("PO-LATER-SCORES")),
    pytest.param(TABLE, True, True, 3, marks=pytest.mark.spec("PO-TABLE-BUDGET")),
    pytest.param("kvzap", True, False, 0, marks=pytest.mark.spec("PO-KVZAP")),
    pytest.param("fast-kvzip", False, False, 0, marks=pytest.mark.spec("PO-FAST-KVZIP")),
])
def test_what_a_policy_reads_and_decides(text: str, layerwise: bool, again: bool, rows: int | None) -> None:
    """Check whether layers decide alone, whether later turns decide again, and the number of queries."""
    policy = make_policy(text, model_constants(text, drawn(0, 9)))
    assert (is_layerwise(policy), decides_again(policy)) == (layerwise, again)
    assert policy.scorer.needs.query_rows == rows


_scores = st.lists(st.integers(-6, 9).map(float), min_size=1, max_size=24)


@pytest.mark.spec("PO-CHUNKS")
@fewer_examples
@given(row=_scores, seed=st.integers(0, 99), c=st.integers(1, 7), gate=st.integers(0, 6), more=st.integers(0, 24))
def test_choices_are_those_of_the_oracle(row: list[float], seed: int, c: int, gate: int, more: int) -> None:
    protected = np.random.default_rng(seed).random(len(row)) < 0.2
    B = int(protected.sum()) + more
    actual = best_chunks(np.array(row), B, protected, c, min(gate, c - 1)).tolist()
    assert actual == chunk_sets(
        [None if pin else x for x, pin in zip(row, protected, strict=True)], B, c, min(gate, c - 1))
    assert len(actual) == min(B, len(row))


@pytest.mark.spec("PO-CHUNKS")
@fewer_examples
@given(_scores)
def test_the_entropy_is_between_a_single_token_and_equal_tokens(row: list[float]) -> None:
    actual = chunk_entropy(np.array(row))
    assert close("PO-CHUNKS", [actual], [entropy(row)])
    assert 0 <= actual <= 1
    assert actual == chunk_entropy(np.array(row[::-1]))


@pytest.mark.spec("PO-CHUNKS")
def test_the_entropy_of_known_scores() -> None:
    assert chunk_entropy(np.array([3.0, 3.0, 3.0])) == 1
    assert chunk_entropy(np.array([0.0, 7.0, 0.0])) == 0
    assert chunk_entropy(np.array([-1.0, -1.0])) == 0  # both are raised to 0
    assert close("PO-CHUNKS", [chunk_entropy(np.array([-2.0, 0.0, 0.0]))], [math.log(2) / math.log(3)])


@pytest.mark.spec("PO-CHUNKS")
def test_heads_of_a_layer_keep_the_same_chunks() -> None:
    policy, of_layers = in_chunks(keydiff(), 4, 2), make_policy("tova/every=none/chunks=4", {}).scorer
    assert policy.granularity is Granularity.LAYER
    assert [scorer.by_head for scorer in (policy.scorer, of_layers) if isinstance(scorer, HeadSums)] == [True, False]


def piece(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Return the tokens of a piece as a prompt."""
    layers = [replace(view, q=view.q[:, start:stop], k=view.k[:, start:stop], v=np.asarray(view.v)[:, start:stop])
              for view in inputs.layers]
    return replace(inputs, layers=layers, token_ids=inputs.token_ids[start:stop])


@pytest.mark.spec("PO-PIECES")
@fewer_examples
@given(
    protected=st.lists(st.booleans(), min_size=1, max_size=30), c=st.integers(1, 12), more=st.integers(0, 30),
)
def test_shares_of_pieces_have_the_protected_tokens_and_the_sum_of_the_share(
    protected: list[bool], c: int, more: int,
) -> None:
    mask = np.array(protected)
    b = int(mask.sum()) + more
    shares = piece_shares(b, mask, c)
    held = np.add.reduceat(mask.astype(int), np.arange(0, len(mask), c))
    sizes = np.minimum(c, len(mask) - np.arange(0, len(mask), c))
    assert shares.sum() == min(b, len(mask))
    assert (held <= shares).all()
    assert (shares <= sizes).all()
    exact = (shares.sum() - held.sum()) * (sizes - held) / max(1, (sizes - held).sum())
    assert (abs(shares - held - exact) < 1).all()


@pytest.mark.spec("PO-PIECES")
@pytest.mark.parametrize("text", [
    "snapkv:W=3", "keydiff/recent=2/sink=1", "h2o/every=none/select=half", "lagkv:lag=4:N_sink=1",
])
def test_a_piece_keeps_what_it_keeps_as_a_whole_prompt(text: str) -> None:
    whole, pieces = make_policy(text, {}), make_policy(f"{text}/pieces=8", {})
    for seed in range(4):
        inputs = drawn(seed, 24, 2, (2, 2))
        wanted = [decided(whole, piece(inputs, at, at + 8), 5) for at in (0, 8, 16)]
        actual = decided(pieces, inputs, 15)
        assert actual == [
            [8 * at + i for at, kept in enumerate(parts) for i in kept] for parts in zip(*wanted, strict=True)
        ]


@pytest.mark.spec("PO-PIECES")
@pytest.mark.parametrize("budget", [1, 5])
def test_a_small_budget_is_raised_to_the_protected_tokens_of_all_pieces(budget: int) -> None:
    kept = decided(make_policy("snapkv:W=2/pieces=8", {}), drawn(1, 23, 2, (2, 1)), budget)
    assert kept == [[6, 7, 14, 15, 21, 22]] * 4


@pytest.mark.spec("PO-LATER-SCORES")
def test_steps_have_the_cadence_and_the_queries_of_their_scorer() -> None:
    assert isinstance(make_policy("snapkv:W=5/steps=keydiff/every=4", {}).scorer, FirstAndLater)
    assert make_policy("snapkv:W=5/steps=h2o", {}).cadence.every == 1
    assert make_policy("snapkv:W=5/steps=h2o/every=7", {}).cadence.every == 7
    window = make_policy("keydiff/recent=8/steps=snapkv:W=8/every=4", {}).scorer
    assert isinstance(window, FirstAndLater)
    assert isinstance(window.later, QueryCache)
    both = make_policy("snapkv/steps=rkv:W=2/every=4", {"W": 8}).scorer  # W of snapkv
    assert isinstance(both, FirstAndLater)
    assert isinstance(both.later, QueryCache)
    assert both.later.W == 2


@pytest.mark.spec("PO-LATER-SCORES")
def test_each_scorer_sees_the_queries_that_it_needs() -> None:
    rows = list[int]()

    def score(view: LayerView) -> Any:
        rows.append(view.q.shape[1])
        return view.k[:, :, 0]

    h2o = make_policy("h2o", {})
    scorer = with_later_scores(LayerScorer(Needs("all", 3), score), h2o.scorer, "h2o")
    decided(replace(h2o, scorer=scorer), drawn(2, 23, 2, (2, 2)), 9)
    assert rows == [3, 3]


@pytest.mark.spec("PO-TABLE-BUDGET")
@fewer_examples
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), heads=st.integers(1, 3),
    n=st.integers(1, 30), W=st.integers(0, 5), B=st.integers(0, 40), per_head=st.booleans(),
)
def test_shares_are_those_of_the_oracle(
    weights: list[int], heads: int, n: int, W: int, B: int, per_head: bool,
) -> None:
    L, words = len(weights), [str(w) for w in weights for _ in range(heads if per_head else 1)]
    scores = Scores(np.zeros((L * heads, 1)), np.array([0, n]), heads=heads)
    total, W = max(B, W) * L * heads, min(W, n)
    actual = Table(W, "_".join(words))(total, scores)
    assert actual.tolist() == table_shares("_".join(words), total, W, L, heads, n)
    assert actual.sum() == min(total, n * L * heads)
    assert W <= actual.min() <= actual.max() <= n


@pytest.mark.spec("PO-TABLE-BUDGET")
def test_a_layer_alone_has_the_share_of_the_table() -> None:
    policy = make_policy(TABLE, {})
    alone = [policy_of_layer(policy, at, 3).budgets(16, Scores(np.zeros((2, 20)), np.arange(21), heads=2))
             for at in range(3)]
    whole = policy.budgets(48, Scores(np.zeros((6, 20)), np.arange(21), heads=2))
    assert np.concatenate(alone).tolist() == whole.tolist() == [11, 11, 8, 8, 5, 5]


@pytest.mark.spec("PO-TABLE-BUDGET")
def test_a_table_for_a_different_model_is_refused() -> None:
    with pytest.raises(SpecError, match="shares = '2 weights': must be 3, one for each layer, or 6, one for each kept"):
        decided(make_policy("knorm/layers=table:shares=1_2", {}), drawn(0, 9, 3, (2, 1)), 4)


@pytest.mark.spec("PO-SIMLAYERKV")
@pytest.mark.parametrize("threshold", [0.2, 0.4, 0.6, 2.0])
def test_lazy_layers_are_those_of_the_brute_force(threshold: float) -> None:
    (brute,) = (one for one in brutes() if one.name == "simlayerkv")
    lazy = 0
    for seed in range(8):
        inputs = drawn(seed, 8 + seed, 3, (1 + seed % 2, 1 + seed // 2 % 2))
        for B in (6, inputs.n):
            actual = decided(simlayerkv(threshold, 1, 3), inputs, B)
            assert [sorted(positions) for positions in actual] == brute.kept(inputs, B, threshold, 1, 3)
        lazy += sum(len(positions) == 4 for positions in actual)
    assert (lazy > 0) == (threshold < 1)


@pytest.mark.spec("PO-SIMLAYERKV")
def test_the_mass_is_the_attention_of_the_last_query() -> None:
    (view,) = drawn(3, 10, 1, (1, 2)).layers
    masses = lazy_mass(replace(view, q=np.zeros_like(view.q)), 1, 2), lazy_mass(view, 0, 10)
    assert scores_agree(masses, [0.3, 1.0])
    for wrong, argument in (((float("nan"),), "threshold"), ((0.9, -1), "N_sink"), ((0.9, 4, 0), "N_recent")):
        with pytest.raises(SpecError, match=argument):
            simlayerkv(*wrong)
