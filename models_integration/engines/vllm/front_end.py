"""Check of a request's policy in vLLM's front end, and statements in answers, in streams and in `/metrics`."""

import inspect
import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, ClassVar

from prometheus_client import Counter
from transformers import AutoTokenizer

from models_integration.engines.vllm.arguments import RequestPolicy, Settings, parse_request
from models_integration.engines.vllm.seams import AdapterLogitsProcessor, replace_front_end
from models_integration.engines.vllm.statement import KEY, Statement
from models_integration.policies.values import sentence_ends
from spec.errors import BackendUnavailable, SpecError
from spec.witness import FORMAT

__all__ = ["PolicyParameters", "install", "sentence_ends_of"]

SEEN = Counter("kvspec_seen_tokens", "Prompt and answer tokens of finished requests.")
KEPT = Counter("kvspec_kept_tokens", "Prompt and answer tokens of finished requests that were not evicted.")
FREED = Counter("kvspec_freed_blocks", "Blocks that requests no longer held after evictions.")
FULL = Counter("kvspec_full_cache_requests", "Finished requests that kept their full cache.", ["reason"])
_NO_BEAMS = "makes a new request for each token, and evicts nothing with"


# The front end of vLLM 0.32 calls only `validate_params` of logits processors with the parameters of a new request.
class PolicyParameters(AdapterLogitsProcessor):
    """Logits processor that changes no logits. vLLM calls `validate_params` before a request reaches the engine.

    Attributes:
        settings: settings of the engine of this process that started last.
    """

    settings: ClassVar[Settings] = Settings()

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check the policy of a request. vLLM answers HTTP 400 with the message of the error.

        Raises:
            ValueError: if the policy, the budget or a constant is invalid, or not allowed by the server.
            RuntimeError: if kvspec has a bug. vLLM answers HTTP 500, and the log has the traceback.
        """
        _asked(sampling_params.extra_args, cls.settings)

    def is_argmax_invariant(self) -> bool:
        """Return True, so that greedy requests skip the processor."""
        return True

    def new_req_logits_processor(self, params: Any) -> None:
        """Return None: no request has a function for its logits."""


def install(settings: Settings) -> None:
    """Let vLLM's front end check requests, and add statements to answers."""
    PolicyParameters.settings = settings
    replace_front_end({
        "make_request_output": _make_request_output, "_new_completion_output": _new_completion_output,
        "request_output_to_completion_response": _completion_response,
        "completion_stream_generator": _stream, "chat_completion_stream_generator": _stream,
        "to_sampling_params": _sampling_params, "to_beam_search_params": _beam_search_params,
        "beam_search": _beam_search,
    })


def _asked(given: Mapping[str, Any] | None, settings: Settings) -> RequestPolicy | None:
    """Return the policy of a request with these extra arguments."""
    try:
        return parse_request((given or {}).get(KEY), settings)
    except (SpecError, BackendUnavailable) as error:
        raise ValueError(f"kvspec: {error}") from error
    except Exception as error:  # vLLM would answer HTTP 400 to a ValueError or TypeError, and not log it
        logging.getLogger(__name__).exception("kvspec: the arguments of a request could not be read")
        raise RuntimeError("kvspec: a bug; the log of the server has the traceback") from error


