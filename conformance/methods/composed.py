"""Oracle of compositions: kept sets of the text of a policy, from brute forces of the parts.

The syntax of texts, the order of the parts, and the rules for layers, heads and blocks follow PO-COMPOSE. No code is
shared with the reference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from inspect import signature
from typing import Any

from conformance.methods import brutes
from conformance.methods import policies as oracle
from conformance.methods.brute import SLOW, Brute, Parts, plain
from conformance.methods.cake import preferred_shares
from conformance.methods.chunks import chunk_sets, chunked, head_sums
from conformance.methods.composed_text import (
    CONSTANT,
    LENGTHS,
    Text,
    Values,
    complete_parts,
    constants_of,
    fields_of_parameters,
    number,
    parsed,
)
from conformance.methods.kvzip import global_shares
from conformance.methods.pieces import joined, runs
from conformance.methods.policies import Score
from conformance.methods.tables import table_shares
from conformance.methods.weighed import output_sizes, two_stages
from conformance.oracles.boxes import dot, fsum, largest, leaves, sqrt
from conformance.oracles.choices import Answer, surely
from conformance.strategies.policy_inputs import Inputs, Kept


@dataclass(frozen=True)
class Composed:
    """A text with constants, on inputs: the data of all decisions.

    Attributes:
        parts: parts of the policy that has the scorer.
        part_values: the parts, as `complete_parts` returns them.
        constants: constants and readings of the scorer.
    """

    parts: Parts
    part_values: Values
    constants: Mapping[str, Any]
    inputs: Inputs
    B: int

    def value(self, part: str, otherwise: int = 0) -> int:
        """Return the number that a part has as its value."""
        return otherwise if part not in self.part_values else int(number(self.part_values[part][""]))

    @property
    def size(self) -> int:
        return self.value("sink") + self.value("recent")

    def pinned(self, position: int, seen: int) -> bool:
        first = max(self.value("sink"), self.value("values"))
        return position < first or position >= seen - self.value("recent")

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of the scorer with the constants that the function has."""
        taken = signature(function).parameters
        free = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        return function(*given, **{k: v for k, v in self.constants.items() if free or k in taken})

    def rows(self, inputs: Inputs) -> list[Score]:
        """Return the scores of all kept sets at the end of a prompt."""
        if self.parts.rows is not None:
            rows, L = list(self.call(self.parts.rows, inputs, self.B)), len(inputs.layers)
            sets = {"layer": L, "head": L * inputs.H_kv}.get(self.part_values.get("sets", {"": ""})[""], 1)
            return rows * max(1, sets // len(rows))
        assert self.parts.layer is not None
        return [row for view in inputs.layers for row in self.call(self.parts.layer, plain(view))]

    @cached_property
    def values(self) -> list[Any]:
        """Return the values of each layer and KV head."""
        return [head for view in self.inputs.layers for head in leaves(view.v)]

    @cached_property
    def signatures(self) -> list[list[Sequence[Any]]]:
        """Return the signatures of all tokens, for the model, each layer or each layer and KV head."""
        heads, mode = self.values, self.part_values["diverse"]["signature"]
        H = self.inputs.H_kv
        parts = {"flat": [heads], "layer": [heads[at : at + H] for at in range(0, len(heads), H)],
                 "head": [[head] for head in heads]}[mode]
        return [[unit(means([head[i] for head in part])) for i in range(self.inputs.n)] for part in parts]


def means(vectors: Sequence[Any]) -> list[Any]:
    return [fsum(v[c] for v in vectors) / len(vectors) for c in range(len(vectors[0]))]


def unit(u: Sequence[Any]) -> list[Any]:
    length = sqrt(dot(u, u)) + 1e-8
    return [x / length for x in u]


def composed(composition: Text, host: Brute, inputs: Inputs, B: int, **constants: Any) -> Kept:
    """Return the kept sets of a text after the prompt and the decode steps of the inputs."""
    assert host.parts is not None
    known = {**host.published, **fields_of_parameters(constants), **constants}
    values = complete_values(composition, host.parts, known)
    given = Composed(host.parts, values, constants, inputs, B)
    given = replace(given, B=raised(given))
    prompt = inputs.n - inputs.steps
    rows = by_piece(given) if "pieces" in values else given.rows(until(inputs, prompt))
    kept = decide(given, rows, [range(prompt)] * len(rows), prompt)
    return after_steps(given, kept, rows, prompt) if inputs.steps else kept


@cache
def composed_brute(name: str) -> Brute:
    """Return the oracle of a text without constants of the scorer: a brute force made of the parts.

    The constants of the oracle are those of the scorer and those in the other parts of the named policy.
    """
    composition = parsed(name)
    (host,) = (one for one in brutes() if one.name == composition.name)
    assert host.parts is not None
    score = signature(host.parts.layer or host.parts.rows or composed).parameters
    readings = {key: options for key, options in host.readings.items() if key in score}
    slips = {key: options for key, options in host.slips.items() if key in score}
    options = {part: words[""] for part, words in complete_values(composition, host.parts, {}).items()}
    words = set(CONSTANT.findall(host.parts.text))
    added = {key: value for key, value in host.published.items() if ("", key) in words and value is not None}
    scored_again = host if "steps" not in options else _brute(options["steps"])
    assert scored_again.parts is not None
    return replace(
        host, item="PO-COMPOSE", name=name, small={**host.small, **added}, kept=partial(composed, composition, host),
        readings=readings, slips=slips, scored=False, longest=min(host.longest, SLOW),
        lengths={key: int(options[part]) for part, key in LENGTHS.items() if options.get(part, "").isdigit()},
        decoded=options.get("every", "none") != "none" and scored_again.parts.layer is not None
        and not host.name.startswith("triattention"),  # calibrated with all tokens of the inputs in tests
    )


def _brute(name: str) -> Brute:
    (brute,) = (one for one in brutes() if one.name == name)
    return brute


def complete_values(composition: Text, parts: Parts, constants: Mapping[str, Any]) -> Values:
    """Return the parts of a text. If the text has no `every`, the scorer of decode steps has its cadence."""
    values = complete_parts(composition, parts, constants)
    if "steps" in values and "every" not in composition.parts:
        later = _brute(values["steps"][""])
        assert later.parts is not None
        known = {**later.published, **constants_of(values["steps"])}
        return {**values, **{part: words for part, words in complete_parts(
            Text(later.name, False, {}), later.parts, known).items() if part == "every"}}
    return values


def later_of(given: Composed) -> Composed:
    """Return the data of the scorer that scores decode steps."""
    if "steps" not in given.part_values:
        return given
    brute, words = _brute(given.part_values["steps"][""]), given.part_values["steps"]
    assert brute.parts is not None
    defaults = {key: options[0] for key, options in brute.readings.items()}
    return replace(given, parts=brute.parts, constants={**brute.published, **defaults, **constants_of(words)})


def raised(given: Composed) -> int:
    """Return the budget, raised to the smallest budget of the policy."""
    values, least = given.part_values, given.value("block")
    if "crush" in values:
        least = int(values["crush"]["block"])
    floor = values.get("floor", {"": "0"})[""]
    if floor == "none":
        return max(given.B, least)
    if "pieces" in values:
        sizes = [len(run) for run in runs(given.inputs.n, given.value("pieces"))]
        least = sum(given.pinned(at, size) for size in sizes for at in range(size))
    return max(given.B, given.size + given.value("values"), int(floor), least)


def by_piece(given: Composed) -> list[Score]:
    """Return the scores of all kept sets, each piece scored as a whole prompt."""
    parts = [given.rows(given.inputs.cut(run)) for run in runs(given.inputs.n, given.value("pieces"))]
    return [[x for part in of_set for x in part] for of_set in zip(*parts, strict=True)]


def in_pieces(
    given: Composed, rows: Sequence[Score], free: Sequence[Score], shares: Sequence[int], live: Sequence[Sequence[int]],
) -> Kept:
    """Return the tokens that each set keeps of each piece, as the other parts choose them in the piece alone.

    A piece keeps its protected tokens. The rest of the set is divided in proportion to unprotected tokens.
    """
    result = [Answer([]) for _ in rows]
    pieces = runs(given.inputs.n, given.value("pieces"))
    held = [sum(free[0][i] is None for i in run) for run in pieces]
    open_ = [len(run) - pinned for run, pinned in zip(pieces, held, strict=True)]
    of_sets = [oracle.whole([Fraction(min(b - sum(held), sum(open_)) * x, sum(open_) or 1) for x in open_])
               for b in shares]
    for at, run in enumerate(pieces):
        part = replace(given, inputs=given.inputs.cut(run))
        inside = selected_sets(
            part, [row[run.start : run.stop] for row in rows], [row[run.start : run.stop] for row in free],
            [held[at] + scores[at] for scores in of_sets], [range(len(run)) for _ in rows],
        )
        result = [joined(known, kept, run.start) for known, kept in zip(result, inside, strict=True)]
    return list(result)


def until(inputs: Inputs, n: int) -> Inputs:
    """Return the first n tokens of the inputs."""
    if n == inputs.n:
        return inputs
    layers = [
        replace(x, q=x.q[:, :n], k=x.k[:, :n], v=None if x.v is None else x.v[:, :n]) for x in inputs.layers
    ]
    return replace(inputs, layers=layers, token_ids=inputs.token_ids[:n], steps=0)


def decide(given: Composed, rows: Sequence[Score], live: Sequence[Sequence[int]], seen: int) -> Kept:
    """Return the kept positions of all sets, from the scores of the stored tokens. All sets store as many tokens."""
    L = len(given.inputs.layers)
    heads = max(1, len(rows) // L)
    held = [[given.pinned(p, seen) for p in live_set] for live_set in live]
    if "pieces" in given.part_values:
        pieces = runs(seen, given.value("pieces"))
        held = [[given.pinned(p - run[0], len(run)) for run in pieces for p in run]] * len(rows)
    if "values" in given.part_values:
        rows = [[x if x is None else x * fsum(map(abs, given.values[g][p])) for x, p in zip(row, live[g], strict=True)]
                for g, row in enumerate(rows)]
    if "chunks" in given.part_values:
        rows, heads = head_sums(rows, heads), 1
    free = [
        [None if pin else x for x, pin in zip(row, pins, strict=True)] for row, pins in zip(rows, held, strict=False)
    ]
    shares = shares_of(given, free, heads)
    chosen = in_pieces if "pieces" in given.part_values else selected_sets
    sets = chosen(given, rows, free, shares, live)
    return [oracle.placed(kept if isinstance(kept, Answer) else Answer(kept), live_set)
            for kept, live_set in zip(sets, live, strict=False)]


def selected_sets(
    given: Composed, rows: Sequence[Score], free: Sequence[Score], shares: Sequence[int], live: Sequence[Sequence[int]],
) -> Kept:
    """Return the indices of the stored tokens that each set keeps. `free` has None for the protected tokens."""
    if "crush" in given.part_values:
        crush, result = given.part_values["crush"], list[list[int]]()
        heads = max(1, len(rows) // len(given.inputs.layers))
        for at in range(0, len(free), heads):
            part = slice(at, at + heads)
            result += oracle.crushed(free[part], int(crush["block"]), shares[part], number(crush[""]), crush["anchor"])
        return result
    return [selected(given, g, free, rows[g], shares[g], live[g]) for g in range(len(free))]


def shares_of(given: Composed, rows: Sequence[Score], heads: int) -> list[int]:
    """Return the number of tokens of each set, by the rule for layers and then the rule for the heads of a layer."""
    values, B, n = given.part_values, given.B, len(rows[0])
    if "threshold" in values:
        tau = float(values["threshold"][""])
        return [min(B, sum(x is None or x > tau for x in row)) for row in rows]
    L, rule = len(rows) // heads, values.get("layers", {"": "even"})[""]
    by_layer: dict[str, Callable[[], list[int]]] = {
        "even": lambda: [B] * len(rows), "full": lambda: [n] * len(rows), "global": lambda: global_shares(rows, B),
        "pyramid": lambda: [share for share in oracle.pyramid_shares(
            Fraction(B), min(given.size, n), L, n, int(values["layers"]["beta"])) for _ in range(heads)],
        "table": lambda: table_shares(values["layers"]["shares"], B * len(rows), min(given.size, n), L, heads, n),
        "preference": lambda: [share for share in preferred_shares([
            given.call(given.parts.preference, plain(view)) for view in given.inputs.layers  # type: ignore[arg-type]
        ], B, given.size, n) for _ in range(heads)],
    }
    shares, kind = by_layer[rule](), values.get("heads", {"": "even"})[""]
    if kind == "even":
        return shares
    divide = {"adaptive": oracle.adaptive_parts, "quota": oracle.competition_parts}[kind]
    safeguard, result = number(values["heads"]["safeguard"]), list[int]()
    for at in range(0, len(rows), heads):
        result += divide(rows[at : at + heads], sum(shares[at : at + heads]), safeguard)
    return result


def selected(
    given: Composed, g: int, rows: Sequence[Score], scores: Score, share: int, live: Sequence[int],
) -> list[int]:
    """Return the indices of the stored tokens that set g keeps. `rows` have None for the protected tokens."""
    values, row, n = given.part_values, rows[g], len(rows[g])
    if given.parts.chunks:
        return chunked(scores, row, int(given.constants["c"]), share)
    if values.get("select", {"": "top"})[""] == "half":
        row = [None if at >= n - share // 2 else x for at, x in enumerate(row)]
    if "critical" in values:
        second = [None if x is None else (x + 1e-4) * size for x, size in zip(row, _outputs(given, g), strict=True)]
        of_first = number(values["critical"][""])
        if "block" in values:
            return oracle.two_stages(row, second, given.value("block"), share, of_first)
        return two_stages(row, second, share, of_first)
    if "chunks" in values:
        return chunk_sets(row, share, given.value("chunks"), int(values["chunks"]["gate"]))
    if "diverse" in values:
        return diverse(given, Fraction(g, len(rows)), row, share, live)
    return oracle.best_blocks(row, given.value("block"), share) if "block" in values else oracle.top(row, share)


def _outputs(given: Composed, g: int) -> Sequence[Any]:
    layer, head = divmod(g, given.inputs.H_kv)
    return output_sizes(plain(given.inputs.layers[layer]), leaves(given.inputs.W_o[layer]))[head]


def diverse(given: Composed, at: Fraction, row: Score, share: int, live: Sequence[int]) -> list[int]:
    """Return the tokens that set-conditioned selection keeps (DV-POLICY, DV-VARIANT-B). Set g of G has at = g / G."""
    values, known = given.part_values["diverse"], given.signatures
    lam, V = float(values[""]), [known[int(at * len(known))][p] for p in live]
    if values["rule"] == "variant_b":
        direction = unit(means(V))
        return oracle.top([x if x is None else x + lam * dot(V[i], direction) for i, x in enumerate(row)], share)
    kept = [i for i, x in enumerate(row) if x is None]
    if lam == 0:
        return oracle.top(row, share)
    while len(kept) < min(share, len(row)):
        gains = {i: x - lam * largest([0.0, *(dot(V[i], V[j]) for j in kept)])
                 for i, x in enumerate(row) if i not in kept and x is not None}
        kept.append(max(gains, key=lambda i: (gains[i], -i)))
    return sorted(kept)


def after_steps(given: Composed, kept: Kept, rows: Sequence[Score], prompt: int) -> Kept:
    """Return the kept sets after the decode steps: a decision after each step that is due (PO-STEP)."""
    every, excess = (int(given.part_values["every"][name]) for name in ("", "excess"))
    later = later_of(given)
    if later is not given and later.parts.carried:
        rows = later.rows(until(given.inputs, prompt))
    sums = [dict(enumerate(row)) for row in rows]
    for at in range(prompt, given.inputs.n):
        live = [[*surely(one), at] for one in kept]
        if later.parts.carried:
            sums = [_added(given, g, at, one, sums[g]) for g, one in enumerate(live)]
        if (at + 1) % every or len(live[0]) - given.B < excess:
            kept = live
            continue
        carried = later.parts.carried
        again = [[sums[g][p] for p in one] if carried else _again(later, g, at, one) for g, one in enumerate(live)]
        kept = decide(given, again, live, at + 1)
    return kept


def _stored(given: Composed, g: int, at: int, live: Sequence[int]) -> oracle.Layer:
    """Return the layer of a set after a token: the queries so far, and the stored keys and values."""
    L, H_kv = len(given.inputs.layers), given.inputs.H_kv
    by_head = len(_shape(given)) > L or H_kv == 1
    layer = plain(given.inputs.layers[g // H_kv if by_head else g])
    part = oracle.with_heads(layer, oracle.groups(layer)[g % H_kv]) if by_head else layer
    heads = [g % H_kv] if by_head else range(H_kv)
    cached = {name: [oracle.at_places(layer[name][h], live) for h in heads] for name in ("k", "v")}
    return {**part, "q": [rows[: at + 1] for rows in part["q"]], **cached}


def _shape(given: Composed) -> list[Score]:
    """Return the scores of one token, to count the kept sets."""
    return given.rows(until(given.inputs, 1))


def _again(given: Composed, g: int, at: int, live: Sequence[int]) -> Score:
    (row,) = given.call(given.parts.layer, _stored(given, g, at, live))  # type: ignore[arg-type]
    return list(row)


def _added(given: Composed, g: int, at: int, live: Sequence[int], sums: Mapping[int, Any]) -> dict[int, Any]:
    """Return the sums of attention with the attention of a new query."""
    stored = _stored(given, g, at, live)
    rows = oracle.last_rows(stored, 1)
    new = [fsum(column) for column in zip(*(head[-1] for head in rows), strict=True)]
    return {p: sums[p] + x if p in sums else x for p, x in zip(live, new, strict=True)}


