"""Numbers, times, money and foreign text as people read them in a terminal. Plain ASCII."""

import unicodedata

_DASH = "-"


def visible(text: str, encoding: str = "utf-8", limit: int = 500) -> str:
    """`text` safe to print: control, format and unencodable characters as escapes; cut after `limit`.

    Text of a data set or an engine may hold escape sequences that repaint or retitle the user's terminal.
    """
    cut = text[:limit]
    safe = "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in cut)
    if len(text) > limit:
        safe += f"... ({len(text) - limit:,} more characters)"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def _escape(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def count(number: float | None) -> str:
    """A count in full: 1,234,567."""
    return _DASH if number is None else f"{number:,.0f}"


def rate(number: float | None) -> str:
    """A rate per second with three figures that mean something: 0.31, 4.2, 369, 12,345."""
    if number is None:
        return _DASH
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 1 else f"{number:.2f}"


def short(number: float | None) -> str:
    """A count where room is scarce: 950, 12k, 4.6M, 1.2G."""
    if number is None:
        return _DASH
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.9995:
            return f"{number / size:.1f}{unit}" if number < size * 9.95 else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def seconds(number: float | None) -> str:
    """A duration: 850us, 12ms, 3.2s, 4m 07s, 2h 05m, 3d 04h. None is negative, whatever a clock did."""
    if number is None:
        return _DASH
    number = max(0.0, number)
    if number < 0.9995:
        return "0s" if number == 0 else f"{number * 1e6:.0f}us" if number < 0.0005 else f"{number * 1e3:.0f}ms"
    if number < 59.95:
        return f"{number:.1f}s"
    whole = round(number)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def usd(number: float | None) -> str:
    """Money: cents where they carry the figure, more places where it is small."""
    if number is None:
        return _DASH
    if number == 0 or number >= 1:
        return f"${number:,.2f}"
    return f"${number:.4f}" if number >= 0.01 else f"${number:.2g}" if number >= 0.0001 else f"${number:.1e}"


def percent(fraction: float | None) -> str:
    """A share of one: 87%, 3.4%; below ten percent with one place."""
    if fraction is None:
        return _DASH
    return f"{fraction:.0%}" if fraction == 0 or fraction >= 0.1 else f"{fraction:.1%}"


def rows(number: int) -> str:
    """A count of rows with its noun: 1 row, 1,200 rows."""
    return f"{number:,} row" if number == 1 else f"{number:,} rows"
