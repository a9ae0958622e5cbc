"""What a model can be refused with, beside a SpecError."""

__all__ = ["UnknownModel"]


class UnknownModel(RuntimeError):
    """The self-calibration did not recognise how the model rotates its keys."""
