"""Options that name a plugin, and those with the plugin's own options, checked by its model."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, ValidationError, core_schema

from segtrain import plugins
from segtrain.config.messages import TOLD, did_you_mean, show, validate
from segtrain.errors import ConfigError
from segtrain.plugins import Plugin

# Contexts of a validation: plugins that are not here get stand-ins, or must be here. Without one,
# those of a checkpoint that was read keep their stand-ins.
ONLY_LOOKED_AT, TO_BE_TRAINED = {"plugins": "may be elsewhere"}, {"plugins": "must be here"}


def _told(message: str) -> PydanticCustomError:
    return PydanticCustomError(TOLD, "{message}", {"message": message})


class PluginName:
    """In `Annotated`: plugins of a kind may be named, too.

    beside: who has the other names. own: segtrain, the words of a Literal; library: a library,
        which refuses wrong ones later; none: nobody.
    """

    def __init__(self, kind: str, beside: Literal["own", "library", "none"] = "own") -> None:
        self.kind, self.beside = kind, beside

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.with_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own, names = handler(schema), plugins.names(self.kind)
        return {"anyOf": [own, {"enum": names}]} if names and self.beside == "own" else own

    def _check(self, value: Any, check: Callable[[Any], Any], info: ValidationInfo) -> Any:
        is_own, expected = self.beside != "none", ""
        try:
            check(value)
        except ValidationError as error:
            (first, *_) = error.errors()
            if first["type"] != "literal_error" or not isinstance(value, str):
                raise
            # The word may be a plugin's. Any other error, such as a number, is pydantic's to tell.
            is_own, expected = False, first["ctx"]["expected"]
        try:
            # Of segtrain's own names nobody looks for a package.
            search = plugins.registered if is_own and self.beside == "own" else plugins.find
            plugin = search(self.kind, value)
            if plugin is None and not is_own and info.context is ONLY_LOOKED_AT:
                plugin = plugins.stand_in(self.kind, value)
            elif plugin is None and info.context is not TO_BE_TRAINED:
                plugin = plugins.registered(self.kind, value)
        except ConfigError as error:
            raise _told(str(error)) from None
        if is_own and self.beside == "own" and plugin is not None:
            raise _told(
                f"{show(value)} is segtrain's and that of {plugin.source}; rename the latter"
            )
        if is_own or plugin is not None:
            return value
        hint = did_you_mean(value, plugins.names(self.kind))
        # A misspelt name of segtrain's own: pydantic lists the right ones.
        if expected and not hint and did_you_mean(value, expected.replace("'", "").split(", ")):
            return check(value)  # raises again
        words = f"{expected}, or " if expected else ""
        raise _told(
            f"must be {words}the name of a {self.kind} that plugins import or an installed package "
            f"offers, got {show(value)}{hint}"
        )


class PluginOptions:
    """In `Annotated`: the options of the plugin that the option `key` before it names.

    None without a plugin, or if it has no options; else its model, or, with `plain`, a dict.
    """

    def __init__(self, kind: str, key: str, *, plain: bool = False) -> None:
        self.kind, self.key, self.plain = kind, key, plain

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, _: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        registered = (plugins.registered(self.kind, name) for name in plugins.names(self.kind))
        models = [plugin.options for plugin in registered if plugin and plugin.options is not None]
        schemas = [handler(model.__pydantic_core_schema__) for model in models]
        other = {"type": "object" if self.plain else "null"}
        return {"anyOf": [*schemas, other]} if schemas else other

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        # Also None if that option was refused: then nothing is said of its options.
        name = info.data.get(self.key)
        plugin = None if name is None else plugins.registered(self.kind, name)
        model = None if plugin is None else plugin.options
        is_here = plugin is None or plugin.is_here
        if isinstance(value, BaseModel):
            value = value.model_dump()
        if not isinstance(value, Mapping | None):
            raise _told(f"must be keys and values, got {show(value)}")
        if model is None:
            if value and name is not None and is_here and not self.plain:
                raise _told(f"has no effect: {name} has no options of its own; remove it")
            return dict(value or {}) if self.plain or not is_here else None
        checked = validate(model, value or {})
        if isinstance(checked, list):
            errors = [
                {"type": _told(mistake.message), "loc": mistake.path, "input": None}
                for mistake in checked
            ]
            raise ValidationError.from_exception_data("options", errors)
        return checked.model_dump() if self.plain else checked


def named_plugins(section: BaseModel) -> Iterator[tuple[str, Plugin]]:
    """The plugins that a section names, with the option that does."""
    for key, field in type(section).model_fields.items():
        for marker in field.metadata:
            if isinstance(marker, PluginName):
                plugin = plugins.registered(marker.kind, getattr(section, key))
                if plugin is not None:
                    yield key, plugin


def all_plugins(section: BaseModel) -> list[Plugin]:
    """The plugins that a section and those in it name, each once."""
    named = [plugin for _, plugin in named_plugins(section)]
    for _, value in section:
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, BaseModel):
                named += all_plugins(inner)
    return list(dict.fromkeys(named))
