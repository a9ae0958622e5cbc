"""Start of vLLM with eviction: `additional_config["kvspec"]` chooses kvspec's scheduler and worker.

    vllm serve MODEL --additional-config '{"kvspec": {"default": {"policy": "snapkv", "budget": 0.3}}}'
"""

import json
import logging
from dataclasses import replace
from typing import Any

from models_integration.engines.vllm.statement import KEY
from spec.errors import SpecError

__all__ = ["register"]

_HOME = "models_integration.engines.vllm"
WORKER = f"{_HOME}.runner.EvictingWorker"
SCHEDULERS = {False: f"{_HOME}.scheduler.EvictingScheduler", True: f"{_HOME}.scheduler.EvictingAsyncScheduler"}
PARAMETERS = f"{_HOME}.front_end:PolicyParameters"


def register() -> None:
    """Let vLLM's configuration choose kvspec's classes if `additional_config` has the key "kvspec".

    vLLM calls this function in each process (entry point group `vllm.general_plugins`).
    """
    # Not in `seams`, which imports the worker: vLLM 0.32 loads plugins in `EngineArgs.__post_init__`, for every model.
    # The method `create_engine_config` is the first place with all arguments, and the last before vLLM decides about
    # the worker and asynchronous scheduling.
    from vllm.engine.arg_utils import EngineArgs

    # vLLM 0.32 calls a plugin without the configuration, and reads `additional_config` in this method.
    original = EngineArgs.create_engine_config
    if getattr(original, KEY, False):
        return

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = (self.additional_config or {}).get(KEY)
        if given is None:
            return original(self, *args, **kwargs)
        return _chosen(self, original, given, args, kwargs)

    setattr(create_engine_config, KEY, True)
    EngineArgs.create_engine_config = create_engine_config


def _chosen(engine: Any, original: Any, given: Any, args: Any, kwargs: Any) -> Any:
    """Return the configuration of an engine, with kvspec's classes.

    Raises:
        SpecError: if a setting is invalid, if the engine has a different scheduler or worker, or if it has a
            configuration that kvspec does not serve.
    """
    # A process of vLLM without this setting does not import these modules.
    from models_integration.engines.vllm.arguments import Settings
    from models_integration.engines.vllm.front_end import install, sentence_ends_of
    from models_integration.engines.vllm.seams import (
        check_configuration,
        check_stated_memory,
        token_bytes_of,
        use_piecewise_graphs,
    )

    settings = Settings.read(given)
    for name, unset in (("scheduler_cls", (None,)), ("worker_cls", ("auto", WORKER))):
        if getattr(engine, name) not in unset:
            raise SpecError(name, getattr(engine, name), f"must not be set together with additional_config[{KEY!r}]")
    engine.worker_cls = WORKER
    engine.logits_processors = [*(engine.logits_processors or []), PARAMETERS]
    config = original(engine, *args, **kwargs)
    use_piecewise_graphs(config)
    check_configuration(config)
    check_stated_memory(config)
    if settings.lacks_sentence_ends:
        settings = replace(settings, sentence_ends=sentence_ends_of(config.model_config))
    settings = replace(settings, token_bytes=token_bytes_of(config))
    config.additional_config = {**config.additional_config, KEY: json.loads(settings.text())}
    install(settings)
    lines = [f"\n  {reason}" for reason in settings.unserved.values()]
    logging.getLogger(__name__).warning("kvspec: policies that are not served:%s", "".join(lines) or " none")
    # vLLM decides about asynchronous scheduling inside, so the class of the scheduler is chosen after that.
    config.scheduler_config.scheduler_cls = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
    return config
