"""docs/proxy.md names what exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.proxy import app
from vllm_mooncake_ascend.proxy.metrics import ProxyMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "proxy.md").read_text()


def test_every_metric_is_on_the_page() -> None:
    """Goal: documentation that cannot rot. Method: the names the registry holds."""
    names = {line.split()[2] for line in ProxyMetrics().text().decode().splitlines() if line.startswith("# TYPE")}

    assert set() == {name for name in names if f"`{name}`" not in PAGE and not name.endswith("_created")}


@pytest.mark.parametrize("path", app.SERVED)
def test_every_path_is_on_the_page(path: str) -> None:
    """Goal: the same for paths. Method: the tables the server goes by."""
    assert path in PAGE


def test_the_help_names_every_option_of_the_page() -> None:
    """Goal: no option that does not exist. Method: words of the page that look like options."""
    text = CliRunner().invoke(build_app(), ["proxy", "--help"], env={"COLUMNS": "200"}).output
    options = {word.strip("`(),.:;") for word in PAGE.split() if word.strip("`(").startswith("--")}

    assert set() == {option for option in options if option not in text}
