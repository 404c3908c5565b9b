import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from fp4mega.train.data.tokenizers import ByteTokenizer, build_tokenizer, identify, parse_tokenizer

TEXT = "def f(x):\n\treturn x  # naïve, 日本, \U0001f40d\r\n"


def word_tokenizer(path, vocabulary):
    library = Library(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="?")
    )
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(path))
    return path


def test_bytes_are_the_ids_and_come_back():
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(TEXT)
    assert bytes(ids) == TEXT.encode()
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_byte_document_ends_in_eod_and_equals_tokenize():
    tokenizer = ByteTokenizer()
    document = tokenizer.document(TEXT)
    assert document.dtype == np.uint16
    assert document.tolist() == [*TEXT.encode(), 256]


def test_huggingface_file_and_folder(tmp_path):
    file = word_tokenizer(tmp_path / "tokenizer.json", ["?", "a", "b", "<|endoftext|>"])
    for path in (file, tmp_path):
        tokenizer = build_tokenizer("huggingface", str(path))
        assert tokenizer.tokenize("b a zzz a") == [2, 1, 0, 1]
        assert tokenizer.document("a b").tolist() == [1, 2, 3]
        assert tokenizer.detokenize([1, 2, 3]) == "a b"
        assert tokenizer.vocab_size == 4


def test_documents_are_whole_whatever_length_the_file_asks_for(tmp_path):
    file = word_tokenizer(tmp_path / "tokenizer.json", ["?", "a", "b", "<|endoftext|>"])
    library = Library.from_file(str(file))
    library.enable_truncation(3)
    library.enable_padding(length=5)
    library.save(str(file))
    tokenizer = build_tokenizer("huggingface", str(file))
    assert tokenizer.document("a b a b").tolist() == [1, 2, 1, 2, 3]
    assert tokenizer.tokenize_many(["a b a b", "b", ""]) == [[1, 2, 1, 2], [2], []]


def test_a_text_that_spells_the_end_of_a_document_does_not_end_it(tmp_path):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = Library(models.BPE(vocab=letters, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("huggingface", str(tmp_path))
    text = "a <|endoftext|> b"
    for ids in (tokenizer.tokenize(text), *tokenizer.tokenize_many([text])):
        assert len(ids) == len(text)
        assert tokenizer.eod not in ids
        assert tokenizer.detokenize(ids) == text


@pytest.mark.parametrize(
    ("size", "dtype"), [(65499, np.uint16), (65500, np.int32), (70000, np.int32)]
)
def test_the_largest_id_fits_the_files(tmp_path, size, dtype):
    words = ["<|endoftext|>", "?", *(f"w{i}" for i in range(size - 2))]
    tokenizer = build_tokenizer(
        "huggingface", str(word_tokenizer(tmp_path / "tokenizer.json", words))
    )
    document = tokenizer.document(f"{words[-1]} {words[2]}")
    assert document.tolist() == [size - 1, 2, 0]
    assert document.dtype == dtype


def test_identity_follows_the_content_of_the_file(tmp_path):
    one = build_tokenizer(
        "huggingface", str(word_tokenizer(tmp_path / "1.json", ["?", "a", "</s>"]))
    )
    same = build_tokenizer(
        "huggingface", str(word_tokenizer(tmp_path / "2.json", ["?", "a", "</s>"]))
    )
    other = build_tokenizer(
        "huggingface", str(word_tokenizer(tmp_path / "3.json", ["?", "c", "</s>"]))
    )
    assert identify(one) == identify(same) != identify(other)


@pytest.mark.parametrize(
    ("spelling", "content", "message"),
    [
        ("bytes", None, "tokenizer kind='bytes': allowed: byte, huggingface"),
        ("byte:x", None, "the byte tokenizer has no file"),
        ("huggingface", None, "path is missing"),
        ("huggingface:{dir}/none.json", None, "none.json is not a file"),
        ("huggingface:{dir}/t.json", "{", "not a tokenizers JSON file"),
    ],
)
def test_bad_tokenizers_say_what_is_wrong(tmp_path, spelling, content, message):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_tokenizer(spelling.replace("{dir}", str(tmp_path)))


def test_a_tokenizer_without_end_of_document_is_refused(tmp_path):
    file = word_tokenizer(tmp_path / "tokenizer.json", ["?", "a"])
    with pytest.raises(ValueError, match=r"no end-of-document token; looked for <\|endoftext\|>"):
        parse_tokenizer(f"huggingface:{file}")
