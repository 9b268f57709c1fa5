"""The prompts of the demo: real sentences, the same in every run.

Those of the first part have no block of KV cache in common. Those of the second part are about nothing else: a long system
prompt under several questions, and chats that grow turn by turn.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

SHIPS = ("Aurora", "Borealis", "Kestrel", "Halcyon", "Petrel", "Marlin", "Osprey", "Fulmar", "Gannet", "Sirius", "Vega")
PORTS = ("Bergen", "Lisbon", "Ningbo", "Rotterdam", "Valparaiso", "Durban", "Genoa", "Busan", "Halifax", "Santos")
CARGOES = ("green tea", "copper wire", "winter wheat", "machine parts", "olive oil", "cedar planks", "raw cotton")
REMARKS = (
    "the crew reported calm seas",
    "customs held two crates for inspection",
    "fog delayed the pilot until noon",
    "the harbour master signed the papers at once",
    "one crane was out of service",
    "the captain asked for fresh water",
)
MAX_TOKENS = 48
CHAT_MAX_TOKENS = 24
CHAT_PATH = "/v1/chat/completions"


class Prompt(Protocol):
    """What can be sent to an OpenAI server."""

    @property
    def name(self) -> str: ...

    @property
    def stream(self) -> bool: ...

    @property
    def path(self) -> str: ...

    def body(self, model: str) -> dict[str, object]: ...


class DemoPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the first part."""

    name: str
    chat: bool
    stream: bool
    text: str

    def body(self, model: str) -> dict[str, object]:
        """The request as the API wants it: greedy, so that equal KV gives equal answers."""
        body: dict[str, object] = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": self.stream}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.chat:
            return body | {"messages": [{"role": "user", "content": self.text}]}
        return body | {"prompt": self.text}

    @property
    def path(self) -> str:
        """API path that takes this prompt."""
        return CHAT_PATH if self.chat else "/v1/completions"


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a chat, with all before it; streamed, so that the first token can be timed."""

    name: str
    messages: tuple[dict[str, str], ...]
    cache_salt: str = ""
    """With a salt that nobody else uses, no prefix cache has any of it."""
    stream: bool = True

    def body(self, model: str) -> dict[str, object]:
        """As `DemoPrompt.body`."""
        options = {"include_usage": True}
        body = {"model": model, "temperature": 0, "max_tokens": CHAT_MAX_TOKENS, "stream": True, "stream_options": options}
        salt = {"cache_salt": self.cache_salt} if self.cache_salt else {}
        return {**body, **salt, "messages": list(self.messages)}

    @property
    def path(self) -> str:
        return CHAT_PATH

    def salted(self, salt: str) -> ChatPrompt:
        """The same tokens, which no prefix cache has."""
        return msgspec.structs.replace(self, cache_salt=salt)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A chat: the last turn is what is measured, on an engine that has seen none of those before."""

    name: str
    system: str
    """Empty: none."""
    turns: tuple[str, ...]
    """What the user says."""
    is_one_chat: bool
    """False: each turn is a chat of its own, so only the system prompt is shared."""

    def prompt(self, turn: int, answers: tuple[str, ...]) -> ChatPrompt:
        """Turn number `turn`, counted from 0, after the answers to all before it."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        if self.is_one_chat:
            for said, answered in zip(self.turns[:turn], answers, strict=True):
                messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": self.turns[turn]})
        return ChatPrompt(name=f"{self.name}, turn {turn + 1}", messages=tuple(messages))


def harbour_log(title: str, *, first: int, num_entries: int, question: str) -> str:
    """A log of `num_entries` different days (about 33 tokens each), with a question at the end."""
    entries = (
        f"Day {day}: the {SHIPS[day * 7 % len(SHIPS)]} from {PORTS[day * 3 % len(PORTS)]} unloaded {40 + day * 17 % 900} "
        f"tonnes of {CARGOES[day * 5 % len(CARGOES)]} at pier {1 + day % 12}; {REMARKS[day * 11 % len(REMARKS)]}."
        for day in range(first, first + num_entries)
    )
    return "\n".join((title, *entries, question))


def _log(name: str, *, chat: bool, stream: bool, first: int, num_entries: int) -> DemoPrompt:
    question = "Which ship came last, and what did it carry?" if chat else "Summary of the log:"
    title = f"Harbour log, volume {first}."
    return DemoPrompt(
        name=name, chat=chat, stream=stream, text=harbour_log(title, first=first, num_entries=num_entries, question=question)
    )


WARM_UP = DemoPrompt(name="warm-up", chat=False, stream=False, text="A harbour wakes up slowly, " * 40)
"""Sent first and not counted: the first request of an engine pays for its lazy initialisation."""

BATCHES: tuple[tuple[DemoPrompt, ...], ...] = (
    (
        DemoPrompt(
            name="haiku",
            chat=False,
            stream=False,
            text="The old lighthouse keeper, who had seen very many storms, once wrote a poem. It began:",
        ),
    ),
    (DemoPrompt(name="capital", chat=True, stream=True, text="What is the capital of France, and which river is it on?"),),
    (_log("log 160", chat=False, stream=True, first=1000, num_entries=4),),
    (_log("log 500", chat=True, stream=False, first=2000, num_entries=13),),
    (_log("log 1,000", chat=False, stream=True, first=3000, num_entries=27),),
    (_log("log 2,000", chat=True, stream=True, first=4000, num_entries=54),),
    (_log("log 3,500", chat=False, stream=True, first=5000, num_entries=94),),
    (
        _log("at once, 300", chat=True, stream=True, first=6000, num_entries=8),
        _log("at once, 700", chat=False, stream=False, first=7000, num_entries=18),
        _log("at once, 1,200", chat=False, stream=True, first=8000, num_entries=32),
    ),
)
"""Requests of one batch are sent at the same time, batches one after the other."""


def _entries(first: int, num_entries: int, question: str) -> str:
    return harbour_log(f"Harbour log, volume {first}.", first=first, num_entries=num_entries, question=question)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        name="one system prompt",
        system=_entries(8000, 48, "You answer questions about this log in one sentence."),
        turns=("Which ship came first?", "Which pier was used last, and for what?"),
        is_one_chat=False,
    ),
    Scenario(
        name="chat of 2 turns",
        system="",
        turns=(_entries(9000, 24, "Which ship came last?"), "And which one came before it?"),
        is_one_chat=True,
    ),
    Scenario(
        name="chat of 4 turns",
        system="You are the clerk of a harbour.",
        turns=(
            _entries(9500, 12, "What came first?"),
            _entries(9600, 12, "And here?"),
            _entries(9700, 12, "What came last?"),
            "Thank you. Which ship was it?",
        ),
        is_one_chat=True,
    ),
)
"""Of the second part."""
