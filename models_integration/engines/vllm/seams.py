"""Imports from vLLM, the methods that kvspec overrides or replaces, and the configurations that kvspec does not serve.

Only this module and `plugin.register` import vLLM, and only this module uses private names of vLLM.
"""

import inspect
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models_integration.engines.vllm.pages import check_pool
from models_integration.engines.vllm.selection import LayerFacts
from models_integration.engines.vllm.statement import KEY
from spec.errors import SpecError

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

__all__ = [
    "AdapterLogitsProcessor", "AsyncScheduler", "FullAttentionManager", "FullAttentionSpec", "GPUModelRunner",
    "Scheduler", "Worker", "attention_layers", "check_configuration", "check_layout", "check_memory",
    "check_stated_memory", "check_token_bytes", "check_version", "end_promptly", "layer_facts", "only_manager",
    "output_projection", "preempt", "replace_block_table", "replace_front_end", "rotary_frequencies", "shift_lengths",
    "spec_registry", "token_bytes_of", "undrawn_chunks", "use_piecewise_graphs", "watch_queries",
]

OLDEST, NEWEST = (0, 30), (0, 32)
_STOPPED = 130  # exit code of a server that was stopped while it started

Methods = Mapping[type, Mapping[str, str]]  # methods of classes, each with the first parameters

OVERRIDDEN: Methods = {
    Scheduler: {
        # Plans, steps that end at a decision, and statements. vLLM has no hook for them in 0.32.
        "add_request": "request", "schedule": "", "update_from_output": "scheduler_output model_runner_output",
        "_free_request": "request",
        # kvspec calls this method if every running request waits for blocks. Otherwise vLLM would wait forever.
        "_preempt_request": "request timestamp",
        # 0.32 has this method for connectors. A cached prefix must end before the queries that the policy reads.
        "_get_local_prefix_cache_hit": "request",
        # 0.32 has this method for drafters. It is the only place that shortens a step, for running and new requests.
        "_reserve_prefill_lookahead": "request num_computed_tokens num_new_tokens",
    },
    # These methods compute blocks from numbers of tokens, and an evicted request stores fewer.
    FullAttentionManager: {
        "get_num_blocks_to_allocate": "request_id num_tokens", "allocate_new_blocks": "request_id num_tokens",
        "cache_blocks": "request num_tokens", "pop_blocks_for_free": "request_id",
    },
    # The runner of 0.32 computes lengths and slots from positions, in `_prepare_inputs` alone.
    GPUModelRunner: {
        "get_kv_cache_spec": "", "execute_model": "scheduler_output", "sample_tokens": "grammar_output",
        "_prepare_inputs": "scheduler_output num_scheduled_tokens",
    },
}
"""Methods that kvspec overrides or calls."""


def replace_front_end(new: Mapping[str, Callable[..., Any]]) -> None:
    """Replace methods of vLLM's front end. Later calls do nothing.

    Args:
        new: functions by the name of the method. The first argument is vLLM's own method, the second is `self`.
    """
    # vLLM 0.32 creates these objects itself, and has no hook for the content of an answer or of a stream.
    # A worker process imports this module too, and needs no HTTP server.
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.v1.engine.output_processor import RequestState

    sampling = "max_tokens default_sampling_params"

    replaced: Methods = {
        RequestState: {
            "make_request_output": "new_token_ids pooling_output finish_reason stop_reason kv_transfer_params",
            "_new_completion_output": "token_ids finish_reason stop_reason",
        },
        OpenAIServingCompletion: {
            "request_output_to_completion_response": "final_res_batch",
            "completion_stream_generator": "request engine_inputs result_generator",
        },
        OpenAIServingChat: {"chat_completion_stream_generator": "request result_generator"},
        # vLLM 0.32 calls `validate_params` after the start of a stream, when the HTTP status is 200.
        # It makes a new request for each token of each beam, without the arguments of the user's request.
        ChatCompletionRequest: {"to_sampling_params": sampling, "to_beam_search_params": sampling},
        CompletionRequest: {"to_sampling_params": sampling, "to_beam_search_params": sampling},
        ResponsesRequest: {"to_sampling_params": "default_max_tokens default_sampling_params"},
        BeamSearchOfflineMixin: {"beam_search": "prompts params"},
    }
    if not hasattr(RequestState.make_request_output, KEY):
        check_methods(replaced)
        for owner, methods in replaced.items():
            for name in methods:
                setattr(owner, name, _around(getattr(owner, name), new[name]))


