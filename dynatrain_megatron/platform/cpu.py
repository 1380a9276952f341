"""The CPU platform: what Megatron asks of CUDA is answered with the CPU, and NCCL with gloo.

Megatron names CUDA everywhere: it makes tensors with ``device="cuda"``, orders work with streams
and events, and reads the GPU's memory and random state. :data:`CPU_TABLE` lists every name of torch
that is replaced to answer these requests, with the reason. The replacements are module and class
attributes and therefore hold in every thread of the process and in every forked child.

What is not imitated: kernels that exist only for GPUs (Transformer Engine, fused kernels, CUDA
graphs, FP8). :mod:`.flags` turns the optional ones off and refuses the others by name.
"""

import contextlib
import functools
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed
import torch.utils._device

from dynatrain_megatron.platform import flags, memory
from dynatrain_megatron.platform.base import Platform
from dynatrain_megatron.platform.replace import Replacement

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

# Compute capability that Megatron is told: one for which it takes no special path.
_CAPABILITY = (8, 0)


class CpuPlatform(Platform):
    """Ranks on CPU cores, joined by gloo."""

    name: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "gloo"

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return CPU

    def default_flags(self, argv: Sequence[str]) -> list[str]:
        """See :func:`.flags.cpu_defaults`."""
        return flags.cpu_defaults(argv)

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def take_device(self, local_rank: int) -> None:
        """All ranks share the one there is."""

    def empty_cache(self) -> None:
        """Give freed memory back to the system."""
        memory.release_unused()

    def allocated_bytes(self) -> int:
        """Resident memory of the process."""
        return memory.resident_bytes()

    @property
    def memory_pool(self) -> str:
        """One for all processes of the machine."""
        return "host"

    def free_bytes(self) -> int:
        """What the machine, or the container where that has less, can still give."""
        return memory.machine_bytes()[0]

    def peak_bytes(self) -> int:
        """Peak resident memory since the last :meth:`reset_peak`."""
        return memory.peak_resident_bytes()

    def reset_peak(self) -> None:
        """Restart the peak; where the kernel forbids it, the peak since the start stays."""
        if not memory.reset_peak_resident():
            logger.debug("the kernel does not allow the peak memory to be reset")


class CpuStream:
    """Stands for a CUDA stream: work is finished when the call that did it returns."""

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = 0
        self.device = CPU

    def wait_stream(self, stream: object) -> None:
        """Return at once: the other stream has nothing in flight."""

    def wait_event(self, event: object) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def record_event(self, event: "CpuEvent | None" = None) -> "CpuEvent":
        """Record now into ``event`` or a new one."""
        event = event if event is not None else CpuEvent()
        event.record()
        return event

    def __enter__(self) -> "CpuStream":
        """Make this the current stream, of which there is one."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it."""


class CpuEvent:
    """Stands for a CUDA event: a time stamp."""

    def __init__(self, *_: object, **__: object) -> None:
        self._time_s = time.perf_counter()

    def record(self, *_: object) -> None:
        """Take the time."""
        self._time_s = time.perf_counter()

    def wait(self, *_: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has happened: always."""
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        """Milliseconds from this event to ``end``."""
        return (end._time_s - self._time_s) * 1e3


def on_cpu(device: Any) -> Any:
    """The device to use where ``device`` was asked for: any CUDA device becomes the CPU."""
    if isinstance(device, str):
        return CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_tensor(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        # Pinning needs an accelerator; on the CPU it would mean nothing.
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    return make_tensor


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return original(self).replace("torch.", "torch.cuda.", 1)

    return tensor_type


def _device_context(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, device: Any) -> None:
        original(self, on_cpu(device))

    return __init__


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return original(
            output, input, _integers(output_split_sizes), _integers(input_split_sizes), **kwargs
        )

    return all_to_all_single


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _equal_sizes(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        _only_blocking(async_op, "all_gather")
        largest = max(part.numel() for part in tensor_list)
        padded = tensor.new_zeros(largest)
        padded[: tensor.numel()] = tensor.reshape(-1)
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        original(gathered, padded, group=group)
        for part, received in zip(tensor_list, gathered, strict=True):
            part.copy_(received[: part.numel()].view(part.shape))
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = torch.distributed.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _equal_sizes(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        _only_blocking(async_op, "reduce_scatter")
        for rank, part in enumerate(input_list):
            reduced = part.clone(memory_format=torch.contiguous_format)
            torch.distributed.reduce(reduced, op=op, group=group, group_dst=rank)
            if rank == torch.distributed.get_rank(group):
                output.copy_(reduced)
        return None

    return reduce_scatter


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) <= 1


def _loader_stream(original: Callable[..., None]) -> Callable[..., None]:
    """Let data loaders draw from a stream of their own, which begins where the common one is."""
    own: torch.Tensor | None = None

    @functools.wraps(original)
    def draws(self: Any, loader: Any) -> None:
        nonlocal own
        common = torch.get_rng_state()
        if own is not None:
            torch.set_rng_state(own)
        try:
            with warnings.catch_warnings():
                # torch says it of its own module; called from here, it would be said of ours.
                warnings.filterwarnings("ignore", message="'pin_memory' argument")
                original(self, loader)
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(common)

    return draws


def _only_blocking(async_op: bool, what: str) -> None:
    if async_op:
        raise NotImplementedError(f"{what} of unequal sizes over gloo works with async_op=False")


def _integers(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    return compile


def _answers(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Make a function that takes anything and returns ``value``."""
    return lambda original: lambda *_, **__: value


def _calls(function: Callable[[], Any]) -> Callable[[Any], Callable[..., Any]]:
    """Make a function that takes anything and returns what ``function`` does."""
    return lambda original: lambda *_, **__: function()


def _is(value: Any) -> Callable[[Any], Any]:
    """Replace by ``value`` itself."""
    return lambda original: value


def _local_ranks() -> int:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)