def _sampling_params(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the policy of a request before a stream begins. vLLM answers HTTP 400 with the message of the error."""
    _asked(request.vllm_xargs, PolicyParameters.settings)
    return original(request, *args, **kwargs)


def _beam_search_params(original: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a request for beam search with a policy. vLLM answers HTTP 400 with the message of the error."""
    if (asked := _asked(request.vllm_xargs, PolicyParameters.settings)) is not None:
        reason = f"{_NO_BEAMS} {asked}: send use_beam_search=false, or the policy fullcache in vllm_xargs"
        raise ValueError(f"kvspec: {SpecError('use_beam_search', True, reason)}")
    return original(request, *args, **kwargs)


def _beam_search(original: Any, llm: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse beam search by an engine with a default policy."""
    settings = Settings.of(llm.llm_engine.vllm_config)
    if (asked := _asked(None, settings)) is not None:
        reason = f"{_NO_BEAMS} {asked}: call generate, or leave the default out of additional_config"
        raise SpecError("default", asked.name, f"LLM.beam_search {reason}")
    return original(llm, *args, **kwargs)


def sentence_ends_of(model: Any) -> frozenset[int]:
    """Return the ids of the tokens that end a sentence, for vLLM's `model_config`. Empty without a known tokenizer."""
    options = {"revision": model.tokenizer_revision, "trust_remote_code": model.trust_remote_code}
    try:
        return sentence_ends(AutoTokenizer.from_pretrained(model.tokenizer, **options))
    except Exception as error:  # a tokenizer of another library, or none: only policies with sentences are refused
        logging.getLogger(__name__).warning("kvspec: no sentence ends for crystalcache: %s", error)
        return frozenset()


def _make_request_output(
    original: Any, state: Any, new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any,
    kv_transfer_params: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any,
) -> Any:
    """Add the scheduler's messages to the statements, and put the statements of finished answers into the output."""
    parameters = dict(kv_transfer_params or {})
    if not hasattr(state, KEY):
        state.kvspec = Statement()
    state.kvspec.take(parameters.pop(KEY, {}), finish_reason is not None)
    if finish_reason is not None:
        _count(state.kvspec, state.prompt_len + state.detokenizer.num_output_tokens())
    output = original(
        state, new_token_ids, pooling_output, finish_reason, stop_reason, parameters or None, *args, **kwargs
    )
    if output is not None and (stated := _stated(output.outputs)) is not None:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: stated}
    return output


def _new_completion_output(original: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the statement to the output of an answer. vLLM merges the outputs of one answer."""
    output = original(state, *args, **kwargs)
    output.kvspec = state.kvspec
    return output


def _stated(outputs: Iterable[Any]) -> Any:
    """Return the statement of an answer, or a list of statements if a request has several.

    None before the end, and for beam search, whose outputs vLLM makes without `_new_completion_output`.
    """
    statements: list[Any] = [getattr(one, KEY, None) for one in outputs]
    if not statements or not all(one and one.finished and "policy" in one.body for one in statements):
        return None
    bodies = [one.body for one in statements]
    return bodies[0] if len(bodies) == 1 else [{**body, "index": at} for at, body in enumerate(bodies)]


def _completion_response(original: Any, serving: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the statements of all prompts, because vLLM returns only the statement of the first prompt."""
    response = original(serving, batch, *args, **kwargs)
    if (stated := _stated([one for result in batch for one in result.outputs])) is not None:
        response.kv_transfer_params = {**(response.kv_transfer_params or {}), KEY: stated}
    return response


async def _stream(original: Any, serving: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Add digests and statements to the events of a stream. No event is added, because clients read `choices[0]`.

    A digest is in the event of the token that was chosen before the eviction, or in an earlier event.
    """
    statements, sent, ended = dict[int, Statement](), dict[int, int](), False
    count = request.n or 1

    async def watched(results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for item in results:
            prompt, result = item if isinstance(item, tuple) else (0, item)
            statements.update({prompt * count + one.index: one.kvspec for one in result.outputs if hasattr(one, KEY)})
            yield item

    bound = inspect.signature(original).bind(serving, request, *args, **kwargs)
    prompts = bound.arguments.get("num_prompts", 1)
    bound.arguments["result_generator"] = watched(bound.arguments["result_generator"])
    async for chunk in original(*bound.args, **bound.kwargs):
        events = list[dict[str, Any]]()
        last = not ended and len(statements) == count * prompts and all(one.finished for one in statements.values())
        for index, one in sorted(statements.items()):
            new = one.digests[sent.get(index, 0) :]
            sent[index] = len(one.digests)
            body = {"witness": FORMAT, **({"digests": new} if new else {}), **(one.body if last else {})}
            if new or last:
                events.append(body if count * prompts == 1 else {**body, "index": index})
        if events and chunk.startswith("data: {"):
            ended |= last
            stated = json.dumps(events[0] if count * prompts == 1 else events)
            chunk = f'data: {{"{KEY}": {stated}, {chunk.removeprefix("data: {")}'
        yield chunk


def _count(statement: Statement, tokens: int) -> None:
    """Add a finished answer to the counters."""
    SEEN.inc(tokens)
    KEPT.inc(tokens - statement.evicted)
    FREED.inc(statement.freed_blocks)
    if not statement.body["evictions"]:
        # A label has no part of a policy's text and no message of an error, which can have any number of values.
        FULL.labels(re.sub(r"/\S*|[:;].*", "", statement.body["reason"], flags=re.DOTALL)).inc()
