"""Learns from keys and values alone which tokens hold what a question will ask for, and writes learned_scores.npz.

A toy of what KVzap, Fast KVzip and DMS do at scale: for each KV head of the pocket model, ridge regression on whether a
token is evidence, over needles in filler. `policy_from_score(read_scores(path))` then keeps the tokens that score most.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache

from experiments.tasks import draw_sample
from models_integration.pocket import load_pocket
from reference.policies.scored import LinearScores, write_scores


def features(model, context_ids):
    """[k, v, 1] of each KV head and token, (G, n, 2 d + 1)."""
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([context_ids]), past_key_values=cache)
    parts = [torch.cat([x.keys[0], x.values[0], torch.ones_like(x.keys[0, :, :, :1])], dim=2) for x in cache.layers]
    return torch.cat(parts).double().numpy()


def learned(samples, length, seed=1, ridge=1.0):
    """Fit each head by least squares over needles that no default seed of `kvspec compare` draws."""
    model, tokenizer = load_pocket()
    drawn = [draw_sample("needle", tokenizer, length, index, seed) for index in range(samples)]
    x = np.concatenate([features(model, sample.context_ids) for sample in drawn], axis=1)
    y = np.concatenate([np.isin(np.arange(length), np.arange(*sample.needle)) for sample in drawn]).astype(np.float64)
    normal = x.transpose(0, 2, 1) @ x + ridge * np.eye(x.shape[2])
    w = np.linalg.solve(normal, (x.transpose(0, 2, 1) @ y)[:, :, None])[:, :, 0]
    d = w.shape[1] // 2
    return LinearScores(w[:, :d], w[:, d:-1], w[:, -1])


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--samples", type=int, default=40)
    arguments.add_argument("--length", type=int, default=512)
    given = arguments.parse_args()
    write_scores(learned(given.samples, given.length), Path("learned_scores.npz"))
