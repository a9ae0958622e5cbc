"""Official metrics, against values worked out by hand from the published definitions, and published examples."""

from fractions import Fraction

import pytest

from models_integration.tasks.metrics import METRICS, judge
from spec.errors import SpecError

pytestmark = pytest.mark.law("figures-are-counted-right")

FRANCE = ("France", "in France", "the French kingdom")

CASES: list[tuple[str, str, tuple[str, ...], tuple[str, ...], float]] = [
    # RULER: of the references of one sample, the two that occur in the answer, in any case.
    ("string_match_all", "It was in FRANCE.", FRANCE, (), 2 / 3),
    ("string_match_part", "It was in FRANCE.", FRANCE, (), 1),  # one is enough; 0.667 in lm-eval, 1.0 at NVIDIA
    ("string_match_part", "Italy", FRANCE, (), 0),
    ("string_match_all", "1234567\x00 and 7654321", ("1234567", "7654321"), (), 1),
    ("string_match_all", "new\x0bline", ("new\nline",), (), 1),  # control characters become line ends
    ("string_match_all", "newline", ("new\nline",), (), 0),
    # SCBench
    ("contains", 'the value is "4711".', ("4711",), (), 1),
    ("contains", "Abc", ("abc",), (), 0),
    ("names found", "AAAAA CCCCC", ("AAAAA", "BBBBB", "CCCCC"), (), 0.67),
    ("names found", "aaaaa", ("AAAAA",), (), 1),  # SCBench compares in lower case
    ("contains in any case", "\nit was TOM.", ("Tom", "Jim"), (), 1),
    ("contains in any case", "it was Ann", ("Tom", "Jim"), (), 0),
    ("first number", "It is 7492.", ("7492",), (), 1),
    ("first number", "It is 17492.", ("7492",), (), 0),
    # LongBench qa_f1: {cat, sat, on, mat} and {cat, on, mat}: precision 3/4, recall 1, F1 = 6/7.
    ("qa_f1", "The cat sat on a mat!", ("cat on the mat",), (), 6 / 7),
    # Repeated tokens count as often as both have them: 2 common of 3 and 2: F1 = 4/5.
    ("qa_f1", "dog dog dog", ("dog dog",), (), 4 / 5),
    ("qa_f1", "paris", ("london", "in paris"), (), 2 / 3),
    ("qa_f1", "", ("london",), (), 0),
    ("qa_f1 of a line", "\nparis\nlondon", ("paris",), (), 1),
    # One sentence, words a b c d against a x b d: subsequence a b d, precision and recall 3/4.
    ("rouge_l", "a b c d", ("a x b d",), (), 3 / 4),
    # As sets: reference {a, b}, answer {a}; precision 1, recall 1/2.
    ("rouge_l", "a a a", ("a b",), (), 2 / 3),
    # Two sentences of the answer, the union of both subsequences {a, b, d, e} of the reference's five words:
    # recall 4/5, precision 4/6.
    ("rouge_l", "a b x. d e y", ("a b c d e",), (), 8 / 11),
    ("rouge_l", "", ("a b",), (), 0),
    ("rouge_l", ".", ("a b",), (), 0),
    ("rouge_l of a line", "a b\nc d", ("a b",), (), 1),
    # Two labels are named, one of them true.
    ("classification", "Location or Person", ("Person",), ("Location", "Person", "Date"), 1 / 2),
    # A label that is a part of the true one does not count.
    ("classification", "Human being", ("Human being",), ("Human", "Human being"), 1),
    ("classification", "Person\nLocation", ("Person",), ("Location", "Person"), 1),  # the first line alone
    ("classification", "Person", ("Date",), ("Date", "Person"), 0),
    # One of two numbers is the paragraph's.
    ("retrieval", "Paragraph 12, perhaps 13", ("Paragraph 12",), (), 1 / 2),
    ("retrieval", "none", ("Paragraph 12",), (), 0),
    ("count", "3 or 4 or 3", ("3",), (), 2 / 3),
    ("count", "three", ("3",), (), 0),
    # difflib: "abcd" and "bcde" share a block of 3 of 8 letters: 2 * 3 / 8 = 0.75.
    ("code_similarity", "\n```\n# note\nabcd\nzzz", ("bcde",), (), 3 / 4),
    # difflib's own documented example, ratio 0.75 in its text; here 2 * 2 / 6 = 0.666..., whole percents: 0.67.
    ("code_similarity", "abx", ("aby",), (), 0.67),
    ("code_similarity", "# only a note", ("x = 1",), (), 0),
]


@pytest.mark.parametrize(("metric", "answer", "references", "choices", "wanted"), CASES)
def test_a_metric_is_what_hand_and_definition_give(
    metric: str, answer: str, references: tuple[str, ...], choices: tuple[str, ...], wanted: float
) -> None:
    assert judge(metric, answer, references, choices) == pytest.approx(wanted, abs=2e-8)  # rouge adds 1e-8 below


def test_every_metric_has_a_case_and_a_perfect_answer_scores_one() -> None:
    assert {case[0] for case in CASES} == set(METRICS)
    for metric in METRICS:
        truth = "Paragraph 7" if metric == "retrieval" else "7"
        assert judge(metric, truth, (truth,), (truth, "other")) == pytest.approx(1, abs=2e-8)
        assert judge(metric, "nothing at all", (truth,), (truth, "other")) == 0


def test_rouge_l_of_one_sentence_is_the_longest_common_subsequence_by_trying_all() -> None:
    """Against all subsequences, for sentences whose words differ (then sets of words are the words)."""
    from itertools import combinations, permutations

    reference = "abcde"
    for answer in permutations("abcxy", 4):
        longest = max(
            size for size in range(5) if set(combinations(answer, size)) & set(combinations(reference, size))
        )
        wanted = Fraction(2 * longest, len(answer) + len(reference))
        assert judge("rouge_l", " ".join(answer), (" ".join(reference),)) == pytest.approx(float(wanted), abs=2e-8)


@pytest.mark.law("refused-before-anything-changes")
def test_an_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(SpecError) as caught:
        judge("bleu", "a", ("a",))
    assert caught.value.argument == "metric"
