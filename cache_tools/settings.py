"""Configuration: a frozen dataclass is the single source of flags, YAML keys, defaults and help texts."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import io
import itertools
import math
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from cache_tools.errors import ConfigError, DflashError

ConfigT = TypeVar("ConfigT")
_SCALARS: dict[type, click.ParamType[Any]] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    Path: click.Path(path_type=Path),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    """What an annotation allows: one scalar type, one of `choices`, or any number of them."""

    scalar: type
    choices: tuple[str, ...] = ()
    repeated: bool = False
    optional: bool = False


def field_docs(config_class: type) -> dict[str, str]:
    """The string literal below each field of a dataclass, by field name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    docs: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            docs[node.target.id] = inspect.cleandoc(below.value.value).replace("\n", " ")
    return docs


def config_options(
    config_class: type[ConfigT],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a click command one flag per field of `config_class`, plus `--config FILE.yaml`.

    The decorated function gets the checked configuration as its first argument `config`. A flag on the command line
    wins over the YAML file, which wins over the field's default. Fields without a default must come from either.

    Raises (inside the command) ConfigError for unknown YAML keys, wrong types and missing values.
    """
    shapes = _shapes(config_class)
    docs = field_docs(config_class)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(*, config: Path | None, **values: Any) -> None:
            context = click.get_current_context()
            from_user = {n for n in shapes if context.get_parameter_source(n) is ParameterSource.COMMANDLINE}
            given = {name: values[name] for name in shapes if name in from_user}
            rest = {name: value for name, value in values.items() if name not in shapes}
            function(config=load_config(config_class, config, given), **rest)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
        decorated: Callable[..., None] = command
        for field in reversed(dataclasses.fields(config_class)):  # type: ignore[arg-type]
            decorated = _option(field, shapes[field.name], docs[field.name])(decorated)
        return click.option(
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="YAML file with any of the settings below (underscores or dashes). Flags win over it.",
        )(decorated)

    return decorate


def load_config(config_class: type[ConfigT], path: Path | None, given: Mapping[str, Any]) -> ConfigT:
    """Builds a configuration from a YAML file and the values in `given`, which win."""
    shapes = _shapes(config_class)
    values = _read_yaml(config_class, path, shapes) if path is not None else {}
    values.update({name: _coerce(name, value, shapes[name], "flag") for name, value in given.items()})
    missing = [
        field.name
        for field in dataclasses.fields(config_class)  # type: ignore[arg-type]
        if field.name not in values and is_required(field)
    ]
    if missing:
        flags = ", ".join(flag_name(name) for name in missing)
        raise ConfigError(f"missing setting: {flags}", fix="give the flag, or the key in the file named by --config")
    return config_class(**values)


def to_plain(config: Any) -> dict[str, Any]:
    """A configuration as plain YAML/JSON values, in field order; what was used can be written beside a run."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            value = [str(item) if isinstance(item, Path) else item for item in value]
        plain[field.name] = str(value) if isinstance(value, Path) else value
    return plain


def flag_name(field_name: str) -> str:
    """`batch_tokens` -> `--batch-tokens`."""
    return "--" + field_name.replace("_", "-")


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def shown_default(field: dataclasses.Field[Any]) -> str:
    """A field's default as one would write it on the command line; empty for none."""
    default = field.default
    if default is None or default is dataclasses.MISSING:
        return ""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)


