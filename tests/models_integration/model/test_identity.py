"""The identity of a model: equal for equal models, different for different models, and computed once."""

import copy
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import wraps
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from typer.testing import CliRunner

from experiments.studies.results import load_rows
from experiments.studies.subject import Loading
from kvspec.cli.app import app
from models_integration import NamedPolicy, RetainedCache, StreamingLLM, load_cache, save_cache
from models_integration.archive.errors import WrongModel
from models_integration.archive.library import Library
from models_integration.archive.store import Archive
from models_integration.model import identity as home
from models_integration.model import tensor_digest
from models_integration.model.identity import identify
from models_integration.pocket import load_pocket
from models_integration.policies.calibration import calibrate
from reference.calibration import save_calibration
from reference.injection.wrappers import Vocabulary
from spec.errors import SpecError
from tests.models_integration.archive.block_mask import FAMILIES, build
from tests.models_integration.model.identity_pairs import (
    CHANGES,
    DISGUISED,
    EQUAL,
    EXCHANGED,
    FIELDS,
    HOOKS,
    SAME,
    UNREADABLE,
    make_model,
)
from tests.models_integration.session.families import at_once, prompt

pytestmark = pytest.mark.law("an-identity-tells-apart")

VOCABULARY = Vocabulary(lambda text: [1], lambda ids: "x")
SAMPLED = 64


def negate(model: PreTrainedModel) -> PreTrainedModel:
    """Negate all values of each parameter except the first ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[SAMPLED:].neg_()
    return model


def moved(model: Any, device: str) -> PreTrainedModel:
    """Move the model to a device."""
    actual: PreTrainedModel = model.to(device, torch.float32)
    return actual


@pytest.fixture
def identified(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """Return a list to which each model is appended whose parameters are read for an identity."""
    seen: list[PreTrainedModel] = []
    weights = home._weights

    def noted(model: PreTrainedModel) -> str:
        seen.append(model)
        return weights(model)

    monkeypatch.setattr(home, "_weights", noted)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_models_have_one_identity(family: str) -> None:
    """Check a copy, a second instance and a moved model in every part. The model gets no new attribute."""
    model = build(family)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    actual = identify(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    for same in (copy.deepcopy(model), build(family), moved(model, "cpu")):
        assert identify(same) == actual
        assert identify(same).digest == actual.digest


def bit(model: PreTrainedModel) -> None:
    last = list(model.parameters())[-1].data.view(-1)
    last[-1] = torch.nextafter(last[-1], torch.tensor(9.0))


def window(model: PreTrainedModel) -> None:
    model.config.sliding_window = 7


def round_frequencies(model: PreTrainedModel) -> None:
    inner = model.get_submodule("model.rotary_emb")
    inner.register_buffer("inv_freq", inner.get_buffer("inv_freq").bfloat16(), persistent=False)


@pytest.mark.parametrize(("change", "parts"), [
    (bit, {"weights"}), (window, {"config"}), (round_frequencies, {"rotation", "rotation_dtype"}),
    # The two values differ in one bit.
    (lambda model: model.get_buffer("model.rotary_emb.inv_freq")[:1].mul_(1 + 2**-23), {"rotation"}),
    (lambda model: model.to(torch.bfloat16), {"weights", "rotation", "rotation_dtype", "dtype"}),
])
def test_a_difference_is_in_its_part_and_in_the_digest(
    change: Callable[[PreTrainedModel], Any], parts: set[str],
) -> None:
    model = build("Llama")
    before = identify(model)
    change(model)
    after = identify(model)
    assert {name for name, value in asdict(after).items() if value != asdict(before)[name]} == parts
    assert after.digest != before.digest
    assert after.named("a") != before.named("a")


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        actual = model(input_ids=prompt(24) % 131).logits
    assert isinstance(actual, Tensor)
    return actual


def check_apart(one: PreTrainedModel, other: PreTrainedModel) -> None:
    assert float((logits(one) - logits(other)).abs().max()) > 1e-3
    actual = [identify(model) for model in (one, other)]
    assert actual[0].digest != actual[1].digest
    assert actual[0].unrotated + actual[0].rotation != actual[1].unrotated + actual[1].rotation


@pytest.mark.parametrize(("family", "field", "first", "second"), FIELDS)
def test_models_that_differ_in_a_field_have_two_identities(family: str, field: str, first: Any, second: Any) -> None:
    """The parameters of the models are equal, but the answers differ."""
    one, other = (make_model(family, **{field: value}) for value in (first, second))
    assert identify(one).weights == identify(other).weights
    check_apart(one, other)


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("name", [*CHANGES, *DISGUISED])
def test_models_that_differ_in_a_value_or_a_module_have_two_identities(name: str) -> None:
    family, prepared, changed = {**CHANGES, **DISGUISED}[name]
    one, other = make_model(family), make_model(family)
    for model in (one, other):
        prepared(model)
    assert identify(one) == identify(other)
    changed(other)
    check_apart(one, other)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize("name", [*HOOKS, *EXCHANGED])
def test_a_model_that_somebody_steers_from_outside_is_refused_by_name(name: str) -> None:
    one, other = make_model("Llama"), make_model("Llama")
    {**HOOKS, **EXCHANGED}[name](other)
    assert float((logits(one) - logits(other)).abs().max()) > 1e-3
    with pytest.raises(SpecError, match=r"model = '.*(up_proj|norm)': has .*may change the answers: remove the"):
        identify(other)


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_does_not_say_what_it_holds_is_refused_by_name(name: str) -> None:
    model, (change, reason) = make_model("Llama"), UNREADABLE[name]
    change(model)
    with pytest.raises(SpecError, match=reason):
        identify(model)


class Leaking(torch.nn.Module):
    """Activation function defined by a user."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope)


