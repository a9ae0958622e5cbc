"""Error for models that kvspec does not recognise."""

__all__ = ["UnknownModel"]


class UnknownModel(RuntimeError):
    """Error for a model whose rotation of keys (RoPE) the test prefills did not identify."""