class CommandGroup(click.Group):
    """A click group whose commands report a DflashError as text with its exit code, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the chosen command. Exit codes: 0 worked, 1 failed, 2 used wrongly, 130 interrupted."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # what cannot be encoded is shown escaped
        try:
            return super().invoke(ctx)
        except DflashError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except BrokenPipeError:
            # The reader of our output went away (`| head`): not an error, but Python would print one at exit.
            sys.stderr.close()
            ctx.exit(0)
        except OSError as error:  # a name too long, a file gone, nowhere to print
            click.echo(f"error: the operating system refuses\n  got: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(130)
        return None


def _option(field: dataclasses.Field[Any], shape: _Shape, doc: str) -> Callable[[Any], Any]:
    flag = flag_name(field.name)
    shown = shown_default(field)
    note = "  [required]" if is_required(field) else f"  [default: {shown}]" if shown else ""
    many = "  Repeat it." if shape.scalar is Path else "  Repeat it, or separate with commas."
    help_text = doc + (many if shape.repeated else "") + note
    if shape.scalar is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", field.name, default=None, help=help_text)
    kind = click.Choice(shape.choices) if shape.choices else _SCALARS[shape.scalar]
    if shape.repeated:
        return click.option(flag, field.name, type=click.STRING, multiple=True, help=help_text)
    return click.option(flag, field.name, type=kind, default=None, help=help_text)


def _shapes(config_class: type) -> dict[str, _Shape]:
    hints = typing.get_type_hints(config_class)
    return {field.name: _shape(field.name, hints[field.name]) for field in dataclasses.fields(config_class)}


def _shape(name: str, annotation: Any) -> _Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [item for item in arguments if item is not type(None)]
        assert len(inner) == 1, f"{name}: only X | None is supported, got {annotation}"
        return dataclasses.replace(_shape(name, inner[0]), optional=True)
    if origin is Literal:
        return _Shape(scalar=str, choices=arguments)
    if origin is tuple:
        assert len(arguments) == 2 and arguments[1] is ..., f"{name}: only tuple[X, ...] is supported"
        return dataclasses.replace(_shape(name, arguments[0]), repeated=True)
    assert annotation is bool or annotation in _SCALARS, f"{name}: unsupported annotation {annotation}"
    return _Shape(scalar=annotation)


def _read_yaml(config_class: type, path: Path, shapes: Mapping[str, _Shape]) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("the configuration file is not valid YAML", where=path, got=error) from error
    except OSError as error:
        raise ConfigError("the configuration file cannot be read", where=path, got=error) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            "the configuration file must hold a mapping of settings",
            where=path,
            got=type(loaded).__name__,
            expected="lines of the form `key: value`",
        )
    values: dict[str, Any] = {}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name not in shapes:
            close = difflib.get_close_matches(name, shapes, n=1)
            raise ConfigError(
                f"unknown setting {key!r}",
                where=path,
                expected=f"one of {', '.join(shapes)}",
                fix=f"did you mean {close[0]!r}?" if close else "remove it, or see --help",
            )
        if name in values:
            raise ConfigError(f"setting {key!r} is given twice", where=path, fix="keep one of them")
        values[name] = _coerce(name, value, shapes[name], str(path))
    return values


def _coerce(name: str, value: Any, shape: _Shape, where: str) -> Any:
    """Turns a YAML value, or a string or tuple of strings from a flag, into the field's type."""
    if value is None:
        if shape.optional:
            return None
        raise _wrong(name, value, shape, where)
    if not shape.repeated:
        return _scalar(name, value, shape, where)
    items = value if isinstance(value, list | tuple) else [value]
    if shape.scalar is not Path:  # a path may hold a comma
        items = [piece for item in items for piece in (_split(item) if isinstance(item, str) else [item])]
    return tuple(_scalar(name, item.strip() if isinstance(item, str) else item, shape, where) for item in items)


def _split(text: str) -> list[str]:
    """Pieces between commas, but not between those inside double quotes or brackets, which belong to a value."""
    pieces, first, depth, quoted = [], 0, 0, False
    for position, character in enumerate(text):
        if character == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif not quoted and character in "[{":
            depth += 1
        elif not quoted and character in "]}":
            depth -= 1
        elif not quoted and depth == 0 and character == ",":
            pieces.append(text[first:position])
            first = position + 1
    return [*pieces, text[first:]]


def _scalar(name: str, value: Any, shape: _Shape, where: str) -> Any:
    if shape.choices and value not in shape.choices:
        raise _wrong(name, value, shape, where)
    if shape.scalar is bool:
        if isinstance(value, bool):
            return value
        raise _wrong(name, value, shape, where)
    if isinstance(value, bool | list | dict):
        raise _wrong(name, value, shape, where)
    if shape.scalar is int and isinstance(value, float):
        raise _wrong(name, value, shape, where)
    try:
        scalar = shape.scalar(value)
    except (TypeError, ValueError) as error:
        raise _wrong(name, value, shape, where) from error
    if shape.scalar is float and math.isnan(scalar):  # passes every comparison with a limit
        raise _wrong(name, value, shape, where)
    return scalar


def _wrong(name: str, value: Any, shape: _Shape, where: str) -> ConfigError:
    scalar = "a finite number" if shape.scalar is float else shape.scalar.__name__
    kind = " | ".join(shape.choices) if shape.choices else scalar
    return ConfigError(
        f"setting {name!r} has a wrong value",
        where=where,
        got=repr(value),
        expected=f"a list of {kind}" if shape.repeated else kind,
    )
