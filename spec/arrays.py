"""Array types for function signatures, such as `Float64[Matrix, "n d"]`.

mypy checks the rank and the dtype that the alias `Matrix` defines. In tests, jaxtyping checks the axes `"n d"`.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from jaxtyping import AbstractDtype, Bool, Float, Float64, Int64

__all__ = [
    "Bool", "BoolMatrix", "BoolVector", "Cube", "Float", "Float64", "Hypercube", "Int64", "IntCube", "IntMatrix",
    "IntVector", "Matrix", "RawCube", "Vector",
]

if TYPE_CHECKING:
    Vector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
    Matrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
    Cube: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
    Hypercube: TypeAlias = np.ndarray[tuple[int, int, int, int], np.dtype[np.float64]]
    RawCube: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.floating[Any]]]
    IntVector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
    IntMatrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
    IntCube: TypeAlias = np.ndarray[tuple[int, int, int], np.dtype[np.int64]]
    BoolVector: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
    BoolMatrix: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.bool_]]
else:
    Vector = Matrix = Cube = Hypercube = RawCube = np.ndarray
    IntVector = IntMatrix = IntCube = BoolVector = BoolMatrix = np.ndarray

    class Float(AbstractDtype):
        """Any floating dtype of NumPy, including longdouble, which jaxtyping's `Float` excludes."""

        dtypes = (*Float.dtypes, np.longdouble.__name__, str(np.dtype(np.longdouble)))
