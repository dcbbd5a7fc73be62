"""Byte-level BPE and SentencePiece from a GGUF's own metadata, through the ``tokenizers`` library.

Decided where files and peers differ:

- An unknown pre-tokenizer is an error, never a default: a near miss changes token counts silently.
- Text is not normalised, as llama.cpp doesn't: `decode` gives back what `encode` took.
- CONTROL tokens are recognised only with ``parse_special``; else their text is plain text.
  USER_DEFINED tokens are always one id.
- BOS is put in front where the file says ``add_bos_token``, or where it does not say and the family always has
  one, once, and never to empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as _Library
from tokenizers.models import BPE

from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import flag, integer, integers, shown
from kvtrial.engine.errors import GgufInvalid, TokenizerUnsupported, UnknownToken
from kvtrial.engine.gguf import STRINGS, GgufFile

#: ``tokenizer.ggml.model`` of the two kinds that run.
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
_MODELS = {BYTE_LEVEL: " (byte-level BPE)", SENTENCEPIECE: " (SentencePiece)"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
#: How SentencePiece writes a space.
SPACE = "\u2581"

# The published split patterns: words with what stands before them, digits (Qwen2 one a token, Llama 3 up to
# three), symbol runs with their line ends, and white space. Mistral's Tekken parts words where capitals begin.
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_QWEN2_SPLIT = _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE
_LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACE
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE
)

# DeepSeek LLM parts what the pattern before has left: line ends, words of the letters that it lists, signs, the
# last white space, Chinese, Japanese and Korean, digits.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SPLITS = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(*patterns: str) -> Any:
    """Each pattern parts what the one before has left whole or cut out."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, plain])


class _Pre(NamedTuple):
    """How text is parted, whether a part that is a token is taken whole, whatever the merges say, and whether
    BOS is put in front where the file does not say."""

    parts: Callable[[], Any]
    whole_words: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "deepseek-llm": _Pre(partial(_split, *_DEEPSEEK_SPLITS)),
    "gpt-2": _Pre(_gpt2),
    "llama-bpe": _Pre(partial(_split, _LLAMA3_SPLIT), whole_words=True, add_bos=True),
    "qwen2": _Pre(partial(_split, _QWEN2_SPLIT)),
    "smollm": _Pre(_digits),
    "starcoder": _Pre(_digits),
    "tekken": _Pre(partial(_split, _TEKKEN_SPLIT), whole_words=True, add_bos=True),
}


def byte_tokens() -> list[str]:
    """The printable character that stands for each byte 0..255 in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b if b in printable else next(stand_ins)) for b in range(256)]


#: SentencePiece's token of a byte.
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def unsupported(metadata: Mapping[str, Any]) -> list[str]:
    """What of a file's tokenizer does not run: each key, its value and what is allowed."""
    found = []
    for key, names in (("model", _MODELS), ("pre", dict.fromkeys(sorted(PRE_TOKENIZERS), ""))):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, str) or value not in names:
            said = "missing" if value is None else shown(value)
            allowed = ", ".join(name + what for name, what in names.items())
            found.append(f"tokenizer.ggml.{key} is {said}; allowed: {allowed}")
        if not (isinstance(value, str) and value == BYTE_LEVEL):
            break  # only this one parts text by a pattern
    return found


