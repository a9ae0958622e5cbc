"""Processes that tests start and kill. They are forked from a server without threads.

A worker of the test run has threads (BLAS, Numba, xdist). A fork of this worker could wait for a lock forever.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from typing import Any

# Modules that the server imports once.
WORK = [
    f"tests.models_integration.{room}"
    for room in (
        "archive.fault_cases", "archive.test_attacks", "archive.test_store", "session.saved", "studies.experiments",
        "studies.test_results",
    )
]


def started(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process that does the work. Its exit code is 0 if the work succeeds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WORK)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process
