"""Processes that tests start and kill. They are forked from a server without threads.

A worker of the test run has threads (BLAS, Numba, xdist). A fork of this worker could wait for a lock forever.
"""

import multiprocessing
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.context import ForkServerProcess
from typing import Any

# Modules that the server imports once. The server ignores a name that does not exist, and then each process imports.
WORK = [
    "tests.models_integration.archive.fault_cases", "tests.models_integration.archive.test_attacks",
    "tests.models_integration.archive.test_store", "tests.models_integration.session.sessions",
    "tests.experiments.studies.experiments", "tests.experiments.studies.test_results",
]
assert all(map(find_spec, WORK)), WORK


def started(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Start a process that does the work. Its exit code is 0 if the work succeeds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WORK)
    process = context.Process(target=work, args=arguments)
    process.start()
    return process
