"""The results file and leases are shared by processes, and usable after a kill at any moment and with any clocks."""

import numpy as np
import pytest

pytest.importorskip("transformers", reason="the study drives transformers models")

import errno
import logging
import os
import re
import resource
import signal
from collections import Counter
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import BinaryIO

from experiments.studies import leases
from experiments.studies.evidence.rules import load_rules
from experiments.studies.evidence.run import merged, study_unit
from experiments.studies.leases import Leases
from experiments.studies.report import summary
from experiments.studies.results import Row, append_row, load_rows, lock_at_once
from lab.measure import evidence_pages, evidence_place, evidence_rows, long_decodes
from lab.measure.evidence_rows import rows_of
from lab.pages import BLOCK
from reference.statistics import mcnemar
from spec.errors import SpecError
from spec.tables import result_table
from tests.processes import started

pytestmark = pytest.mark.law("promised-is-there-forgotten-is-not")


def write_rows(path: Path, writer: int, rows: int, together: Barrier) -> None:
    """Add the rows of this writer, after all writers are ready."""
    together.wait()
    for at in range(rows):
        append_row(path, {"writer": writer, "at": at, "text": "x" * (997 * at % 9000)})


def die_in_a_row(path: Path, free: int) -> None:
    """Add a row that is longer than the kernel's limit for the file. The kernel then kills the process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    size = path.stat().st_size + free
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    append_row(path, {"text": "x" * 2 * free})


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.law("saved-is-what-was")
def test_rows_are_stored_whole_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    assert load_rows(path) == []
    append_row(path, {"policy": "a", "n": 1})
    before = path.stat().st_ino
    append_row(path, {"policy": "b\u2028\n", "n": 2})
    assert path.stat().st_ino == before  # The first row is not written again.
    assert path.read_bytes() == '{"policy": "a", "n": 1}\n{"policy": "b\u2028\\n", "n": 2}\n'.encode()
    assert [row["policy"] for row in load_rows(path)] == ["a", "b\u2028\n"]

    assert [file.name for file in path.parent.iterdir()] == ["results.jsonl"]


@pytest.mark.law("promised-is-there-forgotten-is-not")
@pytest.mark.law("an-object-proves-itself")
@pytest.mark.parametrize("line", ["{", "[1]", ""])
def test_a_line_that_is_no_row_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"policy": "a"}}\n{line}\n{{"policy": "b"}}\n', encoding="utf-8")
    with pytest.raises(SpecError, match=r"results\.jsonl:2"):
        load_rows(path)


def test_a_cut_last_line_is_set_aside_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Check that readers skip the truncated line, and that the next row follows the last whole row.

    Rows may be long.
    """
    path = tmp_path / "results.jsonl"
    cut = '{"policy": "ö' + "x" * 200_000
    path.write_bytes(b'{"policy": "a"}\n' + cut.encode()[:-1])
    assert load_rows(path) == [{"policy": "a"}]
    with caplog.at_level(logging.WARNING):
        append_row(path, {"policy": "b"})
        append_row(path, {"policy": "c"})
    assert [row["policy"] for row in load_rows(path)] == ["a", "b", "c"]
    assert (tmp_path / "results.jsonl.cut").read_bytes() == cut.encode()[:-1] + b"\n"
    (message,) = [record.getMessage() for record in caplog.records]
    assert "results.jsonl: its last line was cut" in message
    assert "results.jsonl.cut" in message


def test_a_whole_row_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": 2}')
    assert [row["n"] for row in load_rows(path)] == [1, 2]
    append_row(path, {"n": 3})
    assert [row["n"] for row in load_rows(path)] == [1, 2, 3]
    assert not (tmp_path / "results.jsonl.cut").exists()


def test_four_processes_lose_no_row_and_double_none(tmp_path: Path) -> None:
    path, together = tmp_path / "results.jsonl", get_context("forkserver").Barrier(4)
    writers = [started(write_rows, path, writer, 50, together) for writer in range(4)]
    while any(writer.is_alive() for writer in writers):
        load_rows(path)  # A reader finds only whole rows between the writes.
    assert [writer.exitcode for writer in writers] == [0] * 4
    actual = sorted((row["writer"], row["at"]) for row in load_rows(path))
    assert actual == [(writer, at) for writer in range(4) for at in range(50)]
    assert not (tmp_path / "results.jsonl.cut").exists()


