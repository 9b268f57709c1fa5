"""The command line itself: its commands, and what it says to those who misuse it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from vllm_mooncake_ascend import __version__
from vllm_mooncake_ascend.cli import launch, main


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.build_app(), list(words))
    return result.exit_code, result.output


def test_the_version_is_told() -> None:
    """Asks for it as users do."""
    assert (0, __version__) == (run("--version")[0], run("--version")[1].strip())


def test_a_command_that_cannot_be_imported_takes_only_itself_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds a command whose module does not exist; it tells why, and another command still works."""
    monkeypatch.setitem(main.COMMANDS, "absent", "does not exist")
    code, output = run("absent")
    assert (2, True, 0) == (code, "`absent` cannot run here: No module named" in output, run("doctor", "--help")[0])


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "model", "--role", "both"),
        ("serve", "model", "--role", "prefill", "--kv-transfer-config", "{}"),
        ("serve", "model", "--role", "prefill", "--kv-transfer-config={}"),
        ("launch", "model", "--prefill", "0"),
        ("launch", "model", "--decode-env", "NOT_AN_ASSIGNMENT"),
        ("demo", "--model", "nowhere"),
        ("demo", "--dtype", "float8"),
    ],
)
def test_misuse_is_refused_before_anything_starts(words: tuple[str, ...]) -> None:
    """Values that make no sense end with 2, the status of wrong usage."""
    assert 2 == run(*words)[0]


def test_an_environment_option_takes_what_follows_the_first_sign() -> None:
    """Values may contain the equals sign themselves."""
    assert {"A": "b=c", "D": ""} == launch.environment_option(["A=b=c", "D="], "--x")


def test_an_environment_option_needs_a_name() -> None:
    """A value without a name is nobody's."""
    with pytest.raises(typer.BadParameter):
        launch.environment_option(["=value"], "--x")
