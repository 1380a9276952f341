"""The set-ups of the paper, with what it says they take.

Published are models, cluster and seconds (arXiv 2605.18815: 70B in under 2 s and 235B in 4.36 s on
16 hosts of 8 A800), not the layouts nor the links. So the layouts here are ours, several for each
model, and the links are those of the topology that is chosen and printed. For the smaller models
no figure is at hand.
"""

from __future__ import annotations

from typing import NamedTuple


class PaperCase(NamedTuple):
    """A model on so many hosts, layouts of ours, and the published seconds (None: not at hand)."""

    name: str
    model: str
    source: str
    target: str
    seconds: float | None = None


CASES = (
    PaperCase("1.3B", "gpt3_1_3b", "tp2-pp2-dp2", "tp4-dp2"),
    PaperCase("1.3B", "gpt3_1_3b", "tp4-pp2-dp2", "tp2-dp8"),
    PaperCase("7B", "llama2_7b", "tp4-pp2-dp2", "tp2-pp4-dp2"),
    PaperCase("7B", "llama2_7b", "tp8-dp4", "tp2-pp4-dp4"),
    PaperCase("13B", "llama2_13b", "tp4-pp4-dp2", "tp8-pp2-dp2"),
    PaperCase("13B", "llama2_13b", "tp8-dp8", "tp2-pp4-dp8"),
    PaperCase("70B", "llama2_70b", "tp8-pp4-dp4", "tp4-pp8-dp4", 2.0),
    PaperCase("70B", "llama2_70b", "tp8-pp2-dp8", "tp4-pp4-dp8", 2.0),
    PaperCase("70B", "llama2_70b", "tp8-pp8-dp2", "tp8-pp4-dp4", 2.0),
    PaperCase("235B", "qwen3_235b_a22b", "tp4-pp2-dp16-ep16-etp1-sp",
              "tp2-pp2-dp32-ep32-etp1-sp", 4.36),
    PaperCase("235B", "qwen3_235b_a22b", "tp4-pp8-dp4-ep8-etp1-sp",
              "tp4-pp4-dp8-ep16-etp1-sp", 4.36),
    PaperCase("235B", "qwen3_235b_a22b", "tp8-pp4-dp4-ep8-etp1-sp",
              "tp4-pp8-dp4-ep16-etp1-sp", 4.36),
)  # fmt: skip
