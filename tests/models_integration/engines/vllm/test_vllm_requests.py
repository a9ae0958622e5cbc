"""Kinds of requests: long answers, prompts near the size of a block or chunk, samples, stop strings and adapters."""

import asyncio
import copy
import json
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from conformance.paths import ROOT
from models_integration.engines.vllm.arguments import Settings, parse_request
from models_integration.engines.vllm.plugin import register
from models_integration.engines.vllm.statement import Statement
from models_integration.pocket import ASSETS, load_pocket
from models_integration.policies.calibration import calibrate
from models_integration.policies.methods import policy_from_name
from models_integration.session.method import decide
from models_integration.session.verbs import observe
from reference.calibration import Calibration, save_calibration
from spec.errors import SpecError
from tests.models_integration.engines.vllm.engine import (
    BLOCK,
    BYTES,
    NEEDS_VLLM,
    SHAPE,
    Engine,
    asking,
    check_logprobs,
    check_masked,
    check_sets,
    cut,
    parsed,
    row_of,
    stated,
)

pytestmark = [pytest.mark.law("eviction-equals-masking"), *NEEDS_VLLM]

CHUNK, ANSWER, BUDGET = 64, 600, 128
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1)
AT_NIGHT: Sequence[tuple[str, dict[str, Any]]] = (("rkv", {"every": 16}), ("h2o", {}), ("morphkv", {}))
RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(load_pocket()[0], torch.tensor([cut(300, 100)]))


