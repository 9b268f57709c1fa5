"""The ten prompts of the demo: real sentences, no two prompts with a common block of KV cache, the same in every run."""

from __future__ import annotations

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


class DemoPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the demo."""

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
        return "/v1/chat/completions" if self.chat else "/v1/completions"


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
