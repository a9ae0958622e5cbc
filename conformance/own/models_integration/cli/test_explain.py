"""The page that explains a retention shows every token once, and each trunk's fate."""

import re
from html import unescape

import numpy as np
import pytest

from models_integration.cli.explain import explain_html
from reference.crystalcache import prefill
from spec.errors import SpecError
from spec.parameters import TINY
from spec.records import CrystalRetention

pytestmark = pytest.mark.law("figures-are-counted-right")


def a_result() -> CrystalRetention:
    rng = np.random.default_rng(3)
    q, k = rng.normal(size=(4, 60, 8)), rng.normal(size=(2, 60, 8))
    return prefill(q, k, rng.integers(0, 20, 60), frozenset({1, 2}), 31, TINY)


def test_the_page_shows_every_token_once_and_strikes_out_the_evicted() -> None:
    result = a_result()
    tokens = [f"<{i}>" for i in range(60)]
    page = explain_html(result, tokens, "a & b")
    assert "a &amp; b" in page
    shown = [int(token) for token in re.findall(r"<(\d+)>", unescape(page.partition("impact of its tokens")[2]))]
    assert shown == list(range(60))
    gone = [int(token) for token in re.findall(r'class="gone">&lt;(\d+)&gt;', page)]
    assert sorted({*range(60)} - {*gone}) == result.kept.tolist()


def test_the_page_names_each_trunks_fate() -> None:
    result = a_result()
    page = explain_html(result, ["x"] * 60, "t").partition("impact of its tokens")[2]
    assert page.count('class="trunk ') == len(result.ratio)
    assert page.count('class="trunk protected"') == result.protected.sum()
    assert page.count('class="trunk partial"') == ((result.ratio > 0) & (result.ratio < 1)).sum()


@pytest.mark.law("refused-before-anything-changes")
def test_a_wrong_number_of_tokens_is_refused() -> None:
    with pytest.raises(SpecError, match="tokens = 3"):
        explain_html(a_result(), ["a", "b", "c"], "t")
