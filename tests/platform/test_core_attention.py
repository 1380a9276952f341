"""Our attention for Megatron's local modules, against a plain softmax in float64."""

from typing import Any, NamedTuple

import pytest

from dynatrain_megatron import platform
from tests.ranks import run_ranks

platform.install("cpu")

import torch  # noqa: E402

SEQUENCE, BATCH = 24, 2


class Heads(NamedTuple):
    """Numbers and sizes of the heads of one tensor-parallel rank."""

    queries: int
    groups: int
    k_channels: int
    v_channels: int


GQA = Heads(queries=4, groups=2, k_channels=8, v_channels=8)
MLA = Heads(queries=3, groups=3, k_channels=12, v_channels=5)

Tensors = dict[str, torch.Tensor]


def tensors(heads: Heads) -> Tensors:
    """Queries, keys, values and the gradient of the output: whole sequence, the same everywhere."""
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "query": (heads.queries, heads.k_channels),
        "key": (heads.groups, heads.k_channels),
        "value": (heads.groups, heads.v_channels),
        "gradient": (heads.queries, heads.v_channels),
    }
    return {
        name: torch.randn(SEQUENCE, BATCH, *shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def hidden(heads: Heads) -> torch.Tensor:
    """A mask that is not the causal one alone: each sample also has two documents."""
    token = torch.arange(SEQUENCE)
    masks = []
    for end in (7, 15):
        document = token >= end
        masks.append((token[:, None] < token) | (document[:, None] != document))
    return torch.stack(masks)[:, None]


def plain(parts: Tensors, scale: float, mask: torch.Tensor) -> Tensors:
    """Output and gradients by the definition; shapes as given, the output with heads side by side.

    The tensors are those of :func:`tensors`.
    """
    query, key, value = (parts[name].clone().requires_grad_() for name in ("query", "key", "value"))
    repeats = query.size(2) // key.size(2)
    keys, values = (t.repeat_interleave(repeats, dim=2) for t in (key, value))
    scores = torch.einsum("sbhk,tbhk->bhst", query, keys) * scale
    weights = scores.masked_fill(mask, -10000.0).softmax(dim=-1)
    output = torch.einsum("bhst,tbhv->sbhv", weights, values)
    output.backward(parts["gradient"])
    return {
        "output": output.detach().flatten(2),
        **{n: t.grad for n, t in zip(("query", "key", "value"), (query, key, value), strict=True)},  # type: ignore[dict-item]
    }


def own_part(whole: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """What Megatron's data path gives this rank of a sequence."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    name = "attention_mask" if dim == 2 else "tokens"
    moved = whole if dim == 2 else whole.transpose(0, 1)
    group = parallel_state.get_context_parallel_group()
    part = get_batch_on_this_cp_rank({name: moved}, is_hybrid_cp=False, cp_group=group)[name]
    return part if dim == 2 else part.transpose(0, 1)


def attention(heads: Heads, size: int, **config: Any) -> Any:
    """The module that a local layer is built with; collective, starts the process's groups."""
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(3)
    latent = heads.k_channels != heads.v_channels
    channels = {"k_channels": heads.k_channels, "v_channels": heads.v_channels}
    return LocalSpecProvider().core_attention()(
        config=TransformerConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=heads.queries,
            num_query_groups=heads.groups,
            kv_channels=8,
            context_parallel_size=size,
            masked_softmax_fusion=False,
            **{"attention_dropout": 0.0, **config},
        ),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type="p2p",
        softmax_scale=0.3 if latent else None,
        **(channels if latent else {}),
    )


@pytest.mark.host
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("heads", [GQA, MLA], ids=["GQA", "MLA"])
def test_output_and_gradients_are_those_of_a_plain_softmax(heads: Heads, size: int) -> None:
    def worker(rank: int) -> float:
        attend = attention(heads, size)
        scale = 0.3 if heads is MLA else 8**-0.5
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        worst = 0.0
        for whole_mask in (None, hidden(heads)):
            whole = tensors(heads)
            expected = plain(whole, scale, causal if whole_mask is None else whole_mask)
            part = {name: own_part(t).clone() for name, t in whole.items()}
            inputs = [part[name].requires_grad_() for name in ("query", "key", "value")]
            mask = None if whole_mask is None else own_part(whole_mask, dim=2)
            output = attend(*inputs, mask)
            output.backward(part["gradient"].flatten(2))
            got = [output.detach(), *(t.grad for t in inputs)]
            for (name, wanted), tensor in zip(expected.items(), got, strict=True):
                assert tensor is not None and tensor.abs().max() > 0.1, name
                worst = max(worst, float((tensor - own_part(wanted)).abs().max()))
        return worst

    assert max(run_ranks(size, worker)) < 1e-12


@pytest.mark.host
def test_dropout_and_recomputation_with_a_sequence_in_pieces() -> None:
    """Dropout draws from the model-parallel stream, and drops the same when computed again."""

    def worker(rank: int) -> None:
        from megatron.core.tensor_parallel import checkpoint
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        attend = attention(GQA, 2, attention_dropout=0.5)
        part = {name: own_part(t).clone() for name, t in tensors(GQA).items()}
        outside = torch.get_rng_state()
        streams = get_cuda_rng_tracker().get_states()
        results = []
        for run in (attend, lambda *given: checkpoint(attend, False, *given)):
            get_cuda_rng_tracker().set_states(dict(streams))
            inputs = [part[name].clone().requires_grad_() for name in ("query", "key", "value")]
            output = run(*inputs, None)
            output.backward(part["gradient"].flatten(2))
            results.append([output.detach(), *(t.grad for t in inputs)])
        for once, again in zip(*results, strict=True):
            assert torch.equal(once, again)
        assert not torch.equal(attend(*inputs, None), results[0][0])  # the stream has moved on
        assert torch.equal(torch.get_rng_state(), outside)
        attend.eval()
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        whole = plain(tensors(GQA), 8**-0.5, causal)
        assert torch.allclose(attend(*inputs, None), own_part(whole["output"]))

    run_ranks(2, worker)


@pytest.mark.host
def test_what_a_sequence_in_pieces_cannot_have_is_refused() -> None:
    def worker(rank: int) -> None:
        from megatron.core.transformer.enums import AttnMaskType

        attend = attention(GQA, 2)
        kind, config = type(attend), attend.config
        given: dict[str, Any] = {
            "config": config,
            "layer_number": 1,
            "attn_mask_type": AttnMaskType.causal,
            "attention_type": "self",
        }
        for change, message in (
            ({"cp_comm_type": "a2a"}, "has no --cp-comm-type a2a"),
            ({"attn_mask_type": AttnMaskType.padding}, "has no AttnMaskType.padding self"),
            ({"attention_type": "cross"}, "has no AttnMaskType.causal cross"),
        ):
            with pytest.raises(ValueError, match=message):
                kind(**given | change)
        config.window_size = (8, 0)
        with pytest.raises(ValueError, match="--context-parallel-size 2 has no --window-size"):
            kind(**given)
        config.context_parallel_size = 1
        kind(**given, cp_comm_type="a2a")

    run_ranks(2, worker)
