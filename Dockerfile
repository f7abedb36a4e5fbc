# MoEvement on NVIDIA's PyTorch container. The container's torch, Transformer Engine, Apex, NCCL and (where it has one)
# nvidia-resiliency-ext stay as they are; what is installed beside them follows from pyproject.toml. The tag is the one
# that Megatron-Core 0.19 pins. No image was built by this project; tests/packaging/test_container.py runs the steps below.
#
#   docker build -t moevement .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 moevement \
#       moevement launch --nproc 8 examples/pretrain_moe/pretrain_gpt.py --config ... --data-path ... --run-dir ...
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3
FROM ${BASE}

# Nothing that pip downloads stays in the image.
ARG PIP_NO_CACHE_DIR=1
WORKDIR /opt/moevement
COPY . .
RUN scripts/install_in_container.sh megatron,report,restart,tokenizers
