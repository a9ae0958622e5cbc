"""Model `kvspec` for lm-evaluation-harness: lm-eval's model `hf`, with eviction from the contexts.

A prompt is split before the question. kvspec evicts tokens from the first part. The question and the answer are then
processed with the compacted cache. Without a split, the first part is the prompt without the last token.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm

from experiments.studies.evidence.rules import AT_PROMPT
from experiments.studies.results import unit_named
from experiments.studies.subject import AUTO, Subject, model_errors, policy_in_rows
from models_integration.cache.continuation import Decision
from models_integration.cache.retained_cache import RetainedCache
from models_integration.model.architecture import describe
from models_integration.model.cache_argument import CACHE, cache_name
from models_integration.pocket import model_folder
from models_integration.policies.methods import CrystalCache
from models_integration.policies.sizes import is_size
from models_integration.policies.values import sentence_ends
from models_integration.session.method import decide, method_of
from models_integration.session.observed import ObservedSegment
from models_integration.session.session import Session
from models_integration.session.stages import describe_stages
from models_integration.session.verbs import compact, observe, read
from reference.calibration import load_calibration
from spec import SPEC_VERSION
from spec.budget import parse_budget
from spec.errors import SpecError
from spec.policy import SEGMENT_END

__all__ = ["PolicyLM", "command"]

Scored: TypeAlias = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation, as text and as token ids."""


def command(arguments: Sequence[str]) -> None:
    """Run lm-eval's command line with `--model kvspec`, unless a different model is named or no model is run."""
    chosen = "--model" in arguments or arguments[:1] in ([], ["ls"], ["validate"], ["-h"], ["--help"])
    sys.argv = ["lm-eval", *arguments, *(() if chosen else ("--model", "kvspec"))]
    cli_evaluate()


