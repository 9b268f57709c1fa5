"""Where our log lines go in a process of vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

TALK = """
import logging
import vllm.logger
from vllm_mooncake_ascend.connectors.logs import join_vllms_log
{before}
join_vllms_log()
join_vllms_log()
if hasattr(vllm.logger, "configure_logging"):  # older ones do it when they are imported
    from vllm.config.logging import LoggingConfig
    vllm.logger.configure_logging(LoggingConfig())
{after}
logging.getLogger("vllm_mooncake_ascend.pool").info("state has changed: key=%s", "value")
"""


def lines_of(*, before: str = "", after: str = "") -> list[str]:
    """What a process of its own writes: logging is a global of the process."""
    code = TALK.format(before=before, after=after)
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [line for line in (ended.stdout + ended.stderr).splitlines() if "state has changed" in line]


def test_an_operator_reads_our_lines_as_vllms() -> None:
    """Goal: what is told at start, and the end of an outage, is seen, once, with its level. Method: say something at INFO."""
    (line,) = lines_of()
    assert (True, True) == ("INFO" in line, "state has changed: key=value" in line)


@pytest.mark.parametrize(
    "decision",
    [
        'logging.getLogger("vllm_mooncake_ascend").setLevel(logging.WARNING)',
        'logging.getLogger("vllm_mooncake_ascend").addHandler(logging.NullHandler())',
    ],
)
def test_what_the_operator_decided_about_our_lines_stands(decision: str) -> None:
    """Goal: a configuration of logging is not undone. Method: ones that drop the line."""
    assert [] == lines_of(before=decision)


def test_a_line_that_all_lines_share_is_written_once() -> None:
    """Goal: no line twice where everything goes to one place. Method: a handler of the root."""
    assert ["INFO:vllm_mooncake_ascend.pool:state has changed: key=value"] == lines_of(after="logging.basicConfig()")
