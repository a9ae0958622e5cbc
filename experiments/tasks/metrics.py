"""Metrics of answers, from 0 to 1: metrics of kvspec, and metrics of RULER v1 and LongBench v1.

LoCoMo's F1 follows snap-research/locomo `task_eval/evaluation.py`, with the Porter stemmer of nltk. The benchmark
metrics follow NVIDIA/RULER `scripts/eval/synthetic/constants.py` and THUDM/LongBench `LongBench/metrics.py`. If
LongBench calls a package, kvspec computes the same value. Summary-level ROUGE-L over sets of words is as in `rouge`
1.0. The ratio is as in `fuzzywuzzy` without python-Levenshtein (difflib, whole percents). LongBench's Chinese metrics,
which need jieba, are not supported.
"""

import json
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import TypeAlias

from spec.errors import SpecError
from spec.validate import check_choices

__all__ = [
    "BOXED", "CONTAINS", "FIRST_NUMBER", "GRADES", "LOCOMO_F1", "LOCOMO_PARTS", "MATH_BOXED", "METRICS", "OPTION",
    "REGEX", "RIGHT_OR_WRONG", "ROUGE_L", "STRING_MATCH_ALL", "boxed", "is_exact_match", "judge",
]

FIRST_NUMBER, CONTAINS, STRING_MATCH_ALL, BOXED = "first number", "contains", "string_match_all", "boxed number"
MATH_BOXED, OPTION, ROUGE_L = "boxed, by math-verify", "option letter", "rouge_l"
LOCOMO_F1, LOCOMO_PARTS = "locomo_f1", "locomo_f1 of parts"
RIGHT_OR_WRONG = (FIRST_NUMBER, CONTAINS)
"""Metrics with results 0 or 1. An answer that begins with the gold answer's tokens is right."""
REGEX = "regex"
GRADES = {
    "contains": "contains the words", "exact": "exact words of a line", "f1": "qa_f1 of a line",
    REGEX: "regular expression",
}
"""Metric of each grade for your own questions. The normalisation of words is the one of SQuAD."""
_NUMBER = re.compile(r"[+-]?(?<![^\W_])(?=[^\W\d_]*+\d)[^\W_]++(?:[.,]\d++)*+")
"""Pattern of a number, with attached letters, sign, thousands separators and decimals.

A number begins at the start of a word, so that the time of a search is linear in the length of an answer.
"""
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
SEARCH_SECONDS = 10
"""Largest number of seconds of a search for a regular expression of the user."""
_SEARCH = "import json, re, sys; sys.exit(10 if re.search(*json.load(sys.stdin)) else 11)"
_CONTROL = re.compile(r"[\x00-\x1f]")

Metric: TypeAlias = Callable[[str, Sequence[str], Sequence[str]], float]
"""Function of an answer, the references and the labels of a classification, with results from 0 to 1."""


def judge(metric: str, answer: str, references: Sequence[str], choices: Sequence[str] = ()) -> float:
    """Return the score of an answer, from 0 to 1.

    Args:
        metric: a name of `METRICS`.
        answer: generated text.
        references: gold answers. The metric defines whether one or all of them are required.
        choices: labels, for the metric `classification`.

    Raises:
        SpecError: if the metric is unknown.
    """
    check_choices("metric", (metric,), METRICS)
    return METRICS[metric](answer, references, choices)


def is_exact_match(answer: str, expected: str) -> bool:
    """Return True if the first number of the answer equals the value, digit by digit.

    The paper's Appendix B searches for a substring, so the answer 17492 is right for the value 7492.
    """
    match = _NUMBER.search(answer)
    return match is not None and match.group() == expected


def boxed(answer: str) -> str | None:
    """Return the contents of an answer's first box without spaces and thousands separators, or None without a box."""
    match = _BOX.search(answer)
    return None if match is None else match.group(1).replace(",", "").strip(" $")


def _math_boxed(answer: str, reference: str) -> bool:
    """Return True if the contents of the answer's boxes equal the reference, according to math-verify."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise SpecError("metric", MATH_BOXED, "needs math-verify: pip install 'kvspec[math]'") from error
    rule = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    candidates = parse(answer, rule) if "\\boxed" in answer else []
    return bool(verify(parse(f"\\boxed{{{reference}}}", rule), candidates))


def _option(answer: str, letter: str) -> bool:
    """Return True if the first single-letter word from A to D is the right letter."""
    match = re.search(r"\b[A-D]\b", answer)
    return match is not None and match.group() == letter


def _hits(answer: str, references: Sequence[str]) -> list[bool]:
    """Return which references occur, ignoring case, as in RULER. Control characters of the answer become newlines."""
    text = _CONTROL.sub("\n", answer.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def _match_all(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    hits = _hits(answer, references)
    return sum(hits) / len(hits)


def _match_part(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    return float(any(_hits(answer, references)))


def _share_of_names(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
    """Return the fraction of names found, ignoring case, rounded to two digits, as in SCBench's variable tracking."""
    return round(sum(reference.lower() in answer.lower() for reference in references) / len(references), 2)


def _words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _qa_f1(answer: str, truth: str) -> float:
    return _f1(_words(answer), _words(truth))


def _f1(candidate: Sequence[str], gold: Sequence[str]) -> float:
    same = sum((Counter(candidate) & Counter(gold)).values())
    return 2 * same / (len(candidate) + len(gold)) if same else 0.0


