"""Time by stage, with the columns of the paper's Table 12: the paper's seconds beside ours."""

import statistics
import time

from conformance.measure.gpu.measure import Watch, median_ms, say, synchronize
from conformance.measure.gpu.models import Scale, Subject
from conformance.measure.gpu.report import Report, Table
from spec.backend import resolve

COLUMNS = ("length", "whose", "Forward", "S_i", "CoAttn", "M_i fin.", "Trunks", "Graph + D", "Evict", "End-to-end")
TOTALS = ("length", "whose", "CC overhead", "Forward + CC", "CC % of (Fwd + CC)", "CC % of end-to-end")
# Table 12, seconds on an H100 NVL: COLUMNS from Forward on, then TOTALS from CC overhead on.
PAPER = {
    4096: ("0.92 0.11 0.24 0.01 0.01 0.01 <0.01 3.34", "0.39 1.30 29.8 11.6"),
    8192: ("2.10 0.45 1.03 0.03 0.02 0.01 <0.01 6.74", "1.55 3.65 42.4 23.0"),
    16384: ("5.19 1.56 4.49 0.05 0.05 0.03 0.01 23.11", "6.18 11.37 54.3 26.7"),
    32768: ("14.67 5.55 19.91 0.11 0.11 0.05 0.02 85.45", "25.74 40.40 63.7 30.1"),
}


def profile(report: Report, scale: Scale, subject: Subject) -> None:
    """Both tables. Ours has S_i and CoAttn in one pass, and no time that is in none of the columns."""
    stages: list[tuple[str, ...]] = []
    totals: list[tuple[str, ...]] = []
    for n in scale.profiled:
        say(f"time by stage, n = {n}")
        forward, took, whole = _measured(scale, subject, n)
        evict = took["score"] + took["dissolve"] + took["compaction"]
        columns = (took["coattention"], took["impact"], took["trunks"], took["graph"], evict)
        overhead = sum(columns) + took.get("capture", 0.0)
        cells = (_s(forward), "in CoAttn", *(_s(x) for x in columns), _s(whole))
        shares = (f"{100 * overhead / (forward + overhead):.2f}", f"{100 * overhead / whole:.2f}")
        first, second = PAPER.get(n, ("- " * 8, "- " * 4))
        stages += [(str(n), "paper", *first.split()), (str(n), "here", *cells)]
        sums = (_s(overhead), _s(forward + overhead), *shares)
        totals += [(str(n), "paper", *second.split()), (str(n), "here", *sums)]
    report.tables += [
        Table("Time by stage, seconds (the paper's Table 12)", COLUMNS, tuple(stages)),
        Table("Overhead, seconds (the paper's Table 12)", TOTALS, tuple(totals)),
    ]
    report.notes.append(
        f"Table 12's columns on {subject.name}: medians of three prefills. Forward is a plain prefill with a full"
        " cache; S1 is one pass, hence one column; M_i fin. is S3, Trunks is S2 with the trunks' impact; Evict is S5,"
        f" S6 and the compaction. End-to-end is one generation of {scale.new_tokens} tokens. The paper's own"
        " columns, printed as they are there, leave 45 s of its End-to-end at 32K unexplained (decoding takes"
        " less than one)."
    )


def _measured(scale: Scale, subject: Subject, n: int) -> tuple[float, dict[str, float], float]:
    """Seconds of the forward alone, of each stage, and of a whole generation."""
    ids = subject.prompt(n)
    forward = median_ms(lambda: subject.forward(ids), min(3, scale.rounds)) / 1000
    runs = []
    for _ in range(min(3, scale.rounds) + 1):
        watch = Watch(resolve("triton"))
        _, beside = subject.generate(ids, watch.backend, scale, 0)
        runs.append({**beside, **watch.seconds})
    took = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    synchronize()
    start = time.perf_counter()
    subject.generate(ids, resolve("triton"), scale, scale.new_tokens)
    synchronize()
    return forward, took, time.perf_counter() - start


def _s(seconds: float) -> str:
    return f"{seconds:.4f}"
