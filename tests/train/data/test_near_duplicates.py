"""What counts as the same document."""

import numpy as np

from fp4mega.train.data.near_duplicates import DuplicateFilter, shingles_of


def lines(first, last):
    return "\n".join(f"line number {i} says {i * i}" for i in range(first, last)) + "\n"


def test_white_space_makes_no_difference():
    seen = DuplicateFilter()
    assert seen.admit("one  two\n\tthree\n") == "kept"
    assert seen.admit("one two three") == "exact_duplicate"
    assert seen.admit("one two three four") == "kept"


def test_a_document_that_mostly_repeats_another_is_near():
    seen = DuplicateFilter()
    assert seen.admit(lines(0, 1000)) == "kept"
    assert seen.admit(lines(0, 950) + lines(5000, 5050)) == "near_duplicate"
    assert seen.admit(lines(0, 200) + lines(6000, 6800)) == "kept"


def test_a_refused_document_is_not_remembered():
    seen = DuplicateFilter()
    seen.admit(lines(0, 1000))
    assert seen.admit(lines(0, 900) + lines(7000, 7100)) == "near_duplicate"
    # Half of it is new, the half that the refused document had too.
    assert seen.admit(lines(7000, 7100) + lines(8000, 8001)) == "kept"


def test_shingles_do_not_depend_on_place_or_indentation():
    block = lines(0, 400)
    shifted = lines(900, 903) + "".join(f"    {line}\n" for line in block.splitlines())
    shared = np.intersect1d(shingles_of(block), shingles_of(shifted))
    assert len(shared) == len(shingles_of(block)) > 20


def test_texts_without_lines():
    seen = DuplicateFilter()
    assert seen.admit("") == "kept"
    assert seen.admit(" \n ") == "exact_duplicate"
    assert shingles_of("}\n)\n").size == 0
    assert seen.admit("}\n)\n") == "kept"


def test_lines_in_another_order_are_other_shingles():
    forward = lines(0, 400)
    back = "\n".join(reversed(forward.splitlines()))
    assert np.intersect1d(shingles_of(forward), shingles_of(back)).size == 0
    assert shingles_of(back).size > 20
