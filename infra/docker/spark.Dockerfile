# The image of drivers and executors on Kubernetes, for amd64 and arm64. From the repository's root:
# docker build --file infra/docker/spark.Dockerfile --tag megahour/spark:0.1.0 .
# Rooms of `ingest --placements` need the extra `demo`, whose babble is of espeak-ng (GPL-3).
FROM python:3.11-slim-bookworm AS build
# Debian keeps one version of a package: the base's tag pins it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ARG EXTRAS=spark,train,demo
WORKDIR /source
COPY . .
# All wheels are made here: for arm64 some have to be compiled.
RUN pip wheel --no-cache-dir --constraint constraints.txt --wheel-dir /wheels ".[$EXTRAS]"

FROM python:3.11-slim-bookworm
# tini reaps Python's workers, which a JVM as the first process would not.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless tini \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s "java-17-openjdk-$(dpkg --print-architecture)" /usr/lib/jvm/java-17
# pyspark's wheel is a whole Spark, in the version that constraints.txt pins.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index /wheels/*.whl
COPY jobs/*.py /opt/megahour/jobs/
COPY infra/docker/gpu_addresses.sh /opt/megahour/infra/docker/
COPY infra/docker/spark_entrypoint.sh /opt/
ENV JAVA_HOME=/usr/lib/jvm/java-17 \
    SPARK_HOME=/usr/local/lib/python3.11/site-packages/pyspark
RUN useradd --uid 185 --create-home spark
USER 185
WORKDIR /home/spark
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/spark_entrypoint.sh"]
