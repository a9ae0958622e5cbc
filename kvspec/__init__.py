"""Evict tokens from the KV cache of `transformers` models with published policies.

    import kvspec

    policy = kvspec.policy_from_name("snapkv", budget=0.3)
    with policy(model) as run:
        output = model.generate(**inputs, max_new_tokens=200)

Importing `kvspec` imports neither torch nor transformers, because Python imports each class or function on first use.
You can also import the packages that `kvspec` uses: `spec` (the specification), `reference` (one NumPy function for
each equation) and `models_integration` (sessions on models).
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

_PACKAGES = ("spec", "reference", "accelerated", "models_integration", "experiments", "conformance")


def _check_packages() -> None:
    """Check that no file of the user hides a package of kvspec.

    Raises:
        ImportError: if a package is imported from a different folder than `kvspec`. The message has the file.
    """
    home = Path(__file__).resolve().parents[1]
    for name in _PACKAGES:
        result = find_spec(name)
        origin = None if result is None else result.origin
        if origin is not None and Path(origin).resolve().parent != home / name:
            raise ImportError(f"{origin} hides the package {name!r} of kvspec: rename that file or folder", name=name)


_check_packages()
import spec  # noqa: E402  # after the check

if TYPE_CHECKING:
    from conformance.verify.function import Verdict, verify
    from experiments.studies.own_texts import compare
    from models_integration import (
        CrystalCache,
        CustomPolicy,
        FullCache,
        NamedPolicy,
        RetainedCache,
        Session,
        StreamingLLM,
        calibrate,
        compact,
        decide,
        layer_similarities,
        load_cache,
        observe,
        policy_from_name,
        prefill,
        prefill_episodes,
        repeat_template,
        save_cache,
        sentence_ends,
    )
    from reference.policies import policy_from_score
    from reference.policies.describe import PolicyDescription, describe_policy, list_policies
    from reference.policies.protections import SinkAndRecent
    from spec.errors import BackendUnavailable, SpecError
    from spec.policy import Needs
    from spec.retention import Granularity

__version__ = spec.SPEC_VERSION

__all__ = [
    "BackendUnavailable", "CrystalCache", "CustomPolicy", "FullCache", "Granularity", "NamedPolicy", "Needs",
    "PolicyDescription", "RetainedCache", "Session", "SinkAndRecent", "SpecError", "StreamingLLM", "Verdict",
    "__version__", "calibrate", "compact", "compare", "decide", "describe_policy", "layer_similarities",
    "list_policies", "load_cache", "observe", "policy_from_name", "policy_from_score", "prefill", "prefill_episodes",
    "repeat_template", "save_cache", "sentence_ends", "verify",
]

_ELSEWHERE = {
    "Verdict": "conformance.verify.function", "verify": "conformance.verify.function",
    "policy_from_score": "reference.policies", "PolicyDescription": "reference.policies.describe",
    "describe_policy": "reference.policies.describe", "list_policies": "reference.policies.describe",
    "compare": "experiments.studies.own_texts",
    "BackendUnavailable": "spec.errors", "SpecError": "spec.errors",
    "Granularity": "spec.retention", "Needs": "spec.policy", "SinkAndRecent": "reference.policies.protections",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_ELSEWHERE.get(name, "models_integration")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
