"""Write the generated pages of `docs/` anew. Tests fail when a page is not what its module prints.

usage: python scripts/make_docs.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGES = {
    "configuration.md": "vllm_mooncake_ascend.config",
    "metrics.md": "vllm_mooncake_ascend.testing.metrics_page",
    "protocol.md": "vllm_mooncake_ascend.testing.protocol_page",
}
"""Page -> the module that prints it when run."""


def main() -> None:
    """Run every module and keep what it prints."""
    folder = Path(__file__).parents[1] / "docs"
    for page, module in PAGES.items():
        text = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True).stdout
        (folder / page).write_text(text)
        print(f"docs/{page}")


if __name__ == "__main__":
    main()
