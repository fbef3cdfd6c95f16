"""Text of others on a terminal: what steers terminals is shown, not obeyed.

A model, a source's rows and a server's error page can all hold escape sequences (which clear the screen, change the
window's title, write to the clipboard) and overrides of the writing direction (which make text read as what it isn't).
"""

import re

_C0 = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)} | {0x7F: "\u2421"}
# C1, which 8-bit terminals obey as they do ESC and a letter; directions (Unicode TR 9); separators that break lines;
# annotations and tags, which show nothing; halves of characters, which can't be written.
_OTHERS = re.compile(
    "[\x80-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_BREAKS = {0x09: "\u2409", 0x0A: "\u240a"}


def visible(text: str) -> str:
    """The text with pictures (`␛`) and code points (`<U+202E>`) for what would steer a terminal; lines stay lines."""
    return _OTHERS.sub(lambda found: f"<U+{ord(found[0]):04X}>", text.translate(_C0))


def visible_line(text: str) -> str:
    """The same as one line."""
    return visible(text).translate(_BREAKS)
