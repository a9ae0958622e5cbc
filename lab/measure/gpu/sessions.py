"""Sessions on the device: every policy compared with the CPU, and models with different kinds of caches."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DeepseekV3Config, Lfm2Config, PreTrainedConfig, PreTrainedModel

from accelerated.triton_gpu.device import default_device
from lab.measure.gpu.counts import SHORT, deep_llama, method_on, reader, text
from lab.measure.gpu.decoding import tokens_a_second
from lab.measure.gpu.measure import Report, Table, median_ms, say
from lab.measure.gpu.models import Scale, Subject
from models_integration import CrystalCache, Session
from models_integration.session.method import Method
from reference.policies.names import POLICIES
from spec.retention import Retention

BUDGET = 0.25
LAYERS = 4
ENDS = frozenset(range(0, 60, 18))
HYBRID, LATENT = "hybrid, of LFM2's kind", "one latent for all heads, of DeepSeek V3's kind"


def sessions(report: Report, scale: Scale) -> None:
    """Compare kept tokens and logits of each policy on a small model with the CPU, and count the host reads.

    Raises:
        AssertionError: if a policy fails on the device.
    """
    here = deep_llama(LAYERS)
    there: Any = deep_llama(LAYERS)
    there.to(default_device())
    rows, failed = list[tuple[str, ...]](), list[str]()
    for name in POLICIES:
        try:
            rows.append((name, *_beside(method_on(name, here), here, there)))
        except Exception as error:
            rows.append((name, f"{type(error).__name__}: {error}".splitlines()[0], "", "", ""))
            failed.append(name)
    columns = ("policy", "kept tokens that differ", "largest difference of logits", "reads, prompt", "reads, step")
    report.tables.append(Table(f"Sessions of {SHORT} tokens beside the CPU's, {LAYERS} layers", columns, tuple(rows)))
    assert not failed, f"on the device these policies fail: {', '.join(failed)}"


def _beside(method: Method, here: PreTrainedModel, there: PreTrainedModel) -> tuple[str, ...]:
    logits, kept, _ = _read(method, here)
    result, actual_kept, reads = _read(method, there)
    differ = sum(len(a ^ b) for a, b in zip(kept, actual_kept, strict=True)) // 2
    error = max(float((a - b).abs().max()) for a, b in zip(logits, result, strict=True))
    return f"{differ} of {sum(map(len, kept))}", f"{error:.1e}", str(reads[0]), str(max(reads[1:]))


@torch.no_grad()
def _read(method: Method, model: PreTrainedModel) -> tuple[list[torch.Tensor], list[set[int]], list[int]]:
    """Return the logits of a prompt's last token and two steps, the kept sets after the prompt, and the host reads."""
    ids, mask = text(SHORT).to(model.device), torch.ones(1, SHORT + 2, dtype=torch.int64, device=model.device)
    logits, counts, kept = [], [], list[set[int]]()
    with Session(method, model) as run:
        for step in range(3):
            given = {"input_ids": ids[:, -1:] if step else ids, "attention_mask": mask[:, : SHORT + step]}
            with _host_reads() as readers:
                output = model(**given, past_key_values=run.cache, logits_to_keep=1)
            counts.append(len(readers))
            logits.append(output.logits.cpu())
            if not step:
                kept = _kept_sets(run.retentions[0])
    return logits, kept, counts


def _kept_sets(result: Retention) -> list[set[int]]:
    return [set(result.group(at).tolist()) for at in range(result.groups)]


@contextmanager
def _host_reads() -> Iterator[list[str]]:
    """Context manager that yields the functions of kvspec that wait for the device, from warnings of CUDA."""
    result: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        place = reader()
        if "synchroniz" in str(message) and not place.startswith(("transformers", "elsewhere")):
            result.append(place)

    if default_device().type != "cuda":
        yield result
        return
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield result
        finally:
            torch.cuda.set_sync_debug_mode("default")


def families(report: Report, scale: Scale) -> None:
    """Measure CrystalCache at the headline length on models of about a billion parameters.

    Their caches differ from the cache of a Llama.
    """
    columns = ("model", "prefill, ms", "CrystalCache adds, %", "of the cache freed, %", "tokens a second", "full cache")
    title = f"Other caches, {scale.headline} tokens, CrystalCache at {BUDGET}"
    rows = []
    try:
        for name, config in _configs(scale).items():
            rows.append((name, *_costs(scale, Subject.of_config(config, name, scale, ENDS))))
    finally:
        report.tables.append(Table(title, columns, tuple(rows)))


def _costs(scale: Scale, subject: Subject) -> Iterator[str]:
    say(f"{subject.name}: {sum(one.numel() for one in subject.model.parameters()) / 1e9:.2f} G parameters")
    ids, policy, rounds = subject.prompt(scale.headline), CrystalCache(BUDGET, ENDS), 3
    bare = median_ms(partial(subject.forward, ids), min(rounds, scale.rounds))
    runs: list[Any] = []

    def under() -> None:
        with policy(subject.model) as run:
            subject.forward(ids)
        runs[:] = [run]

    took = median_ms(under, min(rounds, scale.rounds))
    freed = runs[0].bytes_freed
    share = freed / (freed + runs[0].cache.nbytes)
    full = tokens_a_second(scale, subject, None, scale.headline)
    evicted = tokens_a_second(scale, subject, policy, scale.headline)
    yield from (f"{bare:.1f}", f"{100 * (took / bare - 1):.1f}", f"{100 * share:.1f}", f"{evicted:.1f}", f"{full:.1f}")


def _configs(scale: Scale) -> dict[str, PreTrainedConfig]:
    sizes: dict[str, Any] = {
        "vocab_size": min(65536, scale.vocabulary), "hidden_size": scale.hidden // 2,
        "num_attention_heads": scale.H // 2, "intermediate_size": scale.inner // 2, "num_hidden_layers": 16,
        "max_position_embeddings": 2**17, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None,
    }
    latent: dict[str, Any] = {"qk_rope_head_dim": scale.d // 2, "qk_nope_head_dim": scale.d, "v_head_dim": scale.d}
    return {
        HYBRID: Lfm2Config(**sizes, num_key_value_heads=scale.H_kv // 2, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        LATENT: DeepseekV3Config(
            **sizes, **latent, num_key_value_heads=scale.H // 2, q_lora_rank=None, kv_lora_rank=4 * scale.d,
            first_k_dense_replace=16,
        ),
    }