def _properties() -> SimpleNamespace:
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name="cpu",
        major=major,
        minor=minor,
        total_memory=memory.machine_bytes()[1],
        multi_processor_count=memory.cpu_count(),
    )


def _memory_stats() -> dict[str, int]:
    current, peak = memory.resident_bytes(), memory.peak_resident_bytes()
    stats = {"allocation.all.current": 0, "num_alloc_retries": 0, "num_ooms": 0}
    for kind in ("allocated", "reserved", "active"):
        stats[f"{kind}_bytes.all.current"] = current
        stats[f"{kind}_bytes.all.peak"] = peak
    return stats


_STREAM = CpuStream()

_MAKES_TENSOR = "takes device=: a CUDA device becomes the CPU, and pinning is dropped"
_FACTORIES = (
    *("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like"),
    *("full", "full_like", "tensor", "as_tensor", "asarray", "scalar_tensor", "arange"),
    *("linspace", "logspace", "eye", "tril_indices", "triu_indices", "rand", "rand_like"),
    *("randn", "randn_like", "randint", "randint_like", "randperm"),
    *("Tensor.new_empty", "Tensor.new_empty_strided", "Tensor.new_zeros", "Tensor.new_ones"),
    *("Tensor.new_full", "Tensor.new_tensor"),
)

_UNEQUAL = "gloo takes equal sizes only; MoE with expert tensor parallelism has unequal ones"
_PRESENT = "Megatron trains only where CUDA answers that it is there"
_NO_QUEUE = "a CPU finishes each operation before the call returns: there is nothing to order"
_ONE_STREAM = "CPU and CUDA random streams are one on this platform"
_MEMORY = "memory figures come from the process and the machine"
_MARKS = "profiler marks need the CUDA toolkit"

