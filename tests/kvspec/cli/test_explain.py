"""The page that explains a retention computes the reference's values, and shows all of them.

Its JavaScript runs in node. The page runs in a small document (page/document.mjs), and in a headless Chromium if one is
found. KVSPEC_CHROMIUM may contain the path of Chromium.
"""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from conformance import tolerances
from conformance.checks import stage_checks
from conformance.strategies.prompts import Prompt, random_prompt
from kvspec.cli import explain as explain_page
from kvspec.cli.app import app
from kvspec.cli.explain import HOME, TAKEN, explain_html, record
from reference.crystalcache import prefill
from spec.errors import SpecError
from spec.parameters import TINY, CrystalCacheParameters
from spec.parameters.crystalcache import GraphForm, ImpactForm
from spec.records import CrystalRetention
from spec.retention import Granularity, Retention

pytestmark = pytest.mark.law("figures-are-counted-right")

TOOLS = Path(__file__).with_name("page")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
CHROMIUM = os.environ.get("KVSPEC_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
PROMPTS = 200
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def node(script: str, *arguments: str, given: str = "") -> Any:
    """Return the output of a script of `page`."""
    done = subprocess.run(
        ["node", str(TOOLS / script), *arguments], input=given, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Case:
    """Prompt as it was run, and parameters and a budget that a user sets in the page."""

    prompt: Prompt
    run: CrystalRetention
    budget: int
    parameters: CrystalCacheParameters

    @property
    def wanted(self) -> CrystalRetention:
        return prefill(**{**self.prompt.arguments, "budget": self.budget, "parameters": self.parameters})

    @property
    def given(self) -> dict[str, Any]:
        shown = record(self.run, self.prompt.token_ids, TINY)
        return {**shown, "tokens": self.budget, "parameters": asdict(self.parameters)}


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    prompt = random_prompt(rng, TINY, int(rng.integers(12, 90)))
    impacts: tuple[ImpactForm, ...] = ("mixture", "salience", "uniform")
    graphs: tuple[GraphForm, ...] = ("degree", "degree", "zero")
    other = replace(
        TINY, alpha=float(rng.choice([0.0, 0.35, 1.0, 1.7])), N_min=int(rng.integers(0, 7)),
        s=float(rng.choice([0.5, 5.0, 9.5])), impact=impacts[rng.integers(3)],
        graph=graphs[rng.integers(3)], tau_edge=float(rng.choice([0.05, 0.05, 0.05, 2.0])),
    )
    return Case(prompt, prefill(**prompt.arguments), int(rng.integers(1, len(prompt.token_ids) + 1)), other)


@needs_node
@pytest.mark.spec("CC-PREFILL")
def test_the_pages_stages_are_the_references() -> None:
    """Compare kept sets, r, the graph and its degrees bit for bit, and all other values within their bounds."""
    cases = [drawn(seed) for seed in range(PROMPTS)]
    results = node("stages.mjs", str(HOME / "stages.mjs"), given=json.dumps([case.given for case in cases]))
    for case, actual in zip(cases, results, strict=True):
        want, p = case.wanted, case.parameters
        assert actual["kept"] == want.kept.tolist()
        assert actual["ratio"] == want.ratio.tolist()
        assert actual["B"] == want.budget
        for name in ("indptr", "indices", "weights", "degree"):
            assert actual["graph"][name] == getattr(want.graph, name).tolist()
        D, M_bar = np.array(actual["graph"]["D"]), np.array(actual["M_bar"])
        radius = tolerances.crystallization_radius(want.graph.degree, p.s, p.epsilon)
        assert (np.abs(D - want.graph.D) <= radius).all()
        assert not list(stage_checks.impact(
            np.array(actual["M"]), want.coattention.salience, case.prompt.token_ids, p
        ))
        assert tolerances.close("CC-IMPACT", M_bar, want.trunks.impact)
        scores = np.array([math.nan if x is None else x for x in actual["scores"]])
        assert not list(stage_checks.score(scores, D, M_bar, want.protected, p))


def page_of(case: Case, **more: Any) -> str:
    shown = record(case.run, case.prompt.token_ids, TINY)
    return explain_html(shown, texts(case), "a & <b>.txt", "a run.", **more)


def texts(case: Case) -> list[str]:
    """Return texts that could end a script, an element or a line."""
    odd = ["</script>", " <b>", "&amp;", "\n", '"', "\u2028", "ø"]
    return [odd[i] if i < len(odd) else f" w{i}" for i in range(len(case.prompt.token_ids))]


def data_of(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    actual: dict[str, Any] = json.loads(data)
    return actual


def test_the_page_holds_the_run_and_needs_nothing_else() -> None:
    case = drawn(1)
    page = page_of(case)
    data = data_of(page)
    assert data["tokens_text"] == texts(case)
    assert data["salience"] == case.run.coattention.salience.tolist()
    assert data["kept"] == case.run.kept.tolist()
    assert data["parameters"] == {name: getattr(TINY, name) for name in TAKEN}
    assert "<title>a &amp; &lt;b&gt;.txt: " in page
    assert page.count("</script>") == 2
    assert not re.search(r"\b(src|href)=|@import|\bfetch\(|\bimport[ (]", page)
    assert set(re.findall(r"url\((.*?)\)", page)) == {"#stripes"}
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.law("refused-before-anything-changes")
def test_what_is_about_other_tokens_is_refused() -> None:
    case = drawn(1)
    shown = record(case.run, case.prompt.token_ids, TINY)
    n = len(case.prompt.token_ids)
    with pytest.raises(SpecError, match=f"texts = 3: must have one text for each of the {n} tokens"):
        explain_html(shown, ["a", "b", "c"], "t", "")
    with pytest.raises(SpecError, match=f"beside = {n + 1}: "):
        page_of(case, beside=("other", Retention.shared(np.arange(3), n + 1)))


BROWSERS = [
    pytest.param("", marks=needs_node, id="document"),
    pytest.param(CHROMIUM, id="chromium", marks=[
        needs_node, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed, and none in KVSPEC_CHROMIUM")
    ]),
]
Drive = Callable[[str, Sequence[Mapping[str, Any]]], Any]


@pytest.fixture(scope="module", params=BROWSERS)
def drive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drive]:
    """Yield a function that returns a page's results of steps, in a small document or in one Chromium for all tests."""
    file, driver = tmp_path_factory.mktemp("page") / "page.html", str(TOOLS / "driver.js")

    def in_document(page: str, steps: Sequence[Mapping[str, Any]]) -> Any:
        file.write_text(page, encoding="utf-8")
        return node("document.mjs", str(file), driver, json.dumps(steps))

    if not request.param:
        yield in_document
        return
    command = ["node", str(TOOLS / "browser.mjs"), request.param, driver]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
        assert browser.stdin
        assert browser.stdout
        asked, output = browser.stdin, browser.stdout

        def in_browser(page: str, steps: Sequence[Mapping[str, Any]]) -> Any:
            file.write_text(page, encoding="utf-8")
            print(json.dumps([str(file), steps]), file=asked, flush=True)
            return json.loads(output.readline())

        yield in_browser
        asked.close()


def fates(result: CrystalRetention) -> list[str]:
    return [
        "protected" if shut else "kept" if r == 1 else "part" if r > 0 else "evicted"
        for shut, r in zip(result.protected.tolist(), result.ratio.tolist(), strict=True)
    ]


def test_a_reader_of_the_page_sees_what_the_reference_keeps(drive: Drive) -> None:
    """Check the page when it opens, and after every slider and option was changed."""
    at_tau = (case for case in map(drawn, range(40)) if case.parameters.tau_edge == TINY.tau_edge)
    cases = list(islice((case for case in at_tau if "part" in fates(case.wanted)), 3))
    assert len(cases) == 3
    for case in cases:
        p, n = case.parameters, len(case.prompt.token_ids)
        moved = {
            "tokens": max(5, case.budget), "alpha": p.alpha, "N_min": p.N_min, "s": p.s, "impact": p.impact,
            "graph": p.graph,
        }
        controls = {f"set-{name}": value for name, value in moved.items()}
        first, second = drive(page_of(case), [{}, {"set": controls}])
        for shown, want in ((first, case.run), (second, case.wanted)):
            assert shown["kept"] == want.kept.tolist()
            assert shown["fates"] == fates(want)
            assert shown["text"] == "".join(texts(case))
            assert shown["summary"].startswith(f"{len(want.kept)} of {n} tokens kept")
            assert shown["bars"] == len(want.ratio)
            assert shown["arcs"] == min(150, len(want.graph.weights) // 2)
        assert first["check"].startswith("Check: ")


@pytest.mark.law("the-proof-has-teeth")
def test_the_page_says_where_it_computes_another_set(drive: Drive) -> None:
    case = drawn(1)
    shown = record(case.run, case.prompt.token_ids, TINY)
    changed = {**shown, "kept": [*shown["kept"][:-1], shown["kept"][-1] - 1]}
    (actual,) = drive(explain_html(changed, texts(case), "t", ""), [{}])
    assert actual["check"].startswith("Warning: this browser computes a different set")


def test_the_arrow_keys_walk_along_the_text_and_the_line(drive: Drive) -> None:
    case = drawn(7)
    scores, shut = case.run.scores, case.run.protected
    best_first = [int(g) for g in np.argsort(np.where(shut, np.inf, scores), kind="stable")[::-1] if not shut[g]]
    line = [*np.flatnonzero(shut).tolist(), *best_first]
    keys = ["ArrowDown", "ArrowDown", "ArrowUp", "Home", "ArrowLeft", "ArrowRight", "ArrowUp", "End", "ArrowRight"]
    walked = drive(page_of(case), [{}, *({"keys": [key]} for key in keys)])
    above = line[max(0, line.index(1) - 1)]
    last = len(shut) - 1
    wanted = [best_first[0], best_first[1], best_first[2], best_first[1], 0, 0, 1, above, last, last]
    assert [step["chosen"] for step in walked] == [[f"trunk-{g}"] for g in wanted]
    assert all(step["details"].startswith(f"Trunk {g}: ") for step, g in zip(walked, wanted, strict=True))


def test_with_shift_they_walk_along_the_tokens(drive: Drive) -> None:
    """Check that Shift with the arrow keys shows single tokens, and that an arrow key alone shows a trunk."""
    case = drawn(7)
    sizes, M = case.run.trunks.sizes.tolist(), case.run.impact
    keys = ["Home", *["Shift+ArrowRight"] * (sizes[0] + 1), "Shift+ArrowLeft", "ArrowLeft"]
    *walked, back, alone = every = drive(page_of(case), [{"keys": [key]} for key in keys])
    assert [step["token"] for step in walked] == [[], *([f"token-{i}"] for i in range(sizes[0] + 1))]
    assert [step["chosen"] for step in every] == [["trunk-0"]] * (sizes[0] + 1) + [["trunk-1"]] + [["trunk-0"]] * 2
    assert (back["token"], alone["token"]) == ([f"token-{sizes[0] - 1}"], [])
    for i, step in enumerate(walked[1:]):
        detail = step["details"][step["details"].index(f"Token {i}, ") :]
        assert f"salience{case.run.coattention.salience[i]:.3f}" in detail
        assert f"impact{M[i]:.3f}" in detail


def test_another_policy_is_counted_by_its_sets(drive: Drive) -> None:
    case = drawn(7)
    n, kept = len(case.prompt.token_ids), set(case.run.kept.tolist())
    sets = [range(0, n, 2), range(4), [*range(3), n - 1]]
    positions = np.concatenate([np.array(list(one), dtype=np.int64) for one in sets])
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.int64)
    page = page_of(case, beside=("heads", Retention(positions, offsets, n, Granularity.HEAD)))
    counts = [sum(i in one for one in sets) for i in range(n)]
    assert data_of(page)["beside"] == {
        "name": "heads", "groups": 3, "granularity": "a layer and KV head", "counts": counts
    }
    (shown,) = drive(page, [{"set": {"measure": "beside"}}])
    both = sum(counts[i] for i in kept) / 3
    whole = sum(counts) / 3
    detail = (f"heads keeps {whole:.0f} tokens (mean over 3 sets, one set for a layer and KV head). Both policies keep"
            f" {both:.0f} tokens, only CrystalCache {len(kept) - both:.0f}, only heads {whole - both:.0f}.")
    assert shown["beside"] == detail


def test_a_space_that_a_tokenizer_drops_at_the_start_is_shown() -> None:
    """Check a tokenizer like SentencePiece, which drops the space of a single token.

    A part of a letter becomes a mark.
    """
    pieces = [b" the", b" cat", b"  sat", b" \xc3", b"\xb8"]
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **given: b"".join(
        pieces[i] for i in ids
    ).removeprefix(b" ").decode(errors="replace"))
    assert explain_page.texts_of(tokenizer, [0, 1, 2, 3, 4]) == ["the", " cat", "  sat", " \ufffd", "\ufffd"]


@pytest.mark.law("as-it-is-described")
def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "page.html"
    text.write_text("The key is 4718.  All other doors are shut. " * 30, encoding="utf-8")
    arguments = ["explain", str(text), "--out", str(out), "--budget", "0.6", "--backend", "numpy", "--beside", "snapkv"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = data_of(out.read_text(encoding="utf-8"))
    assert "".join(data["tokens_text"]).endswith(text.read_text(encoding="utf-8"))
    assert f"kept {len(data['kept'])} of {len(data['token_ids'])} tokens, budget " in result.output
    assert data["beside"]["name"] == "snapkv"
    assert 1 < data["beside"]["groups"] < sum(data["beside"]["counts"])
    monkeypatch.setattr(explain_page, "TOKENS_MOST", 100)
    refused = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "none.html")])
    assert "must have at most 100 tokens" in str(refused.exception)
    assert not (tmp_path / "none.html").exists()
