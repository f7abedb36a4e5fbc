"""Which folders are packages; everything else of the packaging is in pyproject.toml."""

from setuptools import find_namespace_packages, setup

EXAMPLES = {
    "moevement_cli._examples.simulate": "examples/simulate",
    "moevement_cli._examples.pretrain_moe": "examples/pretrain_moe",
    "moevement_cli._examples.pretrain_moe.configs": "examples/pretrain_moe/configs",
}
"""What `moevement plan deepseek_moe` and `moevement bench` read, where there is no checkout."""

setup(
    packages=[
        *find_namespace_packages(include=["megatron.moevement*", "moevement_core*", "moevement_cli*"]),
        *find_namespace_packages("kernels"),
        *EXAMPLES,
    ],
    package_dir={"moevement_kernels": "kernels/moevement_kernels", **EXAMPLES},
    package_data={
        "moevement_kernels.cuda": ["*.cu", "*.cuh"],
        **{name: ["*.yaml", "*.py"] for name in EXAMPLES},
        "": ["py.typed"],
    },
)