# Every name of torch that this platform replaces.
CPU_TABLE: tuple[Replacement, ...] = (
    *(Replacement(f"torch.{name}", _MAKES_TENSOR, _factory) for name in _FACTORIES),
    Replacement("torch.Tensor.to", "a CUDA device as target becomes the CPU", _tensor_to),
    Replacement(
        "torch.Tensor.cuda", "the tensor is where it shall be", lambda _: lambda self, *a, **k: self
    ),
    Replacement(
        "torch.Tensor.pin_memory", "pinning needs CUDA", lambda _: lambda self, *a, **k: self
    ),
    Replacement("torch.Tensor.record_stream", _NO_QUEUE, _answers(None)),
    Replacement(
        "torch.Tensor.type",
        "Megatron's optimizers accept parameters by the names torch.cuda.*Tensor only",
        _tensor_type,
    ),
    Replacement(
        "torch.utils._device.DeviceContext.__init__",
        "`with torch.device('cuda')` sets the device inside torch's own factories",
        _device_context,
    ),
    Replacement(
        "torch.compile",
        "Megatron decorates with it at import; compiling for CPU needs a C++ compiler and seconds",
        _compile,
    ),
    Replacement(
        "torch.accelerator.is_available",
        "torch itself must not take pinned memory, streams or graph checks to be there",
        _answers(False),
    ),
    Replacement(
        "torch.accelerator.current_accelerator", "as torch.accelerator.is_available", _answers(None)
    ),
    Replacement(
        "torch.distributed.all_to_all_single",
        "gloo takes split sizes as integers only, and the MoE dispatcher passes tensors' elements",
        _all_to_all_single,
    ),
    Replacement("torch.distributed.all_gather", _UNEQUAL, _all_gather),
    Replacement("torch.distributed.reduce_scatter", _UNEQUAL, _reduce_scatter),
    Replacement("torch.cuda.is_available", _PRESENT, _answers(True)),
    Replacement("torch.cuda.is_initialized", _PRESENT, _answers(True)),
    Replacement("torch.cuda._lazy_init", "there is no driver to start", _answers(None)),
    Replacement("torch.cuda.device_count", "one device for each local rank", _calls(_local_ranks)),
    Replacement("torch.cuda.current_device", "every CUDA device is the CPU", _answers(0)),
    Replacement("torch.cuda.set_device", "every CUDA device is the CPU", _answers(None)),
    Replacement("torch.cuda.device", "every CUDA device is the CPU", _is(contextlib.nullcontext)),
    Replacement("torch.cuda.get_device_name", "there is no GPU to ask", _answers("cpu")),
    Replacement(
        "torch.cuda.get_device_capability", "there is no GPU to ask", _answers(_CAPABILITY)
    ),
    Replacement("torch.cuda.get_device_properties", _MEMORY, _calls(_properties)),
    Replacement("torch.cuda.Stream", _NO_QUEUE, _is(CpuStream)),
    Replacement("torch.cuda.Event", _NO_QUEUE, _is(CpuEvent)),
    Replacement("torch.cuda.current_stream", _NO_QUEUE, _answers(_STREAM)),
    Replacement("torch.cuda.default_stream", _NO_QUEUE, _answers(_STREAM)),
    Replacement("torch.cuda.stream", _NO_QUEUE, _calls(contextlib.nullcontext)),
    Replacement("torch.cuda.set_stream", _NO_QUEUE, _answers(None)),
    Replacement("torch.cuda.synchronize", _NO_QUEUE, _answers(None)),
    Replacement("torch.cuda.is_current_stream_capturing", "no CUDA graphs", _answers(False)),
    Replacement("torch.cuda.nvtx.range_push", _MARKS, _answers(0)),
    Replacement("torch.cuda.nvtx.range_pop", _MARKS, _answers(0)),
    Replacement("torch.cuda.nvtx.range", _MARKS, _calls(contextlib.nullcontext)),
    Replacement("torch.cuda.empty_cache", _MEMORY, _calls(memory.release_unused)),
    Replacement("torch.cuda.memory_allocated", _MEMORY, _calls(memory.resident_bytes)),
    Replacement("torch.cuda.max_memory_allocated", _MEMORY, _calls(memory.peak_resident_bytes)),
    Replacement("torch.cuda.memory_reserved", _MEMORY, _calls(memory.resident_bytes)),
    Replacement("torch.cuda.max_memory_reserved", _MEMORY, _calls(memory.peak_resident_bytes)),
    Replacement("torch.cuda.memory_stats", _MEMORY, _calls(_memory_stats)),
    Replacement("torch.cuda.device_memory_used", _MEMORY, _calls(memory.resident_bytes)),
    Replacement("torch.cuda.mem_get_info", _MEMORY, _calls(memory.machine_bytes)),
    Replacement("torch.cuda.reset_peak_memory_stats", _MEMORY, _calls(memory.reset_peak_resident)),
    *(
        Replacement(f"torch.cuda.{module}{name}", _ONE_STREAM, make)
        for module in ("", "random.")
        for name, make in (
            ("get_rng_state", lambda _: lambda device="cuda": torch.get_rng_state()),
            ("set_rng_state", lambda _: lambda state, device="cuda": torch.set_rng_state(state)),
            ("manual_seed", lambda _: torch.default_generator.manual_seed),
            ("manual_seed_all", lambda _: torch.default_generator.manual_seed),
        )
    ),
    Replacement("torch.cuda.default_generators", _ONE_STREAM, _is((torch.default_generator,))),
    Replacement(
        "torch.utils.data.dataloader._BaseDataLoaderIter.__init__",
        "draws a seed from the CPU's stream, on the ranks that read data only; dropout draws from "
        "CUDA's, which must stay the same on all ranks of a tensor-parallel group",
        _loader_stream,
    ),
)


def prepare() -> None:
    """Do what has to be done with the original names, before the table is put in force."""
    # torch keeps the set of its factories from first use; `with torch.device(...)` compares with
    # it and is called with the originals, so the set must not be made of the replacements.
    torch.utils._device._device_constructors()
    # With one random stream, Megatron sees the CPU's state change whenever "CUDA" draws.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_says_something_new)


def _says_something_new(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()
