"""The tokenizer against ids from llama.cpp and against the rules of special tokens."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from kvtrial.engine.errors import (
    GgufInvalid,
    TokenizerUnsupported,
    UnknownToken,
)
from kvtrial.engine.gguf import GgufFile, read_gguf
from kvtrial.engine.tokenizer import PRE_TOKENIZERS, Tokenizer, byte_tokens
from kvtrial.run import models

ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2-tokens.json").read_text())["rows"]


def made(pre="qwen2", tokens=(), types=(), merges=("Ġ t",), **extra) -> Tokenizer:
    """A tokenizer of the 256 bytes, ``merges`` and ``tokens`` with their ``types``."""
    joined = [m.replace(" ", "") for m in merges]
    plain = [*byte_tokens(), *joined]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*plain, *tokens],
        "tokenizer.ggml.token_type": np.array([1] * len(plain) + list(types), np.int32),
        "tokenizer.ggml.merges": list(merges),
    }
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return Tokenizer(GgufFile(Path("made.gguf"), 3, 32, metadata, {}, 0))


def bare(tokens: list[str], merges: list[str]) -> Tokenizer:
    """A tokenizer of exactly these tokens, without types."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
    }
    return Tokenizer(GgufFile(Path("made.gguf"), 3, 32, metadata, {}, 0))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer(read_gguf(models.path_of("smollm2-135m-instruct-q4_1")))


@pytest.mark.parametrize("row", ROWS, ids=[repr(r["text"])[:24] for r in ROWS])
def test_ids_are_those_of_llama_cpp(smollm2, row):
    assert smollm2.encode(row["text"], parse_special=True) == row["ids_parse_special"]
    assert smollm2.encode(row["text"]) == row["ids_plain"]
    assert smollm2.decode(row["ids_plain"]) == row["text"]


def test_digits_are_single_and_symbol_runs_keep_their_line_end():
    merges = ("- >", ") :", "): Ċ", "1 2")
    qwen2 = made(merges=merges)
    assert len(qwen2.encode("->")) == 1
    assert len(qwen2.encode("12345")) == 5
    assert len(qwen2.encode("x):\n")) == 2
    assert len(made("smollm", merges=merges).encode("12345")) == 5
    assert len(made("gpt-2", merges=merges).encode("12345")) == 4


@pytest.mark.parametrize("pre", ["deepseek-coder", "default", None])
def test_another_pre_tokenizer_is_refused_by_name(pre):
    said = "missing" if pre is None else repr(pre)
    with pytest.raises(
        TokenizerUnsupported, match=f"{said}; allowed: deepseek-llm, gpt-2, llama-bpe, "
    ):
        made(pre)


@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm"])
def test_a_real_vocabulary_gives_the_ids_of_llama_cpp(tmp_path, name):
    """128,256 tokens of Llama 3 and 32,000 of Llama 2, strings and the ids that llama.cpp's tests expect."""
    folder = Path(__file__).parents[1] / "data" / "vocab"
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(lzma.decompress((folder / f"{name}.gguf.xz").read_bytes()))
    tokenizer = Tokenizer(read_gguf(path))
    texts = (folder / f"{name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / f"{name}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines):
        ids = [int(word) for word in line.split()]
        got = tokenizer.encode(text)
        assert got[:1] == [tokenizer.bos_id] or not text
        assert got[1:] == ids, text
        assert tokenizer.decode(ids) == text


def test_tekken_parts_words_where_capitals_begin():
    """`Hello` and `helloWorld`: the second is two parts, so that no merge joins them."""
    merges = ("l l", "o W", "1 2")
    tekken = made("tekken", merges=merges)
    assert tekken.encode("loW") == list(b"loW")  # "lo" and "W" are apart
    assert len(made("qwen2", merges=merges).encode("loW")) == 2
    assert len(tekken.encode("12")) == 2 and len(tekken.encode("all")) == 2


