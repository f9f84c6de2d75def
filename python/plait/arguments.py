"""Scalar arguments: checked by name before the extension, whose own error names none of them."""

import operator
from math import isfinite

# Of scheduler=, in errors.
SCHEDULERS = "'auto', 'lpt', 'unsplit' or 'prefix_sum'"


def integer(where, name, value, lowest=-(2**31), highest=2**31 - 1):
    """value as an int, if it is an integer (Python's, NumPy's; no bool) within the limits."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{where}: {name} is {shown(value)} ({type(value).__name__}); taken is an integer"
        ) from None
    if not lowest <= number <= highest:
        raise ValueError(f"{where}: {name} is {number}; taken is {lowest} ... {highest}")
    return number


def number(where, name, value, lowest=None, highest=None):
    """value as a float, if it is a finite number (no bool, no text) within the limits."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        real = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"{where}: {name} is {shown(value)} ({type(value).__name__}); taken is a number"
        ) from None
    if not isfinite(real):
        raise ValueError(f"{where}: {name} is {real}; it must be finite")
    if lowest is not None and not lowest <= real <= highest:
        raise ValueError(f"{where}: {name} is {real}; taken is {lowest} ... {highest}")
    return real


def instance(where, name, value, kind, taken):
    """value, if it is a `kind`; `taken` says how one is made."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{where}: {name} is {shown(value)} ({type(value).__name__}); taken is {taken}"
        )
    return value


def needed(where, **tensors):
    """Refuses None for what must be given; the extension looks at the rest."""
    for name, value in tensors.items():
        if value is None:
            raise TypeError(f"{where}: {name} is None; taken is a tensor")


def shown(value):
    """A value in one line of an error."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
