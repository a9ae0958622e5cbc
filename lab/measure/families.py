"""Test a tiny model of each causal family of transformers: `python -m lab.measure.families`.

The model is compared with the oracle in each column of the table. The command exits with 1 if a family fails the tests
without a stated reason.
"""

import argparse
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, logging

from conformance.cache_suite.oracle import Masked
from conformance.paths import DOCS
from experiments.studies.report import progress_bar
from lab import pages
from lab.measure.family_models import VOCABULARY, Family, NotBuilt, families
from models_integration import (
    CrystalCache,
    FullCache,
    NamedPolicy,
    RetainedCache,
    RetentionPolicy,
    Session,
    StreamingLLM,
    load_cache,
    save_cache,
)
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE
from spec.errors import SpecError
from spec.parameters import TINY

PAGE = DOCS / "results" / "families.md"
BOUND = 1e-5
"""Largest difference of logits, relative to the largest logit. The page states it."""
VISIBLE_EFFECT = 1e-3
PROMPT, STEPS, TURN, PADDING = 48, 20, 12, 7

POLICIES: dict[str, Callable[[], RetentionPolicy]] = {
    "model": lambda: StreamingLLM(0.4, N_sink=2),
    "reads attention": lambda: CrystalCache(0.5, frozenset(range(3, VOCABULARY, 9)), TINY, backend="numpy"),
    "per layer": lambda: NamedPolicy("chunkkv", 0.4, c=3, W=4),
    "per head": lambda: NamedPolicy("keydiff", 0.4),
}
"""Policies by the parts of the cache for which they keep a set, and by whether they read attention.

The first and the last read no attention. Each reads a prompt and 20 steps.
"""

Comparison = tuple[float, float]
"""Largest difference from the oracle, and the change of the last step's logits by eviction."""


@dataclass(frozen=True)
class Outcome:
    """Result of a family in one column."""

    family: str
    policy: str
    """Name of the column."""
    verdict: str
    """One of "holds", "refused", "fails" and "not built"."""
    detail: str
    """Reason for the verdict, if there is one."""
    worst: float = 0.0
    """Largest relative difference from the oracle."""


def outcomes(family: Family) -> Iterator[Outcome]:
    """Yield the outcome of each column."""
    try:
        model = family.build()
    except NotBuilt as error:
        yield from (Outcome(family.name, column, "not built", str(error)) for column in COLUMNS)
        return
    for column, make in POLICIES.items():
        yield _outcome(family.name, column, model, make())
    for column, compare in PARTS.items():
        yield _part(family.name, column, model, compare)


def _outcome(family: str, name: str, model: PreTrainedModel, policy: RetentionPolicy) -> Outcome:
    """Return the outcome under a policy.

    A `SpecError` about the model at entry is a refusal. Any different error is a failure.
    """
    try:
        session = policy(model)
    except SpecError as error:
        verdict = "refused" if error.argument == "model" else "fails"
        return Outcome(family, name, verdict, error.bound if verdict == "refused" else str(error))
    except Exception as error:
        return Outcome(family, name, "fails", f"{type(error).__name__} at entry: {error}")
    try:
        return _judged(family, name, _compared(model, session, [PROMPT, *[1] * STEPS]))
    except Exception as error:
        return Outcome(family, name, "fails", f"{type(error).__name__}: {error}")


def _part(family: str, name: str, model: PreTrainedModel, compare: Callable[[PreTrainedModel], Comparison]) -> Outcome:
    """Return the outcome of a part of a session. The reason for a refusal may be known only when the part begins."""
    try:
        describe(model)
        return _judged(family, name, compare(model))
    except SpecError as error:
        if error.argument in ("model", "attention_mask"):
            return Outcome(family, name, "refused", error.bound)
        return Outcome(family, name, "fails", str(error))
    except Exception as error:
        return Outcome(family, name, "fails", f"{type(error).__name__}: {error}")


