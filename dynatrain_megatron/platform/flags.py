"""Megatron's flags on a CPU: which are added, and which cannot be meant.

Flags are looked at as text, before Megatron's parser sees them, so that a mistake costs a message
and not a start of all ranks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynatrain_megatron.errors import PlatformError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DefaultFlag:
    """A flag to add where the user did not give it, and why."""

    flag: str
    value: str | None
    reason: str

    def words(self) -> list[str]:
        """The flag as command-line arguments."""
        return [self.flag] if self.value is None else [self.flag, self.value]


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """A flag that cannot work with some of its values: why, and what to do instead.

    Args:
        flag: with its dashes.
        works: whether a value can work; a flag without a value is asked with "".
        reason: why the others cannot.
        instead: what the user can do.
        unless: another flag with which it works all the same.
        above_one: another flag without which, or at 1, it works all the same.
    """

    flag: str
    works: Callable[[str], bool]
    reason: str
    instead: str
    unless: str | None = None
    above_one: str | None = None


def _never(value: str) -> bool:
    return False


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda value: value in values


def _without(letters: str) -> Callable[[str], bool]:
    return lambda value: not set(letters) & set(value)


_NO_CUDA_KERNEL = "its kernel exists for CUDA only"
_NO_TE = "it needs Transformer Engine, which runs on CUDA only"
_ON_GPU = "leave it out here, or run on GPUs (platform=cuda)"

_TE_FLAGS = (
    *("--fp8-format", "--fp4-format", "--fp8-param-gather", "--fp4-param-gather"),
    *("--tp-comm-overlap", "--use-precision-aware-optimizer", "--delay-wgrad-compute"),
    *("--moe-permute-fusion", "--moe-router-fusion"),
)
_PATTERN_FLAGS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
_GRAPH_FLAGS = ("--enable-cuda-graph", "--external-cuda-graph", "--optimizer-cuda-graph")

CPU_DEFAULTS: tuple[DefaultFlag, ...] = (
    DefaultFlag("--distributed-backend", "gloo", "NCCL joins GPUs only"),
    DefaultFlag("--transformer-impl", "local", "Transformer Engine runs on CUDA only"),
    DefaultFlag("--no-persist-layer-norm", None, _NO_CUDA_KERNEL),
    DefaultFlag("--no-gradient-accumulation-fusion", None, _NO_CUDA_KERNEL),
    DefaultFlag("--no-masked-softmax-fusion", None, _NO_CUDA_KERNEL),
    DefaultFlag("--no-rope-fusion", None, _NO_TE),
)

CPU_REFUSED: tuple[RefusedFlag, ...] = (
    RefusedFlag(
        "--distributed-backend", _one_of("gloo"), "NCCL joins GPUs only", "use gloo or leave it out"
    ),
    RefusedFlag("--transformer-impl", _one_of("local"), _NO_TE, "use local or leave it out"),
    RefusedFlag(
        "--cp-comm-type",
        _one_of("p2p", "allgather", "all_gather"),
        "the attention here has one way of joining the pieces of a sequence, with the same result",
        "leave it out",
        above_one="--context-parallel-size",
    ),
    RefusedFlag(
        "--hierarchical-context-parallel-sizes",
        _never,
        "the attention here joins the pieces of a sequence in one group",
        "leave it out",
    ),
    RefusedFlag(
        "--window-size",
        _never,
        "the attention here has no window over a sequence in pieces",
        "use tensor or pipeline parallelism instead of context parallelism, or run on GPUs "
        "(platform=cuda)",
        above_one="--context-parallel-size",
    ),
    *(
        RefusedFlag(
            flag,
            _without("MGD"),
            "the kernels of Mamba (M), gated delta net (G) and sparse attention (D) layers exist "
            "for CUDA only",
            "use *, +, - and E layers, or run on GPUs (platform=cuda)",
        )
        for flag in _PATTERN_FLAGS
    ),
    RefusedFlag("--pipeline-model-parallel-comm-backend", _never, "gloo is in use", "leave it out"),
    RefusedFlag("--cuda-graph-impl", _one_of("none"), "CUDA graphs need CUDA", _ON_GPU),
    RefusedFlag("--cpu-offloading-num-layers", _one_of("0"), _NO_TE, _ON_GPU),
    RefusedFlag(
        "--moe-token-dispatcher-type",
        _one_of("allgather", "alltoall"),
        "the flex dispatcher's kernels exist for CUDA only",
        "use alltoall or allgather",
    ),
    RefusedFlag(
        "--profile",
        _never,
        "it drives the CUDA profiler",
        "add --use-pytorch-profiler",
        unless="--use-pytorch-profiler",
    ),
    RefusedFlag(
        "--use-persistent-ckpt-worker",
        _never,
        "its process is started afresh, without this platform, and asks for a GPU",
        "leave it out: --async-save alone forks its writer",
    ),
    RefusedFlag("--apply-layernorm-1p", _never, "torch's norms have no such form", _ON_GPU),
    *(RefusedFlag(flag, _never, _NO_TE, _ON_GPU) for flag in _TE_FLAGS),
    *(RefusedFlag(flag, _never, "CUDA graphs need CUDA", _ON_GPU) for flag in _GRAPH_FLAGS),
    RefusedFlag("--use-nccl-ub", _never, "gloo is in use", "leave it out"),
)


def cpu_defaults(argv: Sequence[str]) -> list[str]:
    """Flags to append to Megatron's ``argv`` on the CPU platform, each logged with its reason.

    Raises:
        PlatformError: if ``argv`` has a flag that cannot work on a CPU.
    """
    refuse(argv, CPU_REFUSED, "on the CPU platform")
    added: list[str] = []
    for default in CPU_DEFAULTS:
        if value_of(argv, default.flag) is None:
            added += default.words()
            logger.info("added %s: %s", " ".join(default.words()), default.reason)
    return added


def local_stack(argv: Sequence[str]) -> list[str]:
    """Flags to append where ``argv`` asks for a Hybrid model of local modules; logged.

    Megatron's own layers of a Hybrid model are made of Transformer Engine's modules.
    """
    hybrid = any(value_of(argv, flag) is not None for flag in _PATTERN_FLAGS)
    if not hybrid or value_of(argv, "--transformer-impl") != "local" or "--spec" in argv:
        return []
    normed = value_of(argv, "--qk-layernorm") is not None
    name = "stack_with_latent_norms" if normed else "stack"
    words = ["--spec", "dynatrain_megatron.platform.hybrid_stack", name]
    logger.info("added %s: Megatron's own layers need Transformer Engine", " ".join(words))
    return words


def refuse(argv: Sequence[str], refused: Sequence[RefusedFlag], where: str) -> None:
    """Raise for the first flag in ``argv`` whose value cannot work.

    Raises:
        PlatformError: naming the flag, its value, the reason and what to do.
    """
    for rule in refused:
        value = value_of(argv, rule.flag)
        if rule.unless is not None and value_of(argv, rule.unless) is not None:
            continue
        if rule.above_one is not None and value_of(argv, rule.above_one) in (None, "1"):
            continue
        if value is not None and not rule.works(value):
            given = f"{rule.flag} {value}".rstrip()
            raise PlatformError(f"{given} cannot work {where}: {rule.reason}; {rule.instead}")


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value that ``argv`` gives ``flag`` last, "" for a flag alone, None where it is absent."""
    found: str | None = None
    for index, argument in enumerate(argv):
        if argument == flag:
            following = argv[index + 1] if index + 1 < len(argv) else "-"
            found = "" if following.startswith("-") else following
        elif argument.startswith(f"{flag}="):
            found = argument.removeprefix(f"{flag}=")
    return found
