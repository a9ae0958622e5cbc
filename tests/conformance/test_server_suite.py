"""Tests of the witness on servers that evict with sessions of kvspec, as stated or with a planted fault."""

import copy
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from conformance.paths import DOCS, ROOT, SPEC
from conformance.server_suite.judge import RULES, Reading, Witness
from conformance.server_suite.reading import policy_of, with_noise
from conformance.server_suite.ties import Difference, judged_differences
from conformance.verify import __main__ as verify_main
from conformance.verify import runs
from conformance.verify.certificate import write
from conformance.witness.client import Answer, Server, most_at_once
from conformance.witness.statement import Eviction, MalformedStatement, digest_of, parse_statement
from models_integration import RetentionPolicy, compact, decide, observe, policy_from_name
from models_integration.cache.continuation import Decision
from models_integration.cache.renumbering import Numbering, numbering_of
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import cache_name
from models_integration.pocket import load_pocket_tokenizer, model_folder
from models_integration.policies import methods
from models_integration.policies.methods import parse_policy
from models_integration.session.verbs import read
from reference.backend import BACKEND as REFERENCE
from spec.arrays import IntVector
from spec.errors import SpecError
from spec.retention import Granularity, Retention
from tests.conformance.local_server import running
from tests.conformance.server_verdicts import check_fault_is_named, check_right, verdict, verdicts
from tests.models_integration.session.sessions import skip_without_attention

Sets = list[list[int]]
"""Kept positions by full-attention layer and KV head, in one list."""


@dataclass
class Fault:
    """Difference between the behaviour of a server and its statement.

    Attributes:
        used: the sets that are stored instead of the stated sets, from (sets, n, sets of the previous request).
        stated: the sets that are stated instead of those of the policy.
        slots: True if the answer's positions are numbers of slots.
        renumbered: layers in which kept tokens are renumbered.
        full_logprobs: True if the log-probabilities are those of the full cache.
        late: True if digests are sent after the answer.
        stale: True if `used` gets the sets of the request before only if its client has left.
    """

    used: Callable[[Sets, int, Sets], Sets] = lambda sets, n, before: sets
    stated: Callable[[Sets, int], Sets] = lambda sets, n: sets
    slots: bool = False
    renumbered: Sequence[int] = ()
    full_logprobs: bool = False
    late: bool = False
    stale: bool = False


def keep_all(sets: Sets, n: int, before: Sets) -> Sets:
    return [list(range(n))] * len(sets)


