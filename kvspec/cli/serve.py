"""The command `kvspec serve`: vLLM's own server, with kvspec's scheduler and worker and a default policy."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

from models_integration.engines.vllm.arguments import KEY, Settings
from models_integration.engines.vllm.plugin import register
from models_integration.policies.methods import spelled
from spec.errors import SpecError

__all__ = ["run_serve", "server_settings"]

_CONFIG = "--additional-config"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def server_settings(
    policy: str, budget: str, allow_budget: str | None, allow_policies: str | None, on_unserved: str,
) -> Settings:
    """Return the settings of a server from the options of the command.

    Raises:
        SpecError: if a name, a constant or a budget is invalid, or if vLLM cannot serve the policy.
    """
    name, constants = spelled(policy)
    allowed = None if allow_policies is None else [one.strip() for one in allow_policies.split(",")]
    return Settings.read({
        "default": {"policy": name, "budget": budget, **_as_json(constants)}, "allow_budget": allow_budget,
        "allow_policies": allowed, "on_unserved": on_unserved,
    })


def _as_json(constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return constants that JSON can contain: a fraction becomes a float."""
    return {key: float(one) if isinstance(one, Fraction) else one for key, one in constants.items()}


def run_serve(model: str, settings: Settings, options: Sequence[str]) -> None:
    """Run vLLM's server in this process.

    Args:
        model: name or folder of the model.
        settings: settings of the server.
        options: options of `vllm serve`.

    Raises:
        SpecError: if vLLM is not installed, or if an option of vLLM conflicts with kvspec.
    """
    if find_spec("vllm") is None:
        raise SpecError("vllm", None, "is not installed; install vLLM 0.32 for your device in this environment")
    for option in options:
        if option.split("=")[0] in (_CONFIG, "--scheduler-cls", "--worker-cls"):
            raise SpecError(option.split("=")[0], option, "is set by kvspec serve; leave this option out")
    os.environ.setdefault(_RUNNER, "0")  # kvspec was tested with vLLM's first model runner alone
    from vllm.entrypoints.cli.main import main

    register()
    config = json.dumps({KEY: json.loads(settings.text())})
    sys.argv = ["vllm", "serve", model, _CONFIG, config, *options]
    main()
