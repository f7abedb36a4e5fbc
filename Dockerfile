# MoEvement on NVIDIA's PyTorch container. The container's torch, Transformer Engine, Apex, NCCL and (where it has one)
# nvidia-resiliency-ext stay as they are: only what is missing is installed, everything present is a constraint.
#
#   docker build -t moevement .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 moevement \
#       moevement launch --nproc 8 examples/pretrain_moe/pretrain_gpt.py --config ... --data-path ... --run-dir ...
ARG BASE=nvcr.io/nvidia/pytorch:26.04-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

WORKDIR /opt/moevement
COPY . .
RUN pip list --format=freeze > /tmp/before.txt \
    && grep -iE '^(torch|transformer.engine|nvidia|triton|apex|numpy|flash.attn)' /tmp/before.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir --no-deps "megatron-core==0.19.2" \
    && (grep -qi '^nvidia.resiliency.ext' /tmp/before.txt \
        || pip install --no-cache-dir --no-deps -r requirements/nvidia-resiliency-ext.txt) \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt \
        httpx setproctitle defusedxml psutil pyyaml rich tensorboard matplotlib pydantic regex six tokenizers \
        transformers sentencepiece xxhash \
    && pip install --no-cache-dir --no-deps --no-build-isolation --compile . \
    && python -c 'import megatron.moevement, moevement_core, moevement_cli, xxhash' \
    && pip list --format=freeze | grep -i '^torch==' | diff - <(grep -i '^torch==' /tmp/before.txt)
