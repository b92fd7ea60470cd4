# grpo_dist with everything it needs. For NVIDIA GPUs (CUDA 13, driver 580 or newer):
#
#   docker build -t grpo_dist .
#   docker run --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" grpo_dist cluster=single_gpu
#
# For older drivers (525 to 579), with CUDA 12.9:
#
#   docker build --build-arg CUDA=12 -t grpo_dist:cuda12 .
#
# For machines without a GPU:
#
#   docker build --build-arg DEVICE=cpu -t grpo_dist:cpu .
#   docker run --shm-size=4g grpo_dist:cpu algorithm.adv_estimator=grpo
#
# --ipc=host or --shm-size: Ray's object store lives in /dev/shm, and Docker's 64 MB are too few. A tensor parallel engine
# of two GPUs takes 0.7 GB more there, and 0.25 GB for each further GPU.
# For RDMA between machines: --network=host --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1.
# A mounted folder must be writable for user 1000, or run with --user.

ARG PYTHON=3.11

# torch's wheels bring the CUDA libraries and the toolkit brings the driver, so a plain Python image does for both.
FROM python:${PYTHON}-slim-bookworm

ARG DEVICE=gpu
ARG CUDA=13

# g++: Triton and torch build kernels on first use. libnuma: vLLM's CPU backend links to it. rdma-core, ibverbs-providers:
# NCCL looks for them when it starts, and falls back to TCP without them.
# bubblewrap: programs of the policy run in it (docs/environments.md#sandbox).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 rdma-core ibverbs-providers libibverbs1 librdmacm1 bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 grpo \
    && install --directory --owner=grpo --group=grpo /workspace /opt/venv

USER 1000
WORKDIR /workspace

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/home/grpo/.local/bin:$PATH \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN pip install --no-cache-dir --user "uv==0.13.*" && python -m venv /opt/venv

# The packages first: they change seldom, and building this layer takes minutes. FlashInfer's kernels come compiled:
# without them it would compile them at the first start, for which there is no nvcc here.
COPY --chown=grpo:grpo pyproject.toml README.md LICENSE ./
COPY --chown=grpo:grpo constraints ./constraints
COPY --chown=grpo:grpo scripts ./scripts
RUN CUDA="$CUDA" bash scripts/packages.sh "$DEVICE" lora datasets \
    && if [ "$DEVICE" = gpu ]; then vllm download-kernels; fi

COPY --chown=grpo:grpo grpo_dist ./grpo_dist
COPY --chown=grpo:grpo examples ./examples
RUN uv pip install --no-deps --editable .

ENTRYPOINT ["python", "-m", "grpo_dist.main"]
CMD ["--help"]
