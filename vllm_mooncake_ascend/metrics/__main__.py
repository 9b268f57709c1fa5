"""Prints docs/metrics.md."""

import sys

from vllm_mooncake_ascend.metrics.page import page

sys.stdout.write(page())
