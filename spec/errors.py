"""The two errors of the specification."""

__all__ = ["BackendUnavailable", "SpecError"]


class SpecError(ValueError):
    """An input that the specification does not admit; raised before anything has changed.

    The message names the argument, the value that came and the bound that it breaks.
    """

    def __init__(self, argument: str, value: object, bound: str) -> None:
        self.argument = argument
        self.value = value
        self.bound = bound
        super().__init__(f"{argument} = {value!r}: {bound}")

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, object, str]]:
        # ValueError would be rebuilt from its one message; workers that pickle errors need all three.
        return (SpecError, (self.argument, self.value, self.bound))


class BackendUnavailable(RuntimeError):
    """A backend, or a stage family of it, that was asked for and cannot run here; never replaced silently."""
