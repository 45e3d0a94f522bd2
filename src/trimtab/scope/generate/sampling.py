"""Which of the likely tokens is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Sampling:
    """The likeliest (temperature 0), or one that is drawn."""

    temperature: float = 0.0
    top_p: float = 1.0
    """Only of the likeliest that together have this probability."""
    seed: int = 0
    _random: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what makes no sense."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"--temperature {self.temperature:g}: from 0 (the likeliest token) to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"--top-p {self.top_p:g}: above 0 and at most 1")
        self._random = torch.Generator().manual_seed(self.seed % 2**63)

    def choose(self, logits: torch.Tensor) -> int:
        """A token, from logits (vocabulary,) on the CPU."""
        if self.temperature == 0.0 or not torch.isfinite(logits).any():
            return int(torch.nan_to_num(logits, float("-inf")).argmax())
        logits = torch.nan_to_num(logits.double(), float("-inf"), torch.finfo(torch.float32).max, float("-inf"))
        ordered, tokens = torch.softmax(logits / self.temperature, -1).sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        kept = torch.where(before < self.top_p, ordered, 0.0)
        return int(tokens[torch.multinomial(kept, 1, generator=self._random)])

    def as_dict(self) -> dict[str, float | int]:
        """As JSON."""
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
