"""Where the pipeline cuts a Hybrid model: the pattern string of a layout.

The pattern of a Hybrid model names its layers one by one, with ``|`` between pipeline stages, and
after each ``/`` the layers of a multi-token prediction::

    *-*E|*-*E/*-        two stages of four layers, then one prediction

Only the cuts belong to the layout; the rest is the model.
"""

from __future__ import annotations

from dynatrain_megatron.errors import LayoutError
from dynatrain_megatron.layout import ParallelLayout

_CUT, _PREDICTION = "|", "/"


def pattern_of(layout: ParallelLayout, launch: str, launch_pp: int, *, host_cuts: bool) -> str:
    """The pattern for ``layout`` of the model that ``launch`` describes.

    A pattern that the layout asks for (``pipeline``) is held against the model; its predictions
    may be left out. Otherwise the launch's pattern counts where pp and vpp are the launch's, and
    stages of equal length elsewhere. ``host_cuts`` says that flags of Megatron place the cuts
    (first and last stage); the pattern then has none. Raises LayoutError.
    """
    main, slash, predictions = launch.partition(_PREDICTION)
    layers = main.replace(_CUT, "")
    stages = layout.pp * (layout.vpp or 1)
    if layout.pipeline is not None:
        asked = layout.pipeline.partition(_PREDICTION)
        _check_asked(layout, asked, (layers, predictions), stages)
        main = asked[0]
    elif (layout.pp, layout.vpp) != (launch_pp, _vpp(main, launch_pp)):
        main = layers if host_cuts and layout.vpp is None else _cut(layers, layout, stages)
    return main + slash + predictions


def _vpp(main: str, pp: int) -> int | None:
    """The virtual pipeline degree that Megatron reads out of a pattern."""
    segments = main.count(_CUT) + 1
    return segments // pp if segments > pp else None


def _cut(layers: str, layout: ParallelLayout, stages: int) -> str:
    length, left = divmod(len(layers), stages)
    if left:
        raise LayoutError(
            f"pp*vpp={layout.pp}*{layout.vpp or 1}={stages} must divide the {len(layers)} layers "
            f"of the Hybrid pattern {layers}; say where to cut them, such as "
            f"pipeline: '{layers[: length + 1]}|{layers[length + 1 :]}'"
        )
    return _CUT.join(layers[i : i + length] for i in range(0, len(layers), length))


def _check_asked(
    layout: ParallelLayout, asked: tuple[str, str, str], model: tuple[str, str], stages: int
) -> None:
    main, slash, predictions = asked
    if main.replace(_CUT, "") != model[0]:
        raise LayoutError(
            f"pipeline={layout.pipeline} has the layers {main.replace(_CUT, '')}, but the model "
            f"has {model[0]}"
        )
    if slash and predictions != model[1]:
        raise LayoutError(
            f"pipeline={layout.pipeline} has the predictions {predictions or 'none'}, but the "
            f"model has {model[1] or 'none'}"
        )
    if main.count(_CUT) + 1 != stages:
        raise LayoutError(
            f"pipeline={layout.pipeline} makes {main.count(_CUT) + 1} stages, but "
            f"pp*vpp={layout.pp}*{layout.vpp or 1}={stages}"
        )