def _judged(family: str, name: str, compared: Comparison) -> Outcome:
    """Return the outcome of a comparison.

    A difference that is not finite, or an eviction without effect, is a failure.
    """
    worst, effect = compared
    if not worst <= BOUND:
        return Outcome(family, name, "fails", f"is off by {worst:.1e}", worst)
    if not effect > VISIBLE_EFFECT:
        return Outcome(family, name, "fails", f"eviction changes no more than {effect:.1e}: this says nothing", worst)
    return Outcome(family, name, "holds", "", worst)


def _ids(tokens: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(3))


def _compared(model: PreTrainedModel, session: Session, pieces: Sequence[int], in_steps: bool = False) -> Comparison:
    """Read pieces under a policy, and the same pieces with the masked model and the full cache."""
    masked, full, worst = Masked(model), Masked(model), 0.0
    with session, torch.no_grad():
        cache = RetainedCache(model.config)
        for part in torch.split(_ids(sum(pieces)), list(pieces), dim=1):
            actual = model(input_ids=part, **{CACHE: cache}, use_cache=True).logits
            expected, untouched = masked.read(part), full.read(part)
            worst = max(worst, _relative(actual, expected))
            if part.shape[1] > 1 or in_steps:
                masked.keep(_kept(cache))
    return worst, _relative(untouched, expected)


def _turn(model: PreTrainedModel) -> Comparison:
    """Compare a turn after a step with the oracle, and a full cache read in pieces with one stateless forward pass."""
    pieces = [PROMPT, 1, TURN, 1]
    worst, effect = _compared(model, POLICIES["model"]()(model), pieces)
    ids, cache = _ids(sum(pieces)), RetainedCache(model.config)
    with FullCache()(model), torch.no_grad():
        for part in torch.split(ids, pieces, dim=1):
            last = model(input_ids=part, **{CACHE: cache}, use_cache=True).logits
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
    return max(worst, _relative(last, whole)), effect


def _padded(model: PreTrainedModel) -> Comparison:
    """Compare two rows, one with padding on its left, with masked models that have the same padding."""
    ids = _ids(PROMPT + 5).expand(2, -1)
    rows = [Masked(model, padding=PADDING), Masked(model)]
    mask, worst = torch.ones(2, PROMPT, dtype=torch.int64), 0.0
    mask[0, :PADDING] = 0
    with StreamingLLM(0.4, N_sink=2)(model), torch.no_grad():
        cache = RetainedCache(model.config)
        for part in torch.split(ids, [PROMPT, 1, 1, 1, 1, 1], dim=1):
            given = {"attention_mask": mask} if part.shape[1] > 1 else {}
            actual = model(input_ids=part, **{CACHE: cache}, use_cache=True, **given).logits
            for row, masked in enumerate(rows):
                expected, padding = masked.read(part[:1]), masked.padding if given else 0
                worst = max(worst, _relative(actual[row : row + 1, padding:], expected[:, padding:]))
                if given:
                    masked.keep(_kept(cache, row))
    return worst, float("inf")


def _saved(model: PreTrainedModel) -> Comparison:
    """Compare steps after a saved and loaded cache with steps of the original cache, bit for bit."""
    cache, worst = RetainedCache(model.config), 0.0
    with POLICIES["model"]()(model), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model(input_ids=_ids(PROMPT), **{CACHE: cache}, use_cache=True)
        save_cache(cache, model, Path(folder) / "cache")
        loaded = load_cache(Path(folder) / "cache", model)
        for step in torch.split(_ids(4), 1, dim=1):
            actual, expected = (model(input_ids=step, **{CACHE: one}, use_cache=True).logits for one in (loaded, cache))
            worst = max(worst, _relative(actual, expected))
    return worst, float("inf")


def _decoded(model: PreTrainedModel) -> Comparison:
    """Compare decode steps under a policy that evicts in each step."""
    return _compared(model, NamedPolicy("tova", 16)(model), [PROMPT, *[1] * STEPS], in_steps=True)