@pytest.mark.parametrize("size", [1, 9, 5000, 100_000])
def test_a_row_that_its_writer_died_in_is_set_aside(size: int, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_row(path, {"n": 1})
    child = started(die_in_a_row, path, size)
    child.join()
    assert child.exitcode == -signal.SIGXFSZ
    assert not path.read_bytes().endswith(b"\n")
    assert load_rows(path) == [{"n": 1}]
    append_row(path, {"n": 2})
    assert load_rows(path) == [{"n": 1}, {"n": 2}]
    assert (tmp_path / "results.jsonl.cut").stat().st_size == size + 1


def test_a_full_disk_is_named_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*results\.jsonl"):
        append_row(tmp_path / "results.jsonl", {"n": 1})


def unit_of(row: dict[str, object]) -> str:
    return str(row["unit"])


def units_stored(path: Path) -> Counter[str]:
    return Counter(row["unit"] for row in load_rows(path))


def test_unit_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Leases(path, unit_of) as one, Leases(path, unit_of) as other:
        assert one.take("a")
        assert not other.take("a")
        assert [alive for _, alive in one.holders()] == [True]
        one.add({"unit": "a", "who": "one"})
        assert not other.take("a")
    assert load_rows(path) == [{"unit": "a", "who": "one"}]
    assert not list(tmp_path.glob(".*.lease"))


def test_lock_of_removed_lease_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a worker that opens a lease just before the holder removes the lease, and locks it just after."""
    path, lock = tmp_path / "rows.jsonl", lock_at_once
    with Leases(path, unit_of) as one, Leases(path, unit_of) as other:
        assert one.take("a")

        def late(file: BinaryIO) -> bool:
            one._release()
            return lock(file)

        monkeypatch.setattr(leases, "lock_at_once", late)
        assert not other.take("a")
        monkeypatch.undo()
        assert other.take("a")
        assert other.deaths == 0


def test_row_of_holder_that_died_is_not_made_again(tmp_path: Path) -> None:
    """Check a lease whose worker was killed after it had stored the row and before the release."""
    path = tmp_path / "rows.jsonl"
    (tmp_path / ".rows.jsonl-a.lease").write_text('{"pid": 1, "deaths": 0}', encoding="ascii")
    append_row(path, {"unit": "a"})
    with Leases(path, unit_of) as other:
        assert [alive for _, alive in other.holders()] == [False]
        assert not other.take("a")
        assert next(other.units(["b"], lambda unit: None)) == "b"
        other.add({"unit": "b"})
    assert units_stored(path) == Counter(["a", "b"])
    assert not list(tmp_path.glob(".*.lease"))


def right(study: str, placement: str, policy: str, budget: str) -> int:
    """Return the number of right answers about facts, counted in the file."""
    return sum(
        bool(cell["right"]) for row in rows_of(study)
        if (row["part"], row["placement"]) == ("confirm", placement)
        and row["task"] in (*evidence_rows.FACTS, *evidence_rows.FACT)
        for cell in row["cells"] if (cell["policy"], cell["budget"]) == (policy, budget)
    )


def tokens(study: str, policy: str, budget: str) -> float:
    """Return the mean number of kept tokens of the confirming samples, counted in the file."""
    kept = [
        float(np.mean(cell["kept"])) for row in rows_of(study) if row["part"] == "confirm" for cell in row["cells"]
        if (cell["policy"], cell["budget"]) == (policy, budget)
    ]
    return float(np.mean(kept))


@pytest.mark.law("figures-are-counted-right")
def test_every_table_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(evidence_pages.stale()) == []
    assert all(BLOCK.search(page.read_text(encoding="utf-8")) for page in evidence_pages.PAGES)
    page = tmp_path / "README.md"
    readme = evidence_pages.PAGES[0].read_text(encoding="utf-8")
    page.write_text(readme.replace("| CrystalCache | 308 | 53: ", "| CrystalCache | 308 | 54: "), encoding="utf-8")
    monkeypatch.setattr(evidence_pages, "ROOT", tmp_path)
    assert "README.md: table few" in evidence_pages.stale([page])


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("study", "n"), [("place", 28), ("place-2048", 34)])
def test_the_sentences_about_places_are_those_of_the_rows(study: str, n: int) -> None:
    """Check docs/results/place.md: at the start impact keeps the fact, and later random trunks keep more."""
    whole: dict[tuple[str, str, bool], list[bool]] = {}
    later: dict[str, list[float]] = {}
    for row in rows_of(study):
        if (row["part"], row["placement"]) == ("confirm", "paper"):
            for cell in row["cells"]:
                asked = cell["policy"], row["metadata"]["mentions"], row["metadata"]["depth"] == 0
                whole.setdefault(asked, []).append(cell["evidence_kept"] == row["evidence_tokens"])
                if (cell["policy"], row["metadata"]["depth"] > 0) == ("crystalcache", True):
                    share = float(np.mean(cell["evidence_kept"])) / row["evidence_tokens"]
                    later.setdefault(row["metadata"]["mentions"], []).append(share)
    for mentions in ("high", "low", "none"):
        assert sum(whole["crystalcache", mentions, True]) >= n - 2
        assert all(whole['crystalcache(graph="zero")', mentions, True])
        assert not any(whole['crystalcache(impact="uniform")', mentions, True])
        assert all(whole["streamingllm(N_sink=60)", mentions, True])
        assert sum(whole["crystalcache", mentions, False]) < sum(whole["random-trunks", mentions, False])
    assert {len(cells) for cells in whole.values()} == {n, 4 * n}
    assert {row[-2] for row in evidence_place.claims(study)[1:]} == {"holds"}
    _, sides, difference, *_ = evidence_place.claims(study)[1]
    assert sides == "no mention minus four mentions"
    assert difference.startswith(f"{np.mean(later['none']) - np.mean(later['high']):.2f} [")
    lines = evidence_place.picture(study).axes[0].get_lines()
    drawn = [round(float(np.asarray(line.get_ydata())[0]) * n) for line in lines]
    assert drawn == [sum(whole[policy, "high", True]) for policy in evidence_place.KEPT]


@pytest.mark.law("figures-are-counted-right")
def test_the_sentences_about_answers_by_place_are_those_of_the_rows() -> None:
    """Check docs/results/place.md: right answers about facts at the start, and about later facts by mentions."""
    right: dict[str, Counter[str]] = {}
    for row in rows_of("place-answers"):
        if row["part"] == "confirm":
            place = row["metadata"]["mentions"] if row["metadata"]["depth"] else "start"
            for cell in row["cells"]:
                right.setdefault(cell["policy"], Counter())[place] += cell["right"]
    later = {policy: count.total() - count["start"] for policy, count in right.items()}
    assert {policy: (right[policy]["start"], later[policy]) for policy in ("fullcache", "crystalcache")} == {
        "fullcache": (38, 168), "crystalcache": (36, 9),
    }
    assert (later["random-trunks"], later["snapkv"]) == (26, 149)
    assert (25 - later["crystalcache"]) / 168 < 0.1 <= (26 - later["crystalcache"]) / 168
    assert (right["crystalcache"]["high"], right["crystalcache"]["none"]) == (2, 4)
    assert right["evidence"] == right["fullcache"]
    claims = evidence_place.claims("place-answers")[1:]
    assert [line[-2:] for line in claims] == [["holds", "screening"]] * 4


@pytest.mark.law("figures-are-counted-right")
def test_the_sentences_about_further_policies_by_place_are_those_of_the_rows() -> None:
    """Check docs/results/place.md: shares of facts at the start and later, whole facts, contexts, and claims."""
    shares: dict[tuple[str, str], list[float]] = {}
    whole = Counter[str]()
    kvzip = [{**row, "cells": row["cells"][:1]} for row in rows_of("place-kvzip")]
    for row in (*rows_of("place-policies"), *kvzip):
        if row["part"] == "confirm":
            later = row["metadata"]["depth"] > 0
            for cell in row["cells"]:
                share = float(np.mean(cell["evidence_kept"])) / row["evidence_tokens"]
                for place in ("later", row["metadata"]["mentions"]) if later else ("start",):
                    shares.setdefault((cell["policy"], place), []).append(share)
                whole[cell["policy"]] += later and share == 1
    best = 'crystalcache(observed_layer=-3, graph="zero")'
    assert {key: f"{np.mean(share):.2f}" for key, share in shares.items() if key[1] in ("start", "later")} == {
        (best, "start"): "0.93", (best, "later"): "0.28", ("crystalcache", "start"): "0.95",
        ("crystalcache", "later"): "0.05", ("snapkv", "start"): "0.71", ("snapkv", "later"): "0.53",
        ("nestedkv", "start"): "0.37", ("nestedkv", "later"): "0.42", ("random-trunks", "start"): "0.15",
        ("random-trunks", "later"): "0.17", ("random", "start"): "0.20", ("random", "later"): "0.20",
        ("kvzip", "start"): "0.38", ("kvzip", "later"): "0.33",
    }
    assert [f"{np.mean(shares[best, mentions]):.2f}" for mentions in ("high", "none")] == ["0.22", "0.34"]
    assert (whole[best], whole["crystalcache"], whole["random-trunks"], whole["snapkv"]) == (44, 8, 26, 0)
    answered, further = ({row["sample"] for row in rows_of(study)} for study in ("place-answers", "place-policies"))
    assert answered == further > {row["sample"] for row in rows_of("place-kvzip")}
    claims = [line[-2:] for study in ("place-policies", "place-kvzip") for line in evidence_place.claims(study)[1:]]
    assert claims == [[outcome, "screening"] for outcome in ("open", "holds", "open", *["holds"] * 4)]


@pytest.mark.law("figures-are-counted-right")
def test_the_sentences_about_long_generation_are_those_of_the_rows() -> None:
    """Check docs/results/long-decodes.md: late answers, shorter and longer copies, and copies without an eviction."""
    rows = rows_of("long-decodes")
    late = dict.fromkeys(long_decodes.POLICIES, 0)
    copies: dict[str, list[float]] = {policy: [] for policy in long_decodes.POLICIES}
    for row in rows:
        if row["task"] == "late":
            late[row["policy"]] += row["score"]
        else:
            copies[row["policy"]].append(row["score"])
    assert late == {**dict.fromkeys(late, 0), "fullcache": 16, "rkv": 1}
    assert copies["triattention"] == copies["crystalcache(decode=true)"] == copies["fullcache"]
    short = {"h2o", "tova", "morphkv", "snapkv/every=64"}
    for policy in (*short, "rkv"):
        assert (long_decodes.difference(rows, "copy", policy, "score").high < 0) == (policy in short)
        assert long_decodes.difference(rows, "copy", policy, "length").low > 0
        lengths = {
            one: [row["length"] for row in rows if (row["task"], row["policy"]) == ("copy", one)]
            for one in (policy, "fullcache")
        }
        assert sum(length >= 2 for length in lengths[policy]) >= 14
        apart = np.sign(np.subtract(lengths[policy], lengths["fullcache"]))
        assert 21 * mcnemar(int((apart < 0).sum()), int((apart > 0).sum())) > 0.05  # an exact sign test, 21 statements


@pytest.mark.law("figures-are-counted-right")
def test_the_sentences_about_the_local_salience_are_those_of_the_rows() -> None:
    """Check docs/results/place.md: no form beats random trunks at its claims, and rarity keeps fewest facts."""
    whole: dict[str, list[int]] = {}
    for row in rows_of("local-salience"):
        if row["part"] == "confirm":
            for cell in row["cells"]:
                counts = whole.setdefault(cell["policy"], [0, 0])
                counts[row["metadata"]["depth"] > 0] += cell["evidence_kept"] == row["evidence_tokens"]
    assert {name: sum(counts) for name, counts in whole.items() if name in (
        "random-trunks", "local-trunks", "rarity-trunks", "local-salience-trunks",
    )} == {"random-trunks": 33, "local-trunks": 19, "rarity-trunks": 10, "local-salience-trunks": 59}
    assert whole["local-geometric-trunks"] == [26, 6]
    holding = [claim for claim, *_, outcome, _ in evidence_place.claims("local-salience")[1:] if outcome == "holds"]
    assert len(holding) == 4
    assert all("than at the start" in claim for claim in holding)


@pytest.mark.law("figures-are-counted-right")
def test_right_answers_of_the_readme_are_those_of_the_file() -> None:
    readme = evidence_pages.PAGES[0].read_text(encoding="utf-8").splitlines()
    for policy in ("nestedkv", "kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "crystalcache", "random"):
        line = next(line for line in readme if line.startswith(f"| {evidence_rows.NAMES[policy]} | "))
        counted, kept = right("facts", "after", policy, "0.3"), tokens("facts", policy, "0.3")
        shown = [cell.strip(" |").split(":")[0] for cell in line.split(" | ")[1:]]
        assert shown == [f"{kept:.0f}", str(counted)], policy


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("study", ["rules", "facts", "paper-tasks"])
def test_difference_and_counts_of_a_claim_are_of_the_same_samples(study: str) -> None:
    """Check against a defect: a row had a difference of 84 samples, and counts of 243 samples."""
    head, *lines = evidence_pages.decided(study)
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    by_answers = [one for one in rows if one["claim"].endswith("by answers")]
    assert by_answers
    for one in by_answers:
        first, second, n = map(int, re.findall(r"\d+", one["right answers"]))
        assert float(one["difference"].split()[0]) == pytest.approx((first - second) / n, abs=0.0051), one["claim"]


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize("study", ["blocks", "h2o", "heads"])
def test_committed_rows_are_rows_of_the_engine(study: str) -> None:
    """Check that each row is a separate sample, has the cells of its rules, and is counted."""
    rules = load_rules(evidence_rows.HOME / f"{study}.toml")
    rows = rows_of(study)
    assert {row["rules"] for row in rows} == {rules.digest}
    assert len({study_unit(row) for row in rows}) == len(merged(rows)) == len(rows)
    counted = result_table(summary(rows))
    names = {*rules.policies, "fullcache", "random", "evidence"}
    assert set(counted["policy"]) == names
    assert counted[counted["policy"] == "fullcache"]["n"].sum() == len(rows)


@pytest.mark.law("figures-are-counted-right")
def test_figures_in_sentences_are_those_of_the_rows() -> None:
    erratum = (evidence_rows.HOME / "erratum.md").read_text(encoding="utf-8")
    paper, drawn = (right("rules", "after", name, "0.3") for name in ("crystalcache", "random"))
    assert f"CrystalCache answers {paper} and the random set {drawn} " in erratum
    nested, other = (right("rules", "after", f, "0.2") for f in ("nestedkv", "crystalcache(observed_layer=-1)"))
    assert f"{nested} and {other} of 243" in erratum
    heads, nested = (right("advice", "after", name, "0.3") for name in ("kvzip-heads", "nestedkv"))
    assert f"{heads} and {nested} of 82 answers" in erratum
    guide = (evidence_rows.ROOT / "docs" / "guide" / "choose.md").read_text(encoding="utf-8")
    policies = ("kvzip", 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv", "crystalcache", "random-trunks")
    for study, size, budget in (("facts", "1 024", "0.3"), ("facts", "1 024", "0.15"), ("facts-2048", "2 048", "0.3")):
        n = sum(row["part"] == "confirm" for row in rows_of(study))
        most = 1.01 * float(budget) * int(size.replace(" ", ""))
        over = [tokens(study, one, budget) > most for one in policies]
        of_policies = [
            "over budget" if more else right(study, "after", one, budget)
            for one, more in zip(policies, over, strict=True)
        ]
        counts = [n, right(study, "after", "fullcache", "1.0"), *of_policies]
        assert f"| text of {size} tokens, budget {budget} | {' | '.join(map(str, counts))} |" in guide
    cells = ("chunkkv", "0.3"), ("snapkv", "0.3"), ("fullcache", "1.0")
    chunks, snap, full = (right("rules", "in_prompt", *cell) for cell in cells)
    sentence = f"{chunks} right answers with ChunkKV, {snap} right answers with SnapKV, and {full} right answers with"
    sentence += f" the full cache. With NestedKV it gave {right('rules', 'in_prompt', 'nestedkv', '0.3')}."
    assert f"The model gave {sentence}" in " ".join(guide.split())


def at_place(policy: str, low: float, high: float) -> tuple[int, int]:
    """Return right answers about facts at these depths of the study in three texts, and the number of samples."""
    rows = [
        row for row in rows_of("facts") if row["part"] == "confirm" and low <= row["metadata"]["depth"] < high
    ]
    return sum(_is_right(row, policy) for row in rows), len(rows)


def of_text(policy: str, text: str) -> tuple[int, int]:
    """Return the same numbers as `at_place` for one kind of text."""
    rows = [row for row in rows_of("facts") if row["part"] == "confirm" and row["metadata"]["text"] == text]
    return sum(_is_right(row, policy) for row in rows), len(rows)


@pytest.mark.law("figures-are-counted-right")
def test_samples_that_share_a_window_with_dev_samples_are_those_of_the_rows() -> None:
    """Check docs/results/smollm2/README.md: confirming samples that read windows of two sets of dev samples."""
    page = " ".join((evidence_rows.HOME / "README.md").read_text(encoding="utf-8").split())
    dev = {
        study: {_window(row) for row in rows_of(study) if row["part"] == "dev"} - {None}
        for study in ("crystalcache", "rules")
    }
    confirm = [row for row in rows_of("rules") if row["part"] == "confirm"]
    facts = [row for row in confirm if row["placement"] == "after" and row["task"] in evidence_rows.FACTS]
    sweep, same = (sum(_window(row) in dev[study] for row in facts) for study in ("crystalcache", "rules"))
    of_all = sum(_window(row) in dev["rules"] for row in confirm)
    assert f"{sweep} of the {len(facts)} samples read the window of a dev sample of the [dev sweep]" in page
    assert f"{same} of the {len(facts)} samples read the window of a dev sample of this study" in page
    assert f"{of_all} of {len(confirm)} samples in [known-limits.toml]" in page


def _window(row: Row) -> tuple[int, int] | None:
    return (row["length"], row["metadata"]["window"]) if "window" in row["metadata"] else None


def _is_right(row: Row, policy: str, budget: str = "0.3") -> bool:
    return any(cell["right"] for cell in row["cells"] if (cell["policy"], cell["budget"]) == (policy, budget))


@pytest.mark.law("figures-are-counted-right")
@pytest.mark.parametrize(("study", "budget"), [("facts", "0.3"), ("facts", "0.5"), ("facts-2048", "0.3")])
def test_the_lead_of_one_pass_over_nestedkv_is_significant_in_records_only(study: str, budget: str) -> None:
    """Check README.md, docs/guide/choose.md and docs/results/smollm2/README.md."""
    guide = " ".join((evidence_rows.ROOT / "docs" / "guide" / "choose.md").read_text(encoding="utf-8").split())
    for text in ("prose", "records", "code"):
        rows = [row for row in rows_of(study) if row["part"] == "confirm" and row["metadata"]["text"] == text]
        first, second = (
            [_is_right(row, policy, budget) for row in rows]
            for policy in ('crystalcache(observed_layer=-3, graph="zero")', "nestedkv")
        )
        p = mcnemar(int(np.greater(first, second).sum()), int(np.greater(second, first).sum()))
        assert p < 0.0001 if text == "records" else p > 0.05, (text, p)
        if budget == "0.3":
            assert f"{sum(first)} and {sum(second)} of {len(rows)}" in guide, text


@pytest.mark.law("figures-are-counted-right")
def test_advice_names_place_and_text_with_the_figures_of_the_rows() -> None:
    best, nested = 'crystalcache(observed_layer=-3, graph="zero")', "nestedkv"
    pages = [evidence_pages.PAGES[0], evidence_rows.ROOT / "docs" / "guide" / "choose.md"]
    for page in (" ".join(path.read_text(encoding="utf-8").split()) for path in pages):
        for text in ("prose", "records", "code"):
            (one, n), (two, _) = of_text(best, text), of_text(nested, text)
            assert f"{one} and {two} of {n}" in page, text
        for name, low, high in (("first tenth", 0.0, 0.1), ("between 0.1 and 0.8", 0.1, 0.8)):
            (paper, n), (drawn, _) = at_place("crystalcache", low, high), at_place("random-trunks", low, high)
            assert f"{paper} and {drawn} of {n} facts" in page, name
