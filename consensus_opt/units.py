"""Quantities as people write them: "25.6M" parameters, "10Gbit" a second, "50us".

Bits and bytes differ by the case of one letter, and a factor of 8 in a plan is easy to miss, so a
bandwidth without its unit is refused and never guessed.
"""

from __future__ import annotations

import math
import re

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {f"{prefix}i": 1024.0**k for k, prefix in enumerate("KMGT", start=1)}
_COUNTS = {**_DECIMAL, "m": 1e6, "g": 1e9, "b": 1e9, "B": 1e9, "t": 1e12}
_IN_A_SECOND = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9}
_BANDWIDTH = re.compile(r"([kKMGT]i?)?(?:(bit|Bit|BIT|b|bps)|(B|Byte|byte|Bytes|bytes|Bps))(?:/s)?")


def count(text: str) -> int:
    """Return a whole number of things: "25.6M", "7B" (1e9), "350k", "25557032".

    Raises:
        ValueError: If it is no number of at least 1 that comes out whole.
    """
    number, unit = _split(text)
    value = number * _COUNTS.get(unit, math.nan)
    if not (1 <= value < math.inf and abs(value - round(value)) < 1e-9 * value):
        raise ValueError(
            f"{text!r} is no count; it must be a whole number of at least 1, with k, M, B (or G) "
            "or T for thousands, millions, ...; write 25.6M"
        )
    return round(value)


def bandwidth(text: str) -> float:
    """Return bytes a second: "10Gbit", "10Gb/s", "10Gbps" (bits); "1.25GB/s", "1GiB/s" (bytes).

    Raises:
        ValueError: If it is no positive number with a unit.
    """
    number, unit = _split(text)
    match = _BANDWIDTH.fullmatch(unit)
    prefix = (match[1] or "") if match else ""
    value = number * {**_DECIMAL, **_BINARY}[prefix] / (8 if match and match[2] else 1)
    if not match or not 0 < value < math.inf:
        raise ValueError(
            f"{text!r} is no bandwidth; it must be a positive number with its unit, in bits (bit) "
            "or bytes (B) a second; write 10Gbit or 1.25GB/s"
        )
    return value


def duration(text: str) -> float:
    """Return seconds: "50us", "250ms", "0.25s", "0.25".

    Raises:
        ValueError: If it is no number of at least 0 of s, ms, us or ns.
    """
    number, unit = _split(text)
    value = number / _IN_A_SECOND.get(unit, math.nan)
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{text!r} is no time; it must be a number of at least 0 with s, ms, us or ns, or none "
            "for seconds; write 50us or 0.25"
        )
    return value


def scaled(value: float, unit: str, digits: int = 3) -> str:
    """Write a number for people, with a decimal prefix: ``scaled(1.024e8, "B")`` is "102 MB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    for factor, prefix in ((1e-3, "m"), (1e-6, "u")):
        if unit == "s" and abs(value) >= 0.9995 * factor:
            return f"{value / factor:.{digits}g} {prefix}{unit}"
    return f"{value:.{digits}g} {unit}"


def _split(text: str) -> tuple[float, str]:
    """Return the number that ``text`` begins with, NaN if it does not, and the rest."""
    match = re.fullmatch(r"\s*(\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+)\s*(\S*)\s*", text)
    if not match:
        return math.nan, ""
    return float(match[1].rstrip("_").replace("_", "")), match[2]
