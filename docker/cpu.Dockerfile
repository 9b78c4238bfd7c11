# Plan, emit, lint, rehearse and train small on a CPU: docker build -f docker/cpu.Dockerfile -t kit:cpu .
# --build-arg TORCH_INDEX=URL, the index of PyTorch's CPU wheels, saves gigabytes.
FROM python:3.12-slim-bookworm
# A pinned version would be gone from the archive with the next one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libaio-dev make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /kit
COPY . .
ARG TORCH_INDEX=
RUN make setup PYTHON=python3 TORCH_INDEX="${TORCH_INDEX}" \
    && rm -rf /root/.cache/pip
ENV PATH="/kit/.venv/bin:${PATH}"
WORKDIR /work
ENTRYPOINT ["kit"]
CMD ["--help"]