class Tokenizer:
    """Text to ids and back.

    Attributes
    ----------
    vocab_size : int
    bos_id, eos_id : int or None
        None where the file names none.
    """

    def __init__(self, file: GgufFile) -> None:
        """Build from ``tokenizer.ggml.*``.

        Raises
        ------
        TokenizerUnsupported
            Neither byte-level BPE nor SentencePiece, a pre-tokenizer without a pattern here, or
            ``add_bos_token`` without a BOS id.
        GgufInvalid
            Tokens, types, scores or merges that contradict each other.
        """
        self._file = file
        if found := unsupported(file.metadata):
            raise TokenizerUnsupported(f"{file.path}: {'; '.join(found)}")
        self._tokens = self._strings("tokens")
        self.vocab_size = len(self._tokens)
        self.bos_id = self._special_id("bos")
        self.eos_id = self._special_id("eos")
        self._pieces = self._get("model") == SENTENCEPIECE
        self._pre = None if self._pieces else PRE_TOKENIZERS[self._get("pre")]
        always = self._pieces or (self._pre is not None and self._pre.add_bos)
        self._add_bos = self._flag("add_bos_token", always and self.bos_id is not None)
        if self._add_bos and self.bos_id is None:
            raise TokenizerUnsupported(
                f"{file.path}: add_bos_token is true but bos_token_id is missing; convert the model "
                "again"
            )
        self._space_first = self._pieces and self._flag("add_space_prefix", True)
        self._types = self._numbers("token_type", "iu")
        self._byte_pieces = self._bytes_by_name() if self._pieces else {}
        self._byte_of = {stand_in: byte for byte, stand_in in enumerate(byte_tokens())}
        # The library drops such bytes without a word.
        self._known = set(self._tokens)
        if self._pieces:
            named = {b for i, b in self._byte_pieces.items() if self._tokens[i] == f"<0x{b:02X}>"}
            self._missing_bytes = set(range(256)) - named
        else:
            self._missing_bytes = {b for b, t in enumerate(byte_tokens()) if t not in self._known}
        self._library = self._build()

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of ``text``; an empty text has none. ``parse_special`` recognises CONTROL tokens."""
        if not isinstance(text, str):
            raise InvalidArgument(f"text is {shown(text)}; give a str")
        if not text:
            return []
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise UnknownToken(
                f"character {error.start} of the text is {text[error.start]!r}, half of a pair or a byte "
                "that is not UTF-8; take it out of the text"
            ) from None
        if self._pieces and self._missing_bytes:  # what is a piece itself needs no byte
            spaced = (" " * self._space_first + text).replace(" ", SPACE)
            encoded = "".join(set(spaced) - self._known).encode()
        if missing := self._missing_bytes.intersection(encoded):
            raise UnknownToken(
                f"the text has bytes {sorted(missing)} that this vocabulary has no token for; "
                "take them out of the text"
            )
        self._library.encode_special_tokens = not flag(parse_special, "parse_special")
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, CONTROL tokens by their names; bytes that are not UTF-8 become U+FFFD."""
        checked: list[int] = integers(ids, "ids").tolist()
        for i in checked:
            if not 0 <= i < self.vocab_size:
                raise UnknownToken(f"token id {i}; allowed: 0 to {self.vocab_size - 1}")
        if not self._pieces:
            return str(self._library.decode(checked, skip_special_tokens=False))
        text = b"".join(map(self.bytes_of, checked)).decode(errors="replace")
        return text.removeprefix(" ") if self._space_first else text

    def bytes_of(self, token: int) -> bytes:
        """Bytes of one id; those of several, joined and read as UTF-8, are what `decode` gives, but for the
        space that SentencePiece puts in front of a text."""
        token = integer(token, "token")
        if not 0 <= token < self.vocab_size:
            raise UnknownToken(f"token id {token}; allowed: 0 to {self.vocab_size - 1}")
        text = self._tokens[token]
        if self._pieces:
            if (byte := self._byte_pieces.get(token)) is not None:
                return bytes([byte])
            return text.replace(SPACE, " ").encode()
        try:
            return bytes(map(self._byte_of.__getitem__, text))
        except KeyError:  # no token of bytes: a name, such as a CONTROL token's
            return text.encode()

    def _bytes_by_name(self) -> dict[int, int]:
        """Id → byte of SentencePiece's byte tokens: the library writes bytes by their names too."""
        found = {}
        for i, token in enumerate(self._tokens):
            kind = int(self._types[i]) if len(self._types) else NORMAL
            name = _BYTE_NAME.fullmatch(token)
            if name is not None and kind not in (CONTROL, USER_DEFINED):
                found[i] = int(name[1], 16)
            elif kind == BYTE:
                raise GgufInvalid(
                    f"{self._file.path}: tokenizer.ggml.tokens has {shown(token)} as a byte; allowed: <0x00> "
                    "to <0xFF>; convert the model again"
                )
        return found

    def _get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"tokenizer.ggml.{key}", default)

    def _flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.{key} is {shown(value)}; allowed: a bool"
            )
        return value

    def _strings(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, STRINGS) or not value:
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.{key} is missing or no array of strings; "
                "convert the model again with its tokenizer"
            )
        return list(value)

    def _numbers(self, key: str, kinds: str) -> np.ndarray:
        """One number a token, of a dtype among ``kinds``; none at all where the key is missing."""
        value = self._get(key, np.zeros(0, np.int32))
        wanted = "integers" if "i" in kinds else "numbers"
        if not isinstance(value, np.ndarray) or (value.dtype.kind not in kinds and value.size):
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.{key} is {shown(value)}; allowed: an array of {wanted}"
            )
        if len(value) not in (0, self.vocab_size):
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.{key} has {len(value)} entries for "
                f"{self.vocab_size} tokens"
            )
        return value

    def _special_id(self, kind: str) -> int | None:
        value = self._get(f"{kind}_token_id")
        if value is not None and not (type(value) is int and 0 <= value < self.vocab_size):
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.{kind}_token_id is {shown(value)}; "
                f"allowed: 0 to {self.vocab_size - 1}"
            )
        return value

    def _build(self) -> _Library:
        vocab = {token: i for i, token in enumerate(self._tokens)}
        if len(vocab) != self.vocab_size:
            twice = next(t for i, t in enumerate(self._tokens) if vocab[t] != i)
            raise GgufInvalid(f"{self._file.path}: tokenizer.ggml.tokens has {shown(twice)} twice")
        library = self._of_pieces(vocab) if self._pieces else self._of_bytes(vocab)
        by_type: dict[int, list[AddedToken]] = {CONTROL: [], USER_DEFINED: []}
        for token, kind in zip(self._tokens, self._types):
            if int(kind) in by_type and token:
                by_type[int(kind)].append(AddedToken(token, normalized=False))
        library.add_special_tokens(by_type[CONTROL])
        library.add_tokens(by_type[USER_DEFINED])
        return library

    def _of_bytes(self, vocab: dict[str, int]) -> _Library:
        """Byte-level BPE by the file's merges."""
        assert self._pre is not None
        merges: list[tuple[str, str]] = []
        for merge in self._strings("merges"):
            left, _, right = merge.partition(" ")
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise GgufInvalid(
                    f"{self._file.path}: tokenizer.ggml.merges has {shown(merge)}; allowed: two tokens of the "
                    "vocabulary whose join is a token"
                )
            merges.append((left, right))
        whole = self._pre.whole_words
        library = _Library(BPE(vocab=vocab, merges=merges, ignore_merges=whole))
        library.pre_tokenizer = self._pre.parts()
        library.decoder = decoders.ByteLevel()
        return library

    def _of_pieces(self, vocab: dict[str, int]) -> _Library:
        """SentencePiece's BPE: neighbours are joined into the piece of the highest score first; what no piece
        has is written in bytes."""
        scores = self._numbers("scores", "f")
        if not len(scores):
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.scores is missing; convert the model again"
            )
        if np.isnan(scores).any():  # it would stand before or behind others by chance
            raise GgufInvalid(
                f"{self._file.path}: tokenizer.ggml.scores has NaN for token {int(np.isnan(scores).argmax())}; "
                "convert the model again"
            )
        joins = [
            (-float(scores[i]), i, token[:at], token[at:])
            for token, i in vocab.items()
            if not len(self._types) or self._types[i] in (NORMAL, USER_DEFINED)
            for at in range(1, len(token))
            if token[:at] in vocab and token[at:] in vocab
        ]
        merges = [(left, right) for _, _, left, right in sorted(joins)]
        unknown = [t for t, kind in zip(self._tokens, self._types) if kind == UNKNOWN]
        library = _Library(
            BPE(
                vocab=vocab,
                merges=merges,
                unk_token=unknown[0] if unknown else None,
                byte_fallback=True,
                fuse_unk=True,
            )
        )
        steps = [normalizers.Prepend(SPACE)] if self._space_first else []
        library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
        return library