def test_deepseek_parts_text_by_one_pattern_after_the_other():
    """Words of letters with case, signs, digits and Han are parts of their own; whatever else is left is one."""
    merges = ("1 2", "a 1", "a b", "Ġ a", ". a", ". .", "Ċ Ċ", "a Ċ", "Ġ Ġ", "Ù Ħ", "ÙĦ ÙĦ")
    deepseek = made("deepseek-llm", merges=merges)

    def parts(text: str) -> list[str]:
        return [deepseek.decode([i]) for i in deepseek.encode(text)]

    assert parts("12") == ["12"]
    assert parts("a1") == ["a", "1"]
    assert parts("ab a") == ["ab", " a"]
    assert parts(".a..") == [".", "a", ".."]
    assert parts("a\n\n") == ["a", "\n", "\n"]
    assert parts("a  a") == ["a", " ", " a"]
    assert parts("a  ") == ["a", "  "]
    assert parts("\u0644\u0644") == ["\u0644\u0644"]  # no pattern has Arabic: what is left is whole


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_a_prompt_of_equal_letters_is_taken_in_one_go(pre: str):
    """A merge that looked at all pairs again would take hours of it."""
    tokenizer = made(pre, merges=("a a", "aa aa"))
    assert tokenizer.encode("a" * 100_000) == [tokenizer.encode("aaaa")[0]] * 25_000


def test_sentencepiece_takes_equal_letters_in_one_go():
    tokenizer = pieces([*PIECES, "hh"], [*TYPES, 1], add_bos_token=False, add_space_prefix=False)
    assert tokenizer.encode("h" * 100_000) == [len(PIECES)] * 50_000


def test_control_tokens_only_where_asked_and_user_defined_always():
    tokenizer = made(tokens=["<|im_start|>", "<think>"], types=[3, 4])
    assert tokenizer.encode("<|im_start|>", parse_special=True) == [257]
    assert tokenizer.encode("<|im_start|>") == list(b"<|im_start|>")
    assert tokenizer.encode("<think>") == [258]
    assert tokenizer.decode([257, 258]) == "<|im_start|><think>"


def test_bos_is_added_once_and_only_where_the_file_says_so():
    bos = {"tokens": ["<s>"], "types": [3], "bos_token_id": 257}
    assert made(**bos).encode("a") == [ord("a")]
    adding = made(**bos, add_bos_token=True)
    assert adding.encode("a") == [257, ord("a")]
    assert adding.encode("<s>a", parse_special=True) == [257, ord("a")]
    assert adding.encode("") == []
    assert made().bos_id is None
    with pytest.raises(TokenizerUnsupported, match="bos_token_id is missing"):
        made(add_bos_token=True)


def test_unknown_ids_and_bytes_are_refused():
    with pytest.raises(UnknownToken, match="257; allowed: 0 to 256"):
        made().decode([257])
    tokens = [t for t in byte_tokens() if t != "z"]
    with pytest.raises(UnknownToken, match=r"character 3 of the text is '\\udce9'"):
        made().encode("caf\udce9")
    with pytest.raises(UnknownToken, match=r"\[122\]"):
        bare([*tokens, "ab"], ["a b"]).encode("fuzz")


def test_contradictory_vocabularies_are_refused():
    with pytest.raises(GgufInvalid, match="'a' twice"):
        made(tokens=["a"], types=[1])
    with pytest.raises(GgufInvalid, match="merges has 'a b'"):
        bare(byte_tokens(), ["a b"])
    with pytest.raises(GgufInvalid, match="3 entries for 257"):
        made(token_type=np.ones(3, np.int32))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"model": np.arange(2, dtype=np.uint32)}, TokenizerUnsupported, "ggml.model is array"),
        ({"pre": ["smollm"]}, TokenizerUnsupported, r"ggml.pre is \['smollm'\]"),
        ({"add_bos_token": "false"}, GgufInvalid, "add_bos_token is 'false'; allowed: a bool"),
        ({"add_bos_token": np.ones(2, np.int32)}, GgufInvalid, "add_bos_token is array"),
        ({"token_type": 3}, GgufInvalid, "token_type is 3; allowed: an array of integers"),
        ({"token_type": ["3"] * 257}, GgufInvalid, "allowed: an array of integers"),
        ({"token_type": np.full(257, np.nan, np.float32)}, GgufInvalid, "array of integers"),
    ],
)
def test_metadata_of_another_type_is_named(metadata, error, message):
    with pytest.raises(error, match=message):
        made(**metadata)


