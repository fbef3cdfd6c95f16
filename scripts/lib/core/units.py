"""Numbers as people read them."""


def short(number: float) -> str:
    """4800 as `4.8k`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if round(number / size, 4) >= 1:  # 999,960 is `1.0M`
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(hours: float | None) -> str:
    """Hours as `h:mm:ss` or `m:ss`; `?` when unknown."""
    if hours is None:
        return "?"
    seconds = round(hours * 3600)
    minutes, seconds = divmod(seconds, 60)
    hours_, minutes = divmod(minutes, 60)
    return f"{hours_}:{minutes:02d}:{seconds:02d}" if hours_ else f"{minutes}:{seconds:02d}"
