"""The two exceptions that kvspec raises."""

__all__ = ["BackendUnavailable", "SpecError"]


class SpecError(ValueError):
    """Error that kvspec raises for an invalid input, before kvspec changes any state.

    The message contains the name of the argument, the given value, and the rule that the value breaks. A value whose
    text has several lines, such as a model, is named by its type.
    """

    def __init__(self, argument: str, value: object, bound: str) -> None:
        self.argument = argument
        self.value = value
        self.bound = bound
        shown = repr(value)
        shown = type(value).__name__ if "\n" in shown else shown
        super().__init__(f"{argument} = {shown}: {bound}")

    def __reduce__(self) -> tuple[type["SpecError"], tuple[str, object, str]]:
        # By default, pickle rebuilds a ValueError from the message alone. A SpecError needs all three arguments.
        return (SpecError, (self.argument, self.value, self.bound))


class BackendUnavailable(RuntimeError):
    """Error that kvspec raises if the requested backend or stage family cannot run on this machine.

    kvspec never runs a different backend instead.
    """
