"""Raw files to text worth training on: decoding, HTML to text, and what is not taken at all."""

import html
import re

SHORTEST_DOCUMENT = 200
LONGEST_MEAN_LINE = 200
LONGEST_LINE = 4000
SMALLEST_LETTER_SHARE = 0.4

CODE = (
    *(
        ".py",
        ".pyi",
        ".pyx",
        ".c",
        ".h",
        ".cc",
        ".cpp",
        ".hpp",
        ".cxx",
        ".rs",
        ".go",
        ".java",
        ".js",
        ".ts",
    ),
    *(
        ".pl",
        ".pm",
        ".rb",
        ".el",
        ".lisp",
        ".mac",
        ".hs",
        ".ml",
        ".mli",
        ".erl",
        ".hrl",
        ".ex",
        ".exs",
        ".R",
    ),
    *(".m", ".sh", ".sql", ".lua", ".tcl", ".f", ".f90", ".S", ".pas", ".pp", ".inc", ".spad"),
)
DOCUMENTATION = (".txt", ".md", ".rst", ".pod", ".texi", ".tex", ".html", ".htm", ".info", ".adoc")
MANUAL_PAGES = tuple(f".{section}" for section in range(1, 10))
SUFFIXES = (*CODE, *DOCUMENTATION, *MANUAL_PAGES)

_UNSEEN = re.compile(
    r"<(script|style|head|svg|nav)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE
)
_BLOCK = re.compile(
    r"</?(p|div|br|li|ul|ol|tr|table|h[1-6]|pre|dt|dd|dl|section|blockquote|hr)\b[^>]*>",
    re.IGNORECASE,
)
_TAG = re.compile(r"<[a-zA-Z/!][^>]*>")
_BLANK_LINES = re.compile(r"\n[ \t]*(\n[ \t]*)+\n")
_NO_LETTERS = bytes(b for b in range(128) if not chr(b).isalpha())


def text_of(name: str, content: bytes) -> str | None:
    """The text of a file with LF line ends and no white space at line ends; None when it is not UTF-8 text."""
    if b"\0" in content:
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if name.endswith((".html", ".htm")):
        text = html_to_text(text)
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    return "\n".join(lines).strip("\n") + "\n"


def html_to_text(page: str) -> str:
    """What a page shows, roughly: no scripts, styles or navigation, a line end at each block, entities as characters."""
    page = _UNSEEN.sub(" ", page)
    page = _TAG.sub("", _BLOCK.sub("\n", page))
    return _BLANK_LINES.sub("\n\n", html.unescape(page))


def reason_to_skip(text: str) -> str | None:
    """Why a text is no document to train on, in one word for the manifest; None for one that is.

    `short`; `long_lines`, which are minified or generated; `few_letters`, which are tables of numbers.
    """
    if len(text) < SHORTEST_DOCUMENT:
        return "short"
    lines = text.split("\n")
    if len(text) > LONGEST_MEAN_LINE * len(lines) or max(map(len, lines)) > LONGEST_LINE:
        return "long_lines"
    encoded = text.encode("utf-8", errors="replace")
    # Bytes beyond ASCII count as letters.
    letters = len(encoded.translate(None, _NO_LETTERS))
    if letters < SMALLEST_LETTER_SHARE * len(encoded.translate(None, b" \n\t")):
        return "few_letters"
    return None
