"""How: the specification as readable NumPy, float64, one function per item. Needs NumPy and jaxtyping alone."""

try:
    from spec import SPEC_VERSION
except ImportError as error:  # another distribution on the index installs a package of the same name
    import importlib.util

    _found = importlib.util.find_spec("spec")
    raise ImportError(
        "kvspec needs its own package 'spec', and found another one at "
        f"{_found.origin if _found else 'no path'}; install kvspec into a virtual environment of its own"
    ) from error

__all__ = ["SPEC_VERSION"]
