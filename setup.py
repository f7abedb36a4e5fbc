"""Packaging of MoEvement on Megatron-Core.

The requirements are ranges, so that inside NVIDIA's PyTorch container the installed torch, Transformer Engine and
nvidia-resiliency-ext satisfy them and are never replaced. Exact versions are pinned in requirements/lock.txt.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

EXAMPLES = {
    "moevement_cli._examples.simulate": "examples/simulate",
    "moevement_cli._examples.pretrain_moe": "examples/pretrain_moe",
    "moevement_cli._examples.pretrain_moe.configs": "examples/pretrain_moe/configs",
}
"""What `moevement plan deepseek_moe` and `moevement bench` read, where there is no checkout."""

version: dict[str, str] = {}
for line in Path("moevement_core/__init__.py").read_text(encoding="utf-8").splitlines():
    if line.startswith("__version__"):
        exec(line, version)

setup(
    name="moevement-megatron",
    version=version["__version__"],
    description="Native fault tolerance for training Mixture-of-Experts models with Megatron-Core",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
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
    license="Apache-2.0",
    license_files=["LICENSE"],
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.19,<0.20",
        "nvidia-resiliency-ext>=0.6,<0.8",
        "numpy>=1.26",
        "prometheus-client>=0.20",
        "psutil>=5.9",
        "pyyaml>=6",
        "rich>=13",
        "tensorboard>=2.16",
        "xxhash>=3.4",
    ],
    extras_require={
        # Transformer Engine and Apex are found at run time; both come with NVIDIA's container. The package named
        # apex on the public index is another project and must never be installed.
        "gpu": ["triton>=3.2"],
        "report": ["matplotlib>=3.8"],
        "tokenizers": ["transformers>=4.40", "sentencepiece>=0.2"],
        "dev": ["pytest>=8", "hypothesis>=6", "galois>=0.4", "ruff>=0.9", "mypy>=1.14", "types-PyYAML", "types-psutil"],
    },
    entry_points={"console_scripts": ["moevement = moevement_cli.main:main"]},
)
