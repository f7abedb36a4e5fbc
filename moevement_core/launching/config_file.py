"""``--config FILE.yaml``: Megatron's flags by name, so that a preset can be read, diffed and kept with a run.

A file is a mapping of flag names (with or without the leading dashes, with ``-`` or ``_``) to values: ``true`` gives
the bare flag, ``false`` and ``null`` leave it out, a list gives several values. A file in the layout of Megatron's
functional tests (``MODEL_ARGS``, ``ENV_VARS``) is taken too. Flags on the command line come after those of the file
and win; of two files the later one wins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moevement_core.errors import ConfigError

CONFIG_FLAG = "--config"


def expand(argv: list[str]) -> list[str]:
    """``argv`` with every ``--config FILE`` replaced by the file's flags, put in front of all others.

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
    """The flags that the YAML file at ``path`` stands for."""
    flags: list[str] = []
    for key, value in _model_args(path).items():
        flag = "--" + str(key).lstrip("-").replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False or value is None:
            continue
        elif isinstance(value, list):
            flags += [flag, *(_word(path, flag, item) for item in value)]
        else:
            flags += [flag, _word(path, flag, value)]
    return flags


def environment_of(argv: list[str]) -> dict[str, str]:
    """``ENV_VARS`` of every configuration file named in ``argv``."""
    variables: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word == CONFIG_FLAG and index + 1 < len(argv):
            path = Path(argv[index + 1])
        elif word.startswith(CONFIG_FLAG + "="):
            path = Path(word.split("=", 1)[1])
        else:
            continue
        found = _load(path).get("ENV_VARS") or {}
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: ENV_VARS is {type(found).__name__}; needs a mapping of names to values")
        variables |= {str(key): str(value) for key, value in found.items()}
    return variables


def _word(path: Path, flag: str, value: Any) -> str:
    if isinstance(value, dict):
        raise ConfigError(f"{path}: {flag} is a mapping; needs a number, a string, true, false or a list")
    return str(value)


def _model_args(path: Path) -> dict[str, Any]:
    content = _load(path)
    arguments = content.get("MODEL_ARGS", content)
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
