"""Stand-in for Transformer Engine, which Megatron-Bridge's module of fused LoRA layers imports without a condition.

The annotations of that module need a name. No other module sees the stand-in, so they know that there is no
Transformer Engine. Python imports this module at its start if the folder is in PYTHONPATH.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

_import = builtins.__import__
_engine: Any = ModuleType("transformer_engine")
_engine.pytorch = SimpleNamespace(ops=SimpleNamespace(Sequential=None))


def _import_with_stand_in(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    importer = (globals or {}).get("__name__")
    if name == "transformer_engine.pytorch" and importer == "megatron.bridge.peft.lora_layers":
        module: ModuleType = _engine
        return module
    return _import(name, globals, locals, fromlist or (), level)


builtins.__import__ = _import_with_stand_in