@pytest.mark.parametrize("kind", [Leaking, torch.nn.LeakyReLU])
def test_an_activation_that_was_exchanged_before_the_model_was_made_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: type,
) -> None:
    models = [make_model("Llama")]
    for slope in (0.1, 0.7):
        monkeypatch.setitem(ACT2FN, "silu", (lambda slope: kind(slope), {"slope": slope}))
        models.append(make_model("Llama"))
    for at, one in enumerate(models):
        for other in models[:at]:
            check_apart(one, other)


@pytest.mark.law("refused-before-anything-changes")
def test_a_method_that_was_exchanged_in_a_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    kind = type(model.get_submodule("model.layers.0.mlp"))
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", wraps(forward)(lambda module, x: forward(module, x) * 2))
    with pytest.raises(SpecError, match="has the class LlamaMLP, whose method forward is not from its package"):
        identify(model)


class Steeper(Leaking):
    """Activation function whose base has the method."""


def code_of(module: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a new module of Python with this source."""
    actual = ModuleType(module)
    exec(source, vars(actual))
    monkeypatch.setitem(sys.modules, module, actual)
    return actual


@pytest.mark.law("refused-before-anything-changes")
def test_a_method_that_was_exchanged_in_a_base_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("Llama")
    model.get_submodule("model.layers.0.mlp").act_fn = Steeper(0.1)
    identify(model)
    other = code_of("elsewhere", "def forward(self, x): return x * 3", monkeypatch)
    monkeypatch.setattr(Leaking, "forward", other.forward)
    with pytest.raises(SpecError, match=r"layers.0.mlp.act_fn': has the class Steeper, whose method forward is not"):
        identify(model)


def test_the_code_of_a_model_has_one_identity_in_each_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the names of modules that transformers gives to the code of a model."""
    source = "from tests.models_integration.model.test_identity import Leaking\nclass Act(Leaking): pass"
    actual = []
    for folder, slope in (("one", 0.1), ("other", 0.1), ("other", 0.7)):
        model = make_model("Llama")
        home = code_of(f"transformers_modules.{folder}.0123abc.modeling_mine", source, monkeypatch)
        model.get_submodule("model.layers.0.mlp").act_fn = home.Act(slope)
        actual.append(identify(model))
    assert actual[0] == actual[1] != actual[2]


@pytest.mark.parametrize("name", sorted(ACT2FN))
def test_each_activation_of_transformers_is_described(name: str) -> None:
    assert identify(make_model("Llama", hidden_act=name)) == identify(make_model("Llama", hidden_act=name))


@pytest.mark.parametrize("family", ["GPTNeoX", "Llama"])
def test_embeddings_that_are_resized_make_the_model_that_is_loaded_from_what_was_saved(
    family: str, tmp_path: Path,
) -> None:
    model = make_model(family)
    before = identify(model)
    model.resize_token_embeddings(140)
    assert identify(model) != before
    model.save_pretrained(tmp_path)
    assert identify(type(model).from_pretrained(tmp_path)) == identify(model)


@pytest.mark.law("refused-before-anything-changes")
def test_a_hook_on_every_module_is_refused() -> None:
    hook = register_module_forward_hook(lambda module, inputs, output: None)
    with hook, pytest.raises(SpecError, match=r"'every module': has the forward hook, .*lambda"):
        identify(make_model("Llama"))


@pytest.mark.parametrize(("family", "name"), [
    *(("Llama", name) for name in [*SAME, *EQUAL]),
    *product(["Gemma3", "DeepseekV3"], ["read", "saved and loaded", "attention"]),
])
def test_what_changes_no_answer_makes_no_other_identity(family: str, name: str) -> None:
    """Check that the logits are equal too. Changes of SAME may change the order of sums."""
    model, (prepared, changed) = make_model(family), EQUAL.get(name) or (lambda model: None, SAME[name])
    prepared(model)
    before, answers = identify(model), logits(model)
    actual = changed(model)
    other = actual if isinstance(actual, PreTrainedModel) else model
    assert identify(other) == before
    bound = 1e-4 * max(1.0, float(answers.abs().max())) if name in SAME else 0.0
    assert float((logits(other) - answers).abs().max()) <= bound


def test_inside_a_context_a_model_is_who_it_was() -> None:
    model = make_model("Llama")
    before = identify(model)
    with StreamingLLM(20)(model) as run:
        at_once(model, prompt(40) % 131, RetainedCache(model.config))
        assert identify(model) == before
    assert run.cache is not None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_prompt_that_exchanges_frequencies_makes_no_other_model(kind: str) -> None:
    rotation = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    model = build("Llama", rope_parameters={**rotation, **factors}, max_position_embeddings=64)
    before, held = identify(model), model.get_buffer("model.rotary_emb.inv_freq").clone()
    with torch.no_grad():
        model(input_ids=prompt(100) % 131)
    assert not torch.equal(model.get_buffer("model.rotary_emb.inv_freq"), held)
    assert identify(model) == before


def test_a_tensor_of_several_chunks_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the digest is independent of the chunk size and depends on every value."""
    model = build("Llama")
    actual = identify(model)
    monkeypatch.setattr(tensor_digest, "CHUNK_BYTES", 40)
    assert identify(model) == actual
    assert identify(negate(build("Llama"))).weights != actual.weights
    assert tensor_digest.CHUNK_BYTES % 8 == 0


def test_a_model_with_other_values_behind_the_first_is_another_model_everywhere(tmp_path: Path) -> None:
    """Check saved caches, archives, calibrations and rows."""
    model, other, ids = build("Llama"), negate(build("Llama")), prompt(40) % 131
    assert identify(model).named("llama") != identify(other).named("llama")
    cache = RetainedCache(model.config)
    with StreamingLLM(20)(model):
        at_once(model, ids, cache)
    save_cache(cache, model, tmp_path / "cache")
    with pytest.raises(SpecError, match="was saved with weights"):
        load_cache(tmp_path / "cache", other)
    with Archive(tmp_path / "archive") as archive:
        key = Library(archive, model, VOCABULARY, "alice").put([5, 6, 7])
        with pytest.raises(WrongModel):
            Library(archive, other, VOCABULARY, "alice").get(key)
    chosen = NamedPolicy("triattention", 20, calibration=calibrate(model, ids.repeat(1, 7)))
    with chosen(model):
        pass
    with pytest.raises(SpecError, match="was made for a different model"):
        chosen(other)


def test_a_row_names_the_whole_model() -> None:
    subject = Loading("pocket", "numpy").subject()
    assert replace(subject, model=copy.deepcopy(subject.model)).name == subject.name
    assert replace(subject, model=negate(copy.deepcopy(subject.model))).name != subject.name


def test_a_library_makes_it_once_or_takes_it(identified: list[PreTrainedModel], tmp_path: Path) -> None:
    model = build("Llama")
    with Archive(tmp_path) as archive:
        library = Library(archive, model, VOCABULARY, "alice")
        keys = [library.put([5, 6, at]) for at in (7, 8, 9)]
        library.inject(None, keys)
        assert identified == [model]
        assert Library(archive, model, VOCABULARY, "alice", library.identity).get(keys[0]) is not None
    cache = RetainedCache(model.config)
    with StreamingLLM(20)(model):
        at_once(model, prompt(40) % 131, cache)
    save_cache(cache, model, tmp_path / "cache", library.identity)
    load_cache(tmp_path / "cache", model, library.identity)
    assert identified == [model]


def test_a_policy_with_statistics_takes_what_was_made_once(identified: list[PreTrainedModel]) -> None:
    model, ids = build("Llama"), prompt(40) % 131
    identity = identify(model)
    statistics = calibrate(model, ids.repeat(1, 7), identity)
    chosen = NamedPolicy("triattention", 20, calibration=statistics).knowing(identity)
    for _ in range(3):
        with chosen(model) as run:
            at_once(model, ids, RetainedCache(model.config))
        assert run.cache is not None
    assert identified == [model]


def test_a_command_makes_it_once_and_only_where_a_row_or_a_file_needs_it(
    identified: list[PreTrainedModel], tmp_path: Path,
) -> None:
    text, archive, statistics = tmp_path / "text.txt", str(tmp_path / "archive"), tmp_path / "mine.npz"
    text.write_text("The secret code is 7492. The chair thanked the members.", encoding="utf-8")
    long = tmp_path / "long.txt"
    long.write_text(text.read_text(encoding="utf-8") * 20, encoding="utf-8")  # A calibration needs at least 256 tokens.
    model, _ = load_pocket()
    save_calibration(calibrate(model, prompt(256)), statistics)
    identified.clear()
    asked = ["compare", "--policies", "triattention,crystalcache", "--budgets", "160", "--tasks", "needle"]
    asked += ["--samples", "1", "--length", "200", "--no-controls", "--calibration", str(statistics)]
    for arguments, count in (
        (["compress", str(text)], 0), (["archive", "put", str(text), "--archive", archive], 1),
        ([*asked, "--out", str(tmp_path / "out")], 1), (["calibrate", str(long), "--out", str(statistics)], 1),
    ):
        actual = CliRunner().invoke(app, arguments)
        assert actual.exit_code == 0, actual.output
        assert len(identified) == count, arguments
        identified.clear()
    assert {row["model"] for row in load_rows(tmp_path / "out" / "study.jsonl")} == {identify(model).named("pocket")}
