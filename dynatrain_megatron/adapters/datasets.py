"""Writes Megatron's indexed datasets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write_indexed(prefix: Path, documents: Iterable[np.ndarray]) -> tuple[int, int]:
    """Write token arrays (shape=[tokens], uint16) as ``prefix``.bin and ``prefix``.idx.

    Returns the numbers of documents and of tokens. Local; needs no platform and no process group.
    """
    host = _indexed_dataset()
    builder = host.IndexedDatasetBuilder(host.get_bin_path(str(prefix)), dtype=np.uint16)
    num_documents = num_tokens = 0
    for tokens in documents:
        builder.add_document(tokens, [len(tokens)])
        num_documents += 1
        num_tokens += len(tokens)
    builder.finalize(host.get_idx_path(str(prefix)))
    return num_documents, num_tokens


def _indexed_dataset() -> Any:
    """Import Megatron's dataset module without its start-up notices about optional packages."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import indexed_dataset
    finally:
        logging.disable(disabled)
    return indexed_dataset
