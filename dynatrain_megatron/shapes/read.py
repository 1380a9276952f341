"""Models as users write them: mappings of sizes, such as the presets of the group ``model``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from dynatrain_megatron.errors import ConfigError, did_you_mean
from dynatrain_megatron.layout import ModelShape
from dynatrain_megatron.shapes.models import Experts, LatentAttention, Model

_MOST = 1 << 24  # of any size; guards against a slip that would take all memory
_PARTS: dict[str, type[LatentAttention] | type[Experts]] = {
    "latent": LatentAttention,
    "experts": Experts,
}
_MAY_BE_ZERO = ("positions", "first_layer", "shared_ffn")


def read_model(values: object) -> Model:
    """The model that a mapping with the fields of :class:`Model` describes.

    Raises ConfigError for every mistake, with the key, its value and the rule.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"model={values} is not allowed; model must be a preset or a mapping of sizes such as "
            "{num_layers: 32, hidden: 4096, …}"
        )
    given = dict(values)
    parts: dict[str, Any] = {}
    for name, kind in _PARTS.items():
        part = given.pop(name, None)
        if part is not None:
            if not isinstance(part, Mapping):
                keys = ", ".join(field.name for field in dataclasses.fields(kind))
                _refuse(f"model.{name}", part, f"a mapping with {keys}, or null")
            parts[name] = kind(**_fields(kind, part, f"model.{name}"))
    model = Model(**_fields(Model, given, "model"), **parts)
    if model.heads % model.groups:
        _refuse("model.groups", model.groups, f"a divisor of model.heads={model.heads}")
    if model.experts is not None and model.experts.first_layer >= model.num_layers:
        rule = f"below model.num_layers={model.num_layers}"
        _refuse("model.experts.first_layer", model.experts.first_layer, rule)
    return model


def model_shape(model: Model, chunks: int = 1) -> ModelShape:
    """The sizes that a layout must divide.

    Layers that ``chunks`` stages do not divide are left to the host, which places them by
    flags of its own.
    """
    return ModelShape(
        num_layers=model.num_layers,
        num_heads=model.heads,
        num_query_groups=model.groups,
        num_experts=None if model.experts is None else model.experts.count,
        padded_vocab_size=model.vocab,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        moe_ffn_hidden_size=None if model.experts is None else model.experts.ffn,
        uneven_pipeline=model.num_layers % chunks > 0,
    )


def _fields(kind: type[Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Checked values of a dataclass of whole numbers and switches."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in _PARTS}
    known = [*fields, *(_PARTS if kind is Model else ())]
    for key, value in given.items():
        if key not in fields:
            raise ConfigError(
                f"key '{where}.{key}' is unknown{did_you_mean(str(key), known)}; got {value}; "
                f"keys: {', '.join(known)}"
            )
        _check(f"{where}.{key}", value, is_switch=fields[key].type == "bool")
    for key, field in fields.items():
        if key not in given and field.default is dataclasses.MISSING:
            raise ConfigError(f"{where} lacks {key}; it must have {', '.join(known)}")
    return dict(given)


def _check(key: str, value: object, *, is_switch: bool) -> None:
    if is_switch:
        if type(value) is not bool:
            _refuse(key, value, "true or false")
        return
    least = 0 if key.rpartition(".")[2] in _MAY_BE_ZERO else 1
    if type(value) is not int or not least <= value <= _MOST:
        _refuse(key, value, f"a whole number from {least} to {_MOST}")


def _refuse(key: str, value: object, rule: str) -> NoReturn:
    raise ConfigError(f"{key}={value} is not allowed; {key} must be {rule}")
