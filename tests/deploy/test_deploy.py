"""Examples and deploy files say nothing that our command line, vLLM or the connector's settings do not know."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.config import parse_p2p

ROOT = Path(__file__).parents[2]
SECRET = "a secret for this test alone"
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
CONFIGS = sorted((ROOT / "examples").glob("*.json"))


def compose_services() -> dict[str, Any]:
    """Of all compose files, by file and name."""
    files = {
        path.stem: yaml.safe_load(path.read_text())["services"] for path in sorted((ROOT / "deploy").glob("compose*.yaml"))
    }
    return {f"{stem}: {name}": service for stem, services in files.items() for name, service in services.items()}


def kubernetes_objects() -> list[dict[str, Any]]:
    """Of all kustomizations."""
    found = []
    for path in sorted((ROOT / "deploy").rglob("kustomization.yaml")):
        files = yaml.safe_load(path.read_text())["resources"]
        found += [one for name in files for one in yaml.safe_load_all((path.parent / name).read_text())]
    return found


def containers() -> list[dict[str, Any]]:
    pods = [one["spec"]["template"]["spec"] for one in kubernetes_objects() if "template" in one["spec"]]
    return [container for pod in pods for container in pod["containers"]]


def script_commands(path: Path) -> list[list[str]]:
    """The words of every line of a script that calls our command line."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line.strip().rstrip("&"))[1:] for line in lines if line.strip().startswith("vllm-mooncake-ascend ")]


def all_commands() -> Iterator[tuple[str, list[str]]]:
    """Where a command stands, and its words after `vllm-mooncake-ascend`."""
    for path in SCRIPTS:
        yield from ((path.name, words) for words in script_commands(path))
    yield from ((name, service["command"]) for name, service in compose_services().items() if "entrypoint" not in service)
    yield from ((f"kubernetes: {one['args'][:2]}", one["args"]) for one in containers() if "command" not in one)


COMMANDS = list(all_commands())


def options_of(command: str) -> set[str]:
    """Long options of one of our commands."""
    group = typer.main.get_command(build_app())
    return {option for parameter in group.commands[command].params for option in parameter.opts}


def long_options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def test_every_place_has_commands() -> None:
    """The search for commands finds them where they are."""
    assert {"serve", "proxy"} == {words[0] for _, words in COMMANDS}
    assert 4 <= len([where for where, _ in COMMANDS if where.startswith("kubernetes")])
    assert 5 == len([where for where, _ in COMMANDS if where.startswith("compose")])


@pytest.mark.parametrize(("where", "words"), [one for one in COMMANDS if one[1][0] == "proxy"])
def test_the_proxy_has_every_option(where: str, words: list[str]) -> None:
    """Options of the proxy must all be ours."""
    assert set() == set(long_options(words)) - options_of("proxy"), where


@pytest.mark.engine
@pytest.mark.parametrize(("where", "words"), [one for one in COMMANDS if one[1][0] == "serve"])
def test_vllm_takes_every_other_option(where: str, words: list[str]) -> None:
    """What `serve` hands on must be options of vLLM's server, with values it takes."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    ours = options_of("serve")
    words = [word for word in words[1:] if word not in ("$@",)]
    passed = [word for i, word in enumerate(words) if word.partition("=")[0] not in ours and words[i - 1] not in ours]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(passed)
    assert 1 <= parsed.port <= 65_535, where


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(path: Path) -> None:
    """Bash reads each script without running it."""
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def transfer_configs() -> list[tuple[str, dict[str, Any]]]:
    configs = [(path.name, json.loads(path.read_text())) for path in CONFIGS]
    for where, words in COMMANDS:
        texts = [word.partition("=")[2] for word in words if word.startswith("--kv-transfer-config=")]
        configs += [(where, json.loads(text)) for text in texts]
    return configs


@pytest.mark.parametrize(("where", "config"), transfer_configs())
def test_transfer_configs_are_understood(where: str, config: dict[str, Any]) -> None:
    """The connector's own parser takes the settings without a warning."""
    _, warnings = parse_p2p(
        config.get("kv_connector_extra_config", {}),
        {},
        device_type="cpu",
        default_host="127.0.0.1",
        read_text=lambda _name: SECRET,
    )
    assert ((), "MooncakeConnectorV1", "vllm_mooncake_ascend") == (
        warnings,
        config["kv_connector"],
        config["kv_connector_module_path"],
    ), where


def test_the_image_copies_what_exists() -> None:
    """Every source of a COPY is a file or folder of the repository."""
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert [] == [source for source in sources if not (ROOT / source).exists()]


def test_services_select_pods_that_exist() -> None:
    """Labels and ports of services are those of the pods."""
    objects = kubernetes_objects()
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in objects if "template" in one["spec"]]
    services = [one["spec"] for one in objects if one["kind"] == "Service"]
    assert [] == [service for service in services if service["selector"] not in labels]
    assert 6 == len(services)


def test_probes_ask_for_paths_that_exist() -> None:
    """vLLM has /health; the proxy has /health and /ready."""
    probes = [probe["httpGet"]["path"] for one in containers() for key, probe in one.items() if key.endswith("Probe")]
    assert {"/health", "/ready"} == set(probes)


def test_the_proxy_is_told_names_that_exist() -> None:
    """Every upstream of the proxies names a service, a pod or a container of the same set."""
    names = {"prefill", "decode", "prefill-0.prefill", "decode-0.decode"}
    upstreams = [
        match[1]
        for where, words in COMMANDS
        for word in words
        if not where.endswith(".sh") and (match := re.match(r"--(?:prefill|decode)=http://([^:]+):8000$", word))
    ]
    assert (4, set()) == (len(upstreams), set(upstreams) - names)


class ChatServer(BaseHTTPRequestHandler):
    """Answers as vLLM does to the two requests of chat.py."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "model"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        pieces = ("You asked: ", asked["messages"][0]["content"])
        events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n")

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


def test_the_chat_example_prints_the_answer() -> None:
    """Runs the example's functions against a server on loopback."""
    spec = importlib.util.spec_from_file_location("chat", ROOT / "examples/chat.py")
    chat = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chat)
    server = HTTPServer(("127.0.0.1", 0), ChatServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert "You asked: why?" == "".join(chat.answer(url, "why?"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