@pytest.fixture(scope="module")
def engine(calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine whose steps process one chunk of CHUNK tokens, with a policy that needs a calibration."""
    path = tmp_path_factory.mktemp("calibration") / "calibration.npz"
    save_calibration(calibration, path)
    default = {"policy": "triattention", "budget": 0.3, "calibration": str(path)}
    return Engine({"on_unserved": "full", "default": default}, max_num_batched_tokens=CHUNK)


def test_a_calibrated_policy_of_the_server(engine: Engine, calibration: Calibration) -> None:
    prompt, (model, _) = cut(300, 7), load_pocket()
    output, later = engine.answer([prompt] * 2, [asking(None), asking("triattention", 60, budget=90, slack=16)])
    check_masked(prompt, output)
    check_masked(prompt, later)
    assert [one["seen"] for one in stated(later)["evictions"]] == [300, 316, 332, 348]
    assert stated(output)["policy"] == "triattention"
    (one,) = parsed(prompt, output.outputs[0].token_ids, stated(output)).evictions
    method = policy_from_name("triattention", 0.3, calibration=calibration).on(model)
    expected = decide(method, observe(model, torch.tensor([prompt]))).retentions[0]
    actual = [{*heads[0]} for heads in one.positions(*SHAPE)]
    for group, kept in enumerate(actual[: expected.groups]):
        assert len(kept) == len(expected.group(group))
        assert len(kept & {*expected.group(group).tolist()}) > 0.9 * len(kept)  # The rest can depend on rounding.


def test_a_memory_is_the_number_of_tokens_that_the_layers_store(engine: Engine) -> None:
    prompt, each = cut(300, 7), BYTES // BLOCK
    sized, counted = engine.answer([prompt] * 2, [
        asking("snapkv", 8, budget=budget, W=16) for budget in (f"{90 * each + 5}B", 90)
    ])
    assert stated(sized) == stated(counted)
    assert stated(sized)["budget"] == "90"
    check_sets(prompt, sized)
    with pytest.raises(SpecError, match=f"stores 15 tokens of {each} bytes, and the policy keeps at least 16"):
        parse_request({"policy": "snapkv", "budget": f"{15 * each}B", "W": 16}, Settings.of(engine.runner.vllm_config))
    from models_integration.engines.vllm.seams import check_token_bytes

    pages = {name: SimpleNamespace(page_size_bytes=128, block_size=4) for name in ("first", "second")}
    check_token_bytes(pages, 64)
    with pytest.raises(SpecError, match="model = '64 bytes of a token': is not served with eviction"):
        check_token_bytes(pages, 65)


@pytest.mark.parametrize(("name", "constants"), [
    ("tova", {}), *(pytest.param(name, constants, marks=pytest.mark.nightly) for name, constants in AT_NIGHT),
])
def test_a_long_answer_equals_masking_at_every_step(engine: Engine, name: str, constants: dict[str, Any]) -> None:
    prompt, most = cut(100), 0
    engine.llm.llm_engine.add_request(
        name, {"prompt_token_ids": prompt}, asking(name, ANSWER, budget=BUDGET, **constants)
    )
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    while engine.llm.llm_engine.has_unfinished_requests():
        outputs = engine.llm.llm_engine.step()
        most = max(most, *map(len, manager.req_to_blocks.values()), 0)
    check_masked(prompt, outputs[0])
    engine.check_nothing_left()
    every = constants.get("every", 1)
    evictions = stated(outputs[0])["evictions"]
    assert len(evictions) >= (len(prompt) + ANSWER - BUDGET) // every - 2
    assert all(sum(b - a for a, b in ranges) <= BUDGET for one in evictions for ranges in one["sets"])
    assert most <= -(-(BUDGET + every) // BLOCK) + 1  # the full cache has 22 blocks


@pytest.mark.parametrize("policy", [
    "snapkv", "tova", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("h2o-described", "rkv")),
])
def test_prompts_near_the_size_of_a_block_or_chunk(engine: Engine, policy: str) -> None:
    """Check one prompt at a time, so that each chunk has its full size."""
    asked = {
        "snapkv": asking("snapkv", 24, budget=0.5, W=8), "h2o-described": asking("h2o-described", 24, budget=0.5, W=8),
        "tova": asking("tova", 24, budget=16), "rkv": asking("rkv", 24, budget=20, every=4, W=4),
    }[policy]
    engine.llm.reset_prefix_cache()
    for n in LENGTHS:
        prompt = cut(n, n)
        (output,) = engine.answer([prompt], [asked])
        check_masked(prompt, output)
        if n > 1:  # a session needs two tokens
            check_sets(prompt, output)
        assert bool(stated(output)["evictions"]) == (n >= {"tova": 1, "rkv": 2}.get(policy, BLOCK - 1)), n


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("option", "given"), [
    ("pipeline_parallel_size", {"pipeline_parallel_size": 2}), ("tensor_parallel_size", {"tensor_parallel_size": 2}),
    ("data_parallel_size", {"data_parallel_size": 2}), ("kv_offloading_size", {"kv_offloading_size": 1.0}),
    ("speculative_config", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    ("runner", {"runner": "pooling"}), ("sliding_window", {"hf_overrides": {"sliding_window": 64}}),
    ("api_server_count", {"_api_process_count": 2, "_api_process_rank": -1}), ("worker_cls", {"worker_cls": "mine"}),
    ("scheduler_cls", {"scheduler_cls": "mine"}),
])
def test_options_without_eviction_are_refused_before_the_start(option: str, given: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    register()
    arguments = EngineArgs(str(ASSETS), enforce_eager=True, additional_config={"kvspec": {}})
    for name, value in given.items():
        setattr(arguments, name, value)
    with pytest.raises(SpecError, match=f"{option} = .*: (is not served with eviction: |must not be set)"):
        arguments.create_engine_config()


@pytest.mark.law("refused-before-anything-changes")
@pytest.mark.parametrize(("part", "name", "value"), [
    *(("model", f"is_{kind}", True) for kind in ("encoder_decoder", "attention_free", "hybrid")),
    ("model", "use_mla", True), ("model", "uses_alibi", True), ("cache", "cache_dtype", "fp8_e5m2"),
    ("cache", "kv_sharing_fast_prefill", True), ("parallel", "decode_context_parallel_size", 2),
    ("parallel", "prefill_context_parallel_size", 2), ("", "kv_transfer_config", "connector"),
    ("", "ec_transfer_config", "connector"), ("", "use_v2_model_runner", True),
])
def test_configurations_without_eviction_are_refused(
    engine: Engine, part: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:
    from models_integration.engines.vllm.seams import check_configuration

    config = engine.runner.vllm_config
    check_configuration(config)
    owner = getattr(config, f"{part}_config") if part else config
    monkeypatch.delitem(vars(owner), name, raising=False)  # a field, or a stored property
    monkeypatch.setattr(type(owner), name, value, raising=False)
    with pytest.raises(SpecError, match=f"(?i){name}"):
        check_configuration(config)


@pytest.mark.law("refused-before-anything-changes")
def test_graphs_of_whole_steps_are_replaced_or_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the configuration. On a CPU vLLM makes no graphs, and no graph of a GPU was tested."""
    from models_integration.engines.vllm.seams import check_configuration, use_piecewise_graphs

    config = engine.runner.vllm_config
    graphs, modes = config.compilation_config, type(config.compilation_config.cudagraph_mode)
    monkeypatch.setattr(graphs, "cudagraph_mode", modes.FULL_AND_PIECEWISE)
    use_piecewise_graphs(config)
    check_configuration(config)
    assert graphs.cudagraph_mode is modes.PIECEWISE
    graphs.cudagraph_mode = modes.FULL_DECODE_ONLY
    with pytest.raises(SpecError, match="cudagraph_mode = 'FULL_DECODE_ONLY': is not served with eviction: a graph of"):
        check_configuration(config)


def http_requests(**options: Any) -> list[Any]:
    """Return the requests of vLLM's server that can have a policy: chat, completion and response."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    chat = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **options)
    return [chat, CompletionRequest(prompt="x", **options), ResponsesRequest(input="x", **options)]


@pytest.mark.law("refused-before-anything-changes")
def test_a_bad_policy_is_refused_before_a_stream_begins(engine: Engine) -> None:
    """A stream with a bad policy was HTTP 200, because vLLM checks parameters after the first bytes of a stream."""
    known, unknown = ({"kvspec": json.dumps({"policy": name, "budget": 0.3})} for name in ("knorm", "nosuch"))
    for one in http_requests(vllm_xargs=known):
        assert one.to_sampling_params(8, {}).extra_args == known
    for one in http_requests(vllm_xargs=unknown):
        with pytest.raises(ValueError, match="kvspec: policy = 'nosuch': must be a built-in policy"):
            one.to_sampling_params(8, {})


@pytest.mark.law("refused-before-anything-changes")
def test_beam_search_with_a_policy_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beam search once ignored policies in silence, because vLLM makes requests without arguments."""
    from vllm.sampling_params import BeamSearchParams

    from models_integration.engines.vllm.front_end import PolicyParameters

    def params(settings: Settings, given: Any) -> list[Any]:
        monkeypatch.setattr(PolicyParameters, "settings", settings)
        asked = http_requests(use_beam_search=True, n=2, vllm_xargs=given and {"kvspec": given})
        return [one.to_beam_search_params(8, {}) for one in asked[:2]]

    default, asked = Settings({"policy": "knorm", "budget": 0.3}), '{"policy": "snapkv", "budget": 0.3}'
    for settings, given, name in ((Settings(), asked, "snapkv"), (default, None, "knorm"), (default, asked, "snapkv")):
        with pytest.raises(ValueError, match=f"use_beam_search = True: .* {name}: send use_beam_search=false, or the "):
            params(settings, given)
    with pytest.raises(ValueError, match="must be JSON"):
        params(Settings(), "{")
    for settings, given in ((Settings(), None), (default, '{"policy": "fullcache"}')):
        assert [one.beam_width for one in params(settings, given)] == [2, 2]
    with pytest.raises(SpecError, match=r"default = 'triattention': LLM\.beam_search .*: call generate, or"):
        engine.llm.beam_search([{"prompt_token_ids": cut(20)}], BeamSearchParams(beam_width=2, max_tokens=3))


@pytest.mark.law("as-it-is-described")
def test_an_answer_without_a_statement_is_that_of_vllm() -> None:
    """Check the outputs of beam search, for which the server once answered HTTP 500."""
    from models_integration.engines.vllm.front_end import _completion_response, _stream

    result = SimpleNamespace(outputs=[SimpleNamespace(index=0), SimpleNamespace(index=1)])
    response = SimpleNamespace(kv_transfer_params=None)
    assert _completion_response(lambda *_: response, None, [result]) is response
    assert response.kv_transfer_params is None

    async def results() -> AsyncIterator[Any]:
        yield result

    async def stream(serving: Any, request: Any, result_generator: Any) -> AsyncIterator[str]:
        async for _ in result_generator:
            yield "data: {}"

    async def chunks() -> list[str]:
        return [one async for one in _stream(stream, None, SimpleNamespace(n=2), results())]

    assert asyncio.run(chunks()) == ["data: {}"]


@pytest.mark.law("promised-is-there-forgotten-is-not")
def test_requests_cannot_add_any_number_of_labels_to_the_metrics() -> None:
    """Each text of a policy that is not served was once a label, which `/metrics` keeps until the server ends."""
    from models_integration.engines.vllm.front_end import FULL, _count

    def labels() -> set[str]:
        return {one.labels["reason"] for metric in FULL.collect() for one in metric.samples}

    before = labels()
    for policy in (f"{name}/sink={at}" for name in ("pyramidkv", "adakv:safeguard=0.25") for at in range(1, 9)):
        asked = parse_request({"policy": policy, "budget": 0.3}, Settings(on_unserved="full"))
        assert asked is not None
        _count(Statement({"evictions": [], "reason": asked.unserved}), 9)
    assert labels() - before <= {"adakv", "pyramidkv keeps more tokens in some heads than in others, and a block of"
                                 " vLLM has equally many"}


@pytest.mark.law("refused-before-anything-changes")
def test_an_unknown_vllm_or_several_groups_of_layers_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch,
) -> None:
    from models_integration.engines.vllm import seams

    with pytest.raises(SpecError, match=r"has no Scheduler\.schedule with \(nosuch, \.\.\.\)"):
        seams.check_methods({seams.Scheduler: {"schedule": "nosuch"}})
    (manager,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    monkeypatch.setattr(engine.scheduler.kv_cache_manager.coordinator, "single_type_managers", (manager, manager))
    with pytest.raises(SpecError, match="EvictingManager, EvictingManager': must have one group of layers"):
        seams.only_manager(engine.scheduler, type(manager))
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    with pytest.raises(SpecError, match=r"'0\.33\.0': kvspec was tested with 0\.30 to 0\.32: install one"):
        seams.check_version()


def test_the_log_says_once_which_policies_are_not_served(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from models_integration.engines.vllm import front_end

    register()
    monkeypatch.setattr(front_end, "install", lambda settings: None)  # The other tests need the settings of the engine.
    EngineArgs(str(ASSETS), enforce_eager=True, additional_config={"kvspec": {}}).create_engine_config()
    (text,) = [one.getMessage() for one in caplog.records if "policies that are not served" in one.getMessage()]
    assert "\n  adakv keeps more tokens in some heads than in others" in text
    assert "\n  kvzip reads each prompt twice" in text
    assert "snapkv" not in text


@pytest.mark.law("as-it-is-described")
def test_vllm_loads_the_installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads kvspec by its entry point, and `additional_config` alone then chooses eviction."""
    from vllm import plugins
    from vllm.engine.arg_utils import EngineArgs

    group, points = "vllm.general_plugins", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, function),) = points["entry-points"][group].items()
    (tmp_path / "installed-0.dist-info").mkdir()
    (tmp_path / "installed-0.dist-info" / "entry_points.txt").write_text(f"[{group}]\n{name} = {function}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: self.model)
    plugins.load_general_plugins()
    assert EngineArgs(str(ASSETS)).create_engine_config() == str(ASSETS)
    with pytest.raises(SpecError, match="nosuch"):
        EngineArgs(str(ASSETS), additional_config={"kvspec": {"nosuch": 1}}).create_engine_config()


@pytest.mark.law("refused-before-anything-changes")
def test_blocks_that_the_backend_divides_are_refused(engine: Engine) -> None:
    from models_integration.engines.vllm.seams import check_layout

    layer, pages = engine.runner.kvspec.layers[0], engine.runner.kvspec.pages[0]
    with pytest.raises(SpecError, match="block_size = 64: CPU_ATTN stores blocks of 32 tokens: type --block-size 32"):
        check_layout(layer, pages, 64)


SAMPLES = {"n": 3, "temperature": 1.0, "seed": 5}


def test_samples_of_a_request_equal_masking(engine: Engine) -> None:
    prompt = cut(97, 13)
    for policy in (asking("snapkv", 16, SAMPLES, budget=0.3, W=16), asking("tova", 16, SAMPLES, budget=48)):
        (output,) = engine.answer([prompt], [policy])
        check_masked(prompt, output, greedy=False)
        assert len({tuple(one.token_ids) for one in output.outputs}) > 1
        bodies = output.kv_transfer_params["kvspec"]
        assert [(one["index"], bool(one["evictions"])) for one in bodies] == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_an_answer_with_a_stop_string_equals_masking(engine: Engine, policy: str) -> None:
    prompt = cut(97, 13)
    constants: dict[str, Any] = {"budget": 0.3, "W": 16} if policy == "snapkv" else {"budget": 48}
    (whole,) = engine.answer([prompt], [asking(policy, 30, **constants)])
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    (stopped,) = engine.answer([prompt], [asking(policy, 30, {"stop": [stop]}, **constants)])
    check_masked(prompt, stopped)
    check_sets(prompt, stopped)
    answer = stopped.outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", stop, text[: text.index(stop)])
    assert list(answer.token_ids) == list(whole.outputs[0].token_ids)[: len(answer.token_ids)]
    assert len(answer.token_ids) < 30
    assert stated(stopped)["evictions"]


def test_log_probabilities_of_the_prompt_are_those_of_the_full_cache(engine: Engine) -> None:
    prompt = cut(150, 31)
    (output,) = engine.answer([prompt], [asking("snapkv", 8, {"prompt_logprobs": 3}, budget=0.3, W=16)])
    check_masked(prompt, output)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    given = [{token: entry.logprob for token, entry in each.items()} for each in output.prompt_logprobs[1:]]
    check_logprobs(row_of(prompt), 0, given)


def write_adapter(folder: Path) -> PreTrainedModel:
    """Write a LoRA adapter of the pocket model, and return the model with the adapter."""
    model, random = copy.deepcopy(load_pocket()[0]), torch.Generator().manual_seed(3)
    parts: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj", "o_proj"):
            linear = getattr(layer.self_attn, name)
            rows, columns = linear.weight.shape
            down = torch.randn(RANK, columns, generator=random) * 0.1
            up = torch.randn(rows, RANK, generator=random) * 0.1
            path = f"base_model.model.model.layers.{index}.self_attn.{name}"
            parts |= {f"{path}.lora_A.weight": down, f"{path}.lora_B.weight": up}
            linear.weight.data += ALPHA / RANK * up @ down
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "o_proj"],
        "task_type": "CAUSAL_LM",
    }))
    return model


def test_requests_with_an_adapter(tmp_path: Path) -> None:
    """Requests with and without an adapter run in one batch. A policy that reads weights keeps the full cache."""
    from vllm.lora.request import LoRARequest

    # On a CPU, vLLM 0.32 takes the last place of an adapter for requests without an adapter. Here this place is empty.
    places = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = Engine({"on_unserved": "full"}, max_num_batched_tokens=CHUNK, **places)
    adapted, adapter = write_adapter(tmp_path), LoRARequest("adapter", 1, str(tmp_path))
    asked = [
        asking("snapkv", 24, budget=0.3, W=16), asking("snapkv", 24, budget=0.3, W=16), asking("tova", 24, budget=64),
        asking("criticalkv", 24, budget=0.3), asking("criticalkv", 24, budget=0.3), asking(None, 24),
    ]
    adapters = [adapter, None, adapter, adapter, None, adapter]
    outputs = engine.answer([cut(150, 31)] * 6, asked, adapters)
    for output, chosen_adapter in zip(outputs, adapters, strict=True):
        check_masked(cut(150, 31), output, model=adapted if chosen_adapter else None)
        if chosen_adapter is None:
            check_sets(cut(150, 31), output)
    assert [bool(stated(one)["evictions"]) for one in outputs] == [True, True, True, False, True, False]
    assert stated(outputs[3])["reason"] == "criticalkv reads weights of the model, and the request has an adapter"


def test_the_smallest_pool_stores_one_request_of_the_longest_length() -> None:
    """Check the refusal, which comes before vLLM starts, against vLLM's pool with one reserved block."""
    from vllm.engine.arg_utils import EngineArgs

    smallest: dict[str, Any] = {"max_model_len": 4 * BLOCK, "kv_cache_memory_bytes": 5 * BYTES}
    arguments = EngineArgs(str(ASSETS), dtype="float32", block_size=BLOCK, additional_config={"kvspec": {}}, **smallest)
    arguments.kv_cache_memory_bytes = 5 * BYTES - 1
    message = f"'96 tokens': one request can have 128 tokens: type --kv-cache-memory-bytes {5 * BYTES}, or .* 96$"
    with pytest.raises(SpecError, match=message):
        arguments.create_engine_config()
    engine, prompt = Engine(**smallest), cut(4 * BLOCK - 8)
    (output,) = engine.answer([prompt], [asking(None, 8)])
    check_masked(prompt, output)
    assert engine.pool.num_gpu_blocks == 5
