"""Reader of ``--config FILE.yaml``: Megatron's flags by name, so that a preset can be read, diffed and kept with a run.

A file is a mapping of flag names to values. Names may have leading dashes or not, and ``-`` or ``_`` between words.
``true`` gives the bare flag, ``false`` and ``null`` leave the flag out, and a list gives several values.

The reader also accepts the layout of Megatron's functional tests (``MODEL_ARGS``, ``ENV_VARS``). It expands values as
the shell of those tests does: ``[moe_act mlp]`` becomes two values. ``${DATA_PATH}`` is replaced from the file's
``ENV_VARS`` or from the environment.

Flags on the command line override those of a file. A later file overrides an earlier one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from moevement_core.errors import ConfigError

CONFIG_FLAG = "--config"
_RECIPE = "MODEL_ARGS"
"""Key under which a file with the layout of Megatron's functional tests has its flags."""
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


def expand(argv: list[str]) -> list[str]:
    """Return ``argv`` without ``--config FILE``, with the flags of these files before all other arguments.

    So an argument of the command line overrides the same flag in a file.

    Raises:
        ConfigError: a file is missing, is not YAML, or holds something that cannot be a flag.
    """
    from_files: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        if word == CONFIG_FLAG:
            path = next(words, None)
            if path is None:
                raise ConfigError(f"{CONFIG_FLAG}: needs the path of a YAML file")
            from_files += flags_of(Path(path))
        elif word.startswith(CONFIG_FLAG + "="):
            from_files += flags_of(Path(word.split("=", 1)[1]))
        else:
            rest.append(word)
    return from_files + rest


def flags_of(path: Path) -> list[str]:
    """Return the command-line words for the flags in the YAML file at ``path``."""
    flags: list[str] = []
    content = _load(path)
    variables, is_recipe = {**os.environ, **_environment(path, content)}, _RECIPE in content
    for key, value in _model_args(path, content).items():
        flag = "--" + str(key).lstrip("-").replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, list):
            words = [_word(path, flag, item, variables) for item in value]
            # Megatron's recipes write brackets for the shell: YAML reads [a b] as one item, the shell as two words.
            flags += [flag, *(part for word in words for part in (word.split() if is_recipe else [word]))]
        else:
            flags += [flag, _word(path, flag, value, variables)]
    return flags


def environment_of(argv: list[str]) -> dict[str, str]:
    """Return the ``ENV_VARS`` of every configuration file named in ``argv``; a later file overrides an earlier one."""
    variables: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word == CONFIG_FLAG and index + 1 < len(argv):
            path = Path(argv[index + 1])
        elif word.startswith(CONFIG_FLAG + "="):
            path = Path(word.split("=", 1)[1])
        else:
            continue
        variables |= _environment(path, _load(path))
    return variables


def _environment(path: Path, content: Mapping[str, Any]) -> dict[str, str]:
    variables = content.get("ENV_VARS") or {}
    if not isinstance(variables, dict):
        raise ConfigError(f"{path}: ENV_VARS is {type(variables).__name__}; needs a mapping of names to values")
    return {str(key): str(value) for key, value in variables.items()}


def _word(path: Path, flag: str, value: Any, variables: Mapping[str, str]) -> str:
    if isinstance(value, dict):
        raise ConfigError(f"{path}: {flag} is a mapping; needs a number, a string, true, false or a list")

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in variables:
            raise ConfigError(f"{path}: {flag} {value}: {name} is not set; export it, or give it under ENV_VARS")
        return variables[name]

    return _VARIABLE.sub(variable, str(value))


def _model_args(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    arguments = content.get(_RECIPE, content)
    if not isinstance(arguments, dict):
        raise ConfigError(f"{path}: MODEL_ARGS is {type(arguments).__name__}; needs a mapping of flags to values")
    return arguments


def _load(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path}: cannot be read ({error.strerror}); give the path of a file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{CONFIG_FLAG} {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_FLAG} {path}: holds {type(content).__name__}; needs a mapping of flags to values")
    return content
