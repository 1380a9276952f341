"""What a device platform is: the device, the backend and the figures that differ between them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from dynatrain_megatron.platform.links import DeviceLinks

if TYPE_CHECKING:
    import torch


class Platform(ABC):
    """One kind of device that ranks train on; made by :func:`dynatrain_megatron.platform.install`.

    All methods are local to the calling process; none is a collective.
    """

    name: ClassVar[str]
    backend: ClassVar[str]

    @property
    @abstractmethod
    def device(self) -> "torch.device":
        """The device that new tensors of this rank live on."""

    @abstractmethod
    def take_device(self, local_rank: int) -> None:
        """Work from now on, in this thread, on the device of this place on the host."""

    @contextmanager
    def only_told_of_errors(self) -> Iterator[None]:
        """Groups made inside tell who uses them of errors, and end no process; here all do."""
        yield

    @abstractmethod
    def default_flags(self, argv: Sequence[str]) -> list[str]:
        """Megatron flags to append to ``argv``, each logged with its reason.

        Raises:
            PlatformError: if ``argv`` has a flag that cannot work on this platform.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished what this process queued."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give memory that no tensor uses back to the system."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes in use on the device now (on CPU: resident memory of the process)."""

    @property
    @abstractmethod
    def memory_pool(self) -> str:
        """Names the memory of this machine that :meth:`free_bytes` counts."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that could be allocated now, shared by all ranks with the same memory pool."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most :meth:`allocated_bytes` has been since the last :meth:`reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new measurement for :meth:`peak_bytes`."""

    def links(self) -> DeviceLinks:
        """What can be read of the device's links; here nothing is."""
        return DeviceLinks()

    def in_thread[T](self, make: Callable[[], T]) -> Callable[[], T]:
        """``make``, for another thread to run on this one's device; here there is one only."""
        return make
