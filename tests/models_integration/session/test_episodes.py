"""EpiCache on models: each episode's cache and answers equal the masked model, and the bound of the stored tokens."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conformance.methods import episodes as brute
from conformance.methods.tables import table_shares
from models_integration import FullCache, layer_similarities, prefill_episodes
from models_integration.model.cache_argument import cache_name
from models_integration.policies.epicache import Episodes
from models_integration.session.verbs import read
from spec.errors import SpecError
from tests.models_integration.session.families import build, greedy, relative
from tests.models_integration.session.masked import MaskedModel, Row, Sets
from tests.models_integration.session.sessions import TOLERANCE, VISIBLE_EFFECT, live_sets, outputs_of

pytestmark = [pytest.mark.law("eviction-equals-masking"), pytest.mark.spec("PO-EPICACHE")]

M, BLOCK, WINDOW, P = 10, 12, 2, 2
SIMILARITIES = [0.5, 1.0, 0.75]
"""Similarity of the keys of each layer, which gives the first layer the largest share and the second the smallest."""
TOPICS = (range(3, 60), range(70, 128))
"""Token ids of two topics."""
QUESTIONS = [[*TOPICS[topic][5:40:7]] for topic in (1, 0)]


def dialogue() -> list[list[int]]:
    """Return 16 utterances of 4 to 7 tokens, two by two about one of two topics."""
    rng = np.random.default_rng(2)
    return [rng.choice(TOPICS[at // 2 % 2], 4 + at % 4).tolist() for at in range(16)]


def embed(texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return a vector near the axis of the topic of each text."""
    return [[1.0 + len(ids) / 64, ids[0] / 512] if ids[0] in TOPICS[0] else [ids[0] / 512, 1.0] for ids in texts]


@lru_cache(1)
def model() -> PreTrainedModel:
    """Return a model in float64, in which no two scores are nearly equal."""
    return build("llama", attention="eager", dtype=torch.float64)


@lru_cache(1)
def episodes() -> Episodes:
    return prefill_episodes(
        model(), dialogue(), M, block=BLOCK, episodes=2, window=WINDOW, prompt_windows=P, instruction=[64, 65],
        embed=embed, similarities=SIMILARITIES, power=1.0,
    )


class Oracle(MaskedModel):
    """Masked model that also returns the attention weights of each layer, (H, n, n)."""

    def weights(self, row: Row) -> list[Tensor]:
        self._known.clear()
        with outputs_of(one for one in self._model.modules() if type(one).__name__.endswith("Attention")) as seen:
            self.expect(row)
        return [output[1][0] for output in seen]

    def kept(self, row: Row, prompt: Sequence[int], stored: Sets, shares: list[int]) -> Sets:
        """Return the tokens that each layer keeps: the stored tokens to which the patched prompt attends most."""
        n, result = len(row.tokens), []
        longest = max(len(positions) for sets in stored for positions in sets)
        total = M * len(stored) * self.heads
        table = table_shares("_".join(map(str, shares)), total, 0, len(stored), self.heads, longest)
        weights = self.weights(row.read(prompt, stored))
        for layer, sets in enumerate(stored):
            rows = weights[layer][:, n:].reshape(self.heads, -1, weights[layer].shape[-1])
            scored = []
            for head, positions in enumerate(sets):
                seen = rows[head][:, positions]
                most = (seen / seen.sum(dim=1, keepdim=True)).amax(dim=0).tolist()
                scored += [(-score, head, at) for score, at in zip(most, positions, strict=True)]
            best = sorted(scored)[: sum(table[layer * self.heads : (layer + 1) * self.heads])]
            result.append([sorted(at for _, one, at in best if one == head) for head in range(self.heads)])
        return result

    def episode(self, blocks: Sequence[list[int]], prompt: Sequence[int], shares: list[int]) -> tuple[Row, Sets]:
        """Return all tokens as the masked model read them, and the stored sets after the last block."""
        row, stored = self.nothing, [[list[int]() for _ in range(self.heads)] for _ in self.full]
        for block in blocks:
            new = [*range(len(row.tokens), len(row.tokens) + len(block))]
            row = row.read(block, stored)
            stored = [[[*positions, *new] for positions in sets] for sets in stored]
            stored = self.kept(row, prompt, stored, shares)
        return row, stored