PARTS: dict[str, Callable[[PreTrainedModel], Comparison]] = {
    "turn": _turn, "padded batch": _padded, "save": _saved, "decode": _decoded,
}
"""Tests of a session besides a prompt and steps, under a policy that keeps one set for the model."""

COLUMNS = (*POLICIES, *PARTS)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """Return the relative difference, or infinity if a value is not finite."""
    n = min(actual.shape[1], expected.shape[1])
    off = (actual[:, -n:] - expected[:, -n:]).abs().max() / expected.abs().max()
    return float(off) if bool(torch.isfinite(actual).all()) and bool(torch.isfinite(off)) else float("inf")


def _kept(cache: RetainedCache, row: int = 0) -> list[list[list[int]]]:
    """Return the positions that the cache stores, by full-attention layer and head."""
    return [
        [layer.head_positions(row, head).tolist() for head in range(layer.heads)] for layer in cache.full_layers
    ]


Rows = dict[str, dict[str, Outcome]]
"""Outcomes by family, then by column."""

USED = (
    "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next", "llama", "llama4", "mistral", "ministral3", "mixtral",
    "gemma3", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gpt_oss", "deepseek_v2", "deepseek_v32",
    "kimi_linear", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "phi3", "nemotron_h", "granite",
    "granitemoehybrid", "lfm2", "lfm2_moe", "olmo3", "olmo_hybrid", "smollm3", "falcon_h1", "minimax_m2", "gpt2", "opt",
)
"""Families that people run, chosen by hand. They come first in the table."""

_NECESSARY = {
    "nothing to evict": "yes: no part of the cache grows",
    "ALiBi is not served": "yes: the model would need its bias at the kept positions",
    "the attention depends on the distance between cache slots": "yes, as for ALiBi",
    "its indexer takes positions from slots": "yes: eviction moves tokens to other slots",
    "the attention of the model is not causal": "yes: later tokens change what earlier ones store",
    "the cache stores one latent for all heads (MLA)": "yes: no head has keys of its own to evict",
    "the recurrent layers lose the state": "yes: transformers computes it wrongly",
    "the decoder also numbers padding positions": "yes: the model counts padding",
}
"""Reasons for which kvspec must refuse a family, by their first words. Other refusals are missing features."""


def by_family(outcomes: Iterable[Outcome]) -> Rows:
    """Return the outcomes by family, in the order of USED, then by name."""
    rows: Rows = defaultdict(dict)
    for outcome in sorted(outcomes, key=lambda one: (USED.index(one.family) if one.family in USED else len(USED))):
        rows[outcome.family][outcome.policy] = outcome
    return rows


def cell(outcome: Outcome) -> str:
    """Return one cell of a Markdown table."""
    if outcome.verdict == "holds":
        return f"holds ({outcome.worst:.0e})"
    return f"{outcome.verdict} ({outcome.detail})".replace("|", "/").replace("\n", " ")