def exchange_token(sets: Sets, n: int, before: Sets | None = None) -> Sets:
    """Exchange one token of the middle for one evicted token, in all sets."""
    return [sorted({*(set(p) - {p[len(p) // 2]}), min(set(range(n)) - set(p), default=0)}) for p in sets]


def one_more(sets: Sets, n: int) -> Sets:
    return [sorted({*kept, min(set(range(n)) - set(kept), default=0)}) for kept in sets]


def swap_heads(sets: Sets, n: int, before: Sets) -> Sets:
    return [sets[1], sets[0], *sets[2:]]


def other_request(sets: Sets, n: int, before: Sets) -> Sets:
    """Return the sets of the previous request, without positions beyond this prompt."""
    return [[position for position in kept if position < n] or [0] for kept in before] if before else sets


def faults_of(layers: int, heads: int) -> Mapping[str, tuple[Fault, str]]:
    """Return faults of a server by name, each with words of the witness that name the fault."""
    def keep_layer(sets: Sets, n: int, before: Sets) -> Sets:
        return [*sets[:heads], *keep_all(sets[:heads], n, before), *sets[2 * heads :]]

    return {
        "no eviction": (Fault(used=keep_all), "full cache"),
        "another set": (Fault(used=exchange_token), "stated set"),
        "another set, as stated": (Fault(stated=exchange_token), "against the policy"),
        "slot numbers": (Fault(slots=True), "'slots'"),
        "renumbered positions": (
            Fault(renumbered=range(layers)), "positions of the rule 'renumbered', not 'kept'",
        ),
        "a renumbered layer": (Fault(renumbered=[1]), "only in full-attention layer 1, positions are not those of"),
        "budget by one": (Fault(stated=one_more), "more than the budget"),
        "a layer whole": (Fault(used=keep_layer), "layer 1 evicted nothing"),
        "heads swapped": (Fault(used=swap_heads), "KV heads 0 and 1"),
        "another request's set": (Fault(used=other_request), "that of a different request"),
        "a cancelled request's set": (Fault(used=other_request, stale=True), "that of a cancelled request"),
        "full log-probabilities": (Fault(full_logprobs=True), "full cache"),
        "fixed after the fact": (Fault(late=True), "answer tokens"),
    }


FAULTS = faults_of(3, 2)
"""Faults of a server of the tiny model."""


@dataclass
class Evicting:
    """Completion server that evicts once after each prompt."""

    model: PreTrainedModel
    policy: str = "snapkv"
    budget: str = "0.4"
    fault: Fault = field(default_factory=Fault)
    before: Sets = field(default_factory=list)
    states: bool = True
    tokenizer: Any = None
    lock: Any = field(default_factory=threading.Lock)

    def answer(self, ids: Sequence[int], tokens: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream. The last event has the statement."""
        n, generator = len(ids), torch.Generator().manual_seed(seed)
        name, constants = parse_policy(self.policy)
        policy = policy_from_name(name, self.budget, tokenizer=self.tokenizer, **constants)
        observed = observe(self.model, torch.tensor([ids]))
        (retention,) = decide(policy.on(self.model), observed).retentions
        sets = [retention.group(group).tolist() for group in range(retention.groups)]
        config = self.model.config
        many, heads = config.num_hidden_layers, config.num_key_value_heads
        if len(sets) == many:
            sets = [positions for positions in sets for _ in range(heads)]
        sets = sets * (many * heads // len(sets))
        stated = self.fault.stated(sets, n)
        used = self.fault.used(stated, n, self.before)
        self.before = sets  # A client that leaves ends this function at one of its events.
        numbering = self.numbering()
        cache = compact(observed.cache, Decision((per_head(used, n),), numbering=numbering))
        ranges = [[[p, p + 1] for p in positions] for positions in stated]
        layers = [[layer * heads + head for head in range(heads)] for layer in range(many)]
        digests = {"kvspec": {"witness": 1, "digests": [digest_of(n, ranges, layers)]}}
        assert observed.logits is not None
        row, full = observed.logits[0, -1], observed.logits[0, -1]
        for at in range(tokens):
            if at == 1 and self.states and not self.fault.late:
                yield digests
            token = int(torch.multinomial(row.softmax(-1), 1, generator=generator))
            logprob = float((full if self.fault.full_logprobs else row).log_softmax(-1)[token])
            yield {"choices": [{"text": "", "token_ids": [token], "logprobs": {"token_logprobs": [logprob]}}]}
            if self.fault.full_logprobs:
                full = self.after(observed.cache, token)
            row = self.step(cache, token, len(used[0]) + at)
        if self.fault.stale:
            self.before = []
        if self.fault.late:
            yield digests
        eviction = {"seen": n, "sets": ranges, "layers": layers, "digest": digest_of(n, ranges, layers)}
        yield {} if not self.states else {"kvspec": {
            "witness": 1, "policy": self.policy, "budget": self.budget, "evictions": [eviction],
            "positions": "renumbered" if "renumbered" in self.policy else "kept",
        }}

    def numbering(self) -> Numbering | None:
        """Return the renumbering of the policy, or of the layers of the fault. Return None without renumbering."""
        layers = range(self.model.config.num_hidden_layers) if "renumbered" in self.policy else self.fault.renumbered
        if not layers:
            return None
        whole = numbering_of(self.model, describe(self.model))
        return replace(whole, layers={layer: whole.layers[layer] for layer in layers})

    def step(self, cache: Any, token: int, slot: int) -> torch.Tensor:
        """Return the logits after a token at its position in the text.

        With the fault `slots`, use the number of its slot.
        """
        if not self.fault.slots:
            return self.after(cache, token)
        with torch.no_grad():
            given = {"position_ids": torch.tensor([[slot]]), cache_name(self.model): cache}
            actual: torch.Tensor = self.model(input_ids=torch.tensor([[token]]), **given).logits[0, -1]
        return actual

    def after(self, cache: Any, token: int) -> torch.Tensor:
        logits = read(self.model, cache, torch.tensor([[token]])).logits
        assert logits is not None
        return logits[0, -1]


def per_head(sets: Sets, n: int) -> Retention:
    if all(kept == sets[0] for kept in sets):
        return Retention.shared(np.array(sets[0], dtype=np.int64), n)
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.int64)
    return Retention(np.concatenate([np.array(kept, dtype=np.int64) for kept in sets]), offsets, n, Granularity.HEAD)


@contextmanager
def serving(engine: Any) -> Iterator[str]:
    """Yield the address of a server that answers with an engine, one request at a time."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            """Log nothing."""

        def do_GET(self) -> None:
            self.send_json({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else {"version": "1"})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with engine.lock:
                events = engine.answer(asked["prompt"], asked["max_tokens"], asked["seed"])
                if asked["stream"]:
                    self.send_stream(events)
                else:
                    self.send_whole(list(events))

        def send_whole(self, events: list[dict[str, Any]]) -> None:
            choices = [event["choices"][0] for event in events if "choices" in event]
            whole = {
                "token_ids": [token for one in choices for token in one["token_ids"]],
                "logprobs": {"token_logprobs": [x for one in choices for x in one["logprobs"]["token_logprobs"]]},
            }
            self.send_json({"choices": [whole], "kv_transfer_params": events[-1]})

        def send_stream(self, events: Iterator[dict[str, Any]]) -> None:
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # The client may leave before the end.
                for event in events:
                    self.send_event(json.dumps(event))
                self.send_event("[DONE]")

        def send_event(self, text: str) -> None:
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

        def send_json(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with running(Handler) as url:
        yield url


SHARED = "shared prefixes"


@pytest.mark.parametrize(("policy", "group"), [
    ("snapkv", SHARED), ("snapkv(W=8)", SHARED), ("streamingllm", SHARED), ("chunkkv", SHARED), ("adakv", SHARED),
    ('snapkv(positions="renumbered")', SHARED), ("snapkv", "cancelled"),
])
def test_a_server_that_does_as_it_states_passes(model: PreTrainedModel, policy: str, group: str) -> None:
    with serving(Evicting(model, policy)) as url:
        check_right(verdicts(Witness(model, Server.of(url, "tiny")), group))


@pytest.mark.parametrize("group", ["recalled", SHARED])
def test_equal_tokens_may_be_ranked_by_rounding(model: PreTrainedModel, group: str) -> None:
    """Keys of equal tokens have equal norms in layer 0, so a server in float64 may keep a different one of them."""
    exact = copy.deepcopy(model).double()
    with serving(Evicting(exact, "knorm")) as url:
        witness = Witness(model, Server.of(url, "tiny"))
        outcome = [verdict(RULES["policy"], reading) for reading in witness.readings(group)]
    assert set(outcome) == {"passed"}


@pytest.mark.parametrize(("sequential", "clear", "tied"), [(True, {(0, 1, 2)}, {(0, 0, 1), (1, 1, 3)}), (False, {
    (0, 0, 1), (0, 1, 2), (1, 1, 3),
}, set())])
def test_after_a_tie_a_sequential_choice_decides_nothing(
    sequential: bool, clear: set[Difference], tied: set[Difference],
) -> None:
    """Noise exchanges tokens 4 and 5 of set 0, which have one id. Other differences are in set 1, or later."""
    ids = [1, 2, 3, 1, 7, 7]
    expected = [[[[0, 4], [0, 3]]], [[[0], [0]]]]
    stated = [[[[0, 1, 5], [0, 2, 3]]], [[[0], [0, 3]]]]
    noisy = [[[[0, 5], [0, 3]]], [[[0], [0]]]]
    assert judged_differences(stated, expected, ids, [noisy, noisy], sequential) == (clear, tied)


@pytest.mark.parametrize(("fault", "ids", "expected"), [
    (Fault(), np.random.default_rng(0).choice([5, 6, 7], 150), {"undecided", "passed"}),
    (FAULTS["another set, as stated"][0], np.random.default_rng(0).permutation(150), {"against the policy"}),
])
def test_a_tie_changes_all_later_choices_of_a_diverse_policy(
    model: PreTrainedModel, fault: Fault, ids: IntVector, expected: set[str],
) -> None:
    """Test a prompt whose equal tokens have scores in layer 0 that differ by 5e-9, or not at all after rounding.

    The prompt of the fault has no token twice, so that rounding decides nothing.
    """
    answer = Answer(ids.tolist())
    for event in Evicting(copy.deepcopy(model).double(), "diverse-leverage", fault=fault).answer(ids.tolist(), 3, 0):
        answer.take(event)
    actual = verdict(RULES["policy"], Reading(Witness(model, Server("", "tiny")), answer))
    assert any(words in actual for words in expected), actual


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_by_name(model: PreTrainedModel, name: str) -> None:
    fault, words = FAULTS[name]
    with serving(Evicting(model, "streamingllm" if fault.slots else "snapkv", fault=fault)) as url:
        actual = verdicts(Witness(model, Server.of(url, "tiny")), "cancelled" if fault.stale else SHARED)
    check_fault_is_named(actual, words)


@pytest.fixture
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `backend="auto"` be NumPy, so that no test compiles code."""
    monkeypatch.setattr(methods, "fastest", lambda *names: REFERENCE)


BREATHS = 'crystalcache(decode=true, T_breath=4, W_recent=8, sentence_ends=[200])'


@pytest.mark.usefixtures("numpy_alone")
@pytest.mark.parametrize(("policy", "budget"), [("tova", "0.4"), ("tova", "305"), (BREATHS, "0.4")])
def test_a_server_that_stops_to_evict_does_not_keep_what_its_policy_keeps(
    model: PreTrainedModel, policy: str, budget: str,
) -> None:
    """The policies also evict while the answer is generated, and the server evicts after the prompt alone."""
    with serving(Evicting(model, policy, budget)) as url:
        readings = Witness(model, Server.of(url, "tiny")).readings(SHARED)
        actual = [verdict(RULES["policy"], reading) for reading in readings]
    assert actual
    assert all("must be evicted" in one for one in actual), actual


@pytest.mark.parametrize(("fault", "expected"), [
    (Fault(), "passed"), (FAULTS["no eviction"][0], "nothing was evicted"),
])
def test_a_server_without_statements_is_asked_whether_it_evicts(
    model: PreTrainedModel, fault: Fault, expected: str,
) -> None:
    with serving(Evicting(model, fault=fault, states=False)) as url:
        actual = verdicts(Witness(model, Server.of(url, "tiny")), SHARED)
    assert {one for rule in ("size", "masking", "policy", "commitment") for one in actual[rule]} == {"undecided"}
    assert all(expected in one for one in actual["eviction"]), actual


@pytest.fixture(scope="module")
def pocket() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(model_folder("pocket")), dtype=torch.float32)
    return loaded


@pytest.mark.usefixtures("numpy_alone")
@pytest.mark.parametrize(("reads", "fault", "expected"), [
    (True, Fault(), "passed"), (False, Fault(), "undecided"),
    (True, FAULTS["another set, as stated"][0], "against the policy"),
])
def test_sentence_ends_that_are_not_stated_are_those_of_the_tokenizer(
    pocket: PreTrainedModel, reads: bool, fault: Fault, expected: str,
) -> None:
    tokenizer = load_pocket_tokenizer()
    with serving(Evicting(pocket, "crystalcache(W_recent=8)", fault=fault, tokenizer=tokenizer)) as url:
        witness = Witness(pocket, Server.of(url, "tiny"), tokenizer=tokenizer if reads else None)
        actual = [verdict(RULES["policy"], reading) for reading in witness.readings(SHARED)]
    assert actual
    assert all(expected in one for one in actual), actual


@pytest.mark.usefixtures("numpy_alone")
def test_whole_trunks_of_protected_tokens_may_exceed_the_budget(pocket: PreTrainedModel) -> None:
    """CrystalCache keeps the whole trunks of the first 4 and the last 128 tokens."""
    tokenizer = load_pocket_tokenizer()
    with serving(Evicting(pocket, "crystalcache", "0.1", tokenizer=tokenizer)) as url:
        witness = Witness(pocket, Server.of(url, "tiny"), tokenizer=tokenizer)
        readings = witness.readings(SHARED)
    sizes = [len(reading.events[0].sets[0][0]) for reading in readings]
    assert 132 < max(sizes) <= 194, sizes
    assert [verdict(RULES["size"], reading) for reading in readings] == ["passed"] * len(readings)


@pytest.mark.parametrize(("fault", "rule", "words"), [
    (Fault(), "masking", "passed"), (Fault(), "eviction", "passed"),
    (FAULTS["no eviction"][0], "masking", "full cache"), (FAULTS["no eviction"][0], "eviction", "nothing was evicted"),
])
def test_a_server_in_bfloat16(model: PreTrainedModel, fault: Fault, rule: str, words: str) -> None:
    skip_without_attention(torch.bfloat16)
    rounded = copy.deepcopy(model).bfloat16()
    with serving(Evicting(rounded, "streamingllm", fault=fault)) as url:
        actual = verdicts(Witness(model, Server.of(url, "tiny"), "bfloat16"), SHARED)[rule]
    decided = [one for one in actual if one != "undecided"]
    assert decided
    assert all(words in one for one in decided), actual


def test_the_pocket_model_in_bfloat16_is_far_inside_the_bound(pocket: PreTrainedModel) -> None:
    """Check the verdict "undecided": in bfloat16, the pocket model's answers depend too little on evicted tokens."""
    skip_without_attention(torch.bfloat16)
    rounded = copy.deepcopy(pocket).bfloat16()
    with serving(Evicting(rounded, "streamingllm")) as url:
        witness = Witness(pocket, Server.of(url, "tiny"), "bfloat16")
        readings = witness.readings(SHARED)
    for reading in readings:
        assert witness.bound.apart(reading.masked, reading.stated_logprobs) < witness.bound.tolerance / 4
        assert verdict(RULES["masking"], reading) == "undecided"


ROUNDED = [0.05, -0.02, 0.04, -0.1, 0.02, 0.996, -0.06, 0.1, 0.07, -0.03, 0.09, -0.09]
"""Differences like those of a right answer in bfloat16: 0.139 in the mean, and 0.996 for one token."""


@pytest.mark.parametrize(("moved", "right"), [(0.0, True), (1.0, False), (2.0, False)])
def test_a_token_that_rounding_moves_far_is_no_fault_in_bfloat16(
    model: PreTrainedModel, moved: float, right: bool,
) -> None:
    """Move the log-probabilities by a part of the difference between masking and the full cache."""
    skip_without_attention(torch.bfloat16)
    with serving(Evicting(model)) as url:
        (reading, *_) = Witness(model, Server.of(url, "tiny"), "bfloat16").readings(SHARED)
    assert reading.has_power
    noise = torch.tensor(ROUNDED * 2, dtype=torch.float64)
    reading.__dict__["stated_logprobs"] = reading.masked + moved * (reading.full - reading.masked) + noise
    assert (verdict(RULES["masking"], reading) == "passed") is right
    assert (verdict(RULES["eviction"], reading) == "passed") is (moved != 1.0)


@pytest.mark.parametrize(("noise", "expected"), [(2.0**-8, "stated set"), (0.5, "undecided")])
def test_an_answer_that_depends_on_rounding_is_undecided(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, noise: float, expected: str,
) -> None:
    skip_without_attention(torch.bfloat16)
    with serving(Evicting(model)) as url:
        witness = Witness(model, Server.of(url, "tiny"), "bfloat16")
        (reading, *_) = witness.readings(SHARED)
    reading.__dict__["stated_logprobs"] = reading.masked + 1.0
    monkeypatch.setattr(witness, "noisy", lambda: (with_noise(model, noise, seed) for seed in range(3)))
    assert expected in verdict(RULES["masking"], reading)


def test_requests_that_run_at_once_are_counted() -> None:
    spans = [(0, 4), (1, 2), (2, 6), (3, 5), (4, 9), (7, 8)]
    answers = [Answer([], times=[float(at) for at in span]) for span in spans]
    assert most_at_once(answers) == 3
    assert most_at_once([Answer([])]) == 0


@pytest.mark.nightly  # by day, a certificate is made and checked by the same command
def test_verify_judges_a_server(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    with serving(Evicting(model)) as url:
        command = [sys.executable, "-m", "conformance.verify", "--server", url, "--model", str(tmp_path / "tiny")]
        chosen = ["--", "-k", "shared and (masking or size)"]
        done = subprocess.run([*command, *chosen], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.law("an-identity-tells-apart")
def test_a_certificate_of_a_server_can_be_checked(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    """The suite is the part of `server_suite` about two rules and shared prefixes."""
    suite = shutil.copytree(ROOT / "conformance" / "server_suite", tmp_path / "suite")
    tests = (suite / "test_server.py").read_text().partition("\n\n\n@pytest.mark.row\n")[0]
    tests = re.sub("GROUPS = .*", f"GROUPS = {SHARED!r},", tests).replace("in RULES", "in ('masking', 'eviction')")
    (suite / "test_server.py").write_text(tests)
    monkeypatch.setitem(runs.SUITES, "server", suite)
    model.save_pretrained(tmp_path / "tiny")

    def verify(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["verify", *words])
        return verify_main.main()

    path, check = tmp_path / "out" / "certificate.toml", ["--out", str(tmp_path / "again"), "--yes"]
    engine = Evicting(model)
    with serving(engine) as url:
        assert verify("--server", url, "--model", str(tmp_path / "tiny"), "--out", str(path.parent)) == 0
        record = tomllib.loads(path.read_text())
        assert (record["verdict"], record["run"]["precision"]) == ("certified", "float32")
        assert verify("--check", str(path), *check) == 0, capsys.readouterr()
        assert "the certificate is true" in capsys.readouterr().out
        engine.fault = FAULTS["no eviction"][0]
        assert verify("--check", str(path), *check) == 1
        assert "server: eviction.verdict: pass in the certificate, fail now" in capsys.readouterr().out
        write(record | {"subject": {**record["subject"], "digest": "0"}}, path)
        assert verify("--check", str(path), *check) == 2
        assert "nothing was run" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--server", "http://127.0.0.1:1"], "model = None: is needed with --server"),
    (["--server", "http://127.0.0.1:1", "--model", "x"], "must answer GET /v1/models"),
    (["--server", "http://127.0.0.1:1", "--model", "x", "--precision", "float64"], "must be one of float32, bfloat16"),
])
def test_what_cannot_be_judged_is_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conformance.verify", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", (SPEC / "witness.md").read_text(), re.DOTALL)]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_of_the_page_are_statements(example: dict[str, Any]) -> None:
    jsonschema.validate(example, json.loads((SPEC / "witness.schema.json").read_text()))
    actual = parse_statement(example, {})
    assert [digest_of(one.seen, one.sets, one.layers) for one in actual.evictions] == [
        one["digest"] for one in example["evictions"]
    ]


def test_a_program_in_javascript_checks_the_digest() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    program = [node, str(DOCS / "examples" / "javascript" / "statement.mjs")]
    done = subprocess.run(program, input=json.dumps(EXAMPLES[0]), capture_output=True, text=True, check=True)
    assert done.stdout == "after 40 tokens: 0-3 38-39\n"
    (eviction,) = EXAMPLES[0]["evictions"]
    other = {**EXAMPLES[0], "evictions": [{**eviction, "seen": 41}]}
    assert subprocess.run(program, input=json.dumps(other), capture_output=True, text=True, check=False).returncode


WRONG = {
    "witness": 2, "policy": "", "budget": 0.3, "positions": "text", "prompt_ids": [-1], "answer_ids": "7",
    "logprobs": [-1.25], "evictions": None,
}
WRONG_EVICTION = {
    "seen": 43, "sets": [[[0, 4], [3, 40]]], "layers": [[1]], "digest": None,
}


@pytest.mark.parametrize("field", [*WRONG, *WRONG_EVICTION])
def test_a_malformed_statement_names_the_field(field: str) -> None:
    (eviction,) = EXAMPLES[0]["evictions"]
    changed = {"evictions": [{**eviction, field: WRONG_EVICTION[field]}]} if field in WRONG_EVICTION else {
        field: WRONG[field]
    }
    with pytest.raises(MalformedStatement, match=f"^{field} = "):
        parse_statement({**EXAMPLES[0], **changed}, {})


def test_an_answer_token_that_the_model_lacks_is_malformed(model: PreTrainedModel) -> None:
    answer = Answer([5, 6, 7], [70_000], [-0.5], {**EXAMPLES[1], "prompt_ids": [5, 6, 7], "answer_ids": [70_000]})
    for rule in ("size", "masking", "eviction", "policy"):
        actual = None
        try:
            RULES[rule](Reading(Witness(model, Server("", "tiny")), answer))
        except MalformedStatement as error:
            actual = str(error)
        assert actual == "answer_ids = 70000: must be below 256, the number of ids of --model"


@pytest.mark.parametrize("value", [
    float("nan"), float("inf"), -float("inf"), pytest.param(10**400, id="10**400"), True, "1", None,
])
def test_a_log_probability_is_a_finite_number(value: Any) -> None:
    with pytest.raises(MalformedStatement, match=r"^logprobs = .*: must be a list of finite numbers"):
        parse_statement({**EXAMPLES[0], "logprobs": [-1.25, value]}, {})


def test_sets_that_no_layer_uses_take_no_memory() -> None:
    """A million positions of an unused set once took 40 MB."""
    eviction = Eviction(10**6, [[[0, 2]], [[0, 10**6]]], [[0]], "")
    tracemalloc.start()
    try:
        assert eviction.positions(2, 2) == [[[0, 1], [0, 1]]] * 2
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", ["stated_by_a_server:POLICY", "stated_by_a_server:POLICY(W=4)"])
def test_the_name_that_a_server_states_imports_no_module(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "stated_by_a_server.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match=r"policy = 'stated_by_a_server.* must be a policy of kvspec"):
        policy_of(parse_statement({**EXAMPLES[0], "policy": name}, {}))


LOCAL = [
    'snapkv(backend="stated_by_a_server:X")', 'snapkv(Back_end="stated_by_a_server:X")',
    'crystalcache(backend="stated_by_a_server:X", sentence_ends=[1])', "snapkv:backend=numpy",
    "h2o:backend=triton/every=64", 'h2o/every=64(backend="stated_by_a_server:X")',
    "knorm/steps=h2o:backend=triton/every=64", "score=h2o:backend=triton/every=64",
    'q-filters(calibration="FILE")', 'kvzap(Calibration="FILE")', "kvzip(template=[[1], [2], [3]])",
]
"""Stated policies that would import a module, open a file, or replace the witness's template."""


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("text", LOCAL)
def test_a_stated_constant_imports_no_module_and_opens_no_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "stated_by_a_server.py").write_text("raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    given = text.replace("FILE", str(tmp_path / "no-such-file"))
    with pytest.raises(SpecError, match=r"(backend|calibration|template) = .*: must not be stated"):
        policy_of(parse_statement({**EXAMPLES[0], "policy": given}, {}))


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("text", "words"), [
    ("capkv(N_future=99999)", "N_future = 99999: must be at most 1024"),
    ("snapkv(W=2000)", "W = 2000: must be at most 1024"), ("snapkv:kernel=99999", "kernel = 99999"),
    ("snapkv/steps=snapkv:kernel=99999/every=64", "kernel = 99999"), ("snapkv/sink=4/every=64(W=1025)", "W = 1025"),
    ("knorm/pieces=1", "at least 16"),
    ("snapkv(W=100000000)", "a million"), ("adakv:safeguard=1e999_999_999", "a million"),
    ("snapkv(W=0xFFFFFFFF)", "W = 'a number': must be below 1000000"),
    ("streamingllm(N_sink=1_000_000)", "N_sink = 'a number': must be below"),
    ("crystalcache(sentence_ends=[1_000_000])", "sentence_ends = 'a number'"),
    ('snapkv(W="8")', "whole number"), ("snapkv(W=1979-05-27)", "whole number"),
    ("snapkv(positions=1)", "type of 'kept'"),
    (f"snapkv(W={'1_' * 5000}1)", "must be a policy name"), (f"snapkv(W={'[' * 5000})", "must be a policy name"),
])
def test_a_stated_constant_out_of_range_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        policy_of(parse_statement({**EXAMPLES[0], "policy": text}, {}))


@pytest.mark.parametrize("text", [
    "crystalcache(sentence_ends=[1, 2], decode=true)", 'streamingllm(positions="renumbered")', "snapkv:W=16",
    "snapkv/sink=4/recent=64(W=16)",
])
def test_a_stated_policy_in_range_is_accepted(text: str) -> None:
    actual = policy_of(parse_statement({**EXAMPLES[0], "policy": text, "budget": "0.3"}, {}))
    assert isinstance(actual, RetentionPolicy)


def test_a_statement_that_ends_early_is_checked_up_to_its_end() -> None:
    whole = {**EXAMPLES[0], "answer_ids": [7, 9, 8], "logprobs": [-1.25, -0.5, -2.0]}
    assert parse_statement(whole, {}).answer_ids == [7, 9, 8]
    actual = parse_statement({**whole, "until": 41}, {})
    assert (actual.answer_ids, actual.logprobs) == ([7, 9], [-1.25, -0.5])
    with pytest.raises(MalformedStatement, match=r"^until = 40"):
        parse_statement({**whole, "until": 40}, {})