@lru_cache(1)
def expected() -> tuple[Oracle, list[tuple[Row, Sets]]]:
    """Return the oracle, and the tokens and the stored sets of each episode."""
    ids = [token for utterance in dialogue() for token in utterance]
    blocks = [ids[at : at + BLOCK] for at in range(0, len(ids), BLOCK)]
    windows = [list(chain.from_iterable(dialogue()[at : at + WINDOW])) for at in range(0, 16, WINDOW)]
    x = np.array(embed(windows))
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    groups = brute.clusters(x.tolist(), 2, 42)
    prompts = brute.prompts(x.tolist(), groups.labels, groups.centroids, P)
    oracle, shares = Oracle(model()), brute.shares(SIMILARITIES, M, 1.0)
    return oracle, [
        oracle.episode(blocks, [64, 65, *(token for at in chosen for token in windows[at])], shares)
        for chosen in prompts
    ]


@pytest.mark.spec("PO-EPISODES", "PO-EPISODE-PROMPT", "PO-EPISODE-LAYERS")
def test_each_episode_stores_what_the_masked_model_attends_to() -> None:
    _, wanted = expected()
    stored = [[[list(kept) for kept in sets] for sets in live_sets(cache).values()] for cache in episodes().caches]
    assert stored == [sets for _, sets in wanted]
    assert stored[0] != stored[1]
    per_layer = [sum(map(len, sets)) for sets in stored[0]]
    assert per_layer == [2 * share for share in brute.shares(SIMILARITIES, M, 1.0)]
    assert len({len(kept) for kept in stored[0][0]}) > 1


@pytest.mark.spec("PO-EPISODE-TURN")
def test_two_turns_retrieve_different_episodes_and_answer_as_the_masked_model() -> None:
    oracle, wanted = expected()
    chosen = [episodes().nearest(question) for question in QUESTIONS]
    assert chosen == [1, 0]
    for question, at in [*zip(QUESTIONS, chosen, strict=True), (QUESTIONS[0], chosen[0])]:
        row, stored = wanted[at]
        masked = oracle.expect(row.read(question, stored)).logits[-len(question) :]
        actual = read(model(), episodes().cache(question), torch.tensor([question]), last=len(question)).logits
        assert actual is not None
        assert relative(actual[0], masked) < TOLERANCE
        row, stored = wanted[1 - at]
        other = oracle.expect(row.read(question, stored)).logits[-len(question) :]
        assert relative(other, masked) > VISIBLE_EFFECT


@pytest.mark.parametrize(("question", "shown"), [
    ([], "question = 'no token ids': must have at least one token id"),
    ([10**6], "question = 1000000: must have token ids of the model"),
])
def test_a_question_that_the_model_cannot_read_is_refused(question: list[int], shown: str) -> None:
    for ask in (episodes().nearest, episodes().cache):
        with pytest.raises(SpecError, match=shown):
            ask(question)


def test_generate_answers_from_the_cache_of_an_episode() -> None:
    oracle, wanted = expected()
    question = QUESTIONS[0]
    ids = torch.cat([episodes().history, torch.tensor([question])], dim=1)
    with FullCache()(model()) as run, run.reading():
        answer = greedy(model(), ids, 4, past_key_values=episodes().cache(question))[0].tolist()
    row, stored = wanted[1]
    row, written = row.read(question, stored), [*range(len(row.tokens), len(row.tokens) + len(question))]
    stored = [[[*kept, *written] for kept in sets] for sets in stored]
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens.append(int(oracle.expect(row).logits[-1].argmax()))
        row, stored = row.read(tokens[-1:], stored), [[[*kept, len(row.tokens)] for kept in sets] for sets in stored]
    assert answer == tokens


