# grpo_dist with everything it needs. For NVIDIA GPUs (CUDA 13, driver 580 or newer):
#
#   docker build -t grpo_dist .
#   docker run --gpus all --ipc=host -v "$PWD/outputs:/workspace/outputs" grpo_dist cluster=single_gpu
#
# For machines without a GPU:
#
#   docker build --build-arg DEVICE=cpu -t grpo_dist:cpu .
#   docker run --shm-size=4g grpo_dist:cpu algorithm.adv_estimator=grpo
#
# --ipc=host or --shm-size: Ray's object store lives in /dev/shm, and Docker's 64 MB are too few.
# A mounted folder must be writable for user 1000, or run with --user.

# torch's wheels bring the CUDA libraries and the toolkit brings the driver, so a plain Python image does for both.
FROM python:3.11-slim-bookworm

ARG DEVICE=gpu

# g++: Triton and torch build kernels on first use. libnuma: vLLM's CPU backend links to it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 grpo \
    && install --directory --owner=grpo --group=grpo /workspace /opt/venv

USER 1000
WORKDIR /workspace

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/home/grpo/.local/bin:$PATH \
    UV_PROJECT_ENVIRONMENT=/opt/venv \
    UV_LINK_MODE=copy \
    UV_NO_CACHE=1 \
    UV_COMPILE_BYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN pip install --no-cache-dir --user "uv==0.13.*" && python -m venv /opt/venv

# The packages first: they change seldom, and building this layer takes minutes. The CPU build of torch is on PyTorch's
# own index only.
COPY --chown=grpo:grpo pyproject.toml README.md LICENSE ./
RUN case "$DEVICE" in \
      gpu) ;; \
      cpu) export UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu UV_INDEX_STRATEGY=unsafe-best-match ;; \
      *) echo "DEVICE=$DEVICE: must be gpu or cpu" >&2; exit 1 ;; \
    esac \
    && uv sync --no-install-project --extra "$DEVICE"

COPY --chown=grpo:grpo grpo_dist ./grpo_dist
COPY --chown=grpo:grpo examples ./examples
COPY --chown=grpo:grpo scripts ./scripts
RUN uv pip install --no-deps --editable .

ENTRYPOINT ["python", "-m", "grpo_dist.main"]
CMD ["--help"]
