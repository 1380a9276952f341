"""The CUDA platform: torch as it is, behind the interface that the CPU platform has too."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch

from dynatrain_megatron.errors import PlatformError
from dynatrain_megatron.platform.base import Platform
from dynatrain_megatron.platform.links import DeviceLinks, device_links


class CudaPlatform(Platform):
    """Ranks on GPUs, one each, joined by NCCL."""

    name: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "nccl"

    def __init__(self) -> None:
        """Check that there is a GPU.

        Raises:
            PlatformError: if torch finds none.
        """
        if not torch.cuda.is_available():
            raise PlatformError(
                "platform=cuda needs a CUDA device and torch finds none on this machine; "
                "use platform=cpu, or install a torch build and a driver that fit together"
            )
        self._links: DeviceLinks | None = None

    @property
    def device(self) -> torch.device:
        """The current GPU."""
        return torch.device("cuda", torch.cuda.current_device())

    def take_device(self, local_rank: int) -> None:
        """Make the GPU of that number the current one."""
        torch.cuda.set_device(local_rank)

    @contextmanager
    def only_told_of_errors(self) -> Iterator[None]:
        """NCCL's watchdog ends the process otherwise, a minute after a peer was lost."""
        name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
        before = os.environ.get(name)
        os.environ[name] = "0"  # which a group reads as it is made
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    def default_flags(self, argv: Sequence[str]) -> list[str]:
        """None: Megatron's own defaults are made for GPUs."""
        return []

    def synchronize(self) -> None:
        """Wait for all streams of the current GPU."""
        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the current GPU."""
        return torch.cuda.memory_allocated()

    @property
    def memory_pool(self) -> str:
        """The current GPU, by its own name: ranks may number the GPUs they see differently."""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def free_bytes(self) -> int:
        """What the driver can give, and what this process has cached."""
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Most bytes of live tensors since the last :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        """Restart the peak."""
        torch.cuda.reset_peak_memory_stats()

    def links(self) -> DeviceLinks:
        """NVLink or PCIe of the current GPU, and the node's rails; read once."""
        if self._links is None:
            self._links = device_links(f"GPU-{torch.cuda.get_device_properties().uuid}")
        return self._links

    def in_thread[T](self, make: Callable[[], T]) -> Callable[[], T]:
        """``make`` on the GPU that is current here: in a new thread the first one is."""
        device = torch.cuda.current_device()

        def on_this_device() -> T:
            torch.cuda.set_device(device)
            return make()

        return on_this_device
