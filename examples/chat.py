"""Ask the proxy one question and print the answer as it comes. Standard library only.

usage: python examples/chat.py http://127.0.0.1:8000 "What is the capital of France?"
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator


def post(url: str, body: dict[str, object]) -> Iterator[bytes]:
    """Lines of the answer to a JSON request."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        yield from response


def first_model(server: str) -> str:
    """The name of the model that `server` has."""
    with urllib.request.urlopen(f"{server}/v1/models", timeout=30) as response:
        return str(json.load(response)["data"][0]["id"])


def answer(server: str, question: str) -> Iterator[str]:
    """Pieces of the answer, as they are generated."""
    body = {
        "model": first_model(server),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 128,
        "temperature": 0,
        "stream": True,
    }
    for line in post(f"{server}/v1/chat/completions", body):
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                sys.exit(f"the answer broke off: {event['error']}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""


def main() -> None:
    """Print the answer to the question of the command line."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    for piece in answer(sys.argv[1].rstrip("/"), sys.argv[2]):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