def _locomo_f1(answer: str, truth: str) -> float:
    """Return LoCoMo's F1: the F1 of the stems of words, without articles and "and"."""
    try:
        from nltk.stem import PorterStemmer
    except ModuleNotFoundError as error:
        raise SpecError("metric", LOCOMO_F1, "needs nltk: pip install 'kvspec[locomo]'") from error
    stem = PorterStemmer().stem
    return _f1(*([stem(word) for word in _words(text) if word != "and"] for text in (answer, truth)))


def _locomo_parts(answer: str, truth: str) -> float:
    """Return the mean over the parts of the reference of the best F1 with a part of the answer.

    Commas separate parts. LoCoMo uses this metric for questions of category 1, about several sessions.
    """
    candidates, parts = answer.split(","), truth.split(",")
    return sum(max(_locomo_f1(one, part) for one in candidates) for part in parts) / len(parts)


def _same_words(answer: str, truth: str) -> bool:
    """Return True if the normalised words are equal. A reference without words must equal the answer literally."""
    return _words(answer) == _words(truth) if _words(truth) else answer.strip() == truth.strip()


def _has_words(answer: str, truth: str) -> bool:
    """Return True if the normalised words of the reference follow each other in the answer."""
    candidate, gold = _words(answer), _words(truth)
    if not gold:
        return truth.strip() in answer
    return any(candidate[at : at + len(gold)] == gold for at in range(len(candidate) - len(gold) + 1))


@lru_cache(maxsize=4096)
def _matches(answer: str, pattern: str) -> bool:
    """Return True if a regular expression is found in an answer.

    Some patterns need exponential time. Python cannot stop a search, so that a separate process searches.

    Raises:
        SpecError: if the search fails, or takes more than SEARCH_SECONDS.
    """
    command, given = [sys.executable, "-I", "-S", "-c", _SEARCH], json.dumps([pattern, answer])
    try:
        done = subprocess.run(
            command, input=given, text=True, capture_output=True, check=False, timeout=SEARCH_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        reason = f"takes more than {SEARCH_SECONDS} s in the answer {answer[:40]!r}"
        raise SpecError("answer", pattern, f"{reason}: write a+ in place of (a+)+ and (a|aa)+") from error
    if done.returncode not in (10, 11):
        raise SpecError("answer", pattern, f"cannot be searched: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.returncode == 10


def _share_of_numbers(answer: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, truth: str) -> float:
    paragraph = re.search(r"Paragraph (\d+)", truth)
    return _share_of_numbers(answer, paragraph.group(1)) if paragraph else 0.0


def _code_similarity(answer: str, truth: str) -> float:
    """Compare the first line of the answer that is neither a code fence nor a comment."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, truth).ratio()) / 100 if line else 0.0


def _classification(answer: str, truth: str, choices: Sequence[str]) -> float:
    """Return 1 / (number of labels found) if the true label is found. Labels inside the true label are ignored."""
    named = [label for label in choices if label in answer]
    for label in named:  # as in LongBench: removal during the iteration skips the next label
        if label in truth and label != truth:
            named.remove(label)
    return 1 / len(named) if truth in named else 0.0


def _rouge_l(answer: str, truth: str) -> float:
    candidate, gold = _sentences(answer), _sentences(truth)
    answer_words, gold_words = ({word for words in text for word in words} for text in (candidate, gold))
    if not candidate or not gold:
        return 0.0
    shared = {word for reference in gold for sentence in candidate for word in _common_words(reference, sentence)}
    recall, precision = len(shared) / len(gold_words), len(shared) / len(answer_words)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_words(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return the words of the longest common subsequence.

    If there are several, return the choice of the package `rouge`.
    """
    longest = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one):
        for j, another in enumerate(other):
            longest[i + 1][j + 1] = longest[i][j] + 1 if word == another else max(longest[i][j + 1], longest[i + 1][j])
    result, i, j = list[str](), len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            result.append(one[i - 1])
            i, j = i - 1, j - 1
        elif longest[i - 1][j] > longest[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return result


def _best(metric: Callable[[str, str], float], *, first_line: bool = False) -> Metric:
    """Return a metric that is the maximum over references. For short answers, LongBench uses only the first line."""
    def judged(answer: str, references: Sequence[str], _: Sequence[str]) -> float:
        text = answer.lstrip("\n").split("\n")[0] if first_line else answer
        return max((metric(text, reference) for reference in references), default=0.0)

    return judged


def _best_label(answer: str, references: Sequence[str], choices: Sequence[str]) -> float:
    text = answer.lstrip("\n").split("\n")[0]
    return max((_classification(text, reference, choices) for reference in references), default=0.0)


METRICS: Mapping[str, Metric] = {
    FIRST_NUMBER: _best(is_exact_match),
    CONTAINS: _best(lambda answer, reference: reference in answer),
    MATH_BOXED: _best(_math_boxed),
    OPTION: _best(_option),
    BOXED: _best(lambda answer, reference: boxed(answer) == reference),
    "names found": _share_of_names,
    STRING_MATCH_ALL: _match_all,
    "string_match_part": _match_part,
    "qa_f1": _best(_qa_f1),
    "qa_f1 of a line": _best(_qa_f1, first_line=True),
    LOCOMO_F1: _best(_locomo_f1),
    LOCOMO_PARTS: _best(_locomo_parts),
    GRADES["contains"]: _best(_has_words),
    GRADES["exact"]: _best(_same_words, first_line=True),
    GRADES[REGEX]: _best(_matches),
    ROUGE_L: _best(_rouge_l),
    "rouge_l of a line": _best(_rouge_l, first_line=True),
    "classification": _best_label,
    "retrieval": _best(_retrieval),
    "count": _best(_share_of_numbers),
    "code_similarity": _best(_code_similarity),
}
"""Metrics by name. `contains` is 1 if a gold answer occurs in the answer, as in SCBench."""