@register_model("kvspec")
class PolicyLM(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """lm-eval's model `hf` with a policy and a budget. The config in lm-eval's results contains policy and budget.

    Args:
        pretrained: model, as for `--model` of kvspec: "pocket", a fetched model, a folder, or a name on the hub.
        policy: policy as text, such as "snapkv" or "snapkv(W=16)". "h2o@prompt" evicts only at the end of the context.
        budget: budget for the context before the question: a fraction (0.3 or 30%), a number of tokens (512), or memory
            of the kept tokens (64MiB).
        question_from: text whose last occurrence begins the question, or one text for each task name.
        backend: name of the backend for the policy.
        calibration: calibration file, if the policy needs one.
        batch_size: must be 1, because each context has separate sets of kept tokens.
        given: further arguments of `hf`.

    Raises:
        SpecError: if the policy, budget, model or batch size is not supported.
    """

    def __init__(
        self, pretrained: str, policy: str = "fullcache", budget: str | float = "1.0",
        question_from: str | Mapping[str, str] = "", backend: str = AUTO, calibration: str = "",
        batch_size: int | str = 1, **given: Any,
    ) -> None:
        if str(batch_size) != "1":
            raise SpecError("batch_size", batch_size, "must be 1, because each context keeps different tokens")
        with model_errors(pretrained):
            super().__init__(pretrained=str(model_folder(pretrained)), batch_size=1, **given)
        statistics = load_calibration(Path(calibration)) if calibration else None
        if not is_size(budget):
            parse_budget(str(budget))
        ends = sentence_ends(self.tokenizer)
        CrystalCache(sentence_ends=ends, backend=backend)  # raises if the backend cannot run here
        label = Path(pretrained).name
        subject = Subject(label, self.model, self.tokenizer, ends, backend, frozenset(), statistics)
        text = policy.removesuffix(AT_PROMPT)
        self._method = subject.policy(text, str(budget)).on(self.model)
        if text != policy:
            method = self._method
            once = replace(method.policy, cadence=SEGMENT_END)
            self._method = method_of(once, method.budget, method.engine, method.positions)
        self._question_from, self._architecture = question_from, describe(self.model)
        self._about = {
            "policy": policy_in_rows(text, statistics) + policy[len(text) :], "budget": str(budget),
            "question_from": question_from, "backend": describe_stages(self._method, on_device=False),
            "model": subject.name, "spec_version": SPEC_VERSION,
        }
        self.key = unit_named(self._about)[:12]
        """Hash of model, policy, budget and split. The name of a response cache must contain this hash."""
        self._after = 1
        """Number of tokens of the next forward pass that follow the compacted context."""
        self._tasks: Mapping[tuple[str, str], str] = {}
        self._last: tuple[Tensor, ObservedSegment, Decision] | None = None
        self._read, self._kept = list[int](), list[float]()

    def get_model_info(self) -> dict[str, Any]:
        """Return the info of `hf` with policy, budget, split, and mean numbers of kept tokens per layer and head."""
        cache = {"contexts": len(self._read), "tokens_read": sum(self._read), "tokens_kept": sum(self._kept)}
        return {**super().get_model_info(), "kvspec": {**self._about, **cache}}

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Accept lm-eval's response cache only if its name contains the hash, because its keys lack the policy."""
        if cache_hook.dbdict is not None and self.key not in Path(cache_hook.dbdict.filename).name:
            way_out = f"stores answers without policy and budget: put both into its name, as in answers-{self.key}"
            raise SpecError("use_cache", cache_hook.dbdict.filename, way_out)
        super().set_cache_hook(cache_hook)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Raise SpecError with the names of the tasks that need rolling likelihoods."""
        tasks = ", ".join(sorted({request.task_name for request in requests}))
        reason = "must not use loglikelihood_rolling, because such tasks have no context to evict from"
        raise SpecError("tasks", tasks, reason)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return likelihoods as `hf`, after compacted contexts. Raises SpecError if a policy evicts at each token."""
        if self._method.policy.cadence.every is not None:
            name = self._about["policy"]
            raise SpecError(
                "policy", name, f"evicts at each token, but loglikelihood uses one forward pass: use {name}{AT_PROMPT}"
            )
        self._tasks = {request.args: request.task_name for request in requests}
        result: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return result

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **options: Any,
    ) -> list[tuple[float, bool]]:
        result = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests"):
            texts, context, continuation = request
            self._after = self._held(texts[0], context, self._tasks[texts]) + len(continuation) - 1
            result += super()._loglikelihood_tokens([request], disable_tqdm=True, **options)
        return result

    # `hf` of lm_eval 0.4.13 calls this method for the logits of a request, and passes only token ids.
    def _model_call(self, inps: Tensor, **more: Any) -> Tensor | None:
        prompt, rest = inps[:, : -self._after], inps[:, -self._after :]
        cache = self._compacted(prompt) if prompt.shape[1] else RetainedCache(self._architecture.config)
        return read(self.model, cache, rest, last=rest.shape[1]).logits

    def _compacted(self, prompt: Tensor) -> RetainedCache:
        """Return a new compacted cache of a context. Each context is observed once for all requests."""
        if self._last is None or not torch.equal(self._last[0], prompt):
            observed = observe(self.model, prompt, needs=self._method.policy.scorer.needs)
            self._last = prompt, observed, decide(self._method, observed)
        _, observed, decision = self._last
        cache = compact(observed.cache, decision)
        self._note(prompt, cache)
        return cache

    def _note(self, prompt: Tensor, cache: RetainedCache) -> None:
        self._read.append(prompt.shape[1])
        self._kept.append(cache.mean_length)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate answers as `hf`, after compacted contexts. Raises SpecError as in `_held` and in a session."""
        result = []
        for request in tqdm(requests, disable=disable_tqdm, desc="Running generate_until requests"):
            prompt = request.args[0]
            self._after = self._held(prompt, self.tok_encode(prompt), request.task_name)
            result += super().generate_until([request], disable_tqdm=True)
        return result

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **given: Any) -> Tensor:
        prompt, question = context[:, : -self._after], context[:, -self._after : -1]
        if not prompt.shape[1]:
            whole: Tensor = super()._model_generate(context, max_length, stop, **given)
            return whole
        with torch.no_grad(), Session(self._method, self.model) as run:
            decoder = self._architecture.decoder
            decoder(input_ids=prompt, use_cache=True)
            assert run.cache is not None
            self._note(prompt, run.cache)
            if question.shape[1]:
                with run.reading():
                    decoder(input_ids=question, **{cache_name(decoder): run.cache})
            output: Tensor = super()._model_generate(context, max_length, stop, **{CACHE: run.cache}, **given)
        return output

    def _held(self, prompt: str, ids: Sequence[int], task: str) -> int:
        """Return the number of tokens of a prompt after the split, at least one.

        Raises:
            SpecError: if only different tasks have a split text, or if the prompt lacks the split text.
        """
        by_task = self._question_from
        mark = by_task if isinstance(by_task, str) else by_task.get(task)
        if mark == "":
            return 1
        if mark is None or mark not in prompt:
            raise SpecError("question_from", mark, f"must occur in every prompt of {task}")
        return max(1, len(ids) - len(self.tok_encode(prompt[: prompt.rindex(mark)])))
