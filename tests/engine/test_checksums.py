"""Checksums: they follow the bytes and nothing else, and no changed message gets past them."""

from __future__ import annotations

import re
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dynatrain_megatron import faults
from dynatrain_megatron.config import Verify
from dynatrain_megatron.engine import (
    RingTransport,
    SameHostTransport,
    TorchTransport,
    Transport,
    execute,
)
from dynatrain_megatron.engine import checksums as sums
from dynatrain_megatron.engine.checksums import checksum
from dynatrain_megatron.engine.fingerprint import check_received
from dynatrain_megatron.engine.transport import Terms
from dynatrain_megatron.errors import TransitionError
from dynatrain_megatron.faults import Fault, Kind, Phase
from dynatrain_megatron.planner import PlanOptions
from tests.engine.test_execute import (
    TENSORS,
    assert_holds_its_values,
    bind,
    drawn_cases,
    topology_of,
)
from tests.engine.test_transport import TRANSPORTS, on_threads
from tests.planner.worlds import Case, mixed_cases, shared_cases

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that small tensors go every way there is."""
    monkeypatch.setattr(sums, "_SHORT_BYTES", 64)
    for name, value in (("_COLUMNS", 16), ("_ROW_BYTES", 128), ("_BLOCK_BYTES", 3 * 128)):
        monkeypatch.setattr(sums, name, value)
    monkeypatch.setattr(sums, "_PART_BYTES", 72)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    room = torch.empty(shape, dtype=dtype)
    noise = torch.randint(0, 256, (room.nbytes,), dtype=torch.uint8, generator=generator)
    return noise.view(dtype).view(shape)


def number(message: torch.Tensor) -> tuple[int, ...]:
    return tuple(checksum(message).tolist())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (5000,), (3, 700), (40, 3, 50), (9, 2048), (1, 1)])
def test_a_checksum_follows_the_bytes_wherever_they_lie(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    message = random_bytes(shape, dtype, 1)
    expected = number(message)
    assert number(message.reshape(-1).view(torch.uint8)) == expected
    wide = torch.zeros((*shape[:-1], shape[-1] + 3), dtype=dtype)
    rows = wide[..., 3:].copy_(message)  # rows with gaps, that begin anywhere
    assert rows.is_contiguous() == (len(shape) == 1 or set(shape[:-1]) == {1})
    assert number(rows) == expected
    columns = torch.zeros(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    assert number(columns.copy_(message)) == expected
    assert number(random_bytes(shape, dtype, 2)) != expected


@given(st.integers(1, 3000), st.integers(0, 9))
def test_host_and_device_mix_alike(count: int, seed: int) -> None:
    """A message may lie in host memory at one end and in a device's at the other."""
    numbers = random_bytes((count,), torch.int64, seed)
    of_device = (sums._scattered(numbers) * sums._weights(count, numbers.device)).sum()
    assert torch.equal(sums._mixed(numbers), of_device)


@pytest.mark.usefixtures("small")
def test_every_single_bit_is_seen() -> None:
    for nbytes in (1, 8, 64, 65, 100):
        message = random_bytes((nbytes,), torch.uint8, 3)
        seen = {number(message)}
        for position in range(nbytes):
            for bit in range(8):
                message[position] ^= 1 << bit
                seen.add(number(message))
                message[position] ^= 1 << bit
        assert len(seen) == 1 + 8 * nbytes


@pytest.mark.usefixtures("small")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_a_plain_sum_would_not_see_is_seen(data: st.DataObject) -> None:
    """Words that change places, signs that change in pairs, zeros instead of the end."""
    words = random_bytes(
        (data.draw(st.integers(9, 3000)),), torch.int64, data.draw(st.integers()) % 9
    )
    expected = number(words)
    a, b = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = words.clone()
    swapped[a], swapped[b] = words[b], words[a]
    assert number(swapped) != expected
    assert number(-words.view(torch.float32)) != expected
    a, b = sorted((a, b))
    cleared = words.clone()
    cleared[a:b] = 0
    assert number(cleared) != expected
    assert number(torch.cat([words, torch.zeros(48, dtype=torch.int64)])[48:]) != expected