@pytest.mark.parametrize("text", ["", " ", "a\n\n\tb", "é 😀 \u0000", "日本語 12 don't"])
def test_decode_gives_back_what_encode_took(text):
    for pre in ("gpt-2", "qwen2", "smollm"):
        tokenizer = made(pre)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_of_ids_are_their_text():
    """Of any ids, cut characters and bytes that are no UTF-8 among them."""
    special = ["<|im end|>", "é日", "<a>"]
    tokenizer = made(tokens=special, types=[3, 4, 3])
    random = np.random.default_rng(1)
    rows = [random.integers(0, tokenizer.vocab_size, 24) for _ in range(200)]
    rows += [[*tokenizer.encode("é 😀 日本語\x00"), 257, 258, 259]]
    for ids in rows:
        joined = b"".join(map(tokenizer.bytes_of, ids))
        assert joined.decode(errors="replace") == tokenizer.decode(ids)
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(UnknownToken, match=f"token id {wrong}; allowed"):
            tokenizer.bytes_of(wrong)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "h", "i", "hi", "\u2581hi"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 5]


def pieces(tokens=PIECES, types=TYPES, **extra) -> Tokenizer:
    """A SentencePiece tokenizer, whose later pieces have the lower scores."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return Tokenizer(GgufFile(Path("made.gguf"), 3, 32, metadata, {}, 0))


@pytest.mark.parametrize("name", ["<0xZZ>", "b", "", "<0x100>", "<0x1>"])
def test_a_byte_token_names_its_byte(name):
    with pytest.raises(GgufInvalid, match="as a byte; allowed: <0x00>"):
        pieces([name if token == "<0x41>" else token for token in PIECES])


@pytest.mark.parametrize("types", [TYPES, [], [1] * len(PIECES), [99] * len(PIECES)], ids=len)
def test_bytes_are_written_and_read_by_their_names(types):
    tokenizer = pieces(types=types, add_bos_token=False)
    ids = tokenizer.encode("hi h\u00e9\n")
    assert [PIECES[i] for i in ids[-3:]] == ["<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(ids) == "hi h\u00e9\n"


def test_what_is_a_piece_needs_no_byte():
    tokens = ["<unk>", "<s>", "\u2581", "h", "\u00e9"]
    tokenizer = pieces(tokens, [2, 3, 1, 1, 1], add_bos_token=False)
    assert tokenizer.decode(tokenizer.encode("h \u00e9")) == "h \u00e9"
    with pytest.raises(UnknownToken, match=r"bytes \[10\]"):
        tokenizer.encode("h\n")


@pytest.mark.parametrize("make", [made, pieces])
@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
def test_true_is_no_token(make, key):
    with pytest.raises(GgufInvalid, match=f"{key} is True; allowed: 0 to"):
        make(**{key: True})


def test_scores_that_order_nothing_are_refused():
    scores = -np.arange(len(PIECES), dtype=np.float32)
    scores[7] = np.nan
    with pytest.raises(GgufInvalid, match="scores has NaN for token 7"):
        pieces(scores=scores)


def test_a_message_does_not_hold_the_whole_vocabulary():
    with pytest.raises(GgufInvalid, match="scores is") as error:
        pieces(scores=["a"] * len(PIECES))
    assert len(str(error.value)) < 300
