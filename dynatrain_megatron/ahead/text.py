"""Estimates as lines for a terminal."""

from __future__ import annotations

from dynatrain_megatron.ahead.cases import Case, Impossible
from dynatrain_megatron.ahead.estimate import LATENCY_S, Estimate
from dynatrain_megatron.layout import ParallelLayout
from dynatrain_megatron.observe.units import duration, size


def impossible_lines(found: Impossible) -> list[str]:
    """Why a switch cannot be."""
    return [
        _line("from", f"{found.source} ({found.source.world} ranks)"),
        _line("to", found.target),
        _line("feasible", f"no: {found.reason}"),
    ]


def estimate_lines(found: Estimate) -> list[str]:
    """The table of one switch."""
    case, plan = found.case, found.plan
    busiest = found.busiest()
    lines = [
        _line("from", f"{case.source} ({case.source.world} ranks)"),
        _line("to", f"{case.target} ({case.target.world} ranks){_uneven(case)}"),
        _line("model", f"{case.model.numel / 1e9:.1f} billion parameters, {_what(case)}"),
        _line("topology", topology_text(found)),
        _line("feasible", f"no: {found.refusal}" if found.refusal else "yes"),
        _line("moved", f"{size(plan.moved_bytes)} = {found.gap:.3f} × the lower bound"),
        _line("  in nodes", size(found.within)),
        _line("  between", size(found.between)),
        _line("kept", size(plan.retained_bytes)),
        _line("rebuilt", f"{size(found.rebuilt.nbytes)} of bf16 parameters, gathered anew"),
    ]
    if found.placement is not None:
        text = f"{size(found.placement.saved_bytes)} less would move with engine.placement=best"
        lines.append(_line("placement", text))
    for number, one in enumerate(busiest):
        text = f"rank {one.rank} sends {size(one.sent)}, receives {size(one.received)}"
        lines.append(_line("" if number else "busiest", text))
    if found.bound is not None:
        text = (
            f"{size(found.bound.planned)} on the busiest rank or way out; at the least "
            f"{size(found.bound.least)} (× {found.bound.gap:.3f})"
        )
        lines.append(_line("load", text))
    by = ", ".join(dict.fromkeys(str(each.windows_by) for each in plan.passes))
    text = f"{plan.num_operations} messages in {plan.num_windows} windows ({by})"
    relayed = ", relayed in a second pass" if len(plan.passes) > 1 else ""
    lines.append(_line("rounds", text + relayed))
    lines += _memory_lines(found)
    lines += seconds_lines(found)
    return lines


def seconds_lines(found: Estimate) -> list[str]:
    """What it should take, and from what that comes."""
    parts = " + ".join(duration(outcome.seconds) for outcome in found.wire) or "0 ms"
    how = "each message by itself" if found.by_message else "one message for each pair of ranks"
    busiest = max(found.wire, key=lambda outcome: outcome.least_s, default=None)
    lines = [
        _line("seconds", f"{duration(found.seconds)} = wire {parts}, rebuilding "
              f"{duration(found.rebuilt.seconds)} (simulated, {how})"),
        _line("", f"{duration(found.plan.predicted_s)} wire by the planner's cost model, at full "
              "rates"),
    ]  # fmt: skip
    if busiest is not None and busiest.least_s:
        lines.append(
            _line("", f"{duration(busiest.least_s)} at the least: {busiest.busiest}")
        )  # fmt: skip
    return lines


def topology_text(found: Estimate) -> str:
    """Nodes and links, with all that is assumed of them."""
    topology = found.case.topology
    speeds, nodes = topology.speeds, len(set(topology.node))
    ways = "one for each rank" if topology.node_width is None else f"{topology.node_width} a node"
    return (
        f"{nodes} node{'s' if nodes > 1 else ''}; {speeds.near_gb_s:g} GB/s in a node, ways out of "
        f"{speeds.far_gb_s:g} GB/s ({ways}), {found.efficiency:.0%} of these reached; "
        f"{speeds.operation_s * 1e6:g} µs a message, {LATENCY_S * 1e6:g} µs latency"
    )


def _memory_lines(found: Estimate) -> list[str]:
    memory = found.memory
    stages = f"{memory.stages} stage{'s' if memory.stages > 1 else ''}"
    limit = found.memory_bytes
    always = "" if limit is None or memory.kept <= limit else " (more than there is)"
    return [
        _line("memory", f"{size(memory.before)} before, {size(memory.after)} after, of the "
              "fullest rank"),
        _line("", f"at most {size(memory.kept)} meanwhile with keep_source=always{always}, "
              f"{size(memory.freed)} with never ({stages})"),
    ]  # fmt: skip


def _what(case: Case) -> str:
    if case.weights_only:
        return "weights alone in bf16"
    return "bf16 with float32 main parameters and Adam's moments"


def _uneven(case: Case) -> str:
    layout: ParallelLayout = case.target
    chunks = layout.pp * (layout.vpp or 1)
    if case.model.num_layers % chunks == 0:
        return ""
    return (
        f"; {case.model.num_layers} layers over {chunks} stages, the first ones with one more, "
        "which a job needs flags for"
    )


def _line(name: str, text: str) -> str:
    return f"{name:10s} {text}"