def test_a_cache_never_stores_more_than_the_budget_a_block_and_the_patched_prompt() -> None:
    held: list[float] = []

    def before(module: Any, args: object, kwargs: dict[str, Any]) -> None:
        cache = kwargs[cache_name(module)]
        held.append((cache.mean_length if cache.get_seq_length() else 0) + kwargs["input_ids"].shape[1])

    with model().register_forward_pre_hook(before, with_kwargs=True):
        actual = prefill_episodes(model(), dialogue(), M, block=BLOCK, episodes=2, window=WINDOW, embed=embed)
    assert max(held) == M + BLOCK + max(map(len, actual.prompts))
    assert [cache.mean_length for cache in actual.caches] == [M, M]
    n = actual.history.shape[1]
    assert len(held) == 2 * 2 * -(-n // BLOCK)


@pytest.mark.spec("PO-EPISODE-LAYERS")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_similarities_are_those_of_the_masked_model(attention: str) -> None:
    n, w, N_sink = 30, 8, 2
    ids = [token for utterance in dialogue() for token in utterance][:n]
    actual = layer_similarities(build("llama", attention=attention), torch.tensor([ids]), w, N_sink)
    oracle = MaskedModel(build("llama", attention=attention))
    cut = torch.zeros(3, 2, n, n, dtype=torch.bool)
    for i in range(n):
        cut[:, :, i, brute.window_of(i, w, N_sink)] = True
    passes = [oracle.expect(Row(tuple(ids), seen)).layers for seen in (torch.ones_like(cut).tril(), cut)]
    cosines = [torch.cosine_similarity(a[0], b[0], dim=-1).mean() for a, b in zip(*passes, strict=True)]
    np.testing.assert_allclose(actual, cosines, rtol=0, atol=1e-5)
    assert actual[0] == pytest.approx(1.0)
    assert min(actual) < 0.999


@pytest.mark.spec("PO-EPISODES")
def test_the_default_embedding_is_the_mean_of_the_input_embeddings() -> None:
    actual = prefill_episodes(model(), dialogue(), M, block=BLOCK, episodes=1, window=16, prompt_windows=1)
    weight = model().get_input_embeddings().weight.detach().numpy()  # type: ignore[operator]
    mean = weight[actual.history[0].numpy()].mean(axis=0)
    np.testing.assert_allclose(actual.centroids, [mean / np.linalg.norm(mean)], rtol=0, atol=1e-12)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"budget": 0.3}, "budget = '0.3': must be a number of tokens"),
    ({"dialogue": []}, "dialogue = '0 utterances': must have utterances"),
    ({"dialogue": [[5], []]}, "dialogue = '2 utterances': must have utterances"),
    ({"dialogue": [[5], [10**6]]}, "dialogue = 1000000: must have token ids of the model, from 0 to"),
    ({"instruction": [-1]}, "instruction = -1: must have token ids of the model, from 0 to"),
    ({"block": 1}, "block = 1: must be a number of tokens, at least 2"),
    ({"episodes": 9}, "episodes = 9: must be a number from 1 to 8, the number of windows"),
    ({"window": 0}, "window = 0: must be at least 1"),
    ({"prompt_windows": 0}, "prompt_windows = 0: must be at least 1"),
    ({"similarities": [0.5]}, "similarities = '1 numbers': must be 3, one for each layer"),
    ({"similarities": [0.5, 1.0, 0.0], "power": -1.0}, "power = -1.0: must be at least 0"),
    ({"embed": lambda texts: np.zeros((len(texts), 3))}, "embed = .*must return a vector of finite length above 0"),
    ({"embed": lambda texts: np.ones((1, 3))}, "embed = .*for each of 8 texts"),
]


@pytest.mark.parametrize(("changes", "shown"), REFUSED)
def test_wrong_arguments_are_refused_before_the_model_reads_a_block(changes: dict[str, Any], shown: str) -> None:
    given = {"dialogue": dialogue(), "budget": M, "block": BLOCK, "episodes": 2, "window": WINDOW, **changes}
    calls: list[object] = []
    hook = model().register_forward_pre_hook(lambda *_: calls.append(None))
    with hook, pytest.raises(SpecError, match=shown):
        prefill_episodes(model(), given.pop("dialogue"), given.pop("budget"), **given)
    assert not calls


def test_windows_of_layers_and_wrong_windows_of_a_text_are_refused() -> None:
    with pytest.raises(SpecError, match="has sliding-window or recurrent layers"):
        prefill_episodes(build("gemma3"), dialogue(), M)
    for window in (0, 5, 30):
        with pytest.raises(SpecError, match=f"window = {window}: must be an even number from 2 to 29"):
            layer_similarities(model(), torch.ones(1, 30, dtype=torch.int64), window)
