"""Engines: what paged eviction refuses and cleans up, and policies that decide from the first layer alone."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompileConfig, ContinuousBatchingConfig
from transformers.generation.continuous_batching import continuous_api, scheduler
from transformers.generation.continuous_batching.scheduler import Scheduler
from typer.testing import CliRunner

from conformance.measure.paged import greedy, pool
from conformance.own.models_integration.engines.test_paged import Between, all_free, prompts, serve
from conformance.own.models_integration.session.families import ENDS, FAMILIES, SLIDING, build, prompt
from conformance.own.models_integration.session.sessions import REHEARSED, snapshot
from models_integration import CrystalCache, CustomPolicy, FullCache, Published, RetentionPolicy, StreamingLLM
from models_integration.cli.app import app
from models_integration.engines.keep import keep
from models_integration.engines.paged import PagedSession
from models_integration.pocket import ASSETS, load_pocket
from models_integration.policies.values import sentence_ends
from spec.arrays import BoolVector
from spec.errors import SpecError
from spec.parameters import TINY
from spec.policy import Observation, Scores

pytestmark = pytest.mark.law("refused-before-anything-changes")


POLICIES: dict[str, tuple[Callable[[], RetentionPolicy], str]] = {
    "adakv": (lambda: Published("adakv", 0.4), "adakv"),
    "pyramidkv": (lambda: Published("pyramidkv", 0.4), "same number of tokens"),
    "kvzip-uniform": (lambda: Published("kvzip-uniform", 0.4, **REHEARSED), "needs a second pass"),
    "diverse-kvzip-uniform": (lambda: Published("diverse-kvzip-uniform", 0.4, **REHEARSED), "over each prompt"),
    "h2o": (lambda: Published("h2o", 0.4), "while tokens are generated"),
    "crystalcache with breaths": (lambda: CrystalCache(0.4, ENDS, TINY, "numpy", decode=True), "while tokens"),
    "crystalcache in a stream": (lambda: CrystalCache(40, ENDS, TINY, "numpy", stream=True), "while tokens"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_pages_cannot_follow_is_named(name: str) -> None:
    make, words = POLICIES[name]
    with pytest.raises(SpecError, match=words) as caught:
        PagedSession(make(), build("llama"))
    assert caught.value.argument == "policy"


def test_a_model_with_windows_is_named() -> None:
    with pytest.raises(SpecError, match="sliding-window") as caught:
        PagedSession(StreamingLLM(0.4), build("gemma3"))
    assert caught.value.value == "Gemma3ForCausalLM"


@pytest.mark.parametrize(("options", "argument"), [
    ({"allow_block_sharing": True}, "allow_block_sharing"),
    ({"allow_block_sharing": False, "use_async_batching": True}, "use_async_batching"),
    ({"allow_block_sharing": False, "varlen_compile_config": CompileConfig()}, "varlen_compile_config"),
    ({"allow_block_sharing": False, "cpu_offload_space": 0.01}, "cpu_offload_space"),
])
def test_a_configuration_that_is_not_served_is_named(options: dict[str, Any], argument: str) -> None:
    model: Any = build("llama")
    before = snapshot(model)
    with PagedSession(StreamingLLM(0.4), model), pytest.raises(SpecError) as caught:
        model.generate_batch(prompts(2, (9, 20)), continuous_batching_config=ContinuousBatchingConfig(**options))
    assert caught.value.argument == argument
    assert all(map(torch.equal, before["weights"].values(), model.state_dict().values()))
    assert model.config._attn_implementation == "sdpa"


def test_forks_are_named() -> None:
    model: Any = build("llama")
    generation = greedy(4)
    generation.num_return_sequences, generation.do_sample = 2, True
    with PagedSession(StreamingLLM(0.4), model), pytest.raises(SpecError, match="num_return_sequences"):
        model.generate_batch(prompts(2, (9, 20)), generation_config=generation, continuous_batching_config=pool(20))


@pytest.mark.parametrize(("owner", "name", "gone"), [
    (continuous_api.ContinuousBatchProcessor, "update_batch", None),
    (Scheduler, "_schedule_request", lambda scheduler, requests: None),
])
def test_a_seam_that_is_gone_or_has_other_parameters_is_named(
    owner: type, name: str, gone: object, monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    monkeypatch.setattr(owner, name, gone)
    with pytest.raises(SpecError, match=f"has no .*{name}") as caught:
        PagedSession(StreamingLLM(0.4), model)
    assert caught.value.argument == "transformers"
    monkeypatch.undo()
    monkeypatch.delattr(scheduler, "Scheduler")
    with pytest.raises(SpecError, match="has no Scheduler"):
        PagedSession(StreamingLLM(0.4), model)


def test_contexts_do_not_nest_and_managers_do_not_outlive_them() -> None:
    model: Any = build("llama")
    with PagedSession(StreamingLLM(0.4), model) as run:
        with pytest.raises(SpecError, match="is already inside `with policy"), StreamingLLM(0.4)(model):
            pass
        with pytest.raises(SpecError, match="is already inside `with policy"), PagedSession(StreamingLLM(0.4), model):
            pass
        manager = model.init_continuous_batching(greedy(4), pool(20))
        manager.start()
    assert not manager.is_running()
    with pytest.raises(SpecError, match="session that has ended"):
        manager.warmup()
    with pytest.raises(SpecError, match="can be used once"), run:
        pass


def test_a_persistent_manager_serves_inside_the_block_alone() -> None:
    model: Any = build("llama")
    texts, options = prompts(3, (20, 40)), {"generation_config": greedy(4)}
    with PagedSession(StreamingLLM(0.4), model) as run:
        for _ in range(2):
            outputs = model.generate_batch(
                texts, continuous_batching_config=pool(40), persistent_manager=True, **options
            )
            assert len(outputs) == 3
    assert len(run.kept) == 6
    assert getattr(model, "_cached_continuous_batching_manager", None) is None
    model.generate_batch(texts, continuous_batching_config=pool(40), persistent_manager=True, **options)
    with pytest.raises(SpecError, match="already has a manager"), PagedSession(StreamingLLM(0.4), model):
        pass
    model.destroy_cached_continuous_batching_manager()
    assert len(serve(model, texts, pool(40), new=4)) == 3


class Moody:
    """A scorer that fails on every third length."""

    def __init__(self, scorer: Any) -> None:
        self.needs, self._own = scorer.needs, scorer

    def __call__(self, observation: Observation, protected: BoolVector, /) -> Scores:
        if observation.seen % 3 == 0:
            raise ArithmeticError(f"not {observation.seen} tokens")
        scores: Scores = self._own(observation, protected)
        return scores


def moody() -> CustomPolicy:
    policy = StreamingLLM(0.4, N_sink=2).method.policy
    return CustomPolicy(replace(policy, scorer=Moody(policy.scorer)), 0.4)


@pytest.mark.law("freed-memory")
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.nightly)])
def test_cancelled_and_failed_requests_leave_no_block(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, random, watched, ends = build("llama"), Random(2), Between(monkeypatch), list[Any]()
    served: Any = model
    texts = prompts(count, (2, 60))
    with (
        PagedSession(moody(), model) as run,
        served.continuous_batching_context_manager(
            generation_config=greedy(12),
            continuous_batching_config=pool(48, page=4, chunk=64),
        ) as manager,
    ):
        for place, text in enumerate(texts):
            manager.add_request(text, request_id=str(place))
            if random.random() < 0.5:
                manager.cancel_request(str(random.randrange(max(0, place - 8), place + 1)))
            if random.random() < 0.2:
                time.sleep(0.01)
        while manager.is_running() and not manager.input_queue.empty():  # it would fail what it has not read
            time.sleep(0.01)
    while (output := manager.get_result(timeout=0)) is not None:  # it has stopped, after the last request
        ends.append(output)
    assert all_free(watched.processors[-1])
    failed = [output for output in ends if output.error]
    assert len(failed) > count // 20
    assert {len(output.prompt_ids) % 3 for output in failed} == {0}
    assert "ArithmeticError" in failed[0].error or "tokens" in failed[0].error
    assert count // 20 < len(ends) - len(failed) < count - len(failed)  # some were answered, and some cancelled
    assert run.freed_pages > 0


@pytest.mark.law("freed-memory")
def test_a_forward_that_fails_leaves_no_block_and_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, watched, forwards = build("llama"), Between(monkeypatch), []

    def fail(*_: object) -> None:
        forwards.append(1)
        if len(forwards) == 4:
            raise RuntimeError("out of memory")

    handle = model.lm_head.register_forward_hook(fail)
    texts = prompts(6, (20, 40))
    with PagedSession(StreamingLLM(0.4), model):
        outputs = serve(model, texts, pool(30, chunk=48), new=12)
    handle.remove()
    assert sum(output.error is None for output in outputs.values()) < len(texts)
    assert all_free(watched.processors[-1])
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert model(torch.tensor([texts[0]])).logits.isfinite().all()


CRYSTAL = CrystalCache(0.4, ENDS, TINY, backend="numpy")
FIRST = (
    "embed", "layers.0.input_layernorm", "layers.0.self_attn.q_", "layers.0.self_attn.k_", "layers.0.self_attn.qkv",
    "layers.0.attention.query_key_value", "wte", "wpe", "h.0.ln_1", "h.0.attn.c_attn",
)


def kept(folder: Path, policy: RetentionPolicy, ids: torch.Tensor) -> list[int]:
    found: list[int] = keep(folder, policy, ids[0].tolist()).positions.tolist()
    return found


def sessions(model: Any, policy: RetentionPolicy, ids: torch.Tensor) -> list[int]:
    with torch.no_grad(), policy(model) as run:
        model(ids)
    assert run.kept is not None
    found: list[int] = run.kept.tolist()
    return found


@pytest.mark.law("decided-as-the-reference")
@pytest.mark.parametrize(("dtype", "backend"), [(torch.float32, "numba"), (torch.bfloat16, "numpy")])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SLIDING])
def test_the_first_layer_decides_as_a_session(
    family: str, dtype: torch.dtype, backend: str, tmp_path: Path,
) -> None:
    build(family, dtype=dtype).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).train(False)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if any(part in name for part in FIRST)}, file)
    policy = CrystalCache(0.4, ENDS, TINY, backend=backend)
    for seed, n in enumerate((2, 3, 40, 150)):
        assert kept(tmp_path, policy, prompt(n, seed)) == sessions(model, policy, prompt(n, seed))


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "0.self_attn.k_" not in name}, file)
    with pytest.raises(SpecError, match=r"layers\.0\.self_attn\.k_proj\.weight.*files of the model do not contain"):
        kept(tmp_path, CRYSTAL, prompt(20))


@pytest.mark.law("decided-as-the-reference")
def test_files_in_several_parts_and_policies_that_need_nothing(tmp_path: Path) -> None:
    model, ids = build("qwen2"), prompt(70)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert kept(tmp_path, CRYSTAL, ids) == sessions(model, CRYSTAL, ids)
    for part in tmp_path.glob("*.safetensors"):
        part.unlink()
    for policy in (StreamingLLM(0.3, N_sink=2), FullCache()):
        assert kept(tmp_path, policy, ids) == sessions(model, policy, ids)


@pytest.mark.parametrize(("policy", "words"), [
    (Published("snapkv", 0.4, W=4), "needs a forward pass .keys of all layers, the last 4 query rows"),
    (Published("h2o", 0.4), "needs a forward pass .keys of all layers, all query rows"),
    (Published("caote", 0.4), r"keys and values .*last 1 query rows, separate tokens for each layer"),
    (Published("expected-attention", 0.4), "needs factor, inv_freq from the whole model"),
    (CrystalCache(0.4, ENDS, replace(TINY, observed_layer=1), "numpy"), "needs layer 1, but only the first layer"),
])
def test_a_policy_with_other_needs_says_them(policy: RetentionPolicy, words: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=words):
        kept(tmp_path, policy, prompt(20))


@pytest.mark.parametrize("family", SLIDING)
def test_a_first_layer_with_a_window_is_named(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="needs layer 1, but only the first layer"):
        kept(tmp_path, CRYSTAL, prompt(20))


def test_a_folder_without_tensors_and_ids_that_are_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"folder with model\.safetensors"):
        kept(tmp_path, CRYSTAL, prompt(20))
    build("llama").save_pretrained(tmp_path)
    for ids in ([5], [5, 131], [-1, 5]):
        with pytest.raises(SpecError, match="at least two ids"):
            keep(tmp_path, CRYSTAL, ids)


@pytest.mark.law("as-it-is-described")
def test_the_command_prints_what_a_session_of_the_pocket_model_keeps(tmp_path: Path) -> None:
    model, tokenizer = load_pocket()
    file = tmp_path / "prompt.txt"
    file.write_text("The river runs past the old mill. The code is 7492. " * 12)
    ids = tokenizer(file.read_text(), return_tensors="pt").input_ids
    expected = sessions(model, CrystalCache(0.3, sentence_ends(tokenizer)), ids)
    said = CliRunner().invoke(app, ["keep", str(file), "--budget", "0.3", "--format", "json"])
    found = json.loads(said.stdout)
    assert [position for first, end in found["ranges"] for position in range(first, end)] == expected
    assert (found["seen"], found["kept"]) == (ids.shape[1], len(expected))
    lines = CliRunner().invoke(app, ["keep", str(file), "--model", str(ASSETS), "--dtype", "float32"]).stdout
    assert [list(map(int, line.split())) for line in lines.splitlines()] == found["ranges"]
