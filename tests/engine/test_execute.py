"""Plans carried out on made-up states: every element must arrive, whatever the layouts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings

from dynatrain_megatron.config import EngineSchedule
from dynatrain_megatron.engine import (
    ExecutionReport,
    Fragments,
    FragmentsBuilder,
    RingTransport,
    SameHostTransport,
    TorchTransport,
    Transport,
    bind_plan,
    execute,
)
from dynatrain_megatron.engine.fingerprint import check_received, fingerprint
from dynatrain_megatron.engine.memory import Dropped
from dynatrain_megatron.engine.parcels import make_parcels
from dynatrain_megatron.engine.transport import Terms
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.planner import Plan, PlanOptions, Speeds, Topology
from dynatrain_megatron.planner.routes import TakesFrom
from dynatrain_megatron.vps import LogicalTensor, Region, Roster, RosterBuilder, State, StateKind
from tests.engine.local import LocalTransport
from tests.engine.test_transport import TRANSPORTS, on_threads
from tests.planner.worlds import Case, irregular_cases, mixed_cases, region_of, shared_cases

ADAM = (
    State(StateKind.MAIN_PARAM, "float32"),
    State(StateKind.EXP_AVG, "float32"),
    State(StateKind.EXP_AVG_SQ, "bfloat16"),  # another width, so that packing is not uniform
)
TENSORS = (
    LogicalTensor("embedding", (16, 6), ADAM),
    LogicalTensor("norm", (12,), ADAM),
    LogicalTensor("stack", (3, 4, 5), ADAM),
    LogicalTensor("counter", (), (State(StateKind.BUFFER, "int64"),)),
)


def values(tensor: LogicalTensor, state: int) -> torch.Tensor:
    """Distinct numbers, so that a wrong element names itself; exact in every dtype used."""
    dtype = getattr(torch, tensor.states[state].dtype)
    numbers = torch.arange(tensor.numel, dtype=torch.float32).reshape(tensor.shape)
    return (numbers % 256 if dtype == torch.bfloat16 else numbers + 1000 * state).to(dtype)


def cut(region: Region) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(region.start, region.stop, strict=True))


def bind(roster: Roster, *, filled: bool, gap: int = 0) -> Fragments:
    """Memory for a roster: with the values of its regions, or with others.

    ``gap`` elements lie between rows.
    """
    builder = FragmentsBuilder()
    for slot in range(len(roster)):
        tensor, region = roster.tensors[int(roster.tensor[slot])], region_of(roster, slot)
        views = []
        for k in range(len(tensor.states)):
            full = values(tensor, k)
            held = (full if filled else full + 1)[cut(region)]
            room = torch.empty((*held.shape[:-1], held.shape[-1] + gap) if held.dim() else ())
            view = room.to(held.dtype)[..., gap:] if held.dim() else room.to(held.dtype)
            views.append(view.copy_(held))
        builder.add(tensor, region, views)
    return builder.build()


def assert_holds_its_values(fragments: Fragments) -> None:
    roster = fragments.roster
    for slot, views in enumerate(fragments.views):
        tensor, region = roster.tensors[int(roster.tensor[slot])], region_of(roster, slot)
        for k, view in enumerate(views):
            assert torch.equal(view, values(tensor, k)[cut(region)]), (tensor.name, region)


class Moved(NamedTuple):
    """A plan, and source and target fragments of all ranks after it."""

    plan: Plan
    source: list[Fragments]
    target: list[Fragments]


def topology_of(nodes: Sequence[int], num_ranks: int) -> Topology:
    """With messages so cheap that the small state here is relayed."""
    return Topology(tuple(nodes[:num_ranks]), None, Speeds(operation_s=0))


def move(
    case: Case,
    *,
    staging: int = 1 << 20,
    window_ops: int = 256,
    gap: int = 0,
    hosts: Sequence[int] | None = None,
    schedule: EngineSchedule = EngineSchedule.direct,
) -> Moved:
    """Plan and run a transition on threads, of which those of one host "read"."""
    source = [bind(roster, filled=True, gap=gap) for roster in case.before]
    target = [bind(roster, filled=False, gap=gap) for roster in case.after]
    plan = case.plan(
        topology_of(hosts or [0] * len(case.before), len(case.before)),
        PlanOptions(staging, window_ops, schedule),
    )

    def body(transport: Transport) -> int:
        report = execute(
            plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
        )
        assert_within(report, plan, transport.rank, staging)
        return report.sent_bytes

    sent = sum(on_threads(plan.num_ranks, body, hosts))
    assert sent == plan.moved_bytes == plan.lower_bound_bytes
    return Moved(plan, source, target)


@given(case=mixed_cases(), gap=st.sampled_from([0, 3]), same_host=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_plan_bound_once_carries_again_what_had_no_memory_between(
    case: Case, gap: int, same_host: bool
) -> None:
    source = [bind(roster, filled=True, gap=gap) for roster in case.before]
    target = [bind(roster, filled=False, gap=gap) for roster in case.after]
    plan = case.plan(options=PlanOptions())

    def body(transport: Transport) -> None:
        rank = transport.rank
        ends = plan, source[rank], target[rank], transport
        bound = bind_plan(*ends, timeout_s=3)
        for _ in range(2):
            Dropped(view for views in target[rank].views for view in views).restore()
            execute(*ends, timeout_s=3, bound=bound)
            assert_holds_its_values(target[rank])

    on_threads(plan.num_ranks, body, [0] * plan.num_ranks if same_host else None)


def assert_within(
    report: ExecutionReport, plan: Plan, rank: int, staging: int, held: int = 0
) -> None:
    staged = report.peak_staging_bytes - held
    assert 0 <= staged <= plan.peak_staging_bytes(rank)
    assert staged <= max(staging, 2 * 16)  # one element in each window
    assert report.received_bytes == int(
        plan.bytes_matrix[:, rank].sum() - plan.bytes_matrix[rank, rank]
    )


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), mixed_cases(), irregular_cases(), shared_cases(5)),
    st.sampled_from([16, 100, 400, 1 << 20]),
    st.sampled_from([1, 3, 256]),
    st.sampled_from([0, 3]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.sampled_from(EngineSchedule),
)
def test_every_element_arrives(
    case: Case, staging: int, window_ops: int, gap: int, hosts: list[int], schedule: EngineSchedule
) -> None:
    moved = move(
        case, staging=staging, window_ops=window_ops, gap=gap, hosts=hosts, schedule=schedule
    )
    for fragments in (*moved.source, *moved.target):
        assert_holds_its_values(fragments)


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), mixed_cases(), shared_cases(5)),
    st.sampled_from([100, 400, 1 << 20]),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from(EngineSchedule),
)
def test_no_window_has_more_operations_than_its_bound(
    case: Case, staging: int, window_ops: int, schedule: EngineSchedule
) -> None:
    """However many parts could travel by themselves; and both ends cut a message alike."""
    source = [bind(roster, filled=True) for roster in case.before]
    target = [bind(roster, filled=False) for roster in case.after]
    size = len(source)
    plan = case.plan(topology_of([0] * size, size), PlanOptions(staging, window_ops, schedule))
    for each in plan.passes:
        given = source if each.takes_from is TakesFrom.SOURCE else target
        sent, received = defaultdict(list), defaultdict(list)
        for rank, end in enumerate(
            LocalTransport.mesh(size)
        ):  # nothing is read, nothing waited for
            parcels = make_parcels(each.schedule, given[rank], target[rank], end, timeout_s=0)
            operations = Counter(parcel.window for parcel in parcels)
            assert max(operations.values(), default=0) <= window_ops
            for parcel in parcels:
                ends = (rank, parcel.peer) if parcel.sending else (parcel.peer, rank)
                cut = (parcel.window, parcel.nbytes)
                (sent if parcel.sending else received)[ends].append(cut)
        assert sent == received


@pytest.mark.parametrize(("window_ops", "num_parcels"), [(256, 9), (18, 9), (17, 1), (1, 1)])
def test_parts_travel_by_themselves_while_there_is_room(window_ops: int, num_parcels: int) -> None:
    """Five large tensors with a small one between any two; the other way goes as much."""
    before, after = ([RosterBuilder() for _ in range(2)] for _ in range(2))
    for i in range(18):
        large = i // 2 % 2 == 0
        tensor = LogicalTensor(
            f"{i // 2} of {i % 2}",
            (32 if large else 4,),
            (State(StateKind.MAIN_PARAM, "float32"),),
        )
        before[i % 2].add(tensor, Region.whole(tensor.shape))
        after[1 - i % 2].add(tensor, Region.whole(tensor.shape))
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    plan = case.plan(options=PlanOptions(window_ops=window_ops))
    fragments = (
        [bind(r, filled=True) for r in case.before],
        [bind(r, filled=True) for r in case.after],
    )
    parcels = make_parcels(
        plan.passes[0].schedule,
        fragments[0][0],
        fragments[1][0],
        LocalTransport.mesh(2)[0],
        timeout_s=0,
    )
    assert [parcel.sending for parcel in parcels].count(True) == num_parcels


def drawn_cases(count: int) -> list[Case]:
    """Some cases of four ranks, always the same."""
    found: list[Case] = []

    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate])
    @given(st.one_of(mixed_cases(TENSORS, 4), irregular_cases(), shared_cases(4)))
    def collect(case: Case) -> None:
        nothing = (RosterBuilder().build(),) * (4 - len(case.before))
        found.append(Case(case.before + nothing, case.after + nothing))

    collect()
    return found


@pytest.mark.parametrize("name", ["gloo", "one host", "two hosts", "rings", "rings of two hosts"])
def test_every_element_arrives_between_processes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits so low that the small state has large parts and long rows too."""
    monkeypatch.setattr(TorchTransport, "_TERMS", Terms(part_bytes=40))
    cases = [
        (case, gap, staging)
        for i, case in enumerate(drawn_cases(60))
        for gap, staging in [[(0, 400), (1, 100), (3, 100), (3, 1 << 20)][i % 4]]
    ]

    num_relayed = 0
    for case, _, staging in cases[1::2]:
        plan = case.plan(topology_of([0, 0, 1, 1], 4), PlanOptions(staging_bytes=staging))
        num_relayed += len(plan.passes) > 1
    assert num_relayed > 3

    def body(transport: Transport) -> int:
        read = 0
        for i, (case, gap, staging) in enumerate(cases):
            given = Terms(part_bytes=1, row_bytes=12 if i % 2 else 1 << 20, is_read=True)
            SameHostTransport._GIVEN = given  # type: ignore[misc]
            RingTransport._GIVEN = given  # type: ignore[misc]
            source = bind(case.before[transport.rank], filled=True, gap=gap)
            target = bind(case.after[transport.rank], filled=False, gap=gap)
            topology = topology_of([0, 0, i % 2, i % 2], 4)
            schedule = list(EngineSchedule)[i // 4 % 4]
            plan = case.plan(topology, PlanOptions(staging, schedule=schedule))
            report = execute(plan, source, target, transport, timeout_s=20)
            check_received(plan, source, target, transport, timeout_s=20)
            assert_within(report, plan, transport.rank, staging, transport.held_bytes)
            assert_holds_its_values(target)
            assert_holds_its_values(source)
            read += report.received_bytes
        return read

    assert min(TRANSPORTS[name](4, body)) > 0


@pytest.mark.parametrize(("staging", "num_windows"), [(4096, 1), (400, 3)])
def test_staging_memory_is_what_the_plan_says_where_all_state_is_small(
    staging: int, num_windows: int
) -> None:
    before, after = ([RosterBuilder() for _ in range(2)] for _ in range(2))
    for i in range(40):
        tensor = LogicalTensor(f"bias {i}", (3,), (State(StateKind.MAIN_PARAM, "float32"),))
        before[i % 2].add(tensor, Region((0,), (3,)))
        after[1 - i % 2].add(tensor, Region((0,), (3,)))
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    plan = case.plan(options=PlanOptions(staging_bytes=staging))
    source = [bind(roster, filled=True) for roster in case.before]
    target = [bind(roster, filled=False) for roster in case.after]

    def body(transport: Transport) -> int:
        rank = transport.rank
        report = execute(plan, source[rank], target[rank], transport, timeout_s=3)
        return report.peak_staging_bytes

    planned = [plan.peak_staging_bytes(rank) for rank in range(2)]
    assert plan.num_windows == num_windows
    assert on_threads(2, body) == planned
    assert max(planned) <= staging


def test_what_must_be_packed_to_be_read_takes_turns_in_staging_memory() -> None:
    """Rank 0 has nothing but short rows for rank 1, many times what staging memory holds."""
    before, after = ([RosterBuilder() for _ in range(2)] for _ in range(2))
    for i in range(30):
        tensor = LogicalTensor(f"matrix {i}", (8, 10), (State(StateKind.MAIN_PARAM, "float32"),))
        before[0].add(tensor, Region.whole(tensor.shape))
        after[1].add(tensor, Region((0, 3), (8, 7)))
    case = Case(tuple(b.build() for b in before), tuple(b.build() for b in after))
    plan, _, target = move(case, staging=1024, hosts=[0, 0])
    assert plan.moved_bytes > 3 * plan.peak_staging_bytes(0)
    assert_holds_its_values(target[1])


@settings(max_examples=40, deadline=None)
@given(mixed_cases(TENSORS), st.data())
def test_fingerprint_does_not_depend_on_the_layout_and_sees_any_flipped_bit(
    case: Case, data: st.DataObject
) -> None:
    plan, source, target = move(case, hosts=[0, 1, 0, 1, 0])

    def marks(transport: Transport) -> tuple[str, str]:
        before, _ = fingerprint(case.source, source[transport.rank], transport, timeout_s=3)
        after, _ = fingerprint(case.target, target[transport.rank], transport, timeout_s=3)
        check_received(plan, source[transport.rank], target[transport.rank], transport, timeout_s=3)
        return before, after

    found = on_threads(plan.num_ranks, marks)
    assert len({mark for pair in found for mark in pair}) == 1

    rank = data.draw(st.sampled_from([r for r in range(plan.num_ranks) if target[r].views]))
    slot = data.draw(st.integers(0, len(target[rank].views) - 1))
    state = data.draw(st.integers(0, len(target[rank].views[slot]) - 1))
    view = target[rank].views[slot][state]
    position = data.draw(st.integers(0, view.numel() - 1))
    bit = data.draw(st.integers(0, 8 * view.element_size() - 1))
    flip(view, position, bit)
    name = target[rank].roster.tensors[int(target[rank].roster.tensor[slot])].name

    def check(transport: Transport) -> str:
        try:
            check_received(
                plan, source[transport.rank], target[transport.rank], transport, timeout_s=3
            )
        except TransitionError as error:
            return str(error)
        return "unnoticed"

    for message in on_threads(plan.num_ranks, check):
        assert f"rank {rank}: {name}" in message


def flip(view: torch.Tensor, position: int, bit: int) -> None:
    """Flip one bit of one element of a possibly strided view."""
    where = np.unravel_index(position, tuple(view.shape)) if view.dim() else ()
    element = view[tuple(int(i) for i in where)].reshape(1).clone()
    raw = element.view(torch.uint8)
    raw[bit // 8] ^= 1 << (bit % 8)
    view[tuple(int(i) for i in where)] = element[0]


def test_fragments_refuse_views_of_another_shape_or_dtype() -> None:
    builder = FragmentsBuilder()
    norm = TENSORS[1]
    good = [values(norm, k) for k in range(3)]
    with pytest.raises(ValueError, match="exp_avg: expected"):
        builder.add(norm, Region((0,), (12,)), [good[0], good[1][:5], good[2]])
    with pytest.raises(ValueError, match="main_param: expected"):
        builder.add(norm, Region((0,), (12,)), [good[0].half(), good[1], good[2]])
