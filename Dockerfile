# Two images of this package. Versions are pinned: they are part of what decides the bits of a run.
#
#   docker build -t megatron-bitwise .                     NVIDIA GPUs
#   docker build -t megatron-bitwise:cpu --target cpu .    no GPU: data preparation, small runs
#
#   docker run --rm megatron-bitwise:cpu bash examples/tiny_cpu.sh
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 megatron-bitwise bash examples/nemotron3_nano_proxy.sh

FROM python:3.12.12-slim-bookworm AS cpu
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
WORKDIR /opt/megatron-bitwise
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0
COPY pyproject.toml setup.py README.md LICENSE tools/image_versions.txt ./
COPY megatron ./megatron
RUN pip install --no-cache-dir --constraint image_versions.txt --editable ".[data,observe]"
COPY . .

# PyTorch 2.12, CUDA 13.2, NCCL 2.30, cuDNN, Transformer Engine and apex come with the container.
FROM nvcr.io/nvidia/pytorch:26.05-py3 AS gpu
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
WORKDIR /opt/megatron-bitwise
# Built against the container's torch, which must not be replaced: no dependencies, no build isolation. Both packages
# choose the architectures themselves. MAX_JOBS bounds the memory of the build.
ENV MAX_JOBS=8
RUN pip install --no-cache-dir --no-deps nvidia-cudnn-frontend==1.32.0 && \
    CAUSAL_CONV1D_FORCE_BUILD=TRUE \
    pip install --no-cache-dir --no-deps --no-build-isolation causal-conv1d==1.7.0 && \
    MAMBA_FORCE_BUILD=TRUE \
    pip install --no-cache-dir --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
COPY pyproject.toml setup.py README.md LICENSE tools/image_versions.txt ./
COPY megatron ./megatron
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . && \
    pip install --no-cache-dir --requirement image_versions.txt
COPY . .
