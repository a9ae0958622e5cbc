"""Tests of sessions that are never closed, of sessions in threads and tasks, and of `repr`."""

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch

from conformance.verify.function import Verdict
from models_integration import CrystalCache, StreamingLLM
from models_integration.model.architecture import DECODERS_IN_SESSION, describe
from spec.errors import SpecError
from spec.parameters import TINY
from tests.models_integration.session.families import build, greedy, prompt
from tests.models_integration.session.sessions import method


@pytest.mark.law("the-model-stays-as-it-was")
@pytest.mark.parametrize("policy", ["streamingllm", "snapkv", "h2o"])
def test_a_session_that_nobody_holds_ends(policy: str) -> None:
    model: Any = build("llama")
    decoder = describe(model).decoder
    run = method(policy)(model).__enter__()
    greedy(model, prompt(40), 3)
    assert decoder in DECODERS_IN_SESSION
    held = [run]
    del run
    with pytest.warns(RuntimeWarning, match="evicts nothing from now on: write `with policy"):
        held.clear()
    gc.collect()
    assert decoder not in DECODERS_IN_SESSION
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks
    assert "generate" not in vars(model)
    with method(policy)(model) as run:
        greedy(model, prompt(40), 3)
    assert run.bytes_freed > 0


@pytest.mark.law("the-model-stays-as-it-was")
def test_a_session_that_is_entered_and_thrown_away_warns_at_once() -> None:
    """Check the warning, because `generate` would otherwise use a full cache in silence."""
    model: Any = build("llama")
    with pytest.warns(RuntimeWarning, match="nothing holds the session of this LlamaForCausalLM"):
        method("snapkv")(model).__enter__()


@pytest.mark.law("refused-before-anything-changes")
def test_a_second_task_is_told_of_a_lock() -> None:
    model: Any = build("llama")

    async def work() -> None:
        with StreamingLLM(0.5)(model):
            await asyncio.sleep(0.01)

    async def both() -> Any:
        return await asyncio.gather(work(), work(), return_exceptions=True)

    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, SpecError)
    assert "use a lock around the blocks of all threads and tasks" in str(second)


@pytest.mark.law("refused-before-anything-changes")
def test_a_second_thread_in_a_forward_pass_is_told_of_the_first() -> None:
    """Check the error during a forward pass, when the model's attention name is one of kvspec."""
    model, actual = build("llama"), list[str]()

    def other() -> None:
        with pytest.raises(SpecError) as caught:
            StreamingLLM(0.5)(model)
        actual.append(str(caught.value))

    def during(*_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = describe(model).attention[1].register_forward_hook(during)
    with method("snapkv")(model), torch.no_grad():
        model(input_ids=prompt(40))
    hook.remove()
    (text,) = actual
    assert "is in a forward pass of a different thread: join the thread" in text
    assert "kvspec_" not in text


@pytest.mark.law("figures-are-counted-right")
def test_the_sentence_ends_of_a_text_are_counted() -> None:
    model, ids = build("llama"), prompt(40)
    ends = frozenset({int(ids[0, 7]), int(ids[0, 20])})
    with CrystalCache(0.5, ends, TINY, backend="numpy")(model) as run, torch.no_grad():
        assert run.sentence_ends is None
        model(input_ids=ids)
    assert run.sentence_ends == sum(int(token) in ends for token in ids[0])
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=ids)
    assert run.sentence_ends is None


@pytest.mark.law("figures-are-counted-right")
def test_results_show_themselves_in_a_notebook() -> None:
    model: Any = build("llama")
    with method("snapkv")(model) as run, torch.no_grad():
        model(input_ids=prompt(40))
    shown = run._repr_html_()
    assert f"<tr><th>bytes_freed</th><td>{run.bytes_freed}</td></tr>" in shown
    assert "<caption>snapkv</caption>" in shown
    assert f"<tr><th>kept</th><td>{run.kept_tokens[0]}</td></tr>" in shown  # The budget is in the adjacent column.
    assert "no prompt yet" in method("snapkv")(model)._repr_html_()
    verdict = Verdict(False, "<b>1 of 2</b> failed", ("PO-<i>",), {}, (), "text")._repr_html_()
    assert "&lt;b&gt;1 of 2&lt;/b&gt; failed" in verdict
    assert "PO-&lt;i&gt;" in verdict
    assert "<b>" not in verdict
