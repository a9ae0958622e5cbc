"""The command `kvspec serve`: vLLM's own server, with kvspec's scheduler and worker and a default policy."""

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from models_integration.engines.vllm.arguments import Settings
from models_integration.engines.vllm.plugin import register
from models_integration.engines.vllm.statement import KEY
from models_integration.model.hub import downloaded, is_hub_name
from models_integration.pocket import model_folder
from models_integration.policies.methods import parse_policy
from spec.errors import SpecError

__all__ = ["run_serve", "server_settings"]

_CONFIG = "--additional-config"
_SET_HERE = (_CONFIG, "--scheduler-cls", "--worker-cls")
"""Options of `vllm serve` that this command sets."""
_NAME = "--served-model-name"
_CONFIGS = ("config.json", "params.json")
"""Files of which vLLM needs one in the folder of a model."""
_FAILED = "initialization failed"
"""Words of the error of `vllm serve` after the engine, in a different process, has printed the reason."""


def server_settings(
    policy: str, budget: str, allow_budget: str | None, allow_policies: str | None, on_unserved: str,
) -> Settings:
    """Return the settings of a server from the options of the command.

    Raises:
        SpecError: if a name, a constant or a budget is invalid, or if vLLM cannot serve the policy.
    """
    name, constants = parse_policy(policy)
    allowed = None if allow_policies is None else [one.strip() for one in allow_policies.split(",")]
    return Settings.read({
        "default": {"policy": name, "budget": budget, **constants}, "allow_budget": allow_budget,
        "allow_policies": allowed, "on_unserved": on_unserved,
    })


def run_serve(model: str, settings: Settings, options: Sequence[str], download: bool = False) -> None:
    """Run vLLM's server in this process.

    Args:
        model: name or folder of the model. A name, such as smollm2, is also the name in the server.
        settings: settings of the server.
        options: options of `vllm serve`.
        download: if True, vLLM may download the model from the hub.

    Raises:
        SpecError: if vLLM is not installed, or if an option of vLLM conflicts with kvspec. Also if the model is not on
            this machine, or if the engine does not start.
    """
    if find_spec("vllm") is None:
        raise SpecError("vllm", None, "is not installed; install vLLM 0.30 to 0.32 for your device in this environment")
    # vLLM 0.32 also accepts `--a_b`, `--a-b.key=value`, and the start of an option, and uses the last of two values.
    names = [option.split("=")[0].split(".")[0].replace("_", "-") for option in options]
    for name, option in zip(names, options, strict=True):
        if name.startswith("--") and len(name) > 2 and any(one.startswith(name) for one in _SET_HERE):
            raise SpecError(name, option, "is set by kvspec serve; leave this option out")
    folder = _folder(model, _value("--revision", names, options), download)
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # kvspec was tested with vLLM's first model runner alone
    from vllm.entrypoints.cli.main import main

    from models_integration.engines.vllm.seams import check_version, end_promptly

    check_version()
    register()
    end_promptly()
    config = json.dumps({KEY: json.loads(settings.text())})
    named = [] if folder == model or _NAME in names else [_NAME, model]
    sys.argv = ["vllm", "serve", folder, _CONFIG, config, *named, *options]
    try:
        main()
    except RuntimeError as error:
        if _FAILED not in str(error):
            raise
        raise SpecError("MODEL", model, "the engine did not start; the log above has the reason") from error


def _folder(model: str, revision: str | None, download: bool) -> str:
    """Return the folder of a model on this machine, or a name or address that vLLM resolves.

    Raises:
        SpecError: if the model is not on this machine, and must not be downloaded.
    """
    folder, path = str(model_folder(model)), Path(model)
    if folder != model or ":" in model or path.is_file():  # an address, NAME:QUANTIZATION, or a GGUF file
        return folder
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGS):
            raise SpecError("MODEL", model, "is a folder without config.json, and so no model; give a different folder")
        return folder
    if not is_hub_name(model):
        reason = "is no folder on this machine; give a folder, or a name of the hub such as Qwen/Qwen3-8B"
        raise SpecError("MODEL", model, reason)
    if download:
        return model
    cached = downloaded(model, revision)
    if cached is None:
        reason = "is neither a folder nor a whole model in the cache of the hub; to download the model, add --download"
        raise SpecError("MODEL", model, reason)
    return str(cached)


def _value(name: str, names: Sequence[str], options: Sequence[str]) -> str | None:
    """Return the value of an option of vLLM, which is in the same or in the next text, or None."""
    if name not in names:
        return None
    at = names.index(name)
    return options[at].partition("=")[2] or "".join(options[at + 1 : at + 2]) or None
