"""The picture of docs/how-it-works.md: one logical tensor cut in two ways, by a real plan.

Each layer of the tensor is drawn as its matrix. On the left a box is a fragment, in the colour of
the rank that holds it. On the right are the same colours where the elements are needed: what
another rank sends, and what the rank named beside it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.planner import Topology
from dynatrain_megatron.planner.routes import Routes, unique_cover
from dynatrain_megatron.shapes.models import Model
from dynatrain_megatron.shapes.rosters import make_rosters
from tests.planner.worlds import choose_routes

SOURCE, TARGET = ParallelLayout.parse("tp2-dp2"), ParallelLayout.parse("pp2-dp2")
TENSOR = "decoder.layers.mlp.linear_fc1.weight"
MODEL = Model(
    num_layers=4, hidden=16, ffn=32, heads=4, groups=4, head=4, vocab=96, tied=True, gated=False
)  # fmt: skip
_COLOURS = ("#3f6fa8", "#d98a2b", "#3c9d6c", "#a9497c")
_WIDTH, _HEIGHT, _GAP, _TOP = 150, 68, 16, 84
_LEFT = (88, 358)


def vps() -> str:
    """The picture as SVG text; the same for the same plan."""
    source, target = (make_rosters(MODEL, layout) for layout in (SOURCE, TARGET))
    number = [tensor.name for tensor in source.tensors].index(TENSOR)
    shape = source.tensors[number].shape
    held, wanted = (
        pieces.take(pieces.tensor == number)
        for pieces in (
            unique_cover(source),
            choose_routes(source, target, Topology.single_node(SOURCE.world)),
        )
    )
    height = _top(shape[0]) + 42
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" width="640" '
        f'height="{height}" font-family="sans-serif" fill="#222">',
        f'<rect width="640" height="{height}" fill="#fff"/>',
        _text(_LEFT[0], 26, f"{TENSOR} [{', '.join(map(str, shape))}], main parameter", 13),
        _text(_LEFT[0], 58, f"held in {SOURCE}"),
        _text(_LEFT[1], 58, f"needed in {TARGET}, by"),
    ]
    for x, pieces, is_target in ((_LEFT[0], held, False), (_LEFT[1], wanted, True)):
        for layer in range(shape[0]):
            lines.append(_text(x - 60, _top(layer) + _HEIGHT / 2 + 4, f"layer {layer}"))
        for piece in _sorted(pieces):
            lines += _box(piece, x, shape[1:], is_target)
        if is_target:
            lines += _receivers(pieces, x, shape)
    moved = int(wanted.numel[wanted.src != wanted.dst].sum()) / int(wanted.numel.sum())
    told = f"{moved:.0%} of this tensor moves; each element once, from the rank of its colour"
    lines.append(_text(_LEFT[0], height - 20, told))
    return "\n".join([*lines, "</svg>", ""])


_Piece = tuple[int, int, list[int], list[int]]


def _sorted(pieces: Routes) -> list[_Piece]:
    """Source, destination, start and stop of each, in order of place."""
    columns = (pieces.src, pieces.dst, pieces.start, pieces.stop)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(rows, key=lambda piece: (piece[2], piece[3]))


def _box(piece: _Piece, left: int, shape: tuple[int, ...], is_target: bool) -> Iterator[str]:
    src, dst, (layer, row, column), (_, last_row, last_column) = piece
    wide, high = _WIDTH / shape[1], _HEIGHT / shape[0]
    x, y = left + column * wide, _top(layer) + row * high
    width, height = (last_column - column) * wide, (last_row - row) * high
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{_COLOURS[src]}" stroke="#fff" stroke-width="1.5"/>'
    )
    told = "kept" if is_target and src == dst else f"{'from ' * is_target}rank {src}"
    yield _text(x + width / 2, y + height / 2 + 4, told, 11, 'fill="#fff" text-anchor="middle"')


def _receivers(pieces: Routes, left: int, shape: tuple[int, ...]) -> Iterator[str]:
    """Who needs each stretch of rows, in its colour, right of it."""
    high, x = _HEIGHT / shape[1], left + _WIDTH + 8
    for (layer, dst), each in itertools.groupby(_sorted(pieces), lambda p: (p[2][0], p[1])):
        group = list(each)
        first, last = group[0][2][1], max(piece[3][1] for piece in group)
        y, height = _top(layer) + first * high, (last - first) * high
        yield (
            f'<rect x="{x}" y="{y + 1:.1f}" width="5" height="{height - 2:.1f}" '
            f'fill="{_COLOURS[dst]}"/>'
        )
        yield _text(x + 12, y + height / 2 + 4, f"rank {dst}", 12, f'fill="{_COLOURS[dst]}"')


def _top(layer: int) -> int:
    return _TOP + layer * (_HEIGHT + _GAP)


def _text(x: float, y: float, text: str, size: int = 12, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" {more}>{text}</text>'
