"""How an answer is judged, from 0 to 1: our own metrics, and those of RULER v1, SCBench and LongBench v1.

The official ones are written after NVIDIA/RULER `scripts/eval/synthetic/constants.py`, microsoft/MInference
`scbench/compute_scores.py` and THUDM/LongBench `LongBench/metrics.py`. Where LongBench calls a package, this is what
the package computes: `rouge` 1.0's summary-level ROUGE-L over sets of words, and `fuzzywuzzy`'s ratio without
python-Levenshtein (difflib, whole percents). LongBench's Chinese metrics need jieba and are not offered.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import TypeAlias

from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "BOXED", "CONTAINS", "FIRST_NUMBER", "MATH_BOXED", "METRICS", "OPTION", "RIGHT_OR_WRONG", "STRING_MATCH_ALL",
    "boxed", "is_exact_match", "judge",
]

FIRST_NUMBER, CONTAINS, STRING_MATCH_ALL, BOXED = "first number", "contains", "string_match_all", "boxed number"
MATH_BOXED, OPTION = "boxed, by math-verify", "option letter"
RIGHT_OR_WRONG = (FIRST_NUMBER, CONTAINS)
"""Metrics of one answer, which is greedily right where it is the most likely token by token."""
_NUMBER = re.compile(r"[+-]?[^\W_]*\d[^\W_]*(?:[.,]\d+)*")
"""A number with all that is written as one with it: letters, a sign, thousands, decimals."""
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_CONTROL = re.compile(r"[\x00-\x1f]")

Metric: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], float]
"""An answer, the references and the labels of a classification; from 0 to 1."""


def judge(metric: str, answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
    """How good an answer is, from 0 to 1.

    Args:
        metric: a name of `METRICS`.
        answer: what was generated.
        references: the gold answers; whether all or one of them is asked for is the metric's.
        choices: the labels, for `classification`.

    Raises:
        SpecError: for an unknown metric.
    """
    check_choices("metric", (metric,), METRICS)
    return METRICS[metric](answer, references, choices)


def is_exact_match(answer: str, expected: str) -> bool:
    """Whether the first number of the answer is the value, digit for digit.

    The paper's Appendix B takes a substring, to which 17492, and a list of guesses with 7492 among them, are right.
    """
    found = _NUMBER.search(answer)
    return found is not None and found.group() == expected


def boxed(answer: str) -> str | None:
    """What stands in the first box of an answer, without spaces and thousands separators; None without a box."""
    found = _BOX.search(answer)
    return None if found is None else found.group(1).replace(",", "").strip(" $")


def _math_boxed(answer: str, reference: str) -> bool:
    """Whether what the answer's boxes hold equals the reference, by math-verify."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise SpecError("metric", MATH_BOXED, "needs math-verify: pip install 'kvspec[math]'") from error
    rule = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    said = parse(answer, rule) if "\\boxed" in answer else []
    return bool(verify(parse(f"\\boxed{{{reference}}}", rule), said))


def _option(answer: str, letter: str) -> bool:
    """Whether the first letter from A to D that is a word is the right one."""
    found = re.search(r"\b[A-D]\b", answer)
    return found is not None and found.group() == letter


def _hits(answer: str, references: Sequence[str]) -> list[bool]:
    """RULER: which references occur, in any case; control characters of the answer become line ends."""
    said = _CONTROL.sub("\n", answer.strip()).strip().lower()
    return [reference.lower() in said for reference in references]


def _match_all(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    hits = _hits(answer, references)
    return sum(hits) / len(hits)


def _match_part(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    return float(any(_hits(answer, references)))


def _names_found(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    """SCBench's variable tracking: the share of the names, in any case, in two digits."""
    return round(sum(reference.lower() in answer.lower() for reference in references) / len(references), 2)


def _words(text: str) -> list[str]:
    """Lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _qa_f1(answer: str, truth: str) -> float:
    said, gold = _words(answer), _words(truth)
    same = sum((Counter(said) & Counter(gold)).values())
    return 2 * same / (len(said) + len(gold)) if same else 0.0


def _share_of_numbers(answer: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, truth: str) -> float:
    paragraph = re.search(r"Paragraph (\d+)", truth)
    return _share_of_numbers(answer, paragraph.group(1)) if paragraph else 0.0


def _code_similarity(answer: str, truth: str) -> float:
    """The first line that is neither fence nor comment."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, truth).ratio()) / 100 if line else 0.0


def _classification(answer: str, truth: str, choices: Sequence[str]) -> float:
    """One, shared by the labels that the answer names; its labels that are part of the true one do not count."""
    named = [label for label in choices if label in answer]
    for label in named:  # as LongBench has it: taking out while going on skips the label that follows
        if label in truth and label != truth:
            named.remove(label)
    return 1 / len(named) if truth in named else 0.0


def _rouge_l(answer: str, truth: str) -> float:
    said, gold = _sentences(answer), _sentences(truth)
    said_words, gold_words = ({word for words in text for word in words} for text in (said, gold))
    if not said or not gold:
        return 0.0
    shared = {word for reference in gold for sentence in said for word in _common_words(reference, sentence)}
    recall, precision = len(shared) / len(gold_words), len(shared) / len(said_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_words(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """The words of a longest common subsequence; where there are several, `rouge`'s."""
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, another in enumerate(other):
            longest[i + 1][j + 1] = longest[i][j] + 1 if word == another else max(longest[i][j + 1], longest[i + 1][j])
    found, i, j = list[str](), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif longest[i - 1][j] > longest[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _best(metric: Callable[[str, str], float], *, first_line: bool = False) -> Metric:
    """The best over the references; LongBench reads one line of short answers."""
    def judged(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
        said = answer.lstrip("\n").split("\n")[0] if first_line else answer
        return max((metric(said, reference) for reference in references), default=0.0)

    return judged


def _best_label(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    said = answer.lstrip("\n").split("\n")[0]
    return max((_classification(said, reference, choices) for reference in references), default=0.0)


METRICS: Mapping[str, Metric] = {
    FIRST_NUMBER: _best(is_exact_match),
    CONTAINS: _best(lambda answer, reference: reference in answer),
    MATH_BOXED: _best(_math_boxed),
    OPTION: _best(_option),
    BOXED: _best(lambda answer, reference: boxed(answer) == reference),
    "contains in any case": _best(lambda answer, reference: reference.upper() in answer.strip().upper()),
    "names found": _names_found,
    STRING_MATCH_ALL: _match_all,
    "string_match_part": _match_part,
    "qa_f1": _best(_qa_f1),
    "qa_f1 of a line": _best(_qa_f1, first_line=True),
    "rouge_l": _best(_rouge_l),
    "rouge_l of a line": _best(_rouge_l, first_line=True),
    "classification": _best_label,
    "retrieval": _best(_retrieval),
    "count": _best(_share_of_numbers),
    "code_similarity": _best(_code_similarity),
}
"""`contains`: a gold answer occurs, as SCBench counts."""
