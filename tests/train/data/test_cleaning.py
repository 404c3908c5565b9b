"""What becomes of a file on its way into the corpus."""

import pytest

from fp4mega.train.data.cleaning import html_to_text, reason_to_skip, text_of

PAGE = """<html><head><title>T</title><style>p { color: red }</style></head><body><nav>Up Down</nav>
<p>First &amp; <b>second</b></p><script>if (1 < 2) { go() }</script><pre>for x in y:
    print(x &lt; 3)</pre><!-- not <b>this</b> --><ul><li>one</li><li>two</li></ul></body></html>"""


def test_html_keeps_what_is_shown():
    text = html_to_text(PAGE)
    shown = [line for line in text.split("\n") if line.strip()]
    assert shown == ["First & second", "for x in y:", "    print(x < 3)", "one", "two"]


def test_comparison_signs_are_not_tags():
    assert html_to_text("<p>a < b and c > d</p>").strip() == "a < b and c > d"


def test_line_ends_and_byte_order_mark():
    assert text_of("a.txt", b"\xef\xbb\xbfone  \r\ntwo\t\rthree\n\n\n") == "one\ntwo\nthree\n"


@pytest.mark.parametrize("content", [b"a\0b", b"\xff\xfe", "é".encode("latin-1")])
def test_what_is_not_utf8_text_is_none(content):
    assert text_of("a.txt", content) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("words and words\n" * 5, "short"),
        ("words and more words " * 40 + "\n", "long_lines"),
        ("a line\n" * 400 + "x" * 5000, "long_lines"),
        ("0x12, 0x34, 1.5e-3, 77\n" * 40, "few_letters"),
        ("def f(x): return x + 1\n" * 40, None),
        ("überall stehen Wörter, naïve ones\n" * 40, None),
    ],
)
def test_reasons(text, reason):
    assert reason_to_skip(text) == reason
