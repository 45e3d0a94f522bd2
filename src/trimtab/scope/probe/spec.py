"""What somebody wants to ask a model that trains: which prompts, how often, and what is looked at while it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal, cast

from trimtab.scope.fields import Fields
from trimtab.scope.subscription import Subscription

Positions = Literal["last", "all"]
MOST_PROMPTS: Final = 64
MOST_TOKENS: Final = 65_536
"""In all prompts of a probe."""
MOST_TOP: Final = 256
MOST_CANDIDATES: Final = 1 << 20
"""Positions x ``top``: what a frame holds."""
MOST_ALSO: Final = 16
_LONGEST_TEXT: Final = 65_536
_HIGHEST_TOKEN: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or the tokens of one."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    """Ids; where there are none they are made of the text, in the job."""
    target: int | None = None
    """Token that should come next: how likely it is and how many are likelier is told, too."""

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"text": self.text, "tokens": list(self.tokens), "target": self.target}

    @classmethod
    def from_dict(cls, value: object) -> Prompt:
        """What :meth:`as_dict` gave, or a part of it; ValueError for anything else."""
        said = Fields(value, "prompt")
        prompt = cls(
            said.text("text", "", longest=_LONGEST_TEXT),
            said.integers("tokens", (), high=_HIGHEST_TOKEN),
            said.integer("target", None, high=_HIGHEST_TOKEN),
        )
        said.done()
        return prompt


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One probe. All ranks run it together at the begin of a step."""

    prompts: tuple[Prompt, ...]
    every: int = 10
    """Steps from one run to the next."""
    first: int = 0
    last: int | None = None
    """Step until which; None: without end."""
    top: int = 10
    """Likeliest tokens that are told of each position."""
    positions: Positions = "last"
    """After the whole prompt only, or after each of its tokens."""
    tokenizer: str = "auto"
    """``job``: that of Megatron-LM; ``bytes``: a token a byte; ``auto``: the job's, else bytes where the model knows
    256 tokens. For prompts without tokens only."""
    also: tuple[Subscription, ...] = ()
    """What else is measured while the prompts run: attention, hidden states. Their ``when`` does not matter."""
    id: str = ""
    """Given by the collector."""

    def due(self, step: int) -> bool:
        """Does it run at the begin of this step?"""
        if step < self.first or (self.last is not None and step > self.last):
            return False
        return (step - self.first) % self.every == 0

    def over(self, step: int) -> bool:
        """Will it not run any more, from this step on?"""
        return self.last is not None and step > self.last

    def named(self, name: str) -> ProbeSpec:
        """The same with an id."""
        return replace(self, id=name)

    def problems(self) -> list[str]:
        """What is wrong with it, a line each; none: nothing."""
        found: list[str] = []
        if not 1 <= len(self.prompts) <= MOST_PROMPTS:
            found.append(f"prompts: 1 to {MOST_PROMPTS}, not {len(self.prompts)}")
        for number, prompt in enumerate(self.prompts):
            if not prompt.tokens and not prompt.text:
                found.append(f"prompts: number {number} is empty; give a text or tokens")
        tokens = sum(len(prompt.tokens) or len(prompt.text.encode()) for prompt in self.prompts)
        if tokens > MOST_TOKENS:
            found.append(f"prompts: {tokens} tokens or bytes, of which {MOST_TOKENS} are the most")
        if self.every < 1:
            found.append("every: at least 1 step")
        if self.last is not None and self.last < self.first:
            found.append(f"steps: the last ({self.last}) is before the first ({self.first})")
        if not 1 <= self.top <= MOST_TOP:
            found.append(f"top: 1 to {MOST_TOP} tokens, not {self.top}")
        elif self.positions == "all" and tokens * self.top > MOST_CANDIDATES:
            found.append(f"top: {tokens} positions x {self.top} is more than {MOST_CANDIDATES}; ask for less of either")
        if self.tokenizer not in ("auto", "job", "bytes"):
            found.append(f"tokenizer: {self.tokenizer!r} is unknown; one of auto, job, bytes")
        if len(self.also) > MOST_ALSO:
            found.append(f"also: at most {MOST_ALSO}, not {len(self.also)}")
        found += [f"also: {problem}" for one in self.also for problem in one.problems()]
        return found

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "prompts": [prompt.as_dict() for prompt in self.prompts],
            "every": self.every,
            "first": self.first,
            "last": self.last,
            "top": self.top,
            "positions": self.positions,
            "tokenizer": self.tokenizer,
            "also": [one.as_dict() for one in self.also],
            "id": self.id,
        }

    @classmethod
    def from_dict(cls, value: object) -> ProbeSpec:
        """What :meth:`as_dict` gave, or a part of it with at least the prompts; ValueError, in one line, for anything
        that is not as it should be, :meth:`problems` included."""
        said = Fields(value, "probe")
        spec = cls(
            tuple(Prompt.from_dict(one) for one in _list(said.anything("prompts"), "prompts", MOST_PROMPTS)),
            said.integer("every", 10, low=1),
            said.integer("first", 0),
            said.integer("last", None),
            said.integer("top", 10, low=1, high=MOST_TOP),
            cast("Positions", said.one_of("positions", ("last", "all"), "last")),
            said.one_of("tokenizer", ("auto", "job", "bytes"), "auto"),
            tuple(Subscription.from_dict(one) for one in _list(said.anything("also", []), "also", MOST_ALSO)),
            said.text("id", "", longest=64),
        )
        said.done()
        for problem in spec.problems():
            raise ValueError(f"probe: {problem}")
        return spec


def _list(value: object, name: str, most: int) -> list[object]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"probe: {name} is to be a list")
    listed = list(cast("list[object]", value))
    if len(listed) > most:
        raise ValueError(f"probe: at most {most} {name}, not {len(listed)}")
    return listed
