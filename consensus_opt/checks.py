"""Numbers and flags in a configuration, checked where they are given.

Any numeric type is taken and a plain ``int`` or ``float`` kept: ranks compare configurations by
their ``repr`` (contract C3), and NumPy writes its own numbers differently.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import SupportsIndex

import numpy as np


def whole(
    value: SupportsIndex, name: str, example: str = "", least: int = 1, most: int | None = None
) -> int:
    """Return ``value`` as a plain int of at least ``least``, and at most ``most``.

    Args:
        value: The number given.
        name: What it is called in the error.
        example: What to write instead.
        least: Smallest number allowed.
        most: Largest number allowed.

    Raises:
        TypeError: If ``value`` is no integer; a bool is none.
        ValueError: If ``value`` is out of these bounds.
    """
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    message = (
        f"{name} is {value!r}; it must be an integer {bounds}; "
        f"write {example or f'{least} or more'}"
    )
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(message) from error
    if isinstance(value, bool):
        raise TypeError(message)
    if number < least or (most is not None and number > most):
        raise ValueError(message)
    return number


def real(value: object, message: str) -> float:
    """Return ``value`` as a plain float.

    Raises:
        TypeError: With ``message``, if ``value`` is no real number; a bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    try:
        return float(value)
    except OverflowError:
        return math.inf


def positive(value: object, name: str, example: str) -> float:
    """Return ``value`` as a plain float, finite and above 0.

    Raises:
        TypeError: If ``value`` is no real number; a bool is none.
        ValueError: If ``value`` is not finite, or not above 0.
    """
    message = f"{name} is {value!r}; it must be a finite number above 0; write {example}"
    number = real(value, message)
    if not 0 < number < math.inf:
        raise ValueError(message)
    return number


def not_negative(value: object, name: str, example: str) -> float:
    """Return ``value`` as a plain float of at least 0; infinity is one.

    Raises:
        TypeError: If ``value`` is no real number; a bool is none.
        ValueError: If ``value`` is below 0 or not a number.
    """
    message = f"{name} is {value!r}; it must be a number of at least 0; write {example}"
    number = real(value, message)
    if not number >= 0:
        raise ValueError(message)
    return number


def flag(value: object, name: str, example: str) -> bool:
    """Return ``value`` as a plain bool.

    Raises:
        TypeError: If ``value`` is neither True nor False, but "no", 0 or None.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it must be True or False; write {example}")


def seconds(value: object) -> float:
    """Return a timeout as a plain float.

    Raises:
        TypeError: If ``value`` is no real number.
        ValueError: If it is not from a millisecond to ten years, which engines can count.
    """
    number = positive(value, "timeout", "timeout=300.0, in seconds")
    if not 1e-3 <= number <= 315_360_000:
        raise ValueError(
            f"timeout is {value!r}; it must be a number of seconds from 0.001 to 315360000 (ten "
            "years); write timeout=300.0"
        )
    return number


def whole_field(
    config: object, field: str, example: str = "", least: int = 1, name: str = ""
) -> None:
    """Check a field of a frozen dataclass with :func:`whole`, in its ``__post_init__``."""
    number = whole(getattr(config, field), name or field, example, least)
    object.__setattr__(config, field, number)
