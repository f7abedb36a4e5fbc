"""Script that trains by a recipe of Megatron-Bridge for GPT models.

Its arguments are the recipe's name, and settings to override in Hydra's form, such as ``model.num_layers=2``.
"""

from __future__ import annotations

import sys

from megatron.moevement.bridge import recipes
from moevement_core.errors import ConfigError


def main() -> None:
    """Train to the end. Every rank calls it.

    Raises:
        ConfigError: there is no such recipe, or it does not have a setting that is to be overridden.
    """
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides

    name, *overrides = sys.argv[1:]
    config = recipes.load(name)
    try:
        process_config_with_overrides(config, cli_overrides=overrides)
    except OverridesError as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}; give settings such as model.num_layers=2") from None
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
