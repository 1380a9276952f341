"""The demo's training text: the sources of Python's standard library as a Megatron dataset.

Every machine that runs the demo has these files, they are real prose and code, and they need no
network. One module is one document; a token is one byte, and END_OF_DOCUMENT closes a document.
"""

import json
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dynatrain_megatron.adapters.datasets import write_indexed
from dynatrain_megatron.errors import DynaTrainError

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
"""All byte values and END_OF_DOCUMENT."""


@dataclass(frozen=True, slots=True)
class TextDataset:
    """A dataset on disk: `prefix` + .bin and .idx, as Megatron's --data-path takes it."""

    prefix: Path
    documents: int
    tokens: int


def stdlib_sources() -> list[Path]:
    """The top-level modules of the running Python's standard library, by name.

    Raises DynaTrainError where a Python is installed without its sources.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    sources = sorted(stdlib.glob("*.py"))
    if not sources:
        raise DynaTrainError(
            f"found no source files of the standard library in {stdlib}; "
            "the demo reads them as training text, so run it with a Python that ships them"
        )
    return sources


def encode(document: bytes) -> np.ndarray:
    """One token for each byte, then END_OF_DOCUMENT. shape=[len(document) + 1], uint16."""
    tokens = np.empty(len(document) + 1, dtype=np.uint16)
    tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
    tokens[-1] = END_OF_DOCUMENT
    return tokens


def build(directory: Path) -> TextDataset:
    """Write the standard library as a dataset into `directory`, or return the one that is there.

    A dataset is used again only where the same Python made it from files of the same sizes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sources = stdlib_sources()
    described = {
        "python": sys.version,
        "files": {source.name: source.stat().st_size for source in sources},
    }
    prefix = directory / "stdlib"
    manifest = directory / "stdlib.json"
    if manifest.is_file():
        kept = json.loads(manifest.read_text())
        if kept["described"] == described:
            return TextDataset(prefix, kept["documents"], kept["tokens"])
        manifest.unlink()
    dataset = write_dataset(prefix, (source.read_bytes() for source in sources))
    # Written last: a manifest says that the two data files are whole.
    counts = {key: value for key, value in asdict(dataset).items() if key != "prefix"}
    manifest.write_text(json.dumps({"described": described, **counts}))
    return dataset


def write_dataset(prefix: Path, documents: Iterable[bytes]) -> TextDataset:
    """Write `documents` with Megatron's own builder as `prefix`.bin and `prefix`.idx."""
    return TextDataset(prefix, *write_indexed(prefix, map(encode, documents)))