def moved(
    transport: Transport,
    case: Case,
    *,
    staging: int,
    gap: int = 0,
    verify: Verify = Verify.messages,
) -> str:
    """What a rank says of a transition that is verified; without a word it has got it all."""
    rank = transport.rank
    topology = topology_of([0] * transport.size, transport.size)
    plan = case.plan(topology, PlanOptions(staging_bytes=staging))
    source = bind(case.before[rank], filled=True, gap=gap)
    target = bind(case.after[rank], filled=False, gap=gap)
    try:
        checked = verify is Verify.messages
        execute(plan, source, target, transport, timeout_s=20, check_messages=checked)
        if verify is Verify.fingerprint:
            check_received(plan, source, target, transport, timeout_s=20)
    except TransitionError as error:
        return str(error)
    assert_holds_its_values(target)
    assert_holds_its_values(source)
    return ""


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), mixed_cases(), shared_cases(5)),
    st.sampled_from([100, 400, 1 << 20]),
    st.sampled_from([0, 3]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
)
def test_sound_messages_pass(case: Case, staging: int, gap: int, hosts: list[int]) -> None:
    """However they are cut and carried, relayed ones too."""
    body = partial(moved, case=case, staging=staging, gap=gap)
    assert set(on_threads(len(case.before), body, hosts)) == {""}


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), shared_cases(5)),
    st.sampled_from([100, 1 << 20]),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 4),
)
def test_a_flipped_bit_in_a_message_is_named_on_all_ranks(
    case: Case, staging: int, hosts: list[int], receiver: int
) -> None:
    size = len(case.before)
    got = case.plan(topology_of([0] * size, size)).received_bytes
    faults.arm([Fault((receiver,), Phase.wire, Kind.bitflip)])
    try:
        said = on_threads(size, partial(moved, case=case, staging=staging), hosts)
    finally:
        faults.arm(())
    assert len(set(said)) == 1
    if receiver >= size or not got[receiver]:
        assert said[0] == ""
        return
    found = re.fullmatch(
        r"a message is not what was sent: from rank (\d+) to rank (\d+) in window (\d+), "
        r"\d+ bytes of (.*)",
        said[0],
    )
    assert found is not None, said[0]
    assert int(found[2]) == receiver != int(found[1])
    names = {tensor.name for roster in case.after for tensor in roster.tensors}
    assert any(found[4].startswith(name) for name in names)


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(mixed_cases(TENSORS), shared_cases(5)),
    st.lists(st.integers(0, 2), min_size=5, max_size=5),
    st.integers(0, 4),
)
def test_fingerprints_see_a_flipped_bit_too(case: Case, hosts: list[int], receiver: int) -> None:
    size = len(case.before)
    got = case.plan(topology_of([0] * size, size)).received_bytes
    faults.arm([Fault((receiver,), Phase.wire, Kind.bitflip)])
    try:
        body = partial(moved, case=case, staging=400, verify=Verify.fingerprint)
        said = on_threads(size, body, hosts)
    finally:
        faults.arm(())
    assert len(set(said)) == 1
    hit = receiver < size and bool(got[receiver])
    assert (f"differs from its source: rank {receiver}: " in said[0]) == hit
    assert hit or said[0] == ""


@pytest.mark.parametrize("name", ["gloo", "one host", "two hosts", "rings"])
def test_messages_are_checked_between_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sound ones pass and a flipped bit is found, carried by whatever transport."""
    monkeypatch.setattr(TorchTransport, "_TERMS", Terms(part_bytes=40))
    for kind in (SameHostTransport, RingTransport):
        given = Terms(part_bytes=1, row_bytes=12, is_read=True)
        monkeypatch.setattr(kind, "_GIVEN", given)
    monkeypatch.setattr(sums, "_SHORT_BYTES", 16)
    cases = drawn_cases(12)

    def body(transport: Transport) -> list[tuple[bool, str, str]]:
        said = []
        for i, case in enumerate(cases):
            topology = topology_of([0] * 4, 4)
            got = case.plan(topology, PlanOptions(staging_bytes=200)).received_bytes
            sound = moved(transport, case, staging=200, gap=i % 2 * 3)
            faults.arm([Fault((1,), Phase.wire, Kind.bitflip)])
            damaged = moved(transport, case, staging=200, gap=i % 2 * 3)
            faults.arm(())
            said.append((bool(got[1]), sound, damaged))
        return said

    num_damaged = 0
    for said in zip(*TRANSPORTS[name](4, body), strict=True):
        assert len(set(said)) == 1
        receives, sound, damaged = said[0]
        assert sound == ""
        assert ("to rank 1 in window" in damaged) == receives
        num_damaged += receives
    assert num_damaged > 3
