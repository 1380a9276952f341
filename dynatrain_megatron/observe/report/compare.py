"""A run beside the static one, and what the report tells a program."""

import math
from dataclasses import asdict
from typing import Any

from dynatrain_megatron.observe.report.read import Run


def relative_difference(value: float, reference: float) -> float:
    """|value − reference| ÷ |reference|; NaN where either is NaN."""
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf


def finite(value: float | None) -> float | None:
    """``value`` as JSON can have it: None where it is not a finite number."""
    return value if value is not None and math.isfinite(value) else None


def loss_differences(run: Run, static: Run) -> dict[int, float]:
    """Relative loss difference by iteration, where both runs have a finite loss."""
    reference = {step.iteration: step.loss for step in static.steps}
    found = {
        step.iteration: relative_difference(step.loss, reference[step.iteration])
        for step in run.steps
        if step.iteration in reference
    }
    return {iteration: value for iteration, value in found.items() if not math.isnan(value)}


def as_json(run: Run, static: Run | None) -> dict[str, Any]:
    """The run as plain data; what is not a finite number becomes null."""
    losses = [step.loss for step in run.steps if not math.isnan(step.loss)]
    told: dict[str, Any] = {
        "run_dir": str(run.directory),
        "steps": len(run.steps),
        "first_iteration": run.steps[0].iteration if run.steps else None,
        "last_iteration": run.steps[-1].iteration if run.steps else None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "switches": [
            {**asdict(switch), "bytes_ratio": finite(switch.bytes_ratio)} for switch in run.switches
        ],
        "refused": [asdict(refusal) for refusal in run.refusals],
        "notes": list(run.notes),
        "static": None,
    }
    if static is not None:
        differences = loss_differences(run, static)
        told["static"] = {
            "run_dir": str(static.directory),
            "steps": len(static.steps),
            "steps_compared": len(differences),
            "max_loss_difference": finite(max(differences.values(), default=None)),
            "notes": list(static.notes),
        }
    return told
