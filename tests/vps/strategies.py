"""Random shapes, regions and rosters."""

import itertools

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynatrain_megatron.vps import LogicalTensor, Region, Roster, RosterBuilder, State, StateKind

STATES = (
    (State(StateKind.MAIN_PARAM, "float32"), State(StateKind.EXP_AVG, "float32")),
    (State(StateKind.PARAM, "bfloat16"),),
    (State(StateKind.PARAM, "bfloat16"), State(StateKind.MAIN_PARAM, "float32")),
    (State(StateKind.BUFFER, "uint8"),),
    (State(StateKind.BUFFER, "int64"),),
)


def shapes(
    max_dims: int = 4, max_size: int = 5, min_dims: int = 0
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes without empty dims; size 1 is as likely as any other."""
    sizes = st.lists(st.integers(1, max_size), min_size=min_dims, max_size=max_dims)
    return sizes.map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Any region inside a tensor of ``shape``."""
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    stop = tuple(draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
    return Region(start, stop)


@st.composite
def logical_tensors(draw: st.DrawFn, max_tensors: int = 3) -> list[LogicalTensor]:
    """A few tensors of different numbers of dims and states, not in order of name."""
    names = draw(st.lists(st.sampled_from("edcba"), min_size=1, max_size=max_tensors, unique=True))
    return [LogicalTensor(n, draw(shapes()), draw(st.sampled_from(STATES))) for n in names]


@st.composite
def rosters(draw: st.DrawFn, tensors: list[LogicalTensor] | None = None) -> Roster:
    """Any fragments of any of the tensors, overlapping and repeated ones among them."""
    tensors = draw(logical_tensors()) if tensors is None else tensors
    builder = RosterBuilder()
    for tensor in draw(st.lists(st.sampled_from(tensors), max_size=6)):
        builder.add(tensor, draw(regions(tensor.shape)))
    return builder.build()


def mask(shape: tuple[int, ...], *boxes: Region) -> NDArray[np.int64]:
    """How often each element of a tensor of ``shape`` is covered by ``boxes``."""
    count = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        count[slices(box)] += 1
    return count


def slices(box: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def elements(box: Region) -> list[tuple[int, ...]]:
    """All coordinates of ``box`` in row-major order."""
    return list(itertools.product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))
