"""Layouts: the degrees and the rank order of one parallel arrangement of a job.

A :class:`ParallelLayout` says how the ranks of a world share the work; it knows nothing of the
model. :meth:`ParallelLayout.check` holds it against a :class:`ModelShape`. Neither torch nor
Megatron is imported here: layouts can be read, printed and compared anywhere.

The same ranks form two grids. Attention and dense layers use ``tp × cp × dp × pp``, experts use
``etp × ep × edp × pp``; both cover the world, with the first axis of ``order`` changing fastest::

    tp2-pp2-dp2, order tp-cp-ep-dp-pp          rank = tp + 2·dp + 4·pp

               dp 0         dp 1
            tp 0  tp 1   tp 0  tp 1
    pp 0      0     1      2     3
    pp 1      4     5      6     7
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dynatrain_megatron.errors import LayoutError, did_you_mean, shown

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's rank order unless ``--use-tp-pp-dp-mapping`` is given."""

_ORDER_AXES = DEFAULT_ORDER.split("-")
_DENSE_AXES = ("tp", "cp", "dp", "pp")
# How each axis of the expert grid is called in a rank order.
_EXPERT_AXES = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
_COUNTS = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "instances", "mbs")
_SWITCHES = {"sp": ("sp", True), "nosp": ("sp", False)} | {
    "opt": ("dist_opt", True),
    "noopt": ("dist_opt", False),
}
_PIPELINE = re.compile(r"(?:^|-)pipeline:")
# How the host writes repetitions out, (tt|)*29 first; it does so before it looks at the text.
_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MOST_LETTERS = 10_000
# Nine digits are far more than any degree, and keep int() away from texts of any length.
_TOKEN = re.compile(r"([a-z]+)([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a model and its batch that a layout must divide; None where there is no such.

    ``global_batch_size`` counts samples, ``seq_length`` tokens. ``uneven_pipeline`` says that the
    launch's own flags place the layers on stages (first and last stage sizes, embedding or loss
    accounted for), so that the host decides whether a pipeline degree is possible.
    """

    num_layers: int
    num_heads: int
    num_query_groups: int | None = None
    num_experts: int | None = None
    padded_vocab_size: int | None = None
    global_batch_size: int | None = None
    hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    moe_ffn_hidden_size: int | None = None
    seq_length: int | None = None
    uneven_pipeline: bool = False


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """One arrangement of ``world`` = tp · pp · cp · dp ranks.

    ``vpp`` is the number of model chunks a pipeline rank (None: one), ``etp`` the tensor-parallel
    degree of experts (None on input means ``tp``), ``sp`` sequence parallelism, ``dist_opt``
    whether the optimizer is sharded over data parallelism, ``instances`` the number of distributed
    optimizer instances, ``mbs`` the micro batch size in samples. ``pipeline`` is Megatron's
    pipeline layout string (or a Hybrid pattern) and is left to the host to judge.

    Raises LayoutError where the values contradict each other; see :meth:`check` for a model's part.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    sp: bool = False
    dist_opt: bool = True
    instances: int = 1
    mbs: int = 1
    order: str = DEFAULT_ORDER
    pipeline: str | None = None

    def __post_init__(self) -> None:
        """Fill in what follows from other fields, then refuse contradictions."""
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        if self.vpp == 1:
            object.__setattr__(self, "vpp", None)
        for field in fields(self):
            _check_value(field.name, getattr(self, field.name))
        self._check_degrees()

    # ------------------------------------------------------------------ sizes

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel degree of experts, always a number."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Data-parallel degree of experts: what is left of the world on the expert grid."""
        return self.world // (self.expert_tp * self.ep * self.pp)

    # ------------------------------------------------------------------ text

    def __str__(self) -> str:
        """Short form such as ``tp2-pp2-dp2``, which :meth:`parse` reads back.

        Degrees of 1 and default options are left out; ``dp1`` stands for a single rank.
        """
        parts = [
            f"{axis}{size}"
            for axis in ("tp", "pp", "vpp", "cp", "dp", "ep")
            if (size := getattr(self, axis)) is not None and size > 1
        ]
        if not parts:
            parts.append("dp1")
        if self.etp != self.tp:
            parts.append(f"etp{self.etp}")
        if self.sp:
            parts.append("sp")
        if not self.dist_opt:
            parts.append("noopt")
        if self.instances != 1:
            parts.append(f"instances{self.instances}")
        if self.mbs != 1:
            parts.append(f"mbs{self.mbs}")
        if self.order != DEFAULT_ORDER:
            parts.append("order:" + self.order.replace("-", "."))
        if self.pipeline is not None:
            parts.append(f"pipeline:{self.pipeline}")
        return "-".join(parts)

    @classmethod
    def parse(
        cls, text: str, base: "ParallelLayout | None" = None, world: int | None = None
    ) -> "ParallelLayout":
        """Read the short form, for example ``tp2-pp2-dp2-sp``.

        A text names all degrees: one that is left out is 1, except that ``dp`` follows from
        ``world`` where that is given. Options (``sp``/``nosp``, ``opt``/``noopt``, ``instances2``,
        ``mbs2``, ``order:tp.cp.ep.pp.dp``) default to those of ``base``. ``pipeline:…`` comes last
        and takes the rest of the text. Raises LayoutError.
        """
        changes = read_changes(text)
        if world is None:
            tp, pp, cp = (_degree(axis, changes[axis]) for axis in ("tp", "pp", "cp"))
            dp = _degree("dp", changes.get("dp", 1))
            world = _degree("world", changes.get("world", tp * pp * cp * dp))
        return derive(cls() if base is None else base, changes, world)

    # ------------------------------------------------------------------ ranks

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index of ``rank`` on each axis of both grids: tp, cp, dp, pp and etp, ep, edp.

        The order is that of Megatron's ``RankGenerator``.
        """
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank={rank} is not in the world={self.world} of {self}")
        found = {
            axis: rank // stride % size for axis, (size, stride) in self._grid(expert=False).items()
        }
        for axis, (size, stride) in self._grid(expert=True).items():
            found[axis] = rank // stride % size
        return found

    def _grid(self, *, expert: bool) -> dict[str, tuple[int, int]]:
        """Size and rank stride of each axis of one grid."""
        if expert:
            sizes = {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.expert_dp}
            names = _EXPERT_AXES
        else:
            sizes = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp}
            names = {axis: axis for axis in _DENSE_AXES}
        sizes["pp"] = self.pp
        strides, stride = {}, 1
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= sizes[axis]
        return {name: (sizes[axis], strides[axis]) for name, axis in names.items()}

    # ------------------------------------------------------------------ rules

    def check(self, model: ModelShape) -> None:
        """Hold this layout against a model; raises LayoutError for the first broken rule.

        Rules are checked in the order tp, pp, cp, ep, batch. A pipeline layout string and uneven
        pipelines are left to the host.
        """
        self._check_tensor_axis(model)
        self._check_pipeline_axis(model)
        self._check_context_axis(model)
        self._check_expert_axes(model)
        if model.global_batch_size is not None:
            _must_divide(
                f"mbs*dp={self.mbs}*{self.dp}={self.mbs * self.dp}",
                self.mbs * self.dp,
                "global_batch_size",
                model.global_batch_size,
            )

    def _check_tensor_axis(self, model: ModelShape) -> None:
        tp = f"tp={self.tp}"
        _must_divide(tp, self.tp, "num_attention_heads", model.num_heads)
        groups = model.num_query_groups
        if groups is not None and groups % self.tp and self.tp % groups:
            raise LayoutError(
                f"one of tp={self.tp} and num_query_groups={groups} must divide the other "
                f"({groups} mod {self.tp} = {groups % self.tp}, "
                f"{self.tp} mod {groups} = {self.tp % groups})"
            )
        _must_divide(tp, self.tp, "ffn_hidden_size", model.ffn_hidden_size)
        rows = model.padded_vocab_size
        if rows is not None and rows % self.tp:
            raise LayoutError(
                f"tp={self.tp} must divide padded_vocab_size={rows} ({rows} mod {self.tp} = "
                f"{rows % self.tp}), which stays as the launch has made it; launch with "
                f"--make-vocab-size-divisible-by a multiple of every tp"
            )
        if self.sp:
            _must_divide(
                f"tp={self.tp} with sequence parallelism", self.tp, "seq_length", model.seq_length
            )

    def _check_pipeline_axis(self, model: ModelShape) -> None:
        if self.pipeline is not None or model.uneven_pipeline:
            return
        if self.vpp is None:
            _must_divide(f"pp={self.pp}", self.pp, "num_layers", model.num_layers)
        else:
            chunks = self.pp * self.vpp
            _must_divide(
                f"pp*vpp={self.pp}*{self.vpp}={chunks}", chunks, "num_layers", model.num_layers
            )

    def _check_context_axis(self, model: ModelShape) -> None:
        if self.cp > 1:
            _must_divide(
                f"2*cp=2*{self.cp}={2 * self.cp}", 2 * self.cp, "seq_length", model.seq_length
            )

    def _check_expert_axes(self, model: ModelShape) -> None:
        if model.num_experts is None:
            if self.ep > 1:
                raise LayoutError(
                    f"ep={self.ep} needs a model with experts, but num_experts={model.num_experts}"
                )
            return
        _must_divide(f"ep={self.ep}", self.ep, "num_experts", model.num_experts)
        _must_divide(
            f"etp={self.etp}", self.expert_tp, "moe_ffn_hidden_size", model.moe_ffn_hidden_size
        )
        if self.tp > 1 and not self.sp:
            raise LayoutError(
                f"tp={self.tp} with num_experts={model.num_experts} needs sequence parallelism, "
                f"but sp={self.sp}"
            )

    def _check_degrees(self) -> None:
        if self.sp and self.tp == 1:
            raise LayoutError(f"sequence parallelism (sp={self.sp}) needs tp > 1, but tp={self.tp}")
        if self.vpp is not None and self.pp == 1:
            raise LayoutError(f"virtual pipelines (vpp={self.vpp}) need pp > 1, but pp={self.pp}")
        expert = self.expert_tp * self.ep * self.pp
        _must_divide(
            f"etp*ep*pp={self.etp}*{self.ep}*{self.pp}={expert}", expert, "world", self.world
        )
        self._check_grids_agree()
        _must_divide(f"instances={self.instances}", self.instances, "dp*cp", self.dp * self.cp)
        _must_divide(f"instances={self.instances}", self.instances, "expert dp", self.expert_dp)
        if self.instances > 1 and not self.dist_opt:
            raise LayoutError(
                f"instances={self.instances} needs the distributed optimizer, "
                f"but dist_opt={self.dist_opt}"
            )

    def _check_grids_agree(self) -> None:
        """Both grids must cut the world into the same pipelines, as Megatron demands."""
        if self.pp == 1:
            return
        if not self.order.endswith("pp") and self.expert_dp != self.dp:
            raise LayoutError(
                f"with pp not last in order={self.order!r}, the data parallel degrees of dense and "
                f"expert layers must be equal, but dp={self.dp} and expert dp={self.expert_dp}"
            )
        dense = self._grid(expert=False)["pp"][1]
        expert = self._grid(expert=True)["pp"][1]
        if dense != expert:
            raise LayoutError(
                f"order={self.order!r} puts the stages of a pipeline {dense} ranks apart for dense "
                f"and {expert} ranks apart for expert layers; both must be equal"
            )


LAYOUT_KEYS = (*(field.name for field in fields(ParallelLayout)), "world")
"""Keys that a change of layout may name."""


def read_changes(wanted: object) -> dict[str, object]:
    """What a layout text, or a mapping with keys of LAYOUT_KEYS, asks for.

    Each value is checked by itself; whether they go together is for :func:`derive` to say. A text
    names all degrees (see :meth:`ParallelLayout.parse`), a mapping only those that change. Raises
    LayoutError.
    """
    if isinstance(wanted, str):
        changes: dict[str, object] = dict.fromkeys(("tp", "pp", "cp", "ep"), 1)
        changes |= dict.fromkeys(("vpp", "etp", "pipeline"))
        changes |= _read_tokens(wanted)
    elif isinstance(wanted, Mapping):
        changes = dict(wanted)
    else:
        raise LayoutError(
            f"a layout is a text such as 'tp2-pp2-dp2' or a mapping such as {{tp: 2, pp: 2}}, "
            f"got {shown(wanted)}"
        )
    for key, value in changes.items():
        if key not in LAYOUT_KEYS:
            raise LayoutError(
                f"layout key {shown(key)} is unknown{did_you_mean(str(key), LAYOUT_KEYS)}; "
                f"allowed: {', '.join(LAYOUT_KEYS)}"
            )
        _check_value(key, value)
    return changes


def derive(base: ParallelLayout, changes: Mapping[str, object] | str, world: int) -> ParallelLayout:
    """The layout of ``world`` ranks that differs from ``base`` by ``changes``.

    ``changes`` is what :func:`read_changes` takes: a mapping, or a text that names all degrees.
    ``dp`` and ``world`` are derived, or checked where ``changes`` names them. What follows from a
    changed degree follows: ``etp`` follows ``tp`` where they were equal; sequence parallelism ends
    at tp 1, virtual pipelines at pp 1; a pipeline layout string belongs to its pp and vpp. Raises
    LayoutError for unknown keys, wrong values, and degrees that do not divide the ranks.
    """
    asked = read_changes(changes)
    dp, ranks = asked.pop("dp", None), asked.pop("world", None)
    values: dict[str, object] = {
        field.name: getattr(base, field.name) for field in fields(ParallelLayout)
    } | asked
    if values["tp"] == 1 and "sp" not in asked:
        values["sp"] = False
    if base.etp == base.tp and "etp" not in asked:
        values["etp"] = values["tp"]
    if (values["pp"] == 1 and "vpp" not in asked) or values["vpp"] == 1:
        values["vpp"] = None
    if (values["pp"], values["vpp"]) != (base.pp, base.vpp) and "pipeline" not in asked:
        values["pipeline"] = None
    if ranks is not None and ranks != world:
        raise LayoutError(f"world={ranks} is asked for, but the job has world={world} ranks")
    values["dp"] = _data_degree(values, dp, world)
    return ParallelLayout(**values)  # type: ignore[arg-type]  # checked by the constructor


def _read_tokens(text: str) -> dict[str, object]:
    """The values that a short form names; each at most once."""
    if not text:
        raise LayoutError(f"a layout is a text such as 'tp2-pp2-dp2', got {shown(text)}")
    # A pipeline layout may itself contain dashes, so it is cut off before the text is split.
    pipeline = _PIPELINE.search(text)
    head = text[: pipeline.start()] if pipeline else text
    found: dict[str, object] = {}
    for token in head.split("-") if head else ():
        key, value = _read_token(token, text)
        if key in found:
            raise LayoutError(f"layout {shown(text)} names {key} twice: {found[key]} and {value}")
        found[key] = value
    if pipeline:
        found["pipeline"] = text[pipeline.end() :]
    return found


def _read_token(token: str, text: str) -> tuple[str, object]:
    if token in _SWITCHES:
        return _SWITCHES[token]
    if token.startswith("order:"):
        return "order", token.removeprefix("order:").replace(".", "-")
    match = _TOKEN.fullmatch(token)
    names = (*_COUNTS, "world")
    if match and match[1] in names:
        return match[1], int(match[2])
    word = match[1] if match else token
    raise LayoutError(
        f"layout {shown(text)} has a part {shown(token)} that is unknown"
        f"{did_you_mean(word, (*names, *_SWITCHES))}; allowed: a number after "
        f"{', '.join(names)}; {', '.join(_SWITCHES)}; order:…; pipeline:…"
    )


def _data_degree(values: Mapping[str, object], dp: object, world: int) -> int:
    """What is left of ``world`` for data parallelism, compared with ``dp`` where that is given."""
    tp, pp, cp = (_degree(name, values[name]) for name in ("tp", "pp", "cp"))
    model = tp * pp * cp
    product = f"tp*pp*cp={tp}*{pp}*{cp}={model}"
    _must_divide(product, model, "world", world)
    if dp is not None and dp != world // model:
        raise LayoutError(
            f"dp={dp} must be world / (tp*pp*cp) = {world} / {model} = {world // model}"
        )
    return world // model


def _check_value(name: str, value: object) -> None:
    """Refuse a value that field ``name`` (or ``world``) can never have."""
    if value is None and name in ("vpp", "etp", "pipeline"):
        return
    if name in (*_COUNTS, "world"):
        _degree(name, value)
    elif name in ("sp", "dist_opt"):
        if type(value) is not bool:
            raise LayoutError(f"{name} must be true or false, got {shown(value)}")
    elif not isinstance(value, str) or not value:
        raise LayoutError(f"{name} must be a text, got {shown(value)}")
    elif name == "order" and sorted(value.split("-")) != sorted(_ORDER_AXES):
        raise LayoutError(
            f"order={shown(value)} must name each of {', '.join(sorted(_ORDER_AXES))} once, "
            f"for example {DEFAULT_ORDER!r}"
        )
    elif name == "pipeline":
        _check_repetitions(value)


def _check_repetitions(pipeline: str) -> None:
    """Refuse a pipeline layout that could not be written out."""
    text = pipeline
    for pattern in _REPEATED:
        length = len(text)
        for part, times in pattern.findall(text):
            length += len(part) * int(times[:6])
        if length > _MOST_LETTERS:
            raise LayoutError(
                f"pipeline={shown(pipeline)} stands for more than {_MOST_LETTERS} letters; it has "
                "one for each layer, and | between stages"
            )
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)


def _degree(name: str, value: object) -> int:
    # bool is an int to Python, but never a degree.
    if type(value) is not int or value < 1:
        raise LayoutError(f"{name} must be a whole number of at least 1, got {shown(value)}")
    return value


def _must_divide(divisor: str, degree: int, name: str, size: int | None) -> None:
    """Raise unless ``degree``, described by ``divisor``, divides ``size``; None divides by all."""
    if size is not None and size % degree:
        raise LayoutError(
            f"{divisor} must divide {name}={size} ({size} mod {degree} = {size % degree})"
        )