def _around(original: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return new(original, self, *args, **kwargs)

    setattr(method, KEY, True)
    return method


def end_promptly() -> None:
    """Let `vllm serve` end within seconds of a SIGTERM, even during its start or if clients do not read streams."""
    from vllm.entrypoints.cli import serve
    from vllm.v1.engine import utils

    # vLLM 0.32 gives these arguments to uvicorn, which otherwise waits for a client until the client reads.
    serve.run_server = partial(serve.run_server, timeout_graceful_shutdown=3)
    # During the start of vLLM 0.32, SIGTERM raises a KeyboardInterrupt. This context manager ignores the exception, so
    # that the start goes on, and the server serves.
    utils.zmq_socket_ctx = _interruptible(utils.zmq_socket_ctx)


def _interruptible(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def context(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(*args, **kwargs) as socket:
            try:
                yield socket
            except KeyboardInterrupt:
                sys.exit(_STOPPED)

    return context


def check_version() -> None:
    """Check that the installed vLLM is a tested version: vLLM does not declare the interfaces as stable."""
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if match is None or not OLDEST <= tuple(map(int, match.groups())) <= NEWEST:
        tested = " to ".join(f"{major}.{minor}" for major, minor in dict.fromkeys((OLDEST, NEWEST)))
        raise SpecError("vllm", vllm.__version__, f"kvspec was tested with {tested}: install one of these versions")
    check_methods(OVERRIDDEN)


def check_methods(methods: Methods) -> None:
    """Check that the installed vLLM has methods with these first parameters."""
    for owner, name, words in ((owner, *one) for owner, each in methods.items() for one in each.items()):
        expected, method = tuple(words.split()), getattr(owner, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1 : 1 + len(expected)] != expected:
            reason = f"has no {owner.__name__}.{name} with ({', '.join(expected)}, ...)"
            raise SpecError("vllm", vllm.__version__, reason)


def refusals(config: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the option, the value and the reason of each part of a configuration that kvspec does not serve."""
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    moved = "moves pages by position, and evicted tokens have no page"
    yield "speculative_config", config.speculative_config, "drafted tokens are taken back, and decisions are not"
    # vLLM 0.32 makes a connector of this option, so the option comes first.
    yield "kv_offloading_size", getattr(cache, "kv_offloading_size", None), f"offloading {moved}"
    yield "kv_transfer_config", config.kv_transfer_config, f"a connector {moved}"
    yield "ec_transfer_config", getattr(config, "ec_transfer_config", None), f"a connector {moved}"
    for name in ("pipeline", "tensor", "decode_context", "prefill_context"):
        size = getattr(parallel, f"{name}_parallel_size", 1)
        yield f"{name}_parallel_size", size > 1 and size, "a rank has only a part of the layers, heads or tokens"
    yield "data_parallel_size", (size := parallel.data_parallel_size) > 1 and size, "was not tested"
    # vLLM 0.32 has no public field for the number of API servers, and sets this field if there are several.
    yield "api_server_count", (size := getattr(parallel, "_api_process_count", 1)) > 1 and size, (
        "statements, metrics and the end after SIGTERM were tested with one server: type --api-server-count 1"
    )
    yield "kv_cache_dtype", "fp8" in (dtype := str(cache.cache_dtype)) and dtype, "policies read unquantised keys"
    yield "runner", model.runner_type != "generate" and model.runner_type, "only models that generate text are served"
    for name in ("is_encoder_decoder", "is_attention_free", "is_hybrid", "use_mla"):
        yield f"model ({name})", getattr(model, name, False), "has layers that are not full attention over keys"
    yield "sliding_window", model.get_sliding_window(), "a window counts slots, and evicted tokens have none"
    yield "uses_alibi", getattr(model, "uses_alibi", False), "ALiBi computes distances from slots"
    yield "kv_sharing_fast_prefill", getattr(cache, "kv_sharing_fast_prefill", False), "skips layers of the prompt"
    graphs = config.compilation_config.cudagraph_mode
    yield "cudagraph_mode", graphs.has_full_cudagraphs() and graphs.name, "a graph of whole steps hides the queries"
    yield "VLLM_USE_V2_MODEL_RUNNER", config.use_v2_model_runner, "was not tested: set VLLM_USE_V2_MODEL_RUNNER=0"


def use_piecewise_graphs(config: Any) -> None:
    """Replace the default mode of CUDA graphs, in which `watch_queries` would not see the steps of answers."""
    # vLLM 0.32 replays a graph of a whole step without a call of `impl.forward`.
    graphs = config.compilation_config
    if graphs.cudagraph_mode.name == "FULL_AND_PIECEWISE":
        graphs.cudagraph_mode = type(graphs.cudagraph_mode).PIECEWISE


def check_configuration(config: Any) -> None:
    """Check that kvspec serves a configuration of vLLM. The message of the error contains the option."""
    check_version()
    for option, value, reason in refusals(config):
        if value:
            raise SpecError(option, value, f"is not served with eviction: {reason}")


def token_bytes_of(config: Any) -> int:
    """Return the bytes of the keys and values of a token in all layers of a model that kvspec serves."""
    model, parallel = config.model_config, config.parallel_config
    dtype = getattr(torch, str(config.cache_config.cache_dtype), None) or model.dtype  # "auto" is the model's dtype
    numbers: int = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    return numbers * int(dtype.itemsize)


def check_token_bytes(specs: Mapping[str, Any], stated: int | None) -> None:
    """Check that the layers store as many bytes for a token as `token_bytes_of` has computed."""
    stored = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
    if stated not in (None, stored):
        reason = f"is not served with eviction: its layers differ, because equal layers would have {stated} bytes"
        raise SpecError("model", f"{stored} bytes of a token", reason)


def check_memory(config: Any, available: int) -> None:
    """Check that a pool of `available` bytes stores one request of the longest length."""
    model, cache = config.model_config, config.cache_config
    # If the user types --max-model-len -1, vLLM chooses the length that fits.
    longest = 1 if getattr(model, "original_max_model_len", None) == -1 else model.max_model_len
    block_bytes = cache.block_size * token_bytes_of(config)
    check_pool(available, block_bytes, cache.block_size, longest, cache.num_gpu_blocks_override)


def check_stated_memory(config: Any) -> None:
    """Check the pool before vLLM starts a process, if options state the pool and the size of a block."""
    # On a GPU, the backend of vLLM 0.32 chooses the size of a block later, unless the user types a size.
    cache = config.cache_config
    stated = cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None
    if stated and (current_platform.is_cpu() or cache.user_specified_block_size):
        check_memory(config, cache.kv_cache_memory_bytes or 0)


def only_manager(scheduler: Any, kind: type) -> Any:
    """Return the manager of the scheduler's only group of layers, which must have full attention."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0]) is not kind:
        kinds = ", ".join(type(one).__name__ for one in managers)
        raise SpecError("model", kinds, "must have one group of layers with full attention")
    return managers[0]


def preempt(scheduler: Any, request: Any) -> None:
    """Preempt a request that is no longer in the list of running requests."""
    # vLLM 0.32 preempts a request only if a step lacks blocks, or all requests. Here a compaction lacks blocks.
    scheduler._preempt_request(request, time.monotonic())


def attention_layers(runner: Any) -> list[Any]:
    """Return the attention modules of the model, in the order of the layers."""
    # Each attention module of vLLM 0.32 adds itself here, because compiled code calls it by name.
    context = runner.compilation_config.static_forward_context
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    names.sort(key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
    return [context[name] for name in names]


def layer_facts(layer: Any) -> LayerFacts:
    """Return the constants of a layer's attention."""
    implementation = layer.impl
    # A model can have a window in some layers, and none in its configuration.
    window = getattr(implementation, "sliding_window", None)
    if window not in (None, -1, (-1, -1)):
        raise SpecError("sliding_window", window, "is not served with eviction: a window counts slots")
    caps = (getattr(implementation, name, None) for name in ("logits_soft_cap", "soft_cap"))
    softcap = next(filter(None, caps), None)
    return LayerFacts(float(implementation.scale), softcap, getattr(implementation, "sinks", None))


def watch_queries(layer: Any, seen: Callable[[Tensor], None]) -> None:
    """Call `seen` with the queries (tokens, H, d) of each forward pass of a layer, before the attention."""
    # vLLM 0.32 reads `impl.forward` of the layer in each call, in eager and in piecewise compiled mode.
    original = layer.impl.forward

    def forward(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen(query)
        return original(module, query, *args, **kwargs)

    layer.impl.forward = forward


def output_projection(model: Any, layer: Any) -> Tensor:
    """Return the rows (H, d, hidden) of a layer's output projection, in the dtype of the activations.

    The projection is applied to unit vectors, because a backend may store the weights in a different order.
    """
    block = model.get_submodule(layer.layer_name.rpartition(".")[0])
    project, heads, d = getattr(block, "o_proj", None), layer.impl.num_heads, layer.impl.head_size
    if project is None:
        raise SpecError("model", layer.layer_name, "has no output projection o_proj")
    # If vLLM 0.32 serves adapters, it wraps the projection. The wrapper adds the adapters of the last batch.
    project = getattr(project, "base_layer", project)
    units = torch.eye(heads * d, dtype=layer.kv_cache.dtype, device=layer.kv_cache.device)
    rows, zero = (project(given)[0] for given in (units, torch.zeros_like(units[:1])))
    projection: Tensor = (rows - zero).view(heads, d, -1)
    return projection


def rotary_frequencies(model: Any, layer: Any) -> Any:
    """Return the rotary frequencies (d / 2,) of a layer, which must rotate whole heads, without a scale."""
    block = model.get_submodule(layer.layer_name.rpartition(".")[0])
    rotary = getattr(block, "rotary_emb", None)
    if rotary is None or not getattr(rotary, "is_neox_style", False) or rotary.rotary_dim != rotary.head_size:
        raise SpecError("model", layer.layer_name, "must rotate the two halves of a whole head")
    if type(rotary).__name__ != "RotaryEmbedding":
        raise SpecError("model", type(rotary).__name__, "scales rotary frequencies; kvspec reads unscaled frequencies")
    # A layer of vLLM 0.32 stores cosines and sines, but no frequencies.
    return rotary._compute_inv_freq(rotary.base).double().cpu().numpy()


def check_layout(layer: Any, pages: Any, block_size: int) -> None:
    """Check that kvspec reads from block 0, vLLM's null block, what the backend has written there."""
    backend = layer.attn_backend.get_name()
    if pages.size != block_size:
        reason = f"{backend} stores blocks of {pages.size} tokens: type --block-size {pages.size}"
        raise SpecError("block_size", block_size, reason)
    d, cache = pages.keys.shape[3], layer.kv_cache
    keys, values = (
        torch.arange(pages.size * pages.heads * d, device=cache.device).view(pages.size, pages.heads, d).to(cache.dtype)
        * sign for sign in (1, -1)
    )
    slots = torch.arange(pages.size, device=cache.device)
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
    tensors = pages.read(torch.zeros(1, dtype=torch.long, device=cache.device), slots)
    if not all(torch.equal(tensor, one.transpose(0, 1)) for tensor, one in zip(tensors, (keys, values), strict=True)):
        raise SpecError("attention_backend", backend, "stores pages in an unknown order")
    layer.kv_cache[0].zero_()


def spec_registry() -> Any:
    """Return vLLM's registry of cache specs, with the specs of vLLM in it."""
    # vLLM 0.32 registers its own specs on first use, and only if the registry is empty. Without this call, the registry
    # would have only the spec of kvspec.
    KVCacheSpecRegistry._ensure_registered()
    return KVCacheSpecRegistry


def replace_block_table(runner: Any, request_id: str, blocks: Sequence[int]) -> None:
    """Replace the blocks of a running request in the runner's tables."""
    # vLLM 0.32 only appends to the blocks of a running request.
    runner.requests[request_id].block_ids = (list(blocks),)
    row = runner.input_batch.req_id_to_index.get(request_id)
    if row is not None:
        table = runner.input_batch.block_table[0]
        table.block_table.np[row, : table.num_blocks_per_row[row]] = 0
        table.add_row(list(blocks), row)


@contextmanager
def undrawn_chunks(runner: Any) -> Iterator[None]:
    """Context manager in which only the last chunk of a prompt uses random numbers of the request's generator.

    vLLM 0.32 draws a token for each chunk, and resets the generator with `Generator.set_offset`. A generator of PyTorch
    on the CPU has no such method, so the engine would stop at a request with a seed and several chunks.
    """
    batch, generators = runner.input_batch, dict(runner.input_batch.generators)
    for row in runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]:
        if int(row) in generators and generators[int(row)].device.type == "cpu":
            del batch.generators[int(row)]
    try:
        yield
    finally:
        batch.generators.update(generators)


def shift_lengths(runner: Any, shifts: Any, counts: Any) -> None:
    """Subtract the shifts of the rows from the lengths and slots of the prepared batch. Positions do not change."""
    # vLLM 0.32 computes lengths and slots from positions, and has lengths on the device and on the host.
    rows, total = len(shifts), int(counts.sum())
    given = torch.from_numpy(shifts)
    runner.seq_lens[:rows] -= given.to(runner.seq_lens)
    runner.optimistic_seq_lens_cpu[:rows] -= given.to(runner.optimistic_seq_lens_cpu)
    each = torch.from_numpy(shifts.repeat(counts)).to(runner.positions)
    starts = runner.query_start_loc.gpu[: rows + 1]
    runner.input_batch.block_table.compute_slot_mapping(rows, starts, runner.positions[:total] - each)
    held = runner.input_batch.block_table[0].num_blocks_per_row[:rows]
    size = runner.input_batch.block_table[0].block_size
    lengths = runner.optimistic_seq_lens_cpu[:rows].numpy()
    assert (held * size >= lengths).all(), "a request has more slots than its blocks"