def cells(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all families in all columns."""
    rows = by_family(outcomes).items()
    return pages.table(
        ["family", *COLUMNS], [[family, *(cell(verdicts[column]) for column in COLUMNS)] for family, verdicts in rows],
    )


VERDICTS = ("holds", "refused", "fails", "not built")


def counts(outcomes: Sequence[Outcome]) -> str:
    """Return the table of sums by column."""
    body = []
    for column in COLUMNS:
        of_policy = [outcome for outcome in outcomes if outcome.policy == column]
        each = [sum(one.verdict == verdict for one in of_policy) for verdict in VERDICTS]
        worst = max((one for one in of_policy if one.verdict == "holds"), key=lambda one: one.worst, default=None)
        body.append([column, *map(str, each), "" if worst is None else f"{worst.worst:.1e} ({worst.family})"])
    return pages.table(["column", *VERDICTS, "worst error"], body)


def reason(outcome: Outcome) -> str:
    """Return the first words of a refusal, without the names of the model."""
    words = outcome.detail
    for mark in ("; ", ": ", ", to its "):
        words = words.partition(mark)[0]
    return words


def _grouped(refused: Iterable[Outcome]) -> str:
    """Return the table of refused families, grouped by reason, with whether the refusal is necessary."""
    families: dict[str, list[str]] = defaultdict(list)
    for outcome in refused:
        families[reason(outcome)].append(outcome.family)
    body = []
    for why, members in sorted(families.items(), key=lambda item: (-len(item[1]), item[0])):
        necessary = next((words for first, words in _NECESSARY.items() if why.startswith(first)), "no")
        body.append([why, ", ".join(dict.fromkeys(members)), necessary])
    return pages.table(["reason", "families", "necessary"], body)


def tables(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the tables and lists of docs/results/families.md by name."""
    rows = by_family(outcomes)
    refused = {family for family, verdicts in rows.items() if verdicts["model"].verdict == "refused"}
    unbuilt = [family for family, verdicts in rows.items() if verdicts["model"].verdict == "not built"]
    every = [family for family, verdicts in rows.items() if {one.verdict for one in verdicts.values()} == {"holds"}]
    some = [family for family in rows if family not in {*refused, *unbuilt, *every}]
    parts = [one for family in some for one in rows[family].values() if one.verdict == "refused"]
    return {
        "versions": pages.table(
            ["model classes", "hold in every column", "hold in some columns", "refused", "transformers", "torch"],
            [[*(str(len(one)) for one in (rows, every, some, refused)), version("transformers"), version("torch")]],
        ),
        "counts": counts(outcomes), "used": _marks(rows, [family for family in USED if family in rows]),
        "every": "\n".join(["```text", *wrap(", ".join(sorted(every)), 120), "```", ""]),
        "some": _marks(rows, sorted(some)), "parts": _grouped(parts),
        "refused": _grouped(rows[family]["model"] for family in sorted(refused)),
        "unbuilt": f"Not built: {', '.join(unbuilt)}.\n",
    }


def _marks(rows: Rows, families: Iterable[str]) -> str:
    """Return a table of families with one sign in each column."""
    signs = {"holds": "+", "refused": "-", "fails": "fails", "not built": "not built"}
    return pages.table(["family", *COLUMNS], [
        [family, *(signs[rows[family][column].verdict] for column in COLUMNS)] for family in families
    ])


def main(arguments: list[str] | None = None) -> int:
    """Test all families, or the named ones. All families take some minutes."""
    known = {family.name: family for family in families()}
    parser = argparse.ArgumentParser(prog="python -m lab.measure.families", description=__doc__)
    parser.add_argument("families", nargs="*", help="names of AutoModelForCausalLM; default: all")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the table of all cells")
    parser.add_argument("--write", action="store_true", help=f"also write {PAGE.name} of docs/results")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.families) - set(known)):
        parser.error(f"no causal family of this transformers: {', '.join(unknown)}")
    if options.write and options.families:
        parser.error("--write is about all families")
    result = tried([known[name] for name in options.families or known])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "families.md").write_text(cells(result), encoding="utf-8")
    if options.write:
        pages.write(PAGE, tables(result).__getitem__)
    print(counts(result))
    third = [one for one in result if one.verdict == "fails"]
    for one in third:
        print(f"{one.family}, {one.policy}: {one.detail}", file=sys.stderr)
    return int(bool(third))


def tried(chosen: list[Family]) -> list[Outcome]:
    """Return all outcomes, and show the progress on standard error."""
    result: list[Outcome] = []
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny tensors
    with progress_bar(Console(stderr=True), len(chosen)) as done, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in chosen:
            result += outcomes(family)
            done(family.name)
    return result


if __name__ == "__main__":
    sys.exit(main())
