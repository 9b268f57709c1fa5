"""Prints docs/configuration.md."""

import sys

from vllm_mooncake_ascend.config.page import page

sys.stdout.write(page())
