"""What the constants of policies mean, for `kvspec policies NAME` and `describe_policy`."""

import ast
import inspect
from collections.abc import Mapping
from textwrap import dedent
from typing import Literal, get_args, get_origin, get_type_hints

__all__ = ["MEANINGS", "field_meanings"]

MEANINGS: Mapping[str, str] = {
    "N_future": "positions after the prompt over which the rotation is averaged",
    "N_recent": "number of last tokens that are always kept",
    "N_reuse": "number of successive layers that keep the chunks of the first of these layers",
    "N_sink": "number of first tokens that are always kept",
    "W": "number of last tokens that are always kept; SnapKV and its descendants score by the queries of these tokens",
    "anchor": "pattern that blocks are compared with: alternating, mean, zeros or ones",
    "backend": "code that scores tokens: numpy, numba, torch or triton; policy_from_name takes the fastest",
    "beta": "the last layer keeps 1 / beta of the mean budget, beyond the window",
    "block": "tokens of a block",
    "c": "tokens of a chunk",
    "calibration": "file that `kvspec calibrate` writes for your model",
    "chunk": "tokens of the prompt that the model repeats at a time",
    "diversity": "weight of the similarity to kept tokens",
    "every": "tokens between two evictions",
    "fusion": "how the attention of the last queries is combined: sum or max",
    "gamma": "weight of the variance of attention beside the mean",
    "kernel": "width of the pool that smooths scores along the tokens; odd",
    "kvcrush.share": "share of the kept blocks that represent evicted blocks, from 0 to 1",
    "lag": "tokens of a partition",
    "lam": "weight of attention; redundancy has weight 1 - lam",
    "overlap": "last tokens of a chunk that the request for the next chunk quotes",
    "pin_prompt": "number of first tokens that are never evicted",
    "safeguard": "share of the budget that all heads of a layer get evenly, from 0 to 1",
    "seed": "seed of the random sample",
    "sentence_ends": "ids of tokens that end a sentence: kvspec.sentence_ends(tokenizer)",
    "signature": "values that represent a token: flat (all heads of all layers), layer or head",
    "slack": "tokens above the budget that start an eviction",
    "tau1": "temperature of the entropy of attention, in the budget of a layer",
    "tau2": "temperature of the variance of attention, in the budget of a layer",
    "template": "token ids of the requests to repeat the prompt: kvspec.repeat_template(tokenizer)",
    "vase.share": "share of the budget for tokens with the widest values, from 0 to 1",
}
"""By name, or by `policy.name` if policies differ. Fields of a policy's `parameters` are documented in their class."""


def field_meanings(record: type) -> dict[str, str]:
    """Return the docstring of each field of a class on one line, and the values of a Literal."""
    (definition,) = ast.parse(dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    choices = {
        name: f" ({', '.join(get_args(kind))})" for name, kind in get_type_hints(record).items()
        if get_origin(kind) is Literal
    }
    return {
        field.target.id: " ".join(doc.value.value.split()).rstrip(".") + choices.get(field.target.id, "")
        for field, doc in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }
