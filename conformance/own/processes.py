"""Processes that tests start and kill; they are forked from a server that has started no thread.

A worker of the test run has threads of its own (BLAS, Numba, xdist), and a fork of it may wait for a lock for ever.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

# Loaded once, by the server: what the processes do.
WORK = [
    f"conformance.own.models_integration.{room}"
    for room in (
        "archive.fault_cases", "archive.test_attacks", "archive.test_store", "session.saved", "studies.experiments",
        "studies.test_results",
    )
]


def started(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that does the work; its exit code is 0 when that ended well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WORK)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process
