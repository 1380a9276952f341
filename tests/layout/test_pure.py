"""The rooms everybody imports stay light: no torch, no Megatron."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = """
heavy = {"torch", "megatron", "transformer_engine"} & {m.partition(".")[0] for m in sys.modules}
sys.exit(f"loaded {heavy}" if heavy else 0)
"""


@pytest.mark.parametrize(
    "use",
    [
        "import dynatrain_megatron.errors",
        "from dynatrain_megatron.layout import ParallelLayout; ParallelLayout.parse('tp2-dp4')",
        "from dynatrain_megatron.config import compose; compose(['platform=cpu'])",
    ],
)
def test_using_it_loads_neither_torch_nor_megatron(use: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import sys\n{use}\n{CHECK}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
