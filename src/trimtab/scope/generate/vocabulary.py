"""From text to token ids and back: the tokenizer that a GGUF file carries, one from a file, or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from trimtab.scope.generate.gguf_file import GgufFile

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE: Final = "▁"
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


class Vocabulary(Protocol):
    """A tokenizer."""

    ends: frozenset[int]
    """Tokens after which a text is over."""
    chat_template: str
    """Jinja template that makes a conversation into a prompt; empty where there is none."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; raises ValueError for what cannot be said in tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; control tokens are left out."""
        ...

    def label(self, token: int) -> str:
        """A single token as it can be shown: control tokens by their name, and bytes that are no text as ``<0xE2>``."""
        ...


class ByteVocabulary:
    """One token a byte."""

    ends: frozenset[int] = frozenset()
    chat_template = ""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")

    def label(self, token: int) -> str:
        return chr(token) if token in (9, 10, 13) or 32 <= token < 127 else f"<0x{token:02X}>"


class TokenizerVocabulary:
    """A tokenizer of the library ``tokenizers``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ends: frozenset[int] = frozenset(),
        begin: int | None = None,
        chat_template: str = "",
    ) -> None:
        """``begin`` is put before every text that does not have it."""
        self._tokenizer = tokenizer
        self._begin = begin
        self.ends = ends
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return ids if self._begin is None or ids[:1] == [self._begin] else [self._begin, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def label(self, token: int) -> str:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return f"<{token}>"
        if len(name) == 1 and name in _BYTE_OF:  # a single byte, which may be a part of a letter
            return ByteVocabulary().label(_BYTE_OF[name])
        if token in self._tokenizer.get_added_tokens_decoder():
            return name
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text or not text:
            return "".join(
                ByteVocabulary().label(_BYTE_OF[letter]) if letter in _BYTE_OF else letter for letter in name
            )
        return (" " + text) if name.startswith(_SPACE) and not text.startswith(" ") else text


def from_tokenizer_file(path: Path) -> TokenizerVocabulary:
    """The ``tokenizer.json`` of Hugging Face. Raises ValueError where it is none."""
    _need_tokenizers()
    from tokenizers import Tokenizer

    try:
        return TokenizerVocabulary(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path}: no tokenizer.json ({_line(error)})") from error


def from_gguf(file: GgufFile) -> TokenizerVocabulary:
    """The tokenizer inside a GGUF file. Raises ValueError for a kind that is not known here."""
    _need_tokenizers()
    from tokenizers import AddedToken

    values = file.values
    kind, tokens = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError(f"{file.path}: there is no tokenizer inside; give a file that has one")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens)
    else:
        raise ValueError(f"{file.path}: its tokenizer is of the kind {kind}; known are gpt2 and llama")
    types = values.get("tokenizer.ggml.token_type") or []
    special = [token for token, of in zip(tokens, types, strict=False) if of == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    added = [token for token, of in zip(tokens, types, strict=False) if of == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    ends = {values.get("tokenizer.ggml.eos_token_id"), values.get("tokenizer.ggml.eot_token_id")}
    begin = values.get("tokenizer.ggml.bos_token_id")
    begins = values.get("tokenizer.ggml.add_bos_token", kind == "llama")
    return TokenizerVocabulary(
        tokenizer,
        frozenset(token for token in ends if isinstance(token, int)),
        begin if begins and isinstance(begin, int) else None,
        str(values.get("tokenizer.chat_template", "")),
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    before = str(file.values.get("tokenizer.ggml.pre", "default"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if before in ("gpt-2", "default"):
        split: Any = level
    elif before == "smollm":
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    elif before in ("llama-bpe", "llama3", "llama-v3"):
        cut = pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated")
        split = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        raise ValueError(
            f"{file.path}: its tokenizer cuts text as {before} does; known are gpt-2, smollm and llama-bpe"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.values.get("tokenizer.ggml.merges") or []]
    try:
        model = models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file.path}: its tokenizer is damaged ({_line(error)})") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE: what is merged first follows from the scores of the pieces."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.values.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ValueError(f"{file.path}: {len(tokens)} tokens and {len(scores)} scores of them; the file is damaged")
    ids = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for number, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[number], left, right, (token[:cut], token[cut:])))
    merges.sort()
    tokenizer = Tokenizer(models.BPE(ids, [pair for *_, pair in merges], fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if file.values.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def as_chat(vocabulary: Vocabulary, prompt: str, system: str = "") -> str:
    """``prompt`` as what a user says to an assistant, who is to answer next.

    Raises ValueError where the model brings no template for that, or one that fails. Templates come with models from
    elsewhere, so they run in the sandbox of Jinja.
    """
    if not vocabulary.chat_template:
        raise ValueError("--chat: this model brings no template of a conversation; leave it out")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        template = environment.from_string(vocabulary.chat_template)
        return template.render(messages=messages, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError, LookupError) as error:
        raise ValueError(
            f"--chat: the model's template of a conversation fails ({_line(error)}); leave it out"
        ) from error


def _line(error: Exception) -> str:
    """Its first line."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _need_tokenizers() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ValueError("a model's tokenizer needs the library tokenizers: pip install 'trimtab[generate]'") from error


def _bytes_of_letters() -> dict[str, int]:
    """The letters that GPT-2's tokenizer writes bytes as: those that can be printed stay, others are moved up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return found | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF: Final = _bytes_of_letters()
