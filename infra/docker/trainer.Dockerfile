# The image of training hosts, and of what runs on one host, for amd64 and arm64. From the
# repository's root: docker build --file infra/docker/trainer.Dockerfile --tag megahour/trainer:0.1.0 .
FROM python:3.11-slim-bookworm AS build
# Debian keeps one version of a package: the base's tag pins it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=spark,train,deploy
WORKDIR /source
COPY . .
# All wheels are made here: for arm64 some have to be compiled.
RUN pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
# torch's wheels bring CUDA; the host brings the driver and NVIDIA's container runtime.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index /wheels/*.whl
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 1000 --create-home trainer
USER 1000
WORKDIR /home/trainer
CMD ["megahour", "--help"]
